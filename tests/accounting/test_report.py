"""A report states everything that its ε depends on."""

import dataclasses
import json
import math

import dp_accounting
import pytest
from accounting_cases import DATA, RUN

from tfdpfl._version import __version__
from tfdpfl.accounting import PrivacyLedger, Run, compute_epsilon, privacy_report, privacy_statement
from tfdpfl.accounting.report import report_of
from tfdpfl.errors import PrivacyError


def test_users_as_units_are_said_and_do_not_add_up_with_examples():
    said = dict(num_examples=600, batch_size=30, unit="user")
    report = privacy_report(**said, noise_multiplier=1.0, num_steps=10, delta=1e-5, accountant="rdp")
    text = report.statement()
    assert "one user and all that is theirs" in text and "expected batch size 30 of 600 users" in text
    assert "every user joins every batch" in text and "clipped as one" in text
    same = privacy_report(num_examples=600, batch_size=30, noise_multiplier=1.0, num_steps=10, delta=1e-5,
                          accountant="rdp")  # fmt: skip
    assert report.epsilon == same.epsilon and "user" not in same.statement()
    ledger = PrivacyLedger().record(1.0, 10, **said)
    ledger.record(1.0, 10, num_examples=6000, batch_size=30)
    with pytest.raises(PrivacyError, match="different units"):
        ledger.epsilon(1e-5)
    with pytest.raises(ValueError, match="unit must be one of 'example', 'user'"):
        compute_epsilon(**RUN, num_steps=1, unit="patient")
    with pytest.raises(ValueError, match="unit='user'"):
        compute_epsilon(**RUN, num_steps=1, unit="user", max_examples_per_user=2)


@pytest.mark.slow
def test_a_statement_names_delta_adjacency_sampling_accountant_and_what_is_assumed():
    report = privacy_report(**RUN, num_epochs=15)
    text = report.statement()
    assert text.splitlines()[1].startswith("  An attacker who wrongly takes 1 % of other examples for ")
    assert text == str(report) == privacy_statement(**RUN, num_epochs=15)
    for part in ("delta = 1e-05", "add_or_remove_one", "poisson", "pld", "1.1", "3600 steps", "60000", "250"):
        assert part in text
    for part in ("tfdpfl.data.poisson_batches", "Covered: the trained weights", "Not covered", "seed"):
        assert part in text
    assert f"{report.shuffled_epsilon:.2f}" in text and "only shuffled" in text
    assert report.shuffled_epsilon == compute_epsilon(**RUN, num_epochs=15, sampling="shuffle")
    assert report.epsilon == compute_epsilon(**RUN, num_epochs=15)


@pytest.mark.parametrize("sampling", ["poisson", "shuffle"])
def test_a_statement_of_several_batch_sizes_names_no_single_one(sampling):
    ledger = PrivacyLedger()
    for size in (20, 40):
        ledger.record(1.1, num_examples=200, batch_size=size, num_steps=5, sampling=sampling)
    assert "noise multiplier 1.1, 10 steps, batches of several sizes of 200 examples" in str(ledger.report(1e-5, "rdp"))


def test_the_statement_of_a_ledger_without_runs_is_about_examples():
    for ledger in (PrivacyLedger(), PrivacyLedger().add(dp_accounting.GaussianDpEvent(2.0))):
        assert "of other examples for training examples" in str(ledger.report(1e-5))
    users = PrivacyLedger().add(dp_accounting.GaussianDpEvent(2.0), unit="user").report(1e-5)
    assert "of other users for training users" in str(users) and "presence of one user" in str(users)


def test_a_printed_epsilon_is_never_below_the_computed_one():
    report = privacy_report(**RUN, num_epochs=15, accountant="rdp")
    for epsilon in (0.123456, 1.00001e-7, 9.999999, 123456.7, 2.0, 0.64):
        printed = float(dataclasses.replace(report, epsilon=epsilon).statement().split("epsilon = ")[1].split()[0])
        assert epsilon <= printed <= epsilon * 1.001
    assert "epsilon = infinity" in dataclasses.replace(report, epsilon=math.inf).statement()
    assert "epsilon = 0 " in dataclasses.replace(report, epsilon=0.0).statement()


def test_a_delta_that_promises_little_is_remarked_on():
    assert "not below 1 / num_examples" in privacy_statement(**{**RUN, "delta": 1e-4}, num_steps=1, accountant="rdp")
    assert "not below" not in privacy_statement(**RUN, num_steps=1, accountant="rdp")


def test_a_report_is_strict_json_even_when_epsilon_is_infinite():
    report = privacy_report(**{**RUN, "noise_multiplier": 0}, num_steps=1)
    saved = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert saved["epsilon"] == "inf" and float(saved["epsilon"]) == report.epsilon
    assert "no privacy" in report.statement()
    finite = privacy_report(**RUN, num_steps=5, accountant="rdp")
    saved = json.loads(json.dumps(finite.to_dict(), allow_nan=False))
    assert (saved.pop("version"), saved.pop("written_by")) == (1, f"tfdpfl {__version__}")
    fields = {f.name: getattr(finite, f.name) for f in dataclasses.fields(finite) if f.name != "event"}
    assert saved == {**fields, "rows": list(finite.rows), "notes": list(finite.notes), **finite.others._asdict()}


def test_a_report_cannot_be_altered():
    with pytest.raises(dataclasses.FrozenInstanceError):
        privacy_report(**RUN, num_steps=0).epsilon = 0


def test_a_report_of_several_rows_lists_them_and_one_of_one_does_not():
    ledger = PrivacyLedger().record(1.1, 10, **DATA).record(2.0, 480, sampling="shuffle", **DATA)
    text = ledger.report(1e-5, "rdp").statement()
    assert "    poisson, batch 250 of 60000, noise multiplier 1.1, 10 steps, 10 participations\n" in text
    assert "    shuffle, batch 250 of 60000, noise multiplier 2, 480 steps, 2 participations\n" in text
    single = PrivacyLedger().record(1.1, 10, **DATA).report(1e-5, "rdp")
    assert len(single.rows) == 1 and single.rows[0] not in single.statement()
    runs = [Run(**DATA, noise_multiplier=1.1, num_steps=10)]
    extra = report_of(
        runs, runs[0].dp_event, 1e-5, "rdp", "add_or_remove_one", texts=["5 of a tree"], notes=["A word before."]
    )
    assert extra.rows == (*single.rows, "5 of a tree") and "    5 of a tree\n" in extra.statement()
    assert extra.notes == ("A word before.", *single.notes)


def test_a_report_says_that_steps_were_taken_for_whole_epochs():
    run = dict(num_examples=60000, batch_size=256, noise_multiplier=1.1, sampling="shuffle", delta=1e-5)
    said = "each with its last, smaller batch"
    assert said in privacy_statement(num_steps=470, **run) and "2 passes" in privacy_statement(num_steps=470, **run)
    assert said not in privacy_statement(num_steps=468, **run) + privacy_statement(num_epochs=2, **run)
    assert said not in privacy_statement(num_steps=480, **{**run, "batch_size": 250})
