"""The self-audit: each mechanism of the package is within its claim, and each planted fault is found by its name."""

import importlib
import re
from pathlib import Path

import audit_cases
import audit_faults
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "self_audit.md"


def twice(check, *arguments):
    """Runs a check once more if it fails. A sound case fails once in a thousand, and a faulty one both times."""
    try:
        check(*arguments)
    except AssertionError:
        check(*arguments)


def assert_within(case):
    if case.replay is not None:
        report = case.replay()
        assert report.ok, f"{case.name}: {report}"
        assert report.moved > 0.3 or case.group == "labels", f"{case.name}: {report}"  # what is drawn may tell nothing
    if case.bound is not None:
        claim, found = case.bound()
        assert case.least * claim <= found <= claim, f"{case.name}: {found} is found, and {claim} is claimed"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*audit_cases.TRAININGS, "poisson_batches", "b_min_sep", "random_allocation", "PrivateMetrics"]
)
def test_no_training_costs_more_than_it_claims(name):
    twice(assert_within, next(case for case in audit_cases.GROUPS["optimizers"]() if case.name == name))


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("group", ["preprocessing", "labels", "votes", "others", "Flower", "TFF"])
def test_no_mechanism_costs_more_than_it_claims(group):
    if group not in audit_cases.here():
        pytest.skip("is on the other stack")
    for case in audit_cases.GROUPS[group]():
        twice(assert_within, case)


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("fault", audit_faults.FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_by_its_name_and_nothing_is_without_it(fault):
    if fault not in audit_faults.here():
        pytest.skip("is on the other stack")
    twice(assert_caught, fault)


def assert_caught(fault):
    assert fault.found(False) == ""
    assert fault.says in fault.found(True)


# Public names that add no noise to private data, or whose noise is another's.
NO_CASE = {
    "figures, prices and what they are of": "accounting ACCOUNTANTS ADJACENCIES Price PrivacyLedger PrivacyReport Run "
    "SAMPLINGS compute_batch_size compute_epsilon compute_noise_multiplier compute_federated_noise_multiplier "
    "compute_num_steps price privacy_report privacy_statement ClientLevel CohortCheck CorrelatedLevel "
    "DistributedLevel ExampleLevel Guarantee LocalLevel "
    "NbAFLLevel Participation RoundsRun TreeLevel skellam_level total_price LedgerAccountant client_reports Epsilon "
    "PATEReport PySyftAnalysis SanitizedEpsilon compose epsilon_of_rdp optimal_order published_release_cost "
    "pysyft_analysis rdp_data_dependent rdp_data_independent release_cost smooth_sensitivity planning plan PrivacyPlan "
    "plan_federation FederatedPlan Answers as_counts PrivacyBudget Selected",
    "instruments": "audit Finding MembershipReport OneRunAudit OneRunReport ProjectReport ReplayReport audit_epsilon "
    "lira membership_inference one_run_bounds replay report rmia plots membership auc_bars epsilon_by_delta "
    "epsilon_over_time noise_errors panels privacy_utility",
    "noise by itself, which the optimizers' cases draw": "AES PHILOX Source gaussian discrete_gaussian grid new_key "
    "Noise Tree Banded",
    "prices and settings of noise": "Compared compare compute_correlated_noise_multiplier SOLVERS HyperParameters",
    "clips alone": "clipping ClippedGradients clipped_gradients explain fix per_example_norms register_rule validate",
    "sampling, whose amplification the case of poisson_batches tests": "data SamplingDeclaration cyclic_poisson "
    "bound_owners select_examples declared_sampling fixed_order shuffled_batches PoissonClientSampler "
    "FixedSizeClientSampler AvailabilityClientSampler BoundedParticipationSampler samplers",
    "made of what is private already": "ALIBILoss AveragedWeights BackwardCorrectedLoss ForwardCorrectedLoss "
    "debiased_label_counts PATE",
    "public, or taken for it": "datasets features Deskew Patches Scattering LabelPrior PublicPrior Roster "
    "CENSUS_VALUES CensusData DATA_DIR_VARIABLE ImageData load_adult load_census load_digits load_image_data "
    "load_mnist load_shakespeare",
    "not private, and says so": "evaluate_personalized TeacherEnsemble",
    "runs what is built elsewhere": "train training History local_runtime remote_runtime runtime WorkerLost",
    "modules, whose names are here": "callbacks convex errors federated flower label_dp noise optimizers pate "
    "preprocessing tuning nbafl PrivacyError __version__ Aggregator DPOptimizer",
}
# Names whose case has another name.
ELSEWHERE = {
    "DPKerasSGDOptimizer": "DPSGD", "DPKerasAdamOptimizer": "DPAdam", "DPKerasAdagradOptimizer": "DPAdagrad",
    "NoisyHistogram": "RROnBins with a histogram", "randomized_response": "RandomizedResponse",
}  # fmt: skip


def test_every_public_name_that_adds_noise_has_a_case_or_a_reason():
    pytest.importorskip("flwr", reason="the names of Flower's cases need it")
    import tfdpfl

    packages = [tfdpfl, *(importlib.import_module(f"tfdpfl.{name}") for name in tfdpfl._MODULES)]
    public = {name for package in packages for name in getattr(package, "__all__", ())}
    public |= {"DPLogisticRegression", "RandomSearch", "Selected"}  # of modules that list nothing
    cases = [case.name for group in audit_cases.GROUPS.values() for case in group()]
    words = {word for case in cases for word in re.findall(r"\w+", case)}
    reasons = {name for names in NO_CASE.values() for name in names.split()}
    assert set(ELSEWHERE.values()) <= set(cases)
    assert public - words - reasons - set(ELSEWHERE) == set()
    assert (reasons | set(ELSEWHERE)) - public == set()  # none that is no name any more


def test_the_page_has_every_case_and_every_fault():
    pytest.importorskip("flwr", reason="the names of Flower's cases need it")
    rows = re.findall(r"^\| ([^|]+?) \|", PAGE.read_text("utf-8"), re.M)
    cases = [case.name for group in audit_cases.GROUPS.values() for case in group()]
    faults = [fault.name for fault in audit_faults.FAULTS]
    assert len(faults) >= 25 and len(set(cases)) == len(cases) and len(set(faults)) == len(faults)
    assert sorted(row for row in rows if row not in ("case", "fault") and set(row) != {"-"}) == sorted(cases + faults)
