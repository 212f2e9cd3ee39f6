"""Plans of federations: their ε is dp-accounting's, and that of the strategies and clients that are built from them."""

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from dp_accounting import dp_event, pld

from tfdpfl import PrivacyError
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.cli import main
from tfdpfl.federated import plan_federation

CLIENTS = dict(population=1000, sampling_rate=0.05, delta=1e-5)
FIXED = dict(population=20, clients_per_round=4, delta=1e-3)
EXAMPLES = dict(FIXED, unit="example", num_examples=800, batch_size=64, local_steps=5)


def epsilon_of(event, times, delta):
    accountant = pld.PLDAccountant()
    return accountant.compose(event, times).get_epsilon(delta)


@pytest.mark.parametrize(
    ("given", "event", "times"),
    [
        (FIXED, dp_event.GaussianDpEvent, 30),  # a fixed cohort claims nothing
        (dict(FIXED, max_participations=3), dp_event.GaussianDpEvent, 3),
        (dict(FIXED, min_separation=4), dp_event.GaussianDpEvent, 8),
        (dict(EXAMPLES, num_examples=50, max_participations=2), dp_event.GaussianDpEvent, 10),
    ],
)
def test_noise_is_the_least_and_epsilon_is_of_the_rounds_that_a_unit_can_be_in(given, event, times):
    plan = plan_federation(**given, num_rounds=30, target_epsilon=2.0)
    z, delta = plan.noise_multiplier, given["delta"]
    assert plan.epsilon == pytest.approx(epsilon_of(event(z), times, delta), rel=1e-3) and plan.epsilon <= 2
    assert epsilon_of(event(0.997 * z), times, delta) > 2
    again = plan_federation(**given, num_rounds=30, noise_multiplier=z)
    assert again.epsilon == again.target_epsilon == plan.epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("given", "rate", "times"), [(CLIENTS, 0.05, 30), (EXAMPLES, 0.08, 150)])
def test_coins_of_clients_and_of_steps_make_epsilon_smaller(given, rate, times):
    plan = plan_federation(**given, num_rounds=30, noise_multiplier=1.1)
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(1.1))
    assert plan.epsilon == pytest.approx(epsilon_of(event, times, given["delta"]), rel=1e-3)


def test_rounds_are_the_most_and_without_amplification_those_of_the_closed_form():
    given = dict(FIXED, noise_multiplier=20.0)
    plan = plan_federation(**given, target_epsilon=1.0)

    def delta(rounds):  # of a Gaussian mechanism (Balle and Wang 2018, theorem 8), at epsilon 1
        from scipy.stats import norm

        m = math.sqrt(rounds) / 20
        return norm.cdf(m / 2 - 1 / m) - math.e * norm.cdf(-m / 2 - 1 / m)

    assert delta(plan.num_rounds) <= 1e-3 < delta(plan.num_rounds + 2)
    assert plan_federation(**given, num_rounds=plan.num_rounds + 1).epsilon > 1


def test_a_strategy_that_is_built_from_a_plan_runs_its_rounds_and_no_more():
    pytest.importorskip("flwr")
    from flower_fakes import FakeGrid, model, moved
    from flwr.serverapp.strategy import FedAvg

    from tfdpfl.flower import DifferentialPrivacyFixedClipping

    for cohort in (dict(sampling_rate=0.3, noise_multiplier=0.9), dict(clients_per_round=2, noise_multiplier=2.5)):
        plan = plan_federation(population=5, delta=1e-2, **cohort, target_epsilon=2.0)
        strategy = DifferentialPrivacyFixedClipping(FedAvg(fraction_evaluate=0), l2_norm_clip=1.0, **plan.arguments)
        grid = FakeGrid(5, moved(lambda number: np.ones(10)))
        strategy.start(grid, model(), num_rounds=plan.num_rounds + 3)
        assert strategy.rounds_charged == plan.num_rounds > 1 and strategy.stopped_by == "target_epsilon"
        assert strategy.epsilon == plan.epsilon


def test_the_ledger_of_a_client_that_is_built_from_a_plan_has_room_for_its_rounds():
    plan = plan_federation(**EXAMPLES, num_rounds=7, noise_multiplier=2.0)
    given = plan.arguments
    assert given.keys() == {"noise_multiplier", "delta", "target_epsilon", "batch_size", "local_steps"}
    ledger = PrivacyLedger()
    for _ in range(7):  # as example_dp does, one participation after the other
        assert ledger.epsilon(given["delta"]) < plan.epsilon
        ledger = PrivacyLedger.from_dict(ledger.to_dict()).record(
            given["noise_multiplier"], given["local_steps"], num_examples=800, batch_size=given["batch_size"],
            adjacency="zero_out",
        )  # fmt: skip
    assert ledger.epsilon(given["delta"]) == plan.epsilon <= given["target_epsilon"]


def test_the_command_prints_the_plan_and_its_json_has_the_arguments():
    options = [f"--{name.replace('_', '-')}={value}" for name, value in EXAMPLES.items()]
    ran = CliRunner().invoke(
        main, ["plan", "--federated", *options, "--num-rounds=7", "--noise-multiplier=2", "--json"]
    )
    plan = plan_federation(**EXAMPLES, num_rounds=7, noise_multiplier=2.0)
    assert json.loads(ran.output) == plan.to_dict() and json.loads(ran.output)["arguments"] == plan.arguments
    assert f"noise_multiplier={plan.noise_multiplier!r}" in str(plan) and "example_dp(" in str(plan)
    large = plan_federation(**{**FIXED, "delta": 0.1}, num_rounds=1, noise_multiplier=1.0)
    assert "delta is not below 1 / 20 clients" in str(large) and "0.25 times the clip" in str(large)
    refused = CliRunner().invoke(main, ["plan", "--federated", *options])
    assert refused.exit_code == 2 and "Give two of them" in refused.output


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(CLIENTS, num_rounds=3), "target_epsilon=None, noise_multiplier=None, num_rounds=3. Give two"),
        (dict(CLIENTS, num_rounds=3, noise_multiplier=1.0, target_epsilon=1.0), "Give two of them"),
        (dict(CLIENTS, num_rounds=0, noise_multiplier=1.0), "num_rounds must be"),
        (dict(CLIENTS, num_rounds=3, noise_multiplier=0.0), "noise_multiplier must be"),
        (dict(CLIENTS, num_rounds=3, noise_multiplier=1.0, clients_per_round=3), "Give one of clients_per_round"),
        (dict(CLIENTS, num_rounds=3, noise_multiplier=1.0, max_participations=3), "keeps to no limit"),
        (dict(CLIENTS, num_rounds=3, noise_multiplier=1.0, num_examples=3), "num_examples=3: the ε of a client"),
        (dict(CLIENTS, num_rounds=3, noise_multiplier=1.0, sampling_rate=1.5), "sampling_rate must be at most 1"),
        (dict(FIXED, num_rounds=3, noise_multiplier=1.0, population=3), "population must be"),
        (dict(EXAMPLES, num_rounds=3, noise_multiplier=1.0, local_steps=None), "needs all of them"),
        (dict(EXAMPLES, num_rounds=3, noise_multiplier=1.0, batch_size=0), "batch_size must be"),
    ],
)
def test_what_makes_no_plan_is_refused(given, said):
    with pytest.raises(ValueError, match=said):
        plan_federation(**given)


def test_a_target_that_no_number_of_rounds_meets_best_is_refused():
    with pytest.raises(PrivacyError, match="leaves no room for one round, which costs"):
        plan_federation(**CLIENTS, noise_multiplier=0.1, target_epsilon=0.01)
    with pytest.raises(PrivacyError, match="in any number of rounds"):
        plan_federation(**FIXED, max_participations=2, noise_multiplier=9.0, target_epsilon=1.0)
