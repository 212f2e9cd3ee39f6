"""Batches that are filled up with blank rows: where a private step finds which rows are blank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfdpfl import _blanks
from tfdpfl._frames import callers, running_fits
from tfdpfl._types import Dataset
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.pipeline import ClippingPipeline
from tfdpfl.clipping.sizes import original
from tfdpfl.data.declared import SHUFFLES, made_from, transformed_by
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers import _replicas

__all__ = ["check_kept", "leave_out_blanks"]

# What hands on each batch with all of its rows and their weights.
_KEEPS = ("prefetch", "options", "take", "skip", "repeat", "cache", "snapshot", *SHUFFLES, "assertcardinality")


def leave_out_blanks(plan: ClippingPipeline) -> None:
    """Has the plan leave out the rows that are marked as blank in what the step takes in.

    Raises:
      PrivacyError: the data of the running `fit` may hold blank rows, and the step does not take in the marks.
    """
    marking = [t for t in _entering(plan.graph, plan.analysis.sources) if _blanks.may_mark(t)]
    data: Dataset = next(running_fits(), {}).get("x")
    declared = made_from(data)
    if declared is not None and declared.blanks:
        check_kept(data)
        given = [getattr(spec, "_value_specs", [spec])[0] for spec in tf.nest.flatten(data.element_spec)]
        if len(marking) < sum(map(_blanks.may_mark, given)):
            raise PrivacyError(
                "The batches are filled up with blank rows, which their sample_weight marks, but the function that "
                f"computes the loss ({getattr(plan.graph, 'name', 'a tf.function')!r}) does not receive it. Blank rows "
                "would count as examples, and move the sum by one clip each. Give the function the sample weights as "
                "an argument, too, or compute the loss in train_step itself."
            )
    weights = _sample_weights(plan)
    if marking or weights:
        plan.leave_out(*_blanks.of_batch(marking, weights, plan.batch_size))


def _sample_weights(plan: ClippingPipeline) -> list[tf.Tensor]:
    """Returns the sample weights of the train_step that runs, for batches that were filled up by hand: an activity
    regularizer, `add_loss` or a train_step of one's own does not see that a weight is 0. If Keras did not write the
    train_step and the loss depends on the third part of its data, that may be something else, such as a target."""
    for frame in callers():
        code = frame.f_code
        if code.co_name.removeprefix("tf__") == "train_step" and code.co_argcount > 1:
            data = frame.f_locals.get(code.co_varnames[1])
            of_keras = frame.f_globals.get("__name__", "").split(".")[0] in ("keras", "tf_keras")
            third = tf.nest.flatten(data[2]) if isinstance(data, tuple | list) and len(data) == 3 else []
            return [
                t for t in third
                if getattr(t, "graph", None) is plan.graph and _blanks.may_mark(t)
                and (of_keras or not any(user.name in plan.analysis.ops for user in t.consumers()))
            ]  # fmt: skip
    return []


def check_kept(data: Dataset) -> None:
    """Raises a `PrivacyError` where what stands behind batches with blank rows may have lost which rows are blank."""
    declared, changing = made_from(data), transformed_by(data, _KEEPS)
    if declared is not None and declared.blanks and changing is not None:
        raise PrivacyError(
            f"{changing} comes after batches that are filled up with blank rows (truncated_batch_size, or "
            "empty_batches). It may lose the mark of the blank rows, which would then count as examples. Give fit the "
            "batches themselves, and change the data before them, by map_fn."
        )


def _entering(graph: tf.Graph, sources: Sequence[tf.Tensor]) -> Iterator[tf.Tensor]:
    """Returns the tensors that come into a step with the batch that its loss is made of, for the replica that takes
    it."""
    makers = {op.name: op for op in (original(t).op for t in sources)}
    arguments = [op for op in makers.values() if op.type.startswith("Placeholder") or op.type == "Arg"]
    for op in makers.values():
        if op not in arguments:
            yield from op.outputs
    if arguments:
        yield from _arguments(graph)


def _arguments(graph: tf.Graph) -> Iterator[tf.Tensor]:
    """Returns what a function was given, and takes from functions around it; of what each replica has one, this
    one's."""
    inputs, at = list(getattr(graph, "inputs", [])), 0
    signature = getattr(graph, "structured_input_signature", None) if _replicas.number() > 1 else None
    replica = tf.distribute.get_replica_context()
    for spec in tf.nest.flatten(signature):
        parts = len(tf.nest.flatten(spec, expand_composites=True))
        if type(spec).__name__ == "PerReplicaSpec":
            number = int(tf.get_static_value(replica.replica_id_in_sync_group)) % parts
            inputs[at : at + parts] = [None] * number + [inputs[at + number]] + [None] * (parts - number - 1)
        at += parts
    for t in inputs:
        if t is not None and isinstance(getattr(graph_tools.captured(t), "graph", graph), tf.Graph):
            yield t
