"""The data sets for `fit` draw what the accountant assumes."""

import collections

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

from tfdpfl.data import (
    SamplingDeclaration,
    b_min_sep,
    cyclic_poisson,
    declared_sampling,
    fixed_order,
    poisson_batches,
    shuffled_batches,
)


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


@pytest.mark.slow
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


def order_of(data):
    return declared_sampling(fixed_order(data, 10)).order


@pytest.mark.slow
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


@pytest.mark.slow
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
