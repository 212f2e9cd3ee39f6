"""Clients hold exactly the rows that are theirs, and partitions lose and double none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpfl.federated import data as fd

X = np.arange(24, dtype=np.float64).reshape(12, 2)
Y = np.arange(12) % 3
IDS = np.array(list("abcabcabcaaa"))


def rows(dataset):
    return [tuple(np.asarray(part).tolist() for part in element) for element in dataset]


def data_frame(**columns):
    import pandas as pd

    return pd.DataFrame(columns)


def test_arrays_by_client_id():
    clients = fd.from_arrays((X, Y), IDS)
    assert clients.client_ids == ["a", "b", "c"]
    assert clients.num_examples == {"a": 6, "b": 3, "c": 3}
    for client in clients:
        want = [(x.tolist(), y) for x, y, i in zip(X, Y, IDS, strict=True) if i == client]
        assert rows(clients[client]) == want
    assert clients.element_spec[0].dtype == "float32"


def test_a_data_set_first_asked_for_inside_a_graph_outlives_it():
    import tensorflow as tf

    clients = fd.from_arrays((X, Y), IDS).batch(3)
    with tf.Graph().as_default(), tf.Graph().as_default():
        assert clients.element_spec[0].shape.as_list() == [None, 2]
    assert len(list(clients["a"])) == 2
    assert clients["a"] is clients["a"]


def test_ids_become_strings_and_structures_stay():
    clients = fd.from_arrays({"x": X, "z": np.arange(12)}, [7] * 5 + [10] * 7)
    assert clients.num_examples == {"10": 7, "7": 5}
    assert set(next(iter(clients["7"]))) == {"x", "z"}


def test_batches_hold_every_example_once_a_pass():
    clients = fd.from_arrays((X, Y), IDS).batch(4, epochs=2)
    sizes, seen = [], []
    for x, _ in clients["a"]:
        sizes.append(len(x))
        seen += x.numpy()[:, 0].tolist()
    assert sizes == [4, 4, 4]
    assert sorted(seen) == sorted(2 * X[IDS == "a", 0].tolist())
    assert clients.num_examples["a"] == 6


def test_what_is_counted_is_what_is_given_whatever_the_next_pass_would_be():
    import tensorflow as tf

    draws = iter([12, 30])

    def rows():
        yield from range(next(draws))

    source = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec([], tf.int64))
    for batches, drop in ((source.map(lambda v: {"x": v, "y": 2 * v}).batch(5), False),
                          (tf.data.Dataset.range(12).batch(4, drop_remainder=True), True)):  # fmt: skip
        kept, found = fd.once("a", batches)
        assert found == 12 and kept.element_spec == batches.element_spec
        leaves = [tf.nest.flatten(batch)[0].numpy() for batch in kept]
        assert np.concatenate(leaves).tolist() == list(range(12)) and len(leaves[0]) == (4 if drop else 5)
    assert fd.once("a", [(np.zeros([3, 2]), np.zeros(3))])[1] == 3
    with pytest.raises(ValueError, match="client 'a' is infinite"):
        fd.once("a", tf.data.Dataset.random(1).batch(2))


def test_examples_are_counted_after_a_change_as_rows_where_they_are_batches():
    clients = fd.from_partition((np.zeros([40, 3]), np.zeros(40, int)), {"a": range(30), "b": range(30, 40)})
    assert clients.preprocess(lambda d: d.take(7).batch(2)).num_examples == {"a": 7, "b": 7}
    assert clients.batch(4, epochs=3).num_examples == {"a": 30, "b": 10}
    changed = clients.batch(4, epochs=3).preprocess(lambda d: d.map(lambda x, y: (x[:, :1], y)))
    assert changed.num_examples == {"a": 30, "b": 10} and changed.epochs == 3
    # What may be a batch, or not, counts as few: that only raises a price.
    assert clients.preprocess(lambda d: d.batch(5).map(lambda x, y: x)).num_examples == {"a": 6, "b": 2}


def test_unshuffled_batches_keep_the_order_and_preprocess_maps():
    clients = fd.from_arrays((X, Y), IDS).preprocess(lambda d: d.map(lambda x, y: (x + 1, y))).batch(10, shuffle=False)
    (batch,) = list(clients["b"])
    np.testing.assert_array_equal(batch[0], X[IDS == "b"] + 1)


def test_data_frame_is_grouped_by_its_client_column():
    frame = data_frame(site=list("abab"), age=[1, 2, 3, 4], dose=[0.5, 1.5, 2.5, 3.5], sick=[0, 1, 1, 0])
    clients = fd.from_pandas(frame, "site", y="sick")
    assert rows(clients["b"]) == [([2.0, 1.5], 1), ([4.0, 3.5], 0)]
    assert rows(fd.from_pandas(frame, "site", y="sick", x=["dose"])["a"]) == [([0.5], 0), ([2.5], 1)]
    with pytest.raises(ValueError, match="no column 'hospital'"):
        fd.from_pandas(frame, "hospital")
    with pytest.raises(ValueError, match="must hold numbers"):
        fd.from_pandas(data_frame(site=["a"], name=["Ann"]), "site")
    with pytest.raises(ValueError, match="no id for 1 rows, row 1 first"):
        fd.from_pandas(data_frame(site=["a", float("nan")], age=[1, 2]), "site")


def test_tf_data_is_counted_even_where_its_size_is_unknown():
    import tensorflow as tf

    whole = tf.data.Dataset.range(10)
    clients = fd.from_datasets({"even": whole.filter(lambda i: i % 2 == 0), "few": whole.take(3)})
    assert clients.num_examples == {"even": 5, "few": 3}
    assert fd.from_datasets({"few": whole})["few"] is whole
    with pytest.raises(ValueError, match="infinite"):
        fd.from_datasets({"a": whole.repeat()})
    with pytest.raises(ValueError, match="hold no examples"):
        fd.from_datasets({"a": whole.take(0)})


parts_of = {
    "iid": lambda labels, k, seed: fd.partition_iid(len(labels), k, seed),
    "dirichlet": lambda labels, k, seed: fd.partition_dirichlet(labels, k, 0.2, seed),
    "shard": lambda labels, k, seed: fd.partition_by_shard(labels, k, 2, seed),
}


@pytest.mark.parametrize("split", parts_of.values(), ids=parts_of)
@settings(max_examples=40)
@given(labels=st.lists(st.integers(0, 4), min_size=2, max_size=80), data=st.data())
def test_a_partition_gives_every_row_to_one_client_and_no_client_nothing(split, labels, data):
    k = data.draw(st.integers(1, len(labels) // 2))
    seed = data.draw(st.none() | st.integers(0, 99))
    parts = split(labels, k, seed)
    assert len(parts) == k and all(len(part) for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    if seed is not None:
        again = split(labels, k, seed)
        assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_iid_is_even_and_mixed():
    parts = fd.partition_iid(1003, 10, seed=0)
    assert {len(part) for part in parts} == {100, 101}
    assert abs(np.mean(parts[0]) - 501) < 4 * 1003 / np.sqrt(12 * 100)


def test_dirichlet_proportions_have_the_mean_and_spread_of_their_law():
    # A share of Dirichlet(α·1_k) has mean 1/k and variance (k-1) / (k² (kα+1)).
    k, alpha, n = 5, 0.7, 400
    shares = np.array(
        [[len(part) / n for part in fd.partition_dirichlet(np.zeros(n), k, alpha, seed)] for seed in range(600)]
    )
    variance = (k - 1) / (k**2 * (k * alpha + 1))
    assert np.abs(shares.mean(0) - 1 / k).max() < 5 * np.sqrt(variance / 600)
    assert 0.8 < shares.var() / variance < 1.2


def test_dirichlet_is_more_uneven_the_smaller_alpha():
    labels = np.arange(2000) % 10
    classes = {
        alpha: np.mean([len(set(labels[p])) for p in fd.partition_dirichlet(labels, 20, alpha, 0)])
        for alpha in (0.05, 1, 100)
    }
    assert classes[0.05] < 5 < classes[1] < classes[100] == 10


def test_dirichlet_leaves_each_client_its_minimum():
    parts = fd.partition_dirichlet(np.zeros(100), 10, 0.01, seed=0, min_examples=8)
    assert min(map(len, parts)) >= 8 and sum(map(len, parts)) == 100


def test_shards_leave_a_client_few_classes():
    labels = np.repeat(np.arange(10), 100)
    parts = fd.partition_by_shard(labels, 50, 2, seed=0)
    assert {len(part) for part in parts} == {20}
    assert max(len(set(labels[part])) for part in parts) == 2


def test_partitions_make_clients():
    clients = fd.from_partition((X, Y), fd.partition_iid(12, 11, seed=0))
    assert clients.client_ids[0] == "client_00" and clients.client_ids[-1] == "client_10"
    assert sum(clients.num_examples.values()) == 12


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: fd.from_arrays((X, Y[:5]), IDS), "equal lengths"),
        (lambda: fd.from_arrays((X, Y), IDS[:5]), "equal lengths"),
        (lambda: fd.from_arrays(X, [1.0, np.nan] * 6), "no id for 6 rows"),
        (lambda: fd.from_arrays(X, np.array([1, "1"] * 6, object)), "read alike"),
        (lambda: fd.from_arrays(X[:0], []), "at least one client"),
        (lambda: fd.from_arrays(X, IDS[:, None]), "one id for each row"),
        (lambda: fd.from_partition(X, [[0, 1], []]), "hold no examples"),
        (lambda: fd.from_partition(X, [[0, 12]]), "row numbers"),
        (lambda: fd.from_partition(X, [[-1]]), "row numbers"),
        (lambda: fd.from_partition((X, 3), [[1]]), "single value"),
        (lambda: fd.from_arrays(X, IDS).batch(0), "batch_size must"),
        (lambda: fd.from_arrays(X, IDS).batch(2, epochs=0), "epochs must"),
        (lambda: fd.partition_iid(3, 4), "num_clients must be at most 3"),
        (lambda: fd.partition_iid(3, 0), "num_clients must"),
        (lambda: fd.partition_dirichlet(Y, 4, 0), "alpha must"),
        (lambda: fd.partition_dirichlet(Y, 13, 1.0), "at most 12"),
        (lambda: fd.partition_dirichlet(Y[None], 2, 1.0), "labels must"),
        (lambda: fd.partition_by_shard(Y, 7), "at most 6"),
        (lambda: fd.partition_by_shard(Y, 2, 0), "shards_per_client must"),
    ],
)
def test_bad_input_is_named_with_its_mend(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_an_unknown_client_is_named():
    with pytest.raises(KeyError, match="no client 'z'"):
        fd.from_arrays(X, IDS)["z"]
