"""The whole flow: a student of answers alone, a budget that is not passed, reports that label what is private."""

import dataclasses
import json

import numpy as np
import pytest
import tensorflow as tf
from pate_cases import CLASSES, blobs

from tfdpfl.errors import PrivacyError
from tfdpfl.pate import PATE, ConfidentGNMax, GNMax, InteractiveGNMax, LNMax, TeacherEnsemble

FEATURES, TEACHERS = 5, 200
LABEL = "not to be published"


def student_fn():
    model = tf.keras.Sequential([tf.keras.layers.Input((FEATURES,)), tf.keras.layers.Dense(CLASSES)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tf.keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
    return model


class Untaught(tf.keras.Sequential):
    """For what happens before the student learns."""

    def fit(self, *args, **options):
        return None


def untaught_fn():
    model = Untaught([tf.keras.layers.Input((FEATURES,)), tf.keras.layers.Dense(CLASSES)])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


X, Y = blobs(300, features=FEATURES)
VOTES = np.where(np.arange(CLASSES) == Y[:, None], 180, 10)


def flow(aggregator, student=untaught_fn, **options):
    return PATE(VOTES, aggregator, student, 1e-5, epochs=8, verbose=0, **options)


@pytest.mark.slow
def test_teachers_teach_a_student_that_is_a_plain_keras_model():
    teachers = TeacherEnsemble(student_fn, 10, epochs=4, seed=0, verbose=0).fit(*blobs(500, seed=1, features=FEATURES))
    x_test, y_test = blobs(200, seed=2, features=FEATURES)
    pate = PATE(teachers, GNMax(1.0, seed=0), student_fn, 1e-5, epochs=8, verbose=0)
    report = pate.fit(X, Y, test_data=(x_test, y_test), seed=0).report()
    assert isinstance(pate.student_, tf.keras.Model)
    assert report.num_teachers == 10 and report.queries == report.answered == 300
    assert report.student_accuracy > 0.9 and report.label_accuracy > 0.9 and report.vote_accuracy > 0.9


def test_the_student_learns_the_released_labels_and_nothing_else():
    seen = []

    class Recorder(tf.keras.Sequential):
        def fit(self, x, y, **options):
            seen.append((x, y))
            return super().fit(x, y, **options)

    def recording():
        model = Recorder([tf.keras.layers.Input((FEATURES,)), tf.keras.layers.Dense(CLASSES)])
        model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    pate = PATE(VOTES, ConfidentGNMax(170, 40, 20, seed=0), recording, 1e-5, epochs=1, verbose=0)
    pate.fit(X, Y, num_queries=100)
    answered = pate.answers_.answered
    assert 0 < answered.sum() < 100 and len(seen) == 1
    assert (seen[0][0] == X[pate.queries_[answered]]).all()
    assert (seen[0][1] == pate.answers_.labels[answered]).all()


@pytest.mark.slow
@pytest.mark.parametrize("data_dependent", [False, True])
@pytest.mark.parametrize("make", [lambda: LNMax(0.05), lambda: GNMax(40), lambda: ConfidentGNMax(150, 100, 40, seed=0)])
def test_a_budget_stops_the_answering_before_it_is_passed(make, data_dependent):
    aggregator = make()
    budget = 1.0 if not data_dependent else float(aggregator.epsilon(VOTES[:150], 1e-5))
    pate = flow(aggregator, budget=budget, budget_data_dependent=data_dependent).fit(X)
    epsilon = pate.answers_.epsilon(1e-5, data_dependent)
    assert epsilon <= budget and 0 < len(pate.answers_) < 300 and len(pate.queries_) == len(pate.answers_)
    assert epsilon > 0.7 * budget
    assert ("budget" in str(pate.report())) and (("number of queries" in str(pate.report())) == data_dependent)


def test_a_second_fit_would_pass_the_budget_unseen():
    pate = flow(GNMax(40.0), budget=1.5).fit(X)
    answered = len(pate.answers_)
    with pytest.raises(PrivacyError, match=f"fit has released {answered} answers already"):
        pate.fit(X)
    assert len(pate.answers_) == answered


def test_one_more_query_would_pass_the_budget():
    pate = flow(GNMax(40), budget=1.0).fit(X)
    answered = len(pate.answers_)
    assert GNMax(40).epsilon(VOTES[: answered + 1], 1e-5, data_dependent=False) > 1.0


def test_the_filter_keeps_room_for_the_vote_before_it_looks():
    aggregator = ConfidentGNMax(1e6, 100, 3)  # never answers, but might
    pate = flow(aggregator, budget=1.0)
    answers = aggregator.aggregate(VOTES)
    assert pate._affordable(answers) == 0


@pytest.mark.slow
def test_no_answer_within_the_budget_is_an_error():
    with pytest.raises(ValueError, match=r"no query was answered.*lower the threshold\.$"):
        flow(GNMax(1.0), budget=0.1).fit(X)
    with pytest.raises(ValueError, match="lower the threshold"):
        flow(ConfidentGNMax(1e6, 1.0, 1.0)).fit(X)


def test_queries_that_nobody_answered_have_a_price():
    pate = PATE(VOTES[:20], ConfidentGNMax(1e3, 10.0, 10.0), untaught_fn, 1e-5, verbose=0)
    with pytest.raises(ValueError, match=r"Its 20 queries have cost ε: add answers_.dp_event"):
        pate.fit(X[:20])
    report = pate.report()
    assert report.queries == 20 and report.epsilon > 1


@pytest.mark.slow
def test_an_interactive_fit_that_is_interrupted_keeps_what_it_released():
    def interrupted():
        model = student_fn()
        model.fit = fails
        return model

    def fails(*_, **__):
        raise KeyboardInterrupt

    pate = flow(InteractiveGNMax(60, 10, 10, seed=0), interrupted)
    with pytest.raises(KeyboardInterrupt):
        pate.fit(X)
    assert len(pate.answers_) == len(X) // 5 and pate.report().epsilon > 0
    with pytest.raises(ValueError, match=rf"fit has released {len(X) // 5} answers already"):
        pate.fit(X)


@pytest.mark.slow
@pytest.mark.one_stack
def test_interactive_asks_less_once_the_student_has_learnt():
    pate = flow(InteractiveGNMax(60, 10, 10, confidence=0.8, seed=0), student_fn).fit(X, Y, seed=0)
    first, last = pate.answers_[:60], pate.answers_[240:]
    assert first.by_teachers.mean() > last.by_teachers.mean()
    assert last.answered.mean() > 0.8
    report = pate.report()
    assert report.answered > report.answered_by_teachers and report.label_accuracy > 0.9


@pytest.mark.slow
@pytest.mark.one_stack
def test_a_semi_supervised_student_uses_the_rest():
    sizes = []

    class Sized(tf.keras.Sequential):
        def fit(self, x, y, **options):
            sizes.append(len(x))
            return super().fit(x, y, **options)

    def sized():
        model = Sized([tf.keras.layers.Input((FEATURES,)), tf.keras.layers.Dense(CLASSES)])
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tf.keras.optimizers.Adam(0.1), loss)
        return model

    pate = PATE(VOTES, GNMax(20, seed=0), sized, 1e-5, epochs=8, batch_size=8, verbose=0)
    pate.fit(X, Y, num_queries=40, semi_supervised=True, confidence=0.6, rounds=2, test_data=(X, Y), seed=0)
    assert len(pate.answers_) == 40 and pate.report().student_accuracy > 0.8
    assert sizes[0] == 40 and 40 < sizes[1] <= 300 and len(sizes) == 3


def test_queries_may_be_chosen():
    pate = flow(GNMax(40)).fit(X, queries=[5, 3, 9])
    assert pate.queries_.tolist() == [5, 3, 9] and (pate.answers_.counts == VOTES[[5, 3, 9]]).all()


@pytest.mark.slow
@pytest.mark.one_stack
def test_reports_and_plots_label_what_is_private(tmp_path):
    pate = flow(ConfidentGNMax(150, 40, 20, seed=0)).fit(X, Y)
    report = pate.report()
    lines = str(report).splitlines()
    assert all(LABEL in line for line in lines if "data-dependent:" in line or "plurality" in line)
    assert not any(LABEL in line for line in lines if "data-independent" in line or "sanitised" in line)
    saved = json.loads(json.dumps(report.to_dict()))
    assert LABEL in saved["epsilon_data_dependent"]["warning"] and LABEL in saved["vote_accuracy"]["warning"]
    assert saved["epsilon"]["warning"] is None and saved["sanitized"]["epsilon"]["warning"] is None
    assert LABEL in repr(report)
    for draw in (pate.plot_margins, pate.plot_costs):
        figure = draw(tmp_path / "plot.png")
        assert LABEL in figure.axes[0].get_title() and (tmp_path / "plot.png").stat().st_size > 1000
    assert pate.report().sanitized is report.sanitized  # one release
    figure = report.plot(tmp_path / "report.png", alone=0.9)
    assert "200 teachers" in figure.get_suptitle() and (tmp_path / "report.png").stat().st_size > 1000
    above, below = figure.axes
    assert [bar.get_width() for bar in below.patches] == [
        report.epsilon, report.sanitized.epsilon, report.epsilon_data_dependent
    ]  # fmt: skip
    # What is drawn from the votes is grey, what may be published is not.
    assert [bar.get_facecolor() == below.patches[2].get_facecolor() for bar in [*above.patches, *below.patches]] == [
        True, True, False, False, False, True
    ]  # fmt: skip
    # Where the votes decide how many queries are put, nothing of it may be published.
    figure = dataclasses.replace(report, budget=2.0, budget_data_dependent=True).plot(alone=0.9)
    assert len({bar.get_facecolor() for axes in figure.axes for bar in axes.patches}) == 1
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["private"]


def test_delta_is_about_the_private_examples_and_not_the_queries():
    pate = PATE(VOTES, GNMax(40.0), untaught_fn, 0.01, epochs=1, verbose=0).fit(X)  # 300 queries
    assert pate.answers_.epsilon(0.01) < pate.answers_.epsilon(1e-5)

    class Teachers:
        shards_ = (np.arange(30), np.arange(30, 50))

        def votes(self, x):
            return VOTES[: len(x)]

    with pytest.warns(UserWarning, match="delta = 0.03 is not below 1 / num_examples = 0.02"):
        PATE(Teachers(), GNMax(40.0), untaught_fn, 0.03, epochs=1, verbose=0).fit(X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PATE(VOTES, "gnmax", student_fn, 1e-5), "aggregator must be one of"),
        (lambda: PATE(VOTES, GNMax(1), "student", 1e-5), "student_fn must be a function"),
        (lambda: PATE(VOTES, GNMax(1), student_fn, 0), "delta must be"),
        (lambda: PATE(VOTES, GNMax(1), student_fn, 1.0), "delta must be strictly between 0 and 1"),
        (lambda: flow(GNMax(1), budget=0), "budget must be a finite number above 0"),
        (lambda: flow(GNMax(1)).fit(X, num_queries=301), "at most the 300 examples"),
        (lambda: flow(GNMax(1)).fit(X, num_queries=3, queries=[1]), "not both"),
        (lambda: flow(GNMax(1)).fit(X, queries=[300]), "indices from 0 to 299"),
        (lambda: flow(GNMax(1)).fit(X, queries=[0.5]), "queries must be indices"),
        (lambda: flow(GNMax(1)).fit(X[:-1]), "votes on each of the 299 examples"),
        (lambda: flow(GNMax(1)).report(), "call fit"),
        (lambda: flow(GNMax(9)).fit(X, semi_supervised=True, confidence=1.0), "confidence must be strictly between"),
    ],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_report_names_the_seed_of_the_noise():
    report = flow(GNMax(40, seed=1)).fit(X).report()
    assert "its seed is fixed" in str(report) and "its seed is fixed" in report.promises(1e-5)[0].warnings[0]
    assert not flow(GNMax(40)).fit(X).report().promises(1e-5)[0].warnings
