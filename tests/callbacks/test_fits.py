"""What a call of `fit` is counted as: passes, executions and rows."""

import json

import numpy as np
import pytest
import tensorflow as tf
from budget_cases import DELTA, N, PrivacyBudget, Thrice, X, Y, compiled, own_batches, price, uses

import tfdpfl
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.data import poisson_batches
from tfdpfl.errors import PrivacyError


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("poisson", [True, False])
def test_steps_that_keras_adds_to_fill_an_execution_are_counted_as_sampled(poisson):
    """Keras 3 takes 12 batches for 10 steps in executions of 3, if the data go on."""
    model, budget = compiled(expected_batch_size=20, steps_per_execution=3), PrivacyBudget(N, DELTA)
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N).batch(20).repeat()
    budget = PrivacyBudget(N, DELTA) if poisson else PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
    batches = poisson_batches((X, Y), expected_batch_size=20, steps=60) if poisson else rows
    model.fit(batches, steps_per_epoch=10, epochs=5, callbacks=[budget], verbose=0)
    taken = model.optimizer.num_dp_steps
    assert taken in (50, 60) and budget.ledger.unknown_steps == 0 and budget.report().steps == taken
    if poisson:
        assert budget.report().epsilon == pytest.approx(price(batch_size=20, noise_multiplier=2.0, num_steps=taken))
    else:
        assert uses(taken / 10) * 0.9999 <= budget.report().epsilon <= uses(10) * 1.0001


@pytest.mark.slow
@pytest.mark.parametrize("target", [None, 3])
def test_a_data_set_that_turns_out_to_hold_several_passes_is_priced_for_each(target):
    model = compiled()
    allowed = None if target is None else uses(target) * 1.0001
    budget = PrivacyBudget(N, DELTA, allowed, sampling="shuffle", batch_size=20)
    batches = own_batches([20] * 10).repeat(5)
    model.fit(batches, callbacks=[budget], verbose=0)
    passes = target or 5
    assert budget.report().epsilon == pytest.approx(uses(passes))
    assert budget.report().participations == passes
    assert model.optimizer.num_dp_steps == 10 * passes  # none is counted where the data end


@pytest.mark.slow
@pytest.mark.parametrize("target", [None, 2])
def test_a_pass_in_batches_of_uneven_size_is_one_pass(target):
    """Buckets of one length each have more batches than num_examples / batch_size. By the closed form: a use a pass."""
    allowed = None if target is None else uses(target) * 1.0001
    model, budget = compiled(), PrivacyBudget(N, DELTA, allowed, sampling="shuffle", batch_size=60)
    model.fit(own_batches([60, 20, 50, 40, 30]), epochs=3, callbacks=[budget], verbose=0)
    assert budget.report().epsilon == pytest.approx(uses(target or 3))
    assert budget.report().steps == model.optimizer.num_dp_steps == 5 * (target or 3)
    assert PrivacyLedger.from_dict(json.loads(json.dumps(budget.ledger.to_dict()))) == budget.ledger
    assert "One example is one row of the batches" in str(budget.report())
    assert "The data are a stream" not in str(budget.report())


@pytest.mark.slow
def test_more_rows_than_examples_are_refused_and_not_priced_as_one_use():
    """Two copies of each example, side by side: both are in one step, which costs a Gaussian of half the noise."""
    twice = own_batches([20] * 20, np.repeat(X, 2, 0), np.repeat(Y, 2, 0))
    model, budget = compiled(), PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
    with pytest.raises(PrivacyError, match=r"num_examples=200, but this pass over the data has 220 examples or more"):
        model.fit(twice, callbacks=[budget], verbose=0)
    both = price(batch_size=N, noise_multiplier=1.0, num_epochs=1, sampling="shuffle")
    assert budget.report().epsilon > both and model.optimizer.ledger.epsilon(DELTA, "rdp") > both


def test_batches_larger_than_was_said_are_refused():
    model, budget = compiled(), PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
    with pytest.raises(PrivacyError, match="batch_size=20, but fit was given a batch of 30 examples"):
        model.fit(own_batches([20, 30]), callbacks=[budget], verbose=0)


@pytest.mark.slow
def test_updates_of_one_batch_do_not_count_its_rows_again():
    model = Thrice()
    model.compile(tfdpfl.DPSGD(1.0, 2.0))
    model.fit(
        own_batches([60, 70, 70]), callbacks=[PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=70)], verbose=0
    )


@pytest.mark.slow
@pytest.mark.both_stacks
def test_an_allocated_pass_that_ends_before_the_number_that_it_states_counts_as_unknown():
    """An example chose among two batches, not among the ten that ε would count."""
    output = (tf.TensorSpec([None, 4]), tf.TensorSpec([None], tf.int64))
    rows = tf.data.Dataset.from_generator(
        lambda: iter([(X[:20], Y[:20]), (X[20:39], Y[20:39])]), output_signature=output
    )
    model = compiled(expected_batch_size=20)
    budget = PrivacyBudget(N, DELTA, sampling="random_allocation", batch_size=20)
    with pytest.raises(Exception, match="expected to contain 10 elements"):
        model.fit(rows.apply(tf.data.experimental.assert_cardinality(10)), epochs=2, callbacks=[budget], verbose=0)
    assert budget.ledger.unknown_steps == 2 and "'random_allocation' was interrupted" in str(budget.report())
    assert budget.report().epsilon >= price(
        batch_size=N, noise_multiplier=2.0, num_steps=2, sampling="none", accountant="pld"
    )


def test_a_number_of_steps_that_changes_while_training_is_refused():
    model = compiled(steps_per_execution="auto")
    with pytest.raises(PrivacyError, match="steps_per_execution='auto'"):
        model.fit(X, Y, callbacks=[PrivacyBudget(N, DELTA)], verbose=0)
    assert model.optimizer.num_dp_steps == 0


def test_the_steps_of_epochs_that_were_begun_are_those_that_ran():
    """They tell whether others ran that nobody saw: a whole epoch's would hide some."""
    model, budget = compiled(), PrivacyBudget(N, DELTA)
    model.fit(X, Y, batch_size=20, epochs=2, steps_per_epoch=4, callbacks=[budget], verbose=0)
    assert budget.report().steps == budget.ledger.steps == model.optimizer.num_dp_steps == 8
    assert budget.report().participations == 2 and budget.report().epsilon == pytest.approx(uses(2))


def test_a_second_private_optimizer_is_refused():
    model = compiled()
    model.other = tfdpfl.DPSGD(1.0, 2.0)
    with pytest.raises(PrivacyError, match="second DP optimizer, 'other'"):
        model.fit(X, Y, callbacks=[PrivacyBudget(N, DELTA)], verbose=0)


def test_an_optimizer_without_privacy_is_refused():
    model = compiled()
    model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(PrivacyError, match=r"SGD.*tfdpfl\.DPAdam"):
        model.fit(X, X[:, :3], callbacks=[PrivacyBudget(N, DELTA)], verbose=0)
