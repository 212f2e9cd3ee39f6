"""What runs on a client: local DP-SGD, local noise, NbAFL; and a client that knows nothing but numpy."""

import json
import logging
import math
import os
import pickle

import numpy as np
import pytest

pytest.importorskip("flwr")
import cloudpickle
from dp_accounting import dp_event
from flower_fakes import FakeGrid, arrays_in, flat, model, reply
from flwr.app import Array, ArrayRecord, Context, Error, Message, RecordDict
from flwr.serverapp import strategy as flower

import tfdpfl
from tfdpfl import PrivacyError, PrivacyLedger
from tfdpfl.federated import nbafl
from tfdpfl.flower import (
    DifferentialPrivacyFixedClipping,
    NbAFLStrategy,
    client_reports,
    clip_and_noise_gradients,
    example_dp,
    local_dp_mod,
    nbafl_mod,
)


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("flwr").setLevel(logging.ERROR)


class Clients:
    """Each with a context of its own, as Flower keeps it."""

    def __init__(self, train, mods=(), run_config=None):
        self.train, self.mods, self.run_config = train, mods, run_config or {}
        self.contexts = {}

    def __call__(self, message, number):
        config = {"partition-id": number}
        context = self.contexts.setdefault(number, Context(1, number + 101, config, RecordDict(), self.run_config))
        app = self.train
        for mod in reversed(self.mods):
            app = lambda m, c, mod=mod, inner=app: mod(m, c, inner)
        return app(message, context)


def shifted(by):
    return lambda message, context: reply(message, {k: v + by for k, v in arrays_in(message).items()}, {"loss": 1.0})


def plain(clients=3, **how):
    """A server that does nothing, so that what clients do is seen."""
    return DifferentialPrivacyFixedClipping(
        flower.FedAvg(), noise_multiplier=0.0, l2_norm_clip=1e9, clients_per_round=clients, delta=1e-5, **how
    )


def message(arrays=None):
    return Message(RecordDict({"arrays": arrays or model()}), 101, "train")


def replace_one(sigma, count):
    event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(sigma), count)
    return tfdpfl.accounting.price(event, 1e-5, "pld", "replace_one").epsilon


# Local noise.


def test_replacing_an_update_moves_what_is_sent_by_at_most_two_clips():
    ends = [
        flat(
            Clients(shifted(by), [local_dp_mod(l2_norm_clip=0.5, noise_multiplier=1e-12, delta=1e-5)])(
                message(), 0
            ).content["arrays"]
        )
        for by in (100.0, -100.0, np.nan, 1e-3)
    ]
    assert np.linalg.norm(ends[0] - ends[1]) == pytest.approx(1.0, rel=1e-5)
    assert np.linalg.norm(ends[2]) < 1e-9  # no number is no update
    assert np.linalg.norm(ends[3]) == pytest.approx(1e-3 * math.sqrt(10), rel=1e-4)


def test_local_noise_has_its_size_and_settings_may_come_from_the_run_config():
    mod = local_dp_mod(l2_norm_clip="the-clip", noise_multiplier="z", delta=1e-5)
    large = model(w=np.zeros((200, 100), np.float32))
    clients = Clients(shifted(0.0), [mod], {"the-clip": 0.5, "z": 3.0})
    noise = clients(message(large), 0).content["arrays"]["w"].numpy()
    assert np.std(noise) == pytest.approx(1.5, rel=0.04)
    for wrong in ({"the-clip": 0.5}, {"the-clip": 0.5, "z": -1.0}):
        with pytest.raises(ValueError, match=r"'z'|noise_multiplier must"):
            Clients(shifted(0.0), [mod], wrong)(message(), 0)
    for wrong in (dict(l2_norm_clip=0), dict(noise_multiplier=-1), dict(delta=0), dict(target_epsilon=-1)):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            local_dp_mod(**{**dict(l2_norm_clip=1.0, noise_multiplier=1.0, delta=1e-5), **wrong})


def test_a_client_stops_at_its_own_budget_and_the_others_go_on():
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5, target_epsilon=replace_one(2.0, 3) + 1e-6)
    clients, strategy = Clients(shifted(1.0), [mod]), plain()
    strategy.start(FakeGrid(3, clients), model(), num_rounds=5)
    assert {r["steps"] for r in strategy.client_reports.values()} == {3}
    assert [r["epsilon"] for r in strategy.client_reports.values()] == [pytest.approx(replace_one(2.0, 3))] * 3
    last = clients(message(), 0)
    assert last.has_error() and "target_epsilon" in last.error.reason


def test_a_projects_report_has_the_strategy_and_what_its_clients_said():
    from tfdpfl.audit import report

    mods = [local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5)]
    strategy = DifferentialPrivacyFixedClipping(
        flower.FedAvg(), noise_multiplier=3.0, l2_norm_clip=1.0, clients_per_round=3, delta=1e-5
    )
    strategy.start(FakeGrid(3, Clients(shifted(1.0), mods)), model(), num_rounds=2)
    server, told = report({"fed": strategy}, delta=1e-5).parts
    assert (server.unit, told.name, told.unit) == ("client", "fed, told by clients (local)", "client's update")
    assert told.figures.epsilon == pytest.approx(replace_one(2.0, 2), rel=1e-6)  # moves two clips; noise of four
    # All three take part in both rounds.
    twice = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(3.0), 2)
    least = tfdpfl.accounting.price(twice, 1e-5, "pld", "add_or_remove_one").epsilon
    assert server.figures.epsilon >= least * 0.999
    assert server.figures.epsilon == pytest.approx(strategy.ledger.epsilon(1e-5))


def test_clients_of_other_releases_are_read_or_refused_in_a_sentence(caplog, tmp_path):
    """0: as this release; 1: as 0.1, without versions; 2: a newer report; 3: a newer ledger in it; 4: no report."""
    logger = logging.getLogger("flwr")
    logger.setLevel(logging.WARNING)
    logger.propagate = True  # so that caplog sees it
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=1e-12, delta=1e-5)
    of = Clients(shifted(1.0), [mod])

    def answer(message, number):
        reply = of(message, number)
        record = reply.content["tfdpfl.privacy"]
        told = json.loads(record["report"])
        assert told["version"] == 1 and told["written_by"].startswith("tfdpfl 0.")
        newer = {"version": 99, "written_by": "tfdpfl 9.1.0"}
        if number == 1:
            told = {name: value for name, value in told.items() if name not in newer}
        elif number == 2:
            told |= newer
        elif number == 3:
            told["ledger"] |= newer
        elif number == 4:
            told["level"] = "unheard"
        record["report"] = json.dumps(told)
        return reply

    strategy = plain(5, monitor_folder=tmp_path)
    result = strategy.start(FakeGrid(5, answer), model(), num_rounds=1)
    assert {*strategy.contributors[0]} == {"101", "102", "105"} and {*strategy.client_reports} == {101, 102}
    assert np.linalg.norm(flat(result.arrays)) == pytest.approx(3 / 5, rel=1e-5)  # three updates of norm 1, of five
    for node in (103, 104):
        assert f"Node {node} counts as if it had not changed the model: The report of node {node}" in caplog.text
    assert caplog.text.count("written by tfdpfl 9.1.0, but tfdpfl 0.") == 2 and "upgrade with pip" in caplog.text
    assert {*strategy.newer_clients} == {103, 104} and "upgrade with pip" in strategy.newer_clients[103]
    assert json.loads((tmp_path / "rounds.jsonl").read_text())["clients_too_new"] == 2
    assert "Node 105's report on its own privacy is left out: 'unheard'" in caplog.text
    assert len(strategy.promises(1e-5)) == 2  # what is kept can be stated
    with pytest.raises(PrivacyError, match="The report of node 103 is of format version 99"):
        client_reports([answer(Message(RecordDict({"arrays": model()}), 103, "train"), 2)])


def test_a_clients_ledger_outlives_its_process(tmp_path):
    path = tmp_path / "of-{partition-id}-{node_id}.json"
    for life in range(2):
        mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5, ledger_path=path)
        answer = Clients(shifted(1.0), [mod])(message(), 0)  # another context: what Flower kept is gone
        assert client_reports([answer])[101]["steps"] == life + 1
    file = tmp_path / "of-0-101.json"
    assert file.stat().st_mode & 0o777 == 0o600
    client, older = Clients(shifted(1.0), [mod]), file.read_text()
    client(message(), 0)
    newest = file.read_text()
    file.write_text(older)  # of two steps, but what Flower keeps has three
    with pytest.raises(PrivacyError, match=r"has 2 steps, but this client has spent 3 in this run"):
        client(message(), 0)
    file.write_text(newest)
    assert client_reports([client(message(), 0)])[101]["steps"] == 4
    for damaged in ("{}", "", "{", "[1]"):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"of-.*\.json' holds no whole ledger .*Restore the file"):
            Clients(shifted(1.0), [mod])(message(), 0)
    with pytest.raises(ValueError, match=r"names 'hospital', but a node has"):
        Clients(shifted(1.0), [local_dp_mod(l2_norm_clip=1, noise_multiplier=1, delta=1e-5, ledger_path="{hospital}")])(
            message(), 0
        )


def test_nothing_leaves_that_could_not_be_written(tmp_path):
    (tmp_path / "full").write_text("a file where a folder must be")
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5, ledger_path=tmp_path / "full" / "ledger")
    with pytest.raises(OSError):
        Clients(shifted(1.0), [mod])(message(), 0)


def test_a_clients_ledger_is_on_the_disk_before_its_reply_leaves(tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5, ledger_path=tmp_path / "ledger")
    Clients(shifted(1.0), [mod])(message(), 0)
    assert synced == [str(tmp_path / "ledger.new"), str(tmp_path)]  # the file, then its name in the folder


SECRET = "could not convert string to float: 'HIV positive'"


def raises(kind):
    def app(message, context):
        raise kind(SECRET)

    return app


def answers_an_error(message, context):
    return Message(Error(code=300, reason=SECRET), reply_to=message)


def names_its_arrays_after_a_patient(message, context):
    return reply(message, {}, {"loss": 1.0}, **{"patient 17": ArrayRecord([np.ones(3)])})


MODS = {
    "local": lambda: local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5),
    "nbafl": lambda: nbafl_mod(**PLAN),
}


@pytest.mark.parametrize("kind", MODS)
def test_whatever_goes_wrong_in_an_app_the_server_gets_a_noisy_update_and_no_word_of_it(kind, caplog):
    """Every reply, of a client that failed as of one that did not, has the same records, but for the noise."""

    def seen(app):
        got = Clients(app, [MODS[kind]()])(message(), 0)
        assert not got.has_error()
        records = {name: {**record} for name, record in got.content.items()}
        arrays = {name: (array.shape, array.dtype) for name, array in records.pop("arrays").items()}
        assert flat(got.content["arrays"]).std() > 0
        return records, arrays

    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("flwr").propagate = True
    failing = [
        raises(ValueError), raises(SystemExit), answers_an_error, shifted(np.nan), names_its_arrays_after_a_patient,
        lambda message, context: None, lambda message, context: reply(message, {"w": np.array(["HIV"])}),
    ]  # fmt: skip
    right = seen(shifted(1.0))
    for app in failing:
        assert seen(app) == right
    assert SECRET in caplog.text  # at home


def test_an_app_that_fails_is_sent_as_no_update():
    quiet = dict(l2_norm_clip=1.0, noise_multiplier=1e-9, delta=1e-5)
    start = model(b=np.full(4, 0.5, np.float32))
    got = Clients(raises(ValueError), [local_dp_mod(**quiet)])(message(start), 0)
    np.testing.assert_allclose(flat(got.content["arrays"]), flat(start), atol=1e-6)
    plan = {**PLAN, "min_dataset_size": 1e9, "calibration": "published"}  # next to no noise
    got = Clients(raises(ValueError), [nbafl_mod(**plan)])(message(start), 0)
    np.testing.assert_allclose(flat(got.content["arrays"]), flat(start), atol=1e-4)


def test_a_model_that_is_not_finite_is_refused_before_an_app_sees_it():
    for make in MODS.values():
        with pytest.raises(ValueError, match=r"'b' holds numbers that are not finite|not finite, or too large"):
            Clients(raises(AssertionError), [make()])(message(model(b=np.full(4, np.nan, np.float32))), 0)


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


def test_a_mod_that_is_shipped_draws_other_noise():
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=1.0, delta=1e-5)
    first = Clients(shifted(1.0), [mod])(message(), 0)
    copies = [pickle.loads(cloudpickle.dumps(mod)) for _ in range(2)]
    noises = [flat(Clients(shifted(1.0), [m])(message(), 0).content["arrays"]) for m in copies]
    assert np.abs(noises[0] - noises[1]).min() > 0 and np.abs(noises[0] - flat(first.content["arrays"])).min() > 0


# Example-level DP.


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


# NbAFL.


PLAN = dict(epsilon=8.0, delta=1e-5, l2_norm_clip=2.0, num_rounds=3, num_clients=3, min_dataset_size=100)


def test_nbafl_clips_the_weights_adds_both_noises_and_says_what_is_claimed_and_what_is_proven():
    plan = {**PLAN, "num_exposures": 1}
    strategy = NbAFLStrategy(flower.FedAvg(), **plan)
    clients = Clients(shifted(1.0), [nbafl_mod(**plan)])
    noise = strategy.nbafl
    assert noise == nbafl.noise_of(**plan) and noise.sigma_d > 0
    large = model(w=np.zeros((200, 100), np.float32))
    result = strategy.start(FakeGrid(3, clients), large, num_rounds=1)
    weights = result.arrays["w"].numpy()
    std = math.sqrt(noise.sigma_u**2 / 3 + noise.sigma_d**2)
    assert np.std(weights) == pytest.approx(std, rel=0.04)
    report = strategy.client_reports[101]
    assert report["epsilon"] == pytest.approx(replace_one(noise.sigma_u / 4.0, 1), rel=1e-6) == strategy.local_epsilon
    assert report["claimed_epsilon"] == noise.claimed_epsilon < report["epsilon"]
    assert "claimed by NbAFL" in strategy.statement() and strategy.epsilon > 0
    again = strategy.start(FakeGrid(3, clients), large, num_rounds=5)
    assert strategy.rounds_charged == 3 and strategy.stopped_by == "num_rounds" and again.arrays


def test_nbafl_weights_are_within_the_clip_and_a_missing_client_counts_with_what_it_was_sent():
    plan = {**PLAN, "min_dataset_size": 1e9, "calibration": "published"}  # next to no noise
    clients = Clients(shifted(5.0), [nbafl_mod(**plan)])
    got = clients(message(), 0)
    assert np.linalg.norm(flat(got.content["arrays"])) == pytest.approx(2.0, rel=1e-4)
    start = model(b=np.full(4, 1.0, np.float32))
    strategy = NbAFLStrategy(flower.FedAvg(), **plan)
    result = strategy.start(FakeGrid(3, lambda m, n: clients(m, n) if n == 0 else None), start, num_rounds=1)
    one = 2.0 * np.array([5.0] * 6 + [6.0] * 4) / math.sqrt(6 * 25 + 4 * 36)
    np.testing.assert_allclose(flat(result.arrays), (one + 2 * np.array([0.0] * 6 + [1.0] * 4)) / 3, atol=1e-4)


def test_nbafl_is_priced_by_the_noise_of_those_that_replied():
    strategy = NbAFLStrategy(flower.FedAvg(), **PLAN)
    clients = Clients(shifted(1.0), [nbafl_mod(**PLAN)])
    strategy.start(FakeGrid(3, lambda m, n: clients(m, n) if n == 0 else None), model(), num_rounds=1)
    level = strategy.privacy[1]  # three were asked
    stddev = math.sqrt(level.sigma_u**2 + (3 * level.sigma_d) ** 2)
    assert math.isfinite(strategy.epsilon)
    assert strategy.epsilon == pytest.approx(replace_one(stddev / 4.0, 1), rel=1e-6)


def test_a_steps_gradient_is_clipped_then_noised_and_paid():
    ledger = PrivacyLedger()
    gradients = [np.full((100, 100), 3.0, np.float32), np.zeros(5)]
    noisy = clip_and_noise_gradients(gradients, 1.0, 0.5, ledger)
    assert np.std(noisy[0] - 0.01) == pytest.approx(0.5, rel=0.05) and noisy[0].dtype == np.float32
    assert np.linalg.norm(clip_and_noise_gradients(gradients, 1.0, 1e-9, ledger)[0]) == pytest.approx(1.0, rel=1e-5)
    assert not np.isnan(clip_and_noise_gradients([np.array([np.nan])], 1.0, 0.5, ledger)[0]).any()
    assert ledger.steps == 3 and ledger.adjacency == "replace_one"
    one = PrivacyLedger()
    clip_and_noise_gradients(gradients, 1.0, 0.5, one)
    assert one.epsilon(1e-5) == pytest.approx(replace_one(0.25, 1))


# A client of another framework.


class NumpyCNN:
    """A small convolutional network on 8 x 8 digits with the names and counters of a PyTorch state_dict, trained by
    SGD in numpy: the server sees no more of PyTorch than this."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.state = {
            "conv1.weight": rng.normal(size=(6, 1, 3, 3), scale=0.3).astype(np.float32),
            "conv1.bias": np.zeros(6, np.float32),
            "bn1.num_batches_tracked": np.array(0, np.int64),
            "fc.weight": rng.normal(size=(10, 6 * 36), scale=0.05).astype(np.float32),
            "fc.bias": np.zeros(10, np.float32),
        }

    def forward(self, x):
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2)).reshape(len(x), 36, 9)
        h = windows @ self.state["conv1.weight"].reshape(6, 9).T + self.state["conv1.bias"]
        flat_h = np.maximum(h, 0).reshape(len(x), -1)
        return windows, h, flat_h, flat_h @ self._fc.T + self.state["fc.bias"]

    @property
    def _fc(self):  # channels last, as the windows are
        return self.state["fc.weight"].reshape(10, 6, 36).transpose(0, 2, 1).reshape(10, -1)

    def train(self, x, y, rate=0.1, steps=10):
        for k in range(steps):
            part = slice(32 * k % len(x), 32 * k % len(x) + 32)
            windows, h, flat_h, logits = self.forward(x[part])
            p = np.exp(logits - logits.max(1, keepdims=True))
            d = (p / p.sum(1, keepdims=True) - np.eye(10)[y[part]]) / len(logits)
            dh = (d @ self._fc).reshape(h.shape) * (h > 0)
            fc = (d.T @ flat_h).reshape(10, 36, 6).transpose(0, 2, 1).reshape(10, -1)
            conv = np.einsum("nwc,nwk->ck", dh, windows).reshape(6, 1, 3, 3)
            for name, g in {
                "fc.weight": fc,
                "fc.bias": d.sum(0),
                "conv1.weight": conv,
                "conv1.bias": dh.sum((0, 1)),
            }.items():
                self.state[name] = (self.state[name] - rate * g).astype(np.float32)
            self.state["bn1.num_batches_tracked"] = self.state["bn1.num_batches_tracked"] + 1


def test_a_client_that_knows_only_numpy_trains_a_cnn_on_images():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8).astype(np.float32)
    parts = [slice(i, 1500, 5) for i in range(5)]

    def train(message, context):
        number, net = int(context.node_config["partition-id"]), NumpyCNN()
        net.state = arrays_in(message)
        net.train(images[parts[number]], labels[parts[number]])
        return reply(message, net.state)

    start = NumpyCNN()
    strategy = DifferentialPrivacyFixedClipping(
        flower.FedAvgM(server_momentum=0.9),
        noise_multiplier=0.05,
        l2_norm_clip=0.7,
        clients_per_round=5,
        delta=1e-3,
        seed=0,
    )
    first = ArrayRecord({k: Array(v) for k, v in start.state.items()})
    result = strategy.start(FakeGrid(5, Clients(train)), first, num_rounds=15)
    net = NumpyCNN()
    net.state = {k: v.numpy() for k, v in result.arrays.items()}
    assert net.state["bn1.num_batches_tracked"] == 0 and net.state["bn1.num_batches_tracked"].dtype == np.int64
    assert np.mean(net.forward(images[1500:])[-1].argmax(1) == labels[1500:]) > 0.75
