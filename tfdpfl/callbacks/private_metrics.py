"""A Keras callback that puts noisy figures, which ε covers, in the place of those that Keras measures on the data."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import tensorflow as tf

from tfdpfl._frames import callbacks_of, optimizer_of
from tfdpfl._sums import noisy_sum
from tfdpfl._types import Arrays, Callback, Dataset, Keywords, Loss, Model
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.promises import Promise
from tfdpfl.callbacks._fits import RELEASED, fit_arguments, length, running_models
from tfdpfl.callbacks._uncovered import NO_DATA
from tfdpfl.callbacks.budget import PrivacyBudget
from tfdpfl.data import declared_sampling, examples_of, fixed_order, source_of, users_of
from tfdpfl.data.sources import Examples
from tfdpfl.errors import PrivacyError
from tfdpfl.noise import Source

if TYPE_CHECKING:
    from dp_accounting import DpEvent

__all__ = ["PrivateMetrics"]

_AT_ONCE = 4096  # examples that are compared
_MADE_UP = 8  # examples, on which metrics are tried


class _Releases:
    """How often sums were released, by event; and what is planned."""

    def __init__(self, name: str, seeded: bool) -> None:
        self.name = name  # for statements
        self.seeded = seeded  # whether someone knows the seed of the noise
        self.counts: dict[DpEvent, int] = {}
        self.event: DpEvent | None = None  # of the fit that runs
        self.planned = 0  # of this fit, still to come
        self.model: Callable[[], Model | None] = lambda: (
            None
        )  # that this fit trains: an interrupted fit plans nothing more
        self.unit: str | None = None  # what is protected, or None for what the ledger's other entries protect

    def add_to(self, ledger: PrivacyLedger) -> PrivacyLedger:
        """Adds the releases to a ledger, for the neighbours that it is of."""
        adjacency = ledger.adjacency
        runs = any(model is self.model() for model in running_models())
        for event, count in self.counts.items():
            planned = self.planned if runs and event == self.event else 0
            ledger.add(event, count + planned, adjacency=adjacency, unit=self.unit, name=self.name)
        if self.seeded and any(self.counts.values()):
            ledger.seeded |= {"PrivateMetrics"}
        return ledger


class PrivateMetrics(tf.keras.callbacks.Callback):
    """Shows loss and accuracy with noise, at a price, and hides what Keras measures on private data.

        metrics = tfdpfl.callbacks.PrivateMetrics(noise_std=0.003)
        model.fit(batches, epochs=10, callbacks=[metrics, budget])

    At the end of an epoch the model is evaluated on all training data, once. The sums of the metrics get normal noise
    before anyone sees them. Progress bar, History, TensorBoard and CSVLogger show them, and `EarlyStopping` or
    `ReduceLROnPlateau` decide by them, at no further price. All that Keras measures itself is removed from the logs, of
    batches and of validation data, too.

    Guarantee:
        A unit (an example; a user, of data that were drawn by ``user_ids``) moves the sums by at most √(number of
        metrics), if it is added, removed, blanked or replaced, since each metric is clipped to its bound. A release is
        one Gaussian mechanism of noise multiplier noise_std · units / √(number of metrics). The `PrivacyBudget` of the
        same fit adds it to its ledger; without one, merge `ledger` into yours. If the budget has a ``target_epsilon``,
        all planned releases count from the beginning, and those that were not made are given back at the end. The
        number of units is public.

    Args:
        data: What to evaluate: None takes the data of `fit`, if these are arrays or batches of `tfdpfl.data`. Else
            what `tfdpfl.data.poisson_batches` takes.
        metrics: Names among "loss" and "accuracy"; or {name: function of (y_true, y_pred)}, which gives a number in
            [0, 1] for each example. In the dict these two names may have None.
        noise_std: The noise's standard deviation in each metric, as a fraction of its bound.
        loss_bound: An example's loss is clipped to [0, loss_bound].
        every: Release after so many epochs; between releases the last one is shown again.
        validation: Whether ``data`` are other people's than the training data. Their metrics are named ``val_…``, and
            cost nothing of the training's ε: `ledger` has what they cost.
        keep: Names of logs that stay as Keras measures them, such as "val_loss" of public validation data.
        batch_size: Examples that are evaluated at once.
        user_ids: Of ``data``, if a user is the unit: see `tfdpfl.data.poisson_batches`. Each user counts once.
        seed: For tests alone: anyone who knows it can subtract the noise.

    Attributes:
        ledger: What the releases cost by themselves, as a `PrivacyLedger`.

    Raises:
        PrivacyError: when training begins, if another callback stands before it, which would see what is hidden; the
            data are not known; or a metric of one example depends on others.

    Example:
        >>> metrics = tfdpfl.callbacks.PrivateMetrics(noise_std=0.003, loss_bound=4.0)
    """

    _supports_tf_logs = True  # Keras 2 shows other callbacks the same logs then, and no copy of them

    def __init__(
        self,
        data: Arrays = None,
        *,
        metrics: Sequence[str] | Mapping[str, Callable | None] = ("loss", "accuracy"),
        noise_std: float = 0.01,
        loss_bound: float = 5.0,
        every: int = 1,
        validation: bool = False,
        keep: Sequence[str] = (),
        batch_size: int = 1024,
        user_ids: Arrays = None,
        seed: int | None = None,
    ):
        super().__init__()
        functions = dict(metrics) if isinstance(metrics, Mapping) else dict.fromkeys(metrics)
        for name, function in functions.items():
            if function is None and name not in ("loss", "accuracy"):
                raise ValueError(
                    f"metrics has {name!r}, and only 'loss' and 'accuracy' are known by name. Give it as "
                    f"{{{name!r}: function}}, which gives a number in [0, 1] for each example."
                )
        if not functions:
            raise ValueError("metrics is empty, so nothing would be shown: give 'loss', 'accuracy' or functions.")
        if validation and data is None:
            raise ValueError("validation=True needs the validation data: PrivateMetrics((x_val, y_val), ...).")
        self._functions, self._data, self._user_ids = functions, data, user_ids
        fix = "give the noise of a metric as a fraction of its bound, such as 0.003"
        self.noise_std = _checks.real("noise_std", noise_std, fix, above=0)
        self.loss_bound = _checks.real("loss_bound", loss_bound, "give the largest loss that counts", above=0)
        self.every = _checks.whole("every", every, 1, "release after so many epochs")
        self.batch_size = _checks.whole("batch_size", batch_size, 1, "count the examples that are evaluated at once")
        self.validation, self.keep = validation, frozenset(keep)
        self._prefix = "val_" if validation else ""
        self._source = Source(seed)
        name = f"{PrivateMetrics.__name__}{' of the validation data' if validation else ''}"
        self._releases = _Releases(name, seeded=seed is not None)
        self._shown: dict[str, float] = {}
        self._hides = True  # the first of several does, before the others add what they release

    # -- what it costs ---------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the metrics in the logs."""
        return tuple(self._prefix + name for name in self._functions)

    def event(self, units: int) -> DpEvent:
        """Returns one release on so many units, as a dp-accounting event."""
        import dp_accounting

        return dp_accounting.GaussianDpEvent(self.noise_std * units / math.sqrt(len(self._functions)))

    def add_to(self, ledger: PrivacyLedger) -> PrivacyLedger:
        """Adds the releases to a ledger, for the neighbours that it is of."""
        return self._releases.add_to(ledger)

    @property
    def ledger(self) -> PrivacyLedger:
        """The releases by themselves."""
        return self.add_to(PrivacyLedger())

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        return self.ledger.promises(delta)

    def hides(self, name: str) -> bool:
        """Returns whether the other callbacks do not see the figure of this name as Keras measures it."""
        return name not in NO_DATA | self.keep

    # -- Keras's hooks ---------------------------------------------------------------------------------------

    def on_train_begin(self, logs: dict | None = None) -> None:
        call = fit_arguments(self.model)
        others = callbacks_of(call)
        budgets = [c for c in others if isinstance(c, PrivacyBudget)]
        self._hides = not self._before_me(others)
        self._batches, self._weights, self._units = self._to_evaluate(call)
        self._releases.model = weakref.ref(self.model)
        self._event = self._releases.event = self.event(self._units)
        self._releases.counts.setdefault(self._event, 0)
        self._values = tf.function(self._values_of, reduce_retracing=True, autograph=False)
        self._check_examples_apart()
        epochs = range(call.get("initial_epoch") or 0, self.params.get("epochs") or 0)
        limited = any(budget.target_epsilon is not None for budget in budgets)
        self._releases.planned = sum((epoch + 1) % self.every == 0 for epoch in epochs) if limited else 0
        for budget in [] if self.validation else budgets:
            budget.include(self._releases)
        if not budgets and not self.validation:
            RELEASED[self.model] = list(dict.fromkeys([*RELEASED.get(self.model, ()), self._releases]))

    def _before_me(self, callbacks: list[Callback]) -> list[Callback]:
        """Returns the callbacks that see the logs first, which must be of this kind."""
        before = callbacks[: callbacks.index(self)] if self in callbacks else []
        for stranger in before:
            if not isinstance(stranger, PrivateMetrics):
                raise PrivacyError(
                    f"{type(stranger).__name__} comes before PrivateMetrics among the callbacks, so it would see the "
                    "figures that PrivateMetrics hides. Put PrivateMetrics first: callbacks=[metrics, ...]."
                )
        return before

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        if (epoch + 1) % self.every == 0:
            self._shown = self._release()
        self._hide(logs)
        if logs is not None:
            logs.update(self._shown)

    def on_train_end(self, logs: dict | None = None) -> None:
        self._releases.planned = 0
        self._hide(logs)

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._hide(logs)

    def on_test_batch_end(self, batch: int, logs: dict | None = None) -> None:
        self._hide(logs, "val_")

    def on_test_end(self, logs: dict | None = None) -> None:
        self._hide(logs, "val_")

    def _hide(self, logs: dict | None, prefix: str = "") -> None:
        """Removes what Keras measured, which it names without ``prefix`` while it evaluates validation data."""
        for name in list(logs or {}) if self._hides else []:
            if logs is not None and self.hides(prefix + name):
                del logs[name]

    # -- what is released ------------------------------------------------------------------------------------

    def _to_evaluate(self, call: Keywords) -> tuple[Dataset, np.ndarray, int]:
        """The data in batches, each example's weight, and the number of units."""
        data, map_fn, users = self._data_of(call)
        examples = examples_of(data)
        if self.validation:
            _check_others(examples, call)
        if users is None:
            self._check_unit(call.get("x"))
            self._releases.unit = "example"
            weights, units = np.ones(examples.number), examples.number
        else:
            self._releases.unit = "user" if self.validation else None  # of the training, what that protects
            users = users_of(users, examples.number)
            units, weights = users.number, np.zeros(examples.number)  # 0 for an example that no user has
            weights[users.rows] = np.repeat(1 / np.diff(users.starts), np.diff(users.starts))
        return fixed_order(examples, min(self.batch_size, examples.number), map_fn=map_fn), weights, units

    def _data_of(self, call: Keywords) -> tuple[Arrays, Callable | None, Arrays]:
        """The data, what is made of each example, and whose the examples are."""
        x = call.get("x")
        if self.validation and _objects(self._data) & _objects(x):
            raise PrivacyError(
                "validation=True is for data of other people, whose figures cost the training nothing, but "
                "PrivateMetrics was given the training data. Leave validation out, or give it the validation data."
            )
        if self._data is not None:
            return self._data, None, self._user_ids
        source = source_of(x)
        if source is not None:
            return source
        if length(x) is None:
            raise PrivacyError(
                f"PrivateMetrics cannot evaluate a {type(x).__name__}, because each pass over it may hold other data. "
                "Give it the training data: PrivateMetrics((x, y), ...)."
            )
        if call.get("validation_split"):
            raise PrivacyError(
                f"validation_split={call['validation_split']} lets Keras split the arrays, so PrivateMetrics cannot "
                "see which examples are trained on. Split them yourself, and pass validation_data to fit."
            )
        return (x, call.get("y")), None, self._user_ids

    def _check_unit(self, x: object) -> None:
        """Raises if the training protects several rows together, each of which would count by itself."""
        declared = declared_sampling(x)
        if self.validation:
            return
        if getattr(declared, "unit", "example") == "user":
            raise PrivacyError(
                "The batches protect users, and PrivateMetrics would count each of their examples. Give it "
                "user_ids, too."
            )
        rows = getattr(optimizer_of(self.model), "rows_per_unit", 1)
        if rows > 1 and declared is None:
            raise PrivacyError(
                f"With rows_per_unit={rows} the optimizer protects {rows} rows together, and PrivateMetrics would "
                f"count each row. Give it the unit of each row: user_ids=np.arange(len(x)) // {rows}."
            )

    def _release(self) -> dict[str, float]:
        sums, at = np.zeros(len(self._functions)), 0
        for batch in self._batches:
            values = self._values(*batch[:2]).numpy().astype(np.float64)
            sums += self._weights[at : at + len(values)] @ values
            at += len(values)
        self._releases.counts[self._event] += 1
        self._releases.planned = max(self._releases.planned - 1, 0)
        noisy = noisy_sum(sums, math.sqrt(len(sums)), self._event.noise_multiplier, self._source) / self._units
        bounds = [self.loss_bound if name == "loss" else 1.0 for name in self._functions]
        return {
            name: float(min(max(value, 0), 1) * bound)
            for name, value, bound in zip(self.names, noisy, bounds, strict=True)
        }

    def _values_of(self, x: Arrays, y: Arrays) -> tf.Tensor:
        """[examples, metrics] in [0, 1]."""
        predicted = self.model(x, training=False)
        columns = []
        for name, function in self._functions.items():
            function = function or {"loss": self._loss, "accuracy": _right}[name]
            value = tf.cast(function(y, predicted), tf.float64)
            value = tf.reshape(value, [tf.shape(tf.nest.flatten(x)[0])[0], -1])
            value = tf.reduce_mean(value, 1) / (self.loss_bound if name == "loss" else 1.0)
            # A number that is none counts as the worst: 1 of a loss, 0 of all else.
            value = tf.where(tf.math.is_nan(value), tf.constant(float(name == "loss"), tf.float64), value)
            columns.append(tf.clip_by_value(value, 0.0, 1.0))
        return tf.stack(columns, 1)

    def _loss(self, y: Arrays, predicted: Arrays) -> Loss:
        loss = self.model.loss
        loss = tf.keras.losses.get(loss) if isinstance(loss, str) else loss
        if not callable(loss) or tf.nest.is_nested(y) or tf.nest.is_nested(predicted):
            raise PrivacyError(
                f"The model has the loss {loss!r:.99} on several outputs or none of its own, and PrivateMetrics knows "
                "no loss of one example for this. Give it metrics={name: function} that computes it."
            )
        if y.shape.rank == predicted.shape.rank - 1 and predicted.shape[-1] == 1:
            y = y[..., None]  # Keras 2 would compare each label with each prediction
        return loss.call(y, predicted) if isinstance(loss, tf.keras.losses.Loss) else loss(y, predicted)

    def _check_examples_apart(self) -> None:
        """Raises if a metric of one example depends on what stands beside it, for made-up examples."""
        if not isinstance(self._batches.element_spec, tuple) or len(self._batches.element_spec) < 2:
            raise PrivacyError("PrivateMetrics needs labels: its data must be (x, y).")
        x_spec, y_spec = self._batches.element_spec[:2]
        random = np.random.default_rng(0)

        def made(spec: tf.TensorSpec, classes: int = 0) -> tf.Tensor:
            shape = [_MADE_UP, *spec.shape[1:]]
            if spec.dtype == tf.string:
                return tf.constant(random.choice(["", "a"], shape))
            if spec.dtype.is_floating and not classes:
                return tf.cast(random.normal(size=shape), spec.dtype)
            return tf.cast(random.integers(0, classes or 2, shape), spec.dtype)

        x = tf.nest.map_structure(made, x_spec)
        predicted = self.model(x, training=False)
        sparse = tf.is_tensor(predicted) and isinstance(y_spec, tf.TensorSpec) and y_spec.dtype.is_integer
        sparse = sparse and predicted.shape.rank == y_spec.shape.rank + 1
        y = tf.nest.map_structure(lambda spec: made(spec, predicted.shape[-1] if sparse else 2), y_spec)
        try:
            together = self._values_of(x, y)
            rows = [tf.nest.map_structure(lambda leaf: leaf[i : i + 1], (x, y)) for i in range(_MADE_UP)]  # noqa: B023
            alone = tf.concat([self._values_of(*row) for row in rows], 0)
        except tf.errors.InvalidArgumentError as error:
            raise PrivacyError(
                f"A metric ({', '.join(self._functions)}) could not be computed for each of {_MADE_UP} made-up "
                "examples. Give a function that returns a number for each example, without reduce_mean over the batch. "
                f"({error.message})"
            ) from error
        if not np.allclose(together, alone, atol=1e-4):
            raise PrivacyError(
                f"A metric of one example ({', '.join(self._functions)}) depends on the other examples, so one example "
                "could move the whole sum. Give a function of one example at a time."
            )


def _check_others(examples: Examples, call: Keywords) -> None:
    """Raises if all validation examples are among the training examples, so that they are of the same people.

    Only some of them may be there by chance, as rows of few categories are. Training examples are compared if they are
    arrays, or if `tfdpfl.data` draws them from arrays. Those on disk would have to be read.
    """
    x = call.get("x")
    drawn = source_of(x)
    source = drawn[0] if drawn else x if length(x) is not None else None
    if source is None or not examples.in_memory or not getattr(source, "in_memory", True):
        return
    others = set(_inputs_of(examples))
    for row in _inputs_of(source):
        others.discard(row)
        if not others:
            raise PrivacyError(
                "validation=True is for data of other people, whose figures cost the training nothing, but all "
                f"{examples.number} examples that PrivateMetrics was given are training examples, too. Leave "
                "validation out, or give it examples that are not trained on."
            )


def _inputs_of(data: Arrays) -> Iterator[bytes]:
    """Yields the inputs of each example of arrays, or of what `examples_of` returned."""
    held = isinstance(data, Examples)
    number = data.number if held else length(data) or 0
    for start in range(0, number, _AT_ONCE):
        numbers = np.arange(start, min(start + _AT_ONCE, number))
        if held:
            element = data.take(tf.constant(numbers))
            element = element[0] if isinstance(element, tuple) else element
        else:
            element = tf.nest.map_structure(lambda leaf: np.asarray(leaf[start : start + _AT_ONCE]), data)  # noqa: B023
        leaves = [np.asarray(leaf) for leaf in tf.nest.flatten(element)]
        kinds = {"f": np.float32, "i": np.int64, "u": np.int64, "b": np.int64}  # as both may be given
        leaves = [leaf.astype(kinds.get(leaf.dtype.kind, leaf.dtype)) for leaf in leaves]
        for row in zip(*leaves, strict=True):
            yield b"".join(part.tobytes() if hasattr(part, "tobytes") else bytes(part) for part in row)


def _objects(data: Arrays) -> set[int]:
    """The identities of the arrays and data sets that data are made of."""
    return {id(leaf) for leaf in tf.nest.flatten(data) if hasattr(leaf, "shape") or isinstance(leaf, tf.data.Dataset)}


def _right(y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
    """Whether each prediction is right: of one number whether it is on the label's side of 0.5, else the largest's."""
    if predicted.shape.rank == 1 or predicted.shape[-1] == 1:
        return tf.reshape(predicted > 0.5, tf.shape(y)) == (tf.cast(y, tf.float32) > 0.5)
    chosen = tf.argmax(predicted, -1, tf.int64)
    if y.shape.rank == predicted.shape.rank and y.shape[-1] == predicted.shape[-1]:
        return chosen == tf.argmax(y, -1, tf.int64)
    return chosen == tf.cast(tf.reshape(y, tf.shape(chosen)), tf.int64)
