"""Correlated noise for units of several rows, and with a clip that changes: what a unit moves, and what it costs."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.callbacks import PrivacyBudget
from tfdpfl.data import fixed_order
from tfdpfl.errors import PrivacyError
from tfdpfl.noise import BLT, Banded, Tree

X, Y = c.examples(24)
HOW = {"min_separation": 4, "max_participations": 2}


def model_of(noise, rows=3, **kwargs):
    return c.compiled(tfdpfl.DPSGD(0.4, 2.0, noise=noise, rows_per_unit=rows, learning_rate=1.0, **kwargs))


@pytest.mark.slow
def test_all_rows_of_a_unit_move_a_step_by_the_clip():
    x = X.copy()
    x[3:6] *= 1e4
    updates = []
    for weights in (np.ones(24, "float32"), np.where(np.arange(24) // 3 == 1, 0, 1).astype("float32")):
        model = model_of(Tree(), seed=5, expected_batch_size=1)  # both draw the same noise
        before = c.flat(model.get_weights())
        model.train_on_batch(x, Y, sample_weight=weights)
        updates.append(c.flat(model.get_weights()) - before)
    assert 0.95 * 0.4 < np.linalg.norm(updates[0] - updates[1]) <= 0.4 * (1 + 1e-4)


@pytest.mark.slow
def test_units_cost_what_as_many_examples_do():
    def of(data, rows, **fit):
        budget = PrivacyBudget(delta=1e-5)
        model = model_of(Banded(bands=2, **HOW), rows, expected_batch_size=6)
        model.fit(data, epochs=2, callbacks=[budget], verbose=0, **fit)
        (row,) = budget.ledger.to_dict()["rows"]
        return budget.report().epsilon, row["correlated"]

    alone = of(fixed_order((X, Y), 6), 1)
    assert of(fixed_order((X, Y), 6, copies=2), 2) == alone
    assert alone[1]["num_steps"] == 8 and alone[1]["max_participations"] == 2 and alone[1]["min_separation"] == 4


def test_batches_that_are_not_of_whole_units_are_refused():
    for data, rows, message in [
        (fixed_order((X, Y), 6), 2, "1 rows are one example, and the optimizer clips 2 as one"),
        (fixed_order((X, Y), 6, copies=2), 1, "2 rows are one example, and the optimizer clips each row by itself"),
        (X, 3, "fit would split units"),
    ]:
        model = model_of(Tree(), rows)
        fit = {} if isinstance(data, tf.data.Dataset) else {"y": Y, "batch_size": 6}
        with pytest.raises(PrivacyError, match=message):
            model.fit(data, callbacks=[PrivacyBudget(delta=1e-5)], verbose=0, **fit)
        assert not int(model.optimizer.iterations)


def test_copies_come_one_after_the_other_each_augmented_by_itself():
    data = fixed_order((X, Y), 6, copies=2, augment=lambda x, y: (x + tf.random.uniform([]), y))
    x, y = next(iter(data))
    np.testing.assert_array_equal(y, np.repeat(Y[:6], 2))
    shift = x.numpy() - np.repeat(X[:6], 2, axis=0)
    assert len(np.unique(shift[:, 0].round(4))) == 12


STEPS = 6


@pytest.mark.slow
@pytest.mark.parametrize("noise", [Tree(), Banded(bands=2, **HOW), BLT(**HOW)], ids=lambda noise: type(noise).__name__)
def test_the_noise_of_each_step_has_the_size_of_its_clip(noise):
    """The clip changes in the middle. A kernel without a gradient shows the noise: over the clip, that of one clip."""
    halved = tf.keras.optimizers.schedules.PiecewiseConstantDecay([STEPS // 2 - 1], [0.5, 0.25])
    seen = []
    for clip in (0.5, halved):
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
        model.compile(tfdpfl.DPSGD(clip, 2.0, noise=noise, seed=5, expected_batch_size=1, learning_rate=1.0), "mse")
        weights = [model.get_weights()[0]]
        for _ in range(STEPS):
            model.train_on_batch(np.zeros((2, 3), "float32"), np.zeros((2, 2), "float32"))
            weights.append(model.get_weights()[0])
        seen.append(np.diff(weights, axis=0).reshape(STEPS, -1))
    one, changing = seen
    np.testing.assert_allclose(changing, one * np.repeat([1, 0.5], STEPS // 2)[:, None], atol=1e-6)
    assert (np.abs(one) > 0).all()


@pytest.mark.slow
def test_an_example_moves_each_step_by_the_clip_of_that_step():
    halved = tf.keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    x, moved = 1e4 * X, []
    for weights in (np.ones(24, "float32"), np.where(np.arange(24) == 4, 0, 1).astype("float32")):
        model = c.compiled(tfdpfl.DPSGD(halved, 2.0, noise=Tree(), seed=5, expected_batch_size=1, learning_rate=1.0))
        start, updates = model.get_weights(), []
        for _ in range(2):
            model.set_weights(start)
            model.train_on_batch(x, Y, sample_weight=weights)
            updates.append(c.flat(model.get_weights()) - c.flat(start))
        moved.append(updates)
    sizes = np.linalg.norm(np.subtract(*moved), axis=1)
    assert sizes == pytest.approx([0.5, 0.25], rel=1e-3)
