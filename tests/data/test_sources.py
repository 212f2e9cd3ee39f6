"""Sources: arrays in memory and on disk, data sets, and what gives one example at a time."""

import dp_accounting
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tfdpfl.data import (
    b_min_sep,
    cyclic_poisson,
    declared_sampling,
    fixed_order,
    poisson_batches,
    random_allocation,
)
from tfdpfl.data.sources import examples_of
from tfdpfl.errors import PrivacyError

N = 20
ROWS = np.arange(N)


@pytest.mark.parametrize(
    "source",
    [
        tf.data.Dataset.from_tensor_slices((ROWS[:, None] * 2.0, ROWS)),
        tf.data.Dataset.from_tensor_slices((ROWS[:, None] * 2.0, ROWS)).filter(lambda x, y: True),
        tf.data.Dataset.from_tensor_slices((ROWS[:, None] * 2.0, ROWS)).batch(7).unbatch(),
    ],
    ids=["known size", "unknown size", "unbatched"],
)
def test_a_dataset_of_examples_is_sampled_like_arrays(source):
    dataset = poisson_batches(source, expected_batch_size=10, steps=30, seed=0)
    assert declared_sampling(dataset).num_examples == N
    batches = list(dataset.as_numpy_iterator())
    assert all((x[:, 0] == 2 * y).all() for x, y in batches)
    assert len({len(y) for _, y in batches}) > 3


def test_arrays_that_change_afterwards_leave_the_batches_as_they_were():
    """Else an order that was declared could be broken in place; memory that is aligned may be taken as it is."""
    memory = np.zeros(1000 * 4 + 16, np.float32)
    x = memory[-memory.ctypes.data // 4 % 16 :][:4000].reshape(1000, 4)
    batches = fixed_order(x, 10)
    x[:] = 7
    assert all((batch == 0).all() for batch in batches.as_numpy_iterator())


class Rows:
    """Gives single examples by number, as sources of grain and Hugging Face do."""

    def __init__(self, example, number=N):
        self.example, self.number = example, number

    def __len__(self):
        return self.number

    def __getitem__(self, i):
        return self.example(i)


def on_disk(kind, tmp_path):
    x = np.random.default_rng(0).normal(size=(N, 3))
    if kind == "memmap":
        np.save(tmp_path / "x.npy", np.concatenate([x[:2], x]))
        return x, (np.load(tmp_path / "x.npy", mmap_mode="r")[2:], ROWS)
    if kind == "h5py":
        file = pytest.importorskip("h5py").File(tmp_path / "x.h5", "w")
        file["x"], file["y"] = x, ROWS
        return x, ({"in": file["x"]}, file["y"])
    return x, Rows(lambda i: (x[i], i, None))


@pytest.mark.parametrize("kind", ["memmap", "h5py", "rows"])
def test_data_on_disk_are_sampled_like_arrays(kind, tmp_path):
    x, source = on_disk(kind, tmp_path)
    same = poisson_batches((x, ROWS), 0.4, 4, seed=6)
    dataset = poisson_batches(source, 0.4, 4, seed=6)
    assert [s.dtype for s in tf.nest.flatten(dataset.element_spec)] == [tf.float32, tf.int64]
    assert declared_sampling(dataset) == declared_sampling(same)
    for got, want in zip(dataset, same, strict=True):
        for a, b in zip(tf.nest.flatten(got), want, strict=True):
            np.testing.assert_array_equal(a, b)
    copied = poisson_batches(source, 0.4, 1, seed=6, copies=2)
    again = poisson_batches((x, ROWS), 0.4, 1, seed=6)
    np.testing.assert_array_equal(next(iter(copied))[1], np.repeat(next(iter(again))[1], 2))


@pytest.mark.parametrize("kind", ["memmap", "rows"])
def test_data_on_disk_are_allocated_like_arrays(kind, tmp_path):
    x, source = on_disk(kind, tmp_path)
    how = {"expected_batch_size": 4, "seed": 6}
    same, dataset = random_allocation((x, ROWS), **how), random_allocation(source, **how)
    assert declared_sampling(dataset) == declared_sampling(same)
    seen = []
    for got, want in zip(dataset, same, strict=True):
        for a, b in zip(tf.nest.flatten(got), want, strict=True):
            np.testing.assert_array_equal(a, b)
        seen += want[1].numpy().tolist()
    assert sorted(seen) == list(range(N))


def test_a_source_that_no_memory_holds_is_sampled():
    read = []
    source = Rows(lambda i: (read.append(i), np.full(1000, i % 7, np.float32), i)[1:], 10**10)
    dataset = poisson_batches(source, expected_batch_size=5, steps=4)
    batches = list(dataset)
    assert all((x == y.numpy()[:, None] % 7).numpy().all() for x, y in batches)
    assert len(read) <= 1 + sum(len(y) for _, y in batches)  # no example is read that no batch holds


def test_a_table_of_numbers_and_truth_values_holds_floats_and_other_columns_are_named():
    table = pd.DataFrame({"age": [61.0, np.nan], "smokes": [True, False], "visits": pd.array([1, None], "Int64")})
    rows = examples_of(table).take(np.array([1, 0]))
    assert rows.dtype == tf.float32 and np.array_equal(rows, [[np.nan, 0, np.nan], [61, 1, 1]], equal_nan=True)
    assert examples_of(pd.DataFrame({"a": ["x"], "b": ["y"]})).spec.dtype == tf.string
    with pytest.raises(ValueError, match=r"columns 'city', 'ward' .* not hold numbers.*\['city'\] == 'Bern'"):
        examples_of(table.assign(city=["Bern", "Genf"], ward=["A", "B"]))


def test_bad_sources_and_settings_are_refused_in_one_sentence():
    batched = getattr(tf.keras.utils, "PyDataset", tf.keras.utils.Sequence)
    rows = lambda i: np.zeros(1 + i % 2)
    later = lambda **how: poisson_batches(ROWS, 0.5, 2, **how)
    for make, kind, message in [
        (lambda: poisson_batches(type("Images", (batched,), {"__len__": len, "__getitem__": rows})(), 0.5, 2),
         ValueError, "Images gives whole batches"),
        (lambda: poisson_batches(iter([1, 2]), 0.5, 2), ValueError, "in its own order"),
        (lambda: poisson_batches(Rows(rows, 0), 0.5, 2), ValueError, "at least one example"),
        (lambda: list(poisson_batches(Rows(rows), 1.0, 1)), Exception, "has the shape .*give all examples one shape"),
        (lambda: list(poisson_batches(Rows(lambda i: {"a": 1} if i < 9 else {"b": 1}), 1.0, 1)), Exception,
         "Example 9 of the source has another structure"),
        (lambda: poisson_batches(ROWS, np.full(N, 0.1), 2), PrivacyError, "weighted or class-balanced"),
        (lambda: later(physical_batch_size=0), ValueError, "physical_batch_size must be"),
        (lambda: later(copies=0), ValueError, "copies must be"),
        (lambda: later(map_fn=3), ValueError, "map_fn=3 must be a function"),
        (lambda: later(truncated_batch_size=0), ValueError, "truncated_batch_size must be"),
        (lambda: later(user_ids=ROWS), ValueError, "user_ids needs examples_per_user"),
        (lambda: later(examples_per_user=2), ValueError, "examples_per_user=2 needs user_ids"),
        (lambda: later(user_ids=ROWS[1:], examples_per_user=2), ValueError, "one id for each of the 20 examples"),
        (lambda: later(user_ids=np.where(ROWS == 4, np.nan, 1.0), examples_per_user=2), ValueError,
         "no user for 1 examples, the first at 4"),
        (lambda: later(user_ids={"a": ROWS, "b": []}, examples_per_user=2), ValueError, "without examples, 'b'"),
        (lambda: later(user_ids={"a": ROWS, "b": [3]}, examples_per_user=2), ValueError, "names 21 examples"),
        (lambda: fixed_order(ROWS, 21), ValueError, "batch_size=21 is more than the 20"),
        (lambda: b_min_sep(ROWS, 7, min_separation=3, expected_batch_size=7), ValueError, "is more than 6"),
        (lambda: cyclic_poisson(ROWS, 7, groups=3, expected_batch_size=2), ValueError, "steps=7 is not a multiple.* 6"),
        (lambda: cyclic_poisson(ROWS, 6, groups=3, expected_batch_size=7), ValueError, "mean size of a group, got 7"),
    ]:  # fmt: skip
        with pytest.raises(kind, match=message):
            make()
    if hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent"):
        with pytest.raises(ValueError, match=r"needs data of the form \(x, y\)"):
            later(truncated_batch_size=5)
    else:
        with pytest.raises(PrivacyError, match=r"dp-accounting 0\.6"):
            later(truncated_batch_size=5)


def test_examples_are_decoded_and_augmented_one_at_a_time_and_copies_apart():
    texts = Rows(lambda i: (b"ab\x00" * (i + 1), i))  # files may end in zeros
    decode = lambda text, i: (tf.cast(tf.fill([4, 4, 1], tf.strings.length(text)), tf.float32), i)
    augment = lambda image, i: (image + tf.random.uniform([]), i)
    dataset = poisson_batches(texts, 0.5, 20, seed=1, map_fn=decode, augment=augment, copies=3)
    assert declared_sampling(dataset).rows_per_unit == 3
    assert [tuple(s.shape) for s in dataset.element_spec[:2]] == [(None, 4, 4, 1), (None,)]
    for image, i, *_ in dataset.as_numpy_iterator():
        assert len(i) and (i.reshape(-1, 3) == i[::3, None]).all()
        shift = image[:, 0, 0, 0] - 3 * (i + 1)
        assert (shift >= 0).all() and (shift < 1).all() and len(set(shift.tolist())) > len(i) / 2
    (empty,) = poisson_batches(texts, 1e-12, 1, map_fn=decode, copies=3).as_numpy_iterator()
    assert empty[0].shape == (3, 4, 4, 1) and not empty[2].any()  # whole units of nothing
