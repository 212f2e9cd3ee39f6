"""Teachers: Keras models, each trained on a shard of the private data that no other one sees."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfdpfl.accounting import _checks

_STACK = 25  # teachers trained together: beyond, their weights no longer gain from each other's company


class TeacherEnsemble:
    """T Keras models on disjoint shards, and their votes.

        teachers = TeacherEnsemble(model_fn, num_teachers=100, epochs=10).fit(x, y)
        counts = teachers.votes(x_public)

    One example is in one shard, hence in one vote on every query: what the aggregators' privacy rests on. The models
    themselves are as private as the data.

    Args:
        model_fn: Makes a new Keras model, compiled (else Adam and sparse cross-entropy are taken), for labels
            0 to K-1: its output is K probabilities or logits, or one for two classes.
        num_teachers: T, at least 1.
        epochs: Passes over a shard.
        batch_size: Examples in a batch.
        together: True trains teachers of one architecture as one stacked model (see `tfdpfl.pate._stacked` for the
            layers and optimizers it knows), False one after another, "auto" the first where that can be.
        stack_size: How many to train together at most.
        checkpoint_dir: A folder, private like the data, where each trained teacher is kept; `fit` on the same data
            goes on where it stopped.
        seed: Of the shards and the order of batches; None takes the operating system's entropy. Which shard an
            example is in need not be secret.
        verbose: 1 shows a progress bar, 0 nothing.

    Attributes:
        shards_: After `fit`: the indices of each teacher's examples.
        num_classes_: K.
        trained_together_: Why teachers were not stacked, or True.

    Raises:
        ValueError: an argument is out of its range.
    """

    def __init__(
        self,
        model_fn: Callable[[], Any],
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

    def fit(self, X: Any, y: Any, *, shards: Sequence[Any] | None = None) -> TeacherEnsemble:
        """Trains the teachers and returns the ensemble.

        Args:
            X: `[n, ...]`.
            y: Whole numbers from 0, `[n]`.
            shards: Indices of each teacher's examples, disjoint; None splits at random into equal parts.

        Raises:
            ValueError: fewer examples than teachers, shards that overlap or are empty, labels that are no classes, or
                a checkpoint folder of other data.
        """
        X, y = np.asarray(X), np.asarray(y)
        if len(X) != len(y) or y.ndim != 1:
            raise ValueError(f"y must have one label for each of the {len(X)} rows of X, got shape {y.shape}.")
        if y.dtype.kind not in "iu" or (len(y) and y.min() < 0):
            raise ValueError(f"y must hold whole numbers from 0, got {y.dtype}; number the classes.")
        rng = np.random.default_rng(self.seed)
        self.shards_ = self._check_shards(shards, len(X)) if shards is not None else self._split(rng, len(X))
        first = self._new_model()
        self._template, self._fingerprint = first, _fingerprint(first)
        self.num_classes_ = _num_classes(first)
        if y.max() >= self.num_classes_:
            raise ValueError(f"y has the label {y.max()}, but the model has {self.num_classes_} outputs: give it more.")
        self._weights: list[list[np.ndarray] | None] = [None] * self.num_teachers
        self._models: dict[int, Any] = {}
        self._stacks: dict[int, Any] = {}
        self.__dict__.pop("_optimizer_start", None)
        self.trained_together_ = self._obstacle(first)
        if self.together is True and self.trained_together_ is not True:
            raise ValueError(f"together must be 'auto' or False for this model: {self.trained_together_}.")
        self._resume(X, y)
        self._train(X, y, rng)
        return self

    def fit_shards(self, shards: Sequence[tuple[Any, Any]]) -> TeacherEnsemble:
        """Trains a teacher on each `(X, y)`: one a hospital. No example may be in two. Raises as `fit`."""
        if len(shards) != self.num_teachers:
            raise ValueError(f"shards must be one for each of {self.num_teachers} teachers, got {len(shards)}.")
        ends = np.cumsum([len(y) for _, y in shards])
        indices = np.split(np.arange(ends[-1]), ends[:-1])
        X, y = (np.concatenate([np.asarray(shard[i]) for shard in shards]) for i in (0, 1))
        return self.fit(X, y, shards=indices)

    def predict(self, X: Any, batch_size: int = 1024) -> np.ndarray:
        """Returns each teacher's class for each query, int64 `[teachers, queries]`.

        Raises:
            ValueError: `fit` has not run, or a teacher's output is NaN.
        """
        self._check_fitted()
        X = np.asarray(X)
        predictions = np.empty((self.num_teachers, len(X)), np.int64)
        for teachers, outputs in self._forwards():
            for start in range(0, len(X), batch_size):
                batch = slice(start, start + batch_size)
                predictions[teachers, batch] = self._classes(outputs(X[batch]), teachers)
        return predictions

    def votes(self, X: Any, batch_size: int = 1024) -> np.ndarray:
        """Returns vote counts, int64 `[queries, classes]`, computed `batch_size` queries at a time. Private.

        Raises:
            ValueError: `fit` has not run, or a teacher's output is NaN.
        """
        self._check_fitted()
        X = np.asarray(X)
        counts = np.zeros((len(X), self.num_classes_), np.int64)
        for teachers, outputs in self._forwards():
            for start in range(0, len(X), batch_size):
                for classes in self._classes(outputs(X[start : start + batch_size]), teachers):
                    counts[start + np.arange(len(classes)), classes] += 1
        return counts

    def model(self, teacher: int) -> Any:
        """Returns one teacher as a Keras model of its own."""
        self._check_fitted()
        if teacher in self._models:
            return self._models[teacher]
        model = self._new_model()
        model.set_weights(self._weights[teacher])
        return model

    # Training

    def _split(self, rng: np.random.Generator, examples: int) -> list[np.ndarray]:
        if examples < self.num_teachers:
            raise ValueError(
                f"num_teachers={self.num_teachers} is more than the {examples} examples: every teacher needs one."
            )
        return np.array_split(rng.permutation(examples), self.num_teachers)

    def _check_shards(self, shards: Sequence[Any], examples: int) -> list[np.ndarray]:
        arrays = [np.asarray(shard) for shard in shards]
        if len(arrays) != self.num_teachers:
            raise ValueError(f"shards must be one for each of {self.num_teachers} teachers, got {len(arrays)}.")
        if any(not len(a) or a.dtype.kind not in "iu" for a in arrays):
            raise ValueError("shards must be arrays of indices, none of them empty.")
        every = np.concatenate(arrays)
        if every.min() < 0 or every.max() >= examples:
            raise ValueError(f"shards must hold indices from 0 to {examples - 1}, got {every.min()} to {every.max()}.")
        if len(np.unique(every)) != len(every):
            raise ValueError("shards must be disjoint: an example in two shards has two votes, and twice the cost.")
        return arrays

    def _new_model(self) -> Any:
        return compiled(self.model_fn, "model_fn")

    def _alike(self, model: Any) -> bool:
        """Whether a model may stand in the template's graph: one whose architecture cannot be told is like no other."""
        return self._fingerprint is not None and _fingerprint(model) == self._fingerprint

    def _obstacle(self, model: Any) -> bool | str:
        from tfdpfl.pate import _stacked

        if self.together is False:
            return "together=False"
        return _stacked.why_not(model) or True

    def _train(self, X: np.ndarray, y: np.ndarray, rng: np.random.Generator) -> None:
        from tqdm import tqdm

        missing = [t for t in range(self.num_teachers) if self._weights[t] is None and t not in self._models]
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
                    self._train_stack(alike, [models.pop(t).get_weights() for t in alike], X, y, rng, bar)
                for teacher, model in models.items():
                    self._train_one(teacher, model, teacher in alike, X, y, bar)

    def _groups(self, missing: list[int]) -> Iterator[list[int]]:
        """Teachers to be trained together: their shards are of one size, so that their batches are."""
        if self.trained_together_ is not True:
            yield from ([teacher] for teacher in missing)
            return
        by_size: dict[int, list[int]] = {}
        for teacher in missing:
            by_size.setdefault(len(self.shards_[teacher]), []).append(teacher)
        for teachers in by_size.values():
            for start in range(0, len(teachers), self.stack_size):
                yield teachers[start : start + self.stack_size]

    def _train_stack(
        self,
        group: list[int],
        weights: list[list[np.ndarray]],
        X: np.ndarray,
        y: np.ndarray,
        rng: np.random.Generator,
        bar: Any,
    ) -> None:
        import tensorflow as tf

        stack = self._stack(weights)
        shards = np.stack([self.shards_[teacher] for teacher in group])
        x_stack, y_stack = tf.constant(X[shards]), tf.constant(y[shards])
        for _ in range(self.epochs):
            order = rng.permuted(np.tile(np.arange(shards.shape[1]), (len(group), 1)), axis=1)
            stack.train_epoch(x_stack, y_stack, order, self.batch_size)
            bar.update(len(group))
        for teacher, trained in zip(group, stack.weights(), strict=True):
            self._keep(teacher, trained)

    def _stack(self, weights: list[list[np.ndarray]]) -> Any:
        """A stack of these models; of each size there is one, which has its graphs."""
        from tfdpfl.pate import _stacked

        if len(weights) in self._stacks:
            self._stacks[len(weights)].load(weights)
        else:
            self._stacks[len(weights)] = _stacked.Stack(self._template, weights)
        return self._stacks[len(weights)]

    def _train_one(self, teacher: int, model: Any, alike: bool, X: np.ndarray, y: np.ndarray, bar: Any) -> None:
        shard = self.shards_[teacher]
        trained = self._reused(model) if alike else model
        trained.fit(X[shard], y[shard], epochs=self.epochs, batch_size=self.batch_size, verbose=0)
        bar.update(self.epochs)
        if not alike:
            self._models[teacher] = model
        self._keep(teacher, trained.get_weights())

    def _reused(self, model: Any) -> Any:
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

    def _resume(self, X: np.ndarray, y: np.ndarray) -> None:
        if self.checkpoint_dir is None:
            return
        self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
        manifest = {
            "teachers": self.num_teachers,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "shapes": [list(w.shape) for w in self._template.get_weights()],
            "data": hashlib.sha256(np.ascontiguousarray(X).tobytes() + y.tobytes()).hexdigest(),
        }
        path, shards = self.checkpoint_dir / "teachers.json", self.checkpoint_dir / "shards.npz"
        if not path.exists():
            _write(shards, lambda file: np.savez(file, *self.shards_))
            _write(path, lambda file: file.write(json.dumps(manifest).encode()))
            return
        found = json.loads(path.read_text())
        different = [name for name in manifest if found.get(name) != manifest[name]]
        if different:
            raise ValueError(
                f"checkpoint_dir={str(self.checkpoint_dir)!r} has teachers with other {', '.join(different)}: "
                "give an empty folder."
            )
        with np.load(shards) as saved:
            self.shards_ = [saved[f"arr_{t}"] for t in range(self.num_teachers)]
        for teacher in range(self.num_teachers):
            if self._file(teacher).exists():
                with np.load(self._file(teacher)) as saved:
                    self._weights[teacher] = [saved[f"arr_{i}"] for i in range(len(saved.files))]

    def _keep(self, teacher: int, weights: list[np.ndarray]) -> None:
        self._weights[teacher] = weights
        if self.checkpoint_dir is not None and teacher not in self._models:
            _write(self._file(teacher), lambda file: np.savez(file, *weights))

    def _file(self, teacher: int) -> Path:
        assert self.checkpoint_dir is not None
        return self.checkpoint_dir / f"teacher_{teacher:05d}.npz"

    # Votes

    def _check_fitted(self) -> None:
        if not hasattr(self, "_weights"):
            raise ValueError("the teachers are not trained: call fit(X, y) first.")

    def _forwards(self) -> Iterator[tuple[list[int], Callable[[np.ndarray], np.ndarray]]]:
        """Groups of teachers, and what gives their outputs on a batch, `[teachers, batch, ...]`."""
        from tfdpfl.pate import _stacked

        alike = [t for t in range(self.num_teachers) if t not in self._models]
        if self.trained_together_ is True or _stacked.why_not(self._template) is None:
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
        activation = getattr(getattr(self._template.layers[-1], "activation", None), "__name__", "sigmoid")
        return (outputs[..., 0] > (0 if activation == "linear" else 0.5)).astype(np.int64)


def _outputs_of(model: Any) -> Callable[[np.ndarray], np.ndarray]:
    if hasattr(model, "predict_on_batch"):
        return lambda batch: np.asarray(model.predict_on_batch(batch))[None]
    return lambda batch: model.outputs(batch).numpy()


def compiled(model_fn: Callable[[], Any], name: str) -> Any:
    """Returns a new model; compiled with Adam and cross-entropy if it came without."""
    import tensorflow as tf

    model = model_fn()
    if not isinstance(model, tf.keras.Model):
        raise ValueError(f"{name} must return a Keras model, got {type(model).__name__}.")
    if getattr(model, "optimizer", None) is None or not model.loss:
        logits = getattr(getattr(model.layers[-1], "activation", None), "__name__", "linear") == "linear"
        losses = tf.keras.losses
        binary = model.output_shape[-1] == 1
        kind = losses.BinaryCrossentropy if binary else losses.SparseCategoricalCrossentropy
        model.compile(optimizer="adam", loss=kind(from_logits=logits))
    return model


def _num_classes(model: Any) -> int:
    if len(model.output_shape) != 2:
        raise ValueError(f"model_fn must make classifiers with outputs [batch, classes], got {model.output_shape}.")
    return max(int(model.output_shape[-1]), 2)


def _fingerprint(model: Any) -> str | None:
    """What two models of one architecture, and of one way to train, have in common; None if it cannot be told."""
    try:
        loss = model.loss.get_config() if hasattr(model.loss, "get_config") else str(model.loss)
        config = [model.get_config(), str(type(model.optimizer)), model.optimizer.get_config(), loss]
    except (NotImplementedError, AttributeError, TypeError, ValueError):
        return None
    names: dict[str, str] = {}

    def anonymous(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: anonymous(v) for k, v in value.items() if k not in ("name", "seed", "shared_object_id")}
        if isinstance(value, (list, tuple)):
            return [anonymous(v) for v in value]
        return value

    for position, layer in enumerate(model.layers):
        names[layer.name] = f"layer{position}"
    text = json.dumps(anonymous(config), default=str, sort_keys=True)
    for name in sorted(names, key=len, reverse=True):
        text = text.replace(f'"{name}"', f'"{names[name]}"')
    return text


def _write(path: Path, write: Callable[[Any], Any]) -> None:
    """Writes a file that is whole or not there."""
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        write(file)
    os.replace(partial, path)
