"""A ledger composes what it recorded, and comes back from JSON as it was."""

import dataclasses
import json
import math

import dp_accounting
import pytest
from accounting_cases import DATA, RUN, gaussian_epsilon

from tfdpfl.accounting import PrivacyLedger, compute_epsilon, price, privacy_report
from tfdpfl.accounting.correlated import CorrelatedRun
from tfdpfl.errors import PrivacyError
from tfdpfl.noise import Tree


def test_passes_that_were_begun_are_priced_and_their_steps_counted():
    how = dict(num_examples=100, batch_size=10, sampling="shuffle")
    ledger = PrivacyLedger().record(2.0, 3, epochs=1, **how).record(2.0, 14, epochs=2, **how)
    assert len(ledger) == 1 and ledger.steps == 17
    whole = compute_epsilon(**how, noise_multiplier=2.0, num_epochs=3, delta=1e-3)
    assert ledger.epsilon(1e-3) == pytest.approx(whole)
    assert ledger.report(1e-3).participations == 3
    assert PrivacyLedger.from_dict(json.loads(json.dumps(ledger.to_dict()))) == ledger
    ledger.record(2.0, epochs=1, **how)
    assert ledger.steps == 27 and ledger.report(1e-3).participations == 4
    ledger.record(2.0, 5, **how)  # goes on in the pass that was begun last
    assert ledger.steps == 32 and ledger.report(1e-3).participations >= 5
    with pytest.raises(ValueError, match="num_steps=11 is more than the 10 steps"):
        PrivacyLedger().record(2.0, 11, epochs=1, **how)


def test_a_ledger_of_single_steps_is_one_row_and_costs_what_the_run_costs():
    ledger = PrivacyLedger()
    for _ in range(240):
        ledger.record(1.1, **DATA)
    assert len(ledger) == 1 and ledger.steps == 240
    assert ledger.epsilon(1e-5, "rdp") == compute_epsilon(**RUN, num_steps=240, accountant="rdp")
    assert ledger.report(1e-5, "rdp") == dataclasses.replace(
        privacy_report(**RUN, num_steps=240, accountant="rdp"), shuffled_epsilon=None
    )


@pytest.mark.parametrize(
    ("accountant", "make"),
    [("pld", dp_accounting.pld.PLDAccountant), ("rdp", dp_accounting.rdp.RdpAccountant)],
)
def test_steps_of_different_noise_compose_as_dp_accounting_composes_them(accountant, make):
    ledger = PrivacyLedger().record(2.2, 300, **DATA).record(4.0, 700, **DATA).record(2.2, 100, **DATA)
    theirs = make()
    for sigma, steps in [(2.2, 400), (4.0, 700)]:
        step = dp_accounting.PoissonSampledDpEvent(250 / 60000, dp_accounting.GaussianDpEvent(sigma))
        theirs.compose(step, steps)
    assert len(ledger) == 2
    assert ledger.epsilon(1e-5, accountant) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-3)
    assert ledger.report(1e-5, accountant).noise_multiplier is None


def test_any_event_can_be_added_to_a_ledger():
    gaussian = dp_accounting.GaussianDpEvent(3.0)
    ledger = PrivacyLedger().add(gaussian, 5).add(gaussian, 4)
    assert len(ledger) == 1 and ledger.steps == 9
    assert ledger.epsilon(1e-5) == pytest.approx(gaussian_epsilon(1.0, 1e-5), rel=1e-4)
    ledger.record(2.0, **DATA)
    report = ledger.report(1e-5, "rdp")
    assert report.steps == report.participations == 10 and report.noise_multiplier is None
    assert "mechanism: 2 kinds of noisy results, 10 results in all\n    poisson" in str(report)
    assert report.unit == "example" and report.sampling == "poisson"


def test_tree_aggregation_is_priced_where_an_example_is_blanked():
    tree = dp_accounting.SingleEpochTreeAggregationDpEvent(4.0, 100)
    report = PrivacyLedger().add(tree, adjacency="zero_out").report(1e-5)
    assert report.accountant == "rdp"
    assert report.epsilon == pytest.approx(
        price(dp_accounting.GaussianDpEvent(4.0 / math.sqrt(7)), 1e-5, "rdp").epsilon
    )


def test_shuffled_steps_recorded_one_by_one_are_paid_by_the_epoch():
    ledger = PrivacyLedger()
    for _ in range(480):
        ledger.record(1.1, sampling="shuffle", **DATA)
    assert ledger.epsilon(1e-5, "rdp") == compute_epsilon(**RUN, num_epochs=2, sampling="shuffle", accountant="rdp")


def test_noise_that_changes_inside_a_shuffled_epoch_is_paid_in_every_epoch_it_may_touch():
    ledger = PrivacyLedger()
    for sigma, steps in [(1.0, 120), (2.0, 240), (1.0, 120)]:
        ledger.record(sigma, steps, sampling="shuffle", **DATA)
    # An example that is early in the first epoch and late in the second meets 1.0 twice.
    gaussian = dp_accounting.GaussianDpEvent
    worst = dp_accounting.rdp.RdpAccountant().compose(gaussian(1.0), 2)
    assert ledger.epsilon(1e-5, "rdp") >= worst.get_epsilon(1e-5)
    assert [row["run"].get("starts_mid_epoch") for row in ledger.to_dict()["rows"]] == [False, True, True]
    assert ledger.report(1e-5, "rdp").participations == 1 + 2 + 2


def test_a_new_pass_over_the_data_is_a_new_use_of_every_example():
    calls = PrivacyLedger()
    for _ in range(3):
        calls.record(1.1, 100, sampling="shuffle", new_pass=True, **DATA)
    assert calls.report(1e-5, "rdp").participations == 3
    poisson = PrivacyLedger().record(1.1, new_pass=True, **DATA).record(1.1, new_pass=True, **DATA)
    assert len(poisson) == 1


@pytest.mark.parametrize("more, fix", [
    ({"truncated_batch_size": 40}, "truncated_batch_size are priced under add_or_remove_one alone: draw them without"),
    ({}, r"add Normalization for it, too: pass adjacency='zero_out' to ledger\.add, or to the adapt"),
])  # fmt: skip
def test_rows_for_different_neighbours_name_what_can_be_changed(more, fix):
    ledger = PrivacyLedger().record(1.1, sampling="shuffle", **DATA)
    if more:
        ledger.record(1.1, **DATA, **more)
    else:
        ledger.add(dp_accounting.GaussianDpEvent(1.0), adjacency="add_or_remove_one", name="Normalization")
    with pytest.raises(PrivacyError, match=fix):
        ledger.epsilon(1e-5)


def test_rows_for_different_neighbours_do_not_add_up():
    ledger = PrivacyLedger().record(1.1, **DATA).record(1.1, sampling="shuffle", **DATA)
    assert ledger.adjacency == "zero_out"
    ledger.record(1.1, sampling="fixed_size", **DATA)
    assert ledger.adjacency == "replace_one"  # which all three can be stated for, if not priced
    with pytest.raises(PrivacyError, match=r"no accountant knows an ε|needs dp-accounting 0\.6"):
        ledger.epsilon(1e-5)
    ledger.add(dp_accounting.GaussianDpEvent(1.0), adjacency="add_or_remove_one")
    with pytest.raises(PrivacyError, match=r"different neighbours .*add GaussianDpEvent for it.*'replace_one'"):
        ledger.epsilon(1e-5)
    users = PrivacyLedger().record(3.0, 10, **DATA).record(3.0, 10, max_examples_per_user=4, **DATA)
    with pytest.raises(PrivacyError, match="users of up to 1 and 4 examples"):
        users.epsilon(1e-5)
    with pytest.raises(PrivacyError, match="no accountant knows an ε"):
        fixed = dp_accounting.SampledWithoutReplacementDpEvent(100, 10, dp_accounting.GaussianDpEvent(1.0))
        PrivacyLedger().add(fixed).epsilon(1e-5)


def test_a_ledger_comes_back_from_json_as_it_was():
    nested = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.GaussianDpEvent(2.0),
            dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(3.0), 4),
        ]
    )
    ledger = PrivacyLedger().record(1.1, 7, **DATA).record(1.1, 500, sampling="shuffle", num_microbatches=50, **DATA)
    ledger.record(0.9, sampling="shuffle", **DATA).add(nested, 2, adjacency="zero_out")
    restored = PrivacyLedger.from_dict(json.loads(json.dumps(ledger.to_dict(), allow_nan=False)))
    assert restored == ledger and restored.dp_event == ledger.dp_event
    assert restored.epsilon(1e-5, "rdp") == ledger.epsilon(1e-5, "rdp")
    assert restored.record(1.1, 3, **DATA).steps == ledger.steps + 3
    assert len(restored) == len(ledger) and restored != ledger


@pytest.mark.parametrize(
    "saved",
    [None, {}, {"version": 1}, {"version": 1, "rows": [{"run": {"bogus": 1}}]},
     {"version": 1, "rows": [{"event": {"type": "attr"}, "count": 1, "adjacency": "zero_out"}]}],
)  # fmt: skip
def test_what_is_no_ledger_is_refused(saved):
    with pytest.raises(ValueError, match=r"PrivacyLedger\.to_dict|no event named"):
        PrivacyLedger.from_dict(saved)


def test_an_empty_ledger_costs_nothing():
    ledger = PrivacyLedger().record(1.0, 0, **DATA)
    assert len(ledger) == 0 and ledger.epsilon(1e-5) == 0.0
    assert ledger.report(1e-5).epsilon == 0.0 and "mechanism: none was recorded" in str(ledger.report(1e-5))
    with pytest.raises(ValueError, match="must be a dp_accounting"):
        ledger.add(1.0)


@pytest.mark.parametrize("sampling, steps", [("poisson", 20), ("none", 20), ("fixed_size", 20), ("shuffle", 20)])
def test_epochs_recorded_one_by_one_are_all_their_steps(sampling, steps):
    ledger = PrivacyLedger()
    for _ in range(10):  # 1.05 batches each, which are two steps
        ledger.record(1.0, epochs=1, num_examples=105, batch_size=100, sampling=sampling)
    assert ledger.steps == steps and len(ledger) == 1


@pytest.mark.parametrize("rows", [[(1.1, 240), (2.0, 240)], [(1.1, 480), (2.0, 240)], [(1.1, 240), (2.0, 480)]])
def test_noise_that_changes_between_two_epochs_costs_each_epoch_once(rows):
    ledger = PrivacyLedger()
    for sigma, steps in rows:
        ledger.record(sigma, steps, sampling="shuffle", **DATA)
    mu = math.sqrt(sum(steps / 240 / sigma**2 for sigma, steps in rows))
    assert ledger.epsilon(1e-5) == pytest.approx(gaussian_epsilon(1 / mu, 1e-5), rel=1e-4)


def test_a_merge_between_two_steps_of_a_pass_loses_no_use():
    how = dict(num_examples=100, batch_size=10, sampling="shuffle")
    half, whole = (PrivacyLedger().record(1.0, n, **how) for n in (5, 10))
    uses = lambda ledger: ledger.report(1e-3, "rdp").participations
    assert uses(whole.merge(half).record(1.0, 1, **how)) == 1 + 1 + 1
    assert uses(PrivacyLedger().record(1.0, 5, **how).merge(half).record(1.0, 5, **how)) == 1 + 1
    assert uses(PrivacyLedger().merge(half).record(1.0, 1, **how)) == 1 + 1
    assert uses(PrivacyLedger().merge(half).record(2.0, 10, **how)) == 1 + 2  # it may lie in two passes


_WITHOUT_GROUPS = ("fixed_size", "random_allocation")


@pytest.mark.parametrize("k", [2, 3])
def test_what_ran_is_priced_for_a_user_of_several_examples(k):
    """As `compute_epsilon` prices it, whether it was recorded or counted; unknown batches may hold all of them."""
    poisson, shuffled = dict(num_steps=7, **DATA), dict(num_epochs=2, sampling="shuffle", **DATA)
    for run in (poisson, shuffled):
        want = compute_epsilon(noise_multiplier=3.0, delta=1e-5, max_examples_per_user=k, accountant="rdp", **run)
        ledger = PrivacyLedger().record(3.0, **run)
        assert ledger.epsilon(1e-5, "rdp", k) == want > 1.2 * ledger.epsilon(1e-5, "rdp")
        report = ledger.report(1e-5, "rdp", max_examples_per_user=k)
        assert (report.epsilon, report.max_examples_per_user) == (want, k)
        assert f"No user may have more than {k} examples" in report.statement()
    counted = PrivacyLedger().count("a", 3.0, 7, sampling="poisson", **DATA)
    assert counted.epsilon(1e-5, "rdp", k) == PrivacyLedger().record(3.0, **poisson).epsilon(1e-5, "rdp", k)
    of_users = counted.report(1e-5, "rdp", max_examples_per_user=k)
    assert of_users.max_examples_per_user == k and f"more than {k} examples" in of_users.statement()
    unknown = PrivacyLedger().count("a", 3.0, 4)
    assert unknown.epsilon(1e-5, "pld", k) == pytest.approx(gaussian_epsilon(3.0 / k / 2, 1e-5), rel=1e-3)
    report = unknown.report(1e-5, max_examples_per_user=k)
    assert report.max_examples_per_user == k and f"No user may have more than {k} examples" in report.statement()
    released = PrivacyLedger().add(dp_accounting.GaussianDpEvent(3.0), 4).report(1e-5, max_examples_per_user=k)
    assert released.epsilon == pytest.approx(gaussian_epsilon(3.0 / k / 2, 1e-5), rel=1e-3)
    assert counted.report(1e-5, "rdp").max_examples_per_user == 1  # the ledger itself is as it was
    assert PrivacyLedger().epsilon(1e-5, max_examples_per_user=k) == 0


def test_what_has_no_price_for_several_examples_is_refused():
    unpriced = "sampling='{}' .* has no known ε for max_examples_per_user=3"
    for ledger, message in (
        *((PrivacyLedger().record(3.0, sampling=how, **DATA), unpriced.format(how)) for how in _WITHOUT_GROUPS),
        (PrivacyLedger().record(3.0, secure_noise=True, **DATA), "no ε is known for discrete noise"),
        (PrivacyLedger().add(dp_accounting.LaplaceDpEvent(1.0)), r"a release .*\(LaplaceDpEvent\) has no known ε"),
        (PrivacyLedger().record(3.0, unit="user", **DATA), "ε is that of a user: leave it out"),
        (PrivacyLedger().record(3.0, max_examples_per_user=2, **DATA).record(3.0, **DATA), "users of up to 2 and 3"),
    ):
        for refused in (ledger.epsilon, ledger.report):
            with pytest.raises(PrivacyError, match=message):
                refused(1e-5, max_examples_per_user=3)
    for wrong in (0, 1.5, "3"):
        with pytest.raises(ValueError, match="max_examples_per_user must be a whole number of at least 1"):
            PrivacyLedger().epsilon(1e-5, max_examples_per_user=wrong)
    own = PrivacyLedger().record(3.0, max_examples_per_user=3, **DATA)
    assert own.epsilon(1e-5, "rdp") == own.epsilon(1e-5, "rdp", 3) == own.epsilon(1e-5, "rdp", 2)


def test_views_of_one_training_count_once_and_the_most_cautious_one_stands():
    def seen(steps, apart, **more):
        run = CorrelatedRun(noise=Tree(), noise_multiplier=4.0, num_steps=steps, min_separation=apart, **more)
        return PrivacyLedger().count_correlated((("one", 0),), run, dataset="d")

    longer, shorter = seen(8, 4), seen(4, 4)
    assert seen(8, 4).merge(shorter) == longer == seen(4, 4).merge(longer)
    cautious = seen(8, 2, max_participations=3)
    assert seen(8, 4, max_participations=2).merge(cautious) == cautious == seen(8, 2, max_participations=3).merge(
        seen(8, 4, max_participations=2))  # fmt: skip
    counted = PrivacyLedger().count("one", 1.0, 5, dataset="d").count("two", 1.0, 5)
    assert counted.merge(PrivacyLedger().count("one", 1.0, 3, dataset="d").count("two", 1.0, 7)).unknown_steps == 12
    assert PrivacyLedger.from_dict(json.loads(json.dumps(counted.merge(longer).to_dict()))) == counted
