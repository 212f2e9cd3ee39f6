"""Loops and calls that use weights, against examples one by one."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import (
    KERAS_3,
    K,
    L,
    assert_close,
    check,
    check_model,
    clipped_sums,
    engine,
    example_losses,
    normal,
    per_example_gradients,
    rng,
)
from loop_cases import TABLE, A, B, C, D, R, S, T, U, X, over_time, used, weights, zeros

import tfdpfl
from tfdpfl.clipping import clipped_gradients, per_example_norms
from tfdpfl.clipping.pipeline import ClippingPipeline
from tfdpfl.errors import PrivacyError

COUNTER = tf.Variable(0.0)


def several_ways(x):
    """One matrix used twice in a turn, once outside; a scale, a bias, and a row looked up."""
    table = tf.convert_to_tensor(TABLE)

    def turn(t, step, h):
        ids = tf.cast(tf.abs(step[:, 0]) * 2, tf.int32) % 6
        h = tf.tanh(step @ A + h @ R + C) * S
        return tf.tanh(h @ R) + tf.gather(table, ids)

    return over_time(x, turn, zeros(x)) @ R


def normalised(x):
    def turn(t, step, h):
        y = step @ A + h @ R
        mean, variance = tf.nn.moments(y, [1], keepdims=True)
        return tf.tanh((y - mean) * tf.math.rsqrt(variance + 1e-3) * S + C)

    return over_time(x, turn, zeros(x))


def made_of_weights(x):
    """The matrix of a turn is computed in the turn, from weights."""
    return over_time(x, lambda t, step, h: tf.tanh(step @ (2 * A * S) + h @ tf.transpose(R)), zeros(x))


def with_memory(x):
    """What examples hold outside of the loop is looked at in each turn."""
    memory = tf.tanh(x @ A)

    def turn(t, step, h):
        attention = tf.nn.softmax(tf.einsum("btu,bu->bt", memory, h @ R))
        return tf.tanh(tf.einsum("bt,btu->bu", attention, memory) + step @ A)

    return over_time(x, turn, tf.broadcast_to(S, tf.shape(zeros(x))))


def fewer_turns(x):
    """The limit of the counter is not what ends the loop."""
    steps = tf.transpose(x, [1, 0, 2])
    return tf.while_loop(
        lambda t, n, s: tf.logical_and(t < 100, n > 2),
        lambda t, n, s: (t + 1, n - 1, tf.tanh(tf.gather(steps, t) @ A + s @ R)),
        (tf.constant(0), tf.constant(T), zeros(x)),
    )[2]


def by_map(x):
    return tf.map_fn(lambda step: tf.tanh(step @ A + C), tf.transpose(x, [1, 0, 2]))[-1]


def by_scan(x):
    return tf.scan(lambda h, step: tf.tanh(step @ A + h @ R), tf.transpose(x, [1, 0, 2]), zeros(x))[-1]


def two_loops(x):
    return over_time(x, lambda t, step, h: tf.tanh(step @ A + h @ R), normalised(x))


def rows_of_an_example(x):
    """[batch x positions, width] in a loop."""
    flat = tf.reshape(x, [-1, D])
    (y,) = tf.while_loop(lambda y: True, lambda y: (tf.tanh(y @ R + C),), (flat,), maximum_iterations=3)
    return tf.reshape(y, [-1, T, D])


def a_loop_in_a_call(x):
    inner = tf.function(lambda x: over_time(tf.tanh(x @ A), lambda t, step, h: tf.tanh(step @ R + h), zeros(x)) @ R)
    return inner(x)


def own_gradient(x):
    """TensorFlow gives silu a gradient that holds on to tensors of the loop's body."""
    return over_time(x, lambda t, step, h: tf.nn.silu(step @ A + h @ R), zeros(x))


def terms_of_sums(x):
    """Terms that have a sum's gradient, and terms that have not: used once more, repeated, scaled, or given out."""

    def turn(t, step, state):
        h, g = state
        again, out, scaled, once = step @ A, h @ R, (h @ R) * S, tf.tanh(h) @ R
        repeated = step @ tf.expand_dims(S, 1)
        y = tf.nn.bias_add(again + once + scaled, C) + (tf.nn.bias_add(out, C) + repeated)
        return tf.tanh(y) * again, out

    h, g = over_time(x, turn, (zeros(x) + 1, zeros(x)))
    return h + g


def a_mean_beside(x):
    """A loop that carries a mean of the batch, and lists as a tape's, which the result does not take."""

    def turn(t, step, state):
        h, mean, items = state
        h = tf.tanh(step @ A + h @ R)
        items = tf.raw_ops.TensorListPushBack(input_handle=items, tensor=tf.reduce_mean(h, 0))
        return h, mean + tf.reduce_mean(h), items

    none = tf.raw_ops.EmptyTensorList(element_shape=[U], max_num_elements=-1, element_dtype=tf.float32)
    return over_time(x, turn, (zeros(x), tf.constant(0.0), none))[0]


def states_of_earlier_turns(x):
    """A turn reads a list that nothing takes after the loop."""
    items = tf.TensorArray(tf.float32, T + 1, clear_after_read=False, element_shape=[None, U]).write(0, zeros(x))

    def turn(t, step, state):
        h = tf.tanh(step @ A + state[1].read(t) @ R)
        return h, state[1].write(t + 1, h)

    return over_time(x, turn, (zeros(x), items))[0]


OPENED = {f.__name__: f for f in (several_ways, normalised, made_of_weights, with_memory, fewer_turns, by_map, by_scan,
                                  two_loops, rows_of_an_example, a_loop_in_a_call, own_gradient,
                                  terms_of_sums, a_mean_beside, states_of_earlier_turns)}  # fmt: skip


def falls_back(f, variables):
    found = []

    @tf.function(input_signature=[tf.TensorSpec([None, T, D])])
    def step(x):
        found.extend(
            part.replayed for part in ClippingPipeline(tf.reduce_mean(example_losses(f(x))), variables, None).parts
        )

    step.get_concrete_function()
    return any(found)


ON_BOTH = ("several_ways", "by_scan", "a_loop_in_a_call", "own_gradient", "terms_of_sums")
STATIC = ("normalised", "with_memory", "by_map", "rows_of_an_example", "a_loop_in_a_call")


def marks(name):
    """On the older stack one loop of each way in which TensorFlow builds them, and of each that it differentiates."""
    slow, alone = name != "a_loop_in_a_call", name not in ON_BOTH
    return [pytest.mark.slow] * slow + [pytest.mark.one_stack] * alone


@pytest.mark.parametrize(("f", "batch"), [
    *[pytest.param(f, None, id=f"{name}-free", marks=marks(name)) for name, f in OPENED.items()],
    *[pytest.param(OPENED[name], B, id=f"{name}-static", marks=marks("static")) for name in STATIC],
])  # fmt: skip
@pytest.mark.slow
def test_loop_agrees_without_the_fallback(f, batch, replayed):
    variables = used(f)
    assert len(variables) >= 1
    check(lambda x: example_losses(f(x)), X, variables, batch=batch)
    assert replayed == [False]


@pytest.mark.parametrize("taken", ["mean", "grown by the mean", "turns by the mean"])
def test_what_mixes_examples_in_a_loop_is_refused_where_it_reaches_the_result(taken):
    def losses(x):
        limit = tf.constant(float(T))

        def turn(t, step, state):
            h, mean = state
            h = tf.tanh(step @ A + h @ R)
            mean += 2 + tf.reduce_mean(h)
            return (h + mean if taken == "grown by the mean" else h), mean

        if taken == "turns by the mean":
            h = tf.while_loop(lambda h, mean: mean < limit, lambda h, mean: turn(0, x[:, 0], (h, mean)),
                              (zeros(x), tf.constant(0.0)))[0]  # fmt: skip
        else:
            h, mean = over_time(x, turn, (zeros(x), tf.constant(0.0)))
        return example_losses(h + mean if taken == "mean" else h)

    with pytest.raises(PrivacyError, match="Mean"):
        check(losses, X, [A, R])


def dropped(x):
    """As `SimpleRNN(recurrent_dropout=...)` of Keras 2: what is left out is drawn in the loop."""
    turn = lambda t, step, h: tf.tanh(step @ A + tf.nn.dropout(h, 0.5) @ R)
    return over_time(x, turn, zeros(x) + 1)


def dropped_in_a_call(x):
    return tf.function(lambda x: tf.nn.dropout(tf.tanh(x[:, 0] @ A), 0.5) @ R)(x)


@pytest.mark.parametrize(("f", "batch"), [
    (dropped, B), *[pytest.param(f, None, marks=[pytest.mark.slow, pytest.mark.one_stack]) for f in (
        dropped, dropped_in_a_call)],
])  # fmt: skip
@pytest.mark.slow
def test_what_a_loop_or_a_call_draws_is_the_same_in_the_loss_and_in_its_gradients(f, batch, replayed):
    """TensorFlow's gradients of the one forward pass there is, not those of another draw."""

    @tf.function(input_signature=[tf.TensorSpec([batch, T, D])])
    def step(x):
        losses = example_losses(f(x))
        result = clipped_gradients(tf.reduce_mean(losses), [A, R], 0.3)
        return [tf.gradients(losses[i], [A, R]) for i in range(B)], result.sum, result.norms

    want, sums, norms = step(tf.constant(X))
    want = [np.stack([w[i].numpy() for w in want]) for i in range(2)]
    assert_close(norms.numpy(), np.sqrt(sum((w**2).sum((1, 2)) for w in want)))
    assert_close([s.numpy() for s in sums], clipped_sums(want, 0.3))
    assert replayed == [False]


def all_or_none(x):
    return 20.0 * tf.cast(tf.random.uniform(tf.shape(x)) < 0.5, tf.float32) * x


def drawn_in_a_call(x, w):
    return tf.function(lambda x: all_or_none(x @ w))(x)


def drawn_in_a_loop(x, w):
    return over_time(x[:, None], lambda t, step, h: h + all_or_none(step @ w), tf.zeros_like(x))


@pytest.mark.parametrize("second", [None, clipped_gradients, per_example_norms])
@pytest.mark.parametrize("f", [drawn_in_a_call, drawn_in_a_loop])
def test_a_second_plan_sees_what_the_first_drew_or_is_refused(f, second):
    """Of one draw, 0 or 20 of w, tanh's gradient is 0: of two it is up to 20."""
    w, v = tf.Variable([[1.0]]), tf.Variable([[1.0]])

    @tf.function(input_signature=[tf.TensorSpec([None, 1])])
    def step(x):
        loss = tf.reduce_mean(tf.tanh(f(x, w) @ v))
        first = clipped_gradients(loss, [w], 100.0).norms
        if second is not None:
            second(loss, [v], *[100.0] * (second is clipped_gradients))
        # and one of a loss that has nothing to do with it
        return first, clipped_gradients(tf.reduce_mean(tf.tanh(x @ v)), [v], 100.0).norms

    if f is drawn_in_a_loop and second is not None:
        with pytest.raises(PrivacyError, match=r"draws random numbers.*Let one optimizer train all"):
            step(tf.ones([64, 1]))
    else:
        first, other = step(tf.ones([64, 1]))
        assert abs(first.numpy()).max() < 1e-6
        assert_close(other.numpy(), np.full(64, 1 - np.tanh(1.0) ** 2))


@pytest.mark.parametrize("drawn", [False, True])
def test_rows_from_outside_of_a_loop_are_each_examples_own(drawn):
    """Drawn rows are not alike: the first may not stand for all."""
    variables = [R, C]

    def losses(x):
        shape = [tf.shape(x)[0], U]
        scale = tf.random.normal(shape) if drawn else tf.fill(shape, 2.0)
        states = tf.constant([3]), scale, x[:, 0]
        free = tf.TensorShape([1]), tf.TensorShape([None, U]), tf.TensorShape([None, U])
        h = tf.while_loop(
            lambda n, m, h: tf.reduce_sum(n) > 0,
            lambda n, m, h: (n - 1, m, tf.tanh((h @ R + C) * m)),
            states,
            shape_invariants=free,
        )[2]
        return example_losses(tf.ensure_shape(h, [None, U]))

    if drawn:
        norms = engine(losses, np.repeat(X[:1], B, 0), variables, 1.0, batch=B)[1]
        assert len(np.unique(norms)) == B
    else:
        check(losses, X, variables, batch=B)


def random_weight(x):
    """Weights drawn anew at each turn are not made outside of the loop."""
    return over_time(x, lambda t, step, h: tf.tanh(step @ A + h @ tf.nn.dropout(R, 0.5)), zeros(x))


def counted(x):
    """A loop that writes is not built a second time."""

    def turn(t, step, h):
        with tf.control_dependencies([COUNTER.assign_add(1.0)]):
            return tf.tanh(step @ A + h @ R)

    return over_time(x, turn, zeros(x))


def counted_in_a_call(x):
    return tf.function(lambda x: tf.tanh(x[:, 0] @ A) @ R + COUNTER.assign_add(1.0))(x)


def drawn_from_a_seed(x):
    """For an example alone the numbers are other ones than in its place of the batch."""
    y = tf.tanh(x[:, 0] @ A)
    drop = lambda: tf.random.stateless_uniform(tf.shape(y), [1, 2]) * y @ R
    return tf.cond(tf.random.uniform([]) < 2, drop, lambda: y)


def drawn_from_a_kept_seed(x):
    """As Keras 3's Dropout: where it goes on from is a variable."""

    def dropped(x):
        seed = tf.stack([tf.cast(COUNTER, tf.int32), 0])
        COUNTER.assign_add(1.0)
        y = tf.tanh(x[:, 0] @ A)
        return tf.random.stateless_uniform(tf.shape(y), seed) * y @ R

    return tf.function(dropped)(x)


@pytest.mark.parametrize("f", [
    random_weight, counted, counted_in_a_call, drawn_from_a_seed, drawn_from_a_kept_seed])  # fmt: skip
def test_draws_and_writes_that_neither_way_can_keep_are_refused(f):
    """The fallback would draw other numbers than the loss saw, and write once more."""
    with pytest.raises(PrivacyError, match=r"would draw or write \(\w+.*other values than it did for the loss"):
        falls_back(f, [A, R])


def test_keras_dropout_in_a_call_is_exact_on_keras_2_and_refused_on_3():
    dropout = L.Dropout(0.5, seed=3)
    f = lambda x: tf.function(lambda x: dropout(tf.tanh(x[:, 0] @ A), training=True) @ R)(x)
    dropout.build((None, U))

    @tf.function(input_signature=[tf.TensorSpec([None, T, D])])
    def step(x):
        losses = example_losses(f(x))
        norms = clipped_gradients(tf.reduce_mean(losses), [A, R], 0.3).norms
        return norms, [tf.linalg.global_norm(tf.gradients(losses[i], [A, R])) for i in range(B)]

    if KERAS_3:  # its seed is a variable
        with pytest.raises(PrivacyError, match="Keras 3's random layers write to their seeds"):
            step(tf.constant(X))
    else:
        norms, want = step(tf.constant(X))
        assert_close(norms.numpy(), tf.stack(want).numpy())


@pytest.mark.slow
@pytest.mark.one_stack
def test_microbatches_of_a_loop_agree():
    x = normal(6, T, D)
    check(lambda x: example_losses(several_ways(x)), x, used(several_ways), m=3)


@pytest.mark.slow
@pytest.mark.one_stack
def test_free_lengths_agree():
    check(lambda x: example_losses(normalised(x)), X, used(normalised), free=True)


@pytest.mark.slow
@pytest.mark.one_stack
def test_a_batch_of_no_examples_gives_zeros():
    @tf.function(input_signature=[tf.TensorSpec([None, T, D])])
    def step(x):
        return clipped_gradients(tf.reduce_sum(example_losses(normalised(x))), used(normalised), 1.0).sum

    for s in step(tf.zeros([0, T, D])):
        assert not s.numpy().any()


@pytest.mark.slow
@pytest.mark.one_stack
def test_two_optimizers_may_share_one_loss():
    """The second finds the loop that was opened for the first."""

    @tf.function(input_signature=[tf.TensorSpec([None, T, D])])
    def step(x):
        loss = tf.reduce_mean(example_losses(several_ways(x)))
        first = clipped_gradients(loss, [A, C, S], 0.5).sum
        return [*first, *clipped_gradients(loss, [R, TABLE], 0.5).sum]

    losses = lambda x: example_losses(several_ways(x))
    want = [s for part in ([A, C, S], [R, TABLE]) for s in clipped_sums(per_example_gradients(losses, X, part), 0.5)]
    assert_close([s.numpy() for s in step(tf.constant(X))], want)


@pytest.mark.slow
def test_what_is_seen_of_the_outputs_stays_what_it_was():
    """The ops between the loop and what else the step gives out are handed the loop's copy."""
    lstm = L.LSTM(U, return_sequences=True)
    model = K.Sequential([K.Input((T, D)), lstm, L.Dense(2)])
    want = model(tf.constant(X)).numpy()

    @tf.function(input_signature=[tf.TensorSpec([None, T, D])])
    def step(x):
        hidden = lstm(x)
        y = model.layers[-1](hidden)
        clipped_gradients(tf.reduce_mean(example_losses(y)), model.trainable_variables, 1.0)
        return y, model.layers[-1](hidden)

    for got in step(tf.constant(X)):
        assert abs(got.numpy() - want).max() < 1e-6


@pytest.mark.parametrize("jit", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_what_is_taken_of_a_loop_after_the_step_is_right(jit):
    def loss(x):  # in a loop that reads variables
        turn = lambda t, h: (t + 1, tf.tanh(x[:, t] @ A + h @ R))
        h = tf.while_loop(lambda t, h: t < T, turn, (tf.constant(0), zeros(x)), maximum_iterations=T)[1]
        return tf.reduce_mean(example_losses(h)), h

    @tf.function(input_signature=[tf.TensorSpec([B, T, D])], jit_compile=jit)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            value, h = loss(x)
        tf.function(lambda: S.assign(S + 0 * R[0]))()  # a variable of which the loop knows nothing
        clipped_gradients(value, [A, R], 0.3)
        return tf.tanh(h), *tape.gradient(value, [x, A, R])

    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        value, h = loss(x)
    want = [tf.tanh(h), *tape.gradient(value, [x, A, R])]
    assert_close([t.numpy() for t in step(x)], [t.numpy() for t in want])


def reading(x):
    """A loop that reads variables by itself."""
    turn = lambda t, h: (t + 1, tf.tanh(x[:, t] @ A + h @ R))
    return tf.while_loop(lambda t, h: t < T, turn, (tf.constant(0), zeros(x)))[1]


def reading_by_the_fallback(x):
    turn = lambda t, h: (t + 1, tf.tanh(x[:, t] @ A + h @ R))
    most = tf.cast(T, tf.float32)
    return tf.while_loop(lambda t, h: tf.cast(t, tf.float32) < most, turn, (tf.constant(0), zeros(x)))[1]


def reading_in_a_call(x):
    return tf.function(lambda x: tf.tanh(x[:, 0] @ A) @ R)(x)


def reading_in_a_branch(x):
    return tf.cond(tf.random.uniform([]) < 2, lambda: tf.tanh(x[:, 0] @ A) @ R, lambda: x[:, 0] @ A)


def halved():
    R.assign(R / 2)


def halved_in_a_call():
    tf.function(halved)()


def halved_in_a_branch():
    tf.cond(tf.random.uniform([]) < 2, halved, lambda: None)


@pytest.mark.parametrize(("f", "write"), [
    (reading, halved),
    *[pytest.param(f, write, marks=[pytest.mark.slow, pytest.mark.one_stack]) for f, write in [
        (reading, halved_in_a_call), (reading, halved_in_a_branch),
        (reading_by_the_fallback, halved), (reading_in_a_call, halved), (reading_in_a_branch, halved)]],
])  # fmt: skip
@pytest.mark.slow
def test_what_a_loop_or_a_call_reads_must_not_be_written_between_loss_and_step(f, write):
    """The copy would read the new value: gradients of another model than the loss is of."""

    def sums(when):
        @tf.function(input_signature=[tf.TensorSpec([None, T, D])])
        def step(x):
            if when == "before":
                write()
            loss = tf.reduce_mean(example_losses(f(x)))
            if when == "between":
                write()
            result = clipped_gradients(loss, [A, R], 0.3).sum
            if when == "after":
                write()
            return result

        return [s.numpy() for s in step(tf.constant(X))]

    with pytest.raises(PrivacyError, match=r"writes to a variable that.*before the loss is computed, or after the"):
        sums("between")
    held = R.numpy()
    for when, scale in ("before", 0.5), ("after", 1.0):
        R.assign(scale * held)
        want = clipped_sums(per_example_gradients(lambda x: example_losses(f(x)), X, [A, R]), 0.3)
        R.assign(held)
        assert_close(sums(when), want)
        assert_close(R.numpy(), held / 2)
        R.assign(held)


@pytest.mark.slow
@pytest.mark.one_stack
def test_two_plans_may_open_loops_of_which_one_starts_where_the_other_ends():
    variables = used(two_loops)

    @tf.function(input_signature=[tf.TensorSpec([None, T, D])])
    def step(x):
        loss = tf.reduce_mean(example_losses(two_loops(x)))
        return ClippingPipeline(loss, variables, None).squared_norms(), clipped_gradients(loss, variables, 0.5).sum

    losses = lambda x: example_losses(two_loops(x))
    each = per_example_gradients(losses, X, variables)
    norms2, sums = step(tf.constant(X))
    assert_close(norms2.numpy(), sum((g**2).reshape(B, -1).sum(1) for g in each))
    assert_close([s.numpy() for s in sums], clipped_sums(each, 0.5))


@pytest.mark.slow
def test_fit_takes_layers_that_drop_out_over_time():
    """Keras 2's hold what cannot be walked through as modules are."""
    model = K.Sequential([K.Input((T, D)), L.LSTM(U, dropout=0.5, recurrent_dropout=0.5), L.Dense(2)])
    model.compile(tfdpfl.DPSGD(l2_norm_clip=1.0, noise_multiplier=1.0), "mse")
    before = [w.copy() for w in model.get_weights()]
    model.fit(X, X[:, 0, :2], batch_size=3, verbose=0)
    assert all((w != v).any() for w, v in zip(model.get_weights(), before, strict=True))


@pytest.mark.slow
def test_a_model_called_through_a_function_is_read_as_if_it_were_not(replayed):
    model = K.Sequential([K.Input((T, D)), L.Dense(8, "tanh"), L.LSTM(U), L.Dense(2)])
    called = tf.function(lambda x: model(x), autograph=False)
    check(lambda x: example_losses(called(x)), X, model.trainable_variables)
    assert replayed == [False]


@pytest.mark.slow
@pytest.mark.one_stack
def test_long_sequences_agree():
    check_model(K.Sequential([K.Input((120, D)), L.GRU(U)]), normal(2, 120, D))


@pytest.mark.slow
@pytest.mark.one_stack
def test_random_loops_agree():
    """Cells drawn at random: which weight meets what, in what order, and how many turns."""
    draw = rng(5)
    for _ in range(8):
        kinds = draw.integers(0, 4, size=draw.integers(1, 4))
        width, most = int(draw.integers(1, 6)), int(draw.integers(1, T + 1))
        kernel, recurrent, bias, scale = weights((D, width), (width, width), (width,), (width,))

        def turn(t, step, h, kinds=kinds, kernel=kernel, recurrent=recurrent, bias=bias, scale=scale):
            y = step @ kernel
            for kind in kinds:
                if kind == 0:
                    y = tf.tanh(y @ recurrent)
                elif kind == 1:
                    y = tf.nn.bias_add(y, bias) + h
                elif kind == 2:
                    y = tf.sin(y * scale)
                else:
                    y = tf.tanh(y - h @ recurrent)
            return y

        used = [kernel]
        used += [recurrent] * bool({0, 3} & set(kinds)) + [bias] * (1 in kinds) + [scale] * (2 in kinds)
        f = lambda x, turn=turn, width=width, most=most: over_time(x, turn, zeros(x, width), most)
        check(lambda x, f=f: example_losses(f(x)), X, used)


@pytest.mark.slow
def test_fit_of_arrays_whose_number_the_batch_size_divides_takes_loops_over_time():
    """Keras then traces a batch of fixed size."""
    model = K.Sequential([K.Input((T, D)), L.LSTM(U), L.Dense(2)])
    x, y = normal(6, T, D), rng(1).integers(0, 2, 6)
    loss = K.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    before, want = model.get_weights(), [np.zeros_like(w) for w in model.get_weights()]
    for i in range(6):
        gradients = per_example_gradients(
            lambda x, i=i: loss(y[i : i + 1].repeat(len(x)), model(x)), x[i : i + 1], model.trainable_variables
        )
        want = [w + s for w, s in zip(want, clipped_sums(gradients, 0.3), strict=True)]
    model.compile(tfdpfl.DPSGD(0.3, 0.0, learning_rate=1.0), K.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=6, verbose=0)
    after = model.get_weights()
    assert_close([b - a for a, b in zip(after, before, strict=True)], [w / 6 for w in want], 1e-4)


def test_a_first_state_that_differs_by_place_in_a_static_batch_is_refused():
    first = normal(B, U, seed=3)
    f = lambda x: over_time(x, lambda t, step, h: tf.tanh(step @ A + h @ R), tf.constant(first))
    with pytest.raises(PrivacyError, match="by its position in the batch"):
        engine(lambda x: example_losses(f(x)), X, [A, R], 1.0, batch=B)


@pytest.mark.slow
def test_a_first_state_with_two_axes_as_long_as_a_known_batch_is_refused_before_the_step():
    w = tf.Variable(normal(4))

    @tf.function(input_signature=[tf.TensorSpec([4, 2, 5, 4])])
    def step(x):
        folded = tf.foldl(lambda h, e: tf.sin(h + e * tf.tanh(w)), tf.transpose(x, [1, 2, 0, 3]), tf.zeros([5, 4, 4]))
        return clipped_gradients(tf.reduce_mean(folded), [w], 1.0).norms

    with pytest.raises(PrivacyError, match="by its position in the batch"):
        step.get_concrete_function()


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.slow
def test_a_loop_that_was_replaced_runs_only_where_its_value_is_asked_for(asked):
    """It reads variables, so TensorFlow runs it unless told otherwise."""
    variables, kept = [A, R, C, S], []

    @tf.function
    def step(x):
        y = normalised(x)
        kept.append(y.op.inputs[0] if y.op.type == "Identity" else y)  # what nobody used when the loss was read
        loss = tf.reduce_sum(y * y, 1)
        with tf.control_dependencies([kept[-1].op]):
            COUNTER.assign_add(1.0)
        result = clipped_gradients(tf.reduce_mean(loss), variables, 0.1)
        return result.sum, (tf.identity(kept[-1]) if asked else tf.zeros([B, U]))

    before = float(COUNTER)
    sums, y = step(tf.constant(X))
    graph = step.get_concrete_function(tf.constant(X)).graph
    todo, runs = [*graph.control_outputs, *(t.op for t in graph.outputs)], set()
    while todo:
        op = todo.pop()
        if op.name not in runs:
            runs.add(op.name)
            todo += [*op.control_inputs, *(t.op for t in op.inputs)]
    loops = [op.name for op in graph.get_operations() if op.type.endswith("While")]
    assert len(loops) == 3  # as it was traced, as it is run, and backward
    assert [name in runs for name in loops] == [asked, True, True]
    assert float(COUNTER) == before + 1  # what waited for it still runs
    each = per_example_gradients(lambda x: tf.reduce_sum(normalised(x) ** 2, 1), X, variables)
    assert_close(sums, clipped_sums(each, 0.1))
    np.testing.assert_allclose(y, normalised(tf.constant(X)) if asked else np.zeros([B, U]), rtol=1e-5)
