"""The Keras layer gives a label the same noise each time that it is read, and counts each release."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl.accounting import price
from tfdpfl.data.functions import number_apart
from tfdpfl.errors import PrivacyError
from tfdpfl.label_dp import LabelPrivacy
from tfdpfl.reports import report


def test_a_label_keeps_its_noise_through_epochs_and_shuffles():
    ids, y = np.arange(2000), np.arange(2000) % 10
    private = LabelPrivacy(0.5, 10)
    dataset = tf.data.Dataset.from_tensor_slices((ids, y)).shuffle(2000).batch(64)
    dataset = dataset.map(lambda i, label: (i, private(label, ids=i)))
    passes = []
    for _ in range(3):
        seen, noisy = zip(*dataset.as_numpy_iterator(), strict=True)
        passes.append(dict(zip(np.concatenate(seen).tolist(), np.concatenate(noisy).tolist(), strict=True)))
    assert passes[0] == passes[1] == passes[2]
    other = LabelPrivacy(0.5, 10)
    assert (other(y, ids=ids).numpy() != private(y, ids=ids).numpy()).any()


def test_numbers_of_examples_that_change_with_each_pass_are_no_ids():
    """Twenty passes showed both labels of each of 64 examples, and the ledger had one release."""
    private, rows = LabelPrivacy(1.0, 3), tf.data.Dataset.from_tensor_slices(([7, 8, 9], [0, 1, 2]))

    def released(number, example):
        return private(example[1], ids=number)

    numbers, shuffled = tf.data.Dataset.range(3), rows.shuffle(3)
    place, drawn = tf.Variable(0), lambda: tf.random.uniform([3], 0, 9, tf.int32)
    for data in (
        shuffled.enumerate(), shuffled.enumerate().batch(2), tf.data.Dataset.zip((tf.data.Dataset.counter(), shuffled)),
        tf.data.Dataset.zip((shuffled, numbers)).map(lambda e, i: (i + 5, e)),
        shuffled.scan(0, lambda s, e: (s + 1, (s, e))),
        rows.map(lambda x, y: (x + tf.random.uniform([], 0, 9, tf.int32), (x, y))).shuffle(3),
    ):  # fmt: skip
        with pytest.raises(Exception, match=r"ids are numbers of examples \(enumerate\)"):
            data.map(released)
    for made in (
        lambda y: tf.range(tf.size(y)), lambda y: y[:0] + drawn(), lambda y: y + tf.function(drawn)(),
        lambda y: tf.fill(tf.shape(y), place.assign_add(1)),
    ):  # fmt: skip
        with pytest.raises(Exception, match="or they are drawn or counted"):
            rows.batch(3).map(lambda x, y, made=made: private(y, ids=made(y)))
    for data in (
        rows.enumerate().shuffle(3), rows.shuffle(3).cache().enumerate(), rows.map(lambda x, y: (x, (x, y))).shuffle(3),
        rows.enumerate().shuffle(3).map(lambda i, e: (i + 5, e)), tf.data.Dataset.zip((numbers, rows)).shuffle(3),
        rows.shuffle(3, reshuffle_each_iteration=False).enumerate(),
    ):  # fmt: skip
        private = LabelPrivacy(1.0, 3)
        data.map(released)
    rows.shuffle(3).enumerate().map(lambda number, example: private(example[1], ids=example[0]))


ROWS = tf.data.Dataset.from_tensor_slices((np.arange(9), np.arange(9) % 3))
OTHERS = tf.data.Dataset.from_tensor_slices((np.arange(9) + 50, np.arange(9) % 3))


def test_two_numberings_are_ids_only_if_they_agree():
    """Against the numbers that the examples get: none has two, and none is that of two."""
    shards, others = [ROWS.shard(3, i) for i in range(3)], OTHERS.take(9)
    for one, other in (
        [(0, ROWS), (0, ROWS)], [(0, ROWS.take(6)), (0, ROWS.take(3))], [(0, ROWS.take(6)), (3, ROWS.skip(3))],
        [(0, ROWS), (0, ROWS.skip(3))], [(0, ROWS.take(6)), (6, ROWS.skip(3))], [(0, ROWS), (1, ROWS)],
        [(0, ROWS.take(6)), (6, ROWS.skip(6))], [(0, ROWS), (9, ROWS)], [(0, ROWS.take(6)), (7, ROWS.skip(6))],
        [(0, ROWS.take(6)), (5, ROWS.skip(6))], [(0, ROWS), (9, others)], [(0, ROWS), (8, others)],
        [(0, shards[0]), (0, shards[1])], [(0, shards[0]), (3, shards[1])], [(2, shards[2]), (2, shards[2])],
        [(5, ROWS.shard(9, 5)), (0, ROWS.take(1))], [(0, ROWS), (0, ROWS.shard(2, 0))],
    ):  # fmt: skip
        numbers = [
            dict(zip(map(int, side.map(lambda x, y: x)), range(s, s + 99), strict=False)) for s, side in (one, other)
        ]
        merged = {(x, n) for part in numbers for x, n in part.items()}
        agree = len(merged) == len({x for x, _ in merged}) == len({n for _, n in merged})
        assert number_apart(one, other) is number_apart(other, one) is agree, (one, other)
    ordered = ROWS.shuffle(9, seed=1, reshuffle_each_iteration=False)
    assert not number_apart((0, ROWS), (0, ordered)) and number_apart((0, ordered), (0, ordered))


def test_a_layer_refuses_numbers_that_do_not_agree_with_those_it_was_given():
    """Two examples with one number had the same noise, and one with two numbers was released twice for one price."""
    private = LabelPrivacy(1.0, 3)
    ROWS.take(6).enumerate().map(lambda number, example: private(example[1], ids=tf.strings.as_string(number)))
    ROWS.enumerate().shuffle(9).batch(2).map(lambda number, example: private(example[1], ids=number))
    for same in (tf.identity, tf.strings.as_string):
        with pytest.raises(Exception, match=r"numbers \(enumerate\) of two data sets .* they do not agree"):
            ROWS.skip(6).enumerate().map(lambda number, example: private(example[1], ids=same(number)))  # noqa: B023
    named = lambda number: tf.strings.as_string(number) + "b"  # ids of the user's making are believed
    ROWS.skip(6).enumerate().map(lambda number, example: private(example[1], ids=named(number)))


def test_a_report_states_that_an_example_needs_one_id_in_all_files():
    """Ids of two files or generators cannot be compared: nothing tells that they number the same examples."""
    cached, by_id = LabelPrivacy(1.0, 3), LabelPrivacy(1.0, 3)
    cached.cached(ROWS.map(lambda x, y: y))
    by_id(tf.constant([0, 1]), ids=tf.constant([7, 8]))
    condition = "It holds if each example has one id in all files and programs, and no two examples share one"
    said = [str(report({"labels": layer}, delta=1e-5)) for layer in (cached, by_id)]
    assert [condition in text for text in said] == [False, True]


def test_the_layers_frequencies_are_its_matrix():
    n, private = 60_000, LabelPrivacy(1.0, 4)
    said = private(tf.fill([n], 2), ids=tf.range(n)).numpy()
    expected = n * private.transition_matrix_[2]
    statistic = ((np.bincount(said, minlength=4) - expected) ** 2 / expected).sum()
    assert statistic < 40  # of 3 degrees of freedom: a chance below 1e-8


def test_the_layer_takes_strings_for_ids_and_keeps_shape_and_dtype():
    private = LabelPrivacy(1.0, 3, seed=0)
    labels = tf.constant([[0], [1], [2]], tf.uint8)
    noisy = private(labels, ids=tf.constant([["a"], ["b"], ["c"]]))
    assert noisy.shape == (3, 1) and noisy.dtype == tf.uint8
    assert (LabelPrivacy(60.0, 3)(labels, ids=labels).numpy() == labels.numpy()).all()


def test_the_layer_lies_at_any_epsilon(monkeypatch):
    hashed = [tf.zeros(900, tf.int64), tf.range(900, dtype=tf.int64) * 2**53 // 900]
    monkeypatch.setattr(tf.strings, "to_hash_bucket_strong", lambda *args: hashed.pop(0))
    said = LabelPrivacy(45.0, 10)(tf.fill([900], 4), ids=tf.range(900)).numpy()
    assert np.bincount(said) == pytest.approx([100] * 4 + [0] + [100] * 5, abs=1)


def test_the_layers_key_is_not_saved():
    private = LabelPrivacy(1.0, 10)
    again = LabelPrivacy.from_config(private.get_config())
    assert (again.epsilon, again.num_classes) == (1.0, 10) and again._key != private._key
    assert not any(str(word) in str(private.get_config()) for word in private._key)
    assert price(private.dp_event, 1e-9, adjacency="replace_one").epsilon == pytest.approx(1.0, rel=6e-3)
    assert private.ledger.epsilon(1e-9) == pytest.approx(1.0, rel=6e-3)


def test_the_layer_refuses_what_it_cannot_hide():
    private = LabelPrivacy(1.0, 3)
    with pytest.raises(ValueError, match=r"ids=None.*LabelPrivacy.cached"):
        private(tf.constant([1]))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"0\.\.2"):
        private(tf.constant([3]), ids=tf.constant([1]))
    with pytest.raises(ValueError, match=r"integers 0..2, got float32"):
        private(tf.constant([0.5]), ids=tf.constant([1]))
    with pytest.raises(ValueError, match=r"epsilon.*0"):
        LabelPrivacy(0.0, 3)
    with pytest.raises(ValueError, match=r"num_classes.*1"):
        LabelPrivacy(1.0, 1)


def test_every_release_of_the_layer_is_counted():
    layer = LabelPrivacy(1.0, 10)
    once = layer.ledger.epsilon(1e-9)
    data = tf.data.Dataset.from_tensor_slices(np.arange(200) % 10)
    layer.cached(data)
    assert layer.ledger.epsilon(1e-9) == once
    layer.cached(data)
    twice = layer.ledger.epsilon(1e-9)
    layer(tf.constant([1, 2]), ids=tf.constant([5, 6]))
    layer(tf.constant([1, 2]), ids=tf.constant([5, 6]))  # the same noise
    assert 1.9 < twice < 2.01 and 2.9 < layer.ledger.epsilon(1e-9) < 3.02


@pytest.mark.parametrize(("labels", "ids", "message"), [
    (tf.constant([1, 2, 3]), tf.constant(7), "ids must have the shape of labels"),
    (tf.constant([1, 2, 3]), tf.constant([7]), "ids must have the shape of labels"),
    (tf.constant([[1], [2]]), tf.constant([7, 8]), "ids must have the shape of labels"),
    (tf.constant([1, 2]), tf.constant([0.1, 0.2]), "ids must be integers or strings, got float32"),
    (tf.constant([1, 2], tf.uint8), tf.constant([7, 8]), "uint8 cannot hold 1000 classes"),
])  # fmt: skip
def test_the_layer_refuses_ids_that_would_share_noise(labels, ids, message):
    with pytest.raises(ValueError, match=message):
        LabelPrivacy(1.0, 1000)(labels, ids=ids)


def test_ids_of_unknown_length_are_compared_when_run():
    layer = LabelPrivacy(1.0, 10)
    step = tf.function(lambda y, i: layer(y, ids=i), input_signature=[tf.TensorSpec([None], tf.int32)] * 2)
    assert step([1, 2], [3, 4]).shape == (2,)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ids must have the shape of labels"):
        step([1, 2], [3])


def test_two_columns_of_labels_cannot_share_the_noise_of_their_ids():
    """Where the columns were equal, what was released was: a difference told that they were not."""
    rows, private = tf.data.Dataset.from_tensor_slices(([0, 1], [1, 1])).enumerate(), LabelPrivacy(1.0, 3)
    for batched in (rows, rows.batch(2)):
        with pytest.raises(PrivacyError, match="Two columns of labels have the same ids"):
            batched.map(lambda i, y: (private(y[0], ids=i), private(tf.cast(y[1], tf.int64), ids=tf.cast(i, tf.int32))))
    with pytest.raises(PrivacyError, match="Two columns"):
        rows.map(lambda i, y: (private(y[0], ids=i), private(y[0] // 2, ids=i)))
    assert len(list(rows.map(lambda i, y: (private(y[0], ids=i), private(y[0], ids=i))))) == 2
    other = LabelPrivacy(1.0, 3)
    assert len(list(rows.map(lambda i, y: (private(y[0], ids=i), other(y[1], ids=i))))) == 2


def test_two_labels_with_one_id_are_refused_when_run():
    private = LabelPrivacy(1.0, 3)
    with pytest.raises(tf.errors.InvalidArgumentError, match="two labels have one id"):
        private(tf.constant([0, 1]), ids=tf.constant([7, 7]))
    with pytest.raises(tf.errors.InvalidArgumentError, match="two labels have one id"):
        private(tf.constant([[0, 1], [2, 2]]), ids=tf.constant([["a", "b"], ["a", "b"]]))
    assert private(tf.constant([[2, 1], [2, 0]]), ids=tf.constant([[7, 8], [7, 9]])).shape == (2, 2)
    assert private(tf.zeros([0], tf.int32), ids=tf.zeros([0], tf.int32)).shape == (0,)
