"""What users do to a federation, on purpose or not, that would make ε too small."""

import numpy as np
import pytest

pytest.importorskip("flwr")
import dp_accounting
from dp_accounting import dp_event
from flower_fakes import FakeGrid, arrays_in, flat, model, moved, reply
from flwr.app import ConfigRecord
from flwr.serverapp import strategy as flower

from tfdpfl import PrivacyError
from tfdpfl.flower import DifferentialPrivacyFixedClipping as Fixed

CLIENTS = 4


def fixed(inner=None, **arguments):
    given = dict(noise_multiplier=2.0, l2_norm_clip=1.0, delta=1e-5, clients_per_round=CLIENTS)
    return Fixed(inner or flower.FedAvg(), **{**given, **arguments})


def epsilon_of(rounds, z=2.0, delta=1e-5):
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_event.GaussianDpEvent(z), rounds)
    return accountant.get_epsilon(delta)


def life(strategy, rounds, nodes=None):
    """One process of a server: it trains, and ends."""
    grid = FakeGrid(CLIENTS, moved(lambda number: np.full(10, 0.1)))
    if nodes is not None:
        grid.nodes = nodes
        grid.answer = lambda message, number: reply(message, arrays_in(message))
    try:
        return strategy.start(grid, model(), num_rounds=rounds)
    finally:
        strategy._journal.close()


@pytest.mark.slow
def test_other_numbers_of_rounds_and_other_strategies_forget_no_round(tmp_path):
    path, ran = tmp_path / "ledger", 0
    for inner, rounds in (
        (flower.FedAdam(), 2), (flower.FedAvg(), 1), (flower.FedProx(proximal_mu=0.1), 3), (flower.FedAvgM(), 0),
        (flower.FedYogi(), 5), (flower.FedAdagrad(), 6), (flower.FedAdam(), 7),
    ):  # fmt: skip
        strategy = fixed(inner, ledger_path=path)
        result = life(strategy, rounds)
        ran = max(ran, rounds)
        assert strategy.rounds_charged == ran and np.isfinite(flat(result.arrays)).all()
        assert strategy.epsilon == pytest.approx(epsilon_of(ran), rel=1e-3)
    assert epsilon_of(ran, delta=1e-7) <= fixed(ledger_path=path, delta=1e-7).epsilon * (1 + 1e-6)
    end = fixed(ledger_path=tmp_path / "b", target_epsilon=epsilon_of(3) + 0.01)
    life(end, 100)
    again = fixed(ledger_path=tmp_path / "b", target_epsilon=epsilon_of(3) + 0.01)
    life(again, 100)  # the budget is not there twice
    assert end.rounds_charged == again.rounds_charged == 3 and again.stopped_by == "target_epsilon"


def test_exact_evaluations_do_not_slip_into_a_ledger_that_promised_none(tmp_path):
    life(fixed(ledger_path=tmp_path / "ledger"), 1)
    with pytest.raises(PrivacyError, match="another evaluations"):
        fixed(ledger_path=tmp_path / "ledger", evaluate_metrics="unprotected")


def test_nodes_with_new_ids_get_no_new_allowance(tmp_path):
    """As after a SuperLink that kept no database, or in another simulation: then limits would begin anew."""

    def limited(path="ledger", **arguments):
        return fixed(ledger_path=tmp_path / path, max_participations=3, **arguments)

    life(limited(), 2)
    with pytest.raises(PrivacyError, match="None of the 4 connected nodes"):
        life(limited(), 4, nodes=[901, 902, 903, 904])
    strategy = limited()
    life(strategy, 5, nodes=[103, 104, 902, 903])  # two of them have one round left
    counts = [sum(node in cohort for cohort in strategy.cohorts) for node in ("101", "103", "104", "902")]
    assert counts == [2, 3, 3, 3] and strategy.epsilon == pytest.approx(epsilon_of(3), rel=1e-3)
    life(limited("b", population=4), 1)
    with pytest.raises(PrivacyError, match="of population=4"):
        life(limited("b", population=4), 2, nodes=[104, 901, 902, 903])


def test_a_seed_cannot_draw_the_noise_of_a_ledgers_rounds_again(tmp_path):
    life(fixed(ledger_path=tmp_path / "ledger", seed=1), 1)
    with pytest.raises(PrivacyError, match="would be drawn again"):
        fixed(ledger_path=tmp_path / "ledger", seed=1)
    begun = fixed(ledger_path=tmp_path / "b")
    begun.configure_train(1, model(), ConfigRecord(), FakeGrid(CLIENTS, None))
    begun._journal.close()
    with pytest.raises(PrivacyError, match="would be drawn again"):
        fixed(ledger_path=tmp_path / "b", seed=1)
    fixed(ledger_path=tmp_path / "b")._journal.close()  # and the file is free again


def test_a_ledger_that_another_folder_would_not_have_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    life(fixed(ledger_path="ledger"), 1)
    assert str(tmp_path / "ledger") in caplog.text and "give the whole path" in caplog.text
    caplog.clear()
    life(fixed(ledger_path="ledger"), 2)
    life(fixed(ledger_path=tmp_path / "other"), 1)
    assert caplog.text == ""
