"""Blank rows that fill up a batch contribute nothing."""

import importlib.util

import numpy as np
import pytest
import tensorflow as tf
from neighbour_cases import (
    CLASSES,
    CLIP,
    MODELS,
    REL,
    WIDTH,
    K,
    L,
    Sums,
    Unweighted,
    X,
    Y,
    truncation_has_a_price,  # noqa: F401  for all tests here
    whole,
)

import tfdpfl
from tfdpfl import PrivacyError, _blanks
from tfdpfl.clips import AdaptiveClip
from tfdpfl.data import poisson_batches


@pytest.mark.slow
@pytest.mark.parametrize("kind", [
    "activity regularizer", "add_loss", pytest.param("own train_step", marks=pytest.mark.both_stacks)])  # fmt: skip
def test_blank_rows_contribute_nothing_whatever_the_loss_makes_of_them(kind):
    sums = Sums(MODELS[kind]())
    more, fewer = (sums(whole(X[:n], Y[:n], truncated_batch_size=16)) for n in (6, 5))
    assert np.linalg.norm(more - fewer) <= CLIP * REL
    np.testing.assert_allclose(more, sums([(X[:6], Y[:6], np.ones(6, "float32"))]), atol=1e-6)
    assert not sums(whole(X[:0], Y[:0], empty_batches="zero_weight")).any()


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"jit_compile": True}, {"gradient_accumulation_steps": 2}, {"num_microbatches": 4}],
                         ids=str)  # fmt: skip
def test_blank_rows_contribute_nothing_however_the_step_is_taken(how):
    sums = Sums(MODELS["activity regularizer"](), **how)
    more = {"physical_batch_size": 4} if "gradient_accumulation_steps" in how else {}
    full = whole(X[:8], Y[:8], truncated_batch_size=16, **more)
    fewer = whole(X[:7], Y[:7], truncated_batch_size=16, **more)
    assert len(full) == how.get("gradient_accumulation_steps", 1)
    bound = 2 if "num_microbatches" in how else 1
    assert 0.1 < np.linalg.norm(sums(full) - sums(fewer)) <= bound * CLIP * REL


def test_marks_of_blank_rows_are_zeros_that_no_example_has():
    weights = np.array([-0.0, 2.0, -0.0], "float32")
    ((x, y, w),) = whole(X[:3], np.array([-0.0, 1.0, 2.0], "float32"), weights, truncated_batch_size=5)
    assert (w == [0, 2, 0, 0, 0]).all() and np.signbit(w).tolist() == [False, False, False, True, True]
    assert not np.signbit(y).any() and (x[3:] == 0).all()


@pytest.mark.slow
@pytest.mark.both_stacks
def test_numbers_of_other_data_are_no_marks_of_blank_rows(monkeypatch):
    """Until a data set fills up batches, -0.0 is a target as any."""
    fresh = importlib.util.module_from_spec(_blanks.__spec__)
    fresh.__spec__.loader.exec_module(fresh)
    monkeypatch.setattr(_blanks, "_made", fresh._made)
    monkeypatch.setattr(_blanks, "_variable", fresh._variable)
    model = K.Sequential([K.Input((1,)), L.Dense(1)])
    model.compile(tfdpfl.DPSGD(1.0, 0.0, learning_rate=1.0), "mse")
    ones, zeros, before = np.ones((2, 1), "float32"), -np.zeros(2, "float32"), model.get_weights()[0]
    model.train_on_batch(ones, zeros)
    after = model.get_weights()[0]
    assert (after != before).all()
    poisson_batches((np.ones((2, 1)), np.ones(2)), 0.5, 1, empty_batches="zero_weight")
    model.train_on_batch(ones, zeros, sample_weight=zeros)
    assert (model.get_weights()[0] == after).all()


def by_hand(x, y, size):
    """A batch that a user filled up, with weights of 0."""
    fill = lambda a: np.concatenate([a, np.zeros((size - len(a), *a.shape[1:]), a.dtype)])
    return [(fill(x), fill(y), fill(np.ones(len(x), "float32")))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["activity regularizer", "add_loss", "own train_step"])
def test_rows_of_weight_0_contribute_nothing_whatever_the_loss_makes_of_them(kind):
    sums = Sums(MODELS[kind]())
    more, fewer = (sums(by_hand(X[:n], Y[:n], 10)) for n in (6, 5))
    assert np.linalg.norm(more - fewer) <= CLIP * REL
    np.testing.assert_allclose(more, sums([(X[:6], Y[:6], np.ones(6, "float32"))]), atol=1e-6)


def test_a_third_part_that_a_loss_of_ones_own_depends_on_is_no_weight():
    class Rated(K.Model):
        def train_step(self, data):
            x, item, rating = data
            with tf.GradientTape() as tape:
                out = self(x + tf.cast(item, x.dtype)[:, None], training=True)[:, 0]
                loss = tf.reduce_mean(tf.square(out - rating))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"loss": loss}

    x = K.Input((WIDTH,))
    sums = Sums(Rated(x, L.Dense(1)(x)))
    assert sums([(X[:1], Y[:1], np.zeros(1, "float32"))]).any()


@pytest.mark.slow
@pytest.mark.both_stacks
def test_blank_rows_are_not_counted_by_a_clip_that_adapts():
    clip = AdaptiveClip(initial=1.0, learning_rate=1.0, target_quantile=0.5, clipped_count_stddev=0.0)
    sums = Sums(MODELS["activity regularizer"](), clip)
    sums(whole(X[:0], Y[:0], truncated_batch_size=4))
    assert sums.optimizer.current_clip == pytest.approx(1.0)


@pytest.mark.parametrize("change", [
    lambda data: data.map(lambda x, y, w: (x, y)),
    pytest.param(lambda data: data.unbatch().batch(4), marks=pytest.mark.slow),
])  # fmt: skip
def test_what_may_lose_the_marks_of_blank_rows_is_refused(change):
    data = poisson_batches((X, Y), 0.5, 2, truncated_batch_size=16)
    model = MODELS["plain"]()
    model.compile(tfdpfl.DPSGD(1.0, 1.0, expected_batch_size=6), K.losses.SparseCategoricalCrossentropy(True))
    with pytest.raises(PrivacyError, match=r"(Map|Batch) comes after batches that are filled up.*map_fn"):
        model.fit(change(data), verbose=0)


def test_a_function_that_does_not_take_in_the_marks_is_refused():
    class Inner(Unweighted):
        def train_step(self, data):
            return self.inner(data[0], data[1])

        @tf.function
        def inner(self, x, y):
            return Unweighted.train_step(self, (x, y))

    x = K.Input((WIDTH,))
    model = Inner(x, L.Dense(CLASSES)(x))
    model.compile(tfdpfl.DPSGD(1.0, 1.0, expected_batch_size=6, learning_rate=0.1))
    with pytest.raises(PrivacyError, match=r"'inner'.* does not receive it.*as an argument"):
        model.fit(poisson_batches((X, Y), 0.5, 2, truncated_batch_size=16).prefetch(1), verbose=0)


@pytest.mark.slow
def test_weights_that_cannot_mark_blank_rows_are_refused_or_left_alone():
    images, steps = np.zeros((4, 2, 2, 1), "float32"), np.ones((4, 3), "float32")
    with pytest.raises(ValueError, match=r"an example's sample_weight has the shape \(3,\)"):
        poisson_batches((images, steps, steps), 0.5, 2, truncated_batch_size=8)
    batch = next(iter(poisson_batches((images, steps, steps), 1e-9, 2)))
    assert batch[0].shape[0] == 0
