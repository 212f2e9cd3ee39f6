"""How well a released model serves each client once that client has trained it further on its own data."""

from __future__ import annotations

import tensorflow as tf

from tfdpfl._names import accept_old_names
from tfdpfl._types import Arrays, Dataset
from tfdpfl.accounting import _checks
from tfdpfl.federated import models
from tfdpfl.federated._tff import tff
from tfdpfl.federated.models import Loss, MetricsFn, ModelFn, Optimizer, Spec
from tfdpfl.federated.training import clients_of

__all__ = ["evaluate_personalized"]


@accept_old_names(epochs="num_epochs")
def evaluate_personalized(
    model_fn: ModelFn,
    weights: tff.learning.models.ModelWeights,
    client_data: Dataset,
    test_data: Arrays,
    *,
    client_optimizer_fn: Optimizer,
    num_epochs: int = 1,
    loss: Loss | None = None,
    input_spec: Spec | None = None,
    metrics_fn: MetricsFn | None = None,
) -> dict[str, dict[str, dict[str, float]]]:
    """Each client's metrics on its test data, before and after it has trained the model on its own data.

    A model trained by a client for itself, and never released, costs no privacy, whoever trained the one that it
    started from. **The figures returned are each one client's own and have no noise: they are not private.** They show
    a researcher how a simulation went; a real client keeps its own.

    Args:
      model_fn, loss, input_spec, metrics_fn: as for `tfdpfl.federated.build_dp_fed_avg`; no functional model.
      weights: of the released model: ``process.get_model_weights(state)``.
      client_data: what clients train on, in batches: the same kinds as for `tfdpfl.federated.train`.
      test_data: what they are measured on, for each of those clients.
      client_optimizer_fn: as for `tfdpfl.federated.build_dp_fed_avg`.
      num_epochs: passes over a client's training data.

    Returns:
      By client, the metrics ``"before"`` and ``"after"``, each a dict by name, ``"loss"`` among them.

    Raises:
      ValueError: a client has no test data, ``weights`` are of another model; other bad arguments.
    """
    num_epochs = _checks.whole("num_epochs", num_epochs, 1, "count the passes over a client's training data")
    improve = models.optimizer("client_optimizer_fn", client_optimizer_fn, models.CLIENT_RATES)
    model = models.variable_model_fn(model_fn, loss, input_spec, metrics_fn)()
    own = tff.learning.models.ModelWeights.from_model(model)
    variables, values = _leaves(own), _leaves(weights)
    if [v.shape for v in variables] != [v.shape for v in values]:
        raise ValueError("weights are not those of model_fn's model. Give process.get_model_weights(state).")
    trained_on, tested_on = clients_of(client_data)[0], clients_of(test_data, "test_data")[0]

    @tf.function
    def step(state, batch):
        with tf.GradientTape() as tape:
            batch_loss = model.forward_pass(batch, training=True).loss
        gradients = tape.gradient(batch_loss, own.trainable, unconnected_gradients="zero")
        return models.step(improve, state, own.trainable, gradients)

    @tf.function
    def look(batch):
        return model.forward_pass(batch, training=False).num_examples

    def measured(client: str) -> dict[str, float]:
        model.reset_metrics()
        if not sum(int(look(batch)) for batch in tested_on.get(client, tuple)()):
            raise ValueError(f"Client {client!r} has no examples in test_data. Leave it out of client_data.")
        values = model.report_local_unfinalized_metrics()
        # TFF's finalizers are functions that make variables, which may be called but once.
        eager = {name: getattr(f, "python_function", f) for name, f in model.metric_finalizers().items()}
        return {name: float(finalize(values[name])) for name, finalize in eager.items()}

    found = {}
    for client, dataset in trained_on.items():
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)
        before = measured(client)
        state = tf.nest.map_structure(tf.convert_to_tensor, models.begin(improve, own.trainable))
        for _ in range(num_epochs):
            for batch in dataset():
                state = step(state, batch)
        found[client] = {"before": before, "after": measured(client)}
    return found


def _leaves(weights: tff.learning.models.ModelWeights) -> list:
    return [*weights.trainable, *weights.non_trainable]
