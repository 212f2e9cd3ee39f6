"""Faults that are planted in the package, as its peers had them or as a user would make them, and what finds each.

Every fault has a check that says what is wrong, or nothing. The check is made twice, with the fault and without it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import audit_cases as cases
import numpy as np
from audit_cases import DELTA, FAR, ONES, WITHOUT, Training, X, Y, optimizer

from tfdpfl import _replay_hook
from tfdpfl.audit import ReplayReport, audit_epsilon, replay

REPLAY, BOUND, ACCOUNT, REFUSAL = "replay", "lower bound", "accountant", "refusal"


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
      name: as the page says it.
      instrument: what finds it.
      says: a part of what that says.
      plant: a context in which the package is broken; of what a user does wrong, nothing.
      check: given whether the fault is there, what is wrong, "" if nothing is.
      stack: of the two.
    """

    name: str
    instrument: str
    says: str
    check: Callable[[bool], str]
    plant: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
    stack: str = "keras3"

    def found(self, there: bool) -> str:
        """What the instrument says, with the fault or without it."""
        if not there:
            return _sound(self.check)
        with self.plant():
            return self.check(True)


@functools.cache
def _sound(check: Callable[[bool], str]) -> str:
    return check(False)


# -- instruments ---------------------------------------------------------------------------------------------------


def told(report: ReplayReport) -> str:
    return "\n".join(map(str, report.findings))


def replayed(name: str) -> Callable[[bool], str]:
    """Of a training of the cases: with the fault, traced anew."""
    return lambda there: told(cases.TRAININGS[name][0]().replayed() if there else cases.sound_replay(name))


def bounded(name: str, trials: int = 400) -> Callable[[bool], str]:
    sound, broken = (lambda: cases.sound_bound(name)), (lambda: cases.TRAININGS[name][0]().bounded(trials))
    return lambda there: above(broken if there else sound)(there)


def above(bound: Callable[[], tuple[float, float]]) -> Callable[[bool], str]:
    def check(there: bool) -> str:
        claim, found = bound() if there else cases.sound(bound)
        return f"epsilon ≥ {found:.2f}, and {claim:.2f} is claimed" if found > claim else ""

    return check


def refused(call: Callable[[bool], Any]) -> Callable[[bool], str]:
    def check(there: bool) -> str:
        try:
            call(there)
        except ValueError as error:  # a PrivacyError is one
            return str(error)
        return ""

    return check


class _Counted:
    """A tape that keeps what each release costs."""

    def __init__(self):
        self.bounds: list[float] = []

    def take(self, release: _replay_hook.Release) -> list[np.ndarray]:
        self.bounds.append(release.bound)
        return release.out


def priced(runs: Callable[[Training], None]) -> Callable[[bool], str]:
    """What the ledger says against the price of all releases that were seen."""

    def check(there: bool) -> str:
        from tfdpfl import PrivacyLedger

        training, tape = Training(optimizer()), _Counted()
        with mock.patch.object(_replay_hook, "tape", tape):
            runs(training)
        ran = PrivacyLedger()
        for bound in tape.bounds:
            ran.add(cases._event(1 / bound))
        said, true = training.model.optimizer.ledger.epsilon(DELTA), ran.epsilon(DELTA)
        return f"the ledger says epsilon = {said:.2f}, and {true:.2f} was spent" if said < true * (1 - 1e-6) else ""

    return check


Plant = Callable[[], contextlib.AbstractContextManager]


def patched(target: Callable[[], Any], name: str, make: Callable[[Any], Any]) -> Plant:
    """Breaks ``name`` of what ``target`` imports: ``make`` gets what was there."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        where = target()
        with mock.patch.object(where, name, make(where.__dict__[name])):
            yield

    return plant


# -- what is broken ------------------------------------------------------------------------------------------------


def lazily(module: str, name: str = "") -> Callable[[], Any]:
    """What is to be broken, imported when it is."""

    def target() -> Any:
        found = importlib.import_module(f"tfdpfl.{module}")
        return getattr(found, name) if name else found

    return target


_plan = lazily("clipping.pipeline", "ClippingPipeline")
_source = lazily("noise", "Source")
_privatizer = lazily("optimizers._privatizer")
_noise = lazily("optimizers._fresh_noise")
_adaptive, _clipping = lazily("optimizers._clips", "Adaptive"), lazily("optimizers._clips", "Clipping")
_clips, _embeddings = lazily("clips", "AdaptiveClip"), lazily("embeddings", "AdaFEST")
_counter = lazily("optimizers._step_table", "Counter")
_words = lazily("data.draws", "Words")
_metrics, _preprocessing = lazily("callbacks.private_metrics", "PrivateMetrics"), lazily("preprocessing")
_aggregators = lazily("pate.aggregators")
_top = lazily("label_dp.classification", "_PriorTransformer")
_updates, _flower = lazily("flower.updates", "ClippedSum"), lazily("flower.strategies", "DifferentialPrivacy")
_federated, _secret = lazily("federated.aggregators"), lazily("federated.aggregators", "Secret")


def _no_clip(finish: Any) -> Any:
    return lambda self, norms, clip, size: finish(self, norms, 1e6 * clip, size)


def _clip_of_the_mean(finish: Any) -> Any:
    import tensorflow as tf

    def broken(self, norms2, clip, size):
        of_all = lambda norms: [0 * norms[0] + clip / tf.maximum(tf.reduce_mean(norms[0]), clip)]
        return self.scaled_by([norms2], of_all, size)

    return broken


def _divides(add: Any) -> Any:
    """By each update's norm, whatever it is."""

    def broken(self, arrays):
        norm = np.float64(add(self, arrays))
        with np.errstate(invalid="ignore"):
            self._factors *= norm / norm
        return float(norm)

    return broken


@contextlib.contextmanager
def _all_finite() -> Iterator[None]:
    """Of examples whose gradients are not finite nothing is known."""
    import tensorflow as tf

    with mock.patch.object(tf.math, "is_finite", lambda x: tf.ones_like(x, tf.bool)):
        yield


def _every_second(gaussian: Any) -> Any:
    import tensorflow as tf

    turn = tf.Variable(0)

    def broken(self, *how):
        here = tf.cast(tf.math.floormod(turn.assign_add(1), 2), tf.float32)
        return [here * normal for normal in gaussian(self, *how)]

    return broken


def _same_key(gaussian: Any) -> Any:
    import tensorflow as tf

    return lambda self, shapes, stddev, key=None: gaussian(self, shapes, stddev, tf.constant([1, 2], tf.int64))


def _same_node(fresh_key: Any) -> Any:
    import tensorflow as tf

    return lambda self: tf.constant([1, 2], tf.int64)


def _first_use(moved: Any) -> Any:
    return lambda column, steps, separation, most: moved(column, steps, separation, 1)


def _noise_of_kernels(added: Any) -> Any:
    return lambda s, n: added(s, n) if len(s.shape) == 2 else s


@contextlib.contextmanager
def _fraction_without_noise() -> Iterator[None]:
    adaptive = _adaptive()
    clipped, adapt = adaptive.clipped, adaptive.adapt

    def keeping(self, *args):
        found, self.exact = clipped(self, *args)
        return found, self.exact

    broken = lambda self, count, units: adapt(self, self.exact, units)
    with mock.patch.object(adaptive, "clipped", keeping), mock.patch.object(adaptive, "adapt", broken):
        yield


def _thrice(values: Any) -> Any:
    return lambda self, x, y: 3 * values(self, x, y)


def _not_clipped(clipped: Any) -> Any:
    return lambda rows, low, high: iter([rows])


def _as_long_as_they_are(short: Any) -> Any:
    return lambda rows, clip: iter([rows[:, None] / clip])


def _every_word(vocabulary: Any) -> Any:
    return lambda examples, *_: sorted({word for words in examples for word in words} - {"[UNK]"})


def _wrong_sign(split: Any) -> Any:
    def broken(self, noise_multiplier, cohort, larger=max):
        _, of_count = split(self, noise_multiplier, cohort, larger)
        return (noise_multiplier**-2 + (2 * of_count) ** -2) ** -0.5, of_count

    return broken


def _forgotten(prior: Any) -> Any:
    return property(lambda self: float(self.epsilon))


def _twice(epsilon: Any) -> Any:
    return property(lambda self: 2 * epsilon.fget(self))


# -- runs ----------------------------------------------------------------------------------------------------------

PLAIN = lambda: Training(optimizer())
PLAINLY, ADAPTING = replayed("DPSGD"), replayed("AdaptiveClip")
CHANGED = np.where(np.arange(len(X))[:, None] == FAR, -X, X)


def _by_size(there: bool) -> str:
    def run(w: np.ndarray) -> Any:
        size = float(w.sum()) if there else float(len(w))
        return Training(optimizer(expected_batch_size=size)).run(w)

    return told(replay(run, ONES, WITHOUT, adjacency="zero_out"))


def _smuggled(there: bool) -> str:
    import tensorflow as tf

    class Smuggler(tf.keras.layers.Layer):
        def build(self, shape):
            self.moving = self.add_weight(name="moving_mean", shape=(shape[-1],), initializer="zeros", trainable=False)

        def call(self, x, training=False):
            if training:
                self.moving.assign(0.9 * self.moving + 0.1 * tf.reduce_mean(x, 0))
            return x

    training = Training(optimizer(), layer=Smuggler if there else None)
    assert training.run(ONES)
    return told(replay(training.run, (X, Y, ONES), (CHANGED, Y, ONES)))


def _with_metrics(there: bool) -> str:
    training = Training(optimizer())

    def run(data: Any) -> Any:
        model = training.run(data)
        return [model, model.history.history["loss"] if there else None]

    assert training.run(ONES)
    return told(replay(run, (X, Y, ONES), (CHANGED, Y, ONES)))


def _not_a_number(there: bool) -> str:
    """One example is NaN; as if it was not there."""
    training, broken = Training(optimizer()), X.copy()
    broken[FAR] = np.nan
    assert training.run(ONES)
    return told(replay(training.run, (X, Y, WITHOUT), (broken, Y, ONES), adjacency="zero_out"))


def _seeded_votes(there: bool) -> str:
    from tfdpfl import pate

    run = lambda votes: pate.GNMax(1.0, seed=7 if there else None).aggregate(np.tile(votes, (40, 1))).labels
    return told(replay(run, cases.ONE, cases.OTHER_VOTES))


def _predictions(there: bool) -> str:
    """Of five teachers one says something else."""
    from tfdpfl import pate

    one = np.repeat([[0], [0], [1], [1], [2]], 40, axis=1)
    other = np.where(np.arange(5)[:, None] == 0, 1, one)
    return told(replay(lambda said: pate.GNMax(1.0).aggregate(said, num_classes=3).labels, one, other))


def _merged(as_counts: Any) -> Any:
    """Two teachers are one model, so that one example has two votes."""

    def broken(votes, num_classes=None, num_teachers=None):
        if num_classes is not None:
            votes = np.asarray(votes)[[0, 0, 2, 3, 4]]
        return as_counts(votes, num_classes, num_teachers)

    return broken


def _half_noise_of_votes(noisy: Any) -> Any:
    halved = lambda source: types.SimpleNamespace(normals=lambda shape: source.normals(shape) / 2)
    return lambda values, part, source: noisy(values, part, halved(source))


def _votes_replayed(there: bool) -> str:
    return _seeded_votes(False)


def _federation(there: bool) -> str:
    return told(cases.strategy_case("", cases._wrapped("Fixed", l2_norm_clip=1.0)).replay())


def _unmoved(there: bool) -> str:
    """A client sends what it was sent, in place of an update."""
    make = cases._wrapped("Fixed", l2_norm_clip=1.0)
    return told(replay(lambda far: cases.federation(make(), far, 2)[0], 1.0, 0.0))


def _weighted(add: Any) -> Any:
    """Each client counts as often as it has examples, here three."""

    def broken(self, arrays):
        add(self, arrays)
        add(self, arrays)
        return add(self, arrays)

    return broken


def _flower_stddev(stddevs: Any) -> Any:
    return lambda self, clip, clients: tuple(part / clients for part in stddevs(self, clip, clients))


def _top_k(claim: float) -> Callable[[], tuple[float, float]]:
    def bound() -> tuple[float, float]:
        from test_epsilon import SHIPPED

        _, mechanism, one, other = SHIPPED["TopK"]
        return claim, audit_epsilon(mechanism, one, other, 20_000, cases.CONFIDENCE, vectorized=True)

    return bound


def _paid_prior() -> tuple[float, float]:
    from test_epsilon import SHIPPED

    claim, mechanism, one, other = SHIPPED["KMeansPrior"]
    return claim, audit_epsilon(mechanism, one, other, 60_000, cases.CONFIDENCE, vectorized=True)


def _exact_counts(split: Any) -> Any:
    return lambda self, z: (split(self, z)[0], 1e-6)


def _restored(training: Training) -> None:
    """Two runs; then a table that was saved after the first is loaded."""
    table = training.run(ONES).optimizer._dp_ledger
    saved = np.array(table)
    training.run(ONES)
    table.assign(saved)


def _twice_compiled(training: Training) -> None:
    model = training.run(ONES)
    loss, kept = model.loss, model.optimizer
    model.compile(kept, loss)
    training.run(ONES)


def _saved_alone(own_rows: Any) -> Any:
    from tfdpfl.optimizers._step_table import merge_tables

    return lambda self, saved: merge_tables(np.asarray(saved))


@contextlib.contextmanager
def _forgets() -> Iterator[None]:
    """Compiling takes the ledger back."""
    import tensorflow as tf

    compiled = tf.keras.Model.compile

    def broken(self, optimizer, *args, **kwargs):
        if hasattr(optimizer, "_dp_ledger"):
            optimizer._dp_ledger.assign(tf.zeros_like(optimizer._dp_ledger))
            optimizer._dp.counter.table.assign(tf.zeros_like(optimizer._dp.counter.table))
            optimizer._dp.counter.loaded = optimizer._dp.counter.loaded[:0]
        return compiled(self, optimizer, *args, **kwargs)

    with mock.patch.object(tf.keras.Model, "compile", broken):
        yield


def _normalised(there: bool) -> None:
    import tensorflow as tf

    Training(optimizer(), layer=tf.keras.layers.BatchNormalization if there else None).run(ONES)


def _favoured(there: bool) -> None:
    from tfdpfl.data import poisson_batches

    poisson_batches((X, Y), np.linspace(0.1, 0.9, len(X)) if there else 0.5, 2)


def _scaled_gradients(there: bool) -> None:
    import tensorflow as tf

    model = PLAIN().model

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model.loss(y, model(x, training=True)))
        found = tape.gradient(loss, model.trainable_variables)
        found = [2 * g for g in found] if there else found
        model.optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))

    step(tf.constant(X), tf.constant(Y))


def _replicas(there: bool) -> None:
    """Two replicas, each of which would draw noise of its own, and clip each group by itself."""
    training = Training(optimizer(num_microbatches=4))
    two = types.SimpleNamespace(num_replicas_in_sync=2)
    strategy = mock.patch.object(_privatizer().tf.distribute, "get_strategy", lambda: two)
    model = training.model
    with strategy if there else contextlib.nullcontext():
        model.optimizer._dp.check_replicas()


def _overlapping(there: bool) -> None:
    from tfdpfl.pate import TeacherEnsemble

    shards = [np.arange(4), np.arange(3 if there else 4, 8)]
    TeacherEnsemble(lambda: None, 2)._check_shards(shards, 8)


def _in_tff(there: bool) -> str:
    # Inputs that are always told apart show a μ of 1.5 with 30 runs that count, and 1 is claimed.
    process = cases._process("build_dp_fed_avg", noise_multiplier=1.0)
    bound = cases.process_case("", process, (100.0, 0.0), trials=40).bound
    assert bound is not None
    return above(bound)(there)


def _unclipped(clip: Any) -> Any:
    return lambda record, bound: (record, clip(record, bound)[1])


FAULTS = [
    # Clips.
    Fault("clip dropped", REPLAY, "sensitivity: tfdpfl/optimizers/_fresh_noise.py", PLAINLY,
          patched(_plan, "finish", _no_clip)),
    Fault("the mean gradient clipped in place of each", REPLAY, "sensitivity: tfdpfl/optimizers/_fresh_noise.py",
          PLAINLY, patched(_plan, "finish", _clip_of_the_mean)),
    Fault("division by the norm of an update of zero", REPLAY, "moves by nan", _unmoved,
          patched(_updates, "add", _divides)),
    Fault("NaN passed on", REPLAY, "moves by nan", _not_a_number, _all_finite),
    # Noise.
    Fault("noise × 0.5", REPLAY, "times what is charged", PLAINLY,
          patched(_source, "gaussian", lambda whole: lambda self, *how: [n / 2 for n in whole(self, *how)])),
    Fault("noise in every second step alone", REPLAY, "times what is charged",
          # Its size is judged at seven standard deviations.
          lambda there: told((PLAIN() if there else cases.trained("DPSGD")).replayed(10)),
          patched(_source, "gaussian", _every_second)),
    Fault("noise on some of the variables alone", REPLAY, "is not the values with their noise", PLAINLY,
          patched(_noise, "added", _noise_of_kernels)),
    Fault("key used again", REPLAY, "is that of release 0", PLAINLY, patched(_source, "gaussian", _same_key)),
    Fault("seed in the source", REPLAY, "its seed is no secret", _seeded_votes),
    Fault("correlated noise begun anew with the same nodes", BOUND, "is claimed",
          bounded("DPFTRL (tree noise)"), patched(_source, "fresh_key", _same_node)),
    Fault("uses after the first left out of the sensitivity", BOUND, "is claimed",
          bounded("BandedInverse noise", 600), patched(lazily("noise.strategies"), "moved_by_toeplitz", _first_use)),
    Fault("noise multiplier charged at twice its size", REPLAY, "sensitivity: tfdpfl/optimizers/_fresh_noise.py",
          PLAINLY, patched(_clipping, "split",
                                   lambda split: lambda self, z, units: (z / 2, None))),
    # Clips that adapt.
    Fault("fraction within the clip without noise", REPLAY, "noise or denominator of release 1",
          ADAPTING, _fraction_without_noise),
    Fault("split of the noise with the wrong sign", REPLAY, "sensitivity: tfdpfl/optimizers/_fresh_noise.py",
          ADAPTING,
          patched(_clips, "split", _wrong_sign)),
    # Sampling and denominators.
    Fault("Poisson declared and not done", BOUND, "is claimed",
          above(cases.poisson),
          patched(_words, "each", lambda each: lambda self, number, rate: np.arange(number))),
    Fault("rests declared, and no coins after them", BOUND, "is claimed", above(cases.resting),
          patched(_words, "each", lambda each: lambda self, number, rate: np.arange(number))),
    Fault("random allocation declared and not done", BOUND, "is claimed", above(cases.allocated),
          patched(_words, "allocated",
                  lambda allocated: lambda self, number, steps, each: [np.arange(number)] * steps)),
    Fault("denominator by the size of the data", REPLAY, "noise or denominator", _by_size),
    Fault("weighted sampler", REFUSAL, "No ε is known", refused(_favoured)),
    # What goes round the noise.
    Fault("BatchNormalization", REFUSAL, "GroupNormalization", refused(_normalised)),
    Fault("moving statistics smuggled in past the check", REPLAY, "(moving_mean)", _smuggled,
          patched(_privatizer, "check_finished", lambda check: lambda *args: None)),
    Fault("metric of the training data released", REPLAY, "result: result[1]", _with_metrics),
    Fault("metric of Keras left beside the private ones", REPLAY, "result: result['loss']",
          lambda there: told(cases.metrics_replay(metrics=["accuracy"])),
          patched(_metrics, "_hide", lambda hide: lambda self, logs, prefix="": None)),
    Fault("loss of an example not clipped before it is summed", REPLAY, "sensitivity: tfdpfl/_sums.py",
          lambda there: told(cases.metrics_replay()), patched(_metrics, "_values_of", _thrice)),
    Fault("features not clipped to their bounds", REPLAY, "sensitivity: tfdpfl/_sums.py",
          lambda there: told(replay(cases._normalised, 9 * cases.CORNER, 0 * cases.CORNER, adjacency="zero_out")),
          patched(_preprocessing, "_clipped", _not_clipped)),
    Fault("examples not clipped before they are whitened", REPLAY, "sensitivity: tfdpfl/_sums.py",
          lambda there: told(replay(cases._whitened, 9 * cases.CORNER, 0 * cases.CORNER, adjacency="zero_out")),
          patched(_preprocessing, "_short", _as_long_as_they_are)),
    Fault("words of one example alone are learned", BOUND, "is claimed", above(cases.rare_word),
          patched(_preprocessing, "_vocabulary", _every_word)),
    Fault("gradients scaled after the clip", REFUSAL, "did not come through the clip", refused(_scaled_gradients)),
    Fault("noise of each replica's own", REFUSAL, "runs 2 replicas", refused(_replicas)),
    # What is counted.
    Fault("steps not counted", ACCOUNT, "the ledger says epsilon = 0.00", priced(lambda t: t.run(ONES, 2)),
          patched(_counter, "count", lambda count: lambda *args: None)),
    Fault("counts stale after a checkpoint is loaded", ACCOUNT, "was spent", priced(_restored),
          patched(_counter, "own_rows", _saved_alone)),
    Fault("ledger taken back by compile", ACCOUNT, "was spent", priced(_twice_compiled), _forgets),
    Fault("AdaFEST's threshold without noise", BOUND, "is claimed",
          bounded("AdaFEST"), patched(_embeddings, "split", _exact_counts)),
    # Labels and votes.
    Fault("label said with twice the ε", BOUND, "is claimed", above(_top_k(1.0)),
          patched(_top, "_response_epsilon", _twice)),
    Fault("prior's ε forgotten", BOUND, "is claimed", above(_paid_prior),
          patched(_top, "_response_epsilon", _forgotten)),
    Fault("teachers merged", REPLAY, "sensitivity: tfdpfl/pate/aggregators.py", _predictions,
          patched(_aggregators, "as_counts", _merged)),
    Fault("an example in two shards", REFUSAL, "must be disjoint", refused(_overlapping)),
    Fault("σ of the vote half of what is charged", REPLAY, "noise: tfdpfl/pate/aggregators.py", _votes_replayed,
          patched(_aggregators, "_noisy", _half_noise_of_votes)),
    # Federations.
    Fault("clients weighted by their examples", REPLAY, "sensitivity: tfdpfl/flower/strategies.py",
          _federation, patched(_updates, "add", _weighted)),
    Fault("noise of the mean on the sum", REPLAY, "sensitivity: tfdpfl/flower/strategies.py",
          _federation, patched(_flower, "_stddevs", _flower_stddev)),
    Fault("noise × 0.1 in TFF's aggregator", BOUND, "is claimed", _in_tff,
          patched(_secret, "gaussian_like", lambda whole: lambda self, value, s: whole(self, value, s / 10)), "tff"),
    Fault("clip dropped in TFF's aggregator", BOUND, "is claimed", _in_tff,
          patched(_federated, "clip_by_norm", _unclipped), "tff"),
]  # fmt: skip


def here() -> list[Fault]:
    """Those of this stack."""
    stack = "tff" if "TFF" in cases.here() else "keras3"
    return [f for f in FAULTS if f.stack == stack and ("Flower" in cases.here() or "flower" not in f.says)]
