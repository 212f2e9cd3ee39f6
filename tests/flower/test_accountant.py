"""The accountant behind Flower's own wrappers; upstream's rdp_accountant_test asks the same of theirs."""

import json
import math

import pytest

pytest.importorskip("flwr")
from dp_accounting import dp_event
from flower_fakes import moved
from flwr.serverapp import strategy as flower
from strategy_cases import E1, epsilon_of, run

from tfdpfl.flower import (
    LedgerAccountant,
)


def flower_accountant():
    from flwr.supercore import privacy_accounting as pa
    from flwr.supercore.privacy_accounting.rdp_accountant import RdpAccountant

    sampling, relation = pa.SamplingMethod.NO_AMPLIFICATION, pa.NeighboringRelation.ADD_OR_REMOVE_ONE
    return RdpAccountant(pa.PrivacyConfig(1e-5, 4, relation, sampling))


def test_the_accountant_prices_their_wrapper():
    ours, theirs = LedgerAccountant(1e-5), flower_accountant()
    for accountant in (ours, theirs):
        strategy = flower.DifferentialPrivacyServerSideFixedClipping(
            flower.FedAvg(), 1.2, 1.0, 4, accountant=accountant
        )
        run(strategy, moved(lambda n: E1 * (n + 1)), rounds=5)
    spent = ours.get_privacy_spent()
    assert (spent.num_releases, spent.delta, spent.accounting_method) == (5, 1e-5, "pld")
    assert spent.epsilon == pytest.approx(epsilon_of(dp_event.GaussianDpEvent(1.2 / math.sqrt(5))))
    assert spent.epsilon < theirs.get_privacy_spent().epsilon  # RDP is the looser
    assert LedgerAccountant(1e-5, accountant="rdp").get_epsilon(1e-5) == 0.0


def test_the_accountant_keeps_flowers_protocol():
    from flwr.supercore.privacy_accounting import GaussianPrivacyEvent

    accountant = LedgerAccountant(1e-5, population_size=10, max_epsilon=6.0)
    event = GaussianPrivacyEvent(2.0, 4, 10)
    accountant.compose(event, 2)
    before = accountant.get_epsilon(1e-5)
    assert not accountant.would_exceed(event) and accountant.would_exceed(event, count=50)
    assert accountant.num_releases == 2 and accountant.get_epsilon(1e-5) == before
    assert accountant.get_delta(before) == pytest.approx(1e-5, rel=0.01)
    assert accountant.get_epsilon(accountant.get_delta(1.0)) <= 1.0
    again = LedgerAccountant(1e-5, population_size=10)
    again.load_state_dict(json.loads(json.dumps(accountant.state_dict())))
    assert again.get_epsilon(1e-5) == before
    for wrong in (
        lambda: accountant.compose(GaussianPrivacyEvent(2.0, 4, 11)),
        lambda: again.would_exceed(event),
        lambda: LedgerAccountant(1e-6).load_state_dict(accountant.state_dict()),
        lambda: LedgerAccountant(2.0),
        lambda: accountant.compose(event, 0),
    ):
        with pytest.raises(ValueError):
            wrong()
