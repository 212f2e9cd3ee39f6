"""A project's report: what adds up is composed, and what does not is said."""

import inspect
import json
import math
import types
from statistics import NormalDist

import numpy as np
import pytest
from click.testing import CliRunner
from report_cases import DELTA, gaussian, labels

from tfdpfl import accounting, callbacks, convex, label_dp, optimizers, pate, reports, tuning
from tfdpfl.accounting import PrivacyLedger, PrivacyReport, Run
from tfdpfl.accounting.promises import Promise
from tfdpfl.accounting.report import rounded_up
from tfdpfl.audit import MembershipReport, report
from tfdpfl.cli import main
from tfdpfl.convex import DPLogisticRegression
from tfdpfl.label_dp import RandomizedResponse
from tfdpfl.pate import GNMax


def votes():
    return GNMax(40.0).aggregate(np.tile([200, 50, 0], (20, 1)))


def figure(epsilon, delta=DELTA, **more):
    rest = dict(sampling=None, noise_multiplier=None, steps=1, participations=1, num_examples=None, batch_size=None)
    return PrivacyReport(epsilon=epsilon, delta=delta, adjacency="add_or_remove_one", accountant="pld", **rest, **more)


def test_parts_of_one_adjacency_are_composed_and_others_are_not():
    made = report({"a": gaussian(3.0), "b": gaussian(4.0), "labels": labels(), "votes": votes()}, delta=DELTA)
    whole = next(total for total in made.totals if total.parts == ("a", "b")).figures
    # Two Gaussians are one: 1/3² + 1/4² = 1/2.4².
    alone = gaussian(2.4).epsilon(DELTA)
    assert whole.epsilon == pytest.approx(alone, rel=1e-3) and whole.gdp_mu == pytest.approx(1 / 2.4)
    assert whole.zcdp_rho == pytest.approx(1 / 2.4**2 / 2)
    assert f"a + b: epsilon = {rounded_up(whole.epsilon)} for one example that is in all of them, " in str(made)
    normal = NormalDist()
    most = rounded_up(100 * normal.cdf(normal.inv_cdf(0.01) + 1 / 2.4), 3)
    said = f"a + b: An attacker who wrongly takes 1 % of other examples for training examples finds at most {most} % of"
    assert said in made.to_html() and "example that is in all of them</td>" in made.to_html()
    assert {total.parts for total in made.totals} == {("a", "b"), ("labels",), ("votes",)}
    (sentence,) = made.not_added
    assert "a + b (one example, add_or_remove_one); labels (one label, replace_one); votes (one example" in sentence
    assert [part.figures.epsilon for part in made.parts[2:]] == [
        labels().ledger.epsilon(DELTA), pytest.approx(float(votes().epsilon(DELTA)))
    ]  # fmt: skip
    deltas, epsilons = zip(*whole.epsilons, strict=True)
    assert deltas == (1e-3, 1e-4, 1e-5, 1e-6, 1e-7) and list(epsilons) == sorted(epsilons)
    assert whole.accountants["pld"] < whole.accountants["rdp"]


def test_steps_that_two_ledgers_saw_count_once():
    first, both = PrivacyLedger().count("here", 3.0, 5), PrivacyLedger().count("here", 3.0, 9)
    (total,) = report({"early": first, "late": both}, delta=DELTA).totals
    assert total.figures.epsilon == both.epsilon(DELTA)


def test_parts_without_an_event_share_delta():
    (total,) = report({"a": figure(1.0, 1e-6), "b": gaussian(3.0)}, delta=DELTA).totals
    assert total.figures.epsilon == 1.0 + gaussian(3.0).epsilon(DELTA / 2)
    assert dict(total.figures.epsilons)[1e-6] is None  # half of it is below the first one's δ
    alone = report({"a": figure(1.0, 1e-4)}, delta=DELTA)
    assert alone.parts[0].figures.epsilon is None and "known at delta = 0.0001" in str(alone)


def test_other_data_other_units_and_unknown_units_are_added_to_nothing():
    made = report({"a": gaussian(3.0), "b": gaussian(3.0)}, delta=DELTA, data={"a": "north", "b": "south"})
    assert [total.parts for total in made.totals] == [("a",), ("b",)] and "(north, south)" in made.not_added[0]
    assert "all of them" not in str(made)
    made = report({"a": gaussian(3.0), "b": gaussian(3.0, unit="user")}, delta=DELTA)
    assert len(made.totals) == 2 and "one user" in made.not_added[0]
    events = {name: PrivacyLedger().add(gaussian(3.0).dp_event) for name in "ab"}
    made = report(events, delta=DELTA)
    assert len(made.totals) == 2 and "What a protects is not recorded" in str(made)
    made = report(events, delta=DELTA, units={"a": "client", "b": "client"})
    assert [total.parts for total in made.totals] == [("a", "b")]
    users = report({k: gaussian(3.0, max_examples_per_user=int(k)) for k in "23"}, delta=DELTA)
    assert len(users.totals) == 2 and users.parts[0].unit == "user of at most 2 examples"


def test_a_figure_that_may_not_be_published_is_nowhere():
    secret = votes().epsilon(DELTA, data_dependent=True)
    assert secret.data_dependent
    made = report({"votes": secret, "more": votes()}, delta=DELTA)
    text = made.to_html() + made.to_json() + str(made)
    assert f"{float(secret):.4g}" not in text and "not to be published" in text
    assert made.totals[0].parts == ("votes", "more") and made.totals[0].figures.epsilon is None


def test_a_seed_is_warned_of_and_not_shown():
    made = report({"labels": labels(seed=987654)}, delta=DELTA)
    assert "seed" in made.warnings[0] and "987654" not in made.to_html() + made.to_json() + str(made)


def test_what_clones_released_is_in_the_price():
    from sklearn.base import clone

    first = labels()
    clone(first).fit_transform(np.arange(50) % 10)
    made = report({"labels": first}, delta=DELTA)
    assert made.parts[0].figures.epsilon == first.family_ledger.epsilon(DELTA) > first.ledger.epsilon(DELTA)
    planned = report({"labels": RandomizedResponse(1.0, 10)}, delta=DELTA)
    assert planned.parts[0].figures.epsilon > 0 and "planned" in planned.warnings[0]


@pytest.mark.slow
def test_a_plan_what_ran_of_it_and_a_search_are_parts():
    import tensorflow as tf
    from dp_accounting import dp_event, rdp

    import tfdpfl

    x, y = np.zeros((200, 3), "float32"), np.arange(200) % 2
    how = dict(noise_multiplier=1.1, batch_size=50, delta=DELTA)
    plan = tfdpfl.plan(x, y, num_epochs=3, **how)
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
    model.compile(plan.optimizer("sgd"), tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(plan.batches, epochs=2, callbacks=[plan.callback], shuffle=False, verbose=0)
    search = tfdpfl.tuning.RandomSearch({"rate": [0.1, 0.2]}, spends=gaussian(3.0), mean_runs=4)
    made = report({"plan": plan, "fit": plan.callback, "search": search}, delta=DELTA)
    planned, ran, searched = (part.figures.epsilon for part in made.parts)
    of = lambda steps: tfdpfl.compute_epsilon(num_examples=200, num_steps=steps, **how)
    assert (planned, ran) == pytest.approx((of(12), of(8)), rel=1e-6)
    repeated = dp_event.RepeatAndSelectDpEvent(dp_event.GaussianDpEvent(3.0), 4, 1.0)
    assert searched == pytest.approx(rdp.RdpAccountant().compose(repeated).get_epsilon(DELTA), rel=0.02)
    assert searched > gaussian(3.0).epsilon(DELTA)
    assert [part.kind for part in made.parts] == ["plan", "training", "search"]
    assert [w.startswith("plan: ") for w in made.warnings if "planned" in w] == [True]
    assert all(part.unit == "example" for part in made.parts[:2])
    alone = report({"fit": plan.callback}, delta=DELTA)
    assert alone.totals[0].figures.epsilon == pytest.approx(of(8), rel=1e-6)


def regression(**settings):
    x = np.random.default_rng(0).normal(size=(60, 3))
    return DPLogisticRegression(1.0, 1e-6, num_steps=4, **settings).fit(x, x[:, 0] > 0)


def test_a_logistic_regression_is_a_part():
    steps, objective = regression(solver="gradient"), regression(solver="objective")
    made = report({"a": steps, "b": gaussian(3.0, sampling="shuffle", batch_size=100)}, delta=1e-6)
    (total,) = made.totals
    assert 1 > made.parts[0].figures.epsilon > 0.99 and made.parts[0].unit == "example"
    assert total.figures.epsilon < sum(part.figures.epsilon for part in made.parts)  # composed as events
    objective.set_params(epsilon=0.5).fit(np.eye(4), [0, 1, 0, 1])
    known = report({"a": objective}, delta=DELTA).parts[0]
    assert known.figures.epsilon == 1.5
    assert known.mechanisms == tuple(f"objective, epsilon {e} at delta 1e-06 a fit, 1 fit" for e in ("1", "0.5"))
    assert "no smaller delta" in report({"a": objective}, delta=1e-6).parts[0].figures.missing
    planned = report({"a": DPLogisticRegression(1.0, 1e-6, random_state=987654)}, delta=DELTA)
    assert "nothing of it has run" in planned.warnings[0] and "random_state is fixed" in planned.warnings[1]
    assert planned.parts[0].figures.epsilon == 1.0 and "987654" not in planned.to_html()


def mechanisms():
    """{class: one of it} of what spends privacy and is used by itself."""
    five = ([0.0, 1, 2], [0.2, 0.3, 0.5])
    yield from (RandomizedResponse(1.0, 3), label_dp.RandomizedResponseTopK(1.0, 2), label_dp.ALIBI(1.0, 3))
    yield from (label_dp.RandomizedResponseWithPrior(1.0), label_dp.NoisyHistogram(1.0), label_dp.KMeansPrior(1.0, 3))
    yield from (label_dp.RROnBins(1.0, prior=five), label_dp.UnbiasedRandomizer(1.0, prior=five))
    yield from (label_dp.MultiStageTraining(dict, 1.0), label_dp.LabelPrivacy(1.0, 3), DPLogisticRegression(1.0, 1e-6))
    yield from (gaussian(3.0), figure(1.0), votes())
    yield tuning.RandomSearch({"rate": [0.1, 0.2]}, spends=gaussian(3.0), mean_runs=4)
    yield Run(noise_multiplier=3.0, num_steps=1, num_examples=100, batch_size=10)
    yield from (made(1.0, 2.0, expected_batch_size=4) for made in public(optimizers) if made.__name__.startswith("DPA"))
    yield from (
        optimizers.DPSGD(1.0, 2.0, expected_batch_size=4),
        optimizers.DPRMSprop(1.0, 2.0, expected_batch_size=4),
    )


def public(module):
    names = getattr(module, "__all__", None) or [name for name in vars(module) if name[0] != "_"]
    return [each for name in names if isinstance(each := getattr(module, name), type)]


def test_a_withheld_figure_is_in_no_total_at_any_delta():
    parts = {name: votes().epsilon(DELTA / 100, data_dependent=True) for name in "ab"}
    (total,) = report(parts, delta=DELTA).totals
    assert total.figures.epsilon is None and "not to be published" in total.figures.missing


def test_a_report_asks_for_promises_and_for_no_types():
    source = inspect.getsource(reports)
    assert "__module__" not in source and "issubclass" not in source
    assert "isinstance" not in source


def test_figures_of_utility_are_numbers_or_text():
    found = report(
        {"a": gaussian(3.0)}, delta=DELTA, utility={"share": np.float32(0.5), "model": np.str_("CNN")}
    ).utility
    assert found == {"share": 0.5, "model": "CNN"} and type(found["share"]) is float
    for figure in (None, {}):
        with pytest.raises(TypeError):
            report({"a": gaussian(3.0)}, delta=DELTA, utility={"share": figure})


@pytest.mark.slow
def test_every_mechanism_of_the_package_is_a_part():
    ready = {type(each): each for each in mechanisms()}
    for each in ready.values():
        assert report({"it": each}, delta=DELTA).parts
    modules = (accounting, callbacks, convex, label_dp, optimizers, pate, tuning)
    spending = {
        found for module in modules for found in public(module)
        if any(hasattr(found, name) for name in ("ledger", "dp_event", "price")) and found is not Promise
    }  # fmt: skip
    assert all(hasattr(found, "promises") or found is Run for found in spending)
    # An aggregator spends nothing before its `Answers`, which are a part; bases have no instances. Callbacks need a
    # training, as in the test of plans.
    left = {found for found in spending - set(ready) if not issubclass(found, pate.GNMax.__mro__[1])}
    assert {found.__name__ for found in left} <= {
        "DPOptimizer",
        "LabelPrior",
        "DPFTRL",
        "PrivacyBudget",
        "PrivateMetrics",
    }


def test_what_pate_gives_is_told_apart():
    """Answers have an event, and so what is fitted; a report has one ε at one δ."""
    import tensorflow as tf

    from tfdpfl.pate import PATE

    class Untaught(tf.keras.Sequential):
        def fit(self, *args, **options):
            return None

    def student():
        model = Untaught([tf.keras.Input((2,)), tf.keras.layers.Dense(3)])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    teachers = np.tile([200, 50, 0], (20, 1))
    flow = PATE(teachers, GNMax(40.0), student, DELTA).fit(np.zeros((20, 2)))
    # 20 Gaussians of σ 40, and one example replaced moves two counts by 1 each.
    alone = gaussian(40 / math.sqrt(2), 20).epsilon(DELTA)
    made = report({"flow": flow, "report": flow.report(), "answers": flow.answers_}, delta=DELTA)
    assert [part.figures.epsilon for part in made.parts] == pytest.approx([alone] * 3, rel=0.06)
    assert all(part.figures.epsilon >= alone * 0.999 for part in made.parts)
    assert "20 queries to 250 teachers" in made.parts[1].mechanisms[0]
    assert dict(made.parts[1].figures.epsilons)[1e-6] is None and dict(made.parts[0].figures.epsilons)[1e-6] > alone
    assert {(part.unit, part.adjacency, part.kind) for part in made.parts} == {("example", "replace_one", "PATE")}


def test_what_an_audit_found_is_held_against_the_promise():
    claimed = gaussian(3.0).epsilon(DELTA)
    bound = lambda epsilon: report({"a": gaussian(3.0)}, delta=DELTA, audits={"a": epsilon})
    assert not bound(claimed * 0.99).measured[0].refuted
    worse = bound(claimed * 1.01)
    assert worse.measured[0].refuted and "wrong" in worse.warnings[0] and "promise refuted" in worse.to_html()
    other = types.SimpleNamespace(report=types.SimpleNamespace(epsilon=claimed * 1.01, delta=1e-6))
    assert not bound(other).measured[0].refuted  # at that δ more is promised
    most = gaussian(3.0).report(DELTA).others.tpr_at_1_percent_fpr
    for low, refuted in ((most * 0.99, False), (most * 1.01, True)):
        attack = MembershipReport(
            attack="loss", auc=0.6, auc_interval=(0.5, 0.7), tpr_at_low_fpr=0.5, tpr_interval=(low, 0.9),
            confidence=0.95, num_members=9, num_non_members=9,
        )  # fmt: skip
        assert bound(attack).measured[0].refuted == refuted


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"parts": {}}, "parts must be a dict"),
        ({"parts": {"a": 3}}, "cannot be part of a report"),
        ({"parts": {"a": (3, 4)}}, "cannot be part of a report"),
        ({"parts": {"a": gaussian(3.0).dp_event}}, "An event goes into a ledger"),
        ({"parts": {"a": GNMax(40.0)}}, "has no ε"),
        ({"delta": 1.0}, "delta must be"),
        ({"data": {"b": "x"}}, "data names 'b'"),
        ({"parts": {"a": gaussian(3.0), "b": gaussian(3.0)}, "data": {"a": "x"}}, "which data 'b'"),
        ({"units": {"a": "client"}}, "recorded for one example"),
        ({"audits": {"b": 1.0}}, "audits has 'b'"),
        ({"audits": {"a": -1.0}}, "audits\\['a'\\]"),
        ({"accountant": "moments"}, "accountant"),
        ({"deltas": [0.0]}, "delta must be"),
    ],
)
def test_a_bad_argument_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        report(**{"parts": {"a": gaussian(3.0)}, "delta": DELTA, **given})


def test_the_command_reads_ledgers(tmp_path):
    for name, sigma in (("first", 3.0), ("second", 4.0)):
        (tmp_path / f"{name}.json").write_text(json.dumps(gaussian(sigma).to_dict()))
    files = [str(tmp_path / f"{name}.json") for name in ("first", "second")]
    invoke = lambda *args: CliRunner().invoke(main, ["report", *args, "--delta", "1e-5"])
    page = tmp_path / "page.html"
    done = invoke(*files, "--json", "--html", str(page), "--title", "Two")
    saved = json.loads(done.output)
    assert done.exit_code == 0 and saved["totals"][0]["parts"] == ["first", "second"] and saved["title"] == "Two"
    assert saved["totals"][0]["figures"]["gdp_mu"] == pytest.approx(1 / 2.4) and "<h1>Two" in page.read_text("utf-8")
    assert "first + second: epsilon = " in invoke(*files).output
    (tmp_path / "bad.json").write_text("[]")
    refused = invoke(str(tmp_path / "bad.json"))
    assert refused.exit_code == 2 and "holds no ledger" in refused.output
    events = tmp_path / "events.json"
    events.write_text(json.dumps(PrivacyLedger().add(gaussian(3.0).dp_event).to_dict()))
    assert "one client, adjacency" in invoke(str(events), "--unit", "events=client").output


def test_a_sanitised_figure_is_that_of_its_renyi_order_and_says_its_chance():
    from tfdpfl.pate import GNMax, smooth_sensitivity_release

    votes = np.array([[190, 10, 0]] * 60)
    released = smooth_sensitivity_release(GNMax(40.0), votes, 1e-5, seed=0)
    said = float(released.epsilon)
    made = report({"votes": released}, delta=1e-5)
    figures = json.loads(made.to_json())["parts"][0]["figures"]
    assert figures["epsilon"] == said and figures["accountant"] == "rdp"
    assert figures["accountants"] == {"pld": None, "rdp": said}  # it is no privacy loss distribution's
    for text in (str(made), made.to_html()):
        assert "it holds but for a chance of 0.01" in text
    assert "pld" not in str(made)
    finer = report({"votes": released}, delta=1e-6).parts[0].figures
    assert finer.epsilon is None and "known at delta = 1e-05 and above alone" in finer.missing
