"""A user's rule is compared with TensorFlow's gradients, and is refused where it differs."""

import numpy as np
import pytest
import tensorflow as tf
from model_cases import IMAGES, LOSS, L, flat, norms_of

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.clipping import register_rule, validate
from tfdpfl.clipping.gradients import MaterializedGradient


@pytest.mark.parametrize("axis", [0, 1])
def test_a_promise_is_tried_on_random_numbers(axis, rules):
    register_rule("ReverseV2", batch_axis=0)(lambda use, units: None)
    w = tf.Variable([1.0, 2.0, 3.0])
    norms = norms_of(lambda x: tf.reduce_sum(tf.raw_ops.ReverseV2(tensor=x, axis=[axis]) * w), w)
    x = IMAGES[:, 0, 0]
    if axis:
        np.testing.assert_allclose(norms(x), np.linalg.norm(x, axis=1), rtol=1e-6)
    else:
        with pytest.raises(PrivacyError, match=r"ReverseV2.*one example changes the values or the gradients of others"):
            norms(x)


def products(use):
    return tf.einsum("bi,bj->bij", use.inputs[0], use.g)


WRONG = {
    "short": lambda use: 0.01 * products(use),
    "none": lambda use: 0 * products(use),
    "mean": lambda use: 0 * products(use) + tf.reduce_mean(products(use), 0, keepdims=True),
    "sign": lambda use: products(use) * tf.sign(tf.reduce_sum(products(use))),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_step_is_not_traced_with_a_rule_that_is_wrong(kind, rules):
    register_rule("MatMul")(lambda use, units: MaterializedGradient([WRONG[kind](use)]))
    w = tf.Variable(np.ones((3, 2), "float32"))
    with pytest.raises(PrivacyError, match=r"Your rule for MatMul \(<lambda>\) does not give the gradients of"):
        norms_of(lambda x: tf.reduce_sum(tf.sin(x @ w)), w)(IMAGES[:, 0, 0])


def test_a_rule_whose_norms_alone_are_wrong_is_refused(rules):
    def halved(use, units):
        each = products(use)
        return MaterializedGradient([each], norms2=tf.reduce_sum(each**2, [1, 2]) / 4)

    register_rule("MatMul")(halved)
    w = tf.Variable(np.ones((3, 2), "float32"))
    with pytest.raises(PrivacyError, match=r"Your rule for MatMul \(.*an example's norm is"):
        norms_of(lambda x: tf.reduce_sum(tf.sin(x @ w)), w)(IMAGES[:, 0, 0])


@pytest.mark.slow
def test_fit_refuses_a_rule_that_is_wrong_and_changes_nothing(rules):
    model, (x, y) = flat()
    register_rule("MatMul")(lambda use, units: MaterializedGradient([WRONG["short"](use)]))
    model.compile(optimizer=tfdpfl.DPSGD(1.0, 1.0), loss=LOSS)
    before = model.get_weights()
    with pytest.raises(PrivacyError, match="Your rule for MatMul"):
        model.fit(x, y, verbose=0)
    assert all(map(np.array_equal, before, model.get_weights()))


def test_a_rule_that_cannot_be_compared_gives_way_to_the_exact_fallback(rules):
    def works_elsewhere_alone(use, units):
        if use.op.name.startswith("tfdpfl"):
            raise KeyError("another graph")
        return MaterializedGradient([WRONG["short"](use)])

    register_rule("MatMul")(works_elsewhere_alone)
    w, x = tf.Variable(np.ones((3, 2), "float32")), IMAGES[:, 0, 0]
    with pytest.warns(UserWarning, match=r"\(works_elsewhere_alone\) cannot be compared .* KeyError: 'another graph'"):
        norms = norms_of(lambda x: tf.reduce_sum(x @ w), w)(x)
    np.testing.assert_allclose(norms, np.sqrt(2) * np.linalg.norm(x, axis=1), rtol=1e-6)


@pytest.mark.slow
def test_validate_compares_rules_with_exact_gradients(rules):
    """This rule is right on the random numbers that a step is traced with."""
    short = lambda use: tf.where(tf.reduce_max(use.inputs[0]) > 1000, 0.01, 1.0) * products(use)
    register_rule("MatMul")(lambda use, units: MaterializedGradient([short(use)]))
    model, (x, y) = flat()
    with pytest.raises(PrivacyError, match="Your rules are used for MatMul"):
        validate(model, (5000 * x, y))


@pytest.mark.slow
def test_validate_accepts_a_rule_that_is_right(rules):
    register_rule("MatMul")(lambda use, units: MaterializedGradient([products(use)]))
    validate(*flat(L.Dense(3, activation="tanh")))


@pytest.mark.slow
def test_reports_and_ledgers_name_the_rules_of_users(rules):
    model, (x, y) = flat()
    register_rule("MatMul")(lambda use, units: MaterializedGradient([products(use)]))
    model.compile(optimizer=tfdpfl.DPSGD(1.0, 1.0), loss=LOSS)
    budget = tfdpfl.callbacks.PrivacyBudget(delta=1e-3, accountant="rdp")
    model.fit(x, y, verbose=0, callbacks=[budget])
    ledger = tfdpfl.PrivacyLedger.from_dict(budget.ledger.to_dict())
    merged = tfdpfl.PrivacyLedger().merge(ledger).of_dataset(None)
    for report in (budget.report(), merged.report(1e-3, "rdp")):
        assert "rules that a user registered for these ops: MatMul." in report.statement()
    assert ledger == budget.ledger != tfdpfl.PrivacyLedger()
