"""A DP optimizer is its Keras optimizer on (clipped sum + noise) / denominator, in every way that Keras trains."""

import re
import subprocess
import sys
import warnings

import conftest as c
import numpy as np
import pytest
import tensorflow as tf
from optimizer_cases import CLIP, assert_same, custom_step, loss_of, sgd

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.optimizers import make_dp_optimizer_class

keras = tf.keras
KERAS3 = c.keras3()
NAMED = {
    "DPSGD": ("SGD", {"learning_rate": 0.3, "momentum": 0.9}),
    "DPAdam": ("Adam", {"learning_rate": 0.05}),
    "DPAdamW": ("AdamW", {"learning_rate": 0.05, "weight_decay": 0.01}),
    "DPAdagrad": ("Adagrad", {"learning_rate": 0.3}),
    "DPRMSprop": ("RMSprop", {"learning_rate": 0.05, "momentum": 0.5}),
}


def plain_updates(optimizer, gradients_of, steps, seed=0):
    """Weights after a Keras optimizer's own steps on gradients that a function of the weights gives."""
    model = c.classifier(seed)
    for i in range(steps):
        gradients = [tf.constant(g, tf.float32) for g in gradients_of(i, model.get_weights())]
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return model.get_weights()


def some_clipped(x, y, clip=CLIP):
    norms = c.norms_of(c.per_example_gradients(c.weights(), x, y))
    return 0 < (norms > clip).sum() < len(x)


# -- the update --------------------------------------------------------------------------------------------------


# The common ones are fast tests; all of them run the same code before Keras's own.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n in ("DPSGD", "DPAdam") else pytest.param(n, marks=pytest.mark.slow) for n in NAMED]
)
def test_three_steps_are_those_of_the_keras_optimizer_on_the_clipped_mean(name):
    base, kwargs = NAMED[name]
    x, y = c.examples(12)
    assert some_clipped(x, y)
    model = c.compiled(getattr(tfdpfl, name)(CLIP, 0.0, **kwargs))
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)

    def gradients(i, values):
        rows = slice(4 * i, 4 * i + 4)
        return [g / 4 for g in c.clipped_sum(values, x[rows], y[rows], CLIP)]

    assert_same(model.get_weights(), plain_updates(getattr(keras.optimizers, base)(**kwargs), gradients, 3))


@pytest.mark.parametrize("expected", [None, 8, 5.5])
def test_the_denominator_is_the_expected_batch_size_or_else_the_batch(expected):
    x, y = c.examples(12)
    model = c.compiled(sgd(expected_batch_size=expected))
    update = c.update_of(model, lambda: model.train_on_batch(x, y))
    assert_same(update, [-g / (expected or 12) for g in c.clipped_sum(c.weights(), x, y, CLIP)])


@pytest.mark.slow
@pytest.mark.one_stack
def test_batches_of_any_size_sum_alike_and_an_empty_one_moves_nothing():
    x, y = c.examples(30)
    model = c.classifier()
    step = custom_step(model, sgd(expected_batch_size=10))
    for rows in (slice(0, 10), slice(10, 11), slice(11, 11), slice(11, 30), slice(0, 0)):
        want = [-g / 10 for g in c.clipped_sum(model.get_weights(), x[rows], y[rows], CLIP)]
        assert_same(c.update_of(model, lambda rows=rows: step(x[rows], y[rows])), want)


@pytest.mark.slow
@pytest.mark.one_stack
def test_fit_takes_poisson_batches_and_divides_each_by_the_expected_size():
    x, y = c.examples(40)
    sizes = []
    batches = tfdpfl.data.poisson_batches((x, y), expected_batch_size=2, steps=6, seed=4)
    values = c.weights()
    for bx, by in batches.as_numpy_iterator():
        sizes.append(len(bx))
        values = [v - g / 2 for v, g in zip(values, c.clipped_sum(values, bx, by, CLIP), strict=True)]
    assert len(set(sizes)) > 2
    model = c.compiled(sgd(expected_batch_size=2))
    model.fit(tfdpfl.data.poisson_batches((x, y), expected_batch_size=2, steps=6, seed=4), verbose=0)
    assert_same(model.get_weights(), values)


@pytest.mark.slow
@pytest.mark.one_stack
def test_a_partial_last_batch_is_divided_by_its_own_size():
    x, y = c.examples(6)
    model = c.compiled(sgd())
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    values = c.weights()
    for rows in (slice(0, 4), slice(4, 6)):
        sums = c.clipped_sum(values, x[rows], y[rows], CLIP)
        values = [v - g / (rows.stop - rows.start) for v, g in zip(values, sums, strict=True)]
    assert_same(model.get_weights(), values)


@pytest.mark.slow
@pytest.mark.one_stack
def test_microbatches_clip_the_mean_of_each_group_and_divide_by_their_number():
    x, y = c.examples(12)
    model = c.compiled(sgd(num_microbatches=3))
    update = c.update_of(model, lambda: model.train_on_batch(x, y))
    assert_same(update, [-g / 3 for g in c.clipped_sum(c.weights(), x, y, CLIP, num_microbatches=3)])


def test_a_batch_that_microbatches_do_not_divide_is_refused_and_moves_nothing():
    x, y = c.examples(7)
    model = c.compiled(sgd(num_microbatches=3))
    with pytest.raises((PrivacyError, tf.errors.InvalidArgumentError), match="num_microbatches=3 does not divide"):
        model.train_on_batch(x, y)
    assert_same(model.get_weights(), c.weights(), 0, 0)
    assert model.optimizer.num_dp_steps == 0


@pytest.mark.slow
@pytest.mark.one_stack
def test_no_example_moves_the_sum_by_more_than_the_clip():
    x, y = c.examples(8)
    x[3] *= 1e4
    sums = []
    for rows in (range(8), [0, 1, 2, 4, 5, 6, 7]):
        model = c.compiled(sgd(expected_batch_size=1))
        sums.append(c.flat(c.update_of(model, lambda m=model, r=list(rows): m.train_on_batch(x[r], y[r]))))
    assert np.linalg.norm(sums[0] - sums[1]) <= CLIP * (1 + 1e-4)


def test_an_example_whose_gradient_is_not_finite_contributes_nothing_and_is_counted():
    x, y = c.examples(8)
    keep = [0, 2, 3, 4, 6, 7]
    want = [-g / 8 for g in c.clipped_sum(c.weights(), x[keep], y[keep], CLIP)]
    x[1], x[5] = np.nan, np.inf
    model = c.compiled(sgd(expected_batch_size=8))
    assert_same(c.update_of(model, lambda: model.train_on_batch(x, y)), want)
    assert model.optimizer.num_nonfinite == 2
    model.train_on_batch(x, y)
    assert model.optimizer.num_nonfinite == 4


def test_the_gradient_of_a_regulariser_is_added_outside_the_clip():
    x, y = c.examples(8)
    layer = keras.layers.Dense(c.CLASSES, kernel_regularizer=keras.regularizers.L2(10.0))
    model = keras.Sequential([keras.Input((c.WIDTH,)), layer])
    model.compile(sgd(clip=1e-3), loss=c.cross_entropy())
    kernel = layer.get_weights()[0]
    update = c.update_of(model, lambda: model.train_on_batch(x, y))[0]
    np.testing.assert_allclose(update, -20 * kernel, atol=2e-3)


# -- the ways of Keras -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_per_execution_equals_single_steps():
    x, y = c.examples(16)
    ends = []
    for n in (1, 2):
        model = c.compiled(tfdpfl.DPAdam(CLIP, 0.7, seed=1), steps_per_execution=n)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        assert model.optimizer.num_dp_steps == 4
        assert model.optimizer.executed == [(0.7, 4)]
        ends.append(model.get_weights())
    assert_same(*ends)


@pytest.mark.slow
def test_a_step_of_ones_own_is_traced_once_though_it_makes_the_optimizers_variables():
    x, y = c.examples(12)
    model, optimizer, traced = c.classifier(), tfdpfl.DPAdam(CLIP, 0.0, learning_rate=0.05), []

    @tf.function(input_signature=[tf.TensorSpec([None, c.WIDTH]), tf.TensorSpec([None], tf.int32)])
    def step(x, y):
        traced.append(x)
        optimizer.minimize(lambda: loss_of(model, x, y), model.trainable_variables)

    step(tf.constant(x), tf.constant(y))
    assert len(traced) == 1
    other = c.classifier()
    custom_step(other, tfdpfl.DPAdam(CLIP, 0.0, learning_rate=0.05))(x, y)
    assert_same(model.get_weights(), other.get_weights())


@pytest.mark.slow
@pytest.mark.one_stack
def test_xla_equals_no_xla():
    x, y = c.examples(8)
    ends = []  # without noise: XLA makes other normals of the same random bits
    for jit in (False, True):
        model = c.compiled(sgd(), jit_compile=jit)
        model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        assert model.optimizer.executed == [(0.0, 2)]
        ends.append(model.get_weights())
    assert_same(*ends, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_fit_with_tf_data_equals_fit_with_arrays_and_train_on_batch():
    x, y = c.examples(8)
    ends = []
    for way in ("arrays", "tf.data", "train_on_batch"):
        model = c.compiled(tfdpfl.DPAdam(CLIP, 0.7, seed=1))
        if way == "arrays":
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
        elif way == "tf.data":
            model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(4), verbose=0)
        else:
            for i in (0, 4):
                model.train_on_batch(x[i : i + 4], y[i : i + 4])
        ends.append(model.get_weights())
    assert_same(ends[0], ends[1])
    assert_same(ends[0], ends[2])


@pytest.mark.slow
def test_dictionaries_of_inputs_and_several_outputs_are_one_gradient_per_example():
    x, y = c.examples(10)
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    one = keras.layers.Dense(c.CLASSES, use_bias=False, name="one")
    two = keras.layers.Dense(1, use_bias=False, name="two")
    model = keras.Model({"a": a, "b": b}, {"one": one(a), "two": two(b)})
    losses = {"one": c.cross_entropy(), "two": keras.losses.MeanSquaredError()}
    model.compile(sgd(clip=2.0), loss=losses, loss_weights={"one": 1.0, "two": 0.5})
    target = x[:, :1]
    values = c.weights(5)
    one.set_weights([values[0][:3, :3] * 0.2]), two.set_weights([values[0][3:, :1] * 0.2])
    w1, w2 = one.get_weights()[0], two.get_weights()[0]
    inputs = {"a": x[:, :3], "b": x[:, 3:]}
    model.train_on_batch(inputs, {"one": y, "two": target})
    logits = inputs["a"].astype(np.float64) @ w1
    p = np.exp(logits)
    d = p / p.sum(1, keepdims=True) - np.eye(c.CLASSES)[y]
    g1 = np.einsum("bi,bj->bij", inputs["a"], d)
    g2 = np.einsum("bi,bj->bij", inputs["b"], 0.5 * 2 * (inputs["b"] @ w2 - target))
    factors = np.minimum(1, 2.0 / c.norms_of([g1, g2]))
    assert 0 < (factors < 1).sum() < 10
    np.testing.assert_allclose(one.get_weights()[0], w1 - np.tensordot(factors, g1, 1) / 10, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(two.get_weights()[0], w2 - np.tensordot(factors, g2, 1) / 10, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighting", ["sample_weight", pytest.param("class_weight", marks=pytest.mark.slow)])
def test_weights_scale_an_examples_gradient_before_the_clip(weighting):
    x, y = c.examples(12)
    by_class = {0: 0.1, 1: 1.0, 2: 3.0}
    w = np.array([by_class[i] for i in y], np.float32)
    model = c.compiled(sgd())
    given = {"sample_weight": w} if weighting == "sample_weight" else {"class_weight": by_class}
    update = c.update_of(model, lambda: model.fit(x, y, batch_size=12, shuffle=False, verbose=0, **given))
    assert_same(update, [-g / 12 for g in c.clipped_sum(c.weights(), x, y, CLIP, sample_weight=w)])


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "none"])
def test_the_reduction_of_the_loss_does_not_matter(reduction):
    if reduction == "none" and not KERAS3:
        reduction = keras.losses.Reduction.NONE
    x, y = c.examples(12)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model = c.compiled(sgd(), loss=loss)
    update = c.update_of(model, lambda: model.train_on_batch(x, y))
    assert_same(update, [-g / 12 for g in c.clipped_sum(c.weights(), x, y, CLIP)])


def test_frozen_layers_take_no_part_in_norm_noise_or_update():
    x, y = c.examples(12)
    model = c.classifier()
    model.layers[0].trainable = False
    model.compile(sgd(), loss=c.cross_entropy())
    update = c.update_of(model, lambda: model.train_on_batch(x, y))
    gradients = c.per_example_gradients(c.weights(), x, y)[2:]
    factors = np.minimum(1, CLIP / c.norms_of(gradients))
    assert_same(update, [np.zeros_like(u) for u in update[:2]] + [-np.tensordot(factors, g, 1) / 12 for g in gradients])


@pytest.mark.slow
def test_a_layer_frozen_between_two_compiles_stays_and_the_ledger_goes_on():
    x, y = c.examples(12)
    optimizer = sgd(multiplier=0.5, seed=3)
    model = c.compiled(optimizer)
    first = c.update_of(model, lambda: model.train_on_batch(x, y))
    assert all(np.all(u != 0) for u in first)
    model.layers[0].trainable = False
    model.compile(optimizer, loss=c.cross_entropy())
    second = c.update_of(model, lambda: model.train_on_batch(x, y))
    assert np.all(c.flat(second[:2]) == 0) and np.all(c.flat(second[2:]) != 0)
    assert optimizer.executed == [(0.5, 2)]


def test_bfloat16_trains_with_the_float32_norms():
    x, y = c.examples(12)
    policy = keras.mixed_precision.Policy("mixed_bfloat16")
    model = c.classifier(dtype=policy)
    model.compile(sgd(), loss=c.cross_entropy())
    update = c.update_of(model, lambda: model.train_on_batch(x, y))
    assert_same(update, [-g / 12 for g in c.clipped_sum(c.weights(), x, y, CLIP)], rtol=0.05, atol=5e-3)


@pytest.mark.slow
def test_a_learning_rate_schedule_runs():
    x, y = c.examples(4)
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [1.0, 0.0])
    model = c.compiled(sgd(learning_rate=schedule))
    sums = c.clipped_sum(c.weights(), x, y, CLIP)
    assert_same(c.update_of(model, lambda: model.train_on_batch(x, y)), [-g / 4 for g in sums])
    model.train_on_batch(x, y)
    assert np.all(c.flat(c.update_of(model, lambda: model.train_on_batch(x, y))) == 0)


@pytest.mark.parametrize("kwargs", [
    {"clipnorm": 0.01}, {"global_clipnorm": 0.05}, {"clipvalue": 0.01}, {"weight_decay": 0.1},
    {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 1},
], ids=lambda kwargs: next(iter(kwargs)))  # fmt: skip
def test_arguments_of_keras_do_to_the_released_gradient_what_they_do_to_any(kwargs):
    x, y = c.examples(4)
    model = c.classifier()
    step = custom_step(model, sgd(**kwargs))
    step(x, y)
    want = plain_updates(
        keras.optimizers.SGD(learning_rate=1.0, **kwargs), lambda i, v: [g / 4 for g in c.clipped_sum(v, x, y, CLIP)], 1
    )
    assert_same(model.get_weights(), want)


@pytest.mark.parametrize("kind", ["callable", "tensor", "vector"])
def test_minimize_takes_callable_and_tensor_losses_in_a_tf_function(kind):
    x, y = c.examples(12)
    model, optimizer = c.classifier(), sgd()
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(x, y):
        if kind == "callable":
            loss = lambda: loss_of(model, x, y)
        elif kind == "tensor":
            loss = loss_of(model, x, y)
        else:
            loss = keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
        optimizer.minimize(loss, model.trainable_variables)

    update = c.update_of(model, lambda: step(tf.constant(x), tf.constant(y)))
    assert_same(update, [-g / 12 for g in c.clipped_sum(c.weights(), x, y, CLIP)])


def test_minimize_under_a_tape_and_through_nested_functions():
    x, y = c.examples(12)
    model, optimizer = c.classifier(), sgd()
    optimizer.build(model.trainable_variables)

    @tf.function
    def inner(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        optimizer.minimize(loss, model.trainable_variables, tape=tape)

    @tf.function
    def outer(x, y):
        inner(x, y)

    update = c.update_of(model, lambda: outer(tf.constant(x), tf.constant(y)))
    assert_same(update, [-g / 12 for g in c.clipped_sum(c.weights(), x, y, CLIP)])


class OwnStep(keras.Sequential):
    """A train step as Keras's guides write it."""

    def train_step(self, data):
        x, y = data
        if KERAS3:
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(self.compute_loss(x=x, y=y, y_pred=self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
        else:
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
            self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
        return {"loss": loss}


class RawStep(keras.Sequential):
    """A train step that changes gradients before it applies them."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = [2 * g for g in tape.gradient(loss, self.trainable_variables)]
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def own(cls, optimizer):
    model = cls(
        [keras.Input((c.WIDTH,)), keras.layers.Dense(c.HIDDEN, activation="tanh"), keras.layers.Dense(c.CLASSES)]
    )
    model.set_weights(c.weights())
    model.compile(optimizer, loss=c.cross_entropy())
    return model


def test_a_custom_train_step_trains_privately():
    x, y = c.examples(12)
    model = own(OwnStep, sgd())
    update = c.update_of(model, lambda: model.fit(x, y, batch_size=12, shuffle=False, verbose=0))
    assert_same(update, [-g / 12 for g in c.clipped_sum(c.weights(), x, y, CLIP)])


def test_a_custom_train_step_that_changes_gradients_is_refused_each_time():
    x, y = c.examples(12)
    model = own(RawStep, sgd())
    for _ in range(3):
        with pytest.raises(PrivacyError, match="did not come through the clip"):
            model.fit(x, y, verbose=0)
    assert_same(model.get_weights(), c.weights(), 0, 0)
    assert model.optimizer.executed == []


def test_an_eager_train_step_is_refused_with_the_mend():
    x, y = c.examples(4)
    model = c.compiled(sgd(), run_eagerly=True)
    with pytest.raises(PrivacyError, match="run_eagerly=True"):
        model.fit(x, y, verbose=0)
    assert_same(model.get_weights(), c.weights(), 0, 0)


def test_an_eager_minimize_is_refused_with_the_mend():
    x, y = c.examples(4)
    model, optimizer = c.classifier(), sgd()
    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
    for given in ((lambda: loss_of(model, x, y), model.trainable_variables), (loss, model.trainable_variables, tape)):
        with pytest.raises(PrivacyError, match=r"Wrap the step in tf\.function"):
            optimizer.minimize(*given)
    assert_same(model.get_weights(), c.weights(), 0, 0)


@pytest.mark.slow
def test_two_models_train_side_by_side_with_different_optimizers():
    x, y = c.examples(8)
    models = [c.compiled(sgd()), c.compiled(tfdpfl.DPAdam(CLIP, 0.0, learning_rate=0.05))]
    for _ in range(2):
        for model in models:
            model.train_on_batch(x, y)
    gradients = lambda i, v: [g / 8 for g in c.clipped_sum(v, x, y, CLIP)]
    assert_same(models[0].get_weights(), plain_updates(keras.optimizers.SGD(learning_rate=1.0), gradients, 2))
    assert_same(models[1].get_weights(), plain_updates(keras.optimizers.Adam(learning_rate=0.05), gradients, 2))


@pytest.mark.slow
@pytest.mark.one_stack
def test_one_optimizer_serves_two_graphs_and_counts_both():
    x, y = c.examples(8)
    model, optimizer = c.classifier(), sgd(multiplier=0.4, seed=1)
    first, second = custom_step(model, optimizer), custom_step(model, optimizer)
    first(x, y), second(x, y), first(x, y)
    assert optimizer.executed == [(0.4, 3)]
    other = c.classifier()
    step = custom_step(other, sgd(multiplier=0.4, seed=1))
    for _ in range(3):
        step(x, y)
    assert_same(model.get_weights(), other.get_weights())


# -- the guard ---------------------------------------------------------------------------------------------------


class Guarded:
    """An optimizer that has taken honest steps, and a model to try raw gradients on."""

    def __init__(self):
        self.model, self.optimizer = c.classifier(), sgd()
        self.variables = self.model.trainable_variables
        self.x, self.y = map(tf.constant, c.examples(6))
        self.honest = custom_step(self.model, self.optimizer)
        self.honest(self.x.numpy(), self.y.numpy())

    def raw(self, x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(self.model, x, y)
        return [tf.identity(g) for g in tape.gradient(loss, self.variables)]

    def apply(self, gradients):
        self.optimizer.apply_gradients(zip(gradients, self.variables, strict=True))

    def refuses(self, way, message="did not come through the clip"):
        values = self.model.get_weights()
        steps = self.optimizer.num_dp_steps
        for _ in range(2):
            with pytest.raises(PrivacyError, match=message):
                way()
        assert_same(self.model.get_weights(), values, 0, 0)
        assert self.optimizer.num_dp_steps == steps
        self.honest(self.x.numpy(), self.y.numpy())  # and honest steps still pass
        with pytest.raises(PrivacyError, match=message):
            way()


@pytest.fixture(scope="module")
def guarded():
    return Guarded()


def test_raw_eager_gradients_are_refused_after_honest_steps(guarded):
    """The loop of Keras's guide: nobody changed these gradients, so the sentence blames nobody for that."""
    guarded.refuses(lambda: guarded.apply(guarded.raw(guarded.x, guarded.y)), "runs eagerly.*Wrap the step in tf.funct")


def test_raw_gradients_of_a_function_of_the_batch_are_refused(guarded):
    @tf.function
    def step(x, y):
        guarded.apply(guarded.raw(x, y))

    guarded.refuses(lambda: step(guarded.x, guarded.y))


@pytest.mark.slow
def test_raw_gradients_of_captured_arrays_variables_and_iterators_are_refused(guarded):
    x, y = guarded.x.numpy(), guarded.y.numpy()
    held = tf.Variable(guarded.x)
    batches = iter(tf.data.Dataset.from_tensors((x, y)).repeat())

    @tf.function
    def inside(x_, y_):
        return guarded.raw(x_, y_)

    ways = {
        "a constant": lambda: guarded.apply(guarded.raw(tf.constant(x), tf.constant(y))),
        "an eager tensor": lambda: guarded.apply(guarded.raw(guarded.x, guarded.y)),
        "a variable": lambda: guarded.apply(guarded.raw(held, guarded.y)),
        "an iterator": lambda: guarded.apply(guarded.raw(*next(batches))),
        "a constant in a nested function": lambda: guarded.apply(tf.function(lambda: inside(x, y))()),
        "python": lambda: guarded.apply(
            guarded.raw(tf.ensure_shape(tf.numpy_function(lambda: x, [], tf.float32), x.shape), y)
        ),
    }
    for name, way in ways.items():
        with pytest.raises(PrivacyError, match="did not come through the clip"):
            tf.function(way)()
            pytest.fail(f"raw gradients of {name} were applied")


def test_raw_gradients_added_up_in_variables_are_refused(guarded):
    sums = [tf.Variable(tf.zeros(v.shape)) for v in guarded.variables]

    @tf.function
    def step(x, y):
        for s, g in zip(sums, guarded.raw(x, y), strict=True):
            s.assign_add(g)
        guarded.apply([s.read_value() for s in sums])

    guarded.refuses(lambda: step(guarded.x, guarded.y))


def test_raw_gradients_in_a_branch_are_refused(guarded):
    @tf.function
    def step(x, y):
        gradients = guarded.raw(x, y)
        tf.cond(tf.reduce_sum(gradients[0]) < 1e9, lambda: guarded.apply(gradients), lambda: None)

    guarded.refuses(lambda: step(guarded.x, guarded.y))


@pytest.mark.skipif(KERAS3, reason="only Keras 2 shows the released gradients to the user")
@pytest.mark.parametrize("mix", ["sum", "scaled by the loss", "one variable", "nested"])
def test_released_gradients_mixed_with_raw_ones_are_refused(guarded, mix):
    @tf.function
    def raw(x, y):
        return guarded.raw(x, y)

    @tf.function
    def step(x, y):
        loss = loss_of(guarded.model, x, y)
        wild = raw(x, y) if mix == "nested" else guarded.raw(x, y)
        released = [g for g, _ in guarded.optimizer.compute_gradients(loss, guarded.variables)]
        if mix == "scaled by the loss":
            guarded.apply([g * loss for g in released])
        elif mix == "one variable":
            guarded.apply([*released[:-1], wild[-1]])
        else:
            guarded.apply([g + w for g, w in zip(released, wild, strict=True)])

    with pytest.raises(PrivacyError, match="did not come through the clip"):
        step(guarded.x, guarded.y)


@pytest.mark.skipif(KERAS3, reason="only Keras 2 shows the released gradients to the user")
def test_released_gradients_may_be_scaled_clipped_and_decayed(guarded):
    scale = tf.Variable(0.5)
    values = guarded.model.get_weights()

    @tf.function
    def step(x, y):
        released = guarded.optimizer.compute_gradients(lambda: loss_of(guarded.model, x, y), guarded.variables)
        gradients, _ = tf.clip_by_global_norm([g for g, _ in released], 0.1)
        gradients = [g * scale + 0.01 * v for g, v in zip(gradients, guarded.variables, strict=True)]
        gradients[0] = tf.clip_by_norm(gradients[0], 1.0)
        guarded.apply(gradients)

    update = c.update_of(guarded.model, lambda: step(guarded.x, guarded.y))
    sums = [g / 6 for g in c.clipped_sum(values, guarded.x.numpy(), guarded.y.numpy(), CLIP)]
    factor = min(1, 0.1 / np.linalg.norm(c.flat(sums)))
    assert_same(update, [-(0.5 * factor * g + 0.01 * v) for g, v in zip(sums, values, strict=True)])


@pytest.mark.skipif(not KERAS3, reason="Keras 2 hands over no pending loss")
def test_the_loss_of_one_trace_does_not_serve_another(guarded):
    @tf.function
    def announce(x, y):
        return guarded.optimizer.scale_loss(loss_of(guarded.model, x, y))

    announce(guarded.x, guarded.y)

    @tf.function
    def step(x, y):
        guarded.apply(guarded.raw(x, y))

    with pytest.raises(PrivacyError, match="did not come through the clip"):
        step(guarded.x, guarded.y)


@pytest.mark.skipif(not KERAS3, reason="Keras 2 hands over no pending loss")
def test_one_announced_loss_serves_one_update(guarded):
    @tf.function
    def step(x, y):
        guarded.optimizer.scale_loss(loss_of(guarded.model, x, y))
        guarded.optimizer.apply([None] * 4, guarded.variables)
        guarded.apply(guarded.raw(x, y))

    with pytest.raises(PrivacyError, match="did not come through the clip"):
        step(guarded.x, guarded.y)


# -- any optimizer -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Lion", *(pytest.param(n, marks=pytest.mark.slow) for n in ("Nadam", "Ftrl", "Adamax", "Adadelta"))]
)
def test_other_keras_optimizers_work_through_make_dp_optimizer_class(name):
    base = getattr(keras.optimizers, name)
    x, y = c.examples(8)
    made = make_dp_optimizer_class(base)
    assert made is make_dp_optimizer_class(base)
    assert made.__name__ == f"DP{name}" and issubclass(made, base)
    model = c.compiled(made(CLIP, 0.0, learning_rate=0.05))
    model.train_on_batch(x, y)
    gradients = lambda i, v: [g / 8 for g in c.clipped_sum(v, x, y, CLIP)]
    # Keras 2's Nadam keeps one product for all variables, in which order is left to the trace.
    n = 1 if name == "Nadam" and not KERAS3 else 4
    assert_same(model.get_weights()[:n], plain_updates(base(learning_rate=0.05), gradients, 1)[:n], atol=1e-5)


class SignSGD(keras.optimizers.SGD):
    """A user's own optimizer: w ← w − lr·tanh(c·g)."""

    def __init__(self, slope=2.0, learning_rate=0.1, **kwargs):
        super().__init__(learning_rate=learning_rate, **kwargs)
        self.slope = slope

    def update_step(self, gradient, variable, learning_rate=None):
        rate = self.learning_rate if learning_rate is None else learning_rate
        variable.assign_sub(tf.cast(rate, gradient.dtype) * tf.tanh(self.slope * gradient))

    def get_config(self):
        return {**super().get_config(), "slope": self.slope}


@pytest.mark.slow
def test_a_users_own_optimizer_is_made_private():
    x, y = c.examples(8)
    made = make_dp_optimizer_class(SignSGD)
    model = c.compiled(made(CLIP, 0.0, slope=3.0))
    update = c.update_of(model, lambda: model.train_on_batch(x, y))
    assert_same(update, [-0.1 * np.tanh(3 * g / 8) for g in c.clipped_sum(c.weights(), x, y, CLIP)])
    assert model.optimizer.get_config()["slope"] == 3.0
    assert made.from_config(model.optimizer.get_config()).slope == 3.0


def test_what_is_already_private_stays_itself():
    assert make_dp_optimizer_class(tfdpfl.DPAdam) is tfdpfl.DPAdam
    assert make_dp_optimizer_class(keras.optimizers.Adam) is tfdpfl.DPAdam


def test_tf_privacys_names_are_the_same_classes():
    assert tfdpfl.DPKerasSGDOptimizer is tfdpfl.DPSGD
    assert tfdpfl.DPKerasAdamOptimizer is tfdpfl.DPAdam
    assert tfdpfl.DPKerasAdagradOptimizer is tfdpfl.DPAdagrad


@pytest.mark.parametrize("wrong", [1, "Adam", keras.optimizers.SGD(), dict, object], ids=lambda v: type(v).__name__)
def test_what_is_no_optimizer_class_is_refused(wrong):
    with pytest.raises(TypeError, match=r"class|optimizer"):
        make_dp_optimizer_class(wrong)


# -- arguments ---------------------------------------------------------------------------------------------------


def test_an_argument_that_keras_does_not_know_is_refused():
    with pytest.raises((TypeError, ValueError), match="learning_rates"):
        tfdpfl.DPAdam(1.0, 1.0, learning_rates=0.1)


@pytest.mark.parametrize("make", [tfdpfl.DPAdam, tfdpfl.DPFTRL, tfdpfl.DPKerasSGDOptimizer])
def test_the_clip_and_the_noise_come_first_and_all_else_is_named(make):
    optimizer = make(1.5, 0.5, num_microbatches=None, learning_rate=0.25)
    assert (optimizer.l2_norm_clip, optimizer.noise_multiplier) == (1.5, 0.5)
    assert float(np.asarray(optimizer.learning_rate)) == 0.25
    with pytest.raises(TypeError, match=r"\(0.001, 1.0, 1.1\): the first two.*Write \w+\(l2_norm_clip.*learning_rate="):
        make(1e-3, 1.0, 1.1)


@pytest.mark.parametrize("weights", [{0: 0.5, 1: 2.0, 2: 1.0}, {0: 2.0, 1: 2.0, 2: 2.0}, None])
def test_class_weights_in_front_of_a_clip_are_warned_of(weights, recwarn):
    model = c.compiled(tfdpfl.DPSGD(0.1, 1.0))
    model.fit(*c.examples(), verbose=0, class_weight=weights)
    said = [w for w in recwarn if re.search(r"class_weight=\{0: 0.5.*l2_norm_clip=0.1.*threshold", str(w.message))]
    assert len(said) == (weights is not None and weights[0] == 0.5)


# -- what cannot be made private ---------------------------------------------------------------------------------


def test_batch_normalisation_is_refused_before_anything_moves():
    x, y = c.examples(8)
    model = keras.Sequential([keras.Input((c.WIDTH,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
    model.compile(sgd(multiplier=1.0), loss=c.cross_entropy())
    before = model.get_weights()
    with pytest.raises(PrivacyError, match=r"(?i)batch.?norm.*GroupNormalization"):
        model.fit(x, y, verbose=0)
    assert_same(model.get_weights(), before, 0, 0)
    assert model.optimizer.executed == []


def test_another_backend_of_keras_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(PrivacyError, match=r"'jax' backend.*KERAS_BACKEND=tensorflow"):
        tfdpfl.DPAdam(1.0, 1.0)
    with pytest.raises(PrivacyError, match="'jax' backend"):
        make_dp_optimizer_class(type("Another", (keras.optimizers.SGD,), {}))


def run(code, **env):
    import os

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_importing_the_package_does_not_import_tensorflow():
    code = "import sys, tfdpfl; print([m for m in ('tensorflow', 'keras', 'tf_keras') if m in sys.modules])"
    assert run(code) == "[]"


@pytest.mark.slow
def test_training_warns_of_nothing():
    x, y = c.examples(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        c.compiled(tfdpfl.DPAdam(CLIP, 1.0)).fit(x, y, verbose=0)


def test_what_ran_is_not_read_while_a_step_is_traced():
    optimizer = tfdpfl.DPSGD(1.0, 1.0)
    with pytest.raises(RuntimeError, match="between steps"):
        tf.function(lambda: optimizer.num_dp_steps)()


@pytest.mark.slow
def test_a_train_step_in_the_words_of_the_error():
    class Own(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense, self.minimizes = tf.keras.layers.Dense(1), False

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            variables = self.trainable_variables
            if self.minimizes:
                self.optimizer.minimize(loss, self.trainable_variables, tape=tape)
            else:
                gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, variables), 1.0)
                self.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return {"loss": loss}

    model, x = Own(), np.ones((8, 3), "float32")
    model.compile(tfdpfl.DPSGD(1.0, 1.0))
    with pytest.raises(PrivacyError, match=r"train_step.*self\.optimizer\.minimize\(loss, self\.train.*, tape=tape\)"):
        model.fit(x, x[:, :1], batch_size=4, verbose=0)
    model.minimizes = True
    model.compile(tfdpfl.DPSGD(1.0, 1.0))
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    assert model.optimizer.num_dp_steps == 2


CONSTRAINED = {
    "unit_norm": lambda: [keras.layers.Dense(4, kernel_constraint="unit_norm"), keras.layers.UnitNormalization()],
    "spectral": lambda: [keras.layers.SpectralNormalization(keras.layers.Dense(4))],
}


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("kind", CONSTRAINED)
def test_weights_are_clipped_where_they_stand_and_constrained_afterwards(kind):
    """A constraint projects what the update left. SpectralNormalization moves its weights before their gradients."""
    if kind == "spectral" and not KERAS3:
        pytest.skip("Keras 2 cannot train it in a graph")
    last = keras.layers.Dense(1, kernel_constraint=keras.constraints.MaxNorm(0.5))
    model = keras.Sequential([keras.Input((4,)), *CONSTRAINED[kind](), last])
    x, y = np.random.default_rng(0).normal(size=(2, 6, 4)).astype("float32")
    y = y[:, :1]
    start, rows, clip = model.get_weights(), [], 0.1
    for i in range(len(x)):
        model.set_weights(start)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(model(x[i : i + 1], training=True) - y[i : i + 1]))
        rows.append([g.numpy() for g in tape.gradient(loss, model.trainable_variables)])
    scales = [min(1, clip / np.sqrt(sum((g**2).sum() for g in row))) for row in rows]
    expected = [
        v.numpy() - sum(s * row[j] for s, row in zip(scales, rows, strict=True)) / len(x)
        for j, v in enumerate(model.trainable_variables)
    ]
    constraints = [getattr(v, "constraint", None) or (lambda w: w) for v in model.trainable_variables]
    model.compile(sgd(clip), "mse")
    model.set_weights(start)
    model.train_on_batch(x, y)
    assert_same([v.numpy() for v in model.trainable_variables],
                [np.array(of(tf.constant(w))) for of, w in zip(constraints, expected, strict=True)])  # fmt: skip
    assert max(scales) < 1
