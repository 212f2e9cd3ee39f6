"""DP-SGD inside a client: what an example can move, what is paid, and what leaves when something goes wrong."""

import logging

import numpy as np
import pytest

pytest.importorskip("flwr")
from client_cases import SECRET, Clients, message, plain
from dp_accounting import dp_event
from flower_fakes import FakeGrid
from flwr.app import ArrayRecord, Context, RecordDict

import tfdpfl
from tfdpfl.flower import (
    example_dp,
)


def keras_model():
    import tensorflow as tf

    return tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])


def loss():
    import tensorflow as tf

    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data_of(context):
    rng = np.random.default_rng(context.node_id)
    n = 200 + 100 * int(context.node_config["partition-id"])
    x = rng.normal(size=(n, 4)).astype(np.float32)
    return x, np.argmax(x[:, :3], 1)


HOW = dict(l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=50, local_steps=8, delta=1e-5)


def test_example_dp_says_the_same_sentence_when_a_client_has_no_examples(caplog):
    logging.getLogger("flwr").propagate = True
    nothing = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
    reply = Clients(example_dp(None, lambda context: nothing, **HOW))(message(), 0)
    assert reply.error.reason == "this client did not take part; its own log says why"
    assert "num_examples must be" in caplog.text


@pytest.mark.slow
def test_example_dp_says_one_sentence_whatever_goes_wrong_with_its_data(caplog):
    def cannot_be_read(context):
        raise ValueError(SECRET)

    def other_shapes(context):
        return np.zeros((200, 7), np.float32), np.zeros(200, np.int64)

    logging.getLogger("flwr").propagate = True
    said = set()
    for data in (cannot_be_read, lambda context: 17, other_shapes):
        train = example_dp(keras_model, data, loss=loss(), **HOW)
        said.add(Clients(train)(message(ArrayRecord(keras_model().get_weights())), 0).error.reason)
    assert said == {"this client did not take part; its own log says why"}
    assert SECRET in caplog.text


@pytest.mark.slow
def test_example_dp_trains_and_each_client_tells_its_own_price():
    start = keras_model()
    train = example_dp(keras_model, data_of, loss=loss(), learning_rate=0.05, **HOW)
    strategy = plain()
    result = strategy.start(FakeGrid(3, Clients(train)), ArrayRecord(start.get_weights()), num_rounds=4)
    start.set_weights(result.arrays.to_numpy_ndarrays())
    x, y = data_of(Context(1, 999, {"partition-id": 9}, RecordDict(), {}))
    assert np.mean(start.predict(x, verbose=0).argmax(1) == y) > 0.8
    assert len(strategy.client_reports) == 3
    for node, report in strategy.client_reports.items():
        event = dp_event.PoissonSampledDpEvent(50 / (200 + 100 * (node - 101)), dp_event.GaussianDpEvent(1.0))
        ran = tfdpfl.accounting.price(dp_event.SelfComposedDpEvent(event, 32), 1e-5, "pld", "zero_out").epsilon
        assert report["epsilon"] == pytest.approx(ran) and report["steps"] == 32
        assert report["level"] == "example" and report["adjacency"] == "zero_out"


@pytest.mark.slow
def test_one_example_moves_a_participation_by_the_clip_and_nothing_is_left_for_the_next_client():
    """One SGD step on all examples with next to no noise: with an example blanked the weights move by at most
    rate * clip / batch. And the same message gives the same answer after another client's."""
    x, y = data_of(Context(1, 7, {"partition-id": 0}, RecordDict(), {}))
    arguments = {**HOW, "noise_multiplier": 1e-9, "batch_size": len(y), "local_steps": 1, "l2_norm_clip": 0.1}
    start = ArrayRecord(keras_model().get_weights())
    data = [(x, y)]
    train = example_dp(
        keras_model, lambda context: data[0], loss=loss(), optimizer="adam", learning_rate=0.1, **arguments
    )
    ask = lambda: Clients(train)(message(start), 0).content["arrays"].to_numpy_ndarrays()
    ends = [ask(), ask()]
    for a, b in zip(*ends, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)  # Adam's first step is its rate: a second one would differ
    sgd = example_dp(keras_model, lambda context: data[0], loss=loss(), optimizer="sgd", learning_rate=1.0, **arguments)
    ends = []
    for blank in (False, True):
        data[0] = (np.concatenate([x[:-1], 0 * x[-1:] if blank else 1e3 * x[-1:]]), y)
        got = Clients(sgd)(message(start), 0).content["arrays"].to_numpy_ndarrays()
        ends.append(np.concatenate([np.ravel(w) for w in got]))
    assert 0 < np.linalg.norm(ends[0] - ends[1]) <= 2 * 0.1 / len(y) * (1 + 1e-4)


def test_example_dp_is_refused_over_its_budget_before_it_trains():
    calls = []
    train = example_dp(keras_model, lambda c: calls.append(1) or data_of(c), loss=loss(), target_epsilon=1e-3, **HOW)
    answer = Clients(train)(message(ArrayRecord(keras_model().get_weights())), 0)
    assert answer.has_error() and "over this client's target_epsilon" in answer.error.reason
    for wrong in (
        dict(batch_size=0),
        dict(local_steps=0),
        dict(noise_multiplier=0),
        dict(l2_norm_clip=0),
        dict(delta=2),
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            example_dp(keras_model, data_of, loss=loss(), **{**HOW, **wrong})
    with pytest.raises(ValueError, match="optimizer must be"):
        Clients(example_dp(keras_model, data_of, loss=loss(), optimizer="magic", **HOW))(
            message(ArrayRecord(keras_model().get_weights())), 0
        )
    with pytest.raises(ValueError, match="loss=None"):
        Clients(example_dp(keras_model, data_of, **HOW))(message(ArrayRecord(keras_model().get_weights())), 0)
