"""Who is asked in a round: coins, limits, and clients whose nodes come, go and get new ids."""

import collections
import json
import logging
import os

import numpy as np
import pytest

pytest.importorskip("flwr")
import itertools
import math

from dp_accounting import dp_event
from flower_fakes import FakeGrid, arrays_in, model, moved, reply
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp import strategy as flower
from strategy_cases import LARGE, config, fixed, limited, looks_like, one_round, same, updates

import tfdpfl
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.flower import Roster


def first_two_rounds():
    return PrivacyLedger().add(dp_event.GaussianDpEvent(1.0), 2, adjacency="zero_out").epsilon(1e-5, "rdp")


def test_a_client_keeps_its_limits_and_its_name_when_its_node_gets_another_id(tmp_path):
    roster = tmp_path / "roster.json"
    roster.write_text(json.dumps({"101": "a", "102": "b", "103": "a"}))
    grid = FakeGrid(4, lambda message, number: reply(message, arrays_in(message)))
    first = limited(tmp_path / "ledger", Roster(roster))
    first.start(grid, model(), num_rounds=1)
    assert sorted(grid.sent[0]) == [101, 102] and sorted(first.cohorts[0]) == sorted(first.contributors[0]) == [
        "a",
        "b",
    ]
    first._journal.close()
    roster.write_text(json.dumps({"201": "a", "202": "b", "203": "c"}))  # both installed anew, one joins
    grid.nodes = [201, 202, 203]
    again = limited(tmp_path / "ledger", Roster(roster))
    again.start(grid, model(), num_rounds=5)
    counts = collections.Counter(client for cohort in again.cohorts for client in cohort)
    assert counts == {"a": 2, "b": 2, "c": 2} and again.epsilon == first_two_rounds()


def test_a_client_with_two_nodes_counts_once_and_a_stranger_is_not_asked(caplog):
    logging.getLogger("flwr").setLevel(logging.WARNING)
    names = {101: "a", 102: "a", 103: "b", 104: None}
    for how in (dict(sampling_rate=1.0, clients_per_round=None), dict(clients_per_round=3), dict(max_participations=2)):
        grid = FakeGrid(4, lambda message, number: reply(message, arrays_in(message)))
        strategy = limited(None, names.get, **{"max_participations": None, **how})
        strategy.start(grid, model(), num_rounds=1)
        assert sorted(grid.sent[0]) == [101, 103] and sorted(strategy.cohorts[0]) == ["a", "b"]
    assert "Node 104 belongs to no client that clients= names" in caplog.text


def test_a_roster_that_breaks_keeps_what_it_had(tmp_path, caplog):
    path = tmp_path / "roster.json"
    with pytest.raises(ValueError, match="cannot be read"):
        Roster(path)
    path.write_text('["hospital"]')
    with pytest.raises(ValueError, match=r'Write for instance \{"4938271": "hospital-0"\}'):
        Roster(path)
    path.write_text('{"1": "hospital-0"}')
    roster = Roster(path)
    path.write_text("{")
    os.utime(path, ns=(0, 0))
    assert roster(1) == "hospital-0" and "The roster is that of before" in caplog.text
    path.write_text('{"2": "hospital-0"}')
    assert roster(1) is None and roster(2) == "hospital-0"


def test_a_strategy_does_not_wait_for_a_node_that_left_while_it_chose():
    grid = FakeGrid(3, lambda message, number: reply(message, arrays_in(message)))
    seen = iter([[101, 102, 103], [101, 102]])
    grid.get_node_ids = lambda: next(seen, [101, 102])
    strategy = limited(None, None, max_participations=None)
    strategy.start(grid, model(), num_rounds=1)
    assert sorted(grid.sent[0]) == [101, 102, 103]  # the third counts as one that does not answer


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
    lost = {m.metadata.dst_node_id for m in strategy.configure_train(1, model(), config(), grid)}
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


def test_a_lost_round_is_run_again_with_its_clients(tmp_path):
    path = tmp_path / "ledger"
    grid = FakeGrid(40, moved(updates))
    strategy = fixed(noise_multiplier=1.0, sampling_rate=0.5, ledger_path=path)
    lost = [m.metadata.dst_node_id for m in strategy.configure_train(1, model(), config(), grid)]
    strategy._journal.close()
    strategy = fixed(noise_multiplier=1.0, sampling_rate=0.5, ledger_path=path)
    assert strategy.rounds_charged == 0
    strategy.start(grid, model(), num_rounds=1)
    assert grid.sent[0] == lost and strategy.rounds_charged == 1
