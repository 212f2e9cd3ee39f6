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


@settings(max_examples=40)
@given(n=st.integers(2, 80), data=st.data())
def test_a_partition_gives_every_row_to_one_client_and_no_client_nothing(n, data):
    k, seed = data.draw(st.integers(1, n)), data.draw(st.none() | st.integers(0, 99))
    parts = fd.partition_iid(n, k, seed)
    assert len(parts) == k and all(len(part) for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(n))
    if seed is not None:
        assert all(np.array_equal(a, b) for a, b in zip(parts, fd.partition_iid(n, k, seed), strict=True))


def test_iid_is_even_and_mixed():
    parts = fd.partition_iid(1003, 10, seed=0)
    assert {len(part) for part in parts} == {100, 101}
    assert abs(np.mean(parts[0]) - 501) < 4 * 1003 / np.sqrt(12 * 100)


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
    ],
)
def test_bad_input_is_named_with_its_mend(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_an_unknown_client_is_named():
    with pytest.raises(KeyError, match="no client 'z'"):
        fd.from_arrays(X, IDS)["z"]


def test_copies_of_a_clients_examples_are_refused():
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices((X, Y))
    copied = rows.flat_map(lambda *row: tf.data.Dataset.from_tensors(row).repeat(3))
    assert fd.once("a", rows.batch(4))[1] == 12
    with pytest.raises(ValueError, match=r"FlatMapDataset makes copies.* each row of a batch is protected by itself"):
        fd.once("a", copied.batch(4))
