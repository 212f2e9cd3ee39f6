"""Several workers (MultiWorkerMirroredStrategy): two processes on this machine, each of two replicas."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import conftest as c
import numpy as np
import pytest
import tensorflow as tf
from scipy import stats

import tfdpfl
from tfdpfl import PrivacyError

keras = tf.keras
only_keras2 = pytest.mark.skipif(c.keras3(), reason="Keras 3's fit does not run under MultiWorkerMirroredStrategy")
N, RATE, STEPS, CLIP, SIZE, ROWS = 41, 0.3, 3, 0.6, 12.3, 30

# Each worker runs the same; only where a test is about it, they differ.
BEGIN = """
import os, pathlib, sys, time, traceback, tensorflow as tf
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

def end(*error):  # without TensorFlow's way of it, which waits for the other worker
    if error:
        traceback.print_exception(*error)
    print("" if error else "done", flush=True)
    here = pathlib.Path(os.environ["OUT"])  # whose end would reach the other before what it sent last
    here.with_suffix(".ended").touch()
    until = time.monotonic() + 900
    while len(list(here.parent.glob("*.ended"))) < int(os.environ["ENDS"]) and time.monotonic() < until:
        time.sleep(0.05)
    os._exit(bool(error))

sys.excepthook, number = end, int(os.environ["REPLICAS"])
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)
# Several devices of a worker are several GPUs; here they are parts of the CPU.
CollectiveAllReduceExtended._initialize_local_devices = lambda self, resolver, worker: (
    [f"{worker}/device:CPU:{i}" for i in range(number)], "CPU")
strategy = tf.distribute.MultiWorkerMirroredStrategy()
import conftest as c, numpy as np, tfdpfl
keras, index = tf.keras, strategy.cluster_resolver.task_id
N, RATE, STEPS, CLIP, SIZE, ROWS = 41, 0.3, 3, 0.6, 12.3, 30
x, y = c.examples(N)

def compiled(make, *args, silent=0, how={}, **kwargs):
    with strategy.scope():
        model = keras.Sequential([keras.Input((c.WIDTH + silent,)), keras.layers.Dense(c.HIDDEN, "tanh"),
                                  keras.layers.Dense(c.CLASSES)])
        first, *others = c.weights()
        model.set_weights([np.concatenate([first, np.zeros((silent, c.HIDDEN), "float32")]), *others])
        model.compile(make(*args, **kwargs), loss=c.cross_entropy(), **how)
    return model

def batches(x=x, y=y, rate=RATE, steps=STEPS, **kwargs):
    return tfdpfl.data.poisson_batches((x, y), rate, steps, strategy=strategy, **kwargs)

def fit(model, data, epochs=2, steps=STEPS, **kwargs):
    budget = tfdpfl.callbacks.PrivacyBudget(delta=1e-3, accountant="rdp", **kwargs)
    model.fit(data, epochs=epochs, steps_per_epoch=steps, callbacks=[budget], verbose=0)
    return budget

def state(model):
    "All that is kept of a model, as bytes."
    own = [w.values for w in [*model.weights, *model.optimizer.variables()]]
    assert all(len({v.numpy().tobytes() for v in values}) == 1 for values in own)
    return [values[0].numpy() for values in own]
"""

ALL = (
    BEGIN
    + """
out, make = {}, tfdpfl.DPSGD
# What is drawn.
it = iter(batches(seed=3))
for step in range(2 * STEPS):
    parts = strategy.experimental_local_results(next(it)[0])
    assert len(parts) == 2
    out[f"batch{step}"] = np.concatenate([np.asarray(p) for p in parts])

# Updates: noise off.
of = {"expected_batch_size": SIZE}
model = compiled(make, CLIP, 0.0, learning_rate=0.3, **of)
fit(model, batches(seed=3))
out["sgd"] = c.flat(state(model)[:4])
for rows in (N, N - 1):  # one example less moves the sum by its clipped gradient
    model.set_weights(c.weights())
    fit(model, batches(x[:rows], y[:rows], 1.0, 1), epochs=1, steps=1)
    out[f"of {rows}"] = c.flat(model.get_weights())
model = compiled(make, CLIP, 0.0, learning_rate=0.3)  # of the mean over all that were drawn
model.fit(batches(seed=3), epochs=2, steps_per_epoch=STEPS, verbose=0)
out["mean"] = c.flat(state(model)[:4])
for name, make_, clip, more in (
    ("adaptive", tfdpfl.DPAdamW, tfdpfl.AdaptiveClip(initial=0.3, learning_rate=0.5), {}),
    ("layers", tfdpfl.DPRMSprop, tfdpfl.PerLayerClip(0.6), {"gradient_accumulation_steps": 3}),
):
    how = {"steps_per_execution": STEPS} if name == "adaptive" else {}
    model = compiled(make_, clip, 0.0, learning_rate=0.05, **of, **more, how=how)
    if more:  # parts of a sample are not told apart on a stream, so nobody says how they are drawn
        model.fit(batches(seed=3), epochs=2, steps_per_epoch=STEPS, verbose=0)
        assert model.optimizer.num_dp_steps == 2
    else:
        fit(model, batches(seed=3))
    out[name] = c.flat(state(model)[:4])
    out[name + " clip"] = np.float64(model.optimizer.current_clip)

# Groups of two rows: nobody says that they are not on every replica.
model = compiled(make, CLIP, 1.6, num_microbatches=8)
data = tf.data.Dataset.from_tensor_slices((x[:16], y[:16])).repeat().batch(16, drop_remainder=True)
model.fit(data, steps_per_epoch=2, verbose=0)
assert model.optimizer.executed == [(0.2, 2)], model.optimizer.executed
out["groups"] = c.flat(state(model)[:4])
# Rows of a table, by the counts of all.
def rows_of(z, parts=1, rows=ROWS):
    with strategy.scope():
        given = {"sparse": tfdpfl.AdaFEST(threshold=2.0, clip=1.2), "gradient_accumulation_steps": parts, **of}
        model = c.looking_up(make(CLIP, z, learning_rate=0.3, **given), rows)
    start = model.get_weights()
    if parts > 1:
        model.fit(batches(seed=3), epochs=2, steps_per_epoch=STEPS, verbose=0)
    else:
        budget = fit(model, batches(seed=3))
        out[f"rows epsilon {z}"] = budget.report().epsilon
    assert model.optimizer.num_dp_steps == 2 * STEPS // parts
    return [a - b for a, b in zip(state(model), start)][:2]

out["rows"], out["rows in parts"] = c.flat(rows_of(0.0)), c.flat(rows_of(0.0, 3))
out["noise of rows"], out["noise of top"] = rows_of(1.5, rows=20_000)

# Noise, ledger, all that is kept; and the target stops all at the same step.
SILENT = 2000
target = 1.001 * tfdpfl.compute_epsilon(num_examples=N, batch_size=13, num_steps=4, noise_multiplier=1.5, delta=1e-3,
                                        accountant="rdp")
wide = np.concatenate([x, np.zeros((N, SILENT), "float32")], 1)
for secure in (False, True):
    model = compiled(make, CLIP, 1.5, learning_rate=1.0, silent=SILENT, secure_noise=secure, **of)
    budget = fit(model, batches(wide), target_epsilon=target)
    moved = model.get_weights()[0][c.WIDTH:]
    out[f"noise {secure}"] = moved
    out[f"state {secure}"] = c.flat(state(model))
    assert model.optimizer.executed == [(1.5, 4)], model.optimizer.executed
    out[f"epsilon {secure}"] = budget.report().epsilon
    out[f"origin {secure}"] = np.array(sorted(budget.ledger.origins))
    assert budget.ledger.unknown_steps == 0

plan = tfdpfl.plan(x, y, noise_multiplier=1.5, delta=1e-3, batch_size=10, num_epochs=1, strategy=strategy)
model = compiled(lambda: plan.optimizer("adam"))
model.fit(plan.batches, epochs=1, steps_per_epoch=plan.steps_per_epoch, callbacks=[plan.callback], verbose=0)
assert plan.callback.report().epsilon == plan.epsilon

# Users, of whom a batch has some rows each.
who = np.arange(N) // 4
data = tfdpfl.data.poisson_batches((x, y), 0.5, 2, strategy=strategy, user_ids=who, examples_per_user=2)
model = compiled(make, CLIP, 1.5, expected_batch_size=5.5, rows_per_unit=2)
budget = fit(model, data, epochs=1, steps=2)
assert budget.report().epsilon == tfdpfl.compute_epsilon(
    num_examples=11, batch_size=6, num_steps=2, noise_multiplier=1.5, delta=1e-3, accountant="rdp")

# Of what nobody says how it was drawn, each replica may have the same example.
model = compiled(make, CLIP, 1.6)
plain = lambda: tf.data.Dataset.from_tensor_slices((x[:16], y[:16])).shuffle(16).repeat().batch(8, drop_remainder=True)
model.fit(plain(), steps_per_epoch=2, verbose=0)
assert model.optimizer.executed == [(0.4, 2)], model.optimizer.executed

def refused(why, do):
    try:
        do()
    except (tfdpfl.PrivacyError, ValueError) as error:
        assert why in str(error), error
    else:
        raise SystemExit("was not refused: " + why)

said = {"num_examples": 16, "batch_size": 8, "sampling": "poisson"}
refused("runs on 2 workers", lambda: fit(model, plain(), **{**said, "sampling": "shuffle"}))
refused("runs on 2 workers", lambda: fit(model, tfdpfl.data.poisson_batches((x, y), RATE, STEPS)))
refused("runs on 2 workers", lambda: model.fit(x[:16], y[:16], callbacks=[tfdpfl.callbacks.PrivacyBudget(delta=1e-3)]))
refused("without end", lambda: compiled(make, CLIP, 1.6).fit(x[:16], y[:16], batch_size=8, verbose=0))
for why, more in (
    ("noise=Tree on 2 workers", {"noise": tfdpfl.noise.Tree()}), ("num_microbatches=6 on 4", {"num_microbatches": 6}),
    ("XLA", {"how": {"jit_compile": True}}),
):
    other = compiled(make, CLIP, 1.0, **more)
    refused(why, lambda: other.fit(plain(), steps_per_epoch=1, verbose=0))
    assert other.optimizer.num_dp_steps == 0
np.savez(os.environ["OUT"], **out)

# Settings of one that are not the other's: neither takes a step.
other = index == 1
for what, said in (
    ("order", "disagree about the data"), ("budget", "disagree about the data"), ("target", "disagree about the data"),
    ("step", "are not at the same step"), ("noise", "optimizers of the workers differ"),
):
    model = compiled(make, CLIP, 2.0 if other and what == "noise" else 1.0, **of)
    before = model.get_weights()
    data = batches(x[::-1] if other and what == "order" else x)
    if what == "step":
        model.optimizer.build(model.trainable_variables)
        for v in model.optimizer.iterations.values if other else []:
            v.assign(1)
    try:
        if other and what == "budget":
            model.fit(data, steps_per_epoch=STEPS, verbose=0)
        else:
            fit(model, data, target_epsilon=3.0 if other and what == "target" else 9.0)
        raise SystemExit("trained though the workers differ: " + what)
    except tf.errors.OpError as error:
        assert said in str(error), (what, error)
    assert model.optimizer.num_dp_steps == 0, what
    np.testing.assert_array_equal(c.flat(before), c.flat(model.get_weights()), what)
end()
"""
)


def started(script, out, replicas, **more):
    """The two workers' processes, which write to ``out``0 and ``out``1."""
    ports = []
    for _ in range(2):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            ports.append(f"localhost:{free.getsockname()[1]}")
    tests = Path(__file__).parent.parent
    path = os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", str(tests.parent))])
    processes = []
    for i in range(2):
        cluster = json.dumps({"cluster": {"worker": ports}, "task": {"type": "worker", "index": i}})
        env = {**os.environ, "PYTHONPATH": path, "TF_CONFIG": cluster, "OUT": f"{out}{i}.npz",
               "REPLICAS": str(replicas), "ENDS": "2", **more}  # fmt: skip
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen([sys.executable, "-c", script], env=env, **pipe))
    return processes


def said_by(processes):
    try:
        return [p.communicate(timeout=2400)[0] for p in processes]
    except subprocess.TimeoutExpired as late:
        for p in processes:
            p.kill()
        raise AssertionError([p.communicate()[0][-2000:] for p in processes]) from late
    finally:
        for p in processes:
            p.kill()


@pytest.mark.slow
@only_keras2
def test_two_workers_make_the_update_of_one_device_with_one_noise_and_one_count(tmp_path):
    processes = started(ALL, tmp_path / "out", 2)
    for said in said_by(processes):
        assert said.strip().endswith("done"), said[-3000:]
    one, two = (dict(np.load(tmp_path / f"out{i}.npz")) for i in range(2))
    x, y = c.examples(N)
    place = {row.tobytes(): i for i, row in enumerate(x)}
    drawn = []
    for step in range(2 * STEPS):
        rows = [[place[row.tobytes()] for row in out.pop(f"batch{step}")] for out in (one, two)]
        assert [{i % 2 for i in part} for part in rows] == [{0}, {1}]  # each worker from its own
        drawn.append(sorted(rows[0] + rows[1]))
        assert len(set(drawn[-1])) == len(drawn[-1])  # and no example twice, on two replicas of one either
    assert len({tuple(rows) for rows in drawn}) == len(drawn)
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name

    for name, size in (("sgd", lambda rows: SIZE), ("mean", len)):
        weights = c.weights()
        for rows in drawn:
            sums = c.clipped_sum(weights, x[rows], y[rows], CLIP)
            weights = [w - 0.3 * s / size(rows) for w, s in zip(weights, sums, strict=True)]
        np.testing.assert_allclose(one[name], c.flat(weights), atol=1e-5)
    for name, make, clip, more in (
        ("adaptive", tfdpfl.DPAdamW, tfdpfl.AdaptiveClip(initial=0.3, learning_rate=0.5), {}),
        ("layers", tfdpfl.DPRMSprop, tfdpfl.PerLayerClip(0.6), {"gradient_accumulation_steps": 3}),
    ):
        optimizer = make(clip, 0.0, learning_rate=0.05, expected_batch_size=SIZE, **more)
        model = c.compiled(optimizer)
        for rows in drawn:
            model.train_on_batch(x[rows], y[rows])
        np.testing.assert_allclose(one[name], c.flat(model.get_weights()), atol=2e-5, err_msg=name)
        np.testing.assert_allclose(one[f"{name} clip"], optimizer.current_clip, rtol=1e-4)

    for secure in (False, True):
        ratio = one[f"noise {secure}"].std() / (2 * 1.5 * CLIP / SIZE)  # of four steps
        assert 0.97 < ratio < 1.03, ratio  # and so neither 2/3 nor 3/2, and not √2
        run = {"num_examples": N, "batch_size": 13, "num_steps": 4, "noise_multiplier": 1.5}
        least = tfdpfl.compute_epsilon(**run, delta=1e-3, accountant="rdp")
        np.testing.assert_allclose(one[f"epsilon {secure}"], least, rtol=1e-9)

    for name, parts in (("rows", 1), ("rows in parts", 3)):
        of = {"learning_rate": 0.3, "expected_batch_size": SIZE, "gradient_accumulation_steps": parts}
        model = c.looking_up(tfdpfl.DPSGD(CLIP, 0.0, sparse=tfdpfl.AdaFEST(threshold=2.0, clip=1.2), **of), ROWS)
        start = model.get_weights()
        for rows in drawn:
            model.train_on_batch(x[rows], y[rows])
        moved = [a - b for a, b in zip(model.get_weights(), start, strict=True)]
        np.testing.assert_allclose(one[name], c.flat(moved[:2]), atol=1e-5)
        assert 0 < np.any(moved[0], 1).sum() < ROWS
    # Rows that nobody looks up: a normal of deviation 2 * 1.5 * 1.2 is at 2 or above in one of six steps
    silent = one["noise of rows"][ROWS:]
    once, passes = stats.norm.sf(2 / (2 * 1.5 * 1.2)), np.any(silent != 0, 1).mean()
    assert abs(passes - (1 - (1 - once) ** 6)) < 0.02, passes
    size = (1.5**-2 - 3.0**-2) ** -0.5 * CLIP / SIZE * 0.3
    ratio = np.sqrt((silent**2).mean() / (6 * once)) / size
    assert 0.97 < ratio < 1.03, ratio
    assert one["rows epsilon 1.5"] == tfdpfl.compute_epsilon(
        num_examples=N, batch_size=13, num_steps=6, noise_multiplier=1.5, delta=1e-3, accountant="rdp")  # fmt: skip

    last = [g[0] for g in c.per_example_gradients(c.weights(), x[-1:], y[-1:])]
    norm = np.linalg.norm(c.flat(last))
    assert norm > CLIP
    moved = SIZE / 0.3 * (one[f"of {N - 1}"] - one[f"of {N}"])
    np.testing.assert_allclose(moved, c.flat(last) * CLIP / norm, atol=2e-4)
    assert np.linalg.norm(moved) < CLIP * (1 + 1e-3)


KILLED = (
    BEGIN
    + """
model = compiled(tfdpfl.DPAdam, CLIP, 1.5, expected_batch_size=SIZE)
kept = keras.callbacks.BackupAndRestore(os.environ["BACKUP"])
tell = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch, flush=True))
budget = tfdpfl.callbacks.PrivacyBudget(delta=1e-3, accountant="rdp")
epochs = int(os.environ["EPOCHS"])
model.fit(batches(), epochs=epochs, steps_per_epoch=STEPS, callbacks=[kept, tell, budget], verbose=0)
print("ran", model.optimizer.num_dp_steps, budget.report().epsilon, len(budget.ledger.origins), flush=True)
"""
)


@pytest.mark.slow
@only_keras2
def test_a_killed_worker_ends_the_job_which_goes_on_from_its_backup_with_all_steps_counted(tmp_path):
    how = {"out": tmp_path / "out", "replicas": 1, "BACKUP": str(tmp_path / "backup")}
    processes = started(KILLED, **how, EPOCHS="100000", ENDS="1")
    for line in processes[1].stdout:
        if line.startswith("epoch 2"):
            break
    processes[1].send_signal(signal.SIGKILL)
    said = said_by(processes)[0]
    assert processes[0].returncode not in (0, None), said[-2000:]
    assert "ran" not in said
    ended = 1 + max(int(line.split()[1]) for line in said.splitlines() if line.startswith("epoch"))
    epochs = ended + 2
    for said in said_by(started(KILLED, **how, EPOCHS=str(epochs))):
        ran, steps, epsilon, origins = said.splitlines()[-1].split()
        assert ran == "ran" and int(steps) == STEPS * epochs and int(origins) == 2, said[-2000:]
        run = {"num_examples": N, "batch_size": 13, "num_steps": STEPS * epochs, "noise_multiplier": 1.5}
        least = tfdpfl.compute_epsilon(**run, delta=1e-3, accountant="rdp")
        np.testing.assert_allclose(float(epsilon), least, rtol=1e-9)


def test_machines_that_make_other_noise_of_one_key_do_not_agree(monkeypatch):
    """As a processor's last bits, or a GPU's generator beside a CPU's."""
    from tfdpfl.noise.source import KeyStream
    from tfdpfl.optimizers import _workers

    dp, real = tfdpfl.DPSGD(1.0, 1.0)._dp, KeyStream.normals
    mine = _workers._number_of(dp, [])
    assert mine == _workers._number_of(dp, [])
    with monkeypatch.context() as other:
        other.setattr(KeyStream, "normals", lambda *how: np.nextafter(real(*how), np.float32(9)))
        assert mine != _workers._number_of(dp, [])
    monkeypatch.setattr("tfdpfl.noise.source._on_host", lambda: False)
    assert mine != _workers._number_of(dp, [])


@pytest.mark.skipif(not c.keras3(), reason="Keras 2 trains under it")
def test_keras_3_is_refused_under_several_workers(monkeypatch):
    from tfdpfl.optimizers import _replicas

    monkeypatch.setattr(_replicas, "workers", lambda: 2)
    with pytest.raises(PrivacyError, match="Keras 3 does not train under MultiWorkerMirroredStrategy"):
        c.compiled(tfdpfl.DPSGD(1.0, 1.0)).train_on_batch(*c.examples(4))


def test_steps_of_which_nothing_is_known_may_have_an_example_on_each_replica():
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = c.compiled(tfdpfl.DPSGD(1.0, 2.0))
    budget = tfdpfl.callbacks.PrivacyBudget(delta=1e-3)
    with pytest.raises(KeyboardInterrupt):
        model.fit(*c.examples(8), batch_size=8, verbose=0, callbacks=[Stop(), budget])
    model.optimizer._dp.holders = 4
    assert budget.ledger.unknown_steps == 1
    assert sorted(model.optimizer.executed) == [(0.5, 1), (2.0, 1)]


def test_the_order_of_data_and_whose_they_are_tells_workers_apart():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    x, y = c.examples(12)
    users = {"user_ids": np.arange(12) // 2, "examples_per_user": 2}
    given = [((x, y), {}), ((x[::-1], y), {}), ((x, y), users), ((x, y), {**users, "user_ids": np.arange(12) // 3})]
    orders = [
        tfdpfl.data.declared_sampling(tfdpfl.data.poisson_batches(data, 0.5, 2, strategy=strategy, **more)).order
        for data, more in [*given, given[0]]
    ]
    assert orders[0] == orders[-1] and len(set(orders)) == 4


def test_a_share_for_workers_has_no_size_of_its_own():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    for name in ("physical_batch_size", "truncated_batch_size"):
        with pytest.raises(ValueError, match=f"{name}=8 together with strategy"):
            tfdpfl.data.poisson_batches(c.examples(12), 0.5, 2, strategy=strategy, **{name: 8})
