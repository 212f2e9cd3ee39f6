"""Teachers: Keras models, each trained on a shard of the private data that no other one sees."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfdpfl import _files
from tfdpfl._types import Arrays, Callback, Loss, Model, Variable
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.errors import PrivacyError
from tfdpfl.pate import _examples

if TYPE_CHECKING:
    from tqdm import tqdm

    from tfdpfl.pate._stacked import Stack

__all__ = ["TeacherEnsemble", "compiled", "inputs_of", "labels_for"]

_STACK = 25  # teachers trained together: beyond, their weights no longer gain from each other's company
_ADD_LEDGERS = "Give the ledger of each layer to tfdpfl.reports.report, as a part next to the answers."
_ONE_HOT = "CategoricalCrossentropy CategoricalFocalCrossentropy CategoricalHinge KLDivergence Dice Tversky".split()


class TeacherEnsemble:
    """T Keras models on disjoint shards, and their votes.

        teachers = TeacherEnsemble(model_fn, num_teachers=100, epochs=10).fit(x, y, validation_split=0.1)
        counts = teachers.votes(x_public)

    One example is in one shard, hence in one vote on every query: what the aggregators' privacy rests on. The models
    themselves are as private as the data, and so are their training logs.

    Args:
        model_fn: Makes a new Keras model of new layers in every call; only frozen layers may be shared. It is compiled
            (else Adam and sparse cross-entropy are taken), for labels 0 to K-1: its output is K probabilities or
            logits, or one for two classes. It may have several inputs, and be a subclass of `keras.Model`.
        num_teachers: T, at least 1.
        epochs: Passes over a shard.
        batch_size: Examples in a batch.
        together: True trains teachers of one architecture as one stacked model (see `tfdpfl.pate._stacked` for the
            layers and optimizers it knows), False one after another, "auto" the first where that can be. What is not
            known to keep examples apart (a loss or activation of your own) sees one teacher's batch at a time in a
            stack, too.
        stack_size: How many to train together at most.
        checkpoint_dir: A folder, private like the data, where each trained teacher is kept. `fit` goes on where it
            stopped, if data, model, loss, optimizer and options are the same. Teachers that differ from the first are
            trained anew.
        seed: Of the shards and the order of batches; None takes the operating system's entropy. Which shard an
            example is in need not be secret.
        verbose: 0 shows nothing, 1 a progress bar, 2 each teacher's log as well, a line an epoch. Private.

    Attributes:
        shards_: After `fit`: the indices of each teacher's examples.
        num_classes_: K.
        history_: For each teacher its training log, {"loss": [of each epoch], "accuracy": ..., "val_loss": ...}; where
            it was trained by itself, of the metrics that it was compiled with. Private.
        trained_together_: True if all teachers were trained in stacks, else which were not and why.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        model_fn: Callable[[], Model],
        num_teachers: int,
        *,
        epochs: int = 10,
        batch_size: int = 32,
        together: bool | str = "auto",
        stack_size: int = _STACK,
        checkpoint_dir: str | os.PathLike | None = None,
        seed: int | None = None,
        verbose: int = 1,
    ) -> None:
        if not callable(model_fn):
            raise ValueError(f"model_fn must be a function that makes a Keras model, got {model_fn!r}.")
        if together not in (True, False, "auto"):
            raise ValueError(f"together must be True, False or 'auto', got {together!r}.")
        self.model_fn = model_fn
        self.num_teachers = _checks.whole("num_teachers", num_teachers, 1, "without a teacher no one votes")
        self.epochs = _checks.whole("epochs", epochs, 1, "each teacher needs a pass over its shard")
        self.batch_size = _checks.whole("batch_size", batch_size, 1, "for instance 32")
        self.together = together
        self.stack_size = _checks.whole("stack_size", stack_size, 1, "for instance 25")
        self.checkpoint_dir = None if checkpoint_dir is None else Path(checkpoint_dir)
        self.seed, self.verbose = seed, verbose

    def fit(
        self,
        X: Arrays,
        y: Arrays,
        *,
        shards: Sequence[Arrays] | None = None,
        validation_split: float = 0.0,
        class_weight: Mapping[int, float] | str | None = None,
        callbacks: Callable[[int], list[Callback]] | None = None,
    ) -> TeacherEnsemble:
        """Trains the teachers and returns the ensemble.

        Args:
            X: `[n, ...]`; for a model of several inputs a list, tuple or dict of such arrays.
            y: Whole numbers from 0, `[n]` or `[n, 1]`; or one-hot, `[n, K]`. Keras's own losses get what they take.
            shards: Indices of each teacher's examples, disjoint; None splits at random into equal parts.
            validation_split: The part of each shard, taken at random, that its teacher is not trained on but measured
                on after each epoch, in [0, 1).
            class_weight: Weights of the classes in the loss, {class: weight}; 1 for those that are missing. They must
                be public: weights computed from all labels let one label change every teacher. "balanced" weighs by
                inverse frequency, each teacher by its own shard.
            callbacks: A function that makes a new list of Keras callbacks for a teacher, given its number. Teachers are
                then trained one after another.

        Raises:
            ValueError: fewer examples than teachers, shards that overlap or are empty, labels that are no classes, an
                option that does not fit, or a checkpoint folder of other data or models.
            PrivacyError: the models of two teachers share weights that training changes.
        """
        first = self.model_fn()
        X = _examples.as_inputs(X, inputs_of(first))
        examples = _examples.size(X)
        classes, columns = _examples.as_classes(y, examples)
        self._check_callbacks(callbacks)
        rng = np.random.default_rng(self.seed)
        self.shards_ = self._check_shards(shards, examples) if shards is not None else self._split(rng, examples)
        self._zero = _examples.zeros_like(_examples.rows(X, slice(0, 1)))
        self._template = first = compiled(lambda: first, "model_fn", self._zero)
        self._seen: dict[int, Callable[[], Variable]] = {}
        self._refuse_shared(first)
        self._warn_of_statistics(first)
        self._outputs = _num_outputs(first, self._zero)
        self.num_classes_ = max(self._outputs, 2)
        self._check_classes(int(classes.max()), columns)
        labels = labels_for(first.loss, classes, self._outputs, columns is not None)
        self._callbacks = callbacks
        self._limit = _limit(first)
        self._weights: list[list[np.ndarray] | None] = [None] * self.num_teachers
        self.history_: list[dict[str, list[float]]] = [{} for _ in range(self.num_teachers)]
        self._models: dict[int, Model] = {}
        self._stacks: dict[int, Model] = {}
        self._alone: list[int] = []
        self.__dict__.pop("_optimizer_start", None)
        self._labels_like = labels[:1] * 0
        self._fingerprint, unlike = self._told(first)
        self._obstacle = self._why_not(first, unlike)
        if self.together is True and self._obstacle is not None:
            raise ValueError(f"together must be 'auto' or False for this model: {self._obstacle}.")
        if self.checkpoint_dir is not None:
            if unlike:
                raise ValueError(f"checkpoint_dir cannot recognize this model later, because {unlike}: leave it out.")
            self._resume(X, labels, shards, validation_split, class_weight)
        self._set_apart(rng, validation_split)
        self._class_weights = self._weigh(class_weight, classes)
        self._train(X, labels, classes, rng)
        self.trained_together_: bool | str = self._obstacle or self._who_was_alone() or True
        return self

    def fit_shards(self, shards: Sequence[tuple[Arrays, Arrays]], **options: Any) -> TeacherEnsemble:
        """Trains a teacher on each `(X, y)`: one a hospital. No example may be in two. Options and errors as `fit`."""
        if len(shards) != self.num_teachers:
            raise ValueError(f"shards must be one for each of {self.num_teachers} teachers, got {len(shards)}.")
        ends = np.cumsum([len(y) for _, y in shards])
        indices = np.split(np.arange(ends[-1]), ends[:-1])
        inputs = inputs_of(self.model_fn()) if isinstance(shards[0][0], list) else 1
        X = _examples.joined([_examples.as_inputs(x, inputs) for x, _ in shards])
        return self.fit(X, np.concatenate([np.asarray(y) for _, y in shards]), shards=indices, **options)

    def predict(self, X: Arrays, batch_size: int = 1024) -> np.ndarray:
        """Returns each teacher's class for each query, int64 `[teachers, queries]`.

        Raises:
            ValueError: `fit` has not run, or a teacher's output is NaN.
        """
        X = self._queries(X)
        predictions = np.empty((self.num_teachers, _examples.size(X)), np.int64)
        for teachers, outputs in self._forwards():
            for start in range(0, predictions.shape[1], batch_size):
                batch = slice(start, start + batch_size)
                predictions[teachers, batch] = self._classes(outputs(_examples.rows(X, batch)), teachers)
        return predictions

    def votes(self, X: Arrays, batch_size: int = 1024) -> np.ndarray:
        """Returns vote counts, int64 `[queries, classes]`, computed `batch_size` queries at a time. Private.

        Raises:
            ValueError: `fit` has not run, or a teacher's output is NaN.
        """
        X = self._queries(X)
        counts = np.zeros((_examples.size(X), self.num_classes_), np.int64)
        for teachers, outputs in self._forwards():
            for start in range(0, len(counts), batch_size):
                batch = _examples.rows(X, slice(start, start + batch_size))
                for classes in self._classes(outputs(batch), teachers):
                    counts[start + np.arange(len(classes)), classes] += 1
        return counts

    def model(self, teacher: int) -> Model:
        """Returns one teacher as a Keras model of its own."""
        self._check_fitted()
        if teacher in self._models:
            return self._models[teacher]
        model = self._new_model()
        model.set_weights(self._weights[teacher])
        return model

    # Training

    def _check_callbacks(self, callbacks: object) -> None:
        if callbacks is None:
            return
        if not callable(callbacks):
            raise ValueError(
                "callbacks must be a function of a teacher's number that makes a new list: one list for all would "
                f"carry data from one teacher to the next; got {callbacks!r}."
            )
        if self.checkpoint_dir is not None:
            raise ValueError("callbacks change the training, and checkpoint_dir does not see how: leave one out.")

    def _check_classes(self, greatest: int, columns: int | None) -> None:
        """Compares labels, of so many columns where they are one-hot, with the model's outputs."""
        if columns is None and greatest >= self.num_classes_:
            raise ValueError(f"y has the label {greatest}, but the model has {self._outputs} outputs: give it more.")
        if columns is not None and columns != self._outputs:
            raise ValueError(f"y has {columns} columns, but the model has {self._outputs} outputs: give it as many.")

    def _split(self, rng: np.random.Generator, examples: int) -> list[np.ndarray]:
        if examples < self.num_teachers:
            raise ValueError(
                f"num_teachers={self.num_teachers} is more than the {examples} examples: every teacher needs one."
            )
        return np.array_split(rng.permutation(examples), self.num_teachers)

    def _check_shards(self, shards: Sequence[Arrays], examples: int) -> list[np.ndarray]:
        arrays = [np.asarray(shard) for shard in shards]
        if len(arrays) != self.num_teachers:
            raise ValueError(f"shards must be one for each of {self.num_teachers} teachers, got {len(arrays)}.")
        if any(not len(a) or a.dtype.kind not in "iu" for a in arrays):
            raise ValueError("shards must be arrays of indices, none of them empty.")
        every = np.concatenate(arrays)
        if every.min() < 0 or every.max() >= examples:
            raise ValueError(f"shards must hold indices from 0 to {examples - 1}, got {every.min()} to {every.max()}.")
        if len(np.unique(every)) != len(every):
            raise ValueError(
                "shards must be disjoint: an example in two shards has two votes, and costs twice as much."
            )
        return arrays

    def _set_apart(self, rng: np.random.Generator, part: float) -> None:
        """What each teacher is trained on, and what it is measured on."""
        part = _checks.real("validation_split", part, "the part of each shard, for instance 0.1", at_least=0)
        if part >= 1:
            raise ValueError(f"validation_split must be below 1, got {part:g}: training needs the rest.")
        self._trained_on, self._measured_on = list(self.shards_), [shard[:0] for shard in self.shards_]
        for teacher, shard in enumerate(self.shards_):
            if part:
                aside = max(1, round(part * len(shard)))
                if aside == len(shard):
                    left = f"leaves teacher {teacher} none of its {len(shard)} examples"
                    raise ValueError(f"validation_split={part:g} {left}: lower it.")
                self._measured_on[teacher], self._trained_on[teacher] = np.split(rng.permutation(shard), [aside])

    def _weigh(self, weights: object, classes: np.ndarray) -> np.ndarray | None:
        """Weights of the classes for each teacher, `[teachers, K]`."""
        if weights is None:
            return None
        shape = self.num_teachers, self.num_classes_
        if isinstance(weights, str) and weights == "balanced":
            each = np.array([np.bincount(classes[rows], minlength=shape[1]) for rows in self._trained_on])
            present = np.maximum((each > 0).sum(axis=1, keepdims=True), 1)
            return each.sum(axis=1, keepdims=True) / (present * np.maximum(each, 1))
        if not isinstance(weights, Mapping):
            raise ValueError(f"class_weight must be {{class: weight}} or 'balanced', got {weights!r}.")
        table = np.ones(shape)
        for k, weight in weights.items():
            if k not in range(shape[1]):
                raise ValueError(f"class_weight must have classes from 0 to {shape[1] - 1}, got {k!r}.")
            table[:, k] = _checks.real(f"class_weight[{k}]", weight, "a weight in the loss, for instance 1", at_least=0)
        return table

    def _new_model(self) -> Model:
        model = compiled(self.model_fn, "model_fn", self._zero)
        self._refuse_shared(model)
        return model

    def _warn_of_statistics(self, model: Model) -> None:
        from tfdpfl.callbacks._uncovered import uncovered_statistics

        for sentence in uncovered_statistics(model, PrivacyLedger(), _ADD_LEDGERS):
            warnings.warn(sentence, stacklevel=3)

    def _refuse_shared(self, model: Model) -> None:
        """Raises if a model trains weights of an earlier one: a teacher would go on from what others learned."""
        for variable in _trained_by(model):
            if self.num_teachers > 1 and self._seen.get(id(variable), _gone)() is variable:
                raise PrivacyError(
                    f"model_fn returned a model with the weights {variable.name!r} of an earlier one. A teacher would "
                    "go on from what the others learned, so an example of one shard would change many votes, and ε "
                    "counts one. Make all layers inside of model_fn (of a pretrained one keras.models.clone_model, "
                    "then set_weights), or freeze what models share: layer.trainable = False."
                )
        self._seen |= {id(variable): weakref.ref(variable) for variable in _trained_by(model)}

    def _told(self, model: Model) -> tuple[str | None, str | None]:
        """What a model is known by; or None, and why."""
        import tensorflow as tf

        from tfdpfl.pate import _model_fingerprint

        zero = tf.nest.map_structure(tf.constant, self._zero)
        try:
            return _model_fingerprint.fingerprint(model, zero, self._labels_like), None
        except _model_fingerprint.Unlike as error:
            return None, str(error)

    def _alike(self, model: Model) -> bool:
        """Whether a model may stand in the template's graph: one that cannot be told is like no other."""
        return self._fingerprint is not None and self._told(model)[0] == self._fingerprint

    def _why_not(self, model: Model, unlike: str | None) -> str | None:
        from tfdpfl.pate import _stacked

        if self.together is False:
            return "together=False"
        if self._callbacks is not None:
            return "callbacks take one model"
        return _stacked.why_not(model) or unlike

    def _who_was_alone(self) -> str | None:
        """Which teachers were trained by themselves although the first could be stacked."""
        if not self._alone:
            return None
        differ = len(set(self._alone) & set(self._models))
        parts = [
            f"{number} {reason}"
            for number, reason in (
                (differ, "differ from the first one"),
                (len(self._alone) - differ, "have no company of the same number of examples"),
            )
            if number
        ]
        return f"of {self.num_teachers} teachers " + ", ".join(parts)

    def _train(self, X: Arrays, y: np.ndarray, classes: np.ndarray, rng: np.random.Generator) -> None:
        from tqdm import tqdm

        missing = [t for t in range(self.num_teachers) if self._weights[t] is None]
        total = self.num_teachers * self.epochs
        with tqdm(
            total=total,
            initial=total - len(missing) * self.epochs,
            desc="teachers",
            unit="epoch",
            disable=not self.verbose,
        ) as bar:
            for group in self._groups(missing):
                models = {teacher: self._new_model() for teacher in group}  # initial weights are each one's own
                alike = [t for t in group if self._alike(models[t])]
                if len(alike) > 1:
                    weights = [models.pop(t).get_weights() for t in alike]
                    self._train_stack(alike, weights, X, y, classes, rng, bar)
                for teacher, model in models.items():
                    self._train_one(teacher, model, teacher in alike, X, y, bar)

    def _groups(self, missing: list[int]) -> Iterator[list[int]]:
        """Teachers to be trained together: their shards are of one size, so that their batches are."""
        if self._obstacle is not None:
            yield from ([teacher] for teacher in missing)
            return
        by_size: dict[int, list[int]] = {}
        for teacher in missing:
            by_size.setdefault(len(self._trained_on[teacher]), []).append(teacher)
        for teachers in by_size.values():
            for start in range(0, len(teachers), self.stack_size):
                yield teachers[start : start + self.stack_size]

    def _train_stack(
        self,
        group: list[int],
        weights: list[list[np.ndarray]],
        X: Arrays,
        y: np.ndarray,
        classes: np.ndarray,
        rng: np.random.Generator,
        bar: tqdm,
    ) -> None:
        import tensorflow as tf

        stack = self._stack(weights)
        shards, aside = (np.stack([each[t] for t in group]) for each in (self._trained_on, self._measured_on))
        x_stack, y_stack = tf.constant(X[shards]), tf.constant(y[shards])
        weight = None
        if self._class_weights is not None:
            weight = tf.constant(self._class_weights[np.array(group)[:, None], classes[shards]], tf.float32)
        x_aside, y_aside = tf.constant(X[aside]), tf.constant(y[aside])
        logs: dict[str, list[np.ndarray]] = {}
        for _ in range(self.epochs):
            order = rng.permuted(np.tile(np.arange(shards.shape[1]), (len(group), 1)), axis=1)
            log = stack.train_epoch(x_stack, y_stack, order, self.batch_size, weight)
            if aside.size:
                after = stack.evaluate(x_aside, y_aside, self.batch_size)
                log |= {f"val_{name}": value for name, value in after.items()}
            for name, value in log.items():
                logs.setdefault(name, []).append(value)
            bar.update(len(group))
        for i, (teacher, trained) in enumerate(zip(group, stack.weights(), strict=True)):
            self._keep(teacher, trained, {name: [float(v[i]) for v in values] for name, values in logs.items()})

    def _stack(self, weights: list[list[np.ndarray]]) -> Stack:
        """A stack of these models; of each size there is one, which has its graphs."""
        from tfdpfl.pate import _stacked

        if len(weights) in self._stacks:
            self._stacks[len(weights)].load(weights)
        else:
            self._stacks[len(weights)] = _stacked.Stack(self._template, weights, self._limit)
        return self._stacks[len(weights)]

    def _train_one(self, teacher: int, model: Model, alike: bool, X: Arrays, y: np.ndarray, bar: tqdm) -> None:
        rows, aside = self._trained_on[teacher], self._measured_on[teacher]
        # A callback may leave something behind in the model that it is given.
        trained = self._reused(model) if alike and self._callbacks is None else model
        log = trained.fit(
            _examples.rows(X, rows),
            y[rows],
            epochs=self.epochs,
            batch_size=self.batch_size,
            verbose=0,
            validation_data=(_examples.rows(X, aside), y[aside]) if len(aside) else None,
            class_weight=None if self._class_weights is None else dict(enumerate(self._class_weights[teacher])),
            callbacks=None if self._callbacks is None else self._callbacks(teacher),
        )
        bar.update(self.epochs)
        self._alone.append(teacher)
        if not alike:
            self._models[teacher] = model
        log = {name: [float(v) for v in values] for name, values in log.history.items()}
        self._keep(teacher, trained.get_weights(), log)

    def _reused(self, model: Model) -> Model:
        """The template with the new model's weights and a fresh optimizer: its graph is traced once for all."""
        optimizer = self._template.optimizer
        if not hasattr(optimizer, "build"):  # Keras 2's legacy optimizers
            return model
        if not hasattr(self, "_optimizer_start"):
            optimizer.build(self._template.trainable_variables)
            self._optimizer_start = [np.array(v) for v in optimizer.variables]
        for variable, value in zip(optimizer.variables, self._optimizer_start, strict=True):
            variable.assign(value)
        self._template.set_weights(model.get_weights())
        return self._template

    # Checkpoints

    def _resume(self, X: Arrays, y: np.ndarray, shards: object, validation_split: float, class_weight: Arrays) -> None:
        assert self.checkpoint_dir is not None
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        weights = sorted(class_weight.items()) if isinstance(class_weight, Mapping) else class_weight
        manifest = {
            "teachers": self.num_teachers,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "model, loss or optimizer": hashlib.sha256((self._fingerprint or "").encode()).hexdigest(),
            "data": _digest([*_examples.arrays(X), y]),
            "shards": None if shards is None else _digest(self.shards_),
            "validation_split": float(validation_split),
            "class_weight": repr(weights),
        }
        path, file = self.checkpoint_dir / "teachers.json", self.checkpoint_dir / "shards.npz"
        if not path.exists():
            _files.replace(file, lambda file: np.savez(file, *self.shards_))
            _files.replace(path, lambda file: file.write(json.dumps(manifest).encode()))
            return
        found = json.loads(path.read_text())
        different = [name for name in manifest if found.get(name) != manifest[name]]
        if different:
            raise ValueError(
                f"checkpoint_dir={str(self.checkpoint_dir)!r} has teachers with other {', '.join(different)}: "
                "give an empty folder."
            )
        with np.load(file) as saved:
            self.shards_ = [saved[f"arr_{t}"] for t in range(self.num_teachers)]
        for teacher in range(self.num_teachers):
            if self._file(teacher).exists():
                with np.load(self._file(teacher)) as saved:
                    self._weights[teacher] = [saved[f"arr_{i}"] for i in range(len(saved.files) - 1)]
                    self.history_[teacher] = json.loads(str(saved["log"]))

    def _keep(self, teacher: int, weights: list[np.ndarray], log: dict[str, list[float]]) -> None:
        self._weights[teacher], self.history_[teacher] = weights, log
        if self.checkpoint_dir is not None and teacher not in self._models:
            _files.replace(self._file(teacher), lambda file: np.savez(file, *weights, log=json.dumps(log)))
        if self.verbose > 1:
            from tqdm import tqdm

            tqdm.write(f"teacher {teacher}, {len(self._trained_on[teacher])} examples")
            for epoch, values in enumerate(zip(*log.values(), strict=True), 1):
                figures = ", ".join(f"{name} {value:.3f}" for name, value in zip(log, values, strict=True))
                tqdm.write(f"  epoch {epoch}: {figures}")

    def _file(self, teacher: int) -> Path:
        assert self.checkpoint_dir is not None
        return self.checkpoint_dir / f"teacher_{teacher:05d}.npz"

    # Votes

    def _check_fitted(self) -> None:
        if not hasattr(self, "_weights"):
            raise ValueError("the teachers are not trained: call fit(X, y) first.")

    def _queries(self, X: Arrays) -> Arrays:
        self._check_fitted()
        return _examples.as_inputs(X, len(_examples.arrays(self._zero)))

    def _forwards(self) -> Iterator[tuple[list[int], Callable[[Arrays], np.ndarray]]]:
        """Groups of teachers, and what gives their outputs on a batch, `[teachers, batch, ...]`."""
        alike = [t for t in range(self.num_teachers) if t not in self._models]
        if self._stacks or self._obstacle is None:
            for start in range(0, len(alike), self.stack_size):
                group = alike[start : start + self.stack_size]
                yield group, _outputs_of(self._stack([self._weights[t] for t in group]))  # type: ignore[misc]
        else:
            for teacher in alike:
                self._template.set_weights(self._weights[teacher])
                yield [teacher], _outputs_of(self._template)
        for teacher, model in self._models.items():
            yield [teacher], _outputs_of(model)

    def _classes(self, outputs: np.ndarray, teachers: list[int]) -> np.ndarray:
        failed = np.isnan(outputs).any(axis=tuple(range(1, outputs.ndim)))
        if failed.any():
            raise ValueError(
                f"teacher {teachers[int(np.argmax(failed))]} predicts NaN: lower the learning rate and train it again."
            )
        if outputs.shape[-1] > 1:
            return outputs.argmax(axis=-1)
        return (outputs[..., 0] > self._limit).astype(np.int64)


def _trained_by(model: Model) -> list[Variable]:
    """The weights that training may change: all but those of frozen layers, and of layers that `adapt` teaches."""
    still = [layer for layer in model._flatten_layers() if not layer.trainable or hasattr(layer, "adapt")]
    fixed = {id(weight) for layer in still for weight in layer.weights}
    return [weight for weight in model.weights if id(weight) not in fixed]


def _gone() -> None:
    """Stands for a weak reference to nothing."""


def _outputs_of(model: Model) -> Callable[[np.ndarray], np.ndarray]:
    if hasattr(model, "predict_on_batch"):
        return lambda batch: np.asarray(model.predict_on_batch(batch))[None]
    return lambda batch: model.outputs(batch).numpy()


def compiled(model_fn: Callable[[], Model], name: str, zero: Arrays) -> Model:
    """Returns a new model, built; compiled with Adam and cross-entropy if it came without.

    Args:
        zero: An example of zeros, as a batch.
    """
    import tensorflow as tf

    model = model_fn()
    if not isinstance(model, tf.keras.Model):
        raise ValueError(f"{name} must return a Keras model, got {type(model).__name__}.")
    if not model.built:
        model(zero, training=False)
    if getattr(model, "optimizer", None) is None or not model.loss:
        if type(model).__name__ not in ("Sequential", "Functional"):
            raise ValueError(
                f"{name} must compile its {type(model).__name__}, because its loss states what the outputs mean."
            )
        logits = _last_activation(model) == "linear"
        losses = tf.keras.losses
        binary = _num_outputs(model, zero) == 1
        kind = losses.BinaryCrossentropy if binary else losses.SparseCategoricalCrossentropy
        model.compile(optimizer="adam", loss=kind(from_logits=logits))
    return model


def _num_outputs(model: Model, zero: Arrays) -> int:
    outputs = model(zero, training=False)
    shape = getattr(outputs, "shape", None)
    if shape is None or len(shape) != 2:
        kind = f"got {tuple(shape)}" if shape is not None else f"got {type(outputs).__name__}: several outputs"
        raise ValueError(f"model_fn must make classifiers with outputs [batch, classes], {kind}.")
    return int(shape[-1])


def _last_activation(model: Model) -> str:
    return getattr(getattr(model.layers[-1], "activation", None), "__name__", "linear")


def _limit(model: Model) -> float:
    """From where a single output means the second of two classes."""
    config = model.loss.get_config() if hasattr(model.loss, "get_config") else {}
    chain = type(model).__name__ in ("Sequential", "Functional")
    return 0.0 if config.get("from_logits") or (chain and _last_activation(model) in ("linear", "tanh")) else 0.5


def labels_for(loss: Loss, classes: np.ndarray, outputs: int, one_hot: bool = False) -> np.ndarray:
    """Labels as Keras's own losses take them; for any other as they came."""
    import tensorflow as tf

    try:
        resolved = tf.keras.losses.get(loss)
    except (TypeError, ValueError):
        resolved = loss
    name = getattr(resolved, "__name__", type(resolved).__name__).replace("_", "").lower()
    if name.startswith("sparse") or outputs == 1:
        one_hot = False
    elif name in [each.lower() for each in _ONE_HOT]:
        one_hot = True
    return np.eye(outputs, dtype=np.float32)[classes] if one_hot else classes


def inputs_of(model: Model) -> int:
    """How many inputs a model has, as far as it says."""
    return len(getattr(model, "inputs", None) or [1])


def _digest(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
