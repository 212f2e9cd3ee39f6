"""Neighbours: without noise, one example more moves a step's sum by no more than the clip, whatever the model, the
loss, the weights, and what fills up the batch."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from neighbour_cases import (
    CLASSES,
    CLIP,
    MODELS,
    REL,
    WIDTH,
    FromTensorFlow,
    K,
    L,
    Pull,
    Sums,
    Unweighted,
    X,
    Y,
    of_any_size,
    sample_of_all,
    truncation_has_a_price,  # noqa: F401  for all tests here
    whole,
)

from tfdpfl.data import bound_owners, poisson_batches

# Ways in which batches come to `fit`. Those of a known size need batches of one size.


def as_arrays(batches):
    x, y, weights = (np.concatenate(part) for part in zip(*batches, strict=True))
    return {"x": x, "y": y, "sample_weight": weights, "batch_size": len(batches[0][0]), "shuffle": False}


def as_pipeline(batches):
    parts = tuple(np.concatenate(part) for part in zip(*batches, strict=True))
    data = tf.data.Dataset.from_tensor_slices(parts).map(lambda x, y, w: (2 * x / 2, y, w))
    return data.batch(len(batches[0][0]), drop_remainder=True).prefetch(1)


def as_sampled(batches):
    """A truncated pipeline of `poisson_batches` whose one sample holds every example that is not blank."""
    ((x, y, weights),) = batches
    real = ~((weights == 0) & np.signbit(weights))
    return sample_of_all(x[real], y[real], weights[real], truncated_batch_size=len(x))


@pytest.mark.slow
@pytest.mark.both_stacks
def test_all_examples_of_one_owner_move_a_sum_by_no_more_than_the_clip():
    """Also if other owners share some of them: then the neighbour has none of a user, and not a part of one."""
    rng = np.random.default_rng(0)
    owners = [{0, 1}, {1, 0}, {2}, {2}, {2, 3}, {3}, {0, 4}, {5, 6, 7}, {7}, {6, 5, 7}, {8, 9}, {9, 10}]
    users, sums = bound_owners(owners), Sums(MODELS["plain"](), rows_per_unit=4)
    x = rng.normal(0, 30, X.shape).astype("float32")

    def step(owner):  # of the neighbour whose examples of this owner teach nothing
        weights = np.array([float(owner not in each) for each in owners], "float32")
        return whole(x, Y, weights, user_ids=users, examples_per_user=4, seed=0)

    full, *fewer = sums.each([step(None), *map(step, range(11))])
    moved = np.array([np.linalg.norm(full - other) for other in fewer])
    chosen = [1, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0]  # the sets {2}, {3}, {7}, {0, 1} and {8, 9}, one clipped user each
    np.testing.assert_allclose(moved, CLIP * np.array(chosen), rtol=1e-3, atol=1e-6)


# How many pairs of neighbours are drawn in all. Those of one list go through one fit of a model that is traced once for
# batches of any size and once for batches of a known one, so that long lists cost little.
PAIRS, IN_A_LIST, SIZE = 1000 if settings.default.derandomize else 4000, 60, 6
ACTIVITIES = {"none": lambda: None, "l1": lambda: K.regularizers.L1(2.0), "l2": lambda: K.regularizers.L2(10.0)}
LOSSES = {
    "crossentropy": lambda: K.losses.SparseCategoricalCrossentropy(from_logits=True),
    "hinge": lambda: lambda y, p: tf.reduce_sum(tf.nn.relu(1 - tf.one_hot(tf.cast(y[:, 0], tf.int32), CLASSES) * p), 1),
}  # fmt: skip
HIDDEN = {
    "none": lambda: [], "add_loss": lambda: [Pull()], "dropout": lambda: [L.Dropout(0.5)],
    "noise and norm": lambda: [L.GaussianNoise(1.0), L.LayerNormalization()], "tf.random": lambda: [FromTensorFlow()],
}  # fmt: skip
KINDS = {"plain": K.Model, "own train_step": Unweighted}
# (kind, activity regularizer, loss, hidden layers, kernel regularizer, batches of an update, seed of the optimizer)
FEW = [("plain", "none", "crossentropy", "dropout", False, 1, None)]
MORE = [
    ("plain", "l2", "crossentropy", "add_loss", True, 1, None),
    ("plain", "l1", "hinge", "none", False, 2, None),
    ("own train_step", "l2", "crossentropy", "none", False, 1, None),
    ("own train_step", "none", "crossentropy", "dropout", True, 2, 7),
    ("plain", "l2", "hinge", "dropout", True, 1, 7),
    ("plain", "none", "crossentropy", "noise and norm", False, 1, 7),
    ("plain", "none", "hinge", "tf.random", False, 2, None),
]  # fmt: skip
# The data's seed, examples of a batch, rows that it is filled up to, scale, whether weighted, who is left out.
PAIR = st.tuples(
    st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([None, 6, 9]), st.sampled_from([0.0, 0.1, 3.0, 1e4]),
    st.booleans(), st.integers(0, 5),
)  # fmt: skip


def sums_of(kind, activity, loss, hidden, regularized, parts, seed):
    x = K.Input((WIDTH,))
    y = L.Dense(
        5, activation="tanh", bias_initializer="ones", activity_regularizer=ACTIVITIES[activity](),
        kernel_regularizer=K.regularizers.L2(0.1) if regularized else None,
    )(x)  # fmt: skip
    for layer in HIDDEN[hidden]():
        y = layer(y)
    model = KINDS[kind](x, L.Dense(CLASSES)(y))
    return Sums(model, loss=LOSSES[loss](), gradient_accumulation_steps=parts, seed=seed)


def filled(rows, size):
    """As `poisson_batches` fills them (`test_marks_of_blank_rows_are_zeros_that_no_example_has`)."""
    more = 0 if size is None else size - len(rows[0])
    fill = lambda a, value: np.concatenate([a, np.full((more, *a.shape[1:]), value, a.dtype)])
    return fill(rows[0], 0), fill(rows[1], 0), fill(rows[2], -0.0)


def neighbours(parts, in_place, seed, n, size, scale, weighted, gone):
    """One logical batch, and the same without one example: the last one, where places must stay the same."""
    numbers = np.random.default_rng(seed)
    rows = []
    for _ in range(parts):
        x = (scale * numbers.normal(size=(n, WIDTH))).astype("float32")
        weights = numbers.choice(np.array([0, 0.3, 1, 50], "float32"), n) if weighted else np.ones(n, "float32")
        rows.append((x, numbers.integers(0, CLASSES, (n, 1)), weights))
    gone = n - 1 if in_place else gone % n
    fewer = [*rows[:-1], tuple(np.delete(a, gone, 0) for a in rows[-1])]
    return [filled(part, size) for part in rows], [filled(part, size) for part in fewer]


def params(models):
    """Where seeds are known, Keras 2 has to begin each step with TensorFlow's state set back, which takes a second."""
    for model in models:
        alone = pytest.mark.both_stacks if model[-1] is None else pytest.mark.one_stack
        yield pytest.param(model, marks=[pytest.mark.slow, alone])


@pytest.mark.parametrize("model", [*FEW, *params(MORE)], ids=str)
def test_one_example_moves_the_sum_by_no_more_than_the_clip(model):
    poisson_batches((X, Y), 0.5, 1, empty_batches="zero_weight")  # from here on -0.0 is a mark
    draws, secret = model[3] in ("dropout", "noise and norm", "tf.random"), model[-1] is None
    number = -(-PAIRS // (IN_A_LIST * len(MORE))) if model in MORE else 2  # a first list is of the simplest pairs
    feeds, traced = [of_any_size, as_arrays, as_pipeline, as_sampled], {}
    if draws and secret:
        feeds = [of_any_size]  # nothing is compared that the size of a batch has a part in
    elif model[-2] > 1:
        feeds.remove(as_sampled)

    def of(known_size):
        """The model traced for such batches. Its weights are the same ones."""
        if known_size not in traced:
            K.utils.set_random_seed(0)
            traced[known_size] = sums_of(*model)
        return traced[known_size]

    @settings(max_examples=max(number, 1), deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(feeds), st.lists(PAIR, min_size=IN_A_LIST, max_size=IN_A_LIST))
    def check(feed, pairs):
        known = feed is not of_any_size
        sums = of(known)
        pairs = [(seed, n, SIZE if known else size, *others) for seed, n, size, *others in pairs]
        if feed is as_sampled:  # each sample is a pipeline
            pairs = pairs[:2]
        made = [neighbours(model[-2], draws, *pair) for pair in pairs]
        steps = [batches for pair in made for batches in pair]
        if draws and secret:  # then no place is like another, unless public seeds say what is drawn there
            found, again = sums.each(steps[:6]), sums.each(steps[:6])
            assert max(np.linalg.norm(a - b) for a, b in zip(found, again, strict=True)) > 0.1
            return
        found = [sums.each([s], feed)[0] for s in steps] if feed is as_sampled else sums.each(steps, feed)
        stored = [np.linalg.norm(np.concatenate([a.ravel() for a in sums.start])) + np.linalg.norm(f) for f in found]
        for pair, one, other, size in zip(pairs, found[::2], found[1::2], stored[::2], strict=True):
            assert np.linalg.norm(one - other) <= CLIP * REL + 2.0**-23 * size, (feed, pair)
        if known and not draws:  # batches of a known size train as those of any size do
            # Where tanh is nearly 1, its slope is known to about 1e-7, and the gradient is that times the input.
            scales = np.repeat([pair[3] for pair in pairs], 2)
            for one, same, size, scale in zip(found, of(False).each(steps), stored, scales, strict=True):
                assert np.linalg.norm(one - same) <= 1e-5 * (1 + size) + 1e-6 * scale, (feed, pairs)

    check()
