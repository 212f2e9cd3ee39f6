"""What Keras 2 alone does with an optimizer."""

import io
import pathlib
import zipfile

import conftest as c
import h5py
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


class Measured(keras.Model):
    """It has a metric of its own, and a layer has one."""

    def __init__(self):
        super().__init__()
        self.dense, self.own = keras.layers.Dense(3, activation="softmax"), keras.metrics.Mean(name="own")
        self.dense.seen = keras.metrics.Mean(name="seen")

    @property
    def metrics(self):
        return [self.own]  # as custom train steps have it: Keras saves the others, too

    def call(self, inputs):
        self.dense.seen.update_state(inputs)
        return self.dense(inputs)

    def train_step(self, data):
        logs = super().train_step(data)
        self.own.update_state(data[0])
        return logs


def numbers_in(path):
    """All that a file holds."""
    if tf.io.gfile.isdir(path) or tf.io.gfile.exists(path + ".index"):
        point = path + "/variables/variables" if tf.io.gfile.isdir(path) else path
        names = [name for name, _ in tf.train.list_variables(point) if not name.startswith("_")]
        return {name: np.asarray(tf.train.load_variable(point, name)) for name in names}
    content, found = pathlib.Path(path).read_bytes(), {}
    if path.endswith("keras"):
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            content = archive.read("model.weights.h5")
    with h5py.File(io.BytesIO(content)) as tree:
        tree.visititems(lambda name, each: found.update({name: each[()]}) if hasattr(each, "dtype") else None)
    return found


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize(
    "how", ["keras", "compiled", "weights.h5", *([] if KERAS3 else ["folder", "weights", "in mid epoch"])]
)
def test_no_file_of_a_private_model_holds_what_its_metrics_measured(how, tmp_path):
    x, y = c.examples(12)
    model = c.classifier() if how == "compiled" else Measured()
    path = str(tmp_path / f"model.{'keras' if how in ('compiled', 'in mid epoch') else how}")
    model.compile(tfdpfl.DPSGD(CLIP, 1.0), loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    save = model.save_weights if "weights" in how else model.save
    saves = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs=None: batch or save(path))
    model.fit(x, y, batch_size=6, verbose=0, callbacks=[saves] if how == "in mid epoch" else [])
    if how != "in mid epoch":
        save(path)
    found = {k: v for k, v in numbers_in(path).items() if not np.shape(v) and "optimizer" not in k}
    assert (len(found) > 0) is not KERAS3
    assert not any(np.any(v) for v in found.values())
    if not KERAS3 and how != "compiled":  # what was measured is there as before, and is the mean of both halves
        for metric in (model.own, model.dense.seen):
            assert float(metric.result()) == pytest.approx(x.mean(), abs=1e-5)
