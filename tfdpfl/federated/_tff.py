"""The one module that knows TensorFlow Federated's private corners: import it from here, and nothing below `tff.`."""

from __future__ import annotations

import collections
import contextlib
import importlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfdpfl._types import Arrays, Computation, Dataset, Keywords, Model, Nest, Optimizer

VERSION = "0.87"
# The extra brings what TFF needs, without TFF: a resolver refuses TFF itself, which asks for a jaxlib of no index.
_INSTALL = f"pip install 'tfdpfl[federated]' && pip install --no-deps tensorflow-federated=={VERSION}.0"

try:
    import tensorflow_federated as tff
except ImportError as error:
    raise ImportError(
        f"tfdpfl.federated's processes run on TensorFlow Federated {VERSION}, which cannot be imported ({error}). On "
        f"Python 3.10 or 3.11, install it: {_INSTALL}"
    ) from error
if not tff.__version__.startswith(f"{VERSION}."):
    raise ImportError(
        f"tfdpfl.federated is written for TensorFlow Federated {VERSION}, but {tff.__version__} is installed. Install "
        f"the one that it knows: {_INSTALL}"
    )

import grpc  # noqa: E402  (TFF brings it)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
import tensorflow_privacy as tfp  # noqa: E402  (the DP queries that TFF's aggregators are made of)

__all__ = [
    "DistributedSkellam",
    "channel",
    "client_element",
    "client_work_of",
    "compose",
    "context_on_many",
    "context_on_one",
    "default_context",
    "executor_factory",
    "guarded",
    "installed",
    "keras_model_inside",
    "leaves_a_worker",
    "loss_of",
    "set_default_context",
    "tensor_specs",
    "tff",
    "tfp",
    "worker_binary",
]

_PRIVATE = "tensorflow_federated.python"
_MAX_MESSAGE = 2 * 1000 * 1000 * 1000
_CHANNEL_OPTIONS = [
    ("grpc.max_message_length", _MAX_MESSAGE),
    ("grpc.max_receive_message_length", _MAX_MESSAGE),
    ("grpc.max_send_message_length", _MAX_MESSAGE),
    # A channel for each worker, so that a lost one does not linger in a shared pool of connections.
    ("grpc.use_local_subchannel_pool", 1),
]


def _private(path: str) -> Computation:
    return importlib.import_module(f"{_PRIVATE}.{path}")


# -- where computations run -------------------------------------------------------------------------------------------


def worker_binary() -> str:
    """The path of the server that comes with TFF and executes computations."""
    return os.path.join(os.path.dirname(tff.__file__), "data", "worker_binary")


def channel(target: str) -> grpc.Channel:
    """A connection to a worker, "host:port"."""
    return grpc.insecure_channel(target, _CHANNEL_OPTIONS)


def executor_factory(connect: Callable[[], grpc.Channel]) -> Computation:
    """Makes executors on the worker behind ``connect()``, which is called for every new one."""
    remote = _private("core.impl.executors.remote_executor")
    stubs = _private("core.impl.executors.remote_executor_grpc_stub")
    stacks = _private("core.impl.executor_stacks.python_executor_stacks")
    stub_of: dict[int, tuple[grpc.Channel, Any]] = {}

    def make(cardinalities):
        cardinalities.setdefault(tff.CLIENTS, 0)
        connection = connect()
        if id(connection) not in stub_of:
            stub_of.clear()
            stub_of[id(connection)] = connection, stubs.RemoteExecutorGrpcStub(connection)
        executor = remote.RemoteExecutor(stub_of[id(connection)][1])
        executor.set_cardinalities(cardinalities)
        return executor

    return stacks.ResourceManagingExecutorFactory(make)


def _transforms() -> Keywords:
    computation = _private("core.environments.tensorflow_frontend.tensorflow_computation")
    return {"transform_args": computation.transform_args, "transform_result": computation.transform_result}


def _without_secrecy(computation: Computation) -> Computation:
    """For TFF's runtimes, which know no secure sums: they become plain sums in a simulation."""
    plain = _private("core.backends.test.compiler").replace_secure_intrinsics_with_bodies(computation)
    # With the Python containers of its result, which that loses.
    concrete = _private("core.impl.computation.computation_impl").ConcreteComputation
    return concrete.with_type(plain, computation.type_signature)


def _compiled(computation: Computation) -> Computation:
    native = _private("core.backends.native.compiler")
    return native.desugar_and_transform_to_native(_without_secrecy(computation))


def context_on_one(factory: Computation) -> Computation:
    """A context on one worker, on which `tff.program` scripts run, too."""
    sync = _private("core.impl.execution_contexts.sync_execution_context")
    context = sync.SyncExecutionContext(executor_fn=factory, compiler_fn=_compiled, **_transforms())
    return guarded(context, lambda invocation: invocation())


def context_on_many(factories: Sequence[Computation]) -> Computation:
    """An execution context that splits the clients of a round over several workers."""
    contexts = _private("core.impl.execution_contexts.async_execution_context")
    mergeable = _private("core.impl.execution_contexts.mergeable_comp_execution_context")
    split = _private("core.backends.native.mergeable_comp_compiler").compile_to_mergeable_comp_form
    return mergeable.MergeableCompExecutionContext(
        [
            contexts.AsyncExecutionContext(executor_fn=factory, compiler_fn=_compiled, **_transforms())
            for factory in factories
        ],
        compiler_fn=lambda computation: split(_without_secrecy(computation)),
    )


def guarded(context: Computation, call: Callable[[Callable[[], Computation]], Computation]) -> Computation:
    """``context`` with every invocation run as ``call(invocation)``, which may turn its errors into better ones.

    It is a `tff.program.FederatedContext` whose results are values and not references to values to come: `tff.program`
    takes either, and scripts outside a program want values.
    """

    class Guarded(tff.program.FederatedContext):  # type: ignore[name-defined]
        def invoke(self, comp, arg):
            return call(lambda: context.invoke(comp, arg))

    return Guarded()


def default_context() -> Computation:
    """The context that this thread's computations run on."""
    return _stack()._stack[0]


def set_default_context(context: Computation) -> None:
    _stack().set_default_context(context)


def leaves_a_worker(context: Computation) -> bool:
    """Whether ``context`` is TFF's local one, whose worker runs on when Python has ended."""
    stack_fn = getattr(getattr(context, "executor_factory", None), "_executor_stack_fn", None)
    return getattr(stack_fn, "__module__", "").endswith("executor_stacks.executor_factory")


@contextlib.contextmanager
def installed(context: Computation) -> Iterator[None]:
    """Makes ``context`` this thread's default, and puts back what was there."""
    before = default_context()
    set_default_context(context)
    try:
        yield
    finally:
        set_default_context(before)


def _stack() -> Any:
    return _private("core.impl.context_stack.context_stack_impl").context_stack


def keras_model_inside(model: Model) -> Computation:
    """The Keras model that a `tff.learning.models.VariableModel` was made from, or None."""
    return getattr(model, "_keras_model", None)


def loss_of(model: Model, batch: Arrays) -> Computation:
    """The loss of a batch as a `tff.learning.models.VariableModel` defines it, in the graph at hand where that can be:
    TFF puts Keras models behind function calls, and updates metrics that nobody reads."""
    keras_model = keras_model_inside(model)
    if keras_model is None or not hasattr(model, "_loss_fns"):
        return model.forward_pass(batch, training=True).loss
    x, y = (batch["x"], batch["y"]) if isinstance(batch, Mapping) else (batch[0], batch[1])
    predictions = keras_model(x, training=True)
    if len(model._loss_fns) == 1:
        losses = [model._loss_fns[0](y_true=y, y_pred=predictions)]
    else:
        parts = zip(model._loss_weights, model._loss_fns, y, predictions, strict=True)
        losses = [weight * loss(y_true=a, y_pred=b) for weight, loss, a, b in parts]
    return tf.add_n([*losses, *keras_model.losses])


def client_element(process: Computation) -> Computation:
    """The structure of `tf.TensorSpec` of a batch that a process takes from each client; None where it does not say."""
    types = _private("core.impl.types.type_conversions")
    parameter: Computation = getattr(getattr(process.next, "type_signature", None), "parameter", None)
    try:
        member = parameter[1].member
        return types.type_to_tf_tensor_specs(member.element)
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def compose(
    model_fn: Computation,
    client_work: Computation,
    aggregator: Computation,
    server_optimizer: Optimizer,
    model_distributor: Computation = None,
) -> Computation:
    """A `tff.learning.templates.LearningProcess` from its parts.

    Args:
      model_fn: makes a `tff.learning.models.VariableModel`.
      client_work: a `tff.learning.templates.ClientWorkProcess`; `client_work_of` makes one.
      aggregator: a factory, weighted or not, of the clients' updates.
      server_optimizer: a TFF optimizer.
      model_distributor: a `tff.learning.templates.DistributionProcess`; None broadcasts.
    """
    initial = tff.tensorflow.computation(lambda: tff.learning.models.ModelWeights.from_model(model_fn()))
    weights_type = initial.type_signature.result
    if isinstance(aggregator, tff.aggregators.UnweightedAggregationFactory):
        aggregator = tff.aggregators.as_weighted_aggregator(aggregator)
    return tff.learning.templates.compose_learning_process(
        initial,
        model_distributor or tff.learning.templates.build_broadcast_process(weights_type),
        client_work,
        aggregator.create(weights_type.trainable, tff.TensorType(np.float32)),
        tff.learning.templates.build_apply_optimizer_finalizer(server_optimizer, weights_type),
    )


def client_work_of(model_fn: Computation, train: Callable[[Model, list, Dataset], None]) -> Computation:
    """Work at clients that keeps no state and measures nothing.

    Args:
      model_fn: makes a `tff.learning.models.VariableModel`.
      train: called in a graph with a fresh model whose variables hold the server's weights, the variables that it
        trains, and the client's `tf.data.Dataset`. The client sends how far they moved, or zeros where that is not
        finite.
    """
    with tf.Graph().as_default():
        model = model_fn()
        data_type = tff.SequenceType(_private("core.impl.types.computation_types").tensorflow_to_type(model.input_spec))
        weights_type = _private("learning.models.model_weights").weights_type_from_model(model)
    templates, tensors = tff.learning.templates, _private("learning.tensor_utils")

    @tff.tensorflow.computation(weights_type, data_type)
    def at_client(initial, dataset):
        model = model_fn()

        @tf.function
        def run(initial, dataset):
            weights = tff.learning.models.ModelWeights.from_model(model)
            tf.nest.map_structure(lambda variable, value: variable.assign(value), weights, initial)
            train(model, list(weights.trainable), dataset)
            update = tf.nest.map_structure(tf.subtract, initial.trainable, weights.trainable)
            return tensors.zero_all_if_any_non_finite(update)

        update, bad = run(initial, dataset)
        return templates.ClientResult(update=update, update_weight=tf.cast(1 - bad, tf.float32))

    @tff.federated_computation
    def init_fn():
        return tff.federated_value((), tff.SERVER)

    # Where TFF's programs look for metrics.
    nothing = tff.tensorflow.computation(lambda: collections.OrderedDict(train=collections.OrderedDict()))

    @tff.federated_computation(
        init_fn.type_signature.result,
        tff.FederatedType(weights_type, tff.CLIENTS),
        tff.FederatedType(data_type, tff.CLIENTS),
    )
    def next_fn(state, weights, data):
        result = tff.federated_map(at_client, (weights, data))
        return tff.templates.MeasuredProcessOutput(state, result, tff.federated_eval(nothing, tff.SERVER))

    return templates.ClientWorkProcess(init_fn, next_fn)


# -- aggregation ------------------------------------------------------------------------------------------------------


def tensor_specs(value_type: Computation) -> Nest:
    """The structure of `tf.TensorSpec` of a TFF type of tensors."""
    return _private("core.impl.types.type_conversions").type_to_tf_tensor_specs(value_type)


class DistributedSkellam(tff.aggregators.UnweightedAggregationFactory):
    """Sums by modular secure aggregation: TFF's ``DistributedDpSumFactory`` with noise of one's own, without its clip.

    Updates are concatenated, rotated, rounded to a grid, and given noise. Their L2 norms must be within ``l2_clip``.

    Args:
      make_query: the noise, from an L1 bound, an L2 bound and a client's standard deviation, all on the integer grid.
      l2_clip, noise_multiplier, clients_per_round, bits: see `build_distributed_dp_fed_avg`.

    Attributes:
      bounds: what ``make_query`` was last given; known once ``create`` has run.
    """

    bounds: tuple[float, float, float]

    def __init__(self, make_query, *, l2_clip: float, noise_multiplier: float, clients_per_round: int, bits: int):
        # TFF's own constructor checks the arguments, and computes the constants below.
        self._settings = _private("aggregators.distributed_dp").DistributedDpSumFactory(
            noise_multiplier=noise_multiplier, expected_clients_per_round=clients_per_round, bits=bits, l2_clip=l2_clip
        )
        self._make_query, self._clip, self._bits = make_query, l2_clip, bits
        self._clients = clients_per_round
        self._local_stddev = noise_multiplier * l2_clip / math.sqrt(clients_per_round)

    def create(self, value_type):
        ddp, of = _private("aggregators.distributed_dp"), tff.aggregators
        rounding = _private("aggregators.discretization")
        size = sum(tf.TensorShape(spec.shape).num_elements() for spec in tf.nest.flatten(tensor_specs(value_type)))
        dimension = 1 << max(0, size - 1).bit_length()
        scale = ddp._heuristic_scale_factor(
            self._local_stddev, self._clip, self._bits, self._clients, dimension, self._settings._k_stddevs
        )
        scale = min(float(scale), ddp.MAX_SCALE_FACTOR)
        inflated = rounding.inflated_l2_norm_bound(l2_norm_bound=self._clip, gamma=1.0 / scale, beta=0.0, dim=dimension)
        # The leeway is TFF's, for float32; the bounds that are priced have it.
        l2 = (float(inflated) + 1e-5) * scale
        l1 = math.ceil(l2 * min(math.sqrt(dimension), l2))
        self.bounds = l1, l2, self._local_stddev * scale
        modular, half = _private("aggregators.modular_clipping").ModularClippingSumFactory, 1 << (self._bits - 1)
        secure = of.SecureSumFactory(upper_bound_threshold=2 * half - 1, lower_bound_threshold=0)
        secure = modular(clip_range_lower=0, clip_range_upper=2 * half, inner_agg_factory=secure)
        secure = modular(clip_range_lower=-half, clip_range_upper=half, inner_agg_factory=secure)
        noisy = of.DifferentiallyPrivateFactory(self._make_query(*self.bounds), record_aggregation_factory=secure)
        rounded = rounding.DiscretizationFactory(
            inner_agg_factory=noisy, scale_factor=scale, stochastic=True, beta=0.0, prior_norm_bound=self._clip
        )
        rotated = of.HadamardTransformFactory(inner_agg_factory=rounded)
        return of.concat_factory(inner_agg_factory=rotated).create(value_type)
