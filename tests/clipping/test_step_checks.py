"""What a train step does beside its private update, in plain `fit` and in loops of one's own: without any callback."""

import os
import re
import traceback

import helpers
import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, normal

import tfdpfl
from tfdpfl.clipping import clipped_gradients
from tfdpfl.errors import PrivacyError

X = normal(12, 4)
Y = X[:, :1]


class Beside(K.Model):
    """Its train_step does ``before`` and ``after`` the private update; ``around`` takes it."""

    def __init__(self, before=None, after=None, around=lambda self, x, step: step()):
        super().__init__()
        self.dense, self.plain = L.Dense(1), K.optimizers.SGD(0.1)
        self.before, self.after, self.around = before, after, around

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data[:2]
        if self.before:
            self.before(self, x)
        step = lambda: self.optimizer.minimize(lambda: tf.reduce_mean((self(x) - y) ** 2), self.trainable_variables)
        self.around(self, x, lambda: (step(), 0)[1])
        if self.after:
            self.after(self, x)
        return {"loss": 0.0}


def raw(v):
    return getattr(v, "_value", v)


def learning_rate(optimizer):
    return raw(getattr(optimizer, "_learning_rate", optimizer.learning_rate))


def of(x):
    return tf.reduce_mean(x)


def plain_step(self, x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(self(x) ** 2)
    variables = self.trainable_variables
    self.plain.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))


def now_and_then(self, x, step):
    tf.cond(of(x) > 0.0, step, lambda: 0)


def as_often_as(self, x, step):
    tf.while_loop(lambda i: i < tf.reduce_sum(tf.cast(x[:, 0] > 0.0, tf.int32)), lambda i: [i + 1 + step()], [0])


FLAG = tf.Variable(True, trainable=False)


def by_a_flag(self, x, step):
    tf.cond(FLAG, step, lambda: 0)
    FLAG.assign(of(x) > 0.0)


def on_and_on(self, x, step):
    FLAG.assign(of(x) > 0.0)
    tf.while_loop(lambda go: go, lambda go: [(step(), FLAG.read_value())[1]], [True])


SEEN = tf.Variable(0.0, trainable=False)


def by_way_of_another(self, x):
    """Each in a function of its own, within another; it gets there in the next step."""
    add = tf.function(lambda seen: raw(self.dense.bias).assign_add([seen]))
    tf.function(lambda: add(SEEN.read_value()))()
    tf.function(lambda: tf.function(lambda: SEEN.assign(of(x)))())()


def for_each_example(do):
    """A loop in a loop, which turns for each example."""
    turn = lambda self: lambda i: [i + 1 + tf.cast(0 * tf.reduce_sum(do(self)), tf.int32)]
    return lambda self, x: tf.map_fn(lambda row: tf.while_loop(lambda i: i < 2, turn(self), [0])[0], x, tf.int32)


LEAKS = {
    "in a loop in a loop": (dict(after=for_each_example(lambda self: raw(self.dense.bias).assign_add([1.0]))), "bias"),
    "learning rate before": (dict(before=lambda self, x: learning_rate(self.optimizer).assign(of(x))), "learning_rate"),
    "learning rate after": (dict(after=lambda self, x: learning_rate(self.optimizer).assign_add(of(x))), "_rate"),
    "weight before": (dict(before=lambda self, x: raw(self.dense.bias).assign_add([of(x)])), "bias"),
    "in the other branch": (dict(around=lambda self, x, step: tf.cond(
        self.optimizer.iterations < 9, step, lambda: (raw(self.dense.bias).assign_add([of(x)]), 0)[1])), "bias"),
    "by a flag": (dict(around=by_a_flag), "leaves it out"),
    "by a flag from turn to turn": (dict(around=on_and_on), "as often"),
    "weight after": (dict(after=lambda self, x: raw(self.dense.bias).assign_add([of(x)])), "bias"),
    "another optimizer": (dict(after=plain_step), "kernel|bias"),
    "another function": (dict(after=lambda self, x: tf.function(plain_step)(self, x)), "kernel|bias"),
    "by way of another": (dict(after=by_way_of_another), "bias"),
    "in a branch": (dict(after=lambda self, x: tf.cond(
        of(x) > 0.0, lambda: raw(self.dense.bias).assign([1.0]), lambda: raw(self.dense.bias).read_value())), "bias"),
    "a step now and then": (dict(around=now_and_then), "leaves it out|bias|kernel"),
    "steps as often as": (dict(around=as_often_as), "as often as examples say|bias|kernel"),
    "iterations": (dict(after=lambda self, x: raw(self.optimizer.iterations).assign_add(
        tf.cast(of(x) > 0.0, self.optimizer.iterations.dtype))), "iteration"),
}  # fmt: skip


def fit(model, **kwargs):
    return model.fit(X, Y, batch_size=3, verbose=0, **kwargs)


def made(optimizer=None, how=None, **compiled):
    model = Beside(**(how or {}))
    model(X)
    model.plain.build(model.trainable_variables)
    model.compile(optimizer or tfdpfl.DPSGD(1.0, 1.0, learning_rate=0.1), "mse", **compiled)
    model.optimizer.build(model.trainable_variables)
    return model


AT_ONCE = {"steps_per_execution": 2}
ON_A_BATCH = lambda model: model.train_on_batch(X[:3], Y[:3])
# Ways to train; all other leaks are found in a plain `fit`.
TRAINED = {
    "learning rate before": ({"jit_compile": True}, fit), "learning rate after": ({}, ON_A_BATCH),
    "weight after": (AT_ONCE, fit), "a step now and then": (AT_ONCE, fit),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LEAKS)
def test_a_leak_beside_the_loss_is_refused_before_the_first_update(name):
    how, said = LEAKS[name]
    compiled, train = TRAINED.get(name, ({}, fit))
    model = made(how=how, **compiled)
    before = model.get_weights()
    with pytest.raises(PrivacyError, match=said):
        train(model)
    assert model.optimizer.iterations == 0
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


PUBLIC = {
    "a read in a loop in a loop": dict(after=for_each_example(lambda self: raw(self.dense.bias).read_value())),
    "a schedule": dict(before=lambda self, x: learning_rate(self.optimizer).assign(
        0.1 / (1.0 + tf.cast(self.optimizer.iterations, tf.float32)))),
    "a projection": dict(after=lambda self, x: raw(self.dense.kernel).assign(
        tf.clip_by_norm(tf.convert_to_tensor(self.dense.kernel), 1.0))),
    "a step every second time": dict(around=lambda self, x, step: tf.cond(
        self.optimizer.iterations < 9, step, lambda: 0)),
    "two steps": dict(around=lambda self, x, step: tf.while_loop(lambda i: i < 2, lambda i: [i + 1 + step()], [0])),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "compiled"), [
    ("two steps", AT_ONCE), ("a step every second time", {}), ("a read in a loop in a loop", {}), ("a projection", {}),
    ("a schedule", AT_ONCE)])  # fmt: skip
def test_what_is_public_beside_the_loss_trains(name, compiled):
    model = made(how=PUBLIC[name], **compiled)
    fit(model)
    assert model.optimizer.num_dp_steps == (8 if name == "two steps" else 4)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [
    lambda: tfdpfl.DPAdam(1.0, 1.0, use_ema=True), lambda: tfdpfl.DPRMSprop(1.0, 1.0, momentum=0.9),
    lambda: tfdpfl.DPAdam(1.0, 1.0, learning_rate=K.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)),
    lambda: tfdpfl.DPAdamW(1.0, 1.0, global_clipnorm=1.0),
])  # fmt: skip
@pytest.mark.one_stack
def test_what_optimizers_write_of_their_own_is_no_leak(optimizer):
    model = made(optimizer())
    fit(model)
    assert model.optimizer.num_dp_steps == 4


def loop(optimizer, w, beside, factor=1.0):
    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step(x):
        optimizer.minimize(lambda: tf.reduce_mean(tf.reduce_sum(tf.tanh(x * w * factor), 1)), [w])
        beside(x)

    return step


@pytest.mark.parametrize("beside, said", [
    (lambda x, w, read, optimizer: w.assign_add(tf.reduce_mean(x, 0)), "weight"),
    (lambda x, w, read, optimizer: learning_rate(optimizer).assign(of(x)), "learning_rate"),
    (lambda x, w, read, optimizer: read.assign(of(x)), "reads a variable that the step itself writes"),
])  # fmt: skip
def test_a_leak_in_a_loop_of_ones_own_is_refused_before_the_first_update(beside, said):
    w, read = tf.Variable(normal(4), name="weight"), tf.Variable(1.0, trainable=False)
    optimizer = tfdpfl.DPSGD(1.0, 1.0)
    optimizer.build([w])
    step = loop(optimizer, w, lambda x: beside(x, w, read, optimizer), read)
    with pytest.raises(PrivacyError, match=said):
        step(X)
    assert optimizer.iterations == 0
    assert optimizer.executed == []  # nor does what did not run stand in the way of what does
    loop(optimizer, w, lambda x: None)(X)
    assert optimizer.executed == [(1.0, 1)]


def test_a_step_that_was_traced_by_itself_is_looked_at_again_in_a_function_around_it():
    w = tf.Variable(normal(4), name="weight")
    optimizer = tfdpfl.DPSGD(1.0, 1.0)
    optimizer.build([w])
    step = loop(optimizer, w, lambda x: None)
    step(X)

    @tf.function
    def fine(x):
        step(x)

    fine(X)

    @tf.function
    def around(x):
        step(x)
        w.assign_add(tf.reduce_mean(x, 0))

    @tf.function
    def chosen(x):
        if of(x) > 0.0:
            step(x)

    @tf.function
    def drawn(batches):  # the other function's batch is to be seen nowhere else
        step(X)
        tf.function(lambda: w.assign_add(tf.reduce_mean(next(batches), 0)))()

    before = w.numpy()
    with pytest.raises(PrivacyError, match="weight"):
        around(X)
    with pytest.raises(PrivacyError, match="weight"):
        drawn(iter(tf.data.Dataset.from_tensors(X)))
    with pytest.raises(PrivacyError, match="leaves it out"):
        chosen(X)
    assert optimizer.num_dp_steps == 2
    np.testing.assert_array_equal(before, w)


def test_a_schedule_that_takes_its_rate_from_the_batch_is_refused():
    class FromTheBatch(K.optimizers.schedules.LearningRateSchedule):
        def __call__(self, step):
            return of(self.x)

        def get_config(self):
            return {}

    schedule = FromTheBatch()
    schedule.x = tf.constant(X)
    model = made(tfdpfl.DPSGD(1.0, 1.0, learning_rate=schedule), dict(before=lambda self, x: setattr(schedule, "x", x)))
    with pytest.raises(PrivacyError, match=r"kernel|bias"):
        fit(model)
    assert model.optimizer.iterations == 0


@pytest.mark.skipif(not hasattr(K.optimizers.Optimizer, "compute_gradients"), reason="Keras 3 takes no gradients")
def test_a_gradient_times_a_number_that_the_step_writes_is_refused():
    w, factor = tf.Variable(normal(4), name="weight"), tf.Variable(1.0, trainable=False, name="factor")
    optimizer = tfdpfl.DPSGD(1.0, 1.0)
    optimizer.build([w])

    @tf.function
    def step(x, leak):
        loss = tf.reduce_mean(tf.reduce_sum(tf.tanh(x * w), 1))
        if leak:
            factor.assign(of(x))
        ((g, _),) = optimizer.compute_gradients(loss, [w])
        optimizer.apply_gradients([(g * factor, w)])

    step(X, False)
    assert optimizer.num_dp_steps == 1
    with pytest.raises(PrivacyError, match=r"weight|factor"):
        step(X, True)
    assert optimizer.num_dp_steps == 1


# -- weights, factors and rounding in the loss itself -------------------------------------------------------------

W = tf.Variable(normal(4, 3, seed=1))
MEAN = tf.Variable(normal(4, 3, seed=2), trainable=False)
EAGER = tf.constant(normal(4, 3, seed=4))
losses = lambda x, w: tf.reduce_sum(tf.tanh(x @ w), 1)


def inner_step(x):
    return W - 0.5 * tf.gradients(tf.reduce_mean(losses(x, tf.convert_to_tensor(W))), [W])[0]


DEPENDENT = {
    "an inner step on the batch": inner_step,
    "the batch's mean": lambda x: W + tf.reduce_mean(x, 0)[:, None],
    "how many there are": lambda x: W / tf.cast(tf.shape(x)[0], tf.float32),
    "one example": lambda x: W + x[:1, :3],
    "rows of examples": lambda x: tf.concat([x, x], 0)[:4, :3],
}


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("name", DEPENDENT)
def test_weights_that_are_computed_from_the_batch_are_refused(name, within):
    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step(x):
        w = DEPENDENT[name](x)
        sums = lambda: clipped_gradients(tf.reduce_mean(losses(x, w)), [w], 1.0).sum[0]
        return tf.function(sums)() if within else sums()

    with pytest.raises(PrivacyError, match=r"variables\[0\] \(.*is computed from the batch"):
        step.get_concrete_function()


@tf.function
def sums_of(x, w):
    return clipped_gradients(tf.reduce_mean(losses(x, w)), [w], 1.0).sum[0]


@tf.autograph.experimental.do_not_convert
def turns(x, w, step):
    """``w`` goes from turn to turn."""
    once = lambda w: step(w, clipped_gradients(tf.reduce_mean(losses(x, w)), [w], 1.0).sum[0])
    return tf.while_loop(lambda i, w: i < 2, lambda i, w: (i + 1, once(w)), (0, w))[1]


HANDED_IN = {
    "to a function": sums_of,
    "by way of another": lambda x, w: tf.function(lambda x, w: sums_of(x, tf.identity(w)))(x, w),
    "captured on the way": lambda x, w: tf.function(lambda: sums_of(x, w))(),
    "after one that is public": lambda x, w: sums_of(x, tf.convert_to_tensor(W)) + sums_of(x, w),
    "to a loop": lambda x, w: turns(x, w, lambda w, s: 0.5 * w),
    "in a branch": lambda x, w: tf.cond(W[0, 0] > 9.0, lambda: sums_of(x, w), lambda: tf.zeros([4, 3])),
}


@pytest.mark.parametrize("name", HANDED_IN)
def test_weights_from_the_batch_that_are_handed_to_another_function_are_refused(name):
    f = tf.function(lambda x: HANDED_IN[name](x, inner_step(x)), input_signature=[tf.TensorSpec([None, 4])])
    with pytest.raises(PrivacyError, match=r"variables\[0\] \(.*is computed from the batch"):
        f(X)
    public = lambda x: HANDED_IN[name](x, 2.0 * W)
    tf.function(public, input_signature=[tf.TensorSpec([None, 4])])(X)


def test_weights_that_a_turn_of_a_loop_takes_from_the_batch_are_refused():
    f = tf.function(lambda x: turns(x, 2.0 * W, lambda w, s: w - s), input_signature=[tf.TensorSpec([None, 4])])
    with pytest.raises(PrivacyError, match=r"variables\[0\] \(.*is computed from the batch"):
        f(X)


def test_weights_that_the_outermost_function_is_given_are_public():
    outer = tf.function(lambda x, w: HANDED_IN["by way of another"](x, w))
    np.testing.assert_allclose(outer(X, tf.constant(W)), sums_of(X, tf.constant(W)), rtol=1e-6)


@pytest.mark.parametrize("weights", [
    lambda x: tf.convert_to_tensor(W), lambda x: 2.0 * W - MEAN, lambda x: tf.constant(normal(4, 3, seed=3)),
    lambda x: 0.1 * tf.ones([4, 3]) * tf.cast(tf.shape(x)[1], tf.float32), lambda x: EAGER,
], ids=["read", "made of variables", "constant", "made of a public length", "eager"])  # fmt: skip
@pytest.mark.parametrize("within", [False, True])
@pytest.mark.one_stack
def test_weights_that_are_public_tensors_are_exact(weights, within):
    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def norms(x):
        w = weights(x)
        found = lambda: clipped_gradients(tf.reduce_mean(losses(x, w)), [w], 1.0).norms
        return tf.function(found)() if within else found(), w

    got, w = norms(X)
    want = helpers.norms_of(helpers.per_example_gradients(lambda x: losses(x, v), X, [v := tf.Variable(w)]))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("factor", [
    lambda: tf.Variable(10.0, trainable=False), lambda: tf.Variable(10.0), lambda: tf.constant(10.0),
], ids=["variable", "trainable", "constant"])  # fmt: skip
def test_a_factor_of_the_loss_is_a_factor_of_the_gradient(factor):
    factor = factor()
    weighted = lambda x: losses(x, W) * factor
    engine = lambda reduce: helpers.engine(lambda x: losses(x, W), X, [W], 5.0, reduce=reduce)[:2]
    sums, norms = engine(lambda each: tf.reduce_mean(each) * factor)
    gradients = helpers.per_example_gradients(weighted, X, [W])
    np.testing.assert_allclose(norms, helpers.norms_of(gradients), rtol=1e-5)
    helpers.assert_close(sums, helpers.clipped_sums(gradients, 5.0))


def test_what_is_rounded_has_no_gradient():
    rounded = lambda x: losses(x, W) + losses(x, tf.cast(tf.cast(3.0 * W, tf.int32), tf.float32))
    again = lambda x: losses(x, W) + losses(x, tf.cast(tf.cast(W, tf.int32), tf.float32))
    for f in (rounded, again):
        helpers.check(f, X, [W])


def test_weights_that_are_no_tensors_are_refused():
    with pytest.raises(PrivacyError, match=r"variables\[0\] is ndarray, not a variable or a tensor"):
        tf.function(lambda x: sums_of.python_function(x, normal(4, 3)))(X)


def test_a_variable_that_is_given_twice_is_refused():
    with pytest.raises(ValueError, match=r"variables\[1\] is variables\[0\] again"):
        helpers.engine(lambda x: losses(x, W), X, [W, W], 1.0)


@pytest.mark.skipif(not helpers.KERAS_3, reason="Keras 2 hands the loss and takes the gradients in one call")
def test_two_losses_that_are_handed_over_before_one_update_are_refused():
    optimizer = tfdpfl.DPSGD(1.0, 0.0)
    optimizer.build([W])

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step(x):
        for factor in (1.0, 2.0):
            optimizer.scale_loss(tf.reduce_mean(factor * losses(x, W)))
        optimizer.apply([None], [W])

    with pytest.raises(PrivacyError, match="Add the losses up"):
        step(X)


def check_a_factor(wrapped):
    """A variable that multiplies the loss is part of what is clipped."""
    w, factor = tf.Variable(normal(4, 3, seed=1)), tf.Variable(10.0, trainable=False)
    optimizer = wrapped(tfdpfl.DPSGD(5.0, 0.0, learning_rate=1.0, expected_batch_size=1))
    optimizer.build([w])

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step(x):
        optimizer.minimize(lambda: tf.reduce_mean(losses(x, w)) * factor, [w])

    want = helpers.clipped_sums(helpers.per_example_gradients(lambda x: 10.0 * losses(x, w), X, [w]), 5.0)
    before = w.numpy()
    step(X)
    helpers.assert_close([before - w.numpy()], want, 1e-4)


@pytest.mark.skipif(helpers.KERAS_3, reason="Keras 3 refuses the wrapper")
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_factor_under_a_loss_scale_is_a_factor(dynamic):
    scale = {"dynamic": dynamic, "initial_scale": 64.0}
    check_a_factor(lambda inner: K.mixed_precision.LossScaleOptimizer(inner, **scale))


def test_a_factor_without_a_loss_scale_is_clipped():
    check_a_factor(lambda inner: inner)


@pytest.mark.parametrize("layer, beside", [
    (lambda x: x - tf.reduce_mean(x, 0), None), (lambda x: x, LEAKS["weight after"][0]["after"]),
])  # fmt: skip
def test_the_sentence_ends_a_short_traceback(layer, beside):
    """Of our own lines there is where the loss was handed over, not the walk through the graph."""

    class Model(Beside):
        def call(self, x):
            return self.dense(layer(x))

    model = Model(after=beside)
    model(X)
    model.compile(tfdpfl.DPSGD(1.0, 1.0), "mse")
    with pytest.raises(PrivacyError) as refused:
        fit(model)
    said = "".join(traceback.format_exception(refused.value))
    assert "batch_axis.py" not in said
    assert said.count(os.path.dirname(tfdpfl.__file__)) <= 6
    assert len(said.splitlines()) < 60
    assert re.search(r"treats each example|so each example|writes batch data to .*bias", said.strip().splitlines()[-1])


@pytest.mark.parametrize("batch", [None, 12])
def test_what_a_loss_is_divided_by_is_the_same_for_static_batches(batch):
    """A number, which may be that of the batch; the batch size; all entries of the batch."""
    number = lambda t: tf.cast(t, tf.float32)
    divisors = [lambda x: 12.0, lambda x: 7.0, lambda x: number(tf.shape(x)[0]), lambda x: number(tf.size(x))]

    @tf.function(input_signature=[tf.TensorSpec([batch, 4])])
    def norms(x):
        return [clipped_gradients(tf.reduce_sum(losses(x, W)) / divisor(x), [W], 1.0).norms for divisor in divisors]

    own = helpers.norms_of(helpers.per_example_gradients(lambda x: losses(x, W), X, [W]))
    for found, of_one in zip(norms(X), [12.0, 7.0, 1.0, 4.0], strict=True):
        np.testing.assert_allclose(found, own / of_one, rtol=1e-5)


def test_an_integer_that_equals_the_batch_size_is_kept_and_warned_of():
    divided = lambda each: tf.reduce_sum(each) / tf.cast(12, tf.float32)
    engine = lambda batch: helpers.engine(lambda x: losses(x, W), X, [W], 5.0, reduce=divided, batch=batch)
    own = helpers.norms_of(helpers.per_example_gradients(lambda x: losses(x, W), X, [W]))
    np.testing.assert_allclose(engine(None)[1], own / 12, rtol=1e-5)
    with pytest.warns(UserWarning, match=r"divided by the number 12.*write tf\.shape\(x\)\[0\]"):
        np.testing.assert_allclose(engine(12)[1], own / 12, rtol=1e-5)
