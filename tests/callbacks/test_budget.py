"""PrivacyBudget prices what ran, and stops in time."""

import contextlib
import copy
import gc
import itertools
import json
import math
import pickle
import re

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import callbacks, data
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.data import bound_owners, poisson_batches
from tfdpfl.errors import PrivacyError

KERAS_2 = hasattr(tf.keras, "__internal__")
N, DELTA = 200, 1e-4
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 4)).astype("float32"), RNG.integers(0, 3, N)


def compiled(z=2.0, steps_per_execution=1, **kwargs):
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tfdpfl.DPSGD(1.0, z, learning_rate=0.1, **kwargs)
    model.compile(optimizer=optimizer, loss=loss, steps_per_execution=steps_per_execution)
    return model


def price(**kwargs):
    return tfdpfl.compute_epsilon(**{"num_examples": N, "delta": DELTA, "accountant": "rdp", **kwargs})


def PrivacyBudget(*args, **kwargs):
    return callbacks.PrivacyBudget(*args, **{"accountant": "rdp", **kwargs})  # the quick accountant


@pytest.mark.slow
@pytest.mark.both_stacks
def test_poisson_batches_are_priced_by_the_steps_that_ran():
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(poisson_batches((X, Y), expected_batch_size=20, steps=7), epochs=2, callbacks=[budget], verbose=0)
    want = [price(batch_size=20, noise_multiplier=2.0, num_steps=k) for k in (7, 14)]
    assert log.history["epsilon"] == pytest.approx(want)
    assert budget.report().sampling == "poisson" and budget.report().steps == 14
    assert budget.epsilon() == log.history["epsilon"][-1]
    assert budget.epsilon(1e-3) == pytest.approx(price(batch_size=20, noise_multiplier=2.0, num_steps=14, delta=1e-3))


@pytest.mark.slow
def test_shuffled_arrays_are_priced_by_passes_without_amplification():
    model, budget = compiled(), PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(X, Y, batch_size=30, epochs=3, callbacks=[budget], verbose=0)  # 7 steps, the last one partial
    want = [price(batch_size=30, noise_multiplier=2.0, num_epochs=k, sampling="shuffle") for k in (1, 2, 3)]
    assert log.history["epsilon"] == pytest.approx(want)
    assert budget.report().adjacency == "zero_out"
    with pytest.warns(UserWarning, match="The loss is NaN. Look for missing values first"):
        model.fit(np.where(X > 2, np.nan, X), Y, batch_size=30, callbacks=[budget], verbose=0)
    # An independent truth: k uses of one example at noise σ are one at σ / sqrt(k); its δ(ε) has a closed form.
    from scipy.stats import norm

    epsilon, mu = log.history["epsilon"][-1], math.sqrt(3) / 2.0
    exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert exact <= DELTA * 1.001


def test_the_default_accountant_is_the_tight_one():
    model, budget = compiled(), callbacks.PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    tight = price(batch_size=20, noise_multiplier=2.0, num_epochs=1, sampling="shuffle", accountant="pld")
    assert log.history["epsilon"] == pytest.approx([tight])
    assert tight < price(batch_size=20, noise_multiplier=2.0, num_epochs=1, sampling="shuffle")


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_training_stops_before_the_step_that_would_pass_the_target(steps_per_execution):
    target = price(batch_size=20, noise_multiplier=2.0, num_steps=10)
    model = compiled(expected_batch_size=20, steps_per_execution=steps_per_execution)
    budget = PrivacyBudget(num_examples=N, delta=DELTA, target_epsilon=target * 1.0001)
    batches = poisson_batches((X, Y), expected_batch_size=20, steps=8)
    log = model.fit(batches, epochs=5, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 10 // steps_per_execution * steps_per_execution
    assert log.history["epsilon"][-1] <= target * 1.0001
    weights = model.get_weights()
    with pytest.raises(PrivacyError, match=r"target_epsilon=.*no room"):
        model.fit(batches, epochs=1, callbacks=[PrivacyBudget(N, DELTA, target)], verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])


@pytest.mark.parametrize("steps", [None, 10])
@pytest.mark.parametrize("accountant", ["rdp", pytest.param("pld", marks=pytest.mark.slow)])
@pytest.mark.one_stack
def test_a_target_that_no_training_reaches_stops_none(accountant, steps):
    data = tf.data.Dataset.from_generator(
        lambda: ((X[i : i + 20], Y[i : i + 20]) for i in range(0, N, 20)),
        output_signature=(tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int64)),
    )
    model = compiled(z=1e4, expected_batch_size=20.0)
    budget = PrivacyBudget(N, DELTA, 1e3, sampling="poisson", batch_size=20, accountant=accountant)
    log = model.fit(data, epochs=2, steps_per_epoch=steps and steps // 2, callbacks=[budget], verbose=0)
    assert len(log.history["epsilon"]) == 2
    assert model.optimizer.num_dp_steps == (steps or 20)


def test_shuffled_training_stops_before_the_epoch_that_would_pass_the_target():
    target = price(batch_size=20, noise_multiplier=2.0, num_epochs=2, sampling="shuffle")
    model = compiled()
    budget = PrivacyBudget(num_examples=N, delta=DELTA, target_epsilon=target * 1.0001)
    log = model.fit(X, Y, batch_size=20, epochs=5, callbacks=[budget], verbose=0)
    assert len(log.history["epsilon"]) == 2
    assert log.history["epsilon"][-1] <= target * 1.0001


@pytest.mark.slow
def test_units_and_truncation_that_the_data_declare_are_priced_and_said():
    owners = [{i, i - i % 4} for i in range(N)]  # of every four the first is chosen, whose owner all four have
    data = poisson_batches(
        (X, Y), expected_batch_size=10, steps=4, user_ids=bound_owners(owners), examples_per_user=1)  # fmt: skip
    model, budget = compiled(expected_batch_size=10), PrivacyBudget(delta=DELTA)
    model.fit(data, callbacks=[budget], verbose=0)
    of_users = price(num_examples=N // 4, batch_size=10, noise_multiplier=2.0, num_steps=4)
    assert budget.report().epsilon == pytest.approx(of_users) and budget.report().unit == "user"
    assert re.search(r"of 50 users; (.|\n)*so ε protects each owner. It holds if it is public", str(budget.report()))
    assert model.optimizer.ledger.report(DELTA, "rdp").unit == "user"
    with pytest.raises(PrivacyError, match="different units"):  # its batches hold one example of several users' more
        model.fit(X, Y, callbacks=[budget], verbose=0)
    if hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent"):
        data = poisson_batches((X, Y), expected_batch_size=20, steps=4, truncated_batch_size=22)
        model, budget = compiled(expected_batch_size=20), PrivacyBudget(delta=DELTA, target_epsilon=50.0)
        model.fit(data, callbacks=[budget], verbose=0)
        assert budget.report().epsilon == price(
            batch_size=20, noise_multiplier=2.0, num_steps=4, truncated_batch_size=22, accountant="pld"
        )
        assert budget.report().epsilon > 1.2 * price(batch_size=20, noise_multiplier=2.0, num_steps=4)


@pytest.mark.parametrize("make", [data.shuffled_batches, data.fixed_order])
@pytest.mark.slow
def test_batches_that_hold_each_example_once_a_pass_are_priced_without_amplification(make):
    model, budget = compiled(), PrivacyBudget(delta=DELTA)
    log = model.fit(make((X, Y), 30), epochs=2, callbacks=[budget], verbose=0)
    want = [price(batch_size=30, noise_multiplier=2.0, num_epochs=k, sampling="shuffle") for k in (1, 2)]
    assert log.history["epsilon"] == pytest.approx(want)
    with pytest.raises(PrivacyError, match="the data say 'shuffle'"):
        model.fit(make((X, Y), 30), callbacks=[PrivacyBudget(delta=DELTA, sampling="poisson")], verbose=0)


@pytest.mark.parametrize("make", [data.shuffled_batches, data.fixed_order])
def test_rows_that_are_clipped_together_are_refused_where_each_is_an_example(make):
    # One of two rows moves their mean's clipped gradient by up to twice the clip, so ε would be too small.
    model, budget = compiled(rows_per_unit=2), PrivacyBudget(delta=DELTA)
    with pytest.raises(PrivacyError, match="In the batches 1 rows are one example, and the optimizer clips 2 as one"):
        model.fit(make((X, Y), 20), callbacks=[budget], verbose=0)
    assert not int(model.optimizer.iterations)


def test_batches_that_are_another_optimizers_are_refused():
    weighted = tf.data.Dataset.sample_from_datasets(
        [tf.data.Dataset.from_tensor_slices((X[i::2], Y[i::2])).repeat() for i in (0, 1)], [0.9, 0.1]
    ).batch(20)
    said = dict(sampling="shuffle", batch_size=20, num_examples=N)
    for batches, message, extra in [
        (poisson_batches((X, Y), 0.1, 3, copies=2), "2 rows are one example, .* each row by itself", {}),
        (poisson_batches((X, Y), 0.5, 3, user_ids=Y, examples_per_user=3), "3 rows are one user", {}),
        (data.cyclic_poisson((X, Y), 4, groups=2, expected_batch_size=20), "for correlated noise", {}),
        (data.b_min_sep((X, Y), 4, min_separation=2, expected_batch_size=20), "b_min_sep bounds how often", {}),
        (weighted, "weighted or class-balanced", said),
    ]:
        model = compiled(expected_batch_size=20)
        before = model.get_weights()
        with pytest.raises(PrivacyError, match=message):
            model.fit(batches, steps_per_epoch=3, callbacks=[PrivacyBudget(delta=DELTA, **extra)], verbose=0)
        np.testing.assert_array_equal(model.get_weights()[0], before[0])
        assert model.optimizer.num_dp_steps == 0


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


def test_a_step_of_which_nothing_is_known_says_that_users_have_no_epsilon():
    model, budget = compiled(expected_batch_size=10, rows_per_unit=2), PrivacyBudget(delta=DELTA)
    users = poisson_batches(
        (X, Y), expected_batch_size=10, steps=2, user_ids=np.arange(N) // 2, examples_per_user=2)  # fmt: skip
    model.fit(users, callbacks=[budget], verbose=0)
    assert budget.report().unit == "user"
    model.train_on_batch(X[:20], Y[:20])
    with pytest.raises(
        PrivacyError, match="1 steps ran of which only the noise is known, and the others protect users"
    ):
        budget.report()


@pytest.mark.parametrize("hidden", [False, True])
def test_examples_without_a_finite_gradient_are_said_where_the_loss_hides_them(hidden, recwarn):
    """A relu makes 0 of NaN, so the loss is finite. A statement says nothing, because it is published."""
    layers = [tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input((4,)), *layers])
    model.compile(tfdpfl.DPSGD(1.0, 2.0, learning_rate=0.1), loss="mse")
    callbacks = [tfdpfl.callbacks.PrivateMetrics(noise_std=0.1)] if hidden else []
    budget = PrivacyBudget(delta=DELTA)
    x = np.where(np.arange(N)[:, None] < 7, np.nan, X)
    log = model.fit(x, Y, batch_size=20, epochs=2, callbacks=[*callbacks, budget], verbose=0)
    assert np.isfinite(log.history["loss"]).all() and model.optimizer.num_nonfinite == 14
    said = [str(w.message) for w in recwarn if "not finite" in str(w.message)]
    assert [text.split(".")[0] for text in said] == ([] if hidden else ["The gradients of 7 examples were not finite"])
    assert "not finite" not in str(budget.report())


def test_a_statement_says_why_the_noise_of_microbatches_counts_as_half():
    budget, model = PrivacyBudget(delta=DELTA), compiled(num_microbatches=5)
    model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    assert "num_microbatches=5 clips mean gradients of groups" in str(budget.report())
    assert "noise_multiplier=2.0 counts as half" in str(budget.report()) and budget.report().noise_multiplier == 1.0


def test_a_target_that_is_spent_says_by_what():
    budget = PrivacyBudget(delta=DELTA, target_epsilon=uses(1) * 1.0001)
    compiled().fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    with pytest.raises(PrivacyError, match="room for another epoch: 10 steps that this PrivacyBudget counts have cost"):
        compiled().fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)


@pytest.mark.slow
def test_steps_of_a_training_before_count():
    model = compiled(expected_batch_size=20)
    batches = poisson_batches((X, Y), expected_batch_size=20, steps=5)
    model.fit(batches, callbacks=[PrivacyBudget(delta=DELTA)], verbose=0)
    log = model.fit(batches, callbacks=[PrivacyBudget(delta=DELTA)], verbose=0)
    assert log.history["epsilon"][-1] == pytest.approx(price(batch_size=20, noise_multiplier=2.0, num_steps=10))


def uses(count):
    """The price if every example takes part in so many steps."""
    return price(batch_size=20, noise_multiplier=2.0, num_steps=count, sampling="none")


@pytest.mark.parametrize("poisson", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_steps_that_no_fit_took_count_as_steps_of_every_example(poisson):
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(delta=DELTA)
    batches = poisson_batches((X, Y), expected_batch_size=20, steps=3)
    fit = lambda: model.fit(*((batches,) if poisson else (X, Y)), batch_size=None if poisson else 20,
                            callbacks=[budget], verbose=0)  # fmt: skip
    fit()
    seen = budget.report().epsilon
    for _ in range(4):
        model.train_on_batch(X, Y)
    after = budget.report().epsilon
    assert after > max(seen, uses(4))
    assert after <= uses(5) * 1.0001
    assert "A batch that is drawn with replacement may hold an example several times" in str(budget.report())
    fit()
    assert budget.report().steps == (10 if poisson else 24)
    assert budget.report().epsilon > after


@pytest.mark.slow
def test_epsilon_never_falls_when_the_sampling_or_the_optimizer_changes():
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(delta=DELTA)
    found = []
    model.fit(X, Y, batch_size=N, epochs=10, callbacks=[budget], verbose=0)
    found.append(budget.report().epsilon)
    model.fit(poisson_batches((X, Y), sampling_rate=0.01, steps=3), callbacks=[budget], verbose=0)
    found.append(budget.report().epsilon)
    model.compile(tfdpfl.DPSGD(1.0, 2.0, expected_batch_size=20), model.loss)
    model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    found.append(budget.report().epsilon)
    assert found[0] == pytest.approx(uses(10)) and found[0] < found[1] < found[2]
    assert found[2] >= uses(11)
    assert budget.ledger.steps == 10 + 3 + 10


@pytest.mark.slow
def test_a_ledger_tells_what_a_callback_before_saw(recwarn):
    model, first = compiled(), PrivacyBudget(delta=DELTA)
    model.fit(X, Y, batch_size=N, epochs=10, callbacks=[first], verbose=0)
    saved = PrivacyLedger.from_dict(json.loads(json.dumps(first.ledger.to_dict())))
    second = PrivacyBudget(delta=DELTA, ledger=saved)
    model.fit(X, Y, batch_size=20, callbacks=[second], verbose=0)
    assert second.report().epsilon == pytest.approx(uses(11))
    assert not [w for w in recwarn if "did not see" in str(w.message)]
    assert second.report().steps == 20
    stops = PrivacyBudget(delta=DELTA, target_epsilon=uses(13) * 1.0001, ledger=second.ledger)
    log = model.fit(X, Y, batch_size=20, epochs=9, callbacks=[stops], verbose=0)
    assert len(log.history["epsilon"]) == 2 and log.history["epsilon"][-1] == pytest.approx(uses(13))
    with pytest.raises(ValueError, match="PrivacyLedger"):
        PrivacyBudget(delta=DELTA, ledger=saved.to_dict())


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


def own_batches(sizes, x=X, y=Y):
    """A data set of one's own, of batches of such sizes, of which TensorFlow knows neither number nor size."""
    ends = np.cumsum([0, *sizes])
    return tf.data.Dataset.from_generator(
        lambda: ((x[a:b], y[a:b]) for a, b in itertools.pairwise(ends)),
        output_signature=(tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int64)),
    )


@pytest.mark.parametrize("target", [None, pytest.param(2, marks=pytest.mark.slow)])
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


def test_updates_of_one_batch_do_not_count_its_rows_again():
    model = Thrice()
    model.compile(tfdpfl.DPSGD(1.0, 2.0))
    model.fit(
        own_batches([60, 70, 70]), callbacks=[PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=70)], verbose=0
    )


@pytest.mark.slow
def test_a_stream_says_what_it_takes_for_granted():
    model, budget = compiled(), PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
    model.fit(own_batches([20] * 10).repeat(), steps_per_epoch=20, callbacks=[budget], verbose=0)
    assert budget.report().epsilon == pytest.approx(uses(2)) and "The data are a stream" in str(budget.report())


def one_each(*row):
    return tf.data.Dataset.from_tensors(row)


def two_each(*row):
    return one_each(*row).repeat(2)


ROWS = tf.data.Dataset.from_tensor_slices((X, Y))
TWICE = tf.data.Dataset.from_tensor_slices((np.tile(X, (2, 1)), np.tile(Y, 2)))
STATED = tf.data.experimental.assert_cardinality(N)


@pytest.mark.parametrize("data", [
    lambda: ROWS.flat_map(two_each).batch(20).repeat(), lambda: ROWS.repeat().flat_map(two_each).batch(20),
    lambda: ROWS.interleave(two_each).batch(20), lambda: ROWS.window(4, 1).flat_map(lambda x, y: x).batch(20).repeat(),
    lambda: ROWS.apply(STATED).repeat().flat_map(two_each).batch(20),
    lambda: ROWS.flat_map(two_each).apply(tf.data.experimental.assert_cardinality(2 * N)).batch(20).repeat(),
])  # fmt: skip
def test_a_stream_that_may_hold_copies_of_an_example_is_refused(data):
    """Ten batches of 20 rows are a pass of 200 examples, or 100 examples twice, which cost more."""
    model = compiled()
    with pytest.raises(PrivacyError, match="may make several rows of one example, and in a stream"):
        budget = PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
        model.fit(data(), steps_per_epoch=10, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 0


def rare(x, _):
    return tf.cast(x[0] > 1.5, tf.int32)


REFUSED_STREAMS = [
    (lambda: ROWS.repeat().shuffle(50).batch(20), "ShuffleDataset comes after repeat"),
    (lambda: tf.compat.v1.data.Dataset.from_tensor_slices((X, Y)).repeat().shuffle(50).batch(20), "comes after repeat"),
    (lambda: ROWS.repeat(2).shuffle(50).batch(20).repeat(), "ShuffleDataset comes after repeat"),
    (lambda: ROWS.take(9).repeat(5).concatenate(ROWS.skip(9)).batch(20), "ConcatenateDataset comes after repeat"),
    (
        lambda: ROWS.repeat().bucket_by_sequence_length(rare, [1], [20, 20]),
        "GroupByWindowDataset may make",
    ),
    (lambda: ROWS.filter(lambda x, y: y == 0).batch(20).repeat(), "FilterDataset may leave examples out"),
    (lambda: ROWS.repeat().filter(lambda x, y: y == 0).batch(20), "FilterDataset may leave examples out"),
    (lambda: ROWS.batch(20).repeat().shard(2, 0), "ShardDataset may leave examples out"),
    (lambda: ROWS.take(100).repeat().batch(20), "a pass of 100 examples"),
    (lambda: TWICE.shuffle(400).repeat().batch(20), "a pass of 400 examples"),
    (lambda: ROWS.take(180).batch(20).repeat(), "a pass of 9 batches of at most 20"),
]


@pytest.mark.parametrize("data, message", REFUSED_STREAMS)
def test_a_stream_whose_passes_are_mixed_or_not_of_num_examples_is_refused(data, message):
    """Ten batches of 20 rows count as one pass of 200 examples, and hold some examples several times."""
    rows = np.concatenate([x for x, _ in data().take(10)])
    assert np.unique(rows, axis=0, return_counts=True)[1].max() > 1
    model = compiled()
    with pytest.raises(PrivacyError, match=message):
        budget = PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
        model.fit(data(), steps_per_epoch=10, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 0


@pytest.mark.parametrize("data, message", [
    (lambda: ROWS.repeat().batch(30), "batch comes after repeat"),
    (lambda: ROWS.batch(30).repeat().unbatch().shuffle(90).batch(30), "UnbatchDataset comes|ShuffleDataset comes"),
])  # fmt: skip
def test_a_batch_that_may_hold_an_example_twice_is_refused_where_each_batch_counts(data, message):
    model = compiled()
    with pytest.raises(PrivacyError, match=message):
        budget = PrivacyBudget(N, DELTA, sampling="none", batch_size=30)
        model.fit(data(), steps_per_epoch=10, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("data", [
    lambda: ROWS.flat_map(one_each).apply(STATED).batch(20).repeat(),
    lambda: ROWS.flat_map(one_each).apply(STATED).repeat().batch(20),
    lambda: ROWS.filter(lambda x, y: True).apply(STATED).repeat().batch(20),
    lambda: ROWS.shuffle(50).repeat().batch(20), lambda: ROWS.shuffle(50).batch(20, drop_remainder=True).repeat(),
])  # fmt: skip
def test_a_stream_of_a_stated_number_of_rows_holds_no_copies(data):
    model, budget = compiled(), PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
    model.fit(data(), steps_per_epoch=20, callbacks=[budget], verbose=0)
    assert budget.report().epsilon == pytest.approx(uses(2))


@pytest.mark.parametrize("change, message", [
    (lambda batches: batches.flat_map(two_each), "flat_map comes after 'poisson' batches"),
    (lambda batches: batches.interleave(two_each), "interleave comes after 'poisson' batches"),
    (lambda batches: batches.group_by_window(lambda *_: tf.constant(0, tf.int64), lambda _, both: both.repeat(2), 2),
     "group_by_window comes after 'poisson' batches"),
    (lambda batches: batches.filter(lambda x, y: tf.size(y) > 18), "filter comes after 'poisson' batches"),
    (lambda batches: batches.take_while(lambda x, y: tf.size(y) > 9), "take_while comes after 'poisson' batches"),
    (lambda batches: batches.concatenate(poisson_batches((X, Y), 0.5, 7)), "made from several data sets"),
    (lambda batches: batches.concatenate(tf.data.Dataset.from_tensors((X, Y))), "made from several data sets"),
    (lambda batches: tf.data.Dataset.zip((batches, batches)).map(lambda a, _: a), "made from several data sets"),
])  # fmt: skip
def test_poisson_batches_that_come_twice_or_are_chosen_are_refused(change, message):
    """A sample in two steps costs one step of 0.7 times the noise; one that is left out for its size tells its size."""
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(N, DELTA, sampling="poisson", batch_size=20)
    with pytest.raises(PrivacyError, match=message):
        model.fit(change(poisson_batches((X, Y), 0.1, 7)), callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 0


@pytest.mark.parametrize("sampling, data", [
    ("poisson", lambda: ROWS.shuffle(N).batch(20)), ("poisson", lambda: ROWS.shuffle(N).repeat().padded_batch(20)),
    ("poisson", lambda: ROWS.filter(lambda *_: tf.random.uniform(()) < 0.1).batch(20)),
    ("fixed_size", lambda: ROWS.shuffle(N).batch(20)), ("fixed_size", lambda: ROWS.shuffle(N).repeat().batch(20)),
    ("fixed_size", lambda: ROWS.take(20).batch(20).repeat()),
    ("fixed_size", lambda: ROWS.shuffle(N - 1).take(20).batch(20).repeat()),
    ("fixed_size", lambda: ROWS.shuffle(N, reshuffle_each_iteration=False).take(20).batch(20).repeat()),
    ("fixed_size", lambda: ROWS.shuffle(N).skip(180).batch(20).repeat().filter(lambda x, y: tf.size(y) > 1)),
])  # fmt: skip
def test_batches_that_are_cut_from_one_pass_are_refused_as_independent_samples(sampling, data):
    """In a pass of ten such batches each example is in one, so that the next batch depends on those before."""
    model = compiled(expected_batch_size=20)
    with pytest.raises(PrivacyError, match=f"sampling='{sampling}', but .*BatchDataset cuts the data set into batches"):
        budget = PrivacyBudget(N, DELTA, sampling=sampling, batch_size=20)
        model.fit(data(), steps_per_epoch=10, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 0


@pytest.mark.parametrize("sampling, data, message", [
    ("shuffle", lambda: ROWS.batch(20).map(lambda x, y: (x - tf.reduce_mean(x, 0), y)), "in which examples meet"),
    ("shuffle", lambda: ROWS.repeat().map(lambda *e: e, num_parallel_calls=2, deterministic=False).batch(20),
     r"ParallelMapDataset \(deterministic=False\) comes after repeat"),
    ("fixed_order", lambda: ROWS.filter(lambda *_: tf.random.uniform(()) < 0.9).batch(20), "draws at random which"),
])  # fmt: skip
def test_transformations_that_break_what_is_said_are_refused(sampling, data, message):
    model = compiled(
        noise=tfdpfl.noise.Tree(min_separation=10, max_participations=2) if sampling == "fixed_order" else None
    )
    budget = PrivacyBudget(N, DELTA, sampling=sampling, batch_size=20)
    stream = 10 if sampling == "shuffle" else None
    with pytest.raises(PrivacyError, match=message):
        model.fit(data(), steps_per_epoch=stream, epochs=2, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 0


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
    assert budget.ledger.unknown_steps == 2
    assert budget.report().epsilon >= price(
        batch_size=N, noise_multiplier=2.0, num_steps=2, sampling="none", accountant="pld"
    )


def test_a_batch_that_repeat_draws_anew_is_a_sample_of_fixed_size():
    model, budget = compiled(), PrivacyBudget(N, DELTA, sampling="fixed_size", batch_size=20)
    model.fit(ROWS.cache().shuffle(N).take(20).batch(20).repeat(), steps_per_epoch=5, callbacks=[budget], verbose=0)
    assert budget.report().sampling == "fixed_size" and budget.report().steps == 5
    for again in (
        ROWS.shuffle(N).take(20).cache().batch(20).repeat(),
        ROWS.shuffle(N).take(20).batch(20).cache().repeat(),
    ):
        with pytest.raises(PrivacyError, match=r"cache\(\) comes after samples: every epoch repeats"):
            model.fit(again, steps_per_epoch=1, callbacks=[budget], verbose=0)


@pytest.mark.slow
def test_what_lies_behind_poisson_batches_is_priced_as_said():
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(N, DELTA, sampling="poisson", batch_size=20)
    model.fit(poisson_batches((X, Y), 0.1, 7).map(lambda x, y: (2 * x, y)), callbacks=[budget], verbose=0)
    assert budget.report().epsilon == pytest.approx(price(batch_size=20, noise_multiplier=2.0, num_steps=7))


def test_a_number_of_steps_that_changes_while_training_is_refused():
    model = compiled(steps_per_execution="auto")
    with pytest.raises(PrivacyError, match="steps_per_execution='auto'"):
        model.fit(X, Y, callbacks=[PrivacyBudget(N, DELTA)], verbose=0)
    assert model.optimizer.num_dp_steps == 0


def test_a_callback_that_saw_no_fit_knows_no_epsilon():
    budget = PrivacyBudget(N, DELTA)
    with pytest.raises(PrivacyError, match="saw no training"):
        budget.report()
    compiled().fit(X, Y, epochs=0, callbacks=[budget], verbose=0)
    assert budget.report().epsilon == 0


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda budget: copy.deepcopy([budget])[0]])
def test_copies_of_a_budget_spend_one_target(copied):
    """As keras-tuner and scikit-learn's clone copy it, for each trial."""
    target = uses(2) * 1.0001
    budget, fitted = PrivacyBudget(N, DELTA, target), []
    for _ in range(3):
        model, trial = compiled(), copied(budget)
        with contextlib.suppress(PrivacyError):
            model.fit(X, Y, batch_size=100, callbacks=[trial], verbose=0)
        fitted.append(model.optimizer.num_dp_steps)
    assert fitted == [2, 2, 0]  # no room for a third pass
    assert (
        trial.report().epsilon == budget.report().epsilon == pytest.approx(uses(2))
        and budget.report().epsilon <= target
    )


def test_a_budget_is_not_taken_to_another_process_with_its_target():
    with pytest.raises(PrivacyError, match=r"target_epsilon=3\) cannot be pickled"):
        pickle.dumps(PrivacyBudget(N, DELTA, 3.0))
    budget = PrivacyBudget(N, DELTA, dataset_name="a")
    compiled().fit(X, Y, batch_size=100, callbacks=[budget], verbose=0)
    loaded = pickle.loads(pickle.dumps(budget))
    assert loaded.ledger == budget.ledger and loaded.report().epsilon == budget.report().epsilon


def test_the_steps_of_epochs_that_were_begun_are_those_that_ran():
    """They tell whether others ran that nobody saw: a whole epoch's would hide some."""
    model, budget = compiled(), PrivacyBudget(N, DELTA)
    model.fit(X, Y, batch_size=20, epochs=2, steps_per_epoch=4, callbacks=[budget], verbose=0)
    assert budget.report().steps == budget.ledger.steps == model.optimizer.num_dp_steps == 8
    assert budget.report().participations == 2 and budget.report().epsilon == pytest.approx(uses(2))


class Loads(tf.keras.callbacks.Callback):
    """As Keras's BackupAndRestore does."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def on_train_begin(self, logs=None):
        self.model.optimizer._dp_ledger.assign(self.table)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_state_that_a_later_callback_loads_is_a_past_like_any_other():
    first, budget = compiled(), PrivacyBudget(N, DELTA)
    first.fit(X, Y, batch_size=20, epochs=2, callbacks=[budget], verbose=0)
    loads = Loads(np.asarray(first.optimizer._dp_ledger))
    log = compiled().fit(X, Y, batch_size=20, callbacks=[PrivacyBudget(N, DELTA, uses(4)), loads], verbose=0)
    assert log.history["epsilon"] == pytest.approx([uses(3)])
    known = PrivacyBudget(N, DELTA, ledger=budget.ledger)
    log = compiled().fit(X, Y, batch_size=20, callbacks=[known, loads], verbose=0)
    assert log.history["epsilon"] == pytest.approx([uses(3)])
    with pytest.raises(PrivacyError, match="no room"):
        compiled().fit(X, Y, batch_size=20, callbacks=[PrivacyBudget(N, DELTA, uses(2)), loads], verbose=0)


@pytest.mark.slow
def test_one_device_of_a_strategy_is_like_none():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = compiled()
    budget = PrivacyBudget(N, DELTA)
    model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    assert budget.report().steps == 10


def test_a_distributed_data_set_is_refused():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        model = compiled()
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(20)
    budget = PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
    for made in (
        strategy.experimental_distribute_dataset(data),
        strategy.distribute_datasets_from_function(lambda context: data),
    ):
        with pytest.raises(PrivacyError, match="how many examples all replicas get"):
            model.fit(made, steps_per_epoch=2, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 0


@pytest.mark.slow
def test_a_training_that_the_target_ends_says_so(capsys):
    budget = PrivacyBudget(N, DELTA, uses(2) * 1.0001)
    compiled().fit(X, Y, batch_size=20, epochs=5, callbacks=[budget], verbose=2)
    assert "PrivacyBudget stops the training in epoch 2, before" in capsys.readouterr().out
    compiled().fit(X, Y, batch_size=20, epochs=2, callbacks=[PrivacyBudget(N, DELTA, uses(2) * 1.0001)], verbose=2)
    assert "stops" not in capsys.readouterr().out


class Thrice(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = tf.keras.layers.Dense(3)

    def call(self, x, training=None):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - tf.one_hot(y, 3)) ** 2)
            self.optimizer.minimize(loss, self.trainable_variables, **({"tape": tape} if KERAS_2 else {}))
        return {"loss": 0.0}


class Tracks(Thrice):
    """As Keras's examples write a train_step of their own."""

    def __init__(self):
        super().__init__()
        self.tracker, self.other = tf.keras.metrics.Mean(name="loss"), tf.keras.metrics.SparseCategoricalAccuracy()

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            out = self(x, training=True)
            loss = tf.reduce_mean((out - tf.one_hot(y, 3)) ** 2)
        self.optimizer.minimize(loss, self.trainable_variables, **({"tape": tape} if KERAS_2 else {}))
        self.tracker.update_state(loss)
        self.other.update_state(y, out)
        return {"loss": self.tracker.result()}


@pytest.mark.slow
@pytest.mark.both_stacks
def test_metrics_that_a_model_keeps_are_shown_not_trained():
    model = Tracks()
    model.compile(tfdpfl.DPSGD(1.0, 2.0))
    log = model.fit(X, Y, batch_size=20, callbacks=[PrivacyBudget(delta=DELTA)], verbose=0)
    assert np.isfinite(log.history["epsilon"][-1]) and model.tracker.result() > 0


@pytest.mark.slow
def test_several_updates_on_one_batch_are_each_a_use_of_its_examples():
    model, budget = Thrice(), PrivacyBudget(delta=DELTA)
    model.compile(tfdpfl.DPSGD(1.0, 2.0))
    model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 30
    assert budget.report().epsilon >= uses(3)
    model.compile(tfdpfl.DPSGD(1.0, 2.0))
    with pytest.raises(PrivacyError, match=r"3 steps on 1 batches, so target_epsilon=.*one update on each batch"):
        model.fit(X, Y, batch_size=20, callbacks=[PrivacyBudget(N, DELTA, 100.0)], verbose=0)


@pytest.mark.slow
def test_steps_after_a_fit_count_when_the_model_is_gone():
    model, budget = compiled(), PrivacyBudget(delta=DELTA)
    model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    fitted = budget.report().epsilon
    for _ in range(3):
        model.train_on_batch(X, Y)
    del model
    compiled().fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    tf.keras.backend.clear_session()
    gc.collect()
    assert budget.ledger.steps == 10 + 3 + 10 and budget.report().epsilon > fitted


@pytest.mark.slow
@pytest.mark.parametrize("expected, adjacency", [(None, "zero_out"), (20.0, "add_or_remove_one")])
def test_a_sum_that_is_divided_by_the_batch_size_tells_how_many_examples_there_are(expected, adjacency):
    """With one example more the denominator is another: nothing bounds that, so it is not claimed."""
    model = compiled(expected_batch_size=expected)
    budget = PrivacyBudget(N, DELTA, sampling="none", batch_size=20)
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(20), callbacks=[budget], verbose=0)
    assert budget.report().adjacency == adjacency


def test_a_second_private_optimizer_is_refused():
    model = compiled()
    model.other = tfdpfl.DPSGD(1.0, 2.0)
    with pytest.raises(PrivacyError, match="second DP optimizer, 'other'"):
        model.fit(X, Y, callbacks=[PrivacyBudget(N, DELTA)], verbose=0)


@pytest.mark.slow
def test_microbatches_cost_what_twice_the_sensitivity_costs():
    model, budget = compiled(num_microbatches=5), PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(X, Y, batch_size=20, epochs=1, callbacks=[budget], verbose=0)
    want = price(batch_size=20, noise_multiplier=1.0, num_epochs=1, sampling="shuffle")
    assert log.history["epsilon"][-1] == pytest.approx(want)


@pytest.mark.slow
def test_validation_split_leaves_the_validation_examples_out():
    model, budget = compiled(), PrivacyBudget(num_examples=N, delta=DELTA)
    model.fit(X, Y, batch_size=20, validation_split=0.5, callbacks=[budget], verbose=0)
    assert budget.report().num_examples == N // 2


@pytest.mark.slow
def test_no_noise_is_an_infinite_epsilon():
    model = compiled(0.0)
    assert model.fit(X, Y, callbacks=[PrivacyBudget(N, DELTA)], verbose=0).history["epsilon"] == [math.inf]


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N).batch(20)


@pytest.mark.parametrize(
    ("optimizer", "data", "arguments", "message"),
    [
        ({}, dataset, {}, "give PrivacyBudget sampling=.* and batch_size, too"),
        ({}, dataset, {"sampling": "shuffle"}, "give PrivacyBudget batch_size, too"),
        ({"expected_batch_size": 20}, lambda: poisson_batches((X, Y), 0.1, 3).prefetch(1), {}, "itself to fit"),
        (
            {"expected_batch_size": 20},
            lambda: poisson_batches((X, Y), 0.1, 3).map(lambda x, y: (x, y)).take(2),
            {"sampling": "shuffle", "batch_size": 20},
            "made from Poisson batches.*sampling='poisson'",
        ),
        ({"expected_batch_size": 20}, lambda: poisson_batches((X, Y), 0.1, 3), {"batch_size": 30}, "batches of 20"),
        ({}, lambda: X, {"batch_size": 30}, "batch_size=30, but the data come in batches of 32"),
        ({"num_microbatches": 4}, lambda: X[:198], {"num_examples": 198}, r"last batch .* has 6 of .*x\[:192\]"),
        ({}, lambda: poisson_batches((X, Y), 0.1, 3), {}, "expected_batch_size"),
        ({"expected_batch_size": 20, "num_microbatches": 5}, lambda: poisson_batches((X, Y), 0.1, 3), {}, "microbatch"),
        ({"expected_batch_size": 20}, lambda: poisson_batches((X, Y), 0.1, 3), {"sampling": "shuffle"}, "'poisson'"),
        ({"expected_batch_size": 20}, lambda: poisson_batches((X, Y), 0.1, 3), {"num_examples": 7}, "num_examples=7"),
        ({}, lambda: X, {"sampling": "poisson"}, "shuffles"),
        (
            {},
            lambda: (
                tf.data.Dataset.from_tensor_slices(X)
                .batch(20, True)
                .flat_map(tf.data.Dataset.from_tensors)
                .apply(tf.data.experimental.assert_cardinality(20))
            ),
            {"sampling": "shuffle", "batch_size": 20},
            "num_examples=200, but a pass over the data set has 400 examples",
        ),
        ({}, lambda: X, {"num_examples": 7}, "num_examples=7"),
    ],
)
def test_what_cannot_be_priced_is_refused_before_the_first_update(optimizer, data, arguments, message):
    model = compiled(**optimizer)
    before = model.get_weights()
    budget = PrivacyBudget(**{"num_examples": N, "delta": DELTA, **arguments})
    x = data()
    with pytest.raises(ValueError, match=message):
        model.fit(x, Y[: len(x)] if isinstance(x, np.ndarray) else None, callbacks=[budget], verbose=0)
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


@pytest.mark.one_stack
def test_declared_sampling_of_other_data_is_believed():
    model = compiled()
    budget = PrivacyBudget(num_examples=N, delta=DELTA, sampling="shuffle", batch_size=20)
    log = model.fit(dataset(), callbacks=[budget], epochs=2, verbose=0)
    want = price(batch_size=20, noise_multiplier=2.0, num_epochs=2, sampling="shuffle")
    assert log.history["epsilon"][-1] == pytest.approx(want)


def test_an_optimizer_without_privacy_is_refused():
    model = compiled()
    model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(PrivacyError, match=r"SGD.*tfdpfl\.DPAdam"):
        model.fit(X, X[:, :3], callbacks=[PrivacyBudget(N, DELTA)], verbose=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delta": None}, "delta"),
        ({"delta": 1.5}, "delta"),
        *[({"target_epsilon": v}, f"target_epsilon must be .* got {v!r}") for v in (-1, "1", True, np.inf, np.nan)],
        ({"sampling": "often"}, "sampling must be one of .*'often'"),
        *[({"accountant": v}, f"accountant must be one of .*{v!r}") for v in ("pldd", None)],
        *[
            ({"batch_size": v}, f"batch_size must be a whole number .* got {v!r}")
            for v in (0, -3, True, 20.5, "20", np.nan)
        ],
        ({"batch_size": N + 1}, f"batch_size={N + 1} is more than num_examples={N}"),
        *[({"num_examples": v}, f"num_examples must be a whole number .* got {v!r}") for v in ("200", 0, np.nan, 2.5)],
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrivacyBudget(**{"num_examples": N, "delta": DELTA, **arguments})


@pytest.mark.parametrize("others", [lambda: [], lambda: [callbacks.AveragedWeights()]], ids=["alone", "averaged"])
def test_a_model_that_fit_builds_trains_with_its_budget(others):
    """Keras 2 knows no weights of it before its first step, but for those of layers that were built elsewhere."""
    shared = tf.keras.layers.Dense(4)
    shared.build([None, X.shape[1]])
    model, budget = tf.keras.Sequential([shared, tf.keras.layers.Dense(3)]), PrivacyBudget(N, DELTA)
    model.compile(tfdpfl.DPSGD(1.0, 2.0, learning_rate=0.1), tf.keras.losses.SparseCategoricalCrossentropy(True))
    model.fit(X, Y, batch_size=20, callbacks=[budget, *others()], verbose=0)
    assert budget.report().epsilon == pytest.approx(uses(1))
