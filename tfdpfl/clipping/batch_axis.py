"""Which axis of each tensor holds the examples, and where the examples get mixed.

An abstract interpretation of the graph between the inputs and the loss. Every tensor gets one state:

- ``Public``: holds nothing of any example (constants, weights, noise, what follows from these alone);
- ``Size``: a small integer or float tensor made of shapes, entry by entry a multiple of a power of the batch size;
- ``Batch``: one axis is indexed by the examples, in order, ``rows`` consecutive rows each, and a row depends on
  its own example only;
- ``Items``: a TensorList whose elements are ``Batch``;
- ``Mixed``: examples may have met. It remembers the op that did it.

Ops that are not known here mix, by default: a model is trained only if each of its ops is shown to keep examples
apart.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import function_def_to_graph, ops, tensor_util

from tfdpfl.clipping import graph as graph_tools


@dataclasses.dataclass(frozen=True)
class Public:
    """Data-independent. ``deps``: the variables (by number) it is computed from. ``alike``: rows along any axis
    are equal or identically distributed, so that a row does not tell a position in the batch."""

    deps: frozenset[int] = frozenset()
    alike: bool = False


@dataclasses.dataclass(frozen=True)
class Size:
    """Made of shapes. Each entry is (coefficient, power of the batch size); None where it is not known."""

    entries: tuple[tuple[int | None, int | None], ...]

    @property
    def batch_free(self) -> bool:
        return all(power == 0 for _, power in self.entries)


@dataclasses.dataclass(frozen=True)
class Batch:
    """``blocks``: the axis holds that many copies of the batch one after the other (SpaceToBatchND)."""

    axis: int
    rows: int | None = 1
    blocks: int = 1


@dataclasses.dataclass(frozen=True)
class Items:
    element: Public | Batch


@dataclasses.dataclass(frozen=True)
class Handle:
    """A resource: ``index`` of the trainable variable behind it, or None. ``name`` tells resources apart."""

    index: int | None
    name: int | str | None = None


@dataclasses.dataclass(frozen=True)
class Mixed:
    op: str
    name: str
    why: str

    def describe(self) -> str:
        return f"{self.op} (in {layer_of(self.name)!r}) {self.why}"


State = Public | Size | Batch | Items | Handle | Mixed

UNKNOWN = (None, None)


def weighs(state: State) -> bool:
    """Whether the value comes from trainable weights alone."""
    return state.index is not None if isinstance(state, Handle) else isinstance(state, Public) and bool(state.deps)


def is_batch_free(state: State) -> bool:
    """Whether the value holds nothing of the examples, nor of how many there are."""
    return isinstance(state, Public) or (isinstance(state, Size) and state.batch_free)


def layer_of(op_name: str) -> str:
    """The layer's name inside an op's name; Keras names scopes model/layer/op."""
    parts = [p for p in op_name.split("/") if p]
    return "/".join(parts[:-1]) or op_name


def key(t: tf.Tensor) -> tuple[str, int]:
    return (t.op.name, t.value_index)


def constant(t: tf.Tensor) -> np.ndarray | None:
    """The tensor's value where it follows from constants alone (TensorFlow's own folding stops at products)."""
    value = tensor_util.constant_value(t)
    if value is None and t.op.type == "StridedSlice" and t.shape.rank == 0:  # one entry of a vector
        vector, at = constant(t.op.inputs[0]), constant(t.op.inputs[1])
        if vector is not None and at is not None and vector.ndim == 1 and t.op.get_attr("shrink_axis_mask") == 1:
            value = vector[at[0]]
    if value is None and t.op.type == "Minimum" and t.dtype.is_integer:  # min(c, max(c, x)), as bincount writes it
        for limit, clipped in (t.op.inputs, t.op.inputs[::-1]):
            if clipped.op.type == "Maximum" and t.shape.rank == limit.shape.rank == 0:
                top, floors = constant(limit), [constant(i) for i in clipped.op.inputs]
                if top is not None and any(f is not None and f >= top for f in floors):
                    return top
    if value is None and t.op.type in _FOLDED:
        values = [constant(i) for i in t.op.inputs]
        if all(v is not None for v in values) and t.shape.rank == _FOLDED_RANK.get(t.op.type, t.shape.rank):
            value = np.asarray(_FOLDED[t.op.type](*values)).astype(t.dtype.as_numpy_dtype)
    return value


_FOLDED: dict[str, Callable] = {
    "Cast": lambda x: x, "Identity": lambda x: x, "Prod": lambda x, axes: np.prod(x), "Mul": np.multiply,
    "Add": np.add, "AddV2": np.add, "Sub": np.subtract, "FloorMod": np.mod,
    "Range": np.arange, "Pack": lambda *parts: np.stack(parts),
    "ConcatV2": lambda *parts: np.concatenate(parts[:-1], int(parts[-1])),
}  # fmt: skip
_FOLDED_RANK = {"Prod": 0, "Pack": 1}  # where it has to be this


def may_write(op: tf.Operation) -> bool:
    """Whether an op that takes in a variable may write to it, as far as its type tells."""
    return op.type in BODIES or bool(WRITES.search(op.type) or graph_tools.function_names(op.node_def.attr))


def assigns(op: tf.Operation, at: int) -> bool:
    """Whether an op, or what it runs, writes to the variable that is its input number ``at``."""
    if op.type not in BODIES:
        return may_write(op)
    inside = [body.inputs[at - op.type.endswith("If")] for body in body_graphs(op)]
    return any(
        assigns(user, i)
        for t in inside
        for user in t.consumers()
        for i, each in enumerate(user.inputs)
        if key(each) == key(t)
    )


def function_graph(graph: tf.Graph, name: str, inputs: Sequence[tf.Tensor]) -> tf.Graph:
    """The body of a function that an op of ``graph`` calls."""
    function, g = None, graph
    while function is None and g is not None:
        function = g._get_function(name)
        g = getattr(g, "outer_graph", None)
    traced = getattr(function, "graph", None)
    if isinstance(traced, tf.Graph):
        return traced
    if function is None:
        from tensorflow.python.eager import context

        definition = context.context().get_function_def(name)
    else:
        definition = getattr(function, "cached_definition", None) or function.definition
    with graph.as_default():
        return function_def_to_graph.function_def_to_graph(
            definition, input_shapes=[t.shape.as_proto() for t in inputs]
        )


def body_graphs(op: tf.Operation) -> Iterable[tf.Graph]:
    """What a call, a branch or a loop runs; nothing for other ops."""
    for attribute in BODIES.get(op.type, ()):
        inputs = list(op.inputs)[1 if op.type.endswith("If") else 0 :]
        yield function_graph(op.graph, op.get_attr(attribute).name, inputs)


def within(ops: Iterable[tf.Operation]) -> Iterable[tf.Operation]:
    """The ops, and those in their bodies."""
    for op in ops:
        yield op
        for body in body_graphs(op):
            yield from within(body.get_operations())


ELEMENTWISE = frozenset(
    """Abs Acos Acosh Add AddN AddV2 ApproximateEqual Asin Asinh Atan Atan2 Atanh Betainc BitwiseAnd BitwiseOr
    BitwiseXor Cast Ceil CheckNumerics ClipByValue Cos Cosh Digamma Div DivNoNan Elu Equal Erf Erfc Erfinv Exp Expm1
    Floor FloorDiv FloorMod Greater GreaterEqual Identity IdentityN Igamma Igammac Inv Invert IsFinite IsInf IsNan
    LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mod Mul
    MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Polygamma Pow PreventGradient RealDiv Reciprocal Relu Relu6
    RightShift Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square
    SquaredDifference Sqrt StopGradient Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta
    Bucketize PlaceholderWithDefault Snapshot EnsureShape AsString StringToNumber StringLower StringUpper StringStrip
    StringLength StringJoin Substr RegexReplace StaticRegexReplace RegexFullMatch StaticRegexFullMatch
    StringToHashBucket StringToHashBucketFast StringToHashBucketStrong Complex ComplexAbs Real Imag Conj
    Angle EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad
    SoftsignGrad SqrtGrad TanhGrad""".split()
)
REDUCTIONS = frozenset("Sum Mean Max Min Prod Any All EuclideanNorm ArgMax ArgMin".split())
# One axis (an input, or the last ones) is worked along; the others are untouched.
ALONG_AN_AXIS = {"Cumsum": 1, "Cumprod": 1, "CumulativeLogsumexp": 1, "ReverseV2": 1, "Roll": 2}
ALONG_THE_LAST = {
    **dict.fromkeys("Softmax LogSoftmax TopKV2 LRN FFT IFFT RFFT IRFFT".split(), 1),
    **dict.fromkeys(
        """FFT2D IFFT2D RFFT2D IRFFT2D Cholesky MatrixInverse MatrixDeterminant LogMatrixDeterminant Qr Svd
        MatrixDiagPartV3""".split(), 2),
    **dict.fromkeys("FFT3D IFFT3D RFFT3D IRFFT3D".split(), 3),
}  # how many of the last axes
# Draw from a kernel's own state, and write nothing that another op reads.
DRAWS = frozenset("RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt".split())
RANDOM = DRAWS | frozenset(
    """StatelessRandomUniform StatelessRandomUniformV2 StatelessRandomNormal StatelessRandomNormalV2
    StatelessTruncatedNormal StatelessTruncatedNormalV2 StatelessRandomUniformInt StatelessRandomUniformIntV2
    StatelessRandomUniformFullInt StatelessRandomUniformFullIntV2 StatefulUniform StatefulStandardNormalV2
    StatefulTruncatedNormal""".split()
)
SPATIAL = frozenset(
    """AvgPool AvgPool3D MaxPool MaxPool3D DepthToSpace SpaceToDepth ResizeBilinear ResizeNearestNeighbor
    ResizeBicubic ResizeArea ScaleAndTranslate ExtractImagePatches ExtractVolumePatches FakeQuantWithMinMaxArgs
    AdjustContrastv2 AdjustHue AdjustSaturation RGBToHSV HSVToRGB""".split()
)
CONVOLUTIONS = {"Conv2D": 0, "Conv3D": 0, "DepthwiseConv2dNative": 0}
TRANSPOSED = {
    "Conv2DBackpropInput": 2,
    "Conv3DBackpropInputV2": 2,
    "DepthwiseConv2dNativeBackpropInput": 2,
}
# Ops that a user vouches for, with the axis of the examples (`register_rule`).
PROMISED: dict[str, int] = {}
# What may stand between SpaceToBatchND and BatchToSpaceND.
_BLOCKWISE = frozenset("Conv2D Conv3D DepthwiseConv2dNative BatchToSpaceND Identity ExpandDims Squeeze".split())
CALLS = frozenset("PartitionedCall StatefulPartitionedCall".split())
BODIES = {"If": ("then_branch", "else_branch"), "StatelessIf": ("then_branch", "else_branch"),
          "While": ("body", "cond"), "StatelessWhile": ("body", "cond"),
          **{kind: ("f",) for kind in CALLS}}  # fmt: skip
ENTRIES = frozenset("Placeholder PlaceholderV2 IteratorGetNext OptionalGetValue Arg".split())
BY_POSITION = "treats an example by its position in the batch"
TAINTED = "reads a variable that the step itself writes batch data to"
WRITES = re.compile("Assign|^Resource(Sparse|Strided)?(Scatter|Apply)|^LookupTable(Insert|Remove|Import)|^RngSkip")
# Ops that work on one input, along axes that the others name: which input that is.
DATA_INPUT = {
    **dict.fromkeys(ALONG_AN_AXIS, 0),
    **dict.fromkeys(SPATIAL, 0),
    **dict.fromkeys(REDUCTIONS, 0),
    **dict.fromkeys(
        """Reshape ExpandDims Transpose Split SplitV StridedSlice Slice Tile BroadcastTo OneHot Pad PadV2 MirrorPad
        SpaceToBatchND BatchToSpaceND MatrixBandPart TopKV2 RFFT RFFT2D RFFT3D IRFFT IRFFT2D IRFFT3D
        MatrixDiagV3 MatrixDiagPartV3 TensorListGetItem TensorListStack TensorListFromTensor""".split(), 0),
    "Split": 1,
}  # fmt: skip
# Of these, the inputs that name shapes and may hold the batch size; each rule looks at them.
MAY_HOLD_BATCH_SIZE = {
    "Reshape": (1,), "BroadcastTo": (1,), "Tile": (1,), "Slice": (2,), "StridedSlice": (2,), "TensorListGetItem": (2,),
    "TensorListStack": (1,), "TensorListFromTensor": (1,),
}  # fmt: skip


def matmul_labels(op: tf.Operation) -> tuple[list[str], list[str], list[str]]:
    """Einsum labels of a matrix product: of both inputs and of the output."""
    if op.type == "Einsum":
        equation = op.get_attr("equation")
        equation = equation.decode() if isinstance(equation, bytes) else equation
        left, out = equation.replace(" ", "").split("->")
        terms = left.split(",")
        extra = [t.shape.rank - len(term.replace("...", "")) for t, term in zip(op.inputs, terms, strict=True)]

        def expand(term: str, n: int) -> list[str]:
            if "..." not in term:
                return list(term)
            before, after = term.split("...")
            return [*before, *[f"~{i}" for i in range(n, 0, -1)], *after]

        n_out = max(extra) if "..." in left else 0
        labels = [expand(t, n) for t, n in zip(terms, extra, strict=True)]
        return labels[0], labels[1] if len(labels) > 1 else [], expand(out, n_out)
    a, b = op.inputs
    if op.type == "MatMul":
        ta, tb = op.get_attr("transpose_a"), op.get_attr("transpose_b")
    else:
        ta, tb = op.get_attr("adj_x"), op.get_attr("adj_y")
    ra, rb = (2, 2) if op.type == "MatMul" else (a.shape.rank, b.shape.rank)
    la = [f"~{i}" for i in range(ra - 2, 0, -1)] + (["k", "i"] if ta else ["i", "k"])
    lb = [f"~{i}" for i in range(rb - 2, 0, -1)] + (["j", "k"] if tb else ["k", "j"])
    lo = [f"~{i}" for i in range(max(ra, rb) - 2, 0, -1)] + ["i", "j"]
    return la, lb, lo


def own_gradient_is_known(op: tf.Operation) -> bool:
    """Whether the op has TensorFlow's gradient, or one of its own that TensorFlow or Keras wrote."""
    try:
        name = op.get_attr("_gradient_op_type")
    except ValueError:
        return True
    if not tf.compat.as_str(name).startswith("CustomGradient"):
        return op.type in CALLS
    function = gradient_function(op)
    if not isinstance(function, types.FunctionType) or "<locals>" not in function.__qualname__:
        return False  # one that was written for another purpose
    return function.__module__.split(".")[0] in ("tensorflow", "keras", "tf_keras")


def passes_gradients_through(op: tf.Operation) -> bool:
    """Whether the gradients of the op's first inputs, the values, go to its last ones, the arguments, as they are."""
    if "_gradient_op_type" not in op.node_def.attr:
        return False
    return getattr(gradient_function(op), "__qualname__", "").startswith("grad_pass_through.")


def gradient_function(op: tf.Operation):
    """The function that tf.custom_gradient was given for the op's gradient."""
    function = ops.gradient_registry.lookup(tf.compat.as_str(op.get_attr("_gradient_op_type")))
    for inside in ("tape_grad_fn", "grad_fn"):  # what the decorator wraps the user's function in
        function = inspect.getclosurevars(function).nonlocals.get(inside)
    return function


def _takes_any_rank(op: tf.Operation) -> bool:
    return op.type in BODIES or op.type.startswith("TensorList") or (
        op.type in ("EnsureShape", "IdentityN", "Shape", "ShapeN", "Size", "Rank"))  # fmt: skip


PRODUCTS = frozenset("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum".split())


class BatchAxis:
    """States of all tensors of ``graph`` that ``targets`` are computed from.

    Args:
      graph: the graph to read.
      source: gives the state of a tensor that the graph takes from outside (a placeholder or an iterator's
        element), or None to have the default.
    """

    def __init__(self, graph: tf.Graph, source: Callable[[tf.Tensor], State | None]):
        self.graph = graph
        self.source = source
        self.states: dict[tuple[str, int], State] = {}
        self.sources: list[tf.Tensor] = []
        self.checks: list[tuple[tf.Tensor, int]] = []  # (tensor, axis): its length must divide by the batch size
        self.ops: dict[str, tf.Operation] = {}
        self._outer: BatchAxis | None = None
        self.reads: list[tuple[Handle, tf.Operation]] = []
        self.static: set[int] = set()  # batch sizes that a caller's inputs have
        self.vouched: Callable[[tf.Operation], bool] = lambda op: False  # who chooses what it runs was looked at
        self._tainted: frozenset[Handle] = frozenset()  # variables known to hold batch data
        self._writers: list[tuple[tf.Operation, list[tf.Tensor]]] | None = None  # what may write to a variable
        for name in graph_tools.RELEASED.get(graph, ()):
            self.ops[name] = graph.get_operation_by_name(name)
            self.states[(name, 0)] = Public()

    # -- driving ---------------------------------------------------------------------------------------------

    def run(self, targets: Iterable[tf.Tensor]) -> None:
        """Finds the states of the targets and of all that they depend on."""
        new = lambda t: t.op.name not in self.ops  # noqa: E731
        for op in graph_tools.ancestors([t for t in targets if new(t)], follow=new).values():
            self.ops[op.name] = op
            states = self._transfer(op)
            for i, state in enumerate(states):
                self.states[(op.name, i)] = state

    def __getitem__(self, t: tf.Tensor) -> State:
        if key(t) not in self.states:
            self.run([t])
        return self.states[key(t)]

    def entries(self, t: tf.Tensor) -> tuple[tuple[int | None, int | None], ...]:
        """The tensor as a vector of (coefficient, power of the batch size)."""
        state = self[t]
        if isinstance(state, Size):
            return state.entries
        if isinstance(state, Public):
            value = constant(t)
            if value is not None and value.ndim <= 1 and value.dtype.kind in "iuf":
                return tuple((v if int(v) != v else int(v), 0) for v in np.atleast_1d(value).tolist())
            if t.op.type == "Pack" and t.shape.rank == 1:
                return tuple(e for i in t.op.inputs for e in self.entries(i))
            n = t.shape.num_elements()
            return tuple([(None, 0)] * (1 if n is None else n))
        n = t.shape.num_elements()
        return tuple([UNKNOWN] * (1 if n is None else n))

    def tainted_read(self) -> tuple[Mixed, Handle] | None:
        """A read of a variable that this same graph writes batch data to, and the variable, if there is one."""
        if self._outer is not None:
            found = self._outer.tainted_read()
            if found is not None:
                return found
        read = {handle: op for handle, op in self.reads}
        for handle in self.tainted(set(read)) & set(read):
            return self._mix(read[handle], TAINTED), handle
        return None

    def tainted(self, handles: set[Handle]) -> set[Handle]:
        """Those of the variables, and of all that are written to them, that the graph writes batch data to: at once,
        or by way of another variable and a later step."""
        handles, entries = self._written_from(handles)
        found: set[Handle] = set()
        look = self
        while entries:
            more = set(look._written(handles))
            if more <= found:
                return found
            found |= more
            look = BatchAxis(self.graph, self.source)
            look.static, look.vouched, look._tainted = self.static, self.vouched, frozenset(found)
        return found

    def _written_from(self, handles: set[Handle]) -> tuple[set[Handle], bool]:
        """The variables with those that what is written to them is computed from, and whether anything else that enters
        the graph is among what it is computed from."""
        known, new, entries = set(), set(handles), False
        released = graph_tools.RELEASED.get(self.graph, ())
        while new:
            known |= new
            writes = [op for op, _ in self._writes(new)]
            entries = entries or any(op.type in BODIES for op in writes)  # what they run may take something in
            read = graph_tools.ancestors(
                [t for op in writes for t in op.inputs], follow=lambda t: t.op.name not in released
            )
            resources = {key(t): t for op in [*writes, *read.values()] for t in op.inputs if t.dtype == tf.resource}
            new = {self._handle(t) for t in resources.values()} - known
            entries = entries or any(op.type in ENTRIES and op.outputs[0].dtype != tf.resource for op in read.values())
        return known, entries

    def _handle(self, t: tf.Tensor) -> State:
        """The state of a resource: a `Handle`, also of one made in the graph."""
        state = self[t]
        if not isinstance(state, Public):
            return state
        shared = t.op.node_def.attr["shared_name"].s if "shared_name" in t.op.node_def.attr else b""
        return Handle(None, (t.op.type, shared) if shared else t.op.name)

    def _writes(self, handles: set[Handle]) -> Iterable[tuple[tf.Operation, set[Handle]]]:
        """The ops of the graph that may write to some of the variables, and to which."""
        if not handles:
            return
        if self._writers is None:
            self._writers = []
            for op in self.graph.get_operations():
                resources = [t for t in op.inputs if t.dtype == tf.resource]
                if not resources or op.type in ("ReadVariableOp", "ResourceGather"):
                    continue
                if may_write(op):
                    self._writers.append((op, resources))
        for op, resources in self._writers:
            mine = handles.intersection(map(self._handle, resources))
            if mine:
                yield op, mine

    def written_since(self, op: tf.Operation) -> tf.Operation | None:
        """What was made after a loop or a call, and writes to a variable that it takes in."""
        handles = {self._handle(t) for t in op.inputs if t.dtype == tf.resource}
        for later, mine in self._writes(handles):
            if later._id > op._id and any(
                assigns(later, i)
                for i, t in enumerate(later.inputs)
                if t.dtype == tf.resource and self._handle(t) in mine
            ):
                return later
        return None

    def _written(self, handles: set[Handle]) -> Iterable[Handle]:
        """Those of the variables that any op of the graph, or of what it calls, may write batch data to."""
        for op, mine in self._writes(handles):
            states = [self[t] for t in op.inputs]
            if op.type in BODIES:
                public = self._flows_by_public_values(op, states)
                for inner, _ in self.bodies(op):
                    yield from inner._written(mine)
                    for _, there in () if public else inner._writes(mine):  # whether it is written to tells of the data
                        yield from there
            elif not all(isinstance(s, Handle) or is_batch_free(s) for s in states):
                yield from mine

    def _flows_by_public_values(self, op: tf.Operation, states: list[State]) -> bool:
        """Whether no example has a say in which branch is taken, or how often a loop turns."""
        if self.vouched(op):
            return True
        if op.type.endswith("If"):
            return is_batch_free(states[0])
        if op.type.endswith("While"):
            _, (condition,), _ = self.body(op, "cond", list(op.inputs), self._over_turns(op))
            return is_batch_free(condition)
        return True

    # -- one op ----------------------------------------------------------------------------------------------

    def _transfer(self, op: tf.Operation) -> list[State]:
        n = len(op.outputs)
        states = [self.states[key(t)] for t in op.inputs]
        if op.type in ENTRIES:
            return [self._enter(t) for t in op.outputs]
        if op.type in ("ReadVariableOp", "ResourceGather"):
            return [self._read(op, states)]
        of_weights = op.type == "IdentityN" and any(weighs(s) for s in states)
        public = all(isinstance(s, Public) and not s.deps for s in states)
        if (of_weights or not own_gradient_is_known(op)) and not public:
            # Its gradient may mix what its value keeps apart, or add weights' gradients up.
            return [Mixed(op.type, op.name, "has a gradient of its own (tf.custom_gradient), which is not known")] * n
        if op.type == "Minimum" and constant(op.outputs[0]) is not None:
            return [Public()]
        if op.type == "BiasAdd" and self._adds_only_row(op, states):
            return [states[0]]
        for state in states:
            if isinstance(state, Mixed) and op.type not in ("Shape", "Size", "Rank", "ShapeN"):
                return [state] * n
        if op.type not in _BLOCKWISE and any(isinstance(s, Batch) and s.blocks > 1 for s in states):
            return [Mixed(op.type, op.name, "is not known to keep examples apart in a dilated window")] * n
        if not _takes_any_rank(op) and any(
            isinstance(s, Batch) and t.shape.rank is None for t, s in zip(op.inputs, states, strict=True)
        ):
            return [self._mix(op, "has a shape of unknown rank")] * n
        rule = getattr(self, f"_op_{op.type.lower()}", None) or self._family(op.type)
        if rule is not None:
            result = self._misled(op, states) or rule(op, states)
            if result is not None:
                return result if isinstance(result, list) else [result] * n
        if op._is_stateful and any(t.dtype != tf.resource for t in op.outputs):
            return [Mixed(op.type, op.name, "may give out what an earlier step was given")] * n
        if all(map(is_batch_free, states)):
            return [Public(self._deps(states))] * n
        if not any(isinstance(s, Batch | Items) for s in states):
            return [Mixed(op.type, op.name, "makes the result depend on the batch size")] * n
        return [Mixed(op.type, op.name, "is not known to keep examples apart")] * n

    def _misled(self, op: tf.Operation, states: list[State]) -> Mixed | None:
        """An op whose axes, lengths or other settings depend on examples or on how many there are."""
        if op.type not in DATA_INPUT:
            return None
        data = states[DATA_INPUT[op.type]]
        for i, s in enumerate(states):
            if i == DATA_INPUT[op.type] or isinstance(s, Public):
                continue
            if not isinstance(s, Size):
                return self._mix(op, "has settings that depend on examples")
            if not s.batch_free and i not in MAY_HOLD_BATCH_SIZE.get(op.type, ()):
                return self._mix(op, "makes an example's result depend on the batch size")
            if not isinstance(data, Batch | Items) and any(power is None for _, power in s.entries):
                return self._mix(op, "has settings that may depend on examples")
        return None

    def _promised(self, op: tf.Operation, states: list[State]) -> State | None:
        batches = [s for s in states if isinstance(s, Batch)]
        if any(s.axis != PROMISED[op.type] for s in batches):
            return self._mix(op, f"was registered with batch_axis={PROMISED[op.type]}, but the batch is elsewhere")
        return Batch(PROMISED[op.type], batches[0].rows) if batches else None

    def _family(self, kind: str) -> Callable | None:
        if kind in PROMISED:
            return self._promised
        if kind in ELEMENTWISE:
            return self._elementwise
        if kind in REDUCTIONS:
            return self._reduce
        if kind in PRODUCTS:
            return self._product
        if kind in RANDOM:
            return self._random
        if kind in ALONG_AN_AXIS or kind in ALONG_THE_LAST:
            return self._along
        if kind in SPATIAL:
            return lambda op, s: self._first_axis(op, s, 0)
        if kind == "MaxPoolGrad":
            return self._pool_gradient
        if kind in CONVOLUTIONS:
            return lambda op, s: self._first_state(op, s) or self._first_axis(op, s, 0)
        if kind in TRANSPOSED:
            return lambda op, s: self._first_axis(op, s, 2)
        if kind in CALLS:
            return self._call
        return None

    @staticmethod
    def _deps(states: Iterable[State]) -> frozenset[int]:
        return frozenset().union(*(s.deps for s in states if isinstance(s, Public)))

    @staticmethod
    def _mix(op: tf.Operation, why: str) -> Mixed:
        return Mixed(op.type, op.name, why)

    def _enter(self, t: tf.Tensor) -> State:
        given = self.source(t)
        if given is not None:
            return given
        outer = graph_tools.captured(t)
        if outer is not None:
            if not hasattr(outer, "graph") or not isinstance(getattr(outer, "graph", None), tf.Graph):
                return Public()  # an eager tensor: the same whatever the batch
            if self._outer is None:
                self._outer = BatchAxis(outer.graph, self.source)
            state = self._outer[outer]
            if self._outer.checks:  # a length outside cannot be checked from here
                return self._mix(self._outer.checks[0][0].op, "is not known to keep examples apart")
            self.sources += [t] if isinstance(state, Batch) else []
            return state
        if t.dtype in (tf.resource, tf.variant):
            return Handle(None, t.op.name) if t.dtype == tf.resource else self._mix(
                t.op, "takes in a value that is no tensor")  # fmt: skip
        if t.shape.rank == 0:
            within = isinstance(getattr(t.graph, "outer_graph", None), tf.__internal__.FuncGraph)
            if t.op.type == "IteratorGetNext" or within:
                return self._mix(t.op, "hands in a number that may come from examples, and how is not to be seen here;"
                                 " keep a number that is public in a tf.Variable, if it is one,")  # fmt: skip
            return Public()
        self.sources.append(t)
        return Batch(0)

    def _read(self, op: tf.Operation, states: list[State]) -> State:
        value = self._held(op)
        if op.type == "ReadVariableOp" or isinstance(value, Mixed):
            return value
        return self._gather(op, value, states[1], axis=0, batch_dims=op.get_attr("batch_dims"))

    def _held(self, op: tf.Operation) -> Public | Mixed:
        """What the variable holds that an op reads, its first input."""
        handle = self._handle(op.inputs[0])
        if not isinstance(handle, Handle):
            return handle if isinstance(handle, Mixed) else self._mix(op, "reads a variable that is not known")
        if handle in self._tainted:
            return self._mix(op, TAINTED)
        self.reads.append((handle, op))
        return Public(frozenset() if handle.index is None else frozenset([handle.index]))

    # -- families --------------------------------------------------------------------------------------------

    def _elementwise(self, op: tf.Operation, states: list[State]) -> State | list[State] | None:
        if op.type == "IdentityN":
            batches = {s for s in states if isinstance(s, Batch)}
            if len(batches) > 1 and passes_gradients_through(op):
                return self._mix(op, "hands gradients from the examples along one axis to those along another")
            return list(states)
        if len(states) == 1 and (isinstance(states[0], Items | Handle) or getattr(states[0], "blocks", 1) > 1):
            return states[0]
        batches = [(t, s) for t, s in zip(op.inputs, states, strict=True) if isinstance(s, Batch)]
        if not batches:
            return self._public_arithmetic(op, states)
        rank = max(t.shape.rank for t in op.inputs if t.shape.rank is not None)
        if op.type == "Select" and op.inputs[0].shape.rank == 1 and rank > 1:  # the condition chooses rows
            free = all(isinstance(s, Batch) or (isinstance(s, Public) and self._row_free(t, s, -t.shape.rank))
                       for t, s in zip(op.inputs, states, strict=True))  # fmt: skip
            if free and all(s == Batch(0, s.rows) for _, s in batches) and len({s.rows for _, s in batches}) == 1:
                return batches[0][1]
            return self._mix(op, "chooses between rows")
        axes = {s.axis - t.shape.rank for t, s in batches}
        if len(axes) > 1:
            return self._mix(op, "combines the examples along one axis with the examples along another")
        axis = axes.pop()
        rows = {s.rows for _, s in batches} - {None}
        if len(rows) > 1:
            return self._mix(op, "combines rows of different examples")
        lengths = {batches[0][0].shape[axis], op.outputs[0].shape[axis]}
        if len(lengths - {None}) > 1:  # the only example is repeated
            return self._mix(op, BY_POSITION)
        for t, s in zip(op.inputs, states, strict=True):
            if isinstance(s, Size) and not s.batch_free:
                return self._mix(op, "makes an example's result depend on the batch size")
            if isinstance(s, Public | Size) and not self._row_free(t, s, axis):
                return self._mix(op, BY_POSITION)
        return Batch(axis + rank, rows.pop() if rows else None)

    def _row_free(self, t: tf.Tensor, state: Public | Size, axis: int) -> bool:
        """Whether a tensor without examples is the same for all rows along ``axis`` (counted from the right)."""
        rank = t.shape.rank
        if rank is None:
            return False
        if rank < -axis or t.shape[axis] == 1:
            return True
        if t.shape[axis] is not None and not self._batch_sizes():
            return False  # with a batch of one, it would be rows of one and the same example
        if isinstance(state, Size) or state.deps:
            return False
        if state.alike:
            return True
        parts = self._rows_from(t, axis)
        if parts is not None:
            states = [self[x] for x, _ in parts]
            if all(isinstance(s, Public) and self._row_free(x, s, a) for (x, a), s in zip(parts, states, strict=True)):
                return True
        value = constant(t)
        return value is not None and bool(np.all(value == np.take(value, [0], axis=axis))) if rank else True

    def _rows_from(self, t: tf.Tensor, axis: int) -> list[tuple[tf.Tensor, int]] | None:
        """The tensors whose rows t's rows along an axis are made of, one from one, and their axes (all counted from the
        right); None if the op makes rows in another way."""
        op, rank, kind = t.op, t.shape.rank, t.op.type
        if kind == "Select" and op.inputs[0].shape.rank in (None, 1) and rank > 1:
            return None  # the condition chooses between rows, of the first axis
        if kind in ELEMENTWISE or kind == "BroadcastTo":  # a mask spread over a batch of static size
            return [(i, axis) for i in (op.inputs[:1] if kind == "BroadcastTo" else op.inputs)]
        if not op.inputs or any(i.shape.rank is None for i in op.inputs):
            return None
        x, at = op.inputs[0], axis + rank
        if kind in CONVOLUTIONS and at == 0:
            return [(x, axis)]
        if kind in REDUCTIONS:
            gone = self._gone(op)
            if gone is None:
                return None
            kept = [i for i in range(x.shape.rank) if i not in gone]
            return [(x, (at if x.shape.rank == rank else kept[at]) - x.shape.rank)]
        if kind in ("Reshape", "StridedSlice") and at == 0 and x.shape.rank and x.shape[0] == t.shape[0] is not None:
            masks = () if kind == "Reshape" else ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
            return None if any(op.get_attr(m) & 1 for m in masks) else [(x, -x.shape.rank)]
        if kind in ("Tile", "Softmax", "LogSoftmax"):  # of equal entries, these too are equal
            return [(x, axis)]
        if kind in ALONG_AN_AXIS:
            along = constant(op.inputs[ALONG_AN_AXIS[kind]])
            return None if along is None or at in [int(a) % rank for a in np.atleast_1d(along)] else [(x, axis)]
        if kind == "ConcatV2":
            joined = constant(op.inputs[-1])
            return None if joined is None or int(joined) % rank == at else [(i, axis) for i in op.inputs[:-1]]
        if kind in ("Pack", "ExpandDims"):
            added = op.get_attr("axis") if kind == "Pack" else constant(op.inputs[1])
            if added is None or int(added) % rank == at:
                return None
            return [(i, axis + (int(added) % rank > at)) for i in (op.inputs if kind == "Pack" else [x])]
        if kind == "Transpose":
            order = constant(op.inputs[1])
            return None if order is None else [(x, int(order[at]) - rank)]
        if kind == "Squeeze" and None not in x.shape.as_list():
            gone = [d % x.shape.rank for d in op.get_attr("squeeze_dims")]
            gone = gone or [i for i, d in enumerate(x.shape) if d == 1]
            return [(x, [i for i in range(x.shape.rank) if i not in gone][at] - x.shape.rank)]
        return None

    def _public_arithmetic(self, op: tf.Operation, states: list[State]) -> State | None:
        if any(isinstance(s, Items | Handle) for s in states):
            return None
        sizes = [s for s in states if isinstance(s, Size)]
        if not sizes:
            alike = all(isinstance(s, Public) and (s.alike or t.shape.rank == 0)
                        for t, s in zip(op.inputs, states, strict=True))  # fmt: skip
            return Public(self._deps(states), alike)
        if self._deps(states):
            if all(s.batch_free for s in sizes):
                return Public(self._deps(states))
            return self._mix(op, "scales weights by the batch size")
        if any(t.shape.rank is None or t.shape.rank > 1 for t in op.inputs):
            return Public() if all(s.batch_free for s in sizes) else self._mix(op, "spreads the batch size")
        columns = [self.entries(t) for t in op.inputs]
        width = max(len(c) for c in columns)
        columns = [c * width if len(c) == 1 else c for c in columns]
        return Size(tuple(self._monomial(op, row) for row in zip(*columns, strict=True)))

    @staticmethod
    def _monomial(op: tf.Operation, row: Sequence[tuple[int | None, int | None]]) -> tuple[int | None, int | None]:
        kind = op.type
        coefficients, powers = [c for c, _ in row], [p for _, p in row]
        if any(p is None for p in powers):
            return UNKNOWN
        known = None not in coefficients
        if kind == "Cast" and op.inputs[0].dtype.is_floating and op.outputs[0].dtype.is_integer and powers[0]:
            return row[0] if isinstance(coefficients[0], int) else UNKNOWN  # the rest would be cut off
        if kind == "Cast" and powers[0] and op.outputs[0].dtype.is_integer and op.outputs[0].dtype.size < 4:
            return UNKNOWN  # it may wrap
        if kind in ("Cast", "Identity", "StopGradient", "PreventGradient", "Snapshot"):
            return row[0]
        if kind == "Mul":
            product = coefficients[0] * coefficients[1] if known else None
            return (int(product) if known and product == int(product) else product, sum(powers))
        if kind in ("FloorDiv", "RealDiv", "TruncateDiv", "DivNoNan", "Div"):
            exact = known and coefficients[1] and coefficients[0] % coefficients[1] == 0
            rounds = kind == "FloorDiv" or op.outputs[0].dtype.is_integer
            if rounds and (powers[0] < powers[1] or (not exact and powers[0] != powers[1])):
                return UNKNOWN
            return (int(coefficients[0] // coefficients[1]) if exact else None, powers[0] - powers[1])
        if kind == "Neg":
            return (-coefficients[0] if known else None, powers[0])
        if all(p == 0 for p in powers):
            return (None, 0)
        if kind in ("AddV2", "Add", "Sub") and known and len(set(powers)) == 1:
            return (coefficients[0] + (-1 if kind == "Sub" else 1) * coefficients[1], powers[0])
        if kind in ("Maximum", "Minimum") and row[0] == row[1]:
            return row[0]
        return UNKNOWN

    def _reduce(self, op: tf.Operation, states: list[State]) -> State | None:
        x, state = op.inputs[0], states[0]
        if isinstance(state, Size):
            powers = [p for _, p in state.entries]
            if op.type != "Prod" or None in powers:
                return Size(((None, 0),)) if state.batch_free else Size((UNKNOWN,))
            coefficients = [c for c, _ in state.entries]
            return Size(((None if None in coefficients else int(np.prod(coefficients)), sum(powers)),))
        if not isinstance(state, Batch):
            return None
        gone = self._gone(op)
        if gone is None:
            if x.shape.rank is not None and x.shape.rank == 1:
                return self._mix(op, "reduces over the batch")
            return self._mix(op, "reduces over axes that are not known beforehand")
        if state.axis in gone:
            return self._mix(op, "reduces over the batch")
        keep = op.type not in ("ArgMax", "ArgMin") and op.get_attr("keep_dims")
        return Batch(state.axis - (0 if keep else sum(a < state.axis for a in gone)), state.rows)

    @staticmethod
    def _gone(op: tf.Operation) -> set[int] | None:
        """The axes that a reduction sums over; None if they are not known."""
        rank, axes = op.inputs[0].shape.rank, constant(op.inputs[1])
        if axes is None or rank is None:
            return None
        return {int(a) % rank for a in np.atleast_1d(axes)} if rank else set()

    def _along(self, op: tf.Operation, states: list[State]) -> State | None:
        x, state = op.inputs[0], states[0]
        if not isinstance(state, Batch):
            return None
        axes = [x.shape.rank - i for i in range(1, 1 + ALONG_THE_LAST.get(op.type, 0))]
        if op.type in ALONG_AN_AXIS:
            value = constant(op.inputs[ALONG_AN_AXIS[op.type]])
            axes = None if value is None else [int(a) % x.shape.rank for a in np.atleast_1d(value)]
        if axes is None or state.axis in axes:
            return self._mix(op, "works along the batch axis")
        return state

    def _first_axis(self, op: tf.Operation, states: list[State], data: int) -> State | None:
        others = [s for i, s in enumerate(states) if i != data]
        if not isinstance(states[data], Batch):
            return self._mix(op, "has weights that depend on examples") if any(
                isinstance(s, Batch) for s in others) else None  # fmt: skip
        least = 4 if op.type.startswith("Adjust") else 2 if op.type in ("RGBToHSV", "HSVToRGB") else 0
        if states[data].axis != 0 or op.inputs[data].shape.rank < least:
            return self._mix(op, "does not have the batch as its first axis")
        if op.type in TRANSPOSED and any(p != 0 for _, p in self.entries(op.inputs[0])[1:]):
            return self._mix(op, "makes an example's result depend on the batch size")
        if any(isinstance(s, Batch) for s in others):
            return self._mix(op, "has weights that depend on examples")
        if op.type in ("AvgPool", "MaxPool", "AvgPool3D", "MaxPool3D") and (
            op.get_attr("ksize")[0] != 1 or op.get_attr("strides")[0] != 1
        ):
            return self._mix(op, "pools over the batch")
        return states[data]

    def _pool_gradient(self, op: tf.Operation, states: list[State]) -> State | None:
        """Of the input, the output and the output's gradient."""
        if op.get_attr("ksize")[0] != 1 or op.get_attr("strides")[0] != 1:
            return self._mix(op, "pools over the batch")
        if len(set(states)) > 1 or getattr(states[0], "axis", 0) != 0:
            return self._mix(op, "does not have the batch as its first axis")
        return states[0] if isinstance(states[0], Batch) else None

    def _product(self, op: tf.Operation, states: list[State]) -> State | None:
        batches = [(i, s) for i, s in enumerate(states) if isinstance(s, Batch)]
        if not batches:
            return self._first_state(op, states)
        la, lb, lo = matmul_labels(op)
        labels = [la, lb][: len(op.inputs)]
        if len(op.inputs) > 2:
            return self._mix(op, "has more than two operands")
        marks = {labels[i][s.axis] for i, s in batches}
        if len(marks) > 1:
            return self._mix(op, "multiplies the examples along one axis with the examples along another")
        mark = marks.pop()
        if mark not in lo:
            return self._mix(op, "sums over the batch")
        for t, s, names in zip(op.inputs, states, labels, strict=True):
            if isinstance(s, Size) and not s.batch_free:
                return self._mix(op, "makes an example's result depend on the batch size")
            at = names.index(mark) - len(names) if mark in names else None
            if isinstance(s, Public | Size) and at is not None and not self._row_free(t, s, at):
                return self._mix(op, BY_POSITION)
        if any(names.count(mark) > 1 for names in labels):
            return self._mix(op, "takes a diagonal over the batch")
        rows = {s.rows for _, s in batches} - {None}
        if len(rows) > 1:
            return self._mix(op, "combines rows of different examples")
        return Batch(lo.index(mark), rows.pop() if rows else None)

    def _first_state(self, op: tf.Operation, states: list[State]) -> State | None:
        """A recurrent layer's first state times its weights, in a batch of static size: rows of equal values."""
        if op.type not in CONVOLUTIONS and (op.type != "MatMul" or op.get_attr("transpose_a")):
            return None
        x, s, w = op.inputs[0], states[0], states[1]
        if not (isinstance(s, Public) and isinstance(w, Public) and w.deps and self._is_static_batch(x)):
            return None
        return Batch(0) if self._row_free(x, s, -x.shape.rank) else None

    def _is_static_batch(self, t: tf.Tensor, axis: int = 0) -> bool:
        """Whether an axis has the length of a batch of static size."""
        length = t.shape[axis]
        return length is not None and length > 1 and length in self._batch_sizes()

    def _batch_sizes(self) -> set[int]:
        """What is known beforehand of how long batches are."""
        return {size for size in {x.shape[0] for x in self.sources} | self.static if size is not None}

    def _random(self, op: tf.Operation, states: list[State]) -> State | None:
        shape = op.inputs[1 if op.type.startswith("Stateful") else 0]
        for t, s in zip(op.inputs, states, strict=True):
            if t is not shape and (isinstance(s, Batch | Items) or (isinstance(s, Size) and not s.batch_free)):
                return self._mix(op, "draws numbers from parameters that depend on the batch")
        filled = self._shaped(op, self.entries(shape))
        return Public(alike=True) if isinstance(filled, Public) else filled

    def _shaped(self, op: tf.Operation, entries: Sequence[tuple[int | None, int | None]]) -> State:
        """A tensor of equal or identically distributed rows, of the given shape."""
        if any(p is None for _, p in entries):
            return self._mix(op, "has a shape that is not known to follow the batch size")
        axes = [i for i, (_, p) in enumerate(entries) if p]
        if not axes:
            return Public(alike=True)
        if len(axes) > 1 or entries[axes[0]][1] != 1:
            return self._mix(op, "makes a tensor with several batch axes")
        return Batch(axes[0], entries[axes[0]][0])

    # -- shapes ----------------------------------------------------------------------------------------------

    def _shape_entries(self, t: tf.Tensor, state: State) -> tuple[tuple[int | None, int | None], ...]:
        if t.shape.rank is None:
            return (UNKNOWN,)
        if isinstance(state, Mixed | Items | Handle):
            return tuple((d, 0) if d is not None else UNKNOWN for d in t.shape)
        entries = [(d, 0) if d is not None or not isinstance(state, Size) else UNKNOWN for d in t.shape]
        if isinstance(state, Batch) and t.shape[state.axis] is None:
            entries[state.axis] = (state.rows, 1)
        return tuple(entries)

    def _op_shape(self, op, states):
        return Size(self._shape_entries(op.inputs[0], states[0]))

    def _op_shapen(self, op, states):
        return [Size(self._shape_entries(t, s)) for t, s in zip(op.inputs, states, strict=True)]

    def _op_size(self, op, states):
        entries = self._shape_entries(op.inputs[0], states[0])
        if any(p is None for _, p in entries):
            return Size((UNKNOWN,))
        cs = [c for c, _ in entries]
        return Size(((None if None in cs else int(np.prod(cs)), sum(p for _, p in entries)),))

    def _op_pyfunc(self, op, states):
        return self._mix(op, "runs Python code, which cannot be followed")

    _op_eagerpyfunc = _op_pyfuncstateless = _op_pyfunc

    def _op_const(self, op, states):
        value = constant(op.outputs[0])
        return Public(alike=value is not None and value.size > 0 and bool(np.all(value == value.flat[0])))

    def _op_varisinitializedop(self, op, states):
        return Public()

    def _op_rank(self, op, states):
        known = op.inputs[0].shape.rank is not None or isinstance(states[0], Public)
        return Public() if known else self._mix(op, "depends on a rank that is not known")

    def _op_reshape(self, op, states):
        x, y, state = op.inputs[0], op.outputs[0], states[0]
        entries = self.entries(op.inputs[1])
        if isinstance(state, Size):
            return state
        if isinstance(state, Public):
            return Public(state.deps, state.alike) if all(p == 0 for _, p in entries) else self._mix(
                op, "gives public values a batch axis")  # fmt: skip
        if not isinstance(state, Batch):
            return None
        if not y.shape.rank:
            return self._mix(op, "has a shape of unknown rank" if y.shape.rank is None else "drops the batch axis")
        if len(entries) != y.shape.rank:
            entries = tuple([UNKNOWN] * y.shape.rank)
        a = state.axis
        before = [d for d in x.shape[:a]]
        if any(d != 1 for d in before):
            # The axes before the batch must stay as they are.
            if None in before or [d for d in y.shape[:a]] != before or y.shape.rank <= a:
                return self._mix(op, "moves examples across axes")
            out_axis = a
        else:
            marked = [i for i, (c, p) in enumerate(entries) if p == 1]
            free = [i for i in range(y.shape.rank) if y.shape[i] != 1]
            if marked:
                out_axis = marked[0]
            elif 1 in self._batch_sizes():  # any axis would be true; this one it has for other batches
                ones = next((i for i, d in enumerate(y.shape) if d != 1), y.shape.rank)
                out_axis = max(min(a, ones - 1), 0)
            else:
                out_axis = free[0] if free else 0
            if any(d != 1 for d in y.shape[:out_axis]):
                return self._mix(op, "moves examples across axes")
        coefficient, power = entries[out_axis]
        if power == 1:
            return Batch(out_axis, coefficient)
        inner = [d for d in x.shape[a + 1 :]]
        outer = [d for d in y.shape[out_axis + 1 :]]
        if None not in outer:
            each = int(np.prod(outer))
            if each in (0, 1) and None in inner:
                return Batch(out_axis, None)
            if None not in inner and state.rows is not None:
                total = state.rows * int(np.prod(inner))
                if each == 0 or total % each:
                    return self._mix(op, "cuts across examples")
                return Batch(out_axis, total // each)
        if inner == outer and None not in inner:
            return Batch(out_axis, state.rows)
        self.checks.append((y, out_axis))
        return Batch(out_axis, None)

    def _op_expanddims(self, op, states):
        state = states[0]
        if isinstance(state, Batch):
            axis = constant(op.inputs[1])
            if axis is None:
                return self._mix(op, "moves examples across axes")
            axis = int(np.ravel(axis)[0]) % op.outputs[0].shape.rank
            return Batch(state.axis + (axis <= state.axis), state.rows, state.blocks)
        return state if isinstance(state, Size | Public) else None

    def _op_squeeze(self, op, states):
        state, x = states[0], op.inputs[0]
        if not isinstance(state, Batch):
            return state if isinstance(state, Size | Public) else None
        dims = [d % x.shape.rank for d in op.get_attr("squeeze_dims")]
        if not dims:
            if any(d is None for i, d in enumerate(x.shape) if i != state.axis):
                return self._mix(op, "squeezes axes that are not known beforehand")
            dims = [i for i, d in enumerate(x.shape) if d == 1]
        if state.axis in dims:
            return self._mix(op, "drops the batch axis")
        return Batch(state.axis - sum(d < state.axis for d in dims), state.rows, state.blocks)

    def _op_transpose(self, op, states):
        state = states[0]
        if isinstance(state, Batch):
            perm = constant(op.inputs[1])
            if perm is None:
                return self._mix(op, "moves examples across axes")
            return Batch(list(perm).index(state.axis), state.rows)
        return state if isinstance(state, Public) else None

    def _op_concatv2(self, op, states):
        *tensors, axis_tensor = op.inputs
        if not is_batch_free(states[-1]):
            return self._mix(op, "has settings that depend on examples or on how many there are")
        return self._joined(op, tensors, states[:-1], constant(axis_tensor))

    def _joined(self, op, tensors, states, axis):
        batches = [s for s in states if isinstance(s, Batch)]
        if not batches:
            if any(isinstance(s, Size) for s in states) and not self._deps(states):
                return Size(tuple(e for t in tensors for e in self.entries(t)))
            if all(isinstance(s, Public) for s in states):
                return Public(self._deps(states))
            return None
        axis = None if axis is None else int(axis) % tensors[0].shape.rank
        if axis is None or len({s.axis for s in batches}) > 1:
            return self._mix(op, "joins tensors with different batch axes")
        if axis == batches[0].axis:
            return self._mix(op, "joins along the batch axis")
        return self._together(op, tensors, states, batches)

    def _together(self, op, tensors, states, batches):
        a = batches[0].axis
        for t, s in zip(tensors, states, strict=True):
            ok = isinstance(s, Batch) or (isinstance(s, Public) and self._row_free(t, s, a - t.shape.rank))
            if not ok:
                return self._mix(op, BY_POSITION)
        rows = {s.rows for s in batches} - {None}
        if len(rows) > 1:
            return self._mix(op, "combines rows of different examples")
        return Batch(a, rows.pop() if rows else None)

    def _op_pack(self, op, states):
        batches = [s for s in states if isinstance(s, Batch)]
        if not batches:
            if any(isinstance(s, Size) for s in states) and not self._deps(states):
                if op.inputs[0].shape.rank == 0:
                    return Size(tuple(e for t in op.inputs for e in self.entries(t)))
                if all(not isinstance(s, Size) or s.batch_free for s in states):
                    return Public()
            return None
        if len({s.axis for s in batches}) > 1:
            return self._mix(op, "joins tensors with different batch axes")
        state = self._together(op, op.inputs, states, batches)
        if isinstance(state, Mixed):
            return state
        axis = op.get_attr("axis") % op.outputs[0].shape.rank
        return Batch(state.axis + (axis <= state.axis), state.rows)

    def _op_unpack(self, op, states):
        state, x = states[0], op.inputs[0]
        if isinstance(state, Size):
            return [Size((e,)) for e in state.entries] if len(state.entries) == len(op.outputs) else None
        if not isinstance(state, Batch):
            return None
        axis = op.get_attr("axis") % x.shape.rank
        if axis == state.axis:
            return self._mix(op, "takes the batch apart")
        return Batch(state.axis - (axis < state.axis), state.rows)

    def _split(self, op, data, axis_input, states):
        state = states[data]
        if isinstance(state, Size) and op.type == "SplitV" and op.inputs[0].shape.rank == 1:
            lengths = constant(op.inputs[1])
            if lengths is not None and -1 not in lengths and sum(lengths) == len(state.entries):
                ends = np.cumsum(lengths)
                return [Size(state.entries[e - n : e]) for e, n in zip(ends, lengths, strict=True)]
        if not isinstance(state, Batch):
            return None
        axis = constant(op.inputs[axis_input])
        if axis is None or int(np.ravel(axis)[0]) % op.inputs[data].shape.rank == state.axis:
            return self._mix(op, "takes the batch apart")
        return state

    def _op_split(self, op, states):
        return self._split(op, 1, 0, states)

    def _op_splitv(self, op, states):
        return self._split(op, 0, 2, states)

    def _op_stridedslice(self, op, states):
        state, x = states[0], op.inputs[0]
        begin, end, strides = (constant(t) for t in op.inputs[1:4])
        masks = {m: op.get_attr(m) for m in (
            "begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")}  # fmt: skip
        if isinstance(state, Size):
            if any(not isinstance(s, Public | Size) for s in states[1:]):
                return self._mix(op, "has settings that depend on examples")
            plain = x.shape.rank == 1 and len(state.entries) == x.shape[0] and not (
                masks["new_axis_mask"] or masks["ellipsis_mask"])  # fmt: skip
            if begin is None or end is None or strides is None or not plain:
                return Size(tuple([UNKNOWN] * (op.outputs[0].shape.num_elements() or 1)))
            if masks["shrink_axis_mask"] & 1:
                return Size((state.entries[int(begin[0])],))
            lo = None if masks["begin_mask"] & 1 else int(begin[0])
            hi = None if masks["end_mask"] & 1 else int(end[0])
            return Size(state.entries[lo : hi : int(strides[0])])
        if isinstance(state, Public):
            if all(map(is_batch_free, states[1:])):
                return Public(self._deps(states), state.alike)
            return self._mix(op, "slices by the batch size")
        if not isinstance(state, Batch):
            return None
        n = op.inputs[1].shape.num_elements()
        if n is None:
            return self._mix(op, "slices in a way that is not known beforehand")
        ends = self.entries(op.inputs[2])
        if len(ends) != n:
            return self._mix(op, "slices in a way that is not known beforehand")
        in_axis = out_axis = 0
        consumed = sum(1 for i in range(n) if not (masks["new_axis_mask"] >> i) & 1
                       and not (masks["ellipsis_mask"] >> i) & 1)  # fmt: skip
        found = None
        for i in range(n):
            bit = 1 << i
            if masks["ellipsis_mask"] & bit:
                span = x.shape.rank - consumed
                if in_axis <= state.axis < in_axis + span:
                    found = out_axis + state.axis - in_axis
                in_axis, out_axis = in_axis + span, out_axis + span
            elif masks["new_axis_mask"] & bit:
                out_axis += 1
            else:
                if in_axis != state.axis and ends[i][1] != 0 and not masks["end_mask"] & bit:
                    return self._mix(op, "makes an example's result depend on the batch size")
                if in_axis == state.axis:
                    whole = self._whole(i, x, state, masks, begin, ends[i], strides)
                    if masks["shrink_axis_mask"] & bit or not whole:
                        return self._mix(op, "takes some examples of the batch, not all")
                    found = out_axis
                out_axis += 0 if masks["shrink_axis_mask"] & bit else 1
                in_axis += 1
        if found is None:
            found = out_axis + state.axis - in_axis
        return Batch(found, state.rows)

    @staticmethod
    def _whole(i, x, state, masks, begin, end, strides) -> bool:
        bit = 1 << i
        if strides is None or strides[i] != 1:
            return False
        starts = bool(masks["begin_mask"] & bit) or (begin is not None and begin[i] == 0)
        length, (number, power) = x.shape[state.axis], end
        ends = bool(masks["end_mask"] & bit) or (state.rows is not None and end == (state.rows, 1)) or (
            power == 0 and None not in (length, number) and number >= length)  # fmt: skip
        return starts and ends

    def _op_slice(self, op, states):
        state, x = states[0], op.inputs[0]
        begins, entries = self.entries(op.inputs[1]), self.entries(op.inputs[2])
        if isinstance(state, Size) and x.shape.rank == 1 and len(state.entries) == x.shape[0]:
            ((begin, at), (length, power)) = begins[0], entries[0]
            if at == power == 0 and None not in (begin, length):
                return Size(state.entries[begin : None if length < 0 else begin + length])
        if not isinstance(state, Batch):
            return None
        whole = {(-1, 0), (x.shape[state.axis] or -1, 0), (state.rows or -1, 1)}
        known = len(begins) == len(entries) == x.shape.rank
        if not known or begins[state.axis] != (0, 0) or entries[state.axis] not in whole:
            return self._mix(op, "takes some examples of the batch, not all")
        return self._even(op, entries, state.axis) or state

    def _even(self, op, entries, axis) -> Mixed | None:
        """Refuses lengths that vary with the batch size, along other axes than the batch's."""
        if any(p != 0 for i, (_, p) in enumerate(entries) if i != axis):
            return self._mix(op, "makes an example's result depend on the batch size")
        return None

    def _op_tile(self, op, states):
        entries = self.entries(op.inputs[1])
        state = states[0]
        if isinstance(state, Batch):
            if len(entries) != op.inputs[0].shape.rank or entries[state.axis] != (1, 0):
                return self._mix(op, "repeats the batch")
            return self._even(op, entries, state.axis) or state
        if isinstance(state, Public) and any(p for _, p in entries):
            return self._rows_of(op, op.inputs[0], entries)
        return self._copies(op, state)

    def _rows_of(self, op, x, entries):
        """Public values laid out along new batch axes: every row must be the same."""
        filled = self._shaped(op, entries)
        if isinstance(filled, Batch):
            at = filled.axis - len(entries)
            if x.shape.rank is not None and (x.shape.rank < -at or x.shape[at] == 1):
                return filled
            return self._mix(op, BY_POSITION)
        return filled

    def _op_broadcastto(self, op, states):
        state = states[0]
        entries = self.entries(op.inputs[1])
        if isinstance(state, Batch):
            rank = op.outputs[0].shape.rank
            if rank is None:
                return self._mix(op, "has a shape of unknown rank")
            axis = state.axis + rank - op.inputs[0].shape.rank
            if len(entries) != rank:
                return self._mix(op, "has a shape that is not known beforehand")
            return self._even(op, entries, axis) or Batch(axis, state.rows)
        if isinstance(state, Public) and any(p != 0 for _, p in entries):
            return self._rows_of(op, op.inputs[0], entries)
        return self._copies(op, state)

    def _copies(self, op, state) -> Batch | None:
        """A copy of a weight for each example of a batch of static size, in an axis that the weight has not."""
        x, out = op.inputs[0].shape, op.outputs[0].shape
        if not (isinstance(state, Public) and state.deps) or None in (x.rank, out.rank):
            return None
        at = next((i for i, length in enumerate(out) if length != 1), None)
        if at is None or not self._is_static_batch(op.outputs[0], at):
            return None
        if at and any(c.type != "Reshape" or c.outputs[0].shape[:1] != [out[at]] for c in op.outputs[0].consumers()):
            return None  # unless it is on its way to the first axis, as of tf.repeat
        return Batch(at) if x.rank < out.rank - at or x[at - out.rank] == 1 else None

    def _op_fill(self, op, states):
        if isinstance(states[1], Public) and not states[1].deps:
            if op.inputs[0].shape.rank == 1 and op.outputs[0].shape.rank is None:
                return self._mix(op, "has a shape of unknown rank")
            return self._shaped(op, self.entries(op.inputs[0])) if op.outputs[0].shape.rank else Public()
        return None

    def _op_range(self, op, states):
        if any(isinstance(s, Size) and not s.batch_free for s in states):
            return self._mix(op, "numbers the examples by their position in the batch")
        return None

    def _op_onehot(self, op, states):
        state = states[0]
        if not isinstance(state, Batch):
            return None
        axis = op.get_attr("axis")
        axis = axis if axis >= 0 else op.inputs[0].shape.rank
        return Batch(state.axis + (axis <= state.axis), state.rows)

    def _op_lookuptablefindv2(self, op, states):
        table, keys, default = self._handle(op.inputs[0]), states[1], states[2]
        if not isinstance(table, Handle):
            return None
        if table in self._tainted:
            return self._mix(op, TAINTED)
        self.reads.append((table, op))
        if isinstance(keys, Public) and isinstance(default, Public):
            return Public(default.deps)
        if not isinstance(keys, Batch):
            return None
        key, value, out = op.inputs[1].shape.rank, op.inputs[2].shape.rank, op.outputs[0].shape.rank
        shared = value == 0 or (None not in (key, value, out) and key + value == out)  # one default for all keys
        if not isinstance(default, Public) or default.deps or not shared:
            return self._mix(op, "has settings that depend on examples")
        return keys

    def _op_ensureshape(self, op, states):
        return states[0] if isinstance(states[0], Batch) else self._elementwise(op, states)  # of unknown rank, too

    def _op_densebincount(self, op, states):
        """Counts row by row, where the values have two axes."""
        values, size, weights = states
        if not isinstance(values, Batch):
            return None
        if values.axis != 0 or op.inputs[0].shape.rank != 2:
            return self._mix(op, "counts over the batch")
        alike = weights == values or (isinstance(weights, Public) and op.inputs[2].shape.num_elements() == 0)
        if not isinstance(size, Public) or not alike:
            return self._mix(op, "has settings that depend on examples")
        return values

    def _op_pad(self, op, states):
        if not isinstance(states[0], Batch):
            return None
        paddings = constant(op.inputs[1])
        if paddings is None or np.any(paddings[states[0].axis] != 0):
            return self._mix(op, "pads the batch")
        return states[0]

    _op_padv2 = _op_mirrorpad = _op_pad

    def _op_matrixsolve(self, op, states):
        batches = [s for s in states if isinstance(s, Batch)]
        if not batches:
            return None
        if len({s.axis for s in batches}) > 1 or len({t.shape.rank for t in op.inputs} - {None}) != 1:
            return self._mix(op, "combines the examples along one axis with the examples along another")
        if batches[0].axis >= op.inputs[0].shape.rank - 2:
            return self._mix(op, "works along the batch axis")
        return self._together(op, op.inputs, states, batches)

    _op_matrixtriangularsolve = _op_matrixsolve

    def _op_rngreadandskip(self, op, states):
        """A generator's state; how far it then moves follows the number of draws, which tells nothing of them."""
        if isinstance(states[2], Batch | Items):
            return self._mix(op, "has settings that depend on examples")
        return self._held(op)

    def _op_imageprojectivetransformv3(self, op, states):
        images, transforms, *settings = states
        if not isinstance(images, Batch):
            return None
        if not all(map(is_batch_free, settings)):
            return self._mix(op, "has settings that depend on examples")
        own = transforms == images or (
            isinstance(transforms, Public) and self._row_free(op.inputs[1], transforms, -2))  # fmt: skip
        return images if own else self._mix(op, BY_POSITION)

    def _op_spacetobatchnd(self, op, states):
        block = constant(op.inputs[1])
        if not isinstance(states[0], Batch):
            return None
        if states[0].axis or block is None:
            return self._mix(op, "does not have the batch as its first axis")
        return Batch(0, states[0].rows, int(np.prod(block)))

    def _op_batchtospacend(self, op, states):
        block = constant(op.inputs[1])
        if not isinstance(states[0], Batch):
            return None
        if states[0].axis or block is None or int(np.prod(block)) != states[0].blocks:
            return self._mix(op, "takes the batch apart")
        return Batch(0, states[0].rows)

    def _op_matrixbandpart(self, op, states):
        if isinstance(states[0], Batch) and states[0].axis >= op.inputs[0].shape.rank - 2:
            return self._mix(op, "works along the batch axis")
        return states[0] if isinstance(states[0], Batch) else None

    def _op_matrixdiagv3(self, op, states):
        state, of = states[0], constant(op.inputs[1])
        if not isinstance(state, Batch):
            return None
        if state.axis >= op.inputs[0].shape.rank - (1 if of is not None and of.size == 1 else 2):  # one diagonal
            return self._mix(op, "works along the batch axis")
        return state

    def _op_randomshuffle(self, op, states):
        state = states[0]
        return self._mix(op, "picks examples of the batch") if isinstance(state, Batch) and state.axis == 0 else None

    def _op_biasadd(self, op, states):
        x, b = states
        if isinstance(x, Batch) and isinstance(b, Public):
            channel = 1 if op.get_attr("data_format") in (b"NCHW", "NCHW") else op.inputs[0].shape.rank - 1
            if x.axis == channel:
                return self._mix(op, BY_POSITION)
            return x
        return None

    def _adds_only_row(self, op, states) -> bool:
        """Whether Keras 3 took the only example's row for a bias, for being [1, channels]."""
        row = op.inputs[1].op
        return 1 in self._batch_sizes() and row.type == "Squeeze" and isinstance(self[row.inputs[0]], Batch) and (
            isinstance(states[0], Batch) and states[0].axis == 0)  # fmt: skip

    def _rowwise(self, op, states):
        """Works row by row on as many inputs as there are states, with the examples along their first axis."""
        batches = [s for s in states if isinstance(s, Batch)]
        if any(s.axis for s in batches):
            return self._mix(op, "does not have the batch as its first axis")
        return self._together(op, op.inputs[: len(states)], states, batches) if batches else None

    _op_softmaxcrossentropywithlogits = _op_sparsesoftmaxcrossentropywithlogits = _rowwise

    def _op_intopkv2(self, op, states):
        *rows, k = states
        if not is_batch_free(k):
            return self._mix(op, "has settings that depend on examples or on how many there are")
        return self._rowwise(op, rows)

    def _op_gatherv2(self, op, states):
        axis = constant(op.inputs[2])
        if axis is None:
            return None
        return self._gather(op, states[0], states[1], int(axis), op.get_attr("batch_dims"))

    def _gather(self, op, params, indices, axis, batch_dims):
        p, i = op.inputs[0], op.inputs[1]
        if isinstance(params, Size):
            value = constant(i)
            if not isinstance(indices, Public | Size):
                return self._mix(op, "has settings that depend on examples")
            if value is None or p.shape.rank != 1 or len(params.entries) != p.shape[0]:
                return Size(tuple([UNKNOWN] * (op.outputs[0].shape.num_elements() or 1)))
            return Size(tuple(params.entries[int(v)] for v in np.ravel(value)))
        if isinstance(params, Mixed | Items) or isinstance(indices, Mixed | Items):
            return next((s for s in (params, indices) if isinstance(s, Mixed)), None)
        if isinstance(params, Public) and isinstance(indices, Public):
            of_batch = params.deps and axis == batch_dims == 0 and (i.shape.rank or 0) > 1 and self._is_static_batch(i)
            if of_batch and self._row_free(i, indices, -i.shape.rank):
                return Batch(0)  # positions' embeddings, for each example of a batch of static size
            return Public(params.deps | indices.deps)
        if isinstance(indices, Size) and not indices.batch_free:
            return self._mix(op, "makes an example's result depend on the batch size")
        if i.shape.rank is None:
            return self._mix(op, "has a shape of unknown rank")
        batch_dims = batch_dims % (i.shape.rank + 1) if batch_dims < 0 else batch_dims
        if isinstance(params, Batch):
            axis = axis % p.shape.rank
            if params.axis == axis:
                return self._mix(op, "picks examples of the batch")
            if params.axis < batch_dims:
                if isinstance(indices, Batch) and indices.axis != params.axis:
                    return self._mix(op, "picks examples of the batch")
                if isinstance(indices, Public):
                    return self._mix(op, BY_POSITION)
                return Batch(params.axis, params.rows)
            if isinstance(indices, Batch):
                return self._mix(op, "lets examples pick from one another")
            shift = i.shape.rank - batch_dims - 1 if params.axis > axis else 0
            return Batch(params.axis + shift, params.rows)
        if isinstance(indices, Batch) and isinstance(params, Public):
            if axis < 0 and p.shape.rank is None:
                return self._mix(op, "has a shape of unknown rank")
            axis = axis if axis >= 0 else axis % p.shape.rank
            if indices.axis < batch_dims:
                return self._mix(op, BY_POSITION)
            return Batch(axis + indices.axis - batch_dims, indices.rows)
        return None

    def _op_fusedbatchnormv3(self, op, states):
        x = op.inputs[0]
        if not any(isinstance(s, Batch) for s in states):
            return None
        form = op.get_attr("data_format")
        channel = 1 if (form if isinstance(form, str) else form.decode()) in ("NCHW", "NCDHW") else x.shape.rank - 1
        training = op.get_attr("is_training")
        if isinstance(states[0], Batch) and states[0].axis == channel:
            # Keras 2 normalises layers with the rows as channels: each row has its own mean and variance.
            for t, s in zip(op.inputs[1:], states[1:], strict=True):
                empty = t.shape.num_elements() == 0
                if not (empty or s == Batch(0, s.rows if isinstance(s, Batch) else 0)
                        or (isinstance(s, Public) and self._row_free(t, s, -1))):  # fmt: skip
                    return self._mix(op, "normalises examples together")
            return [states[0], *[Batch(0, states[0].rows)] * 4, Public()]
        if training:
            return self._mix(op, "normalises over the batch")
        if states[0] == Batch(0, getattr(states[0], "rows", 0)) and all(isinstance(s, Public) for s in states[1:]):
            return [states[0], *[Public(self._deps(states))] * 5]
        return self._mix(op, "normalises examples together")

    def _op_reversesequence(self, op, states):
        batches = [s for s in states if isinstance(s, Batch)]
        if not batches:
            return None
        if isinstance(states[0], Batch) and states[0].axis == op.get_attr("batch_dim") and isinstance(states[1], Batch):
            return states[0]
        return self._mix(op, "works along the batch axis")

    # -- control flow, lists and calls -----------------------------------------------------------------------

    def bodies(self, op: tf.Operation) -> Iterable[tuple[BatchAxis, tf.Graph]]:
        """What a call, a branch or a loop runs, with the states that it is given."""
        states = self._over_turns(op) if op.type.endswith("While") else [self[t] for t in op.inputs]
        skip = 1 if op.type.endswith("If") else 0
        for attribute in BODIES[op.type]:
            inner, _, graph = self.body(op, attribute, list(op.inputs[skip:]), states[skip:])
            yield inner, graph

    def _over_turns(self, op: tf.Operation) -> list[State]:
        """What a loop hands from turn to turn."""
        before = [self[t] for t in op.inputs]
        if op.name in self.ops and any(key(t) not in self.states for t in op.outputs):  # one that `Opened` made
            return before
        return [s if isinstance(s, Handle) else self[t] for s, t in zip(before, op.outputs, strict=True)]

    def body(self, op, attribute, inputs, states) -> tuple[BatchAxis, list[State], tf.Graph]:
        graph = function_graph(op.graph, op.get_attr(attribute).name, inputs)
        given = {t.op.name: s for t, s in zip(graph.inputs, states, strict=True)}
        inner = BatchAxis(graph, lambda t: given.get(t.op.name))
        inner.static, inner.vouched, inner._tainted = self._batch_sizes(), self.vouched, self._tainted
        inner.run([*graph.inputs, *graph.outputs])
        self.reads += inner.reads
        if inner.checks:  # a length inside a body cannot be checked from outside
            bad = inner.checks[0][0].op
            return inner, [self._mix(op, f"has a {bad.type} that is not known to keep examples apart")] * len(
                graph.outputs), graph  # fmt: skip
        return inner, [inner[t] for t in graph.outputs], graph

    def _call(self, op, states):
        inner, outputs, _ = self.body(op, "f", list(op.inputs), states)
        return outputs

    def _op_if(self, op, states):
        chosen = states[0]
        if not isinstance(chosen, Public | Size):
            return self._mix(op, "takes a branch by data")
        if isinstance(chosen, Size) and not chosen.batch_free:
            return self._mix(op, "takes a branch by the batch size")
        branches = [
            self.body(op, attribute, list(op.inputs[1:]), states[1:])[1]
            for attribute in ("then_branch", "else_branch")
        ]
        return [self._join(op, t, a, b) for t, a, b in zip(op.outputs, *branches, strict=True)]

    _op_statelessif = _op_if

    def _join(self, op, t, a: State, b: State) -> State:
        """The state of a value that is one of two."""
        for s in (a, b):
            if isinstance(s, Mixed):
                return s
        if a == b:
            return a
        if isinstance(a, Public) and isinstance(b, Public):
            return Public(a.deps | b.deps, a.alike and b.alike)
        pair = {type(a), type(b)}
        if pair == {Size, Public}:
            size = a if isinstance(a, Size) else b
            return (
                Public(self._deps((a, b)))
                if size.batch_free
                else self._mix(op, "makes the result depend on the batch size")
            )
        if pair == {Size}:
            if a.batch_free and b.batch_free:
                return Size(tuple((None, 0) for _ in a.entries)) if len(a.entries) == len(b.entries) else Public()
            return self._mix(op, "makes the result depend on the batch size")
        if pair == {Batch, Public}:
            batch, public = (a, b) if isinstance(a, Batch) else (b, a)
            rank = t.shape.rank
            if rank is not None and not public.deps and (public.alike or t.shape[batch.axis] == 1):
                return batch
            return self._mix(op, BY_POSITION)
        if pair == {Batch} and a.axis == b.axis and a.blocks == b.blocks:
            return Batch(a.axis, a.rows if a.rows == b.rows else None, a.blocks)
        if pair == {Items}:
            if self._blank(a.element) and isinstance(b.element, Batch):
                return b
            if self._blank(b.element) and isinstance(a.element, Batch):
                return a
            if isinstance(a.element, Public) and isinstance(b.element, Public):
                return Items(Public(a.element.deps | b.element.deps, a.element.alike and b.element.alike))
        return self._mix(op, "holds now one, now another kind of value")

    @staticmethod
    def _blank(element: State) -> bool:
        """An element of a list that nothing of consequence was put into."""
        return isinstance(element, Public) and element.alike and not element.deps

    def _op_while(self, op, states):
        states = list(states)
        inputs = list(op.inputs)
        for i, (t, s) in enumerate(zip(inputs, states, strict=True)):
            if isinstance(s, Public) and not s.alike and not s.deps:
                value = constant(t)
                if value is not None and value.size and np.all(value == value.flat[0]):
                    states[i] = Public(alike=True)
                elif t.shape.rank and self._is_static_batch(t) and self._row_free(t, s, -t.shape.rank):
                    states[i] = Batch(0)
        for _ in range(2 * len(states) + 2):
            _, out, _ = self.body(op, "body", inputs, states)
            joined = [self._join(op, t, s, o) for t, s, o in zip(inputs, states, out, strict=True)]
            for s in joined:
                if isinstance(s, Mixed):
                    return [s] * len(op.outputs)
            if joined == states:
                break
            states = joined
        else:
            return self._mix(op, "is not known to keep examples apart")
        _, (condition,), _ = self.body(op, "cond", inputs, states)
        if not is_batch_free(condition):
            return [self._mix(op, "runs for as many turns as the data says")] * len(op.outputs)
        return states

    _op_statelesswhile = _op_while

    def _op_tensorlistfromtensor(self, op, states):
        state = states[0]
        if isinstance(state, Public):
            return Items(Public(state.deps, state.alike))
        if isinstance(state, Batch):
            return Items(Batch(state.axis - 1, state.rows)) if state.axis else self._mix(op, "takes the batch apart")
        return None

    def _op_tensorlistreserve(self, op, states):
        if not is_batch_free(states[1]):
            return self._mix(op, "makes a list whose length depends on examples or on how many there are")
        return Items(Public(alike=True))

    _op_emptytensorlist = _op_tensorlistreserve

    def _op_tensorlistsetitem(self, op, states):
        return self._put(op, states[0], states[2], states[1])

    def _op_tensorlistpushback(self, op, states):
        return self._put(op, states[0], states[1], Public())

    def _put(self, op, items, value, index):
        if not isinstance(items, Items) or not is_batch_free(index):
            return None
        if isinstance(value, Size):
            return None
        if isinstance(items.element, Public) and isinstance(value, Public | Batch):
            if isinstance(value, Public):
                return Items(Public(items.element.deps | value.deps, items.element.alike and value.alike))
            return Items(value) if self._blank(items.element) else self._mix(op, "lists values of different kinds")
        if isinstance(value, Batch) and value == items.element:
            return items
        return self._mix(op, "lists tensors with different batch axes")

    def _op_tensorlistgetitem(self, op, states):
        if isinstance(states[0], Items) and isinstance(states[1], Public | Size):
            return states[0].element
        return None

    def _op_tensorlistpopback(self, op, states):
        return [states[0], states[0].element] if isinstance(states[0], Items) else None

    def _op_tensorliststack(self, op, states):
        if not isinstance(states[0], Items):
            return None
        element = states[0].element
        # Elements that are alike within themselves may differ from one another.
        return Batch(element.axis + 1, element.rows) if isinstance(element, Batch) else Public(element.deps)

    def _op_tensorlistlength(self, op, states):
        return Public()
