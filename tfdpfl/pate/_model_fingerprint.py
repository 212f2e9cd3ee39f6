"""Whether two compiled models are trained alike, so that one may stand in for the other or be told again from a file.

Keras's own layers, losses and optimizers are told by their configurations. Code that a user wrote (an activation, a
loss, a layer, a subclassed model) has a name there at best. So it is told by the graph that it becomes: its ops,
constants and what it closes over. A graph that keeps a state of its own (a variable of no layer, a Python function) is
like no other. The state would go from one teacher to the next.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import types
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpfl._types import Arrays, JsonValue, Model, Nest
from tfdpfl.clipping.graph import attributes, body_graphs, function_names
from tfdpfl.clipping.step_checks import handles_of
from tfdpfl.clipping.variable_writes import side_effects

__all__ = ["Unlike", "fingerprint", "foreign", "own"]

# What the graph of an honest loss or layer may do beside computing: draw, complain, update its model's own variables.
_ALLOWED = re.compile(r"^(Stateless)?Random|^Assert$|^Assign\w*VariableOp$")
_STEPS = "fit train_step make_train_function compute_loss _compute_loss".split()


class Unlike(Exception):
    """The reason for which nothing can be said to be like a model."""


def fingerprint(model: Model, x: Arrays, y: Arrays) -> str:
    """Returns a text that two models of one architecture, and of one way to train, have in common, in any process.

    Args:
        model: Compiled and built.
        x: Some examples, as the model takes them.
        y: Their labels.

    Raises:
        Unlike: it cannot be told. The reason is what follows "its" or "it" in a sentence.
    """
    for name in _STEPS:
        step = getattr(type(model), name, None)
        if step is not None and not own(step):
            raise Unlike(f"it has a {name} of its own")
    if foreign(model.optimizer):
        raise Unlike(f"optimizer {type(model.optimizer).__name__} is not Keras's own, or has a part that is not")
    told = [type(model.optimizer).__name__, model.optimizer.get_config(), _of_model(model, x), _of_loss(model, x, y)]
    return json.dumps(_anonymous(told), default=str, sort_keys=True)


def own(thing: object) -> bool:
    """Whether a function, or the class of an object, is Keras's or TensorFlow's."""
    functions = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
    home = (thing if isinstance(thing, functions) else type(thing)).__module__
    return home is None or home.split(".")[0] in ("keras", "tf_keras", "tensorflow", "numpy", "builtins")


def foreign(thing: object) -> bool:
    """Whether an object is not Keras's own, or does what something does that is not."""
    if not own(thing) or isinstance(thing, functools.partial):
        return True
    parts = list(getattr(thing, "__dict__", {}).values())
    parts += [each for part in parts if isinstance(part, dict) for each in part.values()]
    return any(callable(part) and (isinstance(part, functools.partial) or not own(part)) for part in parts)


def _of_model(model: Model, x: Arrays) -> JsonValue:
    layers = list(model._flatten_layers(include_self=False))
    configured = not any(foreign(layer) or hasattr(layer, "adapt") for layer in layers)  # adapt is in no configuration
    if type(model).__name__ in ("Sequential", "Functional") and own(model) and configured:
        return _renamed(model.get_config(), [layer.name for layer in model.layers])
    graph = _graph(lambda *a: (model(*a, training=True), model.losses, model(*a, training=False)), (x,), model)
    return [graph, [(w.shape, str(w.dtype), bool(w.trainable)) for w in model.weights]]


def _of_loss(model: Model, x: Arrays, y: Arrays) -> JsonValue:
    loss = model.loss
    if isinstance(loss, str):
        return loss
    if not foreign(loss):
        return [type(loss).__name__, loss.get_config()] if hasattr(loss, "get_config") else loss.__name__
    if isinstance(loss, (list, tuple, dict)):
        raise Unlike("its loss is made of several")
    outputs = model(x, training=False)
    return _graph(lambda y, p: model.compute_loss(None, y, p, None), (tf.constant(y), outputs), model)


def _graph(function: Callable[..., Nest], arguments: tuple, model: Model) -> str:
    """The hash of a function's graph, its variables by their place in the model, its arguments of any batch size."""
    specs = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), arguments)
    try:
        graph = tf.function(function).get_concrete_function(*specs).graph
    except Exception as error:  # a user's code may raise anything
        raise Unlike(f"it has no graph of its own ({type(error).__name__})") from error
    variables = [*model.variables, *(v for metric in model.metrics for v in metric.variables)]
    places = {id(handle): i for i, v in enumerate(variables) for handle in handles_of(v)}
    captures = []
    for outer, _ in graph.captures:
        if outer.dtype == tf.resource and id(outer) not in places:
            raise Unlike("it keeps a state that is no weight of the model")
        captures.append(places[id(outer)] if outer.dtype == tf.resource else np.asarray(outer).tobytes().hex())
    states = sorted(op.type for op in side_effects(graph.get_operations()) if not _ALLOWED.search(op.type))
    if states:
        raise Unlike(f"it runs {states[0]}, which may keep a state")
    return hashlib.sha256(json.dumps([captures, _ops(graph)]).encode()).hexdigest()


def _ops(graph: tf.Graph) -> list:
    ops = graph.get_operations()
    numbers = {op.name: i for i, op in enumerate(ops)}
    told = []
    for op in ops:
        bodies = [_ops(body) for body in body_graphs(op)]
        every = attributes(op)
        if function_names(every) and not bodies:
            raise Unlike(f"it runs {op.type}, which may keep a state")
        # Names and counters that TensorFlow gives out anew, and the seeds of layers that drop out.
        attrs = {
            name: value.SerializeToString(deterministic=True).hex()
            for name, value in sorted(every.items())
            if not name.startswith("_") and name not in ("seed", "seed2") and not function_names({name: value})
        }
        inputs = [(numbers[t.op.name], t.value_index) for t in op.inputs]
        told.append([op.type, inputs, sorted(numbers[c.name] for c in op.control_inputs), attrs, bodies])
    return told


def _anonymous(value: object) -> Arrays:
    if isinstance(value, dict):
        return {k: _anonymous(v) for k, v in value.items() if k not in ("name", "seed", "shared_object_id")}
    return [_anonymous(v) for v in value] if isinstance(value, (list, tuple)) else value


def _renamed(config: object, names: list[str]) -> Arrays:
    """A configuration whose layers are called by their place."""
    text = json.dumps(config, default=str, sort_keys=True)
    for place, name in sorted(enumerate(names), key=lambda pair: len(pair[1]), reverse=True):
        text = text.replace(f'"{name}"', f'"layer{place}"')
    return json.loads(text)
