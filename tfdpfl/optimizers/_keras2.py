"""How Keras 2 (tf.keras before TensorFlow 2.16, and tf_keras) hands a loss to its optimizer."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from tfdpfl._frames import callers, optimizer_of
from tfdpfl._types import Model
from tfdpfl._variables import plain_variable
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.graph import function_graph
from tfdpfl.clipping.step_checks import handles_of
from tfdpfl.optimizers import _past
from tfdpfl.optimizers._fused_adam import forget_powers
from tfdpfl.optimizers._privatizer import GradientPrivatizer, after_a_step

__all__ = ["Keras2Adapter", "keep_measurements_out_of_files"]

_ROWS = "tfdpfl_rows"
_FROM_PYTHON = frozenset("PyFunc PyFuncStateless EagerPyFunc".split())


class Keras2Adapter:
    """Comes before a Keras 2 optimizer in a DP optimizer's bases.

    ``minimize`` calls ``compute_gradients(loss, variables, tape)``, then ``apply_gradients``. The second accepts only
    what follows from the first; or what a tape gave, of which it takes the loss alone.
    """

    _dp_takes_workers = True
    _dp: GradientPrivatizer
    _dp_model: type
    _variables: list[tf.Variable]  # the base class's
    _take_in: Callable[[], None]

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self._dp_released = weakref.WeakKeyDictionary()

    def _add_state(self, name: str, value: np.ndarray) -> tf.Variable:
        with tf.init_scope():
            first = tf.VariableAggregation.ONLY_FIRST_REPLICA
            variable = tf.Variable(value, trainable=False, name=name, aggregation=first)
        self._variables.append(variable)
        return variable

    def get_config(self):
        """As Keras does; for a whole model's file with the rows of the ledger, since what Keras 2 loads from a
        SavedModel is an optimizer made of its config alone."""
        config = super().get_config()
        if any(frame.f_code.co_name == "model_metadata" for frame in callers()):
            self._take_in()
            config[_ROWS] = self._dp.rows().tolist()
        return config

    @classmethod
    def from_config(cls, config, custom_objects=None):
        config = dict(config)
        rows = config.pop(_ROWS, [])
        optimizer = super().from_config(config, custom_objects)
        if rows:
            optimizer._dp.counter.merge(np.array(rows), optimizer._dp_ledger)
            # A SavedModel is compiled with this optimizer next, or with another by the user.
            for model in (frame.f_locals.get("model") for frame in callers()):
                if isinstance(model, cls._dp_model):
                    _past.note(optimizer._dp, _past.weights_of(model), model)
        return optimizer

    def build(self, var_list):
        """As Keras does, but as if before the step: TensorFlow traces a function twice that makes variables."""
        if tf.distribute.has_strategy():
            with tf.init_scope():  # the first values of variables are sent to all workers, which is no part of a step
                return super().build(var_list)
        with tf.init_scope(), tf.variable_creator_scope(plain_variable):
            return super().build(var_list)

    @tf.autograph.experimental.do_not_convert
    def compute_gradients(self, loss, var_list, tape=None):
        if callable(loss):
            loss, tape = loss(), None
        variables = list(var_list() if callable(var_list) else var_list)
        self._check_tape(tape, loss, variables)
        loss, scale = self._without_scale(loss)
        private = self._update(loss, variables, self._dp_ledger)
        if scale is not None:
            private = [g if g is None else _times(g, tf.cast(scale, g.dtype)) for g in private]
        return self._released(private, variables)

    def _released(self, private, variables):
        for g in _tensors(private):  # by name: a tensor would keep its graph alive
            self._dp_released.setdefault(g.graph, set()).add(g.name)
        return list(zip(private, variables, strict=True))

    def _without_scale(self, loss):
        """Returns the loss as it was before the LossScaleOptimizer that calls multiplied it, and its scale or None. No
        other factor is one, whatever it is made of."""
        wrapped = any(getattr(frame.f_locals.get("self"), "inner_optimizer", None) is self for frame in callers())
        if wrapped and loss.op.type == "Mul":
            unscaled, scale = loss.op.inputs
            scale = scale.op.inputs[0] if scale.op.type == "Cast" else scale  # to float16, where it may overflow
            return unscaled, scale
        return loss, None

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, grads_and_vars, *args, **kwargs):
        forget_powers()
        grads_and_vars = list(grads_and_vars)
        public = {id(h) for v in [*(v for _, v in grads_and_vars), *self._variables] for h in handles_of(v)}
        if not all(self._is_private(g, public) for g in _tensors(g for g, _ in grads_and_vars)):
            grads, variables = map(list, zip(*grads_and_vars, strict=True))
            private = self._of_a_tape(grads, variables, self._dp_ledger)
            grads_and_vars = self._released(private, variables)
        if self._dp.parts == 1:
            with tf.control_dependencies(after_a_step(g for g, _ in grads_and_vars)):
                return super().apply_gradients(grads_and_vars, *args, **kwargs)
        with tf.init_scope():  # in a branch of the graph no variables are made
            self._compute_current_learning_rate()
            self.build([v for _, v in grads_and_vars])
        self._dp.where_whole(lambda: super(Keras2Adapter, self).apply_gradients(grads_and_vars, *args, **kwargs))
        return self.iterations

    def aggregate_gradients(self, grads_and_vars):
        """Changes nothing: they are summed over the replicas, and all have the same noise."""
        return list(grads_and_vars)

    def _is_private(self, g, public: set[int]) -> bool:
        """Returns whether a gradient follows from released ones and from nothing else that could hold data.

        What else it may follow from: the variables in ``public`` (ids of handles), scalars that are no argument of
        the function, shapes, and noise.
        """
        if not isinstance(getattr(g, "graph", None), tf.Graph):
            return False
        seen, todo = set(), [g]
        while todo:
            t = todo.pop()
            if (t.graph, t.name) in seen or t.name in self._dp_released.get(t.graph, ()):
                continue
            seen.add((t.graph, t.name))
            before = _follows_from(t, public)
            if before is None:
                return False
            todo.extend(before)
        return True


def _follows_from(t: tf.Tensor, public: set[int]) -> list[tf.Tensor] | None:
    """Returns what decides whether a tensor holds data; None if it may hold some itself."""
    if t.op.inputs:
        scalar = t.op.type == "ReadVariableOp" and t.shape.rank == 0
        return None if not _calls_are_data_free(t.op) else [] if scalar else list(t.op.inputs)
    if not t.op.type.startswith("Placeholder"):
        return [] if _is_data_free(t.op) else None
    outer = graph_tools.captured(t)
    if isinstance(getattr(outer, "graph", None), tf.Graph):
        return [outer]
    known = outer is not None and (id(outer) in public or (outer.dtype != tf.resource and not outer.shape))
    return [] if known else None


def _tensors(gradients: Iterable) -> list:
    """Returns what the gradients are made of: of rows their values and their numbers."""
    slices = lambda g: isinstance(g, tf.IndexedSlices)  # noqa: E731
    return [t for g in gradients if g is not None for t in ([g.values, g.indices] if slices(g) else [g])]


def _times(g: tf.Tensor | tf.IndexedSlices, factor: tf.Tensor) -> tf.Tensor | tf.IndexedSlices:
    if isinstance(g, tf.IndexedSlices):
        return tf.IndexedSlices(g.values * factor, g.indices, g.dense_shape)
    return g * factor


def _is_data_free(op: tf.Operation) -> bool:
    """Returns whether an op without inputs is one number (repeated) or a shape: data would be baked in as more."""
    if op.type != "Const":
        return op.type == "NoOp"
    value = tf.get_static_value(op.outputs[0])
    return value.size <= 1 or (value.dtype.kind in "iub" and value.ndim == 1 and value.size <= 8) or (
        bool((value == value.flat[0]).all())
    )  # fmt: skip


def _calls_are_data_free(op: tf.Operation) -> bool:
    """Returns whether the functions that an op with inputs runs bring in nothing but the op's inputs."""
    if op.type in _FROM_PYTHON:
        return False
    for name in graph_tools.function_names(op.node_def.attr):
        for inner in function_graph(op.graph, name, op.inputs).get_operations():
            entry = inner.type.startswith("Placeholder") or inner.type == "Arg"
            if not (entry or (_calls_are_data_free(inner) if inner.inputs else _is_data_free(inner))):
                return False
    return True


@functools.cache
def keep_measurements_out_of_files(model_class: type) -> None:
    """Has the files of private models hold zeros in place of what their metrics measured.

    Keras 2 saves metrics with the model, also those that `compile` makes: the exact loss of the last epoch's examples.
    The model itself keeps them, because a file may be saved in the middle of an epoch.

    Args:
      model_class: `Model` of the Keras that saves.
    """
    api = inspect.unwrap(model_class.save).__globals__["saving_api"]  # type: ignore[attr-defined]
    for module in (api.saving_lib, api.legacy_sm_saving_lib):
        for name in {"save_model", "save_weights", "save_weights_only"} & vars(module).keys():
            setattr(module, name, _without_measurements(getattr(module, name)))


def _without_measurements(save: Callable) -> Callable:
    @functools.wraps(save)
    def save_the_rest(model: Model, *args: object, **kwargs: object) -> object:
        private = hasattr(optimizer_of(model), "_dp") or any(_past.stepped_on_model(model))
        measured = [(v, tf.identity(v)) for v in (_measurements(model) if private else [])]
        try:
            for variable, value in measured:
                variable.assign(tf.zeros_like(value))
            return save(model, *args, **kwargs)
        finally:
            for variable, value in measured:
                variable.assign(value)

    return save_the_rest


def _measurements(model: Model) -> list[tf.Variable]:
    """Returns the variables of all metrics that Keras saves with a model."""
    metrics = [*model.metrics, *(metric for layer in model._flatten_layers() for metric in layer._metrics)]
    return list({id(v): v for metric in metrics for v in metric.variables}.values())
