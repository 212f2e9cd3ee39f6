"""What is said of the data agrees with what `fit` was given."""

import re

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from budget_cases import DELTA, ROWS, N, PrivacyBudget, X, Y, compiled, dataset, price, two_each

import tfdpfl
from tfdpfl import data
from tfdpfl.data import bound_owners, poisson_batches
from tfdpfl.errors import PrivacyError


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
@pytest.mark.parametrize("expected, adjacency", [(None, "zero_out"), (20.0, "add_or_remove_one")])
def test_a_sum_that_is_divided_by_the_batch_size_tells_how_many_examples_there_are(expected, adjacency):
    """With one example more the denominator is another: nothing bounds that, so it is not claimed."""
    model = compiled(expected_batch_size=expected)
    budget = PrivacyBudget(N, DELTA, sampling="none", batch_size=20)
    model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(20), callbacks=[budget], verbose=0)
    assert budget.report().adjacency == adjacency


@pytest.mark.slow
def test_validation_split_leaves_the_validation_examples_out():
    model, budget = compiled(), PrivacyBudget(num_examples=N, delta=DELTA)
    model.fit(X, Y, batch_size=20, validation_split=0.5, callbacks=[budget], verbose=0)
    assert budget.report().num_examples == N // 2


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


def test_a_batch_size_that_keras_would_not_use_is_refused():
    with pytest.raises(ValueError, match="batch_size"):
        compiled(expected_batch_size=20).fit(
            poisson_batches((X, Y), 0.1, 3), batch_size=64, callbacks=[PrivacyBudget(delta=DELTA)], verbose=0
        )


@pytest.mark.one_stack
def test_declared_sampling_of_other_data_is_believed():
    model = compiled()
    budget = PrivacyBudget(num_examples=N, delta=DELTA, sampling="shuffle", batch_size=20)
    log = model.fit(dataset(), callbacks=[budget], epochs=2, verbose=0)
    want = price(batch_size=20, noise_multiplier=2.0, num_epochs=2, sampling="shuffle")
    assert log.history["epsilon"][-1] == pytest.approx(want)


@pytest.mark.parametrize(
    ("data", "said", "message"),
    [
        (
            lambda: ROWS.batch(100, drop_remainder=True), {"sampling": "shuffle", "batch_size": 10},
            "batches of the data set hold 100",
        ),
        (lambda: ROWS.batch(20, drop_remainder=True), {"sampling": "poisson", "batch_size": 20}, "hold 20 examples"),
        (
            lambda: ROWS.batch(20), {"sampling": "poisson", "batch_size": 20, "num_examples": 60_000},
            "ends after 10 batches, 200 examples",
        ),
        (
            lambda: ROWS.batch(20), {"sampling": "fixed_size", "batch_size": 20, "num_examples": 60_000},
            "ends after 10 batches",
        ),
        (
            lambda: poisson_batches((X, Y), 0.01, 3).cache(), {"sampling": "poisson", "batch_size": 2},
            r"cache\(\) comes after Poisson",
        ),
        (lambda: poisson_batches((X, Y), 0.01, 3).cache().prefetch(1), {}, r"cache\(\) comes after Poisson"),
        (
            lambda: tfdpfl.data.fixed_order((X, Y), 20).prefetch(1), {"sampling": "poisson", "batch_size": 20},
            "of kind 'fixed_order', which sampling='poisson' does not",
        ),
        (
            lambda: tfdpfl.data.poisson_batches((X, Y), 0.01, 2, copies=3).prefetch(1),
            {"sampling": "poisson", "batch_size": 2}, "made from batches with 3 rows of each example",
        ),
        (
            lambda: poisson_batches((X, Y), 0.01, 3).prefetch(1), {"sampling": "poisson", "batch_size": 1},
            "batch_size=1, but the data were made from batches of 2 from 200",
        ),
    ],
)  # fmt: skip
def test_data_that_contradict_what_is_said_of_them_are_refused(data, said, message):
    model = compiled(expected_batch_size=2.0)
    before = model.get_weights()
    with pytest.raises(PrivacyError, match=message) as raised:
        model.fit(data(), callbacks=[PrivacyBudget(**{"num_examples": N, "delta": DELTA, **said})], verbose=0)
    if "cache" in message:
        assert "sampling=" not in str(raised.value)
    np.testing.assert_array_equal(before[0], model.get_weights()[0])
