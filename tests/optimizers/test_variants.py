"""Adam without the noise's bias, averaged weights, frozen backbones and LoRA, several devices."""

import os
import subprocess
import sys
from pathlib import Path

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import PrivacyError, callbacks

keras = tf.keras
KERAS3 = c.keras3()
CLIP = 0.6
X, Y = c.examples(12)

# -- bias-corrected Adam -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("floor", [None, 1e-3])
def test_bias_corrected_adam_takes_the_noises_variance_off_the_second_moment(floor):
    """Of noise too small to be seen in the weights' last digits φ is as it is said, and the update numpy's."""
    z, size, rate, betas = 2.0, 12, 0.05, (0.9, 0.99)
    of_adam = {"learning_rate": rate, "beta_1": betas[0], "beta_2": betas[1]}
    optimizer = tfdpfl.DPAdamBC(CLIP, z, expected_batch_size=size, variance_floor=floor, **of_adam)
    optimizer._dp.source.gaussian = lambda shapes, *_: [tf.zeros(s) for s in shapes]  # noise off, price and φ on
    model = c.compiled(optimizer)
    phi = (z * CLIP / size) ** 2
    values, m, v = c.weights(), 0.0, 0.0
    for t in range(1, 4):
        model.train_on_batch(X, Y)
        g = c.flat(c.clipped_sum(values, X, Y, CLIP)) / size
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
        least = phi / 10 if floor is None else floor
        scale = np.sqrt(np.maximum(v / (1 - betas[1] ** t) - phi, least)) + 1e-7
        flat = c.flat(values) - rate * m / (1 - betas[0] ** t) / scale
        ends = np.cumsum([w.size for w in values])
        values = [part.reshape(w.shape) for part, w in zip(np.split(flat, ends[:-1]), values, strict=True)]
        np.testing.assert_allclose(c.flat(model.get_weights()), flat, atol=2e-5)
    assert np.any(v / (1 - betas[1] ** 3) < phi) and model.optimizer.executed == [(z, 3)]
    again = tfdpfl.DPAdamBC.from_config(model.optimizer.get_config())
    assert again.get_config()["variance_floor"] == floor


@pytest.mark.parametrize(
    "clip, given, message",
    [(1.0, {}, "give it expected_batch_size"), (tfdpfl.AdaptiveClip(), {"expected_batch_size": 4}, "not change"),
     (1.0, {"expected_batch_size": 4, "amsgrad": True}, "amsgrad"), (1.0, {"variance_floor": 0.0}, "variance_floor=0")],
)  # fmt: skip
def test_bias_corrected_adam_refuses_what_it_cannot_correct(clip, given, message):
    with pytest.raises(ValueError, match=message):
        c.compiled(tfdpfl.DPAdamBC(clip, 1.0, **given)).train_on_batch(X, Y)


# -- averaged weights --------------------------------------------------------------------------------------------


class Weights(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.after, self.validated = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.after.append(c.flat(self.model.get_weights()))

    def on_test_begin(self, logs=None):
        self.validated.append(c.flat(self.model.get_weights()))


@pytest.mark.slow
def test_weights_are_averaged_over_updates_and_training_goes_on_from_the_last(recwarn):
    averaged, seen = callbacks.AveragedWeights(decay=0.5), Weights()
    model = c.compiled(tfdpfl.DPSGD(CLIP, 1.0, learning_rate=0.3, gradient_accumulation_steps=2))
    watched = callbacks.PrivacyBudget(delta=1e-3, accountant="rdp")
    model.fit(X, Y, batch_size=3, epochs=2, validation_data=(X, Y), callbacks=[watched, averaged, seen], verbose=0)
    average = seen.after[1]
    for t, after in enumerate(seen.after[1::2], 1):
        stays = min(0.5, (1 + t) / (10 + t))
        average = stays * average + (1 - stays) * after
        if t == 2:
            np.testing.assert_allclose(seen.validated[0], average, atol=1e-6)
            np.testing.assert_array_equal(seen.after[4], seen.after[3])  # a part: from the weights, not the averages
    np.testing.assert_allclose(c.flat(model.get_weights()), average, atol=1e-6)
    model.fit(X, Y, batch_size=3, callbacks=[watched], verbose=0)
    assert not [w for w in recwarn if "not those that private steps left" in str(w.message)]
    with pytest.raises(ValueError, match="decay"):
        callbacks.AveragedWeights(decay=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before", "after"])
def test_the_model_that_is_restored_or_saved_is_the_averaged_one_that_was_best(place, tmp_path):
    model = c.compiled(tfdpfl.DPSGD(CLIP, 1.0, learning_rate=0.3, seed=1))
    path = str(tmp_path / "best.weights.h5")
    stop = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=9, restore_best_weights=True)
    best = keras.callbacks.ModelCheckpoint(path, "val_loss", mode="max", save_best_only=True, save_weights_only=True)
    averaged = callbacks.AveragedWeights(decay=0.5)
    others = [averaged, stop, best] if place == "before" else [stop, best, averaged]
    seen = model.fit(X, Y, batch_size=3, epochs=4, validation_data=(X, Y), callbacks=others, verbose=0)
    losses = seen.history["val_loss"]
    assert losses.index(max(losses)) < 3  # the last model is another one
    if c.keras3():  # Keras 2 restores only where it stops
        np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), max(losses), rtol=1e-5)
    model.load_weights(path)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), max(losses), rtol=1e-5)


def test_averages_are_refused_where_updates_are_not_seen():
    model = c.compiled(tfdpfl.DPSGD(CLIP, 1.0), steps_per_execution=4)
    with pytest.raises(ValueError, match=r"steps_per_execution=4.*use_ema=True, ema_momentum=0.5"):
        model.fit(X, Y, batch_size=3, callbacks=[callbacks.AveragedWeights(decay=0.5)], verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [False, True])
def test_averages_of_keras_are_no_weights_from_outside(swaps, recwarn):
    model = c.compiled(tfdpfl.DPSGD(CLIP, 1.0, learning_rate=0.3, use_ema=True, ema_momentum=0.5))
    budget = callbacks.PrivacyBudget(delta=1e-3, accountant="rdp")
    others = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if swaps and c.keras3() else []
    for _ in range(2):
        model.fit(X, Y, batch_size=3, epochs=2, callbacks=[budget, *others], verbose=0)
    said = "not those that private steps left"
    assert not [w for w in recwarn if said in str(w.message)]
    model.set_weights([w + 1 for w in model.get_weights()])
    with pytest.warns(UserWarning, match=said):
        model.fit(X, Y, batch_size=3, callbacks=[budget, *others], verbose=0)


# -- frozen backbones --------------------------------------------------------------------------------------------


def adapted(rank=2):
    backbone = keras.layers.Dense(64, activation="tanh", name="backbone")
    head = keras.layers.Dense(c.CLASSES, name="head")
    model = keras.Sequential([keras.Input((c.WIDTH,)), backbone, head])
    if rank and KERAS3:
        backbone.enable_lora(rank)
        head.enable_lora(rank)
    elif not rank:
        backbone.trainable = False
    model.compile(tfdpfl.DPAdam(CLIP, 1.0, learning_rate=0.1), loss=c.cross_entropy())
    return model


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.skipif(not KERAS3, reason="Keras 3 has LoRA"))])
@pytest.mark.slow
def test_what_is_frozen_stays_to_the_bit_through_training_and_files(rank, tmp_path):
    model = adapted(rank)
    frozen = lambda m: [np.asarray(v).tobytes() for v in (m.non_trainable_weights)]
    before = frozen(model)
    assert before
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert frozen(model) == before
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    if rank:  # Keras saves what LoRA adds as a part of the kernel
        np.testing.assert_allclose(again.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-5)
    else:
        assert frozen(again) == before
    assert again.optimizer.executed == [(1.0, 3)]


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.skipif(not KERAS3, reason="Keras 3 has LoRA"))])
def test_what_is_frozen_costs_no_work_for_each_example(rank):
    """No norm and no sum is made for it: the engine looks at the trained weights alone."""
    model = adapted(rank)
    table = str(tfdpfl.clipping.explain(model, (X, Y)))
    for v in model.non_trainable_weights:
        assert f"{getattr(v, 'path', v.name)} " not in table
    gradients, trained = [], [getattr(v, "_value", v) for v in model.trainable_weights]
    x, y = tf.constant(X), tf.constant(Y)

    @tf.function
    def sums(x, y):
        loss = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        r = tfdpfl.clipping.clipped_gradients(loss, model.trainable_weights, CLIP)
        return r.sum, r.norms

    got, norms = sums(x, y)
    for i in range(len(X)):
        with tf.GradientTape() as tape:
            out = model(x[i : i + 1], training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y[i : i + 1], out, from_logits=True))
        gradients.append([np.asarray(g) for g in tape.gradient(loss, trained)])
    columns = [np.stack(g) for g in zip(*gradients, strict=True)]
    np.testing.assert_allclose(norms, c.norms_of(columns), rtol=1e-4)
    factors = np.minimum(1, CLIP / np.maximum(c.norms_of(columns), 1e-30))
    want = [np.tensordot(factors, g, 1) for g in columns]
    np.testing.assert_allclose(c.flat([g.numpy() for g in got]), c.flat(want), atol=1e-4)


# -- several devices ---------------------------------------------------------------------------------------------


DEVICES = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import conftest as c, numpy as np, tfdpfl
from tfdpfl.data import batches as batches_module
from tfdpfl.noise import Banded
keras = tf.keras

# To columns of zeros belong weights that have no gradient: what they move by is the noise.
SILENT = 2000
x, y = c.examples(16)
x = np.concatenate([x, np.zeros((16, SILENT), "float32")], 1)
decay = keras.optimizers.schedules.PiecewiseConstantDecay
alone, mirrored = (tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(n)]) for n in (1, 2))

def compiled(optimizer, **kwargs):
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((x.shape[1],)), dense(5, activation="tanh"), dense(3)])
    first, *others = c.weights()
    model.set_weights([np.concatenate([first, np.zeros((SILENT, 5), "float32")]), *others])
    model.compile(optimizer, loss=c.cross_entropy(), **kwargs)
    return model

def train(strategy, make, clip, z, rows=16, size=8, epochs=1, **kwargs):
    with strategy.scope():
        model = compiled(make(clip, z, seed=1, **kwargs))
    how = {"accountant": "rdp", "delta": 1e-3, "num_examples": rows, "batch_size": size}
    budget = tfdpfl.callbacks.PrivacyBudget(**how, sampling="fixed_order" if "noise" in kwargs else "shuffle")
    clips = []
    note = keras.callbacks.LambdaCallback(on_batch_begin=lambda batch, logs: clips.append(model.optimizer.current_clip))
    data = tf.data.Dataset.from_tensor_slices((x[:rows], y[:rows])).batch(size, drop_remainder=rows % size == 0)
    others = [tfdpfl.callbacks.AveragedWeights(0.5)] if "use_ema" in kwargs else []
    model.fit(data, epochs=epochs, verbose=0, callbacks=[budget, note, *others])
    return model, budget, clips

def check(make, clip, z, **kwargs):
    single = tf.distribute.get_strategy()
    (one, priced, clips), (two, both, _) = (train(s, make, clip, z, **kwargs) for s in (single, mirrored))
    for a, b in zip(one.get_weights(), two.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-5)
    variables = lambda o: o.variables() if callable(o.variables) else o.variables
    for a, b in zip(variables(one.optimizer), variables(two.optimizer)):  # a ledger's row begins with whose it is
        if "dp_noise_steps" not in a.name:
            a, b = np.array(a), np.array(b)
            np.testing.assert_allclose(*((a[..., 1:], b[..., 1:]) if a.ndim else (a, b)), atol=1e-5)
    assert one.optimizer.executed == two.optimizer.executed
    assert one.optimizer.current_clip == two.optimizer.current_clip
    assert priced.report().epsilon == both.report().epsilon and both.ledger.unknown_steps == 0
    for v in two.trainable_variables:
        v = getattr(v, "_value", v)
        assert len({part.numpy().tobytes() for part in v.values}) == 1  # the same on both
    return two, clips

def check_noise(model, stddev):
    ratio = model.get_weights()[0][c.WIDTH :].std() / stddev
    assert 0.97 < ratio < 1.03, ratio  # and so neither 2/3 nor 3/2

sgd = {"make": tfdpfl.DPSGD, "learning_rate": 1.0}
# On Keras 3 the last batch has 5: 3 on the one device and 2 on the other.
rows = {"rows": 13} if c.keras3() else {}
parts = {"gradient_accumulation_steps": 2, "use_ema": True, "clipnorm": 0.01, "learning_rate": 0.05, "epochs": 2}
two, _ = check(tfdpfl.DPAdamW, tfdpfl.PerLayerClip(0.6), 1.0, **parts, **rows)
assert two.optimizer.executed == [(1.0, 2)]

# What follows is above Keras, but for the tables that end these lines: one version of it is enough.
if c.keras3():
    clip = tfdpfl.AdaptiveClip(initial=0.3, learning_rate=0.5)
    noises = (0.7, 0.6)
    how = {"clip": clip, "z": decay([0], noises), "size": 4, "gradient_accumulation_steps": 2, **sgd}
    two, clips = check(**how)
    left = [(z**-2 - (2 * clip.split(z, 8, max)[1]) ** -2) ** -0.5 for z in noises]
    check_noise(two, np.hypot(*np.multiply(left, clips[1::2])) / 8)
    assert sorted(two.optimizer.executed) == [(0.6, 1), (0.7, 1)] and abs(two.optimizer.current_clip - 0.3) > 0.01

    # Groups stay on their replica; of the last batch each is one example.
    how = {"clip": decay([0], [0.6, 0.3]), "num_microbatches": 4, "secure_noise": True}
    two, _ = check(**how, z=1.5, rows=12, **sgd)
    assert sorted(two.optimizer.executed) == [(0.75, 1), (1.5, 1)], two.optimizer.executed
    check_noise(two, 1.5 * np.hypot(0.6, 0.3) / 4)
    # Without PrivacyBudget nobody says that no example is on several replicas.
    two.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(8), verbose=0)
    assert sorted(two.optimizer.executed) == [(0.375, 2), (0.75, 1), (1.5, 1)], two.optimizer.executed

    noise = Banded(bands=2, min_separation=2, max_participations=2, num_steps=4)
    two, _ = check(clip=0.6, z=1.0, epochs=2, noise=noise, **sgd)
    check_noise(two, noise.unit * 0.6 * noise.variances(4)[-1] ** 0.5 / 8)

# Rows of a table are chosen once, by the counts of all replicas and parts. To most rows belongs no word.
def looking_up(strategy):
    sparse, clip = tfdpfl.AdaFEST(threshold=3.0, clip=1.2), tfdpfl.AdaptiveClip(initial=0.6)
    with strategy.scope():
        of = {"learning_rate": 1.0, "sparse": sparse, "seed": 1, "gradient_accumulation_steps": 2}
        model = c.looking_up(tfdpfl.DPSGD(clip, 1.0, **of), 2000, jit_compile=False)
    start, how = model.get_weights(), {"accountant": "rdp", "delta": 1e-3, "sampling": "shuffle"}
    budget = tfdpfl.callbacks.PrivacyBudget(16, batch_size=4, **how)
    data = tf.data.Dataset.from_tensor_slices((x[:, : c.WIDTH], y)).batch(4, drop_remainder=True)
    model.fit(data, verbose=0, callbacks=[budget])
    return model, [a - b for a, b in zip(model.get_weights(), start)], budget.report().epsilon

(one, moved, priced), (two, moved_by_two, both) = map(looking_up, (tf.distribute.get_strategy(), mirrored))
for a, b in zip(moved, moved_by_two):
    np.testing.assert_allclose(a, b, atol=1e-5)
assert one.optimizer.executed == two.optimizer.executed == [(1.0, 2)] and priced == both
assert one.optimizer.current_clip == two.optimizer.current_clip
for v in two.trainable_variables:
    assert len({part.numpy().tobytes() for part in getattr(v, "_value", v).values}) == 1
# 2000 rows of which each passes with probability 0.1056 a step: counts' noise of 2 * 1.2; 2 steps
kept = np.any(moved_by_two[0] != 0, 1).mean()
assert 0.16 < kept < 0.24, kept

# Losses that Keras, and an own loop as TensorFlow has it, divide by the number of replicas: no example's gradient is.
def penalised(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, "tanh", kernel_regularizer="l2")])
        model.set_weights([np.full((3, 1), 0.3), np.zeros(1)])
        model.compile(tfdpfl.DPSGD(0.1, 0.0, learning_rate=1.0), "mse", jit_compile=False)
    model.fit(x[:8, :3], y[:8], batch_size=8, shuffle=False, verbose=0)
    return c.flat(model.get_weights())

def looped(strategy, loss, data):
    with strategy.scope():
        model = compiled(tfdpfl.DPSGD(0.6, 0.0, learning_rate=1.0))
    each = lambda x, y: keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
    step = lambda x, y: model.optimizer.minimize(lambda: loss(each(x, y)), model.trainable_variables)
    batch = next(iter(strategy.experimental_distribute_dataset(data)))
    tf.function(lambda batch: strategy.run(step, args=batch))(batch)
    return c.flat(model.get_weights())

# Each replica leaves out its own blank rows, whatever the loss says of them.
def filled_up(strategy):
    with strategy.scope():
        layer = keras.layers.Dense(3, activity_regularizer=keras.regularizers.L2(10.0), bias_initializer="ones")
        model = keras.Sequential([keras.Input((c.WIDTH,)), layer])
        model.set_weights([c.weights()[0][:, :3], np.ones(3)])
        optimizer = tfdpfl.DPSGD(1.0, 0.0, expected_batch_size=1.0, learning_rate=1.0)
        model.compile(optimizer, c.cross_entropy(), jit_compile=False)
    before = c.flat(model.get_weights())
    data = tfdpfl.data.poisson_batches((x[:6, : c.WIDTH], y[:6]), 1.0, 1, truncated_batch_size=8)
    model.fit(data, verbose=0)
    return c.flat(model.get_weights()) - before

if c.keras3():
    batches_module.truncated_event_type = lambda size: None  # nothing is priced
    one = filled_up(tf.distribute.get_strategy())
    assert np.linalg.norm(one) > 1
    np.testing.assert_allclose(one, filled_up(mirrored), atol=1e-5)

np.testing.assert_allclose(penalised(alone), penalised(mirrored), atol=1e-6)
sets = [tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=whole) for whole in (True, False)]
one = looped(alone, tf.reduce_mean, sets[0])
for whole, data in zip((True, False), sets):
    for size in [8, None] if whole else [None]:
        average = lambda losses: tf.nn.compute_average_loss(losses, global_batch_size=size)
        np.testing.assert_allclose(one, looped(mirrored, average, data), atol=1e-6)

# Batches that the replicas are handed: the same for all, or each the next one.
for outside in (True, False):
    with mirrored.scope():
        model = compiled(tfdpfl.DPSGD(0.6, 0.0, learning_rate=1.0))
    loss = lambda x, y: tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
    step = lambda x, y: model.optimizer.minimize(lambda: loss(x, y), model.trainable_variables)
    batches = iter(tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True))
    run = lambda it: mirrored.run(step, args=next(it)) if outside else mirrored.run(lambda: step(*next(it)))
    try:
        tf.function(run)(batches)
        assert not outside, "was not refused: one batch for both"
        np.testing.assert_allclose(one, c.flat(model.get_weights()), atol=1e-6)
    except tfdpfl.PrivacyError as error:
        assert outside and "Several replicas receive the same batch" in str(error), error
        assert model.optimizer.num_dp_steps == 0

# Keras 3 hands train_on_batch's to all; and Keras 2 traces a replica without examples where a batch may be short.
with mirrored.scope():
    model = compiled(tfdpfl.DPSGD(0.6, 0.0, learning_rate=1.0), jit_compile=False)
take, why = (model.train_on_batch, "receive the same batch") if c.keras3() else (model.fit, "drop_remainder=True")
try:
    take(x[:13], y[:13])
    raise SystemExit("was not refused: " + why)
except tfdpfl.PrivacyError as error:
    assert why in str(error), error

for given, how, why in (
    ({"num_microbatches": 3}, {}, "num_microbatches=3 on 2 replicas"), ({}, {"jit_compile": True}, "XLA does not"),
    ({}, None, "outside of the replicas"),
):
    with mirrored.scope():
        model = compiled(tfdpfl.DPSGD(1.0, 1.0, **given), **(how or {}))
        before = model.get_weights()
        loss = lambda x, y: tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))
        step = tf.function(lambda x, y: model.optimizer.minimize(lambda: loss(x, y), model.weights))
    try:
        with mirrored.scope():
            step(x, y) if how is None else model.train_on_batch(x, y)
        raise SystemExit("was not refused: " + why)
    except tfdpfl.PrivacyError as error:
        assert why in str(error), error
    np.testing.assert_array_equal(c.flat(before), c.flat(model.get_weights()))
    assert model.optimizer.num_dp_steps == 0
print("done")
"""


@pytest.mark.slow
def test_two_devices_make_the_update_of_one_with_one_noise_and_one_count():
    tests = Path(__file__).parent.parent
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", str(tests.parent))])
    of = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONPATH": path}}
    done = subprocess.run([sys.executable, "-c", DEVICES], check=False, **of)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().endswith("done")


@pytest.mark.parametrize("name", ["ParameterServerStrategyV2", "TPUStrategy"])
def test_other_strategies_are_refused_by_name(name, monkeypatch):
    from tfdpfl.optimizers import _replicas

    strategy = type(name, (), {"num_replicas_in_sync": 1 if "Parameter" in name else 2})()
    monkeypatch.setattr(_replicas.tf.distribute, "get_strategy", lambda: strategy)
    with pytest.raises(PrivacyError, match=f"^{name}.*under MirroredStrategy"):
        _replicas.number()
