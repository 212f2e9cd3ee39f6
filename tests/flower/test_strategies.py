"""The strategies that wrap Flower's: what a client can do to a round, what is drawn, paid, and lost in a crash."""

import errno
import fcntl
import inspect
import itertools
import logging
import math
import os

import numpy as np
import pytest

pytest.importorskip("flwr")
import dp_accounting
from dp_accounting import dp_event
from flower_fakes import FakeGrid, arrays_in, flat, model, moved, reply
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from scipy.stats import norm as gauss

import tfdpfl
from tfdpfl import AdaptiveClip, PrivacyError
from tfdpfl.federated import NoisedMetrics, RoundsRun
from tfdpfl.flower import DifferentialPrivacyAdaptiveClipping as Adaptive
from tfdpfl.flower import DifferentialPrivacyFixedClipping as Fixed
from tfdpfl.flower import NbAFLStrategy, local_dp_mod, nbafl_mod
from tfdpfl.flower.journal import Journal
from tfdpfl.flower.updates import ClippedSum

CLIENTS = 5


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logging.getLogger("flwr").propagate = True  # so that caplog sees it


def fixed(inner=None, **arguments):
    given = dict(noise_multiplier=0.0, l2_norm_clip=1.0, delta=1e-5)
    if "sampling_rate" not in arguments:
        given["clients_per_round"] = CLIENTS
    return Fixed(inner or flower.FedAvg(), **{**given, **arguments})


def updates(number):
    """Norms from 0.4 to 2, each in another direction."""
    direction = np.random.default_rng(number).normal(size=10)
    return 0.4 * (number + 1) * direction / np.linalg.norm(direction)


def one_round(strategy, answer, initial=None, rounds=1, clients=CLIENTS):
    grid = FakeGrid(clients, answer)
    return strategy.start(grid, initial or model(), num_rounds=rounds), grid


def clipped(update, clip=1.0):
    return update * min(1, clip / np.linalg.norm(update))


def test_the_mean_is_of_clipped_updates_without_weights_over_a_fixed_number():
    def answer(message, number):
        got = moved(updates)(message, number)
        got.content["metrics"]["num-examples"] = 10**number  # FedAvg alone would weight by it
        return got

    start = model(w=np.full((3, 2), 2.0, np.float32))
    result, _ = one_round(fixed(clients_per_round=8), answer, start)
    expected = flat(start) + sum(clipped(updates(i)) for i in range(CLIENTS)) / 8
    np.testing.assert_allclose(flat(result.arrays), expected, rtol=1e-6, atol=1e-7)
    assert result.arrays["w"].numpy().dtype == np.float32


def bad(message, number):
    """What client 0 sends, by name; each is bounded by the clip, or counts as nothing."""
    sent = arrays_in(message)
    good = {k: v + 1 for k, v in sent.items()}

    def replaced(**arrays):
        return reply(message, {**good, **arrays})

    nan = good["w"].copy()
    nan[0, 0] = np.nan
    late = Message(message.content, dst_node_id=7, message_type="train", group_id="0-of another round")
    late.metadata.dst_node_id = message.metadata.dst_node_id
    unasked = Message(message.content, dst_node_id=999, message_type="train")
    broken = reply(message, good)
    broken.content["arrays"]["w"] = Array("float32", (3, 2), "numpy.ndarray", b"\x93NUMPY no array at all")
    pickled = reply(message, good)
    pickled.content["arrays"]["w"] = Array(
        "object", (1,), "numpy.ndarray", b"\x93NUMPY\x01\x00\x46\x00"
        + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(69) + b"\n" + b"x" * 8,
    )  # fmt: skip
    two = RecordDict({**reply(message, good).content, "more": ArrayRecord([np.ones(3)])})
    return {
        "error": Message(Error(code=1, reason="no data"), reply_to=message),
        "nan": replaced(w=nan),
        "infinite": replaced(b=np.full(4, -np.inf, np.float32)),
        "square overflows": replaced(b=np.full(4, 1e200)),
        "wrong shape": replaced(w=good["w"].T),
        "would broadcast": replaced(b=np.ones(1, np.float32)),
        "missing": reply(message, {"w": good["w"]}),
        "extra": replaced(more=np.ones(3, np.float32)),
        "complex": replaced(b=np.full(4, 1j)),
        "text": replaced(b=np.array(["a"] * 4)),
        "no array": broken,
        "pickle": pickled,
        "two records": Message(two, reply_to=message),
        "no records": Message(RecordDict(), reply_to=message),
        "another round": reply(late, good),
        "unasked": reply(unasked, good),
    }[number]


NOTHING = ["error", "nan", "infinite", "square overflows", "wrong shape", "would broadcast", "missing", "extra",
           "complex", "text", "no array", "pickle", "two records", "no records", "another round",
           "unasked"]  # fmt: skip


@pytest.mark.parametrize("kind", NOTHING)
def test_a_client_that_sends_no_update_counts_as_one_that_changed_nothing_and_is_logged(kind, caplog):
    def answer(message, number):
        return bad(message, kind) if number == 0 else moved(updates)(message, number)

    strategy = fixed()
    result, _ = one_round(strategy, answer)
    without = sum(clipped(updates(i)) for i in range(1, CLIENTS)) / CLIENTS
    np.testing.assert_allclose(flat(result.arrays), without, rtol=1e-5, atol=1e-7)
    assert f"ode {'999' if kind == 'unasked' else '101'}" in caplog.text
    assert strategy.rounds_charged == 1


@pytest.mark.parametrize("clip", [0.3, 2.0])
@pytest.mark.parametrize("kind", ["giant", "giant float64", "integers", "half", "twice", "silent", "fortran", "zero"])
def test_no_client_moves_the_sum_by_more_than_the_clip(kind, clip):
    def odd(message):
        sent = arrays_in(message)
        good = {k: v + 3 for k, v in sent.items()}
        return {
            "giant": lambda: reply(message, {k: np.full_like(v, 3e37) for k, v in sent.items()}),
            "giant float64": lambda: reply(message, {k: np.full(v.shape, 1e150) for k, v in sent.items()}),
            "integers": lambda: reply(message, {k: np.full(v.shape, 99, np.int64) for k, v in sent.items()}),
            "half": lambda: reply(message, {k: v.astype(np.float16) for k, v in good.items()}),
            "twice": lambda: [reply(message, good), reply(message, {k: -v for k, v in good.items()})],
            "silent": lambda: None,
            "fortran": lambda: reply(message, {k: np.asfortranarray(v) for k, v in good.items()}),
            "zero": lambda: reply(message, sent),
        }[kind]()

    ends = []
    for first in (odd, lambda message: None):
        answer = lambda message, number, first=first: first(message) if number == 0 else moved(updates)(message, number)
        result, _ = one_round(fixed(l2_norm_clip=clip), answer)
        ends.append(flat(result.arrays) * CLIENTS)
    distance = np.linalg.norm(ends[0] - ends[1])
    assert np.isfinite(ends[0]).all()
    assert distance <= clip * (1 + 1e-5)
    if kind not in ("silent", "zero"):
        assert distance > clip * (1 - 1e-3)  # it does count


def test_what_is_not_floating_point_stays_as_the_server_has_it():
    start = model(counter=np.array(7, np.int64), mask=np.array([True, False]))

    def answer(message, number):
        got = {**arrays_in(moved(updates)(message, number)), "counter": np.array(10**6), "mask": np.array([False] * 2)}
        return reply(message, got)

    result, _ = one_round(fixed(noise_multiplier=1.0), answer, start)
    assert result.arrays["counter"].numpy() == 7 and result.arrays["counter"].numpy().dtype == np.int64
    assert result.arrays["mask"].numpy().tolist() == [True, False]
    with pytest.raises(PrivacyError, match="no floating-point arrays"):
        one_round(fixed(), answer, ArrayRecord([np.arange(3)]))


LARGE = dict(w=np.zeros((100, 200), np.float32), b=np.zeros(5, np.float64))


def same(message, number):
    return reply(message, arrays_in(message))


def looks_like(sample, stddev):
    """Whether normals have this standard deviation: true for the right one but with probability 1e-9."""
    return abs(np.std(sample) / stddev - 1) < gauss.isf(5e-10) / math.sqrt(2 * len(sample))


def test_the_noise_is_that_of_the_clip_and_the_denominator():
    strategy = fixed(noise_multiplier=1.3, l2_norm_clip=0.7)
    result, _ = one_round(strategy, same, model(**LARGE))
    noise = result.arrays["w"].numpy().ravel()
    right = 1.3 * 0.7 / CLIENTS
    assert looks_like(noise, right) and not looks_like(noise, right * 2 / 3) and not looks_like(noise, right * 3 / 2)
    assert abs(noise.mean()) < 6 * right / math.sqrt(len(noise))
    again, _ = one_round(fixed(noise_multiplier=1.3, l2_norm_clip=0.7), same, model(**LARGE))
    assert np.abs(np.corrcoef(noise, again.arrays["w"].numpy().ravel())[0, 1]) < 0.05


def test_the_noise_of_a_round_is_that_of_the_clip_it_applied_which_moves_afterwards():
    clip = AdaptiveClip(initial=2.0, learning_rate=3.0)  # every client is within: it falls by a factor of 4.5
    strategy = Adaptive(flower.FedAvg(), noise_multiplier=1.0, l2_norm_clip=clip, clients_per_round=CLIENTS, delta=1e-5)
    of_updates, _ = clip.split(1.0, CLIENTS)
    result, grid = one_round(strategy, same, model(**LARGE))
    assert looks_like(result.arrays["w"].numpy().ravel(), of_updates * 2.0 / CLIENTS)
    assert result.train_metrics_clientapp[1]["clip"] == 2.0
    assert 2.0 * math.exp(-1.5) - 1e-9 <= strategy.current_clip != 2.0
    second = strategy.current_clip
    result = strategy.start(grid, model(**LARGE), num_rounds=1)
    assert looks_like(result.arrays["w"].numpy().ravel(), of_updates * second / CLIENTS)


@pytest.mark.parametrize(("length", "end"), [(0.0, "1e-08"), (1e15, r"1e\+10")])
def test_an_adaptive_clip_at_its_end_is_named_and_its_round_costs_nothing(length, end):
    clip = AdaptiveClip(initial=1.0, learning_rate=1e4)
    strategy = Adaptive(flower.FedAvg(), noise_multiplier=1.0, l2_norm_clip=clip, clients_per_round=CLIENTS, delta=1e-5)
    with pytest.raises(PrivacyError, match=f"The adaptive clip is {end}: "):
        strategy.start(FakeGrid(CLIENTS, moved(lambda number: length * np.eye(10)[0])), model(), num_rounds=2)
    assert strategy.rounds_charged == 1


@pytest.mark.parametrize("initial", [0.1, 1, 3, 100])
@pytest.mark.slow
def test_the_adaptive_clip_finds_the_median_norm(initial):
    norms = np.exp(0.5 * gauss.ppf((np.arange(31) + 0.5) / 31))
    clip = AdaptiveClip(initial=initial)
    strategy = Adaptive(
        flower.FedAvg(), noise_multiplier=0.3, l2_norm_clip=clip, clients_per_round=31, delta=1e-5, seed=1
    )
    grid = FakeGrid(31, moved(lambda number: norms[number] * np.eye(10)[0]))
    seen = [m["clip"] for m in strategy.start(grid, model(), num_rounds=80).train_metrics_clientapp.values()]
    assert np.mean(seen[65:]) == pytest.approx(np.median(norms), rel=0.1)


def test_one_client_moves_the_adaptive_count_by_a_half():
    """The same round with and without client 0: the clips differ by exp(lr / 2 / K), whatever it sends."""
    for kind in ("nan", "good", "giant"):
        ends = []
        for there in (True, False):
            strategy = Adaptive(
                flower.FedAvg(),
                noise_multiplier=0.0,
                l2_norm_clip=AdaptiveClip(initial=1.0),
                clients_per_round=8,
                delta=1e-5,
            )

            def answer(message, number, there=there, kind=kind):
                if number == 0 and not there:
                    return None
                if number == 0 and kind == "nan":
                    return bad(message, "nan")
                return moved(lambda n: 1e6 * updates(n) if n == 0 and kind == "giant" else updates(n))(message, number)

            one_round(strategy, answer)
            ends.append(math.log(strategy.current_clip))
        assert abs(ends[0] - ends[1]) == pytest.approx(0.2 * 0.5 / 8, rel=1e-6)


# Who is asked.


def test_poisson_cohorts_are_drawn_by_the_strategy_and_empty_ones_are_released():
    strategy = fixed(flower.FedAvg(min_available_nodes=20), noise_multiplier=2.0, sampling_rate=0.05, accountant="rdp")
    result, grid = one_round(strategy, moved(updates), rounds=60, clients=20)
    sizes = [len(nodes) for nodes in grid.sent[::2]]
    assert len(sizes) == 60 and 0 in sizes and len(set(sizes)) > 1
    assert 30 < sum(sizes) < 95  # 60 expected
    assert len(result.train_metrics_clientapp) == strategy.rounds_charged == 60
    assert strategy.participation.clients_per_round == pytest.approx(1.0)  # the mean is over the expected number
    whole = {node for nodes in grid.sent for node in nodes}
    assert len(whole) > 10  # 19 expected; 10 or fewer once in 10⁸ runs


def test_an_empty_cohort_gets_its_noise():
    strategy = fixed(noise_multiplier=2.0, sampling_rate=1e-9, population=10**9)
    result, grid = one_round(strategy, moved(updates), model(**LARGE))
    assert grid.sent[0] == []
    assert looks_like(result.arrays["w"].numpy().ravel(), 2.0)  # over 1e-9 * 1e9 clients


@pytest.mark.slow
def test_nodes_may_come_go_and_get_new_ids_under_a_coin_for_each(tmp_path):
    """The strategy's coins are fair, whoever is there to be asked: ε is that of the rounds, and can always be read."""
    rng = np.random.default_rng(0)
    grid = FakeGrid(6, same)

    def churn(number, arrays):
        if number % 3 == 0:
            grid.nodes[:] = rng.choice(range(101, 1000), size=rng.integers(2, 12), replace=False).tolist()

    def life(rounds):
        how = dict(noise_multiplier=1.0, sampling_rate=0.5, accountant="rdp")
        strategy = fixed(ledger_path=tmp_path / "ledger", **how)
        assert math.isfinite(strategy.epsilon)
        strategy.start(grid, model(), num_rounds=rounds, evaluate_fn=churn)
        strategy._journal.close()
        return strategy

    life(10)
    grid.nodes[:] = range(5001, 5011)  # simulated anew
    strategy = life(20)
    event = dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.5, dp_event.GaussianDpEvent(1.0)), 20)
    price = tfdpfl.accounting.price(event, 1e-5, "rdp", "zero_out").epsilon
    assert strategy.rounds_charged == 20 and strategy.epsilon == pytest.approx(price)


def test_a_lost_round_gives_no_client_a_second_coin(tmp_path):
    """Where those who were drawn are gone, nobody is asked: others had their coin, and it fell the other way."""
    grid = FakeGrid(40, moved(updates))
    how = dict(noise_multiplier=1.0, sampling_rate=0.3, ledger_path=tmp_path / "ledger")
    strategy = fixed(**how)
    lost = {m.metadata.dst_node_id for m in strategy.configure_train(1, model(), _config(), grid)}
    strategy._journal.close()
    assert 0 < len(lost) < 40
    grid.nodes[:] = [node for node in grid.nodes if node not in lost]
    strategy = fixed(**how)
    strategy.start(grid, model(), num_rounds=1)
    assert grid.sent[0] == [] and strategy.rounds_charged == 1


def test_participations_keep_to_their_limits_and_are_priced_by_them():
    strategy = fixed(noise_multiplier=1.0, clients_per_round=2, max_participations=2, min_separation=3)
    _, grid = one_round(strategy, moved(updates), rounds=12)
    cohorts = grid.sent[::2]
    rounds_of = {node: [i for i, cohort in enumerate(cohorts) if node in cohort] for node in grid.nodes}
    assert max(map(len, rounds_of.values())) == 2
    assert all(b - a >= 3 for rounds in rounds_of.values() for a, b in itertools.pairwise(rounds))
    pair = tfdpfl.accounting.price(
        dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(1.0), 2), 1e-5, "pld", "zero_out"
    )
    assert strategy.epsilon == pytest.approx(pair.epsilon)


def test_a_node_that_a_strategy_asks_twice_is_refused():
    class Twice(flower.FedAvg):
        def configure_train(self, *arguments):
            return [m for m in super().configure_train(*arguments) for _ in range(2)]

    with pytest.raises(PrivacyError, match="twice"):
        one_round(fixed(Twice()), moved(updates))


def test_a_strategy_with_a_message_for_each_client_draws_its_own_cohort():
    class Different(flower.FedAvg):
        def configure_train(self, *arguments):
            messages = list(super().configure_train(*arguments))
            for i, m in enumerate(messages):
                m.content = RecordDict({**m.content, "mine": MetricRecord({"i": i})})
            return messages

    one_round(fixed(Different()), moved(updates))
    with pytest.raises(ValueError, match="message of its own"):
        one_round(fixed(Different(), sampling_rate=0.5), moved(updates))


# What is paid.


def test_the_price_is_that_of_what_ran():
    strategy = fixed(noise_multiplier=1.1, sampling_rate=0.3, accountant="rdp")
    one_round(strategy, moved(updates), rounds=7, clients=20)
    event = dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.3, dp_event.GaussianDpEvent(1.1)), 7)
    theirs = dp_accounting.rdp.RdpAccountant().compose(event).get_epsilon(1e-5)
    assert theirs * 0.99 <= strategy.epsilon <= theirs * 1.01
    run = RoundsRun(rounds=7, participation=strategy.participation)
    assert strategy.epsilon == pytest.approx(strategy.privacy[0].price(run, 1e-5, "rdp").epsilon, rel=1e-6)
    assert "7 rounds, sampling poisson" in strategy.statement() and "zero_out" in strategy.statement()
    assert strategy.ledger.adjacency == "zero_out"


def test_without_sampling_nothing_is_amplified():
    strategy = fixed(noise_multiplier=1.1)
    result, _ = one_round(strategy, moved(updates), rounds=4)
    plain = tfdpfl.accounting.price(dp_event.GaussianDpEvent(1.1 / 2), 1e-5, "pld", "zero_out").epsilon
    assert strategy.epsilon == pytest.approx(plain)
    assert result.train_metrics_clientapp[4]["epsilon"] == strategy.epsilon
    assert fixed().epsilon == 0.0
    free = fixed()
    one_round(free, moved(updates))
    assert free.epsilon == math.inf and "no privacy" in free.statement()


@pytest.mark.parametrize("how", [dict(), dict(sampling_rate=0.4)])
def test_the_budget_ends_the_training_with_its_result(how):
    strategy = fixed(noise_multiplier=2.0, target_epsilon=3.0, **how)
    result, grid = one_round(strategy, moved(updates), rounds=500)
    ran = strategy.rounds_charged
    assert 0 < ran < 500 and strategy.stopped_by == "target_epsilon"
    assert len(result.train_metrics_clientapp) == ran == len(grid.sent) / 2 and result.arrays
    assert strategy.epsilon <= 3.0 < strategy._ledger_of(ran + 1).epsilon(1e-5)
    # A loop of one's own, too, is not served beyond it.
    assert strategy.configure_train(ran + 1, model(), _config(), grid) == []
    assert strategy.aggregate_train(ran + 1, []) == (None, None)
    assert strategy.rounds_charged == ran
    more = strategy.start(grid, result.arrays, num_rounds=3)
    assert strategy.rounds_charged == ran and flat(more.arrays) == pytest.approx(flat(result.arrays))


def _config():
    from flwr.app import ConfigRecord

    return ConfigRecord()


def test_a_target_without_room_for_one_round_is_refused_before_anything_is_sent():
    grid = FakeGrid(CLIENTS, moved(updates))
    for z in (0.0, 0.5):
        with pytest.raises(PrivacyError, match="no room for one round"):
            fixed(noise_multiplier=z, target_epsilon=0.1).start(grid, model())
    assert grid.sent == []


# Metrics.


def loud(message, number):
    got = moved(updates)(message, number)
    got.content["metrics"].update({"loss": 0.25 * number, "secret": 42.0, "list": [1.0, 2.0]})
    return got


def test_metrics_are_not_shown_unless_asked_for():
    result, grid = one_round(fixed(), loud)
    assert set(result.train_metrics_clientapp[1]) == {"clip", "epsilon"}
    assert not result.evaluate_metrics_clientapp and grid.sent[1] == []


def test_noised_metrics_are_clipped_and_charged():
    noised = NoisedMetrics(noise_multiplier=1e-9, bound={"loss": 0.5})
    strategy = fixed(noise_multiplier=1.0, train_metrics=noised)
    result, _ = one_round(strategy, loud)
    metrics = result.train_metrics_clientapp[1]
    assert metrics["loss"] == pytest.approx((0 + 0.25 + 3 * 0.5) / 5, abs=1e-6)  # from 0.5 up it is cut
    assert metrics["contributing"] == pytest.approx(1.0, abs=1e-6) and "secret" not in metrics
    assert strategy.epsilon > 1e9  # noise of 1e-9 is no noise, and says so
    wide = NoisedMetrics(noise_multiplier=3.0, bound={"loss": 0.5})
    strategy = fixed(noise_multiplier=1.0, train_metrics=wide)
    one_round(strategy, loud)
    both = (1.0 + 3.0**-2) ** -0.5
    assert strategy.epsilon == pytest.approx(
        tfdpfl.accounting.price(dp_event.GaussianDpEvent(both), 1e-5, "pld", "zero_out").epsilon
    )


def test_metrics_get_the_noise_that_is_charged():
    noised = NoisedMetrics(noise_multiplier=2.0, bound=dict.fromkeys(map(str, range(30)), 3.0))
    strategy = fixed(noise_multiplier=1.0, train_metrics=noised, evaluate_metrics=noised)
    result, _ = one_round(strategy, moved(updates), rounds=50)
    for by_round in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
        sample = np.array([m[name] / 3.0 for m in by_round.values() for name in map(str, range(30))])
        right = 2.0 * math.sqrt(31) / CLIENTS
        assert looks_like(sample, right)
        assert not looks_like(sample, right * 2 / 3) and not looks_like(sample, right * 3 / 2)


def test_evaluations_are_charged_or_said_not_to_be():
    noised = NoisedMetrics(noise_multiplier=2.0, bound={"loss": 1.0})
    strategy = fixed(noise_multiplier=2.0, sampling_rate=0.5, evaluate_metrics=noised)
    one_round(strategy, loud, rounds=3)
    events = [
        dp_event.SelfComposedDpEvent(dp_event.PoissonSampledDpEvent(0.5, dp_event.GaussianDpEvent(2.0)), 3),
        dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(2.0), 3),
    ]
    assert strategy.epsilon == pytest.approx(
        tfdpfl.accounting.price(dp_event.ComposedDpEvent(events), 1e-5, "pld", "zero_out").epsilon
    )
    strategy = fixed(evaluate_metrics="unprotected")
    result, _ = one_round(strategy, lambda m, n: reply(m, arrays_in(m), {"loss": float(n)}))
    assert result.evaluate_metrics_clientapp[1]["loss"] == pytest.approx(2.0)
    assert "in no epsilon" in strategy.statement()


# The wrapped strategy.


def test_the_wrapped_strategy_sees_one_reply_and_what_it_makes_of_it_is_post_processing():
    seen = []

    class Watching(flower.FedAdam):
        def aggregate_train(self, server_round, replies):
            replies = list(replies)
            seen.append([flat(next(iter(r.content.array_records.values()))) for r in replies])
            return super().aggregate_train(server_round, replies)

    result, _ = one_round(fixed(Watching(eta=0.1, tau=1e-3), noise_multiplier=1.0), moved(updates), rounds=3)
    m = v = weights = np.zeros(10)
    for number, (mean,) in enumerate(seen, 1):  # Reddi et al. 2020, algorithm 2, with Flower's rate of Adam
        delta = mean - weights
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        rate = 0.1 * math.sqrt(1 - 0.99 ** (number + 1)) / (1 - 0.9 ** (number + 1))
        weights = weights + rate * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(flat(result.arrays), weights, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["FedAvg", "FedAvgM", "FedProx", "FedAdam", "FedAdagrad", "FedYogi"])
def test_strategies_that_take_a_mean_are_wrapped(name):
    extra = dict(proximal_mu=0.1) if name == "FedProx" else {}
    result, _ = one_round(fixed(getattr(flower, name)(**extra), noise_multiplier=1.0), moved(updates), rounds=2)
    assert np.isfinite(flat(result.arrays)).all() and flat(result.arrays).any()


def test_strategies_that_compare_clients_are_refused():
    for inner in (flower.Krum(), flower.FedMedian(), fixed()):
        with pytest.raises(ValueError, match="single clients"):
            fixed(inner)
    with pytest.raises(ValueError, match=r"flwr\.serverapp\.strategy"):
        fixed(object())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(noise_multiplier=-1), "noise_multiplier must be"),
        (dict(l2_norm_clip=0), "clip must be"),
        (dict(l2_norm_clip=AdaptiveClip()), "clip must be"),
        (dict(l2_norm_clip=None), "clip must be"),
        (dict(delta=1), "delta must be"),
        (dict(clients_per_round=0), "clients_per_round must be"),
        (dict(sampling_rate=1.5), "sampling_rate must be"),
        (dict(sampling_rate=0.5, clients_per_round=3), "Give one of"),
        (dict(clients_per_round=None), "Give one of"),
        (dict(sampling_rate=0.5, max_participations=3), "keeps to no limit"),
        (dict(max_participations=0), "max_participations must be"),
        (dict(population=2), "population must be"),
        (dict(target_epsilon=0), "target_epsilon must be"),
        (dict(accountant="magic"), "accountant must be"),
        (dict(train_metrics=True), "train_metrics must be"),
        (dict(evaluate_metrics=NoisedMetrics(noise_multiplier=1.0)), "names the metrics"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        fixed(**arguments)


# What a crash costs.


class Killed(BaseException):
    """Stands for SIGKILL: nothing may handle it."""


def crash_at(monkeypatch, step):
    """Ends the process, as it were, before its step-th touch of the disk."""
    left = [step]

    def counted(real):
        def touch(*arguments, **named):
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return real(*arguments, **named)

        return touch

    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    return left


def test_killed_anywhere_and_resumed_every_release_is_counted_and_no_noise_comes_twice(tmp_path, monkeypatch):
    sums = [sum(clipped(updates(i)) for i in range(CLIENTS)), np.zeros(10)]  # of the first process, and of the second
    shown, steps = set(), 0
    while True:
        path, models, noises = tmp_path / str(steps) / "ledger.jsonl", [], []

        def run(life, path=path, models=models, noises=noises):
            strategy = fixed(noise_multiplier=1.0, ledger_path=path)
            last = [None]

            def watch(number, arrays):
                now = flat(arrays)
                if last[0] is not None:
                    models.append(now)
                    noises.append(CLIENTS * (now - last[0]) - sums[life])
                last[0] = now

            try:
                grid = FakeGrid(CLIENTS, moved(updates) if life == 0 else same)
                strategy.start(grid, model(), num_rounds=3, evaluate_fn=watch)
            finally:
                strategy._journal.close()  # as the end of a process does
            return strategy

        with monkeypatch.context() as patch:
            crash_at(patch, steps)
            try:
                run(0)
                break
            except Killed:
                shown.add(len(models))
        strategy = run(1)
        assert 3 <= strategy.rounds_charged <= 4  # at most the round that it died in is paid twice
        assert len(models) <= strategy.rounds_charged  # what was shown is charged
        apart = [np.abs(a - b).max() for i, a in enumerate(noises) for b in noises[:i]]
        assert min(apart, default=1.0) > 1e-3
        steps += 1
    assert steps > 15 and shown >= {0, 1, 2}


def test_a_ledger_that_is_older_than_its_model_is_refused(tmp_path):
    path = tmp_path / "ledger"
    for rounds in (2, 5):
        strategy = fixed(noise_multiplier=1.0, ledger_path=path)
        one_round(strategy, moved(updates), rounds=rounds)
        strategy._journal.close()
        if rounds == 2:
            backup = path.read_bytes()
    newest = path.read_bytes()
    for held in (newest, backup):
        path.write_bytes(held)
        strategy = fixed(noise_multiplier=1.0, ledger_path=path)
        if held is newest:
            assert len(one_round(strategy, moved(updates), rounds=6)[1].sent) == 2  # one round, and its evaluation
        else:
            with pytest.raises(PrivacyError, match=r"came after 6 charged rounds, but ledger_path=.* has 2"):
                one_round(strategy, moved(updates), rounds=6)
        strategy._journal.close()


def test_a_round_that_could_not_begin_makes_no_ledger_older_than_its_model(tmp_path, monkeypatch):
    """Flower counts a round that a full disk kept from beginning, and the ledger does not."""
    strategy = fixed(noise_multiplier=1.0, ledger_path=tmp_path / "ledger")

    def full(cohort):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(strategy._journal, "begin", full)
        one_round(strategy, moved(updates))
    with monkeypatch.context() as patch:
        real, rounds = strategy._journal.begin, iter([full])
        patch.setattr(strategy._journal, "begin", lambda cohort: next(rounds, real)(cohort))
        one_round(strategy, moved(updates), rounds=2)
    strategy._journal.close()
    again = fixed(noise_multiplier=1.0, ledger_path=tmp_path / "ledger")
    one_round(again, moved(updates), rounds=3)
    assert again.rounds_charged == 2


def test_an_empty_ledger_or_a_damaged_model_is_named(tmp_path):
    path = tmp_path / "ledger"
    path.touch()
    with pytest.raises(ValueError, match=r"holds 0 bytes and no whole line.*Restore"):
        fixed(noise_multiplier=1.0, ledger_path=path)
    path.unlink()
    strategy = fixed(noise_multiplier=1.0, ledger_path=path)
    one_round(strategy, moved(updates), rounds=3)
    strategy._journal.close()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3] + lines[5:]))  # a round is missing in the middle
    with pytest.raises(ValueError, match="damaged"):
        fixed(noise_multiplier=1.0, ledger_path=path)
    path.write_bytes(b"".join(lines))
    for held in (b"", b"PK\x03\x04 no archive", b"text"):
        (tmp_path / "ledger.npz").write_bytes(held)
        strategy = fixed(noise_multiplier=1.0, ledger_path=path)
        with pytest.raises(ValueError, match=r"ledger\.npz cannot be read .*Restore"):
            strategy.start(FakeGrid(CLIENTS, same), model(), num_rounds=4)
        strategy._journal.close()


def test_a_file_system_without_locks_is_not_a_second_server(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(ValueError, match=r"ledger_path=.*cannot lock files \(No locks available\).*local disk"):
        fixed(noise_multiplier=1.0, ledger_path=tmp_path / "ledger")


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_model_that_is_not_finite_is_refused_before_a_round_is_paid(bad):
    strategy = fixed(noise_multiplier=1.0)
    grid = FakeGrid(CLIENTS, moved(updates))
    with pytest.raises(PrivacyError, match="'b' holds numbers that are not finite"):
        strategy.start(grid, model(b=np.array([0, bad, 0, 0], np.float32)))
    assert grid.sent == [] and strategy.rounds_charged == 0


def mean_loss(contents, weighted_by_key):
    return MetricRecord({"loss": float(np.mean([content["metrics"]["loss"] for content in contents]))})


def test_a_metrics_function_that_needs_clients_metrics_is_refused_before_a_round_is_paid():
    strategy = fixed(flower.FedAvg(train_metrics_aggr_fn=mean_loss), noise_multiplier=1.0)
    grid = FakeGrid(CLIENTS, loud)
    with pytest.raises(ValueError, match=r"train_metrics_aggr_fn raises KeyError: 'loss'.*train_metrics=NoisedMetrics"):
        strategy.start(grid, model())
    assert grid.sent == [] and strategy.rounds_charged == 0


def test_a_strategy_that_raises_after_the_charge_loses_no_round(tmp_path):
    class Fragile(flower.FedAvg):
        def aggregate_train(self, server_round, replies):
            raise KeyError("loss")

    for attempt in (1, 2):
        strategy = fixed(Fragile(), noise_multiplier=0.0, ledger_path=tmp_path / "ledger")
        with pytest.raises(KeyError):
            one_round(strategy, moved(updates), rounds=3)
        strategy._journal.close()
        assert strategy.rounds_charged == attempt
    strategy = fixed(noise_multiplier=0.0, ledger_path=tmp_path / "ledger")
    result, _ = one_round(strategy, same, rounds=3)
    each = sum(clipped(updates(i)) for i in range(CLIENTS)) / CLIENTS
    np.testing.assert_allclose(flat(result.arrays), 2 * each, rtol=1e-5, atol=1e-6)  # both rounds are in the model


def test_the_norm_of_a_half_precision_update_is_that_of_what_is_added():
    """Differences in float16 round by up to 1/2048, all to the client's advantage if it looks for such numbers."""
    base = np.random.default_rng(0).uniform(1, 2, 60).astype(np.float16)
    others = np.arange(2**16, dtype=np.uint16).view(np.float16)
    others = others[np.isfinite(others)]
    sent = []
    for b in base:
        exact, believed = others.astype(np.float64) - float(b), np.abs((others - b).astype(np.float64))
        gain = np.where((believed > 0.5) & (believed < 1e4), np.abs(exact) / np.maximum(believed, 0.5), 0.0)
        sent.append(others[gain.argmax()])
    sent = np.array(sent, np.float16)
    total = ClippedSum({"w": base}, float(np.linalg.norm((sent - base).astype(np.float64))))
    total.add({"w": sent})
    assert np.linalg.norm(total.total["w"]) <= total.l2_norm_clip * (1 + 1e-6)


def test_a_training_goes_on_where_it_was(tmp_path):
    ends = []
    for parts in ([4], [2, 4]):
        path = tmp_path / f"{len(parts)}.jsonl"
        for rounds in parts:
            strategy = fixed(flower.FedAdam(), ledger_path=path)
            result = strategy.start(FakeGrid(CLIENTS, moved(updates)), model(), num_rounds=rounds)
            strategy._journal.close()
        ends.append(flat(result.arrays))
        assert strategy.rounds_charged == 4 and max(result.train_metrics_clientapp) == 4
    np.testing.assert_allclose(*ends, rtol=1e-6)
    assert (path.stat().st_mode & 0o777) == 0o600
    done = fixed(flower.FedAdam(), ledger_path=path)
    again = done.start(FakeGrid(CLIENTS, moved(updates)), model(), num_rounds=4)  # nothing is left to do
    np.testing.assert_allclose(flat(again.arrays), ends[0], rtol=1e-6)
    assert done.rounds_charged == 4
    done._journal.close()
    with pytest.raises(ValueError, match="saved model"):
        fixed(flower.FedAdam(), ledger_path=path).start(FakeGrid(1, same), model(w=np.ones(2, np.float32)))


def test_a_lost_round_is_run_again_with_its_clients(tmp_path):
    path = tmp_path / "ledger"
    grid = FakeGrid(40, moved(updates))
    strategy = fixed(noise_multiplier=1.0, sampling_rate=0.5, ledger_path=path)
    lost = [m.metadata.dst_node_id for m in strategy.configure_train(1, model(), _config(), grid)]
    strategy._journal.close()
    strategy = fixed(noise_multiplier=1.0, sampling_rate=0.5, ledger_path=path)
    assert strategy.rounds_charged == 0
    strategy.start(grid, model(), num_rounds=1)
    assert grid.sent[0] == lost and strategy.rounds_charged == 1


def test_a_ledger_is_of_one_training(tmp_path):
    path = tmp_path / "ledger"
    first = fixed(noise_multiplier=1.0, ledger_path=path)
    with pytest.raises(ValueError, match="in use"):
        fixed(noise_multiplier=1.0, ledger_path=path)
    one_round(first, moved(updates))
    first._journal.close()
    for other in (
        dict(noise_multiplier=2.0),
        dict(noise_multiplier=1.0, l2_norm_clip=2.0),
        dict(noise_multiplier=1.0, sampling_rate=0.5),
    ):
        with pytest.raises(PrivacyError, match="another"):
            fixed(ledger_path=path, **other)
    whole = path.read_bytes()
    for cut in range(len(whole) - whole[:-1].rfind(b"\n") - 1):  # torn within the last line
        path.write_bytes(whole[: len(whole) - cut])
        torn = fixed(noise_multiplier=1.0, ledger_path=path)
        assert torn.rounds_charged == (1 if cut == 0 else 0)
        torn._journal.close()
    path.write_bytes(whole + b'{"unknown": 1}\n')
    with pytest.raises(ValueError, match="damaged"):
        fixed(noise_multiplier=1.0, ledger_path=path)


@pytest.mark.parametrize("when", ["begin", "charge"])
def test_a_full_disk_releases_nothing(tmp_path, monkeypatch, when, caplog):
    strategy = fixed(noise_multiplier=1.0, ledger_path=tmp_path / "ledger")
    lines, full = strategy._journal._file, []
    real = lines._file

    class Full:
        """Half of what is written gets there."""

        def write(self, text):
            if when.encode() in text and full:
                return real.write(text[: len(text) // 2])
            return real.write(text)

        def __getattr__(self, name):
            return getattr(real, name)

    lines._file = Full()
    full.append(True)
    result, grid = one_round(strategy, moved(updates), rounds=2)
    assert strategy.rounds_charged == 0 and flat(result.arrays) == pytest.approx(np.zeros(10))
    assert "cannot be written" in caplog.text
    assert (grid.sent[0] == []) == (when == "begin")
    full.clear()
    strategy.start(grid, model(), num_rounds=1)
    assert strategy.rounds_charged == 1
    strategy._journal.close()
    again = fixed(noise_multiplier=1.0, ledger_path=tmp_path / "ledger")
    assert again.rounds_charged == 1


def test_replies_without_a_round_are_ignored(caplog):
    strategy = fixed(noise_multiplier=1.0)
    grid = FakeGrid(2, moved(updates))
    messages = strategy.configure_train(1, model(), _config(), grid)
    replies = grid.send_and_receive(messages)
    assert strategy.aggregate_train(1, replies)[0] is not None
    assert strategy.aggregate_train(1, replies) == (None, None) and "belongs to no round" in caplog.text
    assert strategy.rounds_charged == 1


def test_what_a_failed_write_has_left_spoils_no_shorter_line(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError("no space left")

    journal = Journal(tmp_path / "ledger", {})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fails)
        with pytest.raises(OSError):
            journal.begin([str(node) for node in range(100)])
    journal.begin([])
    journal.charge([])
    journal.close()
    again = Journal(tmp_path / "ledger", {})
    assert again.charged == [[]] and again.begun is None
    again.close()


def test_an_editor_can_show_every_argument_and_the_old_name_of_the_clip_still_works():
    for made in (Fixed, Adaptive, NbAFLStrategy, local_dp_mod, nbafl_mod):
        shown = inspect.signature(made).parameters
        assert not [p for p in shown.values() if p.kind is p.VAR_KEYWORD] and "l2_norm_clip" in shown
    how = dict(noise_multiplier=1.0, clients_per_round=2, delta=1e-5)
    with pytest.warns(DeprecationWarning, match="clip= has a new name: write l2_norm_clip="):
        assert Fixed(flower.FedAvg(), clip=0.5, **how).current_clip == 0.5
    with pytest.raises(ValueError, match=r"AdaptiveClip\(initial=0.5\), or use DifferentialPrivacyFixedClipping"):
        Adaptive(flower.FedAvg(), l2_norm_clip=0.5, **how)
