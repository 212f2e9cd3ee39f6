"""The self-audit: each mechanism of the package is within its claim, and each planted fault is found by its name."""

import re
from pathlib import Path

import audit_cases
import audit_faults
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "self_audit.md"


def assert_within(case):
    if case.replay is not None:
        report = case.replay()
        assert report.ok, f"{case.name}: {report}"
        assert report.moved > 0.4 or case.group == "labels", f"{case.name}: {report}"  # what is drawn may tell nothing
    if case.bound is not None:
        claim, found = case.bound()
        assert case.least * claim <= found <= claim, f"{case.name}: {found} is found, and {claim} is claimed"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*audit_cases.TRAININGS, "poisson_batches"])
def test_no_training_costs_more_than_it_claims(name):
    assert_within(next(case for case in audit_cases.GROUPS["optimizers"]() if case.name == name))


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("group", ["labels", "votes", "others", "Flower", "TFF"])
def test_no_mechanism_costs_more_than_it_claims(group):
    if group not in audit_cases.here():
        pytest.skip("is on the other stack")
    for case in audit_cases.GROUPS[group]():
        assert_within(case)


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("fault", audit_faults.FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_its_name_and_nothing_is_without_it(fault):
    if fault not in audit_faults.here():
        pytest.skip("is on the other stack")
    assert fault.found(False) == ""
    assert fault.says in fault.found(True)


def test_the_page_has_every_case_and_every_fault():
    pytest.importorskip("flwr", reason="the names of Flower's cases need it")
    rows = re.findall(r"^\| ([^|]+?) \|", PAGE.read_text("utf-8"), re.M)
    cases = [case.name for group in audit_cases.GROUPS.values() for case in group()]
    faults = [fault.name for fault in audit_faults.FAULTS]
    assert len(faults) >= 25 and len(set(cases)) == len(cases) and len(set(faults)) == len(faults)
    assert sorted(row for row in rows if row not in ("case", "fault") and set(row) != {"-"}) == sorted(cases + faults)
