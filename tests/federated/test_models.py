"""What a user calls a model or an optimizer is trained as said, or refused before anything runs."""

import numpy as np
import pytest
import tensorflow as tf
from tff_cases import CLASSES, FEATURES, KERAS, SGD, build, model_fn, tff, weights_after

from tfdpfl import AdaptiveClip, PrivacyError
from tfdpfl.federated import build_dp_fed_avg, models

pytestmark = pytest.mark.usefixtures("runtime")


@pytest.mark.parametrize(
    ("name", "kind", "kept"), [("sgd", "sgd", 0), ("momentum", "sgd", 1), ("adam", "adam", 2), ("yogi", "yogi", 2)]
)
def test_a_name_makes_the_optimizer_that_it_names(name, kind, kept):
    made = models.optimizer("server_optimizer_fn", name, models.SERVER_RATES)
    state = made.initialize(tf.TensorSpec([FEATURES], tf.float32))
    assert kind in type(made).__name__.lower()
    assert sum(np.shape(value) == (FEATURES,) for value in tf.nest.flatten(state)) == kept


@pytest.mark.slow
@pytest.mark.parametrize("server", ["yogi", tff.learning.optimizers.build_adagrad(0.1)])
def test_server_optimizers_by_name_or_by_object(server):
    assert np.isfinite(
        weights_after(build(build_dp_fed_avg, l2_norm_clip=1.0, server_optimizer_fn=server), rounds=2)
    ).all()


def with_batch_norm():
    return tf.keras.Sequential([
        tf.keras.layers.InputLayer((FEATURES,)), tf.keras.Sequential([tf.keras.layers.BatchNormalization()]),
        tf.keras.layers.Dense(CLASSES),
    ])  # fmt: skip


def compiled():
    model = model_fn()
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"model_fn": with_batch_norm}, PrivacyError, "BatchNormalization.*GroupNormalization"),
        ({"model_fn": compiled}, ValueError, "compiled Keras model"),
        ({"model_fn": lambda model=model_fn(): model}, ValueError, "same model twice"),  # noqa: B008
        ({"model_fn": model_fn()}, TypeError, "Sequential. Wrap its construction"),
        ({"model_fn": lambda: 3}, TypeError, "returned int"),
        ({"model_fn": 3}, TypeError, "function that makes a model"),
        ({"loss": "mse"}, TypeError, "an object, no name"),
        ({"loss": None}, ValueError, "give its loss and input_spec"),
        ({"input_spec": tf.TensorSpec([None, FEATURES])}, TypeError, "input_spec must be .* must have labels"),
        ({"client_weighting": tff.learning.ClientWeighting.NUM_EXAMPLES}, PrivacyError, "every client counts alike"),
        ({"model_aggregator": tff.aggregators.MeanFactory()}, PrivacyError, "replace the clip"),
        ({"metrics_aggregator": tff.learning.metrics.sum_then_finalize}, PrivacyError, "NoisedMetrics"),
        ({"metrics": True}, PrivacyError, "NoisedMetrics"),
        ({"clients_per_round": 0}, ValueError, "clients_per_round"),
        ({"clients_per_round": "many"}, ValueError, "clients_per_round"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": float("nan")}, ValueError, "noise_multiplier"),
        ({"l2_norm_clip": 0.0}, ValueError, "l2_norm_clip"),
        ({"l2_norm_clip": AdaptiveClip(clipped_count_stddev=0.1)}, ValueError, "clipped_count_stddev=0.1"),
        ({"client_optimizer_fn": tf.keras.optimizers.SGD(0.1)}, TypeError, "TFF optimizer"),
        ({"client_optimizer_fn": "lamb"}, ValueError, "'yogi'"),
        ({"proximal_strength": -1.0}, ValueError, "proximal_strength"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(wrong, error, message):
    settings = {
        "clients_per_round": 3,
        "noise_multiplier": 1.0,
        "l2_norm_clip": 1.0,
        "client_optimizer_fn": SGD,
        **KERAS,
    }
    settings.update(wrong)
    with pytest.raises(error, match=message):
        build_dp_fed_avg(settings.pop("model_fn", model_fn), **settings)
