"""Keras optimizers that train with differential privacy (DP-SGD and its relatives), on Keras 2 and Keras 3.

`make_dp_optimizer_class` turns any Keras optimizer class into one. The common ones are made here, under their own
names, so that they can be imported, pickled and found by Keras when a model is loaded.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfdpfl import _formats
from tfdpfl._frames import PLAN, callers, optimizer_of, running_fits
from tfdpfl._types import Model, Variable
from tfdpfl._variables import value_of
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.accounting.promises import Promise
from tfdpfl.clipping import tapes
from tfdpfl.clipping.models import saved_weights
from tfdpfl.clipping.refusals import EAGER
from tfdpfl.clipping.step_checks import before_it_runs, raw_variable
from tfdpfl.errors import PrivacyError
from tfdpfl.noise.strategies import Noise, Tree
from tfdpfl.optimizers import _fit_hook, _loaded, _past, _replicas, _step_table
from tfdpfl.optimizers._bias_corrected import AdamBC
from tfdpfl.optimizers._fused_adam import FusedAdam, updates_as_adam
from tfdpfl.optimizers._noises import noise_of
from tfdpfl.optimizers._privatizer import NO_LOSS, GradientPrivatizer
from tfdpfl.optimizers._settings import Settings

if TYPE_CHECKING:
    from tfdpfl.clips import Clip
    from tfdpfl.embeddings import AdaFEST
    from tfdpfl.optimizers._schedules import PiecewiseConstantDecay

_CONFIG_VERSION = 1  # of what `get_config` gives
_SAVED_BY = "saved_by"  # its entry with the version

_DOC = """Trains with {base} and differential privacy: clips the gradient of every example, and adds Gaussian noise.

    {base} receives ``(sum_i clip(g_i, l2_norm_clip) + noise) / denominator``. The noise is normal with standard
    deviation ``noise_multiplier * l2_norm_clip`` in every coordinate (Abadi et al. 2016, arXiv:1607.00133). The
    gradient of regularizers is added without a clip, because it depends on no example.

        model.compile(optimizer={name}(l2_norm_clip=1.0, noise_multiplier=1.1), loss=..., metrics=...)

    Private are the weights, the state of the optimizer, and everything that is computed from them. Not private are the
    loss and the metrics that Keras shows for training batches, and ``num_nonfinite``.

    Each optimizer object in each process draws a key from the operating system, and no file contains it. So a copy, a
    loaded model or a restarted process draws other noise. A variable that is saved with the optimizer counts the steps,
    with the sampling of their batches if `PrivacyBudget` knows it.

    Args:
      l2_norm_clip: C > 0, the largest L2 norm of the gradient of one example, over all trainable weights together. Or a
        `tfdpfl.AdaptiveClip`, `PerLayerClip` or `AutomaticClip`, or Keras's `PiecewiseConstantDecay` of updates.
        ``current_clip`` is the clip of the next step.
      noise_multiplier: the standard deviation of the noise, divided by C. 0 trains without privacy. With an
        `AdaptiveClip` it is the total, and includes the cost of the count that moves the clip. With a
        `PiecewiseConstantDecay` of updates ε counts each step at its own noise, and each pass over shuffled data at
        the least noise in it.
      num_microbatches: None clips every example by itself, which is best. With M, the mean gradient of each of M groups
        is clipped, as in TensorFlow Privacy. The sensitivity to one example is then 2 C, and the ledger counts this.
      gradient_accumulation_steps: k, the number of batches in one logical batch. Update, noise, ledger, schedule and
        moments are those of one batch that is k times as large. A logical batch may continue in the next epoch and the
        next `fit`. Its sum is only in memory, so a restart begins it again. If nothing states the sampling of the
        parts (`PrivacyBudget` does), ε assumes that an example is in all of them.
      expected_batch_size: the denominator, for the logical batch. Pass it with Poisson sampling, because the actual
        size is private. None divides by the number of examples (or microbatches) in the batch.
      rows_per_unit: m, if m consecutive rows are one unit of privacy: copies of one augmented example, or examples of
        one user. Their mean gradient is clipped once, and the sensitivity to a unit is C. Batches must hold whole
        units.
      noise: None draws fresh noise in every step. `tfdpfl.noise.Tree`, `Banded`, `BandedInverse` and `BLT` subtract
        some of the noise of earlier steps (DP-FTRL, matrix factorization). `PrivacyBudget` then needs data that bound
        how often an example takes part. The state that later steps need is saved with the optimizer, and is a secret:
        anyone who has it can subtract some of the noise.
      secure_noise: True rounds the clipped sum to a grid and adds discrete Gaussian noise, drawn exactly from the
        cryptographic generator. This avoids the gaps of floating-point noise (Mironov 2012). A draw takes about ten
        times as long, ε is computed by Rényi DP, and the step must run on the CPU of the host.
      sparse: `tfdpfl.AdaFEST` for models with large embedding tables. A step then trains only the rows whose noisy
        count is high enough. ``noise_multiplier`` includes the cost of the counts.
      seed: None uses the entropy of the operating system, also for the random numbers of the model (dropout), whatever
        `keras.utils.set_random_seed` sets. A seed is for tests: anyone who knows it can subtract the noise, and every
        process with this seed draws the same noise. With a seed the model keeps its own random numbers.
      **kwargs: every argument of {base}.

    Raises:
      PrivacyError: before the first update, if the model or the call cannot be made private. The message names the op
        or the layer, and the fix. The check covers the function that TensorFlow traces, and every function around it.
        It does not see what Python does between two calls.
      ValueError: for arguments out of range.
    """

_DOC_FTRL = """Trains with SGD and noise that is correlated over the steps (DP-FTRL: Kairouz et al. 2021,
    arXiv:2103.00039).

    This is `DPSGD` with `tfdpfl.noise.Tree` as the default ``noise``. Its ε depends on how often an example takes part,
    and not on sampling. Plain ``fit`` on arrays uses each example once an epoch.

        model.compile(optimizer=DPFTRL(l2_norm_clip=1.0, noise_multiplier=4.0, learning_rate=0.1), loss=...)
    """


def _setting(name: str, of_noise: str | None = None) -> property:
    """Makes a property of what the optimizer was made with. Steps that are traced hold it, so it cannot be changed.

    Args:
      name: of the argument, an attribute of the settings.
      of_noise: the attribute of the noise that it is, if it is one.
    """

    def change(self, value):
        _refuse_change(self, name, value)

    def read(self):
        return getattr(self._dp.settings, name) if of_noise is None else getattr(self._dp.noise, of_noise)

    return property(read, change)


def _refuse_change(optimizer: DPOptimizer, name: str, value: object) -> None:
    raise AttributeError(
        f"{name} is part of steps that are traced already. Compile the model again, with "
        f"{type(optimizer).__name__}({name}={value!r}, ...); set_weights and a ledger keep what ran."
    )


class DPOptimizer:
    """Holds what all DP optimizers have in common; see `DPSGD`. Do not use it by itself."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Whatever a Keras optimizer has."""

    _dp: GradientPrivatizer
    _dp_ledger: tf.Variable  # Keras 3: keras.Variable; the saved table of what ran
    _add_state: Callable[[str, np.ndarray | np.floating], tf.Variable]  # the adapter's
    iterations: tf.Variable  # the base's
    _dp_base: type
    _dp_model: type  # of the Keras that the base belongs to
    _dp_takes_workers: bool  # whether that Keras trains on several

    def __init__(
        self,
        l2_norm_clip: float | Clip | PiecewiseConstantDecay,
        noise_multiplier: float | PiecewiseConstantDecay,
        *positional: object,
        num_microbatches: int | None = None,
        gradient_accumulation_steps: int = 1,
        expected_batch_size: float | None = None,
        rows_per_unit: int = 1,
        noise: Noise | None = None,
        secure_noise: bool = False,
        sparse: AdaFEST | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ):
        _check_backend()
        if positional:
            given = ", ".join(map(repr, (l2_norm_clip, noise_multiplier, *positional)))
            raise TypeError(
                f"{type(self).__name__}({given}): the first two arguments are l2_norm_clip and noise_multiplier. Pass "
                "all others by name, so that no learning rate is mistaken for a clip. Write "
                f"{type(self).__name__}(l2_norm_clip, noise_multiplier, learning_rate=...), and num_microbatches=... "
                "by its name."
            )
        settings = Settings(
            l2_norm_clip, noise_multiplier, num_microbatches, gradient_accumulation_steps, expected_batch_size,
            rows_per_unit, seed,
        )  # fmt: skip
        dp = GradientPrivatizer(settings, noise_of(settings, noise, secure_noise, sparse))
        super().__init__(**kwargs)
        tapes.watch()
        self._dp = dp
        self._dp_ledger = dp.table = self._add_state("dp_ledger", _step_table.empty_table())
        dp.iterations = dp.clipping.iterations = self.iterations
        if dp.clipping.start is not None:
            dp.clipping.variable = self._add_state("dp_clip", dp.clipping.start)

    def _compute_gradients(self, *_: object, **__: object) -> None:
        """Refuses the call of TensorFlow Privacy's loops."""
        raise PrivacyError(
            "_compute_gradients is a method of TensorFlow Privacy's optimizers, and the gradients of these ones come "
            "from the tape. Write gradients = tape.gradient(loss, variables) in a @tf.function, and pass them to "
            "apply_gradients."
        )

    def __setattr__(self, name: str, value: object) -> None:
        # Keras 3 has an attribute of this name, None here, by which it would add up gradients with their noise.
        if name == "gradient_accumulation_steps" and hasattr(self, "_dp"):
            _refuse_change(self, name, value)
        super().__setattr__(name, value)

    def build(self, variables):
        super().build(variables)
        self._dp.built_on = [weakref.ref(raw_variable(v)) for v in variables]
        _past.note(self._dp, variables, self._model_that_trains())
        segments = self._dp.noise.segments
        if segments is not None and segments.table is None:
            with tf.init_scope():
                raw = [raw_variable(v) for v in variables]
                segments.build([v.shape for v in raw], [id(v) for v in raw], self._add_state)

    @staticmethod
    def _check_graph(loss) -> None:
        if not tf.is_tensor(loss) or hasattr(loss, "numpy"):
            raise PrivacyError(EAGER)

    def _update(self, loss, variables: list, table) -> list[tf.Tensor | None]:
        """Returns the private gradients, for a step that is looked at again when all of it is traced, before it
        runs."""
        if not self._dp_takes_workers and _replicas.workers() > 1:
            raise PrivacyError(
                "Keras 3 does not train under MultiWorkerMirroredStrategy: its fit stops as it sets up the model. "
                "Train with Keras 2 (tf.keras of TensorFlow 2.15 or older), under MirroredStrategy, or on one device."
            )
        planned = getattr(self, PLAN, None)
        for fit in running_fits():
            if optimizer_of(fit.get("self")) is self:
                if planned is not None:
                    planned.check(self, fit)
                self._warn_of_class_weights(fit.get("class_weight"))
        segments = self._dp.noise.segments
        if segments is not None and segments.table is None:
            self.build(variables)
        try:
            private = self._dp.update(loss, variables, table)
        except PrivacyError as error:  # without the walk through the graph, of which Keras 2 prints every line
            raise error.with_traceback(None) from None
        trains, own = self._model_that_trains(), weakref.ref(self)
        model = None if trains is None else weakref.ref(trains)
        trained = [weakref.ref(v) for v in variables]

        def ask():
            optimizer, trains = own(), model and model()
            if optimizer is not None:
                kept = [v for v in _variables_of(optimizer) if id(v) not in optimizer._dp.own_variables()]
                kept += [v for v in (ref() for ref in trained) if v is not None]
                optimizer._dp.check_finished(kept + (saved_weights(trains) if trains is not None else []))

        before_it_runs(loss.graph, ask)
        _past.note(self._dp, variables, trains)
        if _replicas.number() == 1:
            _past.take_in(self._dp, variables, trains)
        return private

    def _warn_of_class_weights(self, weights: Mapping[int, float] | None) -> None:
        """Weights are in the loss, and so before the clip. (How many examples exceed it is not known in public.)"""
        if isinstance(weights, dict) and len(set(weights.values())) > 1:
            warnings.warn(
                f"class_weight={weights!r} multiplies losses before gradients are clipped to "
                f"l2_norm_clip={self.l2_norm_clip!r}, so it changes nothing for an example with a longer gradient. "
                "Raise l2_norm_clip until predictions for public data move with the weights; or leave class_weight out "
                "and choose another decision threshold.",
                stacklevel=2,
            )

    def _of_a_tape(self, gradients: list, variables: list, table) -> list[tf.Tensor | None]:
        """Returns the private gradients of the loss that a tape gave these gradients of, which are not used.

        Raises:
          PrivacyError: they are anything else.
        """
        loss = tapes.loss_of(gradients, variables)
        if loss is None:
            if tf.executing_eagerly():
                raise PrivacyError(EAGER)
            raise PrivacyError(NO_LOSS)
        found = iter(self._update(loss, [v for g, v in zip(gradients, variables, strict=True) if g is not None], table))
        return [None if g is None else next(found) for g in gradients]

    def _check_tape(self, tape, loss, variables: list) -> None:
        """Checks that the loss is of a graph, and a tape which is handed in would give the gradients of the whole
        loss."""
        self._check_graph(loss)
        if isinstance(tape, tf.GradientTape) and tape._tape is not None:
            tapes.check_seen(tapes.unseen(tape, [loss]), variables)

    def _model_that_trains(self) -> Model | None:
        for frame in callers():
            for model in (frame.f_locals.get(name) for name in ("self", "model")):
                if isinstance(model, self._dp_model) and optimizer_of(model) is self:
                    return model
        return None

    def _built_on(self) -> list[Variable]:
        return [v for v in (ref() for ref in self._dp.built_on) if v is not None]

    def _take_in(self) -> None:
        """Takes the steps of other optimizers on the same weights into the table, before it is saved."""
        _past.take_in(self._dp, self._built_on(), self._model_that_trains())

    # -- what a user may read --------------------------------------------------------------------------------

    l2_norm_clip = _setting("l2_norm_clip")
    noise_multiplier = _setting("noise_multiplier")
    num_microbatches = _setting("num_microbatches")
    expected_batch_size = _setting("expected_batch_size")
    rows_per_unit = _setting("rows_per_unit")
    secure_noise = _setting("secure_noise", of_noise="discrete")
    sparse = _setting("sparse", of_noise="sparse")
    noise = _setting("noise", of_noise="correlated")

    @property
    def current_clip(self) -> float | list[float]:
        """Returns the clip of the next step: a number, or one number for each group."""
        return self._dp.clipping.current

    @property
    def unit(self) -> str:
        """Returns the unit whose part in a step is bounded, and that ε protects."""
        return "example" if self.rows_per_unit == 1 else f"{self.rows_per_unit} consecutive rows"

    @property
    def num_dp_steps(self) -> int:
        """Returns the number of noisy updates so far, restarts included."""
        return sum(n for _, n in self._executed())

    @property
    def num_nonfinite(self) -> int:
        """Returns how many per-example gradients were NaN or infinite in this process, and so contributed nothing.

        This is a count of examples without noise. It is not private, and it is not saved.
        """
        return int(value_of(self._dp.counter.nonfinite))

    @property
    def executed(self) -> list[tuple[float, int]]:
        """Returns pairs of (noise multiplier for the sensitivity to one example, number of steps) for all that ran.

        Raises:
          PrivacyError: a step that was traced here writes batch data to a variable that its loss reads the next time.
        """
        self._dp.check_finished()
        return self._executed()

    def _executed(self) -> list[tuple[float, int]]:
        steps: Counter[float] = Counter()
        for row in self._dp.rows():
            steps[float(row[_step_table.MULTIPLIER])] += int(row[_step_table.STEPS])
        return list(steps.items())

    @property
    def ledger(self) -> PrivacyLedger:
        """Returns the ledger of all steps that ran.

        Each step has the sampling of its batch, if `PrivacyBudget` or the data stated it before the step. Otherwise the
        ledger counts the step as if every example took part.
        """
        self._dp.check_finished()
        return self._dp.ledger()

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        ledger = self.ledger
        return [ledger.report(delta).promise("training", ledger)]

    # -- saving ----------------------------------------------------------------------------------------------

    def get_config(self):
        config = super().get_config()
        config.pop("is_legacy_optimizer", None)
        return {**config, **self._dp.to_dict(), _SAVED_BY: _formats.stamp(_CONFIG_VERSION)}

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Makes the optimizer that `get_config` described.

        Raises:
          PrivacyError: a newer release saved the config, in a way that this one does not know.
        """
        config = dict(config)
        _formats.refuse_newer(f"The config of {cls.__name__}", config.pop(_SAVED_BY, {}), _CONFIG_VERSION)
        return super().from_config(config, custom_objects)

    def load_own_variables(self, store: Any) -> None:
        """Loads what Keras saved. If Keras leaves all of it out, because layers were frozen or thawed since, the
        ledger is loaded nevertheless: steps that ran stay counted.

        Raises:
          PrivacyError: the file's correlated noise is not this optimizer's, or the file is of a newer release;
            nothing is loaded.
        """
        saved = _stored(self, store, self._dp_ledger)
        if saved is not None:
            _step_table.refuse_newer(np.asarray(saved))
            saved = _step_table.with_all_columns(np.asarray(saved))
            if saved.shape[-1:] != store[_place(self, self._dp_ledger)].shape[-1:]:
                store = {name: store[name] for name in store.keys()}  # noqa: SIM118
                store[_place(self, self._dp_ledger)] = saved
        segments = self._dp.noise.segments
        if segments is not None:
            segments.check(_stored(self, store, segments.table))
        super().load_own_variables(store)  # type: ignore[misc]  # of the base
        self._load_ledger(saved)
        self._dp.drop_partial()  # its gradients are those of other weights
        self._dp.counter.write_back(self._dp_ledger)

    def _load_ledger(self, saved: np.ndarray | None) -> None:
        if saved is None or tuple(saved.shape) != tuple(self._dp_ledger.shape):
            warnings.warn(
                "The file holds no ledger of a DP optimizer. The cost of its weights is not known, so no ε "
                "includes it. If they were trained on private data, give PrivacyBudget that training's ledger=.",
                stacklevel=3,
            )
        else:
            self._dp_ledger.assign(saved)
            model = self._model_that_trains()  # any of whose weights may have been moved by some of the steps
            loaded = self._built_on() if model is None else _past.weights_of(model)
            _past.note(self._dp, loaded, model)

    def save_own_variables(self, store: Any) -> None:
        self._take_in()
        self._dp.counter.write_back(self._dp_ledger)
        if self._dp.noise.segments is not None:
            self._dp.noise.segments.write_back()
        super().save_own_variables(store)  # type: ignore[misc]  # of the base

    def __reduce__(self):
        segments = None if self._dp.noise.segments is None else self._dp.noise.segments.rows()
        return _rebuild, (self._dp_base, self.get_config(), self._dp.rows(), segments)


def _place(optimizer, variable) -> str:
    """Returns the name under which Keras keeps one of the optimizer's variables in a file."""
    return str(next((i for i, v in enumerate(optimizer.variables) if v is variable), -1))


def _stored(optimizer, store, variable):
    """Returns what a file holds for one of the optimizer's variables, or None."""
    place = _place(optimizer, variable)
    return store[place] if place in store.keys() else None  # noqa: SIM118


def _rebuild(base, config, rows, segments=None):
    """Returns a pickled or copied optimizer: the same settings and ledger, and a key of its own, so that no noise is
    used twice."""
    optimizer = make_dp_optimizer_class(base).from_config(config)
    optimizer._dp.counter.merge(rows, optimizer._dp_ledger)
    if segments is not None:
        optimizer._dp.noise.segments.merge(segments)
    return optimizer


def _variables_of(optimizer) -> list:
    """Returns the optimizer's own, the learning rate first: what follows from it is not what an error is to name. On
    Keras 2 it is an attribute."""
    found = optimizer.variables
    rate = getattr(optimizer, "_learning_rate", None)
    return [*([rate] if hasattr(rate, "assign") else []), *(found() if callable(found) else found)]


def _check_backend() -> None:
    keras = tf.keras
    backend = getattr(getattr(keras, "backend", None), "backend", None)
    name = backend() if callable(backend) else "tensorflow"
    if name != "tensorflow":
        raise PrivacyError(
            f"Keras runs on the {name!r} backend; per-example gradients are taken from TensorFlow graphs. Set "
            "KERAS_BACKEND=tensorflow before Keras is imported."
        )


def make_dp_optimizer_class(keras_optimizer_class: type) -> type[DPOptimizer]:
    """Returns a DP version of any Keras optimizer class, Keras 2 or Keras 3.

    Args:
      keras_optimizer_class: a subclass of `tf.keras.optimizers.Optimizer`, your own ones included.

    Returns:
      A registered class ``DP<Name>`` (the same one for every call) whose constructor takes DPSGD's arguments and, by
      keyword, all of the base's.

    Raises:
      TypeError: for what is not an optimizer class, and for the legacy optimizers of Keras 2.
    """
    return _make(keras_optimizer_class, f"DP{getattr(keras_optimizer_class, '__name__', '')}")


@functools.cache
def _make(base: type, name: str) -> type[DPOptimizer]:
    _check_backend()
    if not inspect.isclass(base):
        raise TypeError(f"keras_optimizer_class={base!r} is not a class; give the class, not an instance.")
    if issubclass(base, DPOptimizer):
        return base
    if "LossScaleOptimizer" in base.__name__:
        raise TypeError(
            f"keras_optimizer_class={base.__name__} scales the loss of another optimizer. Make that one private: "
            "tfdpfl.DPAdam, or make_dp_optimizer_class of its class."
        )
    adapter: type
    if hasattr(base, "scale_loss") and hasattr(base, "apply"):
        import keras

        from tfdpfl.optimizers._keras3 import Keras3Adapter as adapter

        of_keras: ModuleType = keras
    elif hasattr(base, "compute_gradients") and hasattr(base, "_create_iteration_variable"):
        from tfdpfl.optimizers._keras2 import Keras2Adapter as adapter
        from tfdpfl.optimizers._keras2 import keep_measurements_out_of_files

        of_keras = _keras2_of(base)
        keep_measurements_out_of_files(of_keras.Model)
    else:
        raise TypeError(
            f"{base.__module__}.{base.__name__} is not an optimizer that can be made private. Legacy optimizers "
            "(tf.keras.optimizers.legacy) and other libraries' cannot; use tf.keras.optimizers."
        )
    fused = (FusedAdam,) if updates_as_adam(base) else ()
    made = type(name, (DPOptimizer, adapter, *fused, base), {
        "__doc__": _DOC.format(base=base.__name__, name=name),
        "__module__": __name__,
        "_dp_base": base,
        "_dp_model": of_keras.Model,
    })  # fmt: skip
    _fit_hook.watch(of_keras.callbacks.CallbackList)
    _loaded.watch(of_keras.Model)
    return _registration(base)(package="tfdpfl", name=name)(made)


def _registration(base: type):
    """Returns what registers an optimizer class with the Keras that it belongs to."""
    if hasattr(base, "scale_loss"):
        import keras

        return keras.saving.register_keras_serializable
    return _keras2_of(base).utils.register_keras_serializable


def _keras2_of(base: type):
    """Returns the Keras 2 that an optimizer class belongs to."""
    if any(c.__module__.startswith("tf_keras") for c in base.__mro__):
        import tf_keras

        return tf_keras
    return tf.keras


def _make_ftrl() -> type[DPOptimizer]:
    """Makes DPSGD with another default."""

    def __init__(self, l2_norm_clip, noise_multiplier, *args, noise=None, **kwargs):
        noise = Tree() if noise is None else noise
        super(made, self).__init__(l2_norm_clip, noise_multiplier, *args, noise=noise, **kwargs)

    made: Any = type("DPFTRL", (DPSGD,), {"__doc__": _DOC_FTRL, "__module__": __name__, "__init__": __init__})
    made._dp_base = made
    return _registration(tf.keras.optimizers.SGD)(package="tfdpfl", name="DPFTRL")(made)


DPSGD = _make(tf.keras.optimizers.SGD, "DPSGD")
DPAdam = _make(tf.keras.optimizers.Adam, "DPAdam")
DPAdamW = _make(tf.keras.optimizers.AdamW, "DPAdamW")
DPAdagrad = _make(tf.keras.optimizers.Adagrad, "DPAdagrad")
DPAdamBC = _make(AdamBC, "DPAdamBC")
DPRMSprop = _make(tf.keras.optimizers.RMSprop, "DPRMSprop")

DPFTRL = _make_ftrl()

# TensorFlow Privacy's names.
DPKerasSGDOptimizer = DPSGD
DPKerasAdamOptimizer = DPAdam
DPKerasAdagradOptimizer = DPAdagrad

__all__ = [
    "DPFTRL",
    "DPSGD",
    "DPAdagrad",
    "DPAdam",
    "DPAdamBC",
    "DPAdamW",
    "DPKerasAdagradOptimizer",
    "DPKerasAdamOptimizer",
    "DPKerasSGDOptimizer",
    "DPOptimizer",
    "DPRMSprop",
    "make_dp_optimizer_class",
]
