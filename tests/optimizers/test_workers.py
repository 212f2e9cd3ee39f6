"""Several workers (MultiWorkerMirroredStrategy): two processes on this machine, each of two replicas."""

import functools
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
from tfdpfl.callbacks._fits import Fit, is_stream
from tfdpfl.callbacks._sampling import Sampling
from tfdpfl.noise import BandedInverse, Source
from tfdpfl.noise.source import KeyStream, new_key
from tfdpfl.optimizers import _replicas, _workers

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
out, make, of = {}, tfdpfl.DPSGD, {"expected_batch_size": SIZE}
# What is drawn.
share, it = {"strategy": strategy}, iter(batches(seed=3))
for step in range(2 * STEPS):
    parts = strategy.experimental_local_results(next(it)[0])
    assert len(parts) == 2
    out[f"batch{step}"] = np.concatenate([np.asarray(p) for p in parts])

# Updates: noise off, the mean over all that were drawn.
model = compiled(make, CLIP, 0.0, learning_rate=0.3)
model.fit(batches(seed=3), epochs=2, steps_per_epoch=STEPS, verbose=0)
out["sgd"] = c.flat(state(model)[:4])
for rows in (N, N - 1):  # one example less moves the sum by its clipped gradient
    model.set_weights(c.weights())
    model.fit(batches(x[:rows], y[:rows], 1.0, 1), steps_per_epoch=1, verbose=0)
    out[f"moved by {rows}"] = (c.flat(c.weights()) - c.flat(model.get_weights())) * rows / 0.3
plain = tf.data.Dataset.from_tensor_slices((x[:16], y[:16])).shuffle(16, 0).repeat().batch(16, drop_remainder=True)

def refused(why, do):
    try:
        do()
    except (tfdpfl.PrivacyError, ValueError) as error:
        assert why in str(error), error
    else:
        raise SystemExit("was not refused: " + why)

said = {"num_examples": 16, "batch_size": 8, "sampling": "shuffle"}
refused("runs on 2 workers", lambda: fit(model, plain, **said))
refused("runs on 2 workers", lambda: fit(model, tfdpfl.data.poisson_batches((x, y), RATE, STEPS)))
refused("runs on 2 workers", lambda: model.fit(x[:16], y[:16], callbacks=[tfdpfl.callbacks.PrivacyBudget(delta=1e-3)]))
for why, more in (("num_microbatches=6 on 4", {"num_microbatches": 6}), ("XLA", {"how": {"jit_compile": True}})):
    other = compiled(make, CLIP, 1.0, **more)
    refused(why, lambda: other.fit(plain, steps_per_epoch=1, verbose=0))
    assert other.optimizer.num_dp_steps == 0
other = compiled(make, CLIP, 1.0, **of)
refused("without end", lambda: other.fit(x[:16], y[:16], batch_size=8, verbose=0))

# Rows of a table, by the counts of all; with an adaptive clip, in physical batches of a sample each.
def rows_of(make, clip, z, rows=ROWS, how={}, **more):
    with strategy.scope():
        given = {"sparse": tfdpfl.AdaFEST(threshold=2.0, clip=1.2), **of, **more}
        model = c.looking_up(make(clip, z, **given), rows, **how)
    return model, model.get_weights()

adaptive = tfdpfl.AdaptiveClip(initial=0.3, learning_rate=0.5)
model, start = rows_of(tfdpfl.DPAdam, adaptive, 0.0, learning_rate=0.05, gradient_accumulation_steps=2,
                       how={"steps_per_execution": STEPS})
parts = batches(seed=3, physical_batch_size=8)
budget = fit(model, parts, steps=2 * STEPS)
assert model.optimizer.num_dp_steps == 2 * STEPS and budget.ledger.unknown_steps == 0
out["rows in parts"], out["clip"] = c.flat(state(model)[:2]), np.float64(model.optimizer.current_clip)
model, start = rows_of(make, CLIP, 1.5, 20_000, learning_rate=0.3)
out["rows epsilon"] = fit(model, batches(seed=3)).report().epsilon
out["noise of rows"], out["noise of top"] = [a - b for a, b in zip(state(model), start)][:2]

# Noise, ledger, all that is kept; and the target stops all at the same step.
SILENT = 2000
wide = np.concatenate([x, np.zeros((N, SILENT), "float32")], 1)
target = 1.001 * tfdpfl.compute_epsilon(num_examples=N, batch_size=13, num_steps=4, noise_multiplier=1.5, delta=1e-3,
                                        accountant="rdp")
model = compiled(make, CLIP, 1.5, learning_rate=1.0, silent=SILENT, secure_noise=True, **of)
budget = fit(model, batches(wide), target_epsilon=target)
out["secure noise"], out["secure state"] = model.get_weights()[0][c.WIDTH:], c.flat(state(model))
assert model.optimizer.executed == [(1.5, 4)], model.optimizer.executed
out["secure epsilon"], out["origin"] = budget.report().epsilon, np.array(sorted(budget.ledger.origins))
assert budget.ledger.unknown_steps == 0

# A plan, of users, of whom a batch has some rows each; every one once a pass.
who = {"user_ids": np.arange(N) // 4, "examples_per_user": 2}
plan = tfdpfl.plan(wide, y, noise_multiplier=1.5, delta=1e-3, batch_size=4, num_epochs=2, sampling="random_allocation",
                   l2_norm_clip=CLIP, strategy=strategy, **who)
model = compiled(lambda: plan.optimizer("sgd", learning_rate=1.0), silent=SILENT)
model.fit(plan.batches, epochs=2, steps_per_epoch=plan.steps_per_epoch, callbacks=[plan.callback], verbose=0)
out["noise"], out["allocated epsilon"] = model.get_weights()[0][c.WIDTH:], plan.callback.report().epsilon
assert model.optimizer.num_dp_steps == 6 and plan.callback.report().epsilon == plan.epsilon

# Correlated noise.
noise = tfdpfl.noise.BandedInverse(bands=3, coefficients="best", min_separation=3, max_participations=2)
model = compiled(make, CLIP, 1.5, learning_rate=0.3, noise=noise, seed=7, **of)
budget = fit(model, tfdpfl.data.fixed_order((x[:36], y[:36]), 12, **share))
out["correlated"], out["correlated state"] = c.flat(state(model)[:4]), c.flat(state(model))
out["segments"], out["correlated epsilon"] = np.array(sorted(budget.ledger.origins)), budget.report().epsilon
np.savez(os.environ["OUT"], **out)

# Settings of one that are not the other's: neither takes a step.
other, models, tree = index == 1, {}, {"noise": tfdpfl.noise.Tree()}
for what, said in (
    ("noise", "optimizers of the workers differ"), ("order", "disagree about the data"),
    ("target", "disagree about the data"), ("step", "are not at the same step"),
    ("segment", "are not at the same step"), ("budget", "disagree about the data"),
):
    z = 2.0 if other and what == "noise" else 1.0
    model = models[what == "noise"] = models.get(what == "noise") or compiled(make, CLIP, z, **tree, **of)
    before, segments = model.get_weights(), model.optimizer._dp.noise.segments
    data = tfdpfl.data.fixed_order((x[::-1] if other and what == "order" else x, y), 12, **share)
    for v in model.optimizer.iterations.values:
        v.assign(int(other and what == "step"))
    segments._workers.assign(float(other and what == "segment"))
    try:
        if other and what == "budget":
            model.fit(data, steps_per_epoch=STEPS, verbose=0)
        else:
            fit(model, data, target_epsilon=6.0 if other and what == "target" else 900.0)
        raise SystemExit("trained though the workers differ: " + what)
    except tf.errors.OpError as error:
        assert said in str(error), (what, error)
    assert model.optimizer.num_dp_steps == 0, what
    np.testing.assert_array_equal(c.flat(before), c.flat(model.get_weights()), what)
"""
)

# Goes on until the number of steps is a power of 2: their noise is then that of one node of a tree.
KILLED = """
passes = tfdpfl.data.fixed_order((np.concatenate([x, np.zeros((N, 2000), "float32")], 1)[:36], y[:36]), 9, **share)
model = compiled(tfdpfl.DPFTRL, CLIP, 1.5, silent=2000, learning_rate=1.0, expected_batch_size=9.0)
kept = keras.callbacks.BackupAndRestore(os.environ["BACKUP"])
tell = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch, flush=True))
budget, epochs = tfdpfl.callbacks.PrivacyBudget(delta=1e-3), int(os.environ["EPOCHS"])
model.fit(passes, epochs=epochs, steps_per_epoch=4, callbacks=[kept, tell, budget], verbose=0)
"""

GOES_ON = (
    BEGIN
    + 'share = {"strategy": strategy}'
    + KILLED
    + """
(row,) = budget.ledger.to_dict()["rows"]
np.savez(os.environ["OUT"], noise=model.get_weights()[0][c.WIDTH:], state=c.flat(state(model)),
         ran=[row["correlated"][name] for name in ("num_steps", "min_separation", "max_participations")],
         origins=sorted(budget.ledger.origins))
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


def trained(here):
    """What two workers gave, the second of which was then killed; and what two others, which went on, gave."""
    backup = str(here / "backup")
    processes = started(ALL + KILLED, here / "out", 2, EPOCHS="100000", BACKUP=backup, ENDS="1")
    said = []
    for line in processes[1].stdout:
        said.append(line)
        if line.startswith("epoch 2"):
            break
    else:
        raise AssertionError("".join(said)[-3000:])
    processes[1].send_signal(signal.SIGKILL)
    first = said_by(processes)[0]
    assert processes[0].returncode not in (0, None), first[-2000:]
    ended = 1 + max(int(line.split()[1]) for line in first.splitlines() if line.startswith("epoch"))
    for said in said_by(started(GOES_ON, here / "on", 1, EPOCHS=str(1 << ended.bit_length()), BACKUP=backup)):
        assert said.strip().endswith("done"), said[-3000:]
    return [[dict(np.load(here / f"{name}{i}.npz")) for i in range(2)] for name in ("out", "on")]


def accepts(noise, stddev):
    """Whether ``stddev`` is that of 10,000 numbers: to six of its errors, and so neither 2/3 of it nor 3/2."""
    return noise.size == 10_000 and abs(noise.std() / stddev - 1) < 0.045


def assert_one_update_one_noise_and_one_count(one, two):
    x, y = c.examples(N)
    place = {row.tobytes(): i for i, row in enumerate(x)}
    drawn = []
    for step in range(2 * STEPS):
        rows = [[place[row.tobytes()] for row in out.pop(f"batch{step}")] for out in (one, two)]
        assert [{i % 2 for i in part} for part in rows] == [{0}, {1}]  # each worker from its own
        drawn.append(sorted(rows[0] + rows[1]))
        assert len(set(drawn[-1])) == len(drawn[-1])  # and no example twice, on two replicas of one either
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name
    assert len({tuple(rows) for rows in drawn}) == len(drawn)

    weights = c.weights()
    for rows in drawn:
        sums = c.clipped_sum(weights, x[rows], y[rows], CLIP)
        weights = [w - 0.3 * s / len(rows) for w, s in zip(weights, sums, strict=True)]
    np.testing.assert_allclose(one["sgd"], c.flat(weights), atol=1e-5)
    clip, sparse = tfdpfl.AdaptiveClip(initial=0.3, learning_rate=0.5), tfdpfl.AdaFEST(threshold=2.0, clip=1.2)
    model = c.looking_up(tfdpfl.DPAdam(clip, 0.0, learning_rate=0.05, expected_batch_size=SIZE, sparse=sparse), ROWS)
    start = model.get_weights()[0]
    for rows in drawn:
        model.train_on_batch(x[rows], y[rows])
    np.testing.assert_allclose(one["rows in parts"], c.flat(model.get_weights()), atol=2e-5)
    np.testing.assert_allclose(one["clip"], model.optimizer.current_clip, rtol=1e-4)
    assert 0 < np.any(model.get_weights()[0] != start, 1).sum() < ROWS

    run = {"num_examples": N, "batch_size": 13, "noise_multiplier": 1.5, "delta": 1e-3, "accountant": "rdp"}
    assert accepts(one["secure noise"], 2 * 1.5 * CLIP / SIZE)  # of four steps
    np.testing.assert_allclose(one["secure epsilon"], tfdpfl.compute_epsilon(**run, num_steps=4), rtol=1e-9)
    assert one["rows epsilon"] == tfdpfl.compute_epsilon(**run, num_steps=6)
    assert accepts(one["noise"], 6**0.5 * 1.5 * CLIP / 4)
    run |= {"num_examples": 11, "batch_size": 4, "accountant": "pld"}
    least = tfdpfl.compute_epsilon(**run, num_epochs=2, sampling="random_allocation")
    np.testing.assert_allclose(one["allocated epsilon"], least, rtol=1e-9)
    # Rows that nobody looks up: a normal of deviation 2 * 1.5 * 1.2 is at 2 or above in one of six steps
    silent = one["noise of rows"][ROWS:]
    once, passes = stats.norm.sf(2 / (2 * 1.5 * 1.2)), np.any(silent != 0, 1).mean()
    assert abs(passes - (1 - (1 - once) ** 6)) < 0.02, passes
    size = (1.5**-2 - 3.0**-2) ** -0.5 * CLIP / SIZE * 0.3
    ratio = np.sqrt((silent**2).mean() / (6 * once)) / size
    assert 0.97 < ratio < 1.03, ratio

    last = [g[0] for g in c.per_example_gradients(c.weights(), x[-1:], y[-1:])]
    norm = np.linalg.norm(c.flat(last))
    assert norm > CLIP
    moved = one[f"moved by {N}"] - one[f"moved by {N - 1}"]
    np.testing.assert_allclose(moved, c.flat(last) * CLIP / norm, atol=2e-4)
    assert np.linalg.norm(moved) < CLIP * (1 + 1e-3)


def assert_correlated_noise_of_one_key(one):
    """By numpy, from the keys that the first worker draws: the noise of a process by itself that has these."""
    x, y = c.examples(N)
    noise = BandedInverse(bands=3, coefficients="best", min_separation=3, max_participations=2)
    weights, keys = c.weights(), KeyStream(new_key(7))
    size = sum(w.size for w in weights)
    base = np.zeros([6, size])
    for row in base:
        of_step = KeyStream(keys.words(np.empty(2, np.int64))).words(np.empty([2, 2], np.int64))
        row[:] = Source().gaussian([[size]], 1.0, tf.constant(of_step[1]))[0]  # the first names the segment
    stddev = 1.5 * CLIP / SIZE * noise.sensitivity(6, 3, 2)
    for step, row in enumerate(np.linalg.solve(noise.matrix(6), base)):
        rows = slice(12 * (step % 3), 12 * (step % 3) + 12)
        sums = c.clipped_sum(weights, x[rows], y[rows], CLIP)
        parts = np.split(stddev * row, np.cumsum([w.size for w in weights])[:-1])
        weights = [
            w - 0.3 * (s / SIZE + part.reshape(w.shape)) for w, s, part in zip(weights, sums, parts, strict=True)
        ]
    np.testing.assert_allclose(one["correlated"], c.flat(weights), atol=1e-5)
    run = {"num_examples": 1, "batch_size": 1, "num_steps": 1, "sampling": "none"}  # one Gaussian, as was planned
    planned = tfdpfl.compute_epsilon(**run, noise_multiplier=1.5, delta=1e-3, accountant="rdp")
    np.testing.assert_allclose(one["correlated epsilon"], planned, rtol=1e-6)
    assert len(one["segments"]) == 1


def assert_noise_went_on_and_all_steps_counted(one, two):
    for name in one:
        assert one[name].tobytes() == two[name].tobytes(), name
    steps, apart, passes = one["ran"]
    # Keras 2 loads what the first step makes: not seen is that a pass begins there, so uses may be a step apart.
    assert steps == 4 * passes and steps & (steps - 1) == 0 and apart == 1 and len(one["origins"]) == 2
    assert accepts(one["noise"], 1.5 * CLIP / 9)  # without the state of before there were several nodes


@pytest.mark.slow
@only_keras2
def test_two_workers_make_the_update_of_one_device_and_go_on_from_a_backup_after_one_was_killed(tmp_path):
    """One test, since pytest-xdist would start the four processes once more for another."""
    first, later = trained(tmp_path)
    assert_one_update_one_noise_and_one_count(*first)
    assert_correlated_noise_of_one_key(first[0])
    assert_noise_went_on_and_all_steps_counted(*later)


@pytest.mark.slow
def test_an_adaptive_clip_beside_correlated_noise_is_the_same_on_all_workers(monkeypatch):
    """Two optimizers of one process, which have nothing in common but the key of each step."""
    x, y = c.examples(12)
    key = tf.Variable(np.zeros([1, 2], np.int64))
    agree = lambda units, *_: _workers.WorkerAgreement(units, tf.constant(1.0, tf.float64), key.read_value())
    monkeypatch.setattr(_workers, "agree", agree)
    noise = tfdpfl.noise.Banded(bands=2, min_separation=2, max_participations=2)
    made = {"expected_batch_size": 12, "noise": noise, "learning_rate": 0.1}
    both = [c.compiled(tfdpfl.DPSGD(tfdpfl.AdaptiveClip(initial=0.5), 2.0, **made)) for _ in range(2)]
    clips = []
    for step in range(4):
        key.assign(Source(step).fresh_key()[None])
        for model in both:
            model.train_on_batch(x, y)
        kept = [c.flat([*model.get_weights(), np.array(model.optimizer._dp.noise.segments.table)]) for model in both]
        np.testing.assert_array_equal(*kept)
        clips.append([model.optimizer.current_clip for model in both])
    assert all(one == two for one, two in clips) and len({one for one, _ in clips}) == 4
    ledgers = [model.optimizer.ledger for model in both]
    assert ledgers[0] == ledgers[1] and ledgers[0].steps == 4
    (segment,) = ledgers[0].origins
    assert int(segment, 16) == np.array(both[0].optimizer._dp.noise.segments.table)[0, 0]  # and not its process's


class Workers:
    """A strategy of two workers with two replicas each, as far as data need one. It has the batches of both."""

    num_replicas_in_sync = 4

    def distribute_datasets_from_function(self, share):
        self.shares = [share(tf.distribute.InputContext(2, i, 4)) for i in range(2)]
        return self.shares[0]

    def logical_batches(self, number, parts=1):
        """The rows of each batch, by worker."""
        iterators = [share.as_numpy_iterator() for share in self.shares]
        return [[[int(i) for _ in range(2 * parts) for i in next(it)] for it in iterators] for _ in range(number)]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("kind", ["poisson", "random_allocation", "fixed_order", "cyclic_poisson"])
def test_the_workers_batches_are_together_those_of_one_process(kind, parts):
    x, strategy = np.arange(80), Workers()
    make, args, how = {
        "poisson": (tfdpfl.data.poisson_batches, (0.25, 4), {"seed": 3}),
        "random_allocation": (tfdpfl.data.random_allocation, (), {"expected_batch_size": 20, "seed": 3}),
        "fixed_order": (tfdpfl.data.fixed_order, (20,), {}),
        "cyclic_poisson": (tfdpfl.data.cyclic_poisson, (4,), {"groups": 2, "expected_batch_size": 20, "seed": 3}),
    }[kind]
    data = make(x, *args, **how, physical_batch_size=20 // parts, strategy=strategy)
    declared = tfdpfl.data.declared_sampling(data)
    assert (declared.workers, declared.physical_batches, declared.steps) == (2, parts, 4)
    passes = [strategy.logical_batches(8, parts)[at : at + 4] for at in (0, 4)]
    drawn = [[sorted(one + two) for one, two in each] for each in passes]
    for one, two in (each for pass_ in passes for each in pass_):
        assert {i % 2 for i in one} == {0} and {i % 2 for i in two} == {1}  # each worker from its own
        assert len({*one, *two}) == len(one) + len(two) and 5 < len(one + two) < 40
    if kind == "fixed_order":
        assert drawn == 2 * [[list(range(at, at + 20)) for at in (0, 20, 40, 60)]]
        return
    assert drawn[0] != drawn[1]
    if kind == "random_allocation":
        assert all(sorted(np.concatenate(each)) == list(x) for each in drawn)
    if kind == "cyclic_poisson":
        turns = [set(np.concatenate([*drawn[0][at::2], *drawn[1][at::2]])) for at in (0, 1)]
        assert not turns[0] & turns[1] and min(map(len, turns)) > 20


def test_batches_that_belong_together_are_counted_from_the_first_that_workers_read():
    """Keras 2 may go on in the middle of an epoch, with the data from their beginning."""
    data = tfdpfl.data.poisson_batches(np.arange(80), 0.25, 4, physical_batch_size=10, strategy=Workers())
    call = {"x": data, "steps_per_epoch": 8}
    optimizer = c.compiled(tfdpfl.DPSGD(1.0, 1.0, gradient_accumulation_steps=2, expected_batch_size=20)).optimizer
    sampled = {"num_examples": 80, "batch_size": 20, "sampling": "poisson"}
    fit, parts = Fit(c.classifier(), optimizer, sampled, 0.0, 1, call, 8), []
    for first in (5, 0):
        fit.first = first
        for batch in range(first, 8):
            fit.announce(batch, 1)
            parts.append(int(optimizer._dp.counter.batches[-3]))
    assert parts == [i % 2 for i in range(11)]


@pytest.mark.parametrize("steps, whole", [(8, True), (16, True), (4, False), (9, False)])
def test_epochs_of_workers_are_whole_passes_where_a_pass_has_a_price_or_a_batch_has_parts(steps, whole):
    strategy = Workers()
    samplings = [
        tfdpfl.data.random_allocation(np.arange(80), expected_batch_size=10, strategy=strategy),
        tfdpfl.data.poisson_batches(np.arange(80), 0.25, 4, physical_batch_size=10, strategy=strategy),
    ]
    for data in samplings:
        call = {"x": data, "steps_per_epoch": steps}
        assert is_stream(call) != whole
        said = tfdpfl.callbacks.PrivacyBudget(delta=1e-5)
        said.set_params({})
        check = functools.partial(
            Sampling(said, None, 0.0, call)._check_passes, tfdpfl.data.declared_sampling(data).scheme
        )
        if whole:
            check()
        else:
            with pytest.raises(PrivacyError, match=r"whole passes, .* steps_per_epoch=8"):
                check()


def test_machines_that_make_other_noise_of_one_key_do_not_agree(monkeypatch):
    """As a processor's last bits, or a GPU's generator beside a CPU's."""
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
    with pytest.raises(ValueError, match="truncated_batch_size=8 together with strategy"):
        tfdpfl.data.poisson_batches(c.examples(12), 0.5, 2, strategy=strategy, truncated_batch_size=8)


def test_a_batch_in_a_fixed_order_has_an_example_for_each_replica():
    with pytest.raises(ValueError, match="cut into 4 parts for the replicas, but the last batch of a pass has 3"):
        tfdpfl.data.fixed_order(c.examples(12), 9, strategy=Workers())
