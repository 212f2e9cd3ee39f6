"""Streams: an example is in them no more often than the number of rows shows."""

import numpy as np
import pytest
import tensorflow as tf
from budget_cases import DELTA, ROWS, N, PrivacyBudget, X, Y, compiled, one_each, own_batches, two_each, uses

from tfdpfl.errors import PrivacyError


@pytest.mark.slow
def test_a_stream_says_what_it_takes_for_granted():
    model, budget = compiled(), PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
    model.fit(own_batches([20] * 10).repeat(), steps_per_epoch=20, callbacks=[budget], verbose=0)
    assert budget.report().epsilon == pytest.approx(uses(2)) and "The data are a stream" in str(budget.report())


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
    with pytest.raises(PrivacyError, match=r"may make several rows of one example, and in a str|takes windows apart"):
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
    lambda: ROWS.filter(lambda x, y: True).apply(STATED).repeat().batch(20),
    lambda: ROWS.shuffle(50).batch(20, drop_remainder=True).repeat(),
])  # fmt: skip
def test_a_stream_of_a_stated_number_of_rows_holds_no_copies(data):
    model, budget = compiled(), PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
    model.fit(data(), steps_per_epoch=20, callbacks=[budget], verbose=0)
    assert budget.report().epsilon == pytest.approx(uses(2))


@pytest.mark.slow
def test_windows_of_keras_are_counted_as_rows_of_whole_passes():
    windows = tf.keras.utils.timeseries_dataset_from_array(X, Y, 1, batch_size=20).map(lambda x, y: (x[:, 0], y))
    model, budget = compiled(), PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20)
    model.fit(windows, epochs=2, callbacks=[budget], verbose=0)
    assert budget.report().epsilon == pytest.approx(uses(2))
    with pytest.raises(PrivacyError, match=f"num_examples={N // 2}, but this pass over the data has"):
        model.fit(windows, callbacks=[PrivacyBudget(N // 2, DELTA, sampling="shuffle", batch_size=20)], verbose=0)
