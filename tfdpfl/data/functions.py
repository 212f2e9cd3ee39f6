"""Whether the transformations of a data set keep each example in one row, and in its place."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from tfdpfl._types import Dataset
from tfdpfl.clipping import graph as graph_tools
from tfdpfl.clipping.batch_axis import BatchAxis
from tfdpfl.clipping.graph import body_graphs, constant, handed_on, is_branch, is_call, is_loop, is_random, key, within
from tfdpfl.clipping.states import Batch, Mixed, State
from tfdpfl.clipping.variable_writes import WRITES
from tfdpfl.data.declared import SHUFFLES, ancestors, inputs_of, made_by, name_of, passed_through, repeats
from tfdpfl.data.inner import made_for, made_inside, overlaps
from tfdpfl.errors import PrivacyError

__all__ = [
    "beside",
    "changes_each_pass",
    "check_apart",
    "check_no_copies",
    "check_once",
    "hands_on_early",
    "have_same_values",
    "number_apart",
    "numbering",
    "out_of_order",
    "rank_of",
    "shuffles_anew",
]

_SIZES = frozenset(
    ["Shape", "ShapeN", "Size", "Rank", "OnesLike", "ZerosLike"]
)  # what they say of a tensor does not depend on its values
_KEEPING = ("Cast", "Identity", "Reshape", "ExpandDims", "Squeeze", "Pack")
_SELECT = frozenset(["Gather", "GatherNd", "ResourceGather", "ResourceGatherNd", "RandomShuffle"])
# Transformations that hand on the elements in the order in which they come, each once.
_ALIGNED = (
    "tensorslice", "map", "batch", "prefetch", "options", "cache", "assertcardinality", "model", "take",
)  # fmt: skip
# Transformations whose elements are those that they are given, or batches of them.
_SELECTING = (
    "batch", "unbatch", "prefetch", "options", "cache", "assertcardinality", "model", "repeat", "take",
    "skip", "shard", "filter", "takewhile", *SHUFFLES,
)  # fmt: skip
_PLACES = ("take", "skip", "shard")
# What a map before it made has been put into other elements, or was one of them already.
_MANY = ("batch", "padded", "unbatch", "flatmap", "interleave", "window", "zip", "concatenate", "directed", "groupby")
_CHOOSING = ("filter", "takewhile", "window", "directed")


def check_once(dataset: Dataset, draws: str) -> None:
    """Raises if a data set, from which each element is to be one example, holds its examples several times.

    Args:
        draws: What comes of each element, for the error.
    """
    if repeats(dataset):
        raise PrivacyError(
            f"The data set repeats its examples, and {draws}, so an example that comes twice would cost more than ε "
            "says. Leave .repeat() out."
        )
    for each in ancestors(dataset):
        _check_joined(each)


def check_no_copies(dataset: Dataset, draws: str) -> None:
    """Raises as `check_once` does, and if TensorFlow shows that a function makes several elements of one example.

    Args:
        draws: What comes of each element, for the error.
    """
    check_once(dataset, draws)
    for each in ancestors(dataset):
        if any(_copies(each, called, rank) for called, rank in _made_of_one(each)):
            raise PrivacyError(
                f"{name_of(each)} makes copies: several of its elements come from one row, and {draws}, so an example "
                "would cost more than ε says. Give the data set from before this step, and make copies of what comes "
                "out."
            )


def check_apart(dataset: Dataset, number: float = math.inf, batched: bool | None = None) -> None:
    """Raises if TensorFlow shows that an example is in several rows of a data set, or changes rows of others.

    What Python code does (a generator, py_function) does not show.

    Args:
        dataset: What examples come from.
        number: How many examples there are. A table with as many rows may hold them.
        batched: Whether its elements are batches; None if its last transformations tell.
    """
    if batched is None:
        batched = passed_through(dataset, ("unbatch", "batch")) == "batch"
    _check(dataset, number, 1 if batched else 0)


def _check(dataset: Dataset, number: float, level: int | None) -> None:
    """Checks a data set and those that it was made from; ``level`` counts the batch axes of its elements, if known."""
    kind = made_by(dataset, ("flatmap", "map", "takewhile", "filter", "scan"))
    for called in _functions(dataset):
        graph, given = called.graph, called.given
        _check_draws(dataset, graph, given, number)
        _check_inner_padding(dataset, graph)
        if kind == "map" and level is not None:
            _check_copies(dataset, called, number, level)
        if kind == "map" and level == 1:
            _check_batches(dataset, called)
        if (kind == "filter" and level) or kind == "takewhile":
            of_examples = [t for t, numbers in called.numbered if numbers is None]
            _check_choice(dataset, graph, of_examples, whole=kind == "filter")
        _check_state(dataset, graph, given, len(_state_of(dataset)) if kind == "scan" else 0)
    _check_joined(dataset)
    if made_by(dataset, ("padded",)) and not _is_symbolic(dataset):  # else `_check_inner_padding` did
        _check_padding(dataset)
    for function in getattr(dataset, "_functions", list)():
        if (inner := made_inside(function)) is not None:
            _check_inside(dataset, function, inner, number, level)
    for each in inputs_of(dataset):
        _check(each, number, _level_before(dataset, each, level))


def _level_before(dataset: Dataset, source: Dataset, level: int | None) -> int | None:
    if made_by(dataset, ("unbatch", "batch", "flatmap", "interleave", "window", "groupby")) is None:
        return level
    rank, before = rank_of(dataset), rank_of(source)
    return None if level is None or rank is None or before is None else level - rank + before


def rank_of(dataset: Dataset) -> int | None:
    """Returns the rank of the first part of each element, or None if it is not known."""
    shape = getattr(tf.nest.flatten(getattr(dataset, "element_spec", None))[0], "shape", None)
    return getattr(shape, "rank", None)


@dataclasses.dataclass(frozen=True, eq=False)
class _Function:
    """A function that a data set calls, with what it is given of each element.

    Attributes:
        call: Calls it with such tensors.
        numbered: What it is given, each with the data set of numbers that it comes from, or None.
    """

    graph: tf.Graph
    call: Callable[..., object]
    given: list[tf.Tensor]
    numbered: list[tuple[tf.Tensor, Dataset | None]]


def _functions(dataset: Dataset) -> list[_Function]:
    found = []
    for function in getattr(dataset, "_functions", list)():
        graph = _called_alone(function.function.graph)
        captured = {inner.op.name for _, inner in graph.captures}
        given = [t for t in graph.inputs if t.op.name not in captured]
        sources = [of for each in inputs_of(dataset) for of in _numbers(each)]
        sources = sources if len(sources) == len(given) else [None] * len(given)
        found.append(_Function(graph, function.function, given, list(zip(given, sources, strict=True))))
    return found


def _called_alone(graph: tf.Graph) -> tf.Graph:
    """The function that a function calls, if it does nothing else: one that tf.function made."""
    calls = [op for op in graph.get_operations() if is_call(op)]
    if len(calls) != 1:
        return graph
    ((call, body),) = ((op, body) for op in calls for body in body_graphs(op))
    same = [key(graph_tools.source(t)) for t in graph.outputs] == [key(t) for t in call.outputs]
    same &= [key(t) for t in graph.inputs] == [key(t) for t in call.inputs]
    return _called_alone(body) if same and len(getattr(body, "captures", ())) == len(graph.captures) else graph


def _numbers(dataset: Dataset) -> list[Dataset | None]:
    """Of each part of an element the data set of numbers (range, enumerate, counter) that it comes from, or None."""
    inputs = inputs_of(dataset)
    if not inputs and _are_numbers(dataset):
        return [dataset]
    if made_by(dataset, ("zip",)) or (len(inputs) == 1 and made_by(dataset, _SELECTING)):
        return [of for each in inputs for of in _numbers(each)]
    return [None] * len(tf.nest.flatten(dataset.element_spec))


def _are_numbers(source: Dataset) -> bool:
    """Whether a source is made of numbers that anyone knows: those of range, of counter, or of enumerate, which has no
    class of its own, and no end."""
    if made_by(source, ("tensorslice",)) is None and made_by(source, ("range", "scan")):
        return True
    if _is_symbolic(source):  # an element of another data set
        return False
    with tf.init_scope():  # it may be asked where a function is traced
        number = int(source.cardinality())
    return name_of(source) == "VariantDataset" and (number == -1 or number > 2**62)  # -1 is endless


def _ops_behind(targets: Iterable[tf.Tensor]) -> dict[str, tf.Operation]:
    """The ops that decide the targets, by name; those that decide only their lengths do not count."""
    return graph_tools.ancestors(targets, follow=lambda t: t.op.type not in _SIZES)


def _depends(targets: Iterable[tf.Tensor], given: list[tf.Tensor]) -> bool:
    """Whether values of what a function is given decide the targets."""
    return not _ops_behind(targets).keys().isdisjoint(t.op.name for t in given)


def _draws(targets: Iterable[tf.Tensor]) -> bool:
    """Whether random numbers decide the targets."""
    return any(map(is_random, within(_ops_behind(targets).values())))


def _inside(
    graph: tf.Graph, given: list[tf.Tensor], chosen: bool = False
) -> Iterator[tuple[tf.Graph, list[tf.Tensor], bool]]:
    """Yields a function and all that it runs, each with what it is given that ``given`` decides, and whether that
    decides if it runs."""
    yield graph, given, chosen
    for op in graph.get_operations():
        handed = handed_on(op)
        for body in body_graphs(op):
            decided = [inner for inner, t in zip(body.inputs, handed, strict=False) if _depends([t], given)]
            if is_loop(op) and decided:  # it may carry on what it makes of these
                decided = [t for t in body.inputs if t.dtype != tf.resource]
            yield from _inside(body, decided, chosen or (is_branch(op) and _depends(op.inputs[:1], given)))


# -- functions of batches ------------------------------------------------------------------------------------------


def _check_batches(dataset: Dataset, called: _Function) -> None:
    """Raises if a function of a batch computes a row from several examples."""
    for where in _meetings(called):
        raise PrivacyError(
            f"{name_of(dataset)} calls a function on whole batches, in which examples meet: {where}. An example then "
            "changes several rows, each of which is clipped by itself, and ε counts one. Let the function treat each "
            "example by itself (call it before batch), or leave it out."
        )
    for graph, given, _ in _inside(called.graph, called.given):
        for op in graph.get_operations():
            if op.type == "RaggedTensorToTensor" and not _is_fixed(op.inputs[0]) and _depends(op.outputs, given):
                raise _pads(
                    dataset, "to_tensor(shape=[None, 100]), or for a TextVectorization output_sequence_length=100"
                )


def _meetings(called: _Function) -> Iterator[str]:
    """Yields where examples meet in a function of a batch."""
    names = {t.op.name for t in called.given if t.shape.rank != 0}
    axis = BatchAxis(called.graph, lambda t: Batch(0) if t.op.name in names else None, within=True)
    made = [axis[t] for t in called.graph.outputs]
    if any(map(_is_several_rows, made)):
        yield "it makes several rows of each"
    mixed = [state for state in made if isinstance(state, Mixed)]
    for state in mixed:
        if state.meets and _of_values(called.graph, state, called.given):
            yield state.describe()
    for op in axis.ops.values():
        of = axis.states.get((op.inputs[0].op.name, op.inputs[0].value_index)) if op.inputs else None
        if isinstance(of, Batch) and of.axis == 0 and _selects(op) and _draws(op.inputs[1:]):
            yield f"{op.type} ({op.name!r}) picks examples of the batch"
    if mixed and _moves_others(called):
        yield f"another first row changes the other rows of its result, and {mixed[0].describe()}"


def _is_several_rows(state: State) -> bool:
    """Whether a result has several rows of each example."""
    return isinstance(state, Batch) and (state.blocks != 1 or state.rows not in (1, None))


# Ops with a state that may be called with made-up rows.
_READS = (
    "Assert", "Case", "HashTable", "If", "LookupTable", "MutableHashTable", "Partitioned", "Placeholder",
    "ReadVariable", "ResourceGather", "StatefulPartitioned", "Stateless", "TensorList", "VarHandle", "While",
)  # fmt: skip
# Those of data sets that only hand on what they are given.
_OF_SETS = (
    *_READS, "BatchDataset", "CacheDataset", "ConcatenateDataset", "EnumerateDataset", "FilterDataset",
    "FlatMapDataset", "MapDataset", "OptionsDataset", "ParallelBatchDataset", "ParallelMapDataset", "PrefetchDataset",
    "RangeDataset", "ShardDataset", "SkipDataset", "TakeDataset", "TensorDataset", "TensorSliceDataset", "ZipDataset",
    "DummyIterationCounter", "DummyMemoryCache", "UnbatchDataset",
)  # fmt: skip
_LARGEST = 1 << 22  # numbers in a made-up batch


def _moves_others(called: _Function) -> bool:
    """Whether a function of a batch gives other rows where the first one is another: it is called with made-up rows.

    False if that does not show: it draws at random inside a call, a branch or a loop, calls Python, writes variables,
    or does not take such rows."""
    sizes = _made_up_sizes(called.given)
    if sizes is None or not _gives_the_same_again(called.graph, seeded=True):
        return False
    try:
        before, after = (_leaves(_drawn_alike(called, _made_up(called.given, sizes, first))) for first in (0, 1))
    except Exception:  # of TensorFlow's, or of the function's own checks
        return False
    rows = next(size[:1] for size in sizes if size)
    # A multiple of the rows is several of each example.
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if one.ndim and len(one) % rows[0] == 0]
    return not all(_alike(one[1:], other[1:]) for one, other in pairs if one.shape == other.shape)


def _drawn_alike(called: _Function, values: list[tf.Tensor]) -> list[tf.Tensor]:
    """What a function makes of these values, with seeds of its own: a new function draws the same numbers once more."""

    def seeded(definition: tf.compat.v1.GraphDef) -> None:
        for number, node in enumerate(definition.node, 1):
            if "seed2" in node.attr:
                node.attr["seed2"].i = number

    given = {t.name: value for t, value in zip(called.given, values, strict=True)}
    return tf.function(lambda: _computed(called.graph, given, called.graph.outputs, seeded), autograph=False)()


def _computed(
    graph: tf.Graph, given: dict[str, tf.Tensor], targets: list[tf.Tensor],
    change: Callable[[tf.compat.v1.GraphDef], None] = lambda definition: None,
) -> list[tf.Tensor]:  # fmt: skip
    """Tensors of a function, made anew in the current graph from other values of what it is given."""
    definition, here = graph.as_graph_def(), tf.compat.v1.get_default_graph()
    change(definition)
    feeds = {inner.name: graph_tools.origin(inner) for _, inner in graph.captures} | given
    feeds = {name: here.capture(value) for name, value in feeds.items()}
    return tf.graph_util.import_graph_def(definition, feeds, [t.name for t in targets])


def _gives_the_same_again(graph: tf.Graph, reads: tuple[str, ...] = _READS, seeded: bool = False) -> bool:
    """Whether a function may be called for a trial: it draws nothing, calls no Python and writes nothing. If it is
    ``seeded`` for the trial, it may draw, but in no function that it calls."""
    defined = {kind: op_def_registry.get(kind) for kind in _kinds(graph, seeded) if not kind.startswith(reads)}
    return not any(of is None or of.is_stateful or "Random" in kind for kind, of in defined.items())


def _kinds(graph: tf.Graph, seeded: bool = False) -> set[str]:
    """The types of a graph's ops, without its own draws if these are ``seeded``, and of the functions that it calls."""
    definition = graph.as_graph_def()
    own = [node for node in definition.node if not (seeded and "seed2" in node.attr)]
    nodes = [*own, *(node for f in definition.library.function for node in f.node_def)]
    return {node.op for node in nodes} - {f.signature.name for f in definition.library.function}


def _made_up_sizes(given: list[tf.Tensor]) -> list[list[int]] | None:
    """Sizes of tensors for a batch of several rows; None if they are not known, or too large."""
    sizes = _sizes_of(given)
    return None if sizes is None or {size[0] for size in sizes if size} in (set(), {1}) else sizes


def _sizes_of(given: list[tf.Tensor]) -> list[list[int]] | None:
    """Sizes of tensors, with a number of rows that is made up; None if they are not known, or too large."""
    if any(t.shape.rank is None or t.dtype.name == "variant" for t in given):
        return None
    sizes = [[n or 4 for n in t.shape.as_list()] for t in given]
    return None if any(math.prod(size) > _LARGEST for size in sizes) else sizes


def _made_up(given: list[tf.Tensor], sizes: list[list[int]], first: int) -> list[tf.Tensor]:
    """Rows of numbers from 0 to 1, the first of which is another where ``first`` is 1."""
    random, made = np.random.default_rng(0), []
    for t, size in zip(given, sizes, strict=True):
        values = random.integers(0, 5, size) / 4
        if size:
            values[0] = 1 - values[0] if first else values[0]
        if t.dtype == tf.string:
            made.append(tf.constant(np.where(values > 0.5, "a", "b").astype(object)))
        elif t.dtype.is_floating:
            made.append(tf.constant(values, t.dtype))
        else:
            made.append(tf.cast(values > 0.5, t.dtype))
    return made


def _leaves(result: object) -> list[np.ndarray]:
    return [np.asarray(t) for t in tf.nest.flatten(result) if tf.is_tensor(t) and t.dtype != tf.variant]


def _alike(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether arrays are the same but for what rounding changes."""
    if one.dtype.kind != "f":
        return bool((one == other).all())
    return np.allclose(one, other, rtol=1e-3, atol=1e-5, equal_nan=True)


def _of_values(graph: tf.Graph, state: Mixed, given: list[tf.Tensor]) -> bool:
    """Whether what meets are values of examples; not, say, random numbers of which each row has its own."""
    try:
        op = graph.get_operation_by_name(state.name)
    except KeyError:  # of a function that this one calls
        return True
    if op.type == "StridedSlice" and op.get_attr("shrink_axis_mask") & 1:
        return False  # one example by its number, as code does that goes through them
    if state.name.endswith("bincount/Max"):  # how long the counts have to be, not what is in them
        return False
    return _depends(op.inputs, given)


def _is_fixed(shape: tf.Tensor) -> bool:
    value = constant(shape)
    return value is not None and value.ndim == 1 and bool((value[1:] >= 0).all())


def _pads(dataset: Dataset, remedy: str) -> PrivacyError:
    return PrivacyError(
        f"{name_of(dataset)} pads each batch to its longest example, so one example changes the lengths of all others "
        "of its batch, and ε counts one row. Pad to a length that you know without the data, and cut longer examples "
        f"to it: {remedy}."
    )


def _check_padding(dataset: Dataset) -> None:
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(dataset.element_spec)]
    if any(shape is not None and shape.rank is not None and None in shape[1:].as_list() for shape in shapes):
        raise _pads(dataset, "padded_batch(..., padded_shapes=...) with numbers in it")


def _check_inner_padding(dataset: Dataset, graph: tf.Graph) -> None:
    """As `_check_padding`, of data sets that a function makes (bucket_by_sequence_length)."""
    for op in graph.get_operations():
        if op.type.startswith("PaddedBatchDataset"):
            shapes = [constant(t) for t in op.inputs[2 : 2 + op.get_attr("N")]]
            lengths = [[d.size for d in shape.dim][1:] for shape in op.get_attr("output_shapes")]
            if any(s is not None and -1 in s and -1 in n for s, n in zip(shapes, lengths, strict=True)):
                raise _pads(dataset, "bucket_by_sequence_length(..., pad_to_bucket_boundary=True)")


# -- which elements come -------------------------------------------------------------------------------------------


def _check_choice(dataset: Dataset, graph: tf.Graph, given: list[tf.Tensor], whole: bool) -> None:
    if _depends(graph.outputs, given):
        drops = "a whole batch for what one example holds" if whole else "all examples behind one for what that holds"
        raise PrivacyError(
            f"{name_of(dataset)} leaves out {drops}. An example then changes which others are trained on, and ε counts "
            "one row. Filter single examples, before batch; take(n) hands on the first n."
        )


def _state_of(scan: Dataset) -> list:
    return tf.nest.flatten(scan._initial_state)


def _check_state(dataset: Dataset, graph: tf.Graph, given: list[tf.Tensor], states: int) -> None:
    """Raises if a function hands on something of an example to those that follow, in a variable or as the first so
    many of what it returns."""
    kept = _depends(graph.outputs[:states], given[states:])
    for inner, decided, chosen in _inside(graph, given[states:]):
        written = [t for op in inner.get_operations() if WRITES.search(op.type) for t in op.inputs[1:]]
        # Keras's seeds, two integers, go on by one for each call, whichever examples call.
        chosen = chosen and any(t.shape != [2] or not t.dtype.is_integer for t in written)
        kept |= chosen or _depends(written, decided)
    if kept:
        raise PrivacyError(
            f"{name_of(dataset)} hands on what it computes from an example to the examples behind it (by a variable, "
            "scan, or rejection_resample without initial_dist), so one example changes many rows, and ε counts one. "
            "Compute each row from its own example."
        )


def _check_draws(dataset: Dataset, graph: tf.Graph, given: list[tf.Tensor], number: float) -> None:
    """Raises if a function reads rows at random of a table that is as long as the data."""
    drawn = any(made_by(each, ("random",)) for each in ancestors(dataset))
    op = _drawn_from(graph, {t.op.name: (_is_long(t, number), drawn) for t in given}, number)
    if op is not None:
        raise PrivacyError(
            f"{name_of(dataset)} reads rows at random from a table of {number} rows or more ({op.type}, {op.name!r}). "
            "If that holds the training data, an example may come several times in a pass or in a batch, and ε counts "
            "it once. Use tfdpfl.data.poisson_batches, which draws from the arrays themselves."
        )


def _drawn_from(graph: tf.Graph, given: dict[str, tuple[bool, bool]], number: float) -> tf.Operation | None:
    """The op that reads at random from a table of so many rows; ``given`` says of inputs whether they are such a table,
    and whether they are random."""
    states: dict[str, tuple[bool, bool]] = {}
    for op in graph.get_operations():
        if op.name in given:
            states[op.name] = given[op.name]
            continue
        inputs = [states[t.op.name] for t in op.inputs]
        bodies = list(body_graphs(op))
        inner = [each for body in bodies for each in body.get_operations()]
        random = any(drawn for _, drawn in inputs) or any(map(is_random, [op, *inner]))
        if inputs and inputs[0][0] and random and _selects(op):
            return op
        handed = inputs[is_branch(op) :]
        for body in bodies:
            found = _drawn_from(body, {t.op.name: s for t, s in zip(body.inputs, handed, strict=False)}, number)
            if found is not None:
                return found
        states[op.name] = _holds_table(op, inputs, number), op.type not in _SIZES and random
    return None


def _holds_table(op: tf.Operation, inputs: list[tuple[bool, bool]], number: float) -> bool:
    """Whether an op gives a table of so many rows: as a source, or of such a table."""
    source = not op.inputs or op.type == "ReadVariableOp"
    return (source or any(table for table, _ in inputs)) and any(_is_long(t, number) for t in op.outputs)


def _selects(op: tf.Operation) -> bool:
    """Whether an op reads rows of its first input that others choose."""
    if op.type == "GatherV2":
        axis = constant(op.inputs[2])
        return op.get_attr("batch_dims") == 0 and (axis is None or int(axis) == 0)
    if op.type == "StridedSlice":  # one row, as in table[i]
        return bool(op.get_attr("shrink_axis_mask") & 1)
    if op.type == "Slice":
        size = constant(op.inputs[2])
        return size is not None and size.reshape(-1)[:1].tolist() == [1]
    return op.type in _SELECT


def _check_copies(dataset: Dataset, called: _Function, number: float, level: int) -> None:
    """Raises if a function reads a row of a table that is as long as the data for several numbers."""
    for op in called.graph.get_operations():
        if not (op.inputs and _is_long(op.inputs[0], number) and _selects(op)):
            continue
        chosen = [(t, of) for t, of in called.numbered if _depends(op.inputs[1:2], [t])]
        if len(chosen) != 1 or chosen[0][1] is None or _is_symbolic(chosen[0][1]) or _draws(op.inputs[1:2]):
            continue
        ((given, numbers),) = chosen
        if op.type not in ("StridedSlice", "Slice") and op.inputs[1].shape.rank != level + op.type.endswith("GatherNd"):
            continue  # a row of several examples (a window)
        found = _chosen(called.graph, given, op.inputs[1], numbers, number, level)
        if len(np.unique(found)) < len(found):
            raise PrivacyError(
                f"{name_of(dataset)} reads one row of a table of {number} rows or more for several numbers "
                f"({op.type}, {op.name!r}). If that holds the training data, an example is in several rows, and ε "
                "counts one. Read a row of its own for each number, or leave copies out."
            )


def _chosen(
    graph: tf.Graph, given: tf.Tensor, index: tf.Tensor, numbers: Dataset, number: float, level: int
) -> np.ndarray:
    """Which row a function reads for each number; nothing if it is plainly the number itself."""
    if _kept_from(index) is given:
        return np.zeros(0)

    def row(i: tf.Tensor) -> tf.Tensor:
        (found,) = _computed(graph, {given.name: tf.reshape(tf.cast(i, given.dtype), [1] * level)}, [index])
        return tf.cast(tf.reshape(found, [-1])[0], tf.int64)

    parts = [part.numpy() for part in numbers.take(int(min(number, 2**31))).map(row).batch(4096)]
    return np.concatenate(parts)


def have_same_values(one: tf.Tensor, other: tf.Tensor) -> bool:
    """Returns whether two tensors of a function are made of one by ops that keep its values."""
    keeping = tuple(kind for kind in _KEEPING if kind != "Pack")
    return _kept_from(one, keeping) is _kept_from(other, keeping)


def beside(dataset: Dataset, part: int) -> Dataset | None:
    """Returns the map that computes other parts of its elements from the one that it hands on as this part, or None.

    Args:
        dataset: What elements come from.
        part: The place of the part in a flat element.
    """
    while len(inputs := inputs_of(dataset)) == 1:
        functions = _functions(dataset) if made_by(dataset, ("map",)) else []
        if not functions and not made_by(dataset, _SELECTING):
            return None
        for called in functions:
            made = called.graph.outputs
            place = next((i for i, t in enumerate(called.given) if t is _kept_from(made[part])), None)
            if place is None:
                return None
            if _depends([*made[:part], *made[part + 1 :]], [called.given[place]]):
                return dataset
            part = place
        dataset = inputs[0]
    return None


def _kept_from(t: tf.Tensor, keeping: tuple[str, ...] = _KEEPING) -> tf.Tensor:
    """The tensor that has the values of this one, before ops that keep them."""
    while t.op.type in keeping and t.op.inputs:
        t = t.op.inputs[0]
    return t


def _is_long(t: tf.Tensor, number: float) -> bool:
    if t.dtype.name == "resource":
        data = getattr(t, "_handle_data", None)
        shapes = [[d.size for d in entry.shape.dim] for entry in data.shape_and_type] if data is not None else []
        return any(shape and shape[0] >= number for shape in shapes)
    return bool(t.shape.rank) and t.shape[0] is not None and t.shape[0] >= number


# -- how many elements are made of one ----------------------------------------------------------------------------


def _made_of_one(dataset: Dataset) -> Iterator[tuple[_Function, int | None]]:
    """Yields the functions that make several elements of one, with the rank of the first part of what they are given:
    those of flat_map and interleave, and those of maps whose results are taken apart."""
    kind = made_by(dataset, ("unbatch", "flatmap", "interleave"))
    if kind != "unbatch":
        yield from ((called, rank_of(inputs_of(dataset)[0])) for called in _functions(dataset) if kind)
        return
    for before in ancestors(dataset)[1:]:
        if made_by(before, _MANY):
            return
        yield from (
            (called, rank_of(inputs_of(before)[0])) for called in _functions(before) if made_by(before, ("map",))
        )


def _copies(dataset: Dataset, called: _Function, rank: int | None) -> bool:
    """Whether a function makes more elements of one than this has rows: then one row of it is in several."""
    return any(kind.startswith("RepeatDataset") for kind in _kinds(called.graph)) or _makes_more(dataset, called, rank)


def _makes_more(dataset: Dataset, called: _Function, rank: int | None) -> bool:
    """Whether a function makes more elements than it is given rows, as made-up rows show."""
    after, sizes = rank_of(dataset), _sizes_of(called.given)
    only_numbers = all(numbers is not None for _, numbers in called.numbered)
    if sizes is None or rank is None or after is None or only_numbers:
        return False
    if not _gives_the_same_again(called.graph, _OF_SETS):
        return False
    rows = min(size[0] for size in sizes if size) if after < rank else 1
    try:
        first = tf.nest.flatten(called.call(*_made_up(called.given, sizes, 0)))[0]
        if first.dtype != tf.variant:
            return int(tf.shape(first)[0]) > rows
        elements = tf.data.experimental.from_variant(first, dataset.element_spec)
        return sum(1 for _ in elements.take(rows + 1)) > rows
    except Exception:  # of TensorFlow's, or of the function's own checks
        return False


# -- data sets that functions make ---------------------------------------------------------------------------------


_MOST_PIECES = 10_000


def _check_inside(dataset: Dataset, function: Any, inner: Dataset, number: float, level: int | None) -> None:
    """Checks the data sets that a function makes of the elements, each by itself and all together."""
    sources = inputs_of(dataset)
    _check_pieces(dataset, function, inner, number)
    windows = [each for source in sources for each in ancestors(source)[:_NEAR] if made_by(each, ("window",))]
    if windows and overlaps(windows[0]) and level is not None and _level_of_source(inner, level) >= 0:
        raise PrivacyError(
            f"{name_of(dataset)} takes windows apart that overlap, so an example is in several rows, and ε counts one. "
            "Make windows that share no example (shift=size), or leave window out."
        )
    try:
        _check(inner, number, level)
    except PrivacyError:
        raise
    except Exception:  # numbers of the inner data set that only an element decides
        return


_NEAR = 4  # a window, and what may come between it and the function


def _level_of_source(dataset: Dataset, level: int) -> int:
    """The number of batch axes of what a data set is made from in the end; -1 if that is not known."""
    path = _paths(dataset)[0]
    for each, before in itertools.pairwise(path):
        found = _level_before(each, before, level)
        if found is None:
            return -1
        level = found
    return level


def _check_pieces(dataset: Dataset, function: Any, inner: Dataset, number: float) -> None:
    """Raises if a function may hand on the same examples of one data set for several elements.

    A flat_map or interleave of pieces is a concatenation of these, so no two of them may share an example."""
    places = [i for i, path in enumerate(_paths(inner)) if _holds_examples(path[-1], number)]
    (outer, *_) = inputs_of(dataset)
    if not places or (not _is_symbolic(outer) and int(outer.cardinality()) in (0, 1)):
        return
    for place in places:
        if not _are_apart(outer, function, _paths(inner)[place], place, number):
            raise PrivacyError(
                f"{name_of(dataset)} reads one data set of {number} examples or more for several elements, and is not "
                "known to read each example for one element alone. An example is then in several rows, and ε counts "
                "one. Cut the data set into pieces without a common example, as data.shard(k, i) or "
                "data.skip(i * m).take(m) do for the numbers i of Dataset.range(k), or leave this step out."
            )


def _is_symbolic(dataset: Dataset) -> bool:
    return not hasattr(dataset._variant_tensor, "numpy")


def _holds_examples(source: Dataset, number: float) -> bool:
    """Whether a source of an inner data set is the same for each element, and as long as the data."""
    if made_by(source, ("tensorslice",)):
        return any(_is_long(t, number) for t in _tensors(source))
    if _is_symbolic(source) or _are_numbers(source) or made_by(source, ("random", "tensor")):
        return False
    return int(source.cardinality()) >= number


def _are_apart(outer: Dataset, function: Any, path: list[Dataset], place: int, number: float) -> bool:
    """Whether what a function reads of a source for different elements is known to hold no example twice."""
    settings = [getattr(each, name, None) for each in path for name in ("_count", "_index", "_num_shards")]
    if _is_symbolic(outer) or _draws([t for t in settings if t is not None and not hasattr(t, "numpy")]):
        return False
    if any(_chooses_by_element(each) for each in path):
        return True
    if any(_is_symbolic(each[-1]) or _holds_examples(each[-1], number) for each in _paths(outer)):
        return False
    return _are_read_once(outer, function, path[-1], place)


def _are_read_once(outer: Dataset, function: Any, source: Dataset, place: int) -> bool:
    """Whether a function, called for each element, reads each example of a source for one element at most."""
    count, first = np.zeros(int(source.cardinality()) if not _is_symbolic(source) else 0, np.int64), None
    for i, element in enumerate(outer.take(_MOST_PIECES)):
        made = made_for(function, element)
        paths = [] if made is None else _paths(made)
        if i + 1 == _MOST_PIECES or place >= len(paths):
            return False
        if not len(count):
            count = np.zeros(int(paths[place][-1].cardinality()), np.int64)
        rows, orders = _rows_of(paths[place])
        first = orders if first is None else first
        if len(orders) != len(first) or not all(map(_same_order, first, orders)):
            return False
        count[rows.start : min(rows.stop, len(count)) : rows.step] += 1
    return bool((count <= 1).all())


def _chooses_by_element(each: Dataset) -> bool:
    """Whether examples are chosen by what the element is: of one class, say."""
    captured = [outer for called in _functions(each) for outer, _ in called.graph.captures]
    return made_by(each, ("filter",)) is not None and any(not hasattr(t, "numpy") for t in captured)


# -- what is joined ------------------------------------------------------------------------------------------------


def _check_joined(dataset: Dataset) -> None:
    """Raises if a data set joins others that hold the same examples, so that these come in several rows."""
    kind = made_by(dataset, tuple(_JOINED)) or ""
    inputs = inputs_of(dataset)[kind == "directed" :] if kind else []  # of this one the first selects
    for i, one in enumerate(inputs):
        for other in inputs[i + 1 :]:
            shared = [(a, b) for a in _paths(one) for b in _paths(other) if _same(a[-1], b[-1])]
            if kind == "zip" and (not shared or _side_by_side((ancestors(one), ancestors(other)))):
                continue  # parts of one example, or two views of it
            if kind != "zip" and all(_may_be_disjoint(*paths) for paths in shared):
                continue
            raise PrivacyError(
                f"{name_of(dataset)} joins data sets that hold the same examples, {_JOINED[kind]}. An example is then "
                "in several rows, and ε counts one. For copies use tfdpfl.data.poisson_batches(..., augment=..., "
                "copies=k) and an optimizer with rows_per_unit=k; leave mixtures of examples out."
            )


_JOINED = {
    "zip": "in different orders", "concatenate": "one after the other",
    "directed": "in turns (sample_from_datasets or choose_from_datasets)",
}  # fmt: skip


def _side_by_side(paths: tuple[list[Dataset], list[Dataset]]) -> bool:
    """Whether two data sets hand on the same examples in the same order."""
    moved = [[each for each in path if inputs_of(each) and not made_by(each, _ALIGNED)] for path in paths]
    return len(moved[0]) == len(moved[1]) and all(map(_shuffle_alike, *moved))


def _shuffle_alike(one: Dataset, other: Dataset) -> bool:
    if not all(made_by(each, SHUFFLES) and hasattr(each, "_buffer_size") for each in (one, other)):
        return False
    if one is other:  # each pass over it draws anew, also two at once
        return not shuffles_anew(one)
    settings = [(int(e._buffer_size), int(e._seed), int(e._seed2), shuffles_anew(e)) for e in (one, other)]
    return settings[0] == settings[1] and any(settings[0][1:3])


def _may_be_disjoint(one: list[Dataset], other: list[Dataset]) -> bool:
    """Whether two data sets, each as `_paths` gives it, may leave out of the same data what the other one has, and in
    each pass the same."""
    rows = _rows_in_one_order(one, other)
    if rows is not None and not _meet(*rows):
        return True
    choosing = [[each for each in path if made_by(each, _CHOOSING)] for path in (one, other)]
    new = any(not any(_same_order(each, its) for its in choosing[1 - i]) for i in (0, 1) for each in choosing[i])
    return new and all(any(made_by(each, (*_CHOOSING, *_PLACES)) for each in path) for path in (one, other))


def _rows_in_one_order(one: list[Dataset], other: list[Dataset]) -> tuple[range, range] | None:
    """The places that each of two paths leaves, if what they leave them of comes in the same order; else None."""
    (rows, orders), (others, their_orders) = _rows_of(one), _rows_of(other)
    alike = len(orders) == len(their_orders) and all(map(_same_order, orders, their_orders))
    return (rows, others) if alike else None


def _rows_of(path: list[Dataset]) -> tuple[range, list[Dataset]]:
    """The places of the elements that a path leaves, or more, and what puts the elements in order before."""
    rows, orders, cut, unordered = range(2**62), [], False, False
    for each in reversed(path):
        kind = made_by(each, _PLACES)
        if kind is not None and not unordered:
            rows, cut = _left_of(rows, each, kind), True
        elif kind is None and not cut and made_by(each, (*SHUFFLES, "batch", *_CHOOSING)):
            orders.append(each)
        elif kind is None and inputs_of(each) and not made_by(each, _ALIGNED):
            unordered = True
    return rows, orders


def _left_of(rows: range, chosen: Dataset, kind: str) -> range:
    if kind == "shard":
        return rows[int(chosen._index) :: int(chosen._num_shards)]
    count = int(chosen._count)
    if kind == "take":
        return rows if count < 0 else rows[:count]
    return rows[:0] if count < 0 else rows[count:]


def _meet(one: range, other: range) -> bool:
    """Whether two sequences have a number in common."""
    later = one[max(-(-(other.start - one.start) // one.step), 0) :]
    return any(number in other for number in later[: other.step])


def _same_order(one: Dataset, other: Dataset) -> bool:
    """Whether two transformations of the same elements hand on the same ones in the same order."""
    if one is other or _shuffle_alike(one, other):
        return not (made_by(one, SHUFFLES) and shuffles_anew(one))
    if all(hasattr(each, "_batch_size") for each in (one, other)):
        return int(one._batch_size) == int(other._batch_size)
    return type(one) is type(other) and _same_function(_functions(one), _functions(other))


def _same_function(one: list[_Function], other: list[_Function]) -> bool:
    """Whether two transformations call one function each, and the same."""
    if not len(one) == len(other) == 1:
        return False
    graphs = [one[0].graph, other[0].graph]
    captured = [[outer for outer, _ in graph.captures] for graph in graphs]
    return graphs[0].as_graph_def() == graphs[1].as_graph_def() and all(
        a is b or (a.dtype == b.dtype != "resource" and _equal(a, b)) for a, b in zip(*captured, strict=True)
    )


def shuffles_anew(shuffled: Dataset) -> bool:
    """Returns whether each pass over a shuffle has an order of its own."""
    return getattr(shuffled, "_reshuffle_each_iteration", None) is not False


def _paths(dataset: Dataset) -> list[list[Dataset]]:
    """The data set and what it was made from, down to each of its sources."""
    return [[dataset, *path] for each in inputs_of(dataset) for path in _paths(each)] or [[dataset]]


def _same(a: Dataset, b: Dataset) -> bool:
    if not made_by(a, ("tensorslice",)) and (_are_numbers(a) or made_by(a, ("random", "tensor"))):
        return False  # numbers that anyone knows; or one element, which every row may need
    if a is b:
        return True
    of_a, of_b = _tensors(a), _tensors(b)
    if not (of_a and of_b and all(map(tf.is_tensor, of_a + of_b))):
        return False
    largest_of_a, largest_of_b = (sorted(tensors, key=lambda t: int(tf.size(t)))[-1] for tensors in (of_a, of_b))
    return any(_equal(largest_of_a, t) for t in of_b) or any(_equal(largest_of_b, t) for t in of_a)


def _tensors(source: Dataset) -> list[tf.Tensor]:
    """The tensors that a source holds; none if it is made of something else."""
    return list(getattr(source, "_tensors", None) or ())


def _equal(a: tf.Tensor, b: tf.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a.numpy(), b.numpy()))


# -- in which order they come --------------------------------------------------------------------------------------


def out_of_order(dataset: Dataset) -> str | None:
    """Says why the examples of a data set come at other places in each pass, or returns None."""
    if (early := hands_on_early(dataset, ancestors(dataset))) is not None:
        return f"{name_of(early)} hands examples on as soon as they are ready (deterministic=False)"
    for each in ancestors(dataset):
        functions = _functions(each)
        ops = [op for called in functions for op in within(called.graph.get_operations())]
        draws = any(map(is_random, ops))
        draws |= bool(functions) and any(made_by(before, ("random",)) for before in ancestors(each))
        if draws and made_by(each, ("flatmap", "map")) != "map":
            return f"{name_of(each)} draws at random which examples come"
    return None


def changes_each_pass(dataset: Dataset, made: tf.Tensor) -> bool:
    """Whether what a function makes of the elements of a data set may be another value for an example in each pass, or
    follows from no value of the example (its place in a batch)."""
    renewed = _renewed(dataset)
    given = list(zip(made.graph.inputs[: len(renewed)], renewed, strict=True))
    kept, changing = ([t for t, anew in given if anew is wanted] for wanted in (False, True))
    return _draws([made]) or _depends([made], changing) or not _depends([made], kept)


def _renewed(dataset: Dataset) -> list[bool]:
    """Of each part of an element whether an example may have another value in each pass: a number by its place in an
    order that is another one (enumerate after shuffle), or a number that is drawn."""
    inputs, parts = inputs_of(dataset), len(tf.nest.flatten(dataset.element_spec))
    kind = made_by(dataset, ("cache", "zip", "flatmap", "map", "scan", *_SELECTING))
    before = [anew for each in inputs for anew in _renewed(each)]
    if kind == "zip":
        return _renewed_side_by_side(inputs, before)
    if kind in ("map", "scan") and inputs and (functions := _functions(dataset)):
        states = len(_state_of(dataset)) if kind == "scan" else 0
        anew = [_comes_in_another_order(inputs[0])] * states + before
        changing = [t for t, is_anew in zip(functions[0].given, anew, strict=False) if is_anew]
        made = [_draws([t]) or _depends([t], changing) for t in functions[0].graph.outputs[states:]]
        return made if len(made) == parts else [any(made)] * parts
    return before if kind in _SELECTING and kind != "cache" and len(before) == parts else [False] * parts


def _renewed_side_by_side(inputs: list[Dataset], before: list[bool]) -> list[bool]:
    """As `_renewed`, of a zip: what keeps its order meets other examples, if the other side comes in another order."""
    moved = [_comes_in_another_order(each) for each in inputs]
    of_parts = [m for m, each in zip(moved, inputs, strict=True) for _ in tf.nest.flatten(each.element_spec)]
    return [anew or (any(moved) and not m) for anew, m in zip(before, of_parts, strict=True)]


def _comes_in_another_order(dataset: Dataset) -> bool:
    """Whether the elements come in another order in each pass."""
    path = ancestors(dataset)
    cached = next((at for at, each in enumerate(path) if made_by(each, ("cache",))), len(path))
    mixes = (*SHUFFLES, "interleave")
    return out_of_order(dataset) is not None or any(
        made_by(each, mixes) and shuffles_anew(each) for each in path[:cached]
    )


def hands_on_early(dataset: Dataset, among: list[Dataset]) -> Dataset | None:
    """Returns the first of some transformations of a data set whose threads do not keep the order."""
    with tf.init_scope():
        determined = dataset.options().deterministic
    kept = {"false": False, "default": determined}
    return next((each for each in among if kept.get(getattr(each, "_deterministic", "")) is False), None)


# -- whose numbers they are ----------------------------------------------------------------------------------------


def numbering(dataset: Dataset, made: tf.Tensor) -> tuple[int, Dataset] | None:
    """Returns the first number, and the data set whose elements are numbered, if what a function makes of the elements
    of a data set is their number (enumerate); None if it is something else, or more than the number decides it."""
    at = _kept_from(made, (*_KEEPING, "AsString"))
    of = next((of for t, of in zip(made.graph.inputs, _numbers(dataset), strict=False) if t is at), None)
    zips = [inputs_of(each) for each in ancestors(dataset) if made_by(each, ("zip",))]
    sides = [each for inputs in zips if any(each is of for each in inputs) for each in inputs if each is not of]
    if of is None or len(sides) != 1 or len(_paths(sides[0])) != 1:
        return None
    with tf.init_scope():
        first = [int(number) for number in of.take(2)]
    return (first[0], sides[0]) if first[-1] - first[0] == len(first) - 1 else None


def number_apart(one: tuple[int, Dataset], other: tuple[int, Dataset]) -> bool:
    """Whether two numberings give no two examples one number, and no example two. True also if that does not show."""
    with tf.init_scope():  # it is asked where a function is traced
        lengths = [int(side.cardinality()) for _, side in (one, other)]
        ids = [range(s, s + (n if n >= 0 else 2**62)) for (s, _), n in zip((one, other), lengths, strict=True)]
        (path,), (other_path,) = _paths(one[1]), _paths(other[1])
        if not _hold_the_same(path[-1], other_path[-1]):
            return not _meet(*ids) or not all(made_by(each[-1], ("tensorslice",)) for each in (path, other_path))
        rows = _rows_in_one_order(path, other_path)
        if rows is None:
            return False
        # The example at place p has the number (p - offset) / step.
        offsets = [(r.step, r.start - i.start * r.step) for r, i in zip(rows, ids, strict=True)]
        return offsets[0] == offsets[1] or not (_meet(*rows) or _meet(*ids))


def _hold_the_same(a: Dataset, b: Dataset) -> bool:
    """Whether two sources are one, or all tensors of one are in the other, too."""
    fewer, more = sorted((_tensors(a), _tensors(b)), key=len)
    return a is b or (bool(fewer) and all(any(_equal(t, other) for other in more) for t in fewer))
