"""`poisson_batches` draws what the accountant assumes, in a form that `fit` takes; and the loaders."""

import collections
import itertools

import dp_accounting
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

from tfdpfl import _process
from tfdpfl.data import (
    SamplingDeclaration,
    b_min_sep,
    bound_owners,
    cyclic_poisson,
    declared_sampling,
    fixed_order,
    poisson_batches,
    random_allocation,
    shuffled_batches,
)
from tfdpfl.data.draws import Words
from tfdpfl.data.sources import examples_of
from tfdpfl.data.users import users_of
from tfdpfl.errors import PrivacyError


def inclusion_matrix(batches, num_examples):
    """[steps, num_examples] of 0 and 1, from batches of example numbers."""
    rows = [np.bincount(batch, minlength=num_examples) for batch in batches]
    assert max(row.max() for row in rows) <= 1, "an example was drawn twice in one batch"
    return np.array(rows, float)


def z_scores(included, rate):
    """Two-sided statistics, each about N(0, 1) under Poisson sampling at `rate`."""
    steps, n = included.shape
    variance = rate * (1 - rate)
    by_example = (included.sum(0) - steps * rate) / np.sqrt(steps * variance)
    sizes = included.sum(1)
    size_variance = np.mean((sizes - n * rate) ** 2) / (n * variance)
    centred = included - rate
    return {
        "inclusion of all": (included.sum() - steps * n * rate) / np.sqrt(steps * n * variance),
        "inclusion of each": (np.sum(by_example**2) - n) / np.sqrt(2 * n),
        "size variance": (size_variance - 1) / np.sqrt(2 / steps),
        "next batch": np.mean(centred[1:] * centred[:-1]) / variance * np.sqrt((steps - 1) * n),
    }


@pytest.fixture(scope="module")
def included():
    n, rate, steps = 50, 0.2, 2500
    dataset = poisson_batches(np.arange(n), rate, steps, seed=7)
    return inclusion_matrix(dataset.as_numpy_iterator(), n), rate


@pytest.mark.slow
def test_each_example_is_drawn_with_the_rate_independently_of_others_and_of_other_batches(included):
    matrix, rate = included
    assert {name: z for name, z in z_scores(matrix, rate).items() if abs(z) > 4} == {}


@pytest.mark.one_stack
def test_pairs_of_examples_are_drawn_independently(included):
    matrix, rate = included
    steps, n = matrix.shape
    together = (matrix.T @ matrix / steps)[np.triu_indices(n, 1)]
    z = (together - rate**2) / np.sqrt(rate**2 * (1 - rate**2) / steps)
    assert np.abs(z).max() < 5


@pytest.mark.parametrize(
    ("sampler", "statistic"),
    [
        (lambda rng, n, k: rng.choice(n, k, replace=False), "size variance"),
        (lambda rng, n, k: np.flatnonzero(rng.random(n) < 1.1 * k / n), "inclusion of all"),
        (
            lambda rng, n, k: np.flatnonzero(rng.random(n) < np.linspace(0.5, 1.5, n) * k / n),
            "inclusion of each",
        ),
    ],
)
def test_the_statistics_reject_other_samplings(sampler, statistic):
    rng = np.random.default_rng(0)
    matrix = inclusion_matrix([sampler(rng, 50, 10) for _ in range(2500)], 50)
    assert abs(z_scores(matrix, 0.2)[statistic]) > 8


def test_the_statistics_reject_shuffled_epochs():
    rng = np.random.default_rng(0)
    matrix = inclusion_matrix([b for _ in range(500) for b in rng.permutation(50).reshape(5, 10)], 50)
    assert abs(z_scores(matrix, 0.2)["next batch"]) > 8


def drawn(dataset):
    return [tuple(batch) for batch in dataset.as_numpy_iterator()]


def test_every_pass_draws_new_batches():
    dataset = poisson_batches(np.arange(200), 0.5, 4, seed=1)
    first, second = drawn(dataset), drawn(dataset)
    assert len(set(first + second)) == 8


def test_a_seed_reproduces_the_passes_even_after_one_left_early():
    one, other = (poisson_batches(np.arange(200), 0.5, 4, seed=1) for _ in range(2))
    expected = [drawn(one), drawn(one)]
    next(iter(other))
    assert drawn(other) == expected[1]


def test_without_a_seed_two_calls_differ():
    one, other = (drawn(poisson_batches(np.arange(200), 0.5, 3)) for _ in range(2))
    assert set(one).isdisjoint(other)


Pair = collections.namedtuple("Pair", "x y")
N = 20
ROWS = np.arange(N)


@pytest.mark.parametrize(
    ("data", "spec"),
    [
        (ROWS, tf.TensorSpec([None], tf.int64)),
        ((ROWS, ROWS), (tf.TensorSpec([None], tf.int64),) * 2),
        ((ROWS, list(range(N)), None), (tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64))),
        (
            ({"a": np.ones((N, 2)), "b": tf.ones([N, 3], tf.float16)}, (ROWS, ROWS), np.ones(N, np.float32)),
            (
                {"a": tf.TensorSpec([None, 2], tf.float32), "b": tf.TensorSpec([None, 3], tf.float16)},
                (tf.TensorSpec([None], tf.int64),) * 2,
                tf.TensorSpec([None], tf.float32),
            ),
        ),
        (([ROWS, ROWS], ROWS), ((tf.TensorSpec([None], tf.int64),) * 2, tf.TensorSpec([None], tf.int64))),
        ((np.array(["a"] * N), ROWS), (tf.TensorSpec([None], tf.string), tf.TensorSpec([None], tf.int64))),
        (Pair(ROWS, ROWS), Pair(tf.TensorSpec([None], tf.int64), tf.TensorSpec([None], tf.int64))),
    ],
    ids=["array", "pair", "list and None", "dict, tuple, weights", "list of inputs", "strings", "namedtuple"],
)
def test_the_structure_is_kept_and_the_batch_dimension_is_open(data, spec):
    dataset = poisson_batches(data, 0.5, 3)
    assert isinstance(dataset, tf.data.Dataset)
    assert dataset.element_spec == spec
    assert int(dataset.cardinality()) == len(list(dataset)) == 3


def test_the_parts_of_an_example_stay_together():
    x = np.arange(N * 6, dtype=np.float32).reshape(N, 3, 2)
    for batch in poisson_batches(({"x": x}, ROWS), 0.5, 10).as_numpy_iterator():
        np.testing.assert_array_equal(batch[0]["x"], x[batch[1]])


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


def test_the_sampling_is_declared_by_the_dataset_itself_only():
    dataset = poisson_batches(ROWS, expected_batch_size=5, steps=3)
    assert declared_sampling(dataset) == SamplingDeclaration("poisson", 0.25, N, 3)
    assert declared_sampling(dataset).expected_batch_size == 5
    assert declared_sampling(dataset.map(lambda row: row)) is None
    assert declared_sampling(ROWS) is None


def test_a_rate_of_one_takes_everything():
    (batch,) = poisson_batches(ROWS, 1, 1).as_numpy_iterator()
    np.testing.assert_array_equal(np.sort(batch), ROWS)


def test_empty_draws_are_batches_of_size_zero():
    x, y = np.ones((N, 3)), ROWS
    sizes = [len(batch_y) for batch_x, batch_y in poisson_batches((x, y), 1e-3, 20, seed=0)]
    assert 0 in sizes
    assert next(iter(poisson_batches((x, y), 1e-9, 1)))[0].shape == (0, 3)


def counting_model(layers):
    """A model that counts how often its training step is traced."""

    class Counting(tf.keras.Sequential):
        traces = 0

        def train_step(self, data):
            type(self).traces += 1
            return super().train_step(data)

    return Counting(layers)


def fit(model, dataset, epochs=2):
    model.compile("sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    history = model.fit(dataset, epochs=epochs, verbose=0)
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    return history


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mean_size"), [
    ("dense", 0.7), ("embedding", 0.7), pytest.param("dense", 5, marks=pytest.mark.one_stack)])  # fmt: skip
def test_fit_takes_empty_batches_and_batches_of_any_size_in_one_trace(kind, mean_size):
    layers = tf.keras.layers
    if kind == "dense":
        x, first = np.ones((N, 3), np.float32), [layers.Dense(4, activation="relu")]
    else:
        x, first = np.ones((N, 5), np.int32), [layers.Embedding(7, 4), layers.GlobalAveragePooling1D()]
    dataset = poisson_batches((x, ROWS % 2), expected_batch_size=mean_size, steps=15, seed=3)
    sizes = [len(y) for _, y in dataset]
    assert len(set(sizes)) > 2 and (0 in sizes) == (mean_size < 1)
    model = counting_model([*first, layers.Dense(2)])
    fit(model, dataset)
    assert model.traces == traces_with_one_batch_size([*first, layers.Dense(2)], (x, ROWS % 2))


def traces_with_one_batch_size(layers, data):
    """Keras 3 traces the step twice: the first trace makes the optimizer's variables."""
    model = counting_model([type(layer).from_config(layer.get_config()) for layer in layers])
    fit(model, tf.data.Dataset.from_tensor_slices(data).batch(5, drop_remainder=True))
    return model.traces


def convolutional(strides=1):
    layers = tf.keras.layers
    return [
        layers.Conv2D(4, 3, activation="relu"),
        layers.MaxPool2D(2, 1),
        layers.Conv2D(3, 1, strides=strides),
        layers.Flatten(),
        layers.Dense(2),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.one_stack), True])
def test_images_with_empty_draws_fit_in_one_trace_and_the_stand_in_moves_no_weight(weighted):
    x = np.random.default_rng(0).random((N, 9, 9, 1), np.float32)
    data = (x, ROWS % 2, np.full(N, 2.0)) if weighted else (x, ROWS % 2)
    model = counting_model(convolutional())
    fit(model, poisson_batches(data, expected_batch_size=1, steps=10, seed=0))
    assert model.traces == traces_with_one_batch_size(convolutional(), data)
    # On one example, which may be drawn above, TensorFlow's strided 1x1 convolution writes where it must not.
    model = counting_model(convolutional(strides=2))
    model(x[:2])
    before = model.get_weights()
    empty = poisson_batches(data, 1e-12, 3)
    assert all(not weight.numpy().any() for _, _, weight in empty)
    fit(model, empty)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_zero_weight_changes_no_real_batch():
    x = np.random.default_rng(0).random((N, 4, 4, 1), np.float32)
    for batch in poisson_batches((x, ROWS), 0.5, 5, seed=0, empty_batches="zero_weight").as_numpy_iterator():
        np.testing.assert_array_equal(batch[0], x[batch[1]])
        np.testing.assert_array_equal(batch[2], np.ones(len(batch[1])))


def test_images_keep_their_structure_where_empty_draws_do_not_happen():
    x = np.zeros((500, 4, 4, 1), np.float32)
    y = np.arange(500)
    assert len(poisson_batches((x, y), expected_batch_size=100, steps=10).element_spec) == 2
    assert len(poisson_batches((x, y), expected_batch_size=1, steps=10).element_spec) == 3
    assert len(poisson_batches((x, y), expected_batch_size=1, steps=10, empty_batches="keep").element_spec) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling_rate": 0}, r"sampling_rate must be in \(0, 1\], got 0"),
        ({"sampling_rate": 256}, "for a number of examples use expected_batch_size"),
        ({"sampling_rate": float("nan")}, "sampling_rate must be in"),
        ({"sampling_rate": "0.1"}, "sampling_rate must be a number"),
        ({"sampling_rate": None}, "exactly one of sampling_rate and expected_batch_size"),
        ({"expected_batch_size": 5}, "exactly one of sampling_rate and expected_batch_size"),
        (
            {"sampling_rate": None, "expected_batch_size": N + 1},
            r"expected_batch_size must be in \(0, 20\].*got 21",
        ),
        ({"sampling_rate": None, "expected_batch_size": -1}, "expected_batch_size must be in"),
        ({"steps": None}, "steps must be .* got None"),
        ({"steps": 0}, "steps must be .* got 0"),
        ({"steps": 2.5}, "steps must be .* got 2.5"),
        ({"steps": True}, "steps must be .* got True"),
        ({"empty_batches": "skip"}, "empty_batches must be one of"),
        ({"empty_batches": "zero_weight"}, r"needs data of the form \(x, y\)"),
        ({"arrays_or_dataset": (ROWS, ROWS[1:])}, r"same first dimension, got \[20, 19\]"),
        ({"arrays_or_dataset": np.zeros((0, 3))}, "at least one example"),
        ({"arrays_or_dataset": 3.0}, "got the scalar 3.0"),
        ({"arrays_or_dataset": ()}, "at least one array"),
        ({"arrays_or_dataset": {}}, "at least one array"),
        ({"arrays_or_dataset": {"x": None}}, "None where an array is expected"),
        ({"arrays_or_dataset": tf.ragged.constant([[1], [1, 2]])}, "dense arrays, got a RaggedTensor"),
        ({"arrays_or_dataset": [[1], [1, 2]]}, "rectangular arrays"),
        ({"arrays_or_dataset": tf.data.Dataset.random(seed=1)}, "must be finite.*take"),
        ({"arrays_or_dataset": tf.data.Dataset.range(9).repeat()}, "repeats its examples, and each of them is drawn"),
        ({"arrays_or_dataset": tf.data.Dataset.range(9).repeat(2).shuffle(9).map(abs)}, "repeats its examples"),
        ({"arrays_or_dataset": tf.data.Dataset.range(9).repeat().take(18)}, "repeats its examples"),
        ({"arrays_or_dataset": tf.compat.v1.data.Dataset.range(9).repeat(2)}, "repeats its examples"),
        ({"arrays_or_dataset": tf.data.Dataset.range(9).batch(2)}, r"single examples.*unbatch\(\)"),
        ({"arrays_or_dataset": tf.data.Dataset.range(9).take(0)}, "at least one example"),
        (
            {"arrays_or_dataset": tf.data.Dataset.range(3).map(lambda i: (i, tf.ones([i])))},
            "must all have one shape",
        ),
    ],
)
def test_bad_input_is_refused_in_one_sentence(changes, message):
    arguments = {"arrays_or_dataset": ROWS, "sampling_rate": 0.5, "steps": 3, **changes}
    with pytest.raises(ValueError, match=message):
        poisson_batches(**arguments)


# -- the draws ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "rate"), [(40, 0.9), (2000, 0.002), (7, 0.5), (10**12, 1e-11)])
def test_coins_are_fair_at_every_rate(number, rate):
    words, runs = Words(11), 3000
    draws = [words.each(number, rate) for _ in range(runs)]
    assert all((np.diff(d) > 0).all() and (not len(d) or (d[0] >= 0 and d[-1] < number)) for d in draws)
    sizes = np.array([len(d) for d in draws])
    mean, variance = number * rate, number * rate * (1 - rate)
    assert abs(sizes.mean() - mean) < 5 * np.sqrt(variance / runs)
    assert abs(sizes.var() / variance - 1) < 5 * np.sqrt((2 + 1 / variance) / runs)
    places = np.concatenate(draws)  # spread evenly: the first, the last and all between
    assert abs(places.mean() / ((number - 1) / 2) - 1) < 5 * np.sqrt(1 / 3 / len(places)) + 1e-9
    if number < 100:
        counts = np.bincount(places, minlength=number)
        assert (np.abs(counts - runs * rate) < 5 * np.sqrt(runs * rate * (1 - rate))).all()


def test_draws_come_from_the_generator_of_noise_and_a_forked_process_has_its_own():
    from tfdpfl.noise.source import KeyStream, new_key

    assert (Words(5)(3) == KeyStream(new_key(5)).words(np.empty(3, np.uint64))).all()
    words = Words()
    words(1)
    parents = words._stream
    _process._renew()
    words(1)
    assert words._stream is not parents
    assert len(np.unique(Words(1)(200_000))) == 200_000  # more than one call of the generator fills


def test_subsets_and_orders_are_uniform():
    words = Words(2)
    counts = np.zeros((5, 5))
    for _ in range(4000):
        counts[np.arange(5), words.order(5)] += 1
    assert (np.abs(counts / 4000 - 0.2) < 5 * np.sqrt(0.16 / 4000)).all()
    pairs = collections.Counter(tuple(words.some(np.array([3, 5, 8, 9]), 2)) for _ in range(3000))
    assert len(pairs) == 6 and all(abs(n / 3000 - 1 / 6) < 5 * np.sqrt(5 / 36 / 3000) for n in pairs.values())


def test_a_batch_is_drawn_once_and_cut_into_physical_ones():
    whole = [set(b) for b in drawn(poisson_batches(ROWS, 0.5, 6, seed=3))]
    dataset = poisson_batches(ROWS, 0.5, 6, seed=3, physical_batch_size=3)
    declared = declared_sampling(dataset)
    assert (declared.physical_batches, declared.steps, len(dataset)) == (4, 6, 24)  # ceil(10 / 3)
    parts = drawn(dataset)
    for step, logical in enumerate(whole):
        of_step = parts[4 * step : 4 * step + 4]
        assert sorted(i for part in of_step for i in part) == sorted(logical)  # each once: one update holds it once
        assert {len(part) for part in of_step} <= {len(logical) // 4, -(-len(logical) // 4)}
    assert declared_sampling(poisson_batches(ROWS, 0.5, 6, physical_batch_size=99)).physical_batches == 1


needs_truncation = pytest.mark.skipif(
    not hasattr(dp_accounting, "TruncatedSubsampledGaussianDpEvent"), reason="needs dp-accounting 0.6"
)


@needs_truncation
@pytest.mark.parametrize("parts", [1, 2])
def test_truncated_batches_have_one_shape_and_the_rest_weighs_nothing(parts):
    x = 1.0 + ROWS[:, None].repeat(2, 1)
    dataset = poisson_batches((x, ROWS), 0.5, 400, seed=0, truncated_batch_size=11, physical_batch_size=10 // parts)
    rows = -(-11 // parts)
    assert [tuple(s.shape) for s in dataset.element_spec] == [(rows, 2), (rows,), (rows,)]
    assert declared_sampling(dataset).truncated_batch_size == 11
    taken = np.zeros(N)
    batches = list(dataset.as_numpy_iterator())
    sizes = []
    for at in range(0, len(batches), parts):
        real = np.concatenate([y[w > 0] for _, y, w in batches[at : at + parts]])
        sizes.append(len(real))
        np.add.at(taken, real, 1)
        assert len(set(real)) == len(real) <= 11
        for bx, by, w in batches[at : at + parts]:
            assert set(w) <= {0.0, 1.0} and not bx[w == 0].any() and not by[w == 0].any()
            np.testing.assert_array_equal(bx[w > 0], x[by[w > 0]])
    from scipy.stats import binom

    expected = binom.expect(lambda n: np.minimum(n, 11), (N, 0.5))
    assert abs(np.mean(sizes) - expected) < 5 * np.std(sizes) / 20 and max(sizes) == 11 > min(sizes)
    # Whoever is cut off is drawn at random: the first examples stay no more often than the last.
    share = taken / 400
    assert (np.abs(share - expected / N) < 5 * np.sqrt(0.25 / 400)).all()


# -- data that are read as they are needed -----------------------------------------------------------------------


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


@pytest.mark.parametrize("as_mapping", [False, True])
def test_users_are_sampled_and_come_with_so_many_rows_one_after_the_other(as_mapping):
    ids = np.array([0] * 5 + [1] * 2 + [2] + [3] * 12)
    given = {u: np.flatnonzero(ids == u) for u in range(4)} if as_mapping else ids.astype(str)
    dataset = poisson_batches(ROWS, 0.5, 600, seed=2, user_ids=given, examples_per_user=4)
    assert declared_sampling(dataset) == SamplingDeclaration("poisson", 0.5, 4, 600, 2, rows_per_unit=4, unit="user")
    counts, seen = np.zeros(4), collections.Counter()
    for batch in dataset.as_numpy_iterator():
        units = batch.reshape(-1, 4)
        users = ids[units]
        assert (users == users[:, :1]).all() and len(set(users[:, 0])) == len(units)
        np.add.at(counts, users[:, 0], 1)
        seen.update(batch.tolist())
        for unit, user in zip(units, users[:, 0], strict=True):
            assert len(set(unit)) == min(4, (ids == user).sum())  # as many different ones as there are
    assert (np.abs(counts / 600 - 0.5) < 5 * np.sqrt(0.25 / 600)).all()
    for user in range(4):  # each of a user's examples as often as the others
        often = np.array([seen[i] for i in np.flatnonzero(ids == user)]) / counts[user]
        assert (np.abs(often - often.mean()) < 5 * np.sqrt(1 / counts[user])).all()


@pytest.mark.parametrize(
    "ids",
    [
        np.array([12, "12", 12.0, 13.0, 13, 13], dtype=object),  # as pandas makes of chunks of mixed types
        np.array(["12", "12.0", " 12", "13", "+13", "1.3e1"]),
        np.array([b"12", "12", 12, 13, b"13", np.float32(13)], dtype=object),
        {12: [0], "12": [1, 2], 13: [3], "13.0": [5, 4]},
        [12, 12, 12, 13, 13, 13],
    ],
)
def test_ids_of_one_value_are_one_user(ids):
    users = users_of(ids, 6)
    rows = [users.rows[a:b].tolist() for a, b in itertools.pairwise(users.starts)]
    assert sorted(map(sorted, rows)) == [[0, 1, 2], [3, 4, 5]]


def test_examples_of_several_owners_are_chosen_so_that_each_owner_is_in_one_user():
    owners = [["a", "b"], ["b"], {"c", "d"}, ("d", "c", "c"), "e", 7, np.array([7.0]), ["7", "a"], ["a", "f", "g"], "b"]
    users = bound_owners(owners)
    rows = [users.rows[a:b].tolist() for a, b in itertools.pairwise(users.starts)]
    assert rows == [[1, 9], [4], [5, 6], [2, 3], [8]]  # 0 shares b with 1, and 7 shares 7 with 5
    one_each = bound_owners(np.array([3, 1, 3, 2]))
    assert [one_each.rows[a:b].tolist() for a, b in itertools.pairwise(one_each.starts)] == [[0, 2], [1], [3]]
    for wrong, message in (
        ([["a"], []], "no owner for example 1"), ([["a"], ["b", None]], "no owner for example 1"),
        ([np.nan], "no owner for example 0"), ({"a": [0]}, "owners is a mapping"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            bound_owners(wrong)
    with pytest.raises(ValueError, match="for 10 examples, and the data have 20"):
        poisson_batches(ROWS, 0.5, 1, user_ids=users, examples_per_user=1)


def test_a_table_of_numbers_and_truth_values_holds_floats_and_other_columns_are_named():
    table = pd.DataFrame({"age": [61.0, np.nan], "smokes": [True, False], "visits": pd.array([1, None], "Int64")})
    rows = examples_of(table).take(np.array([1, 0]))
    assert rows.dtype == tf.float32 and np.array_equal(rows, [[np.nan, 0, np.nan], [61, 1, 1]], equal_nan=True)
    assert examples_of(pd.DataFrame({"a": ["x"], "b": ["y"]})).spec.dtype == tf.string
    with pytest.raises(ValueError, match=r"columns 'city', 'ward' .* not hold numbers.*\['city'\] == 'Bern'"):
        examples_of(table.assign(city=["Bern", "Genf"], ward=["A", "B"]))


def order_of(data):
    return declared_sampling(fixed_order(data, 10)).order


def test_any_two_examples_that_change_places_make_another_order(tmp_path):
    """Of data on disk nothing says so: each data set of them has an order of its own."""
    x, rng = np.arange(10_000, dtype="float32"), np.random.default_rng(0)
    orders = {order_of((x, x))}
    for _ in range(9):
        i, j = rng.choice(len(x), 2, replace=False)
        x[[i, j]] = x[[j, i]]
        orders.add(order_of((x, x)))
    assert len(orders) == 10 and order_of((x.copy(), x)) in orders
    np.save(tmp_path / "x.npy", x)
    on_disk = np.load(tmp_path / "x.npy", mmap_mode="r")
    assert order_of(on_disk) != order_of(on_disk)


def test_ids_of_different_values_are_different_users():
    ids = ["12", "21", "a", "A", "1_2", "12345678901234567890", "12345678901234567891", "nan", "infinity", "", "1e400"]
    assert users_of(np.array(ids), len(ids)).number == len(ids)
    assert users_of(np.array(ids, dtype=object), len(ids)).number == len(ids)


def test_other_orders_hold_each_example_once_a_pass():
    dataset = fixed_order((ROWS, ROWS), 8, max_participations=3)
    assert declared_sampling(dataset) == SamplingDeclaration(
        "fixed_order", 0.4, N, 3, min_separation=3, max_participations=3
    )
    for _ in range(2):
        assert [y.tolist() for _, y in dataset.as_numpy_iterator()] == [[*range(8)], [*range(8, 16)], [*range(16, 20)]]
    dataset = shuffled_batches(ROWS, 8)
    one, other = drawn(dataset), drawn(dataset)
    assert sorted(sum(one, ())) == sorted(sum(other, ())) == list(ROWS) and one != other
    assert declared_sampling(dataset).kind == "shuffle" and [len(b) for b in one] == [8, 8, 4]


def test_cyclic_sampling_keeps_participations_apart_and_assigns_each_example_independently():
    dataset = cyclic_poisson(np.arange(400), 9, groups=3, expected_batch_size=60)
    declared = declared_sampling(dataset)
    assert (declared.kind, declared.sampling_rate, declared.min_separation) == ("cyclic_poisson", 0.45, 3)
    assert declared.expected_batch_size == pytest.approx(60)
    for _ in range(2):
        batches = [set(b) for b in drawn(dataset)]
        for a in range(9):
            for b in range(a + 1, 9):
                assert bool(batches[a] & batches[b]) == ((b - a) % 3 == 0)
    # An equal split would tell of one example more: sizes of groups vary as those of independent draws do.
    groups = lambda seed: drawn(cyclic_poisson(np.arange(4000), 2, seed, groups=2, expected_batch_size=2000))
    sizes = np.array([len(groups(seed)[0]) for seed in range(6)])
    assert (np.abs(sizes - 2000) < 6 * np.sqrt(1000)).all() and np.abs(sizes - 2000).max() > 3


def test_examples_rest_after_each_use_and_every_step_has_the_same_mean_size():
    n, steps, size, rate = 4000, 12, 600, 600 / 2800  # of 4000, 1200 rest
    dataset = b_min_sep(np.arange(n), steps, 1, min_separation=3, expected_batch_size=size)
    declared = declared_sampling(dataset)
    assert (declared.kind, declared.sampling_rate, declared.min_separation) == ("b_min_sep", pytest.approx(rate), 3)
    assert declared.expected_batch_size == pytest.approx(size)
    used = inclusion_matrix(drawn(dataset), n)
    assert (np.abs(used.sum(1) - size) < 6 * np.sqrt(size * (1 - size / n))).all()
    assert not (used[1:] * used[:-1]).any() and not (used[2:] * used[:-2]).any()
    for later, chance in ((3, rate), (4, rate * (1 - rate))):  # from a use to the next one that may be
        pairs = (used[later:] * used[:-later]).sum(1)
        assert (np.abs(pairs - size * chance) < 6 * np.sqrt(size * chance)).all()
    assert drawn(dataset) != drawn(dataset)


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
