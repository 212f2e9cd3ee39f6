"""What Keras 2 alone does with an optimizer."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf
from optimizer_cases import CLIP, assert_same, float16_model, sgd

import tfdpfl
from tfdpfl.optimizers import make_dp_optimizer_class

keras = tf.keras
KERAS3 = c.keras3()


@pytest.mark.skipif(KERAS3, reason="Keras 3 makes the optimizer's variables before it traces a step")
def test_a_step_is_traced_once_though_the_optimizers_variables_are_new():
    x, y = c.examples(12)
    model, traced = c.classifier(), []

    def loss(y, outputs):
        traced.append(outputs)
        return c.cross_entropy()(y, outputs)

    model.compile(tfdpfl.DPAdam(CLIP, 1.0, use_ema=True), loss=loss)
    model.fit(x, y, batch_size=5, verbose=0)  # a batch of known size is traced once more, with its size free
    assert len(traced) == 1
    slots = [v for v in model.optimizer.variables if v.shape.rank]
    assert {"m", "v", "average"} <= {part for v in slots for part in v.name.split("/")}
    assert all(np.any(v.numpy()) for v in slots)


@pytest.mark.slow
@pytest.mark.skipif(KERAS3, reason="Keras 2 hands the scaled loss to compute_gradients; Keras 3 does not")
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**15])
def test_under_a_loss_scale_the_unscaled_gradient_is_clipped(scale):
    x, y = c.examples(12)
    inner = sgd(clip=0.05)
    model = float16_model(keras.mixed_precision.LossScaleOptimizer(inner, dynamic=False, initial_scale=scale))
    update = c.update_of(model, lambda: model.train_on_batch(x, y))
    assert_same(update, [-g / 12 for g in c.clipped_sum(c.weights(), x, y, 0.05)], rtol=0.05, atol=2e-4)
    assert inner.num_dp_steps == 1


@pytest.mark.skipif(KERAS3, reason="Keras 2 wraps the optimizer by the global policy only")
@pytest.mark.slow
def test_the_wrapper_that_keras_2_adds_by_itself_trains_and_keeps_the_noise():
    x, y = c.examples(12)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        quiet, loud = (float16_model(sgd(multiplier=z, seed=1)) for z in (0.0, 1.0))
        updates = [c.flat(c.update_of(m, lambda m=m: m.train_on_batch(x, y))) for m in (quiet, loud)]
    finally:
        keras.mixed_precision.set_global_policy("float32")
    assert isinstance(quiet.optimizer, keras.mixed_precision.LossScaleOptimizer)
    want = c.flat([-g / 12 for g in c.clipped_sum(c.weights(), x, y, CLIP)])
    np.testing.assert_allclose(updates[0], want, rtol=0.05, atol=5e-3)
    plain = c.compiled(sgd(multiplier=1.0, seed=1))
    plain = c.flat(c.update_of(plain, lambda: plain.train_on_batch(x, y)))
    np.testing.assert_allclose(updates[1] - updates[0], plain - want, atol=5e-3)


@pytest.mark.skipif(KERAS3, reason="Keras 3 has only warning stubs of the legacy optimizers")
def test_legacy_optimizers_are_refused_with_the_mend():
    with pytest.raises(TypeError, match=r"use tf\.keras\.optimizers"):
        make_dp_optimizer_class(keras.optimizers.legacy.SGD)
