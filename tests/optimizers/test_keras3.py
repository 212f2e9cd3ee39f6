"""What Keras 3 alone does with an optimizer."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf
from optimizer_cases import CLIP, assert_same, float16_model, loss_of, sgd

keras = tf.keras
KERAS3 = c.keras3()


@pytest.mark.skipif(not KERAS3, reason="Keras 2 hands the scaled loss to the optimizer")
@pytest.mark.parametrize("by", ["the policy", "hand, k = 2"])
@pytest.mark.slow
def test_the_loss_scaling_that_keras_3_adds_by_itself_trains_and_keeps_the_noise(by, tmp_path):
    x, y = c.examples(12)
    updates, k = [], 2 if "k" in by else 1
    keras.config.set_dtype_policy("mixed_float16" if by == "the policy" else "float32")
    try:
        for z in (0.0, 1.0):
            inner = sgd(multiplier=z, seed=1, gradient_accumulation_steps=k)
            model = float16_model(inner if by == "the policy" else keras.optimizers.LossScaleOptimizer(inner))
            assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
            step = lambda m=model: [m.train_on_batch(x[i::k], y[i::k]) for i in range(k)]
            updates.append(c.flat(c.update_of(model, step)))
            assert inner.executed == [(z / k, 1)] and int(inner.iterations) == 1
            model.save(tmp_path / "m.keras")
            again = keras.models.load_model(tmp_path / "m.keras")
            assert again.optimizer.inner_optimizer.executed == [(z / k, 1)]
            again.train_on_batch(x, y)
    finally:
        keras.config.set_dtype_policy("float32")
    want = c.flat([-g / 12 for g in c.clipped_sum(c.weights(), x, y, CLIP)])
    np.testing.assert_allclose(updates[0], want, rtol=0.05, atol=5e-3)
    plain = c.compiled(sgd(multiplier=1.0, seed=1))
    plain = c.flat(c.update_of(plain, lambda: plain.train_on_batch(x, y)))
    np.testing.assert_allclose(updates[1] - updates[0], plain - want, atol=5e-3)


@pytest.mark.skipif(not KERAS3, reason="Keras 2's is tested above")
def test_an_example_that_overflows_neither_stops_a_step_nor_moves_the_loss_scale():
    """Both would tell of it: the scale is saved, and a step is seen."""
    x, y = c.examples(12)
    x[3] = 1e38
    model = float16_model(keras.optimizers.LossScaleOptimizer(sgd(expected_batch_size=12)))
    keep = np.delete(np.arange(12), 3)
    update = c.update_of(model, lambda: model.train_on_batch(x, y))
    want = [-g / 12 for g in c.clipped_sum(c.weights(), x[keep], y[keep], CLIP)]
    assert_same(update, want, rtol=0.05, atol=5e-3)
    assert float(model.optimizer.dynamic_scale) == 2.0**15 and int(model.optimizer.step_counter) == 0
    assert model.optimizer.inner_optimizer.num_nonfinite == 1


@pytest.mark.skipif(not KERAS3, reason="loss_scale_factor came with Keras 3")
def test_a_fixed_loss_scale_factor_changes_nothing():
    x, y = c.examples(12)
    model = c.compiled(sgd(loss_scale_factor=64.0))
    update = c.update_of(model, lambda: model.train_on_batch(x, y))
    assert_same(update, [-g / 12 for g in c.clipped_sum(c.weights(), x, y, CLIP)])


@pytest.mark.skipif(not KERAS3, reason="Keras 2 hands the loss to compute_gradients")
def test_the_gradients_that_keras_3_brings_are_replaced_by_private_ones():
    x, y = c.examples(6)
    model, optimizer = c.classifier(), sgd()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        loss = loss_of(model, x, y)
        with tf.GradientTape() as tape:
            raw = loss_of(model, x, y)
        gradients = tape.gradient(raw, model.trainable_variables)
        optimizer.scale_loss(loss)
        optimizer.apply([1e3 * g for g in gradients], model.trainable_variables)

    update = c.update_of(model, lambda: step(tf.constant(x), tf.constant(y)))
    assert_same(update, [-g / 6 for g in c.clipped_sum(c.weights(), x, y, CLIP)])
