"""Several devices make the update of one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tfdpfl import PrivacyError

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
