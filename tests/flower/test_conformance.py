"""What Flower's own DP gets wrong, each shown right here; and what its tests ask, asked of ours.

Facts on Flower are those of release 1.41: its wrappers (`serverapp.strategy.dp_*`), mods (`clientapp.mod`) and helpers.
"""

import json
import math

import numpy as np
import pytest

pytest.importorskip("flwr")
from dp_accounting import dp_event
from flower_fakes import arrays_in, flat, model, moved, reply
from flower_oracle import UPDATES, expected_of
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import mod as their_mods
from flwr.serverapp import strategy as flower
from flwr.serverapp.exception import PrivacyBudgetExhausted
from strategy_cases import E1, epsilon_of, run

import tfdpfl
from tfdpfl import AdaptiveClip, PrivacyLedger
from tfdpfl.flower import (
    DifferentialPrivacyAdaptiveClipping,
    DifferentialPrivacyFixedClipping,
    LedgerAccountant,
    local_dp_mod,
)


def fixed(inner=None, **arguments):
    given = dict(noise_multiplier=0.0, l2_norm_clip=1.0, delta=1e-5, clients_per_round=4)
    return DifferentialPrivacyFixedClipping(inner or flower.FedAvg(), **{**given, **arguments})


# The faults.


def test_the_adaptive_rule_is_fed_the_fraction_within_the_clip():
    """Flower feeds the fraction beyond it: from 3 its clip grows without end, from 0.1 it shrinks to nothing."""
    for initial, sign in ((100.0, -1), (0.01, 1)):
        strategy = DifferentialPrivacyAdaptiveClipping(
            flower.FedAvg(),
            noise_multiplier=0.0,
            l2_norm_clip=AdaptiveClip(initial=initial),
            clients_per_round=4,
            delta=1e-5,
        )
        run(strategy, moved(lambda n: E1))
        assert math.log(strategy.current_clip / initial) == pytest.approx(sign * 0.1)  # lr * 1/2, towards the norms


def test_clients_weigh_the_same_whatever_they_say_they_hold():
    """Flower's noise is z C / clients while FedAvg weights by examples: one client's share can be all of it."""

    def answer(message, number):
        got = moved(lambda n: np.eye(10)[n])(message, number)
        got.content["metrics"]["num-examples"] = [1, 1, 1, 10**9][number]
        return got

    np.testing.assert_allclose(flat(run(fixed(), answer).arrays)[:4], 0.25, rtol=1e-5)


def test_the_end_of_the_budget_keeps_the_result():
    """Flower raises out of ``start``."""
    strategy = fixed(noise_multiplier=1.0, target_epsilon=10.0)
    result = run(strategy, moved(lambda n: E1), rounds=100)
    assert result.arrays and 0 < len(result.train_metrics_clientapp) < 100 and strategy.epsilon <= 10.0
    theirs = flower.DifferentialPrivacyServerSideFixedClipping(
        flower.FedAvg(), 1.0, 1.0, 4, accountant=LedgerAccountant(1e-5, max_epsilon=10.0)
    )
    with pytest.raises(PrivacyBudgetExhausted):
        run(theirs, moved(lambda n: E1), rounds=100)


def test_noise_is_no_function_of_numpys_global_generator():
    """Flower's is: a notebook that seeds numpy knows its noise."""
    ends = []
    for _ in range(2):
        np.random.seed(0)
        ends.append(flat(run(fixed(noise_multiplier=1.0), moved(lambda n: E1)).arrays))
    assert np.abs(ends[0] - ends[1]).min() > 0


def test_metrics_are_charged_or_not_shown():
    noised = tfdpfl.federated.NoisedMetrics(noise_multiplier=2.0, bound={"loss": 1.0})
    answer = lambda m, n: reply(m, arrays_in(m), {"loss": 0.5})
    shown = fixed(noise_multiplier=1.0, train_metrics=noised)
    assert "loss" in run(shown, answer).train_metrics_clientapp[1]
    assert shown.epsilon == pytest.approx(epsilon_of(dp_event.GaussianDpEvent(1.0), dp_event.GaussianDpEvent(2.0)))
    assert "loss" not in run(fixed(noise_multiplier=1.0), answer).train_metrics_clientapp[1]


def test_local_noise_composes_and_needs_no_small_epsilon():
    """Flower's LocalDpMod asks for an ε, adds the classic theorem's noise, which is unproven from ε = 1 up, each time,
    and never adds up."""
    mod, context = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=2.0, delta=1e-5), a_context()
    found = [report_of(call(mod, context, lambda w: w + 1))["epsilon"] for _ in range(3)]
    expected = [
        tfdpfl.accounting.price(
            dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(1.0), k), 1e-5, "pld", "replace_one"
        ).epsilon
        for k in (1, 2, 3)
    ]
    assert found == pytest.approx(expected) and found[0] > 1


# What Flower's own tests ask, asked of ours.


def a_context(node=101, **config):
    return Context(1, node, {"partition-id": 0}, RecordDict(), config)


def call(mod, context, change, message=None):
    message = message or Message(RecordDict({"arrays": model(), "config": ConfigRecord({"lr": 0.1})}), 101, "train")

    def app(message, context):
        return reply(message, {k: change(v) for k, v in arrays_in(message).items()}, {"loss": 3.0})

    return mod(message, context, app)


def report_of(message):
    return json.loads(message.content["tfdpfl.privacy"]["report"])


def test_the_adaptive_split_is_the_theorems_and_small_cohorts_have_a_default_that_works():
    of_updates, of_count = AdaptiveClip().split(1.0, 100.0)
    assert of_count == 5.0 and of_updates == pytest.approx((1 - (2 * 5.0) ** -2) ** -0.5)
    assert AdaptiveClip().split(0.0, 50.0) == (0.0, 0.0)
    of_updates, of_count = AdaptiveClip(clipped_count_stddev=5.0).split(3.0, 200.0)
    assert of_count == 5.0 and of_updates == pytest.approx((3.0**-2 - 10.0**-2) ** -0.5)
    with pytest.raises(ValueError, match="clipped_count_stddev"):
        AdaptiveClip(clipped_count_stddev=5.0).split(10.0, 100.0)
    assert AdaptiveClip().split(10.0, 100.0)[0] < 11.6  # where Flower raises, and names no mend


def test_their_fixed_mod_and_our_strategy_work_together():
    """Clipping twice by the same clip is clipping once."""

    def answer(message, number):
        message.content["config"]["clipping_norm"] = 1.0
        return their_mods.fixedclipping_mod(message, a_context(), lambda m, c: moved(lambda n: 5 * E1)(m, number))

    np.testing.assert_allclose(flat(run(fixed(), answer).arrays), E1, rtol=1e-6)


def test_a_mod_refuses_a_message_without_a_single_model():
    with pytest.raises(ValueError, match="0 ArrayRecords"):
        call(
            local_dp_mod(l2_norm_clip=1.0, noise_multiplier=1.0, delta=1e-5),
            a_context(),
            np.copy,
            Message(RecordDict(), 101, "train"),
        )


def test_our_mod_lets_nothing_out_but_a_noisy_update_and_its_price():
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=1e-9, delta=1e-5)
    answer = call(mod, a_context(), lambda w: w + 7)
    assert np.linalg.norm(flat(answer.content["arrays"])) == pytest.approx(1.0, abs=1e-6)
    assert dict(answer.content["metrics"]) == {"num-examples": 1.0}
    assert set(answer.content) == {"arrays", "metrics", "tfdpfl.privacy"}


# The accountant behind their wrappers (upstream's rdp_accountant_test asks the same of theirs).


# One mathematics.


def test_a_round_of_ours_is_a_round_of_the_tff_process():
    """`test_same_as_tff.py` asks the same of TFF's process, on the stack that has it."""
    adaptive = AdaptiveClip(initial=1.0)
    strategy = DifferentialPrivacyAdaptiveClipping(
        flower.FedAvg(), noise_multiplier=0.0, l2_norm_clip=adaptive, clients_per_round=5, delta=1e-5
    )
    result = run(strategy, moved(lambda n: UPDATES[n]), rounds=4)
    weights, clip = expected_of(adaptive, 5, 4)
    np.testing.assert_allclose(flat(result.arrays), weights, atol=1e-6)
    assert strategy.current_clip == pytest.approx(clip, rel=1e-9)


def test_a_ledger_of_a_report_is_a_ledger():
    report = report_of(call(local_dp_mod(l2_norm_clip=1.0, noise_multiplier=2.0, delta=1e-5), a_context(), lambda w: w))
    assert PrivacyLedger.from_dict(report["ledger"]).epsilon(1e-5) == report["epsilon"]
    assert report["adjacency"] == "replace_one" and report["level"] == "local"
