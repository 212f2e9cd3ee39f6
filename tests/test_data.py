"""`poisson_batches` draws what the accountant assumes, in a form that `fit` takes; and the loaders."""

import collections
import gzip
import os

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl import datasets
from tfdpfl.data import SamplingDeclaration, declared_sampling, poisson_batches

DATA_DIR = os.environ.get("TFDPFL_DATA_DIR")


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
    model.compile(
        "sgd", tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    history = model.fit(dataset, epochs=epochs, verbose=0)
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    return history


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "embedding"])
@pytest.mark.parametrize("mean_size", [0.7, 5])
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
@pytest.mark.parametrize("weighted", [False, True])
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
    assert (
        len(poisson_batches((x, y), expected_batch_size=1, steps=10, empty_batches="keep").element_spec) == 2
    )


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
        ({"arrays_or_dataset": tf.data.Dataset.range(9).repeat()}, "must be finite.*take"),
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


def test_digits_are_the_same_split_every_time():
    data, again = datasets.load_digits(), datasets.load_digits()
    assert (data.name, data.num_classes) == ("digits", 10)
    assert data.x_train.shape == (1437, 8, 8, 1) and data.x_test.shape == (360, 8, 8, 1)
    assert data.x_train.dtype == np.float32 and data.x_train.min() == 0 and data.x_train.max() == 1
    assert set(data.y_train) == set(data.y_test) == set(range(10))
    np.testing.assert_array_equal(data.x_train, again.x_train)


def test_without_folder_and_network_the_digits_stand_in_and_one_line_says_so(monkeypatch, capsys):
    def no_network():
        raise Exception("URL fetch failure\nat length")

    monkeypatch.delenv(datasets.DATA_DIR_VARIABLE, raising=False)
    monkeypatch.setattr(tf.keras.datasets.mnist, "load_data", no_network)
    assert datasets.load_image_data().name == "digits"
    assert capsys.readouterr().err.count("\n") == 1


def test_a_missing_or_broken_file_is_named(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte\.gz is neither in"):
        datasets.load_image_data(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(ValueError, match="not an idx file"):
        datasets.load_mnist(tmp_path)
    monkeypatch.delenv(datasets.DATA_DIR_VARIABLE, raising=False)
    with pytest.raises(FileNotFoundError, match="set TFDPFL_DATA_DIR"):
        datasets.load_adult()


needs_data = pytest.mark.skipif(not DATA_DIR, reason="TFDPFL_DATA_DIR names no folder with the data")


@needs_data
def test_mnist_is_read_from_its_files():
    data = datasets.load_image_data(DATA_DIR)
    assert data.x_train.shape == (60_000, 28, 28, 1) and data.x_test.shape == (10_000, 28, 28, 1)
    assert data.x_train.dtype == np.float32 and data.x_train.max() == 1
    assert list(data.y_train[:5]) == [5, 0, 4, 1, 9]


@needs_data
def test_adult_is_numbers_only():
    x_train, y_train, x_test, y_test = datasets.load_adult(DATA_DIR)
    assert x_train.shape == (32_561, 108) and x_test.shape == (16_281, 108)
    assert np.isfinite(x_train).all() and np.isfinite(x_test).all()
    assert (y_train.sum(), y_test.sum()) == (7841, 3846)
    np.testing.assert_allclose(x_train[:, 0].std(), 1, rtol=1e-4)


@needs_data
def test_every_speaker_of_shakespeare_says_something():
    speakers = datasets.load_shakespeare(DATA_DIR)
    assert len(speakers) > 250 and all(speakers.values())
    assert speakers["First Citizen"].startswith("Before we proceed any further, hear me speak.")
