"""What the self-audit looks at: each mechanism of the package on two neighbours, by replay and by a lower bound.

A case's claim is what the package itself says that one run costs. Whatever can be seen of that run goes to the bound.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import random
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from tfdpfl import _replay_hook
from tfdpfl.audit import ReplayReport, audit_epsilon, replay

sys.path.append(str(Path(__file__).parents[1] / "flower"))  # for its fakes

CONFIDENCE = 0.999
DELTA = 1e-3


@dataclasses.dataclass(frozen=True)
class Case:
    """One mechanism.

    Attributes:
      name: as the page says it.
      group: of the page's table.
      replay: makes a `ReplayReport`; None where no tap is.
      bound: makes (claim, what was found); None where replay is all there is.
      least: the part of the claim that is to be found, so that the bound is no empty one.
    """

    name: str
    group: str
    replay: Callable[[], ReplayReport] | None
    bound: Callable[[], tuple[float, float]] | None
    least: float = 0.3


# -- optimizers ----------------------------------------------------------------------------------------------------

NUMBER, FAR = 8, 3  # of the examples, and the one that neighbours differ in
_rng = np.random.default_rng(0)
X = _rng.normal(size=(NUMBER, 6)).astype("float32")
X[FAR] *= 5
Y = (np.arange(NUMBER) % 3).astype("int32")
ONES = np.ones(NUMBER, "float32")
WITHOUT = np.where(np.arange(NUMBER) == FAR, 0, ONES).astype("float32")  # its gradient is 0
CLIP, Z = 0.1, 0.7


class _Open:
    """A tape that changes nothing, so that a step is traced with its taps."""

    def take(self, release: _replay_hook.Release) -> list[np.ndarray]:
        return release.out


@contextlib.contextmanager
def _taps() -> Iterator[None]:
    before = _replay_hook.tape
    _replay_hook.tape = before or _Open()
    try:
        yield
    finally:
        _replay_hook.tape = before


class Training:
    """A small training that begins anew, from the same weights, as often as it is asked; traced once each way.

    Args:
      optimizer: makes it.
      way: ``"fit"``, ``"train_step"`` (one's own, with a tape), or ``"loop"`` (one's own, without `fit`).
      batch: rows of a batch.
      steps: batches of a run.
      words: whether rows of a table are trained, in place of two layers.
      without: the neighbour's weights.
      layer: put between the layers.
    """

    def __init__(
        self, optimizer: Callable[[], Any], way: str = "fit", batch: int = NUMBER, steps: int = 1, words: bool = False,
        without: np.ndarray = WITHOUT, layer: Callable[[], Any] | None = None,
    ):  # fmt: skip
        self.optimizer, self.way, self.batch, self.steps, self.words = optimizer, way, batch, steps, words
        self.without, self.layer = without, layer

    @functools.cached_property
    def model(self) -> Any:
        import tensorflow as tf

        keras, layers = tf.keras, tf.keras.layers
        keras.utils.set_random_seed(0)

        class Own(keras.Sequential):
            def train_step(self, data):
                x, y, w = data
                with tf.GradientTape() as tape:
                    loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True), sample_weight=w)
                found = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(found, self.trainable_variables, strict=True))
                return {"loss": loss}

        if self.words:
            parts = [keras.Input((1,), dtype="int32"), layers.Embedding(20, 3, name="words"), layers.Flatten()]
        else:
            parts = [keras.Input((6,)), *([self.layer()] if self.layer else []), layers.Dense(12, "tanh")]
        model = (keras.Sequential if self.way == "fit" else Own)([*parts, layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(self.optimizer(), loss)
        model.optimizer.build(model.trainable_variables)
        return model

    @functools.cached_property
    def start(self) -> list[tuple[Any, np.ndarray]]:
        """What each run begins with: all that is trained or kept, but what the package counts and draws."""
        mine = ("dp_ledger", "dp_noise")
        state = [v for v in self.model.optimizer.variables if not v.name.startswith(mine)]
        return [(v, v.numpy()) for v in [*self.model.variables, *state]]

    def data(self, weights: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(x, y, weights) of the weights; or what is given as these three."""
        if isinstance(weights, tuple):
            return weights
        return (np.arange(NUMBER, dtype="int32")[:, None] if self.words else X), Y, weights

    def run(self, weights: Any, times: int = 1) -> Any:
        """One run, or several in a row; returns the model."""
        import tensorflow as tf

        x, y, w = self.data(weights)
        with _taps():
            for variable, value in self.start:
                variable.assign(value)
            if self.way == "loop":
                for _ in range(times * self.steps):
                    self._step(x, y, w)
            else:
                batches = tf.data.Dataset.from_tensor_slices((x, y, w)).batch(self.batch)
                self.model.fit(batches, epochs=times * self.steps * self.batch // NUMBER, verbose=0)
        return self.model

    @functools.cached_property
    def _step(self) -> Any:
        import tensorflow as tf

        return tf.function(lambda x, y, w: self.model.train_step((x, y, w)), self._any_size())

    def _any_size(self) -> list[Any]:
        """What a batch is, of any size: steps on batches of a size that TensorFlow knows are traced twice."""
        import tensorflow as tf

        return [tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in self.data(ONES)]

    @functools.cached_property
    def claim(self) -> float:
        """ε of one run, by the optimizer's ledger: to be asked for before any other run."""
        return self.run(ONES).optimizer.ledger.epsilon(DELTA)

    @functools.cached_property
    def _many(self) -> Any:
        import tensorflow as tf

        @functools.partial(tf.function, input_signature=[tf.TensorSpec([], tf.int32), *self._any_size()])
        def many(trials, *batch):
            seen = tf.TensorArray(tf.float32, trials)
            for i in tf.range(trials):
                for variable, value in self.start:
                    variable.assign(tf.constant(value))
                for _ in range(self.steps):
                    self.model.train_step(batch)
                flat = tf.concat([tf.reshape(v, [-1]) for v in self.model.trainable_variables], 0)
                seen = seen.write(i, flat)
            return seen.stack()

        return many

    def pull(self) -> np.ndarray:
        """Puts the weights back where runs begin, and returns the gradient there of the example (or pair)."""
        import tensorflow as tf

        for variable, value in self.start:
            variable.assign(value)
        (x, y, _), here = self.data(ONES), self.without == 0
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.model.loss(y[here], self.model(x[here])))
        found = tape.gradient(loss, [v.value for v in self.model.trainable_variables])
        return np.concatenate([np.ravel(tf.convert_to_tensor(g)) for g in found])

    def scores(self, weights: np.ndarray, trials: int) -> np.ndarray:
        """Of each run, how far the weights went where the example pulls them."""

        x, y, w = self.data(weights)
        pull = self.pull()
        before = np.concatenate([np.ravel(v.numpy()) for v in self.model.trainable_variables])
        moved = self._many(trials, x, y, w).numpy() - before
        score = -moved @ pull
        if not self.words:
            return score
        row = moved[:, : 20 * 3].reshape(trials, 20, 3)[:, FAR]  # untouched, where it was not kept
        return score + 1e3 * np.any(row, 1)

    def replayed(self, times: int = 2) -> ReplayReport:
        assert self.claim > 0
        return replay(lambda w: self.run(w, times), ONES, self.without, adjacency="zero_out")

    def bounded(self, trials: int = 400) -> tuple[float, float]:
        claim = self.claim
        how = dict(delta=DELTA, vectorized=True, tradeoff="gaussian")
        return claim, audit_epsilon(self.scores, ONES, self.without, trials, CONFIDENCE, **how)


def optimizer(name: str = "DPSGD", **options: Any) -> Callable[[], Any]:
    """Makes one of the package, or, for another name, one of Keras's made private."""

    def make() -> Any:
        import tensorflow as tf

        import tfdpfl

        cls = getattr(tfdpfl, name, None) or tfdpfl.make_dp_optimizer_class(getattr(tf.keras.optimizers, name))
        given = {"l2_norm_clip": CLIP, "noise_multiplier": Z, "learning_rate": 0.05, **options}
        return cls(**given)

    return make


def _noise(kind: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from tfdpfl import noise

        return optimizer(noise=getattr(noise, kind)(**options))()

    return make


def _clip(kind: str, *args: Any, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import tfdpfl

        return optimizer(l2_norm_clip=getattr(tfdpfl, kind)(*args, **options))()

    return make


def _sparse() -> Any:
    import tfdpfl

    return optimizer(sparse=tfdpfl.AdaFEST(threshold=0.5, clip=1.0), noise_multiplier=1.0)()


PAIR = np.where(np.arange(NUMBER) // 2 == FAR // 2, 0, ONES).astype("float32")
# The least part of the claim that a lower bound must find. None where replay is all there is: their noise is drawn as
# DPSGD's or DPFTRL's is, of which there is a bound. A large ε in the denominator makes the update nearly linear.
TRAININGS: dict[str, tuple[Callable[[], Training], float | None]] = {
    "DPSGD": (lambda: Training(optimizer()), 0.15),
    "DPAdam": (lambda: Training(optimizer("DPAdam", epsilon=100.0)), None),
    "DPAdamW": (lambda: Training(optimizer("DPAdamW", epsilon=100.0)), None),
    "DPAdamBC": (lambda: Training(optimizer("DPAdamBC", expected_batch_size=float(NUMBER))), None),
    "DPAdagrad": (lambda: Training(optimizer("DPAdagrad", initial_accumulator_value=10.0)), None),
    "DPRMSprop": (lambda: Training(optimizer("DPRMSprop", epsilon=100.0)), None),
    "make_dp_optimizer_class(Nadam)": (lambda: Training(optimizer("Nadam", epsilon=100.0)), None),
    "a train_step of one's own": (lambda: Training(optimizer(), "train_step"), None),
    "a loop of one's own": (lambda: Training(optimizer(), "loop"), None),
    "gradient_accumulation_steps": (
        lambda: Training(optimizer(gradient_accumulation_steps=2), batch=NUMBER // 2, steps=2), None),
    "num_microbatches": (lambda: Training(optimizer(num_microbatches=4)), None),
    "rows_per_unit": (lambda: Training(optimizer(rows_per_unit=2), without=PAIR), None),
    "AdaptiveClip": (lambda: Training(_clip("AdaptiveClip", initial=CLIP)), 0.1),
    "PerLayerClip": (lambda: Training(_clip("PerLayerClip", CLIP)), None),
    "AutomaticClip": (lambda: Training(_clip("AutomaticClip", CLIP)), None),
    "DPFTRL (tree noise)": (lambda: Training(optimizer("DPFTRL", noise_multiplier=2.0), steps=2), 0.0),
    "banded noise": (
        lambda: Training(_noise("Banded", bands=2, min_separation=2, max_participations=2), batch=NUMBER // 2, steps=2),
        None,
    ),
    "correlated noise of several rows": (
        lambda: Training(optimizer("DPFTRL", rows_per_unit=2), steps=2, without=PAIR), None),
    "BLT noise": (
        lambda: Training(_noise("BLT", max_participations=2, decay=(0.9, 0.3), scale=(0.4, 0.1)), steps=2), None),
    "BandedInverse noise": (lambda: Training(_noise("BandedInverse", bands=2, max_participations=3), steps=3), 0.1),
    "secure_noise": (lambda: Training(optimizer(secure_noise=True)), 0.15),
    "AdaFEST": (lambda: Training(_sparse, words=True), 0.0),
}  # fmt: skip


@functools.cache
def trained(name: str) -> Training:
    """The sound one, whose traces serve the cases and what faults are compared with."""
    return TRAININGS[name][0]()


@functools.cache
def sound(bound: Callable[[], tuple[float, float]]) -> tuple[float, float]:
    return bound()


@functools.cache
def sound_replay(name: str) -> ReplayReport:
    return trained(name).replayed()


@functools.cache
def sound_bound(name: str) -> tuple[float, float]:
    return trained(name).bounded()


def _trainings() -> Iterator[Case]:
    for name, (_, least) in TRAININGS.items():
        seen = None if name == "AdaFEST" else functools.partial(sound_replay, name)
        bound = None if least is None else functools.partial(sound_bound, name)
        yield Case(name, "optimizers", seen, bound, least or 0.0)
    yield Case("poisson_batches", "optimizers", None, functools.partial(sound, poisson), 0.0)
    yield Case("b_min_sep", "optimizers", None, functools.partial(sound, resting), 0.0)
    yield Case("random_allocation", "optimizers", None, functools.partial(sound, allocated), 0.0)
    yield Case("PrivateMetrics", "optimizers", metrics_replay, None)


def poisson(steps: int = 3, trials: int = 160, times: int = 4, delta: float = 0.01) -> tuple[float, float]:
    """Runs of a few sampled batches in one `fit`, told by how far each one went."""
    import tensorflow as tf

    from tfdpfl.callbacks import PrivacyBudget
    from tfdpfl.data import poisson_batches

    training = Training(optimizer(expected_batch_size=1.0))
    model, start = training.model, training.start
    claims: list[float] = []

    class Runs(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if (batch + 1) % steps == 0:
                if not claims:
                    claims.append(model.optimizer.ledger.epsilon(delta))
                seen.append(np.concatenate([np.ravel(v.numpy()) for v in model.trainable_variables]))
                for variable, value in start:
                    variable.assign(value)

    def scores(weights: np.ndarray, trials: int) -> np.ndarray:
        seen.clear()
        data = [np.concatenate([part, *[np.delete(part, FAR, 0)] * times]) for part in training.data(weights)]
        batches = poisson_batches(tuple(data), 1 / len(data[0]), steps * trials)
        budget = PrivacyBudget(delta=delta)
        model.fit(batches, epochs=1, callbacks=[budget, Runs()], verbose=0)
        before = np.concatenate([np.ravel(value) for _, value in start[:4]])
        return -(np.stack(seen) - before) @ training.pull()

    seen: list[np.ndarray] = []
    found = audit_epsilon(scores, ONES, WITHOUT, trials, CONFIDENCE, delta=delta, vectorized=True)
    return claims[0], found


def allocated(steps: int = 16, trials: int = 400) -> tuple[float, float]:
    """Sums of passes of a few batches, of which each is a run: whether the last example is among them."""
    from tfdpfl import compute_epsilon
    from tfdpfl.data.draws import Words

    def scores(number: int, trials: int) -> np.ndarray:
        """The likelihood ratio of the sums of a pass, of which one has the example, to noise alone."""
        passes = [Words().allocated(number, steps, 1) for _ in range(trials)]
        there = np.array([[steps - 1 in batch for batch in batches] for batches in passes])
        return np.log(np.exp(there + _rng.normal(size=there.shape)).mean(1))

    claim = compute_epsilon(
        num_examples=steps, batch_size=1, noise_multiplier=1.0, num_steps=steps, delta=DELTA,
        sampling="random_allocation",
    )  # fmt: skip
    return claim, audit_epsilon(scores, steps, steps - 1, trials, CONFIDENCE, delta=DELTA, vectorized=True)


def resting(steps: int = 8, trials: int = 1000) -> tuple[float, float]:
    """Base normals of banded noise in trainings of which each has the last example where it is drawn."""
    from tfdpfl import noise
    from tfdpfl.accounting import monte_carlo, price
    from tfdpfl.accounting.correlated import CorrelatedRun
    from tfdpfl.data.draws import Words

    banded, rate, delta = noise.Banded(bands=2, min_separation=2, max_participations=1, num_steps=steps), 0.05, 0.01
    run = CorrelatedRun(
        noise=banded, noise_multiplier=0.8, num_steps=steps, min_separation=2, sampling_rate=rate, sampling="b_min_sep"
    )
    use = np.array(run.dp_event.moves)
    shifts = np.array([np.convolve(step, use) for step in np.eye(steps)])

    def scores(number: int, trials: int) -> np.ndarray:
        """The likelihood ratio of a training that uses the example once to noise alone."""
        passes = [Words().separated(number, steps, rate, 2) for _ in range(trials)]
        used = np.array([[steps - 1 in batch for batch in batches] for batches in passes])
        seen = used @ shifts + _rng.normal(size=(trials, shifts.shape[1]))
        return np.log(np.exp(seen @ shifts.T - use @ use / 2).mean(1))

    with mock.patch.object(monte_carlo, "RUNS", 1 << 16):
        claim = price(run.dp_event, delta, "pld", "add_or_remove_one").epsilon
    return claim, audit_epsilon(scores, steps, steps - 1, trials, CONFIDENCE, delta=delta, vectorized=True)


# -- figures of the data -------------------------------------------------------------------------------------------

WRONG = np.where(np.arange(NUMBER) == FAR, (Y + 1) % 3, Y)


@functools.cache
def _measured() -> Any:
    """A model that does not move."""
    return Training(optimizer(learning_rate=0.0)).model


def metrics_replay(**options: Any) -> ReplayReport:
    from tfdpfl.callbacks import PrivateMetrics

    def shown(y: np.ndarray) -> dict[str, list[float]]:
        metrics = PrivateMetrics(noise_std=0.2, **options)
        return _measured().fit(X, y, batch_size=NUMBER, shuffle=False, verbose=0, callbacks=[metrics]).history

    return replay(shown, Y, WRONG)


COST: dict[str, float] = {"epsilon": 1.0, "delta": DELTA}


def _normalised(x: np.ndarray) -> list[np.ndarray]:
    from tfdpfl.preprocessing import Normalization

    layer = Normalization()
    layer.adapt(x, bounds=(-1.0, 1.0), **COST)
    return [np.array(layer.mean), np.array(layer.variance)]


def _whitened(x: np.ndarray) -> list[np.ndarray]:
    from tfdpfl.preprocessing import Whitening

    layer = Whitening()
    layer.adapt(x, l2_norm_clip=1.0, **COST)
    return [np.array(layer.mean), np.array(layer.matrix)]


def _binned(x: np.ndarray) -> None:
    """What is learned is divided by the number of examples, which is public and differs here."""
    from tfdpfl.preprocessing import Discretization

    Discretization(num_bins=3).adapt(x, bounds=(-1.0, 1.0), **COST)


def _words(kind: str, rows: np.ndarray) -> list[str]:
    from tfdpfl import preprocessing

    layer = getattr(preprocessing, kind)()
    layer.adapt(rows, max_tokens_per_example=2, **COST)
    return layer.get_vocabulary()


def _class_weights(y: np.ndarray) -> list[float]:
    from tfdpfl.preprocessing import class_weights

    return list(class_weights(y, num_classes=3, **COST).values())


MANY = 64
CORNER = np.where(np.arange(MANY)[:, None] == FAR, 1.0, np.zeros((MANY, 3)))
TOKENS = np.array([["a", "b"]] * MANY)
BLANKED = np.where(np.arange(MANY)[:, None] == FAR, "[UNK]", TOKENS)
ALONE = np.where(np.arange(MANY)[:, None] == FAR, "mine", TOKENS)


def rare_word(trials: int = 64) -> tuple[float, float]:
    """Whether a word of one example alone is learned."""
    scores = lambda rows, trials: np.array([float("mine" in _words("StringLookup", rows)) for _ in range(trials)])
    return COST["epsilon"], audit_epsilon(scores, ALONE, BLANKED, trials, CONFIDENCE, delta=DELTA, vectorized=True)


def _preprocessing() -> Iterator[Case]:
    labels = np.arange(MANY) % 3
    unlabelled = np.where(np.arange(MANY) == FAR, 3, labels)
    texts = lambda rows: np.array([" ".join(row).replace("[UNK]", "") for row in rows])
    zeros, blanks = np.zeros_like(CORNER), dict(adjacency="zero_out")
    cases: dict[str, Callable[[], ReplayReport]] = {
        "Normalization": lambda: replay(_normalised, CORNER, zeros, **blanks),
        "Whitening": lambda: replay(_whitened, CORNER, zeros, **blanks),
        "Discretization": lambda: replay(_binned, CORNER, np.delete(CORNER, FAR, 0), adjacency="add_or_remove_one"),
        "StringLookup": lambda: replay(functools.partial(_words, "StringLookup"), TOKENS, BLANKED, **blanks),
        "TextVectorization": lambda: replay(
            functools.partial(_words, "TextVectorization"), texts(TOKENS), texts(BLANKED), **blanks
        ),
        "class_weights": lambda: replay(_class_weights, labels, unlabelled, **blanks),
    }
    for name, seen in cases.items():
        bound = functools.partial(sound, rare_word) if name == "StringLookup" else None
        yield Case(name, "preprocessing", seen, bound, 0.0)


# -- labels --------------------------------------------------------------------------------------------------------

LABEL_TRIALS = 20_000


def _labels() -> Iterator[Case]:
    from test_epsilon import SHIPPED
    from test_replay import LABELS, OTHER
    from test_replay import Y as LABELLED

    same = {"TopK": "TopK", "WithPrior": None, "KMeansPrior": "paid prior"}
    for name, (claim, mechanism, one, other) in SHIPPED.items():
        known = same.get(name, name)
        seen = None
        if known in LABELS:
            release, epsilon, _ = LABELS[known]
            seen = lambda release=release, epsilon=epsilon: replay(release, LABELLED, OTHER, epsilon=epsilon)
        elif name == "WithPrior":
            seen = lambda: replay(_with_prior, LABELLED % 3, (LABELLED + (LABELLED != OTHER)) % 3, epsilon=1.0)

        def bound(claim=claim, mechanism=mechanism, one=one, other=other):
            return claim, audit_epsilon(mechanism, one, other, LABEL_TRIALS, CONFIDENCE, vectorized=True)

        yield Case({"TopK": "RandomizedResponseTopK", "WithPrior": "RandomizedResponseWithPrior",
                    "KMeansPrior": "RandomizedResponseTopK with a KMeansPrior"}.get(name, name), "labels", seen, bound,
                   0.4)  # fmt: skip
    release, epsilon, _ = LABELS["paid histogram"]
    seen = lambda: replay(release, LABELLED, OTHER, epsilon=epsilon)
    yield Case("RROnBins with a histogram", "labels", seen, None)
    yield Case("LabelPrivacy", "labels", None, _pipeline, 0.4)
    yield Case("MultiStageTraining", "labels", _staged_replay, _staged, 0.4)


def _in_stages(x: np.ndarray, y: np.ndarray, rate: float, seed: int | None = None) -> Any:
    import tensorflow as tf

    from tfdpfl.label_dp import MultiStageTraining

    def model() -> Any:
        tf.keras.utils.set_random_seed(0)
        made = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(3, "softmax")])
        made.compile(tf.keras.optimizers.SGD(rate), "sparse_categorical_crossentropy")
        return made

    return MultiStageTraining(model, 1.0, num_classes=3, seed=seed).fit(x, y, batch_size=len(x), verbose=0)


def _staged_replay() -> ReplayReport:
    """The seed is of the stages too, which no label decides."""
    x, y = _rng.normal(size=(40, 2)).astype("float32"), np.arange(40) % 3
    other = np.where(np.arange(40) == 7, (y + 1) % 3, y)

    def release(y: np.ndarray) -> list:
        training = _in_stages(x, y, 1.0, seed=0)
        return [training.noisy_labels_, training.stage_, training.model_]

    return replay(release, y, other, epsilon=1.0)


def _staged() -> tuple[float, float]:
    """Each example is a run, under models that no label moved."""

    def release(label: int, trials: int) -> np.ndarray:
        training = _in_stages(np.ones((trials, 2), "float32"), np.full(trials, label), 0.0)
        return np.column_stack([training.stage_, training.noisy_labels_])

    return 1.0, audit_epsilon(release, 0, 1, LABEL_TRIALS, CONFIDENCE, vectorized=True)


def _with_prior(y: np.ndarray) -> np.ndarray:
    from tfdpfl.label_dp import RandomizedResponseWithPrior

    return RandomizedResponseWithPrior(1.0, [0.3, 0.4, 0.3], 3).fit_transform(y)


def _pipeline() -> tuple[float, float]:
    from tfdpfl.label_dp import LabelPrivacy

    def release(label: int, trials: int) -> np.ndarray:
        return LabelPrivacy(1.0, 3)(np.full(trials, label), ids=np.arange(trials)).numpy()

    return 1.0, audit_epsilon(release, 0, 1, LABEL_TRIALS // 5, CONFIDENCE, vectorized=True)


# -- votes ---------------------------------------------------------------------------------------------------------

ONE, OTHER_VOTES = np.array([[6, 5, 0]]), np.array([[5, 6, 0]])


def _votes() -> Iterator[Case]:
    from tfdpfl import pate

    student = np.array([[0.5, 0.5, 0.0]])
    aggregators = {
        "LNMax": (pate.LNMax(0.5), {}),
        "GNMax": (pate.GNMax(1.0), {}),
        "ConfidentGNMax": (pate.ConfidentGNMax(6.0, 1.0, 1.0), {}),
        "InteractiveGNMax": (pate.InteractiveGNMax(1.0, 1.0, 1.0), {"student": student}),
    }
    for name, (aggregator, more) in aggregators.items():

        def labels(votes: np.ndarray, trials: int, aggregator=aggregator, more=more) -> np.ndarray:
            many = {key: np.tile(value, (trials, 1)) for key, value in more.items()}
            return aggregator.aggregate(np.tile(votes, (trials, 1)), **many).labels

        def bound(labels=labels, aggregator=aggregator, more=more) -> tuple[float, float]:
            claim = aggregator.epsilon(ONE, DELTA, data_dependent=False, **more)
            found = audit_epsilon(labels, ONE, OTHER_VOTES, 40_000, CONFIDENCE, delta=DELTA, vectorized=True)
            return float(claim), found

        yield Case(name, "votes", lambda labels=labels: replay(lambda v: labels(v, 40), ONE, OTHER_VOTES), bound, 0.05)
    yield Case("smooth_sensitivity_release", "votes", None, _sanitised, 0.0)


def _sanitised(trials: int = 400) -> tuple[float, float]:
    """The figure that is released, of votes that nearly agree and of their neighbour."""
    from tfdpfl import pate

    def figures(votes: np.ndarray, trials: int) -> np.ndarray:
        return np.array([float(release(votes).unpadded) for _ in range(trials)])

    release = lambda votes: pate.smooth_sensitivity_release(pate.GNMax(1.0), votes, DELTA, order=4, beta=0.08, noise=1)
    one, other = np.array([[14, 2, 0]]), np.array([[13, 3, 0]])
    found = audit_epsilon(figures, one, other, trials, CONFIDENCE, delta=DELTA, vectorized=True)
    return release(one).release_epsilon, found


# -- what trains or chooses by itself ------------------------------------------------------------------------------


def _others() -> Iterator[Case]:
    for solver in ("gradient", "output", "objective"):
        seen = None if solver == "objective" else functools.partial(_regression_replay, solver)
        yield Case(f"DPLogisticRegression, {solver}", "others", seen, functools.partial(_regression, solver), 0.0)
    yield Case("RandomSearch", "others", None, _search, 0.05)


LONG = np.float64(X / np.linalg.norm(X, axis=1, keepdims=True))  # each as long as a row may be
BLANK = LONG * WITHOUT[:, None]  # a row of zeros has no gradient


def _fitted(solver: str, x: np.ndarray) -> np.ndarray:
    from tfdpfl.convex import DPLogisticRegression

    how = dict(fit_intercept=False, solver=solver, num_steps=3, classes=[0, 1])
    return DPLogisticRegression(20.0, DELTA, **how).fit(x, np.arange(NUMBER) % 2).coef_[0]


def _regression_replay(solver: str) -> ReplayReport:
    return replay(functools.partial(_fitted, solver), LONG, BLANK, adjacency="zero_out")


def _regression(solver: str, trials: int = 100) -> tuple[float, float]:
    from threadpoolctl import threadpool_limits

    scores = lambda x, trials: np.array([_fitted(solver, x) for _ in range(trials)]) @ LONG[FAR]
    with threadpool_limits(1):
        found = audit_epsilon(
            scores, LONG, BLANK, trials, CONFIDENCE, delta=DELTA, vectorized=True,
            tradeoff=None if solver == "objective" else "gaussian",
        )  # fmt: skip
    return 20.0, found


def _search(trials: int = 600) -> tuple[float, float]:
    """The best of some answers to one question, each by randomized response."""
    from tfdpfl import PrivacyLedger
    from tfdpfl.label_dp import RandomizedResponse
    from tfdpfl.tuning import RandomSearch

    coin, cost = np.random.default_rng(), RandomizedResponse(1.0, 2).dp_event
    spends = PrivacyLedger().add(cost, adjacency="replace_one")
    make = lambda: RandomSearch({"any": [0]}, spends=spends, mean_runs=4)
    said = lambda answer: float(answer if coin.random() < np.e / (1 + np.e) else 1 - answer)
    best = lambda answer: make().run(lambda _: (said(answer), None, spends)).score
    return make().report(DELTA).epsilon, audit_epsilon(best, 0, 1, trials, CONFIDENCE, delta=DELTA)


# -- Flower --------------------------------------------------------------------------------------------------------

CLIENTS = 4
PULL = np.full(10, 1.0)  # of client 0: norm 3.2 for a clip of 1


def _update_of(far: float | None) -> Callable[[int], np.ndarray]:
    return lambda number: (far or 0.0) * PULL if number == 0 else np.random.default_rng(number).normal(size=10) * 0.1


def federation(
    strategy: Any, far: float | None, rounds: int, train: Callable[[Any, int], Any] | None = None
) -> tuple[np.ndarray, np.ndarray, Any]:
    """(what each round added to the model [rounds, 10], what it added to the clip's logarithm, the result). Of None
    client 0 never answers."""
    from flower_fakes import FakeGrid, arrays_in, flat, model, moved

    logging.getLogger("flwr").setLevel(logging.ERROR)
    sent: list[np.ndarray] = []
    clips: list[float] = []
    train = train or moved(_update_of(far))

    def answer(message: Any, number: int) -> Any:
        if number == 0 and message.metadata.message_type.startswith("train"):
            sent.append(np.concatenate([np.ravel(arrays_in(message)[k]) for k in ("w", "b")]).astype(np.float64))
            clips.append(min(strategy.current_clip, 1e30))
        return None if number == 0 and far is None else train(message, number)

    result = strategy.start(FakeGrid(CLIENTS, answer), model(), num_rounds=rounds)
    clips.append(min(strategy.current_clip, 1e30))
    logs = np.log(np.maximum(clips, 1e-30))
    return np.diff([*sent, flat(result.arrays)], axis=0), np.diff(logs), result


def _wrapped(kind: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        from flwr.serverapp import strategy

        from tfdpfl import flower

        given = {"noise_multiplier": 0.7, "delta": DELTA, "clients_per_round": CLIENTS, **options}
        return getattr(flower, f"DifferentialPrivacy{kind}Clipping")(strategy.FedAvg(), **given)

    return make


def strategy_case(name: str, make: Callable[[], Any]) -> Case:
    """Client 0 pulls, or is not there."""
    few = dict(delta=DELTA, vectorized=True, tradeoff="gaussian")

    def seen() -> ReplayReport:
        def released(far: float | None) -> Any:
            added, _, result = federation(make(), far, 4)
            about = [result.train_metrics_clientapp, result.evaluate_metrics_clientapp]
            return [added, *({i: dict(metrics) for i, metrics in rounds.items()} for rounds in about)]

        return replay(released, 1.0, None, adjacency="zero_out")

    def bound() -> tuple[float, float]:
        first = make()
        federation(first, 1.0, 1)

        def scores(far: float | None, trials: int) -> np.ndarray:
            added, clips, _ = federation(make(), far, trials)
            score = added @ PULL / np.linalg.norm(PULL)
            return np.column_stack([score, clips]) if clips.any() else score

        return first.epsilon, audit_epsilon(scores, 1.0, None, 60, CONFIDENCE, **few)

    return Case(name, "Flower", seen, bound, 0.0)


def _upload_case(name: str, make: Callable[[], Callable], claim: Callable[[], float]) -> Case:
    """A client's own noise: what it sends for one update, or for the opposite one."""

    def sent(mod: Callable, far: float) -> np.ndarray:
        return np.concatenate([np.ravel(part) for part in mod(far)])

    def seen() -> ReplayReport:
        return replay(lambda far: sent(make(), far), 1.0, -1.0, adjacency="replace_one")

    def bound() -> tuple[float, float]:
        mod = make()
        scores = lambda far, trials: np.array([sent(mod, far) for _ in range(trials)]) @ PULL
        how = dict(delta=DELTA, vectorized=True, tradeoff="gaussian")
        return claim(), audit_epsilon(scores, 1.0, -1.0, 100, CONFIDENCE, **how)

    return Case(name, "Flower", seen, bound, 0.0)


NBAFL = dict(epsilon=8.0, delta=DELTA, l2_norm_clip=1.0, num_rounds=1, num_clients=CLIENTS)
ROUNDS = 80  # of which each is a run: a client's weights do not hang on those that it is sent


def _nbafl_strategy() -> Case:
    """Client 0's weights, or the opposite ones; what the server releases has both noises."""
    from flower_fakes import reply
    from flwr.app import Context, RecordDict
    from flwr.serverapp.strategy import FedAvg

    from tfdpfl.flower import NbAFLStrategy, nbafl_mod

    plan = dict(NBAFL, epsilon=300.0, num_rounds=ROUNDS, num_exposures=20)
    mod = nbafl_mod(**plan)

    def train(far: float) -> Callable[[Any, int], Any]:
        own = lambda number: far * PULL if number == 0 else _update_of(None)(number)
        parts = lambda flat: {"w": flat[:6].reshape(3, 2).astype("float32"), "b": flat[6:].astype("float32")}
        context = lambda number: Context(1, 101 + number, {"partition-id": number}, RecordDict(), {})
        return lambda message, number: mod(message, context(number), lambda m, _: reply(m, parts(own(number))))

    def models(far: float, rounds: int) -> tuple[np.ndarray, Any]:
        random.seed(0)  # of the order in which clients are asked
        strategy = NbAFLStrategy(FedAvg(), **plan)
        return np.cumsum(federation(strategy, far, rounds, train(far))[0], axis=0), strategy

    def seen() -> ReplayReport:
        return replay(lambda far: models(far, 2)[0], 1.0, -1.0, adjacency="replace_one")

    def bound() -> tuple[float, float]:
        scores = lambda far, trials: models(far, trials)[0] @ PULL
        how = dict(delta=DELTA, vectorized=True, tradeoff="gaussian")
        return models(1.0, 1)[1].epsilon, audit_epsilon(scores, 1.0, -1.0, ROUNDS, CONFIDENCE, **how)

    return Case("NbAFLStrategy", "Flower", seen, bound, 0.0)


def _example_dp() -> Case:
    """What one client sends after a step of its own, by all its examples; of zeros one has no gradient."""
    import tensorflow as tf
    from flower_fakes import arrays_in
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

    from tfdpfl.flower import example_dp

    start = -np.outer(X[FAR], np.eye(3)[Y[FAR]]).astype("float32")  # so that the far example is not right already

    def released(far: float) -> list[Any]:
        made = tf.keras.Sequential([tf.keras.Input((6,)), tf.keras.layers.Dense(3, use_bias=False)])
        x = np.where(np.arange(NUMBER)[:, None] == FAR, far * X, X)
        train = example_dp(
            made, (x, Y), l2_norm_clip=CLIP, noise_multiplier=Z, batch_size=NUMBER, local_steps=1, delta=DELTA,
            optimizer="sgd", learning_rate=1.0,
            loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        )  # fmt: skip

        message = Message(RecordDict({"arrays": ArrayRecord({"w": Array(start)})}), 101, "train")
        reply = train(message, Context(1, 101, {}, RecordDict(), {}))
        return [arrays_in(reply), *map(dict, reply.content.metric_records.values())]

    seen = lambda: replay(released, 1.0, 0.0, adjacency="zero_out")
    return Case("example_dp", "Flower", seen, None)  # a run is a `fit`: too dear for a bound


def _uploads() -> Iterator[Case]:
    from flower_fakes import arrays_in, model, moved
    from flwr.app import Context, Message, RecordDict

    from tfdpfl import PrivacyLedger
    from tfdpfl.flower import clip_and_noise_gradients, local_dp_mod, nbafl_mod

    def through(mod: Callable) -> Callable:
        def upload(far: float) -> list[np.ndarray]:
            message = Message(RecordDict({"arrays": model()}), 101, "train")
            context = Context(1, 101, {"partition-id": 0}, RecordDict(), {})
            answer = mod(message, context, lambda m, c: moved(lambda _: far * PULL)(m, 0))
            return list(arrays_in(answer).values())

        return upload

    gaussian = lambda z: PrivacyLedger().add(_event(z / 2), adjacency="replace_one").epsilon(DELTA)
    local = lambda: through(local_dp_mod(l2_norm_clip=1.0, noise_multiplier=1.0, delta=DELTA))
    yield _upload_case("local_dp_mod", local, lambda: gaussian(1.0))
    yield _upload_case("nbafl_mod", lambda: through(nbafl_mod(**NBAFL)), lambda: NBAFL["epsilon"])
    gradients = lambda far: clip_and_noise_gradients([far * PULL[:6], far * PULL[6:]], 1.0, 1.0, PrivacyLedger())
    yield _upload_case("clip_and_noise_gradients", lambda: gradients, lambda: gaussian(1.0))


def _event(z: float) -> Any:
    from dp_accounting import dp_event

    return dp_event.GaussianDpEvent(z)


def _flower() -> Iterator[Case]:
    from tfdpfl import AdaptiveClip
    from tfdpfl.federated import NoisedMetrics
    from tfdpfl.noise import Tree

    yield strategy_case("DifferentialPrivacyFixedClipping", _wrapped("Fixed", l2_norm_clip=1.0))
    slow = AdaptiveClip(initial=1.0, learning_rate=1e-4)
    yield strategy_case("DifferentialPrivacyAdaptiveClipping", _wrapped("Adaptive", l2_norm_clip=slow))
    metrics = NoisedMetrics(noise_multiplier=2.0, bound={"num-examples": 100.0})
    both = _wrapped("Fixed", l2_norm_clip=1.0, train_metrics=metrics, evaluate_metrics=metrics)
    yield strategy_case("NoisedMetrics of training and evaluation", both)
    yield strategy_case("correlated noise of rounds", _wrapped("Fixed", l2_norm_clip=1.0, noise=Tree()))
    yield from _uploads()
    yield _nbafl_strategy()
    yield _example_dp()


# -- TensorFlow Federated ------------------------------------------------------------------------------------------


def process_case(
    name: str, build: Callable[[], Any], far: tuple[float, float], *, clients: int = 1, promise: int = 0,
    rows: int = 1, trials: int = 32,
) -> Case:  # fmt: skip
    """Client 0's gradient is its x; rounds all begin from the same state. Seen are the weights and all metrics.

    There is so much noise that a μ of about 0.5 is claimed. Of inputs that are always told apart the 24 runs that count
    show 1.2.
    """

    def bound() -> tuple[float, float]:
        import tensorflow as tf

        from tfdpfl.federated import Participation, RoundsRun

        process = build()
        state = process.initialize()
        flat = lambda s: np.concatenate([np.ravel(w) for w in process.get_model_weights(s).trainable])
        before = flat(state)
        batches = lambda x: (np.full([rows, 4], x, "float32"), np.zeros([rows, 1], "float32"))
        data = lambda x: tf.data.Dataset.from_tensor_slices(batches(x)).batch(1)

        def seen(output: Any) -> list[float]:
            return [(flat(output.state) - before).sum(), *map(float, tf.nest.flatten(output.metrics))]

        def scores(x: float, trials: int) -> np.ndarray:
            cohort = [data(x), *[data(0.0)] * (clients - 1)]
            return np.array([seen(process.next(state, cohort)) for _ in range(trials)])

        part = Participation(sampling="none", population=CLIENTS, clients_per_round=CLIENTS)
        cohort = tuple("abcd"[:clients])
        run = RoundsRun(rounds=1, participation=part, cohorts=(cohort,), num_examples=dict.fromkeys(cohort, rows))
        claim = process.privacy[promise].price(run, DELTA).epsilon
        how = dict(delta=DELTA, vectorized=True, tradeoff="gaussian")
        return claim, audit_epsilon(scores, *far, trials, CONFIDENCE, **how)

    return Case(name, "TFF", None, bound, 0.0)  # so few runs may show nothing


def _linear() -> Any:
    import tensorflow as tf

    return tf.keras.Sequential([
        tf.keras.layers.InputLayer((4,)),
        tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros"),
    ])  # fmt: skip


def _parted() -> Any:
    """A layer of all, and one of each client's own."""
    import tensorflow as tf

    x = tf.keras.Input((4,))
    dense = lambda name: tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros", name=name)
    return tf.keras.Model(x, tf.keras.layers.Add()([dense("shared")(x), dense("own")(x)]))


def _process(builder: str, model: Callable[[], Any] = _linear, **options: Any) -> Callable[[], Any]:
    def build() -> Any:
        import tensorflow as tf

        from tfdpfl import federated

        class Pull(tf.keras.losses.Loss):
            def call(self, y, out):
                return -out

        given = {
            "clients_per_round": CLIENTS, "noise_multiplier": 2.0, "clip": 1.0, "loss": Pull(),
            "client_optimizer_fn": "sgd",
            "input_spec": (tf.TensorSpec([None, 4], tf.float32), tf.TensorSpec([None, 1], tf.float32)), **options,
        }  # fmt: skip
        return getattr(federated, builder)(model, **{k: v for k, v in given.items() if v is not None})

    return build


def _tff() -> Iterator[Case]:
    from tfdpfl import AdaptiveClip
    from tfdpfl.federated import NoisedMetrics

    out, other = (100.0, 0.0), (100.0, -100.0)  # or a client that changes nothing; or one that pulls the other way
    yield process_case("build_dp_fed_avg", _process("build_dp_fed_avg"), out)
    adaptive = _process("build_dp_fed_avg", clip=AdaptiveClip(initial=1.0))
    yield process_case("build_dp_fed_avg with AdaptiveClip", adaptive, out)
    metrics = NoisedMetrics(noise_multiplier=1.0, bound={"update_norm": 1.0})
    measured = _process("build_dp_fed_sgd", client_optimizer_fn=None, metrics=metrics)
    yield process_case("build_dp_fed_sgd with NoisedMetrics", measured, out)
    shared = _process("build_dp_fed_recon", _parted, local_layers=["own"])
    yield process_case("build_dp_fed_recon", shared, out, rows=2)
    yield process_case("build_dp_ftrl", _process("build_dp_ftrl"), out)
    yield process_case("build_local_dp_fed_avg", _process("build_local_dp_fed_avg", noise_multiplier=4.0), other)
    distributed = _process("build_distributed_dp_fed_avg")
    yield process_case("build_distributed_dp_fed_avg", distributed, out, clients=CLIENTS)
    examples = _process(
        "build_example_dp_fed_avg", clip=None, clients_per_round=None, l2_norm_clip=1.0, batch_size=1, local_steps=1
    )
    yield process_case("build_example_dp_fed_avg", examples, out)
    unused = dict.fromkeys(["clip", "clients_per_round", "noise_multiplier"])
    plan = dict(NBAFL, epsilon=2.0, num_rounds=4, num_exposures=1, **unused)
    yield process_case("build_nbafl", _process("build_nbafl", **plan), other, clients=CLIENTS, promise=1)


GROUPS: dict[str, Callable[[], Iterator[Case]]] = {
    "optimizers": _trainings, "preprocessing": _preprocessing, "labels": _labels,
    "votes": _votes, "others": _others, "Flower": _flower, "TFF": _tff,
}  # fmt: skip


def here() -> list[str]:
    """The groups that can run on this stack."""
    if metadata.version("keras") < "3":
        return ["TFF"] if find_spec("tensorflow_federated") else []
    return ["optimizers", "preprocessing", "labels", "votes", "others", *(["Flower"] if find_spec("flwr") else [])]
