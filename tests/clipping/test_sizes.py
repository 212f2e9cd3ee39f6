"""Batches of a known size get what batches of a free size get: the same clipped sums, or the same refusal; and the loss
that is trained is the loss as it is written."""

import random
import re

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, assert_close, example_losses, normal, per_example_gradients, rng, signature
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.clipping import clipped_gradients, per_example_norms

# -- one answer ------------------------------------------------------------------------------------------------------


def answer(losses, x, variables, batch):
    """The clipped sums and norms, or the sentence of the refusal."""
    rows = len(tf.nest.flatten(x)[0])

    @tf.function(input_signature=[signature(x, batch)], autograph=False)
    def step(x):
        found = clipped_gradients(tf.reduce_mean(losses(x)), variables, 0.5)
        return [s for s in found.sum if s is not None], found.norms

    try:
        sums, norms = step(tf.nest.map_structure(tf.constant, x))
    except PrivacyError as error:
        return re.sub(r"_\d+\b", "", str(error).splitlines()[-1])  # Keras numbers its layers
    assert len(norms) == rows
    return [s.numpy() for s in [*map(tf.convert_to_tensor, sums), norms]]


def agree(losses, x, variables):
    known, free = (answer(losses, x, variables, batch) for batch in (len(tf.nest.flatten(x)[0]), None))
    assert type(known) is type(free), (known, free)
    if isinstance(free, str):
        assert known == free
    else:
        assert_close(known, free, 1e-6)


def of_layers(x, layers):
    return of_model(K.Sequential(layers()), x)


def of_model(model, x):
    losses = lambda x: example_losses(model(x))
    losses(tf.nest.map_structure(tf.constant, x))
    return losses, x, list(model.trainable_variables)


def cases():
    """(name, a function that makes what `agree` compares) of all model sets that the tests of this folder have."""
    import layer_cases as layers
    import loop_cases as loops
    import mixing_cases as mixing
    import test_architectures as architectures
    import test_fallback as unopened
    import test_lists as lists
    import test_matrices as matrices
    import test_random as draws
    import test_refusals as refusals
    import test_segments as segments
    from test_gradients import FUNCTIONAL
    from test_inline_control_flow import OPENED
    from test_shapes import SPREAD

    for name, (x, made) in layers.SIMPLE.items():
        if x.dtype != object:
            yield f"layer {name}", lambda x=x, made=made: of_layers(x, made)
    for name, made in FUNCTIONAL.items():
        yield f"model {name}", lambda made=made: of_model(*made())
    for name, (function, shape) in SPREAD.items():
        yield f"spread {name}", lambda f=function, s=shape: of_layers(
            layers.sequence, lambda: [layers.tanh(4), layers.Custom(f, s), L.Flatten()])  # fmt: skip
    for made in [*architectures.EXACT, *architectures.REFUSED]:
        yield f"architecture {made.__name__}", lambda made=made: of_model(*made())
    for name, function in {**OPENED, **unopened.CLOSED, **unopened.REFUSED}.items():
        yield f"loop {name}", lambda f=function: (lambda x: example_losses(f(x)), loops.X, loops.used(f))
    variables = [mixing.W, mixing.W8, mixing.TABLE]
    for family in (refusals, lists, matrices, draws, segments):
        for name, function in family.MIXING.items():
            yield f"mixing {name}", lambda f=function: (lambda x: tf.reshape(f(x), [-1]), normal(4, 4), variables)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
def test_known_and_free_sizes_get_the_same_answer(part):
    """A fortieth of all models. Each belongs to the same part whatever models are added."""
    for name, make in cases():
        if random.Random(name).randrange(80) == part:
            K.utils.set_random_seed(1)
            losses, x, variables = make()
            try:
                agree(losses, x, variables)
            except Exception as error:
                raise AssertionError(name) from error


class Token(L.Layer):
    def build(self, _):
        self.token = self.add_weight(name="token", shape=(1, 1, 4), initializer="ones", trainable=False)
        self.built = True

    def call(self, x):
        return tf.concat([tf.repeat(tf.convert_to_tensor(self.token), tf.shape(x)[0], 0), x], 1)


def frozen(layer):
    layer.trainable = False
    return layer


GUESSED = {  # refused once where the size was known, and trained where it was free
    "frozen lstm": lambda: [frozen(L.LSTM(3))],
    "frozen class token": lambda: [Token(), L.Flatten()],
    "public rows": lambda: [L.Lambda(lambda x: x + tf.gather(tf.eye(4), tf.zeros([tf.shape(x)[0], 1], tf.int32))),
                            L.Flatten()],
    "a front axis of one": lambda: [L.Lambda(lambda x: tf.reshape(x, [1, -1, 12])[0])],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rows"), [
    pytest.param("frozen lstm", 3, marks=pytest.mark.both_stacks), ("frozen class token", 3), ("public rows", 3),
    ("a front axis of one", 1)])  # fmt: skip
def test_arrays_whose_length_the_batch_divides_train_as_others_do(name, rows):
    """Of three words, and so as many as examples."""
    x, y = normal(rows, 3, 4), normal(rows, 1, seed=1)

    def update(*data, **fit):
        K.utils.set_random_seed(1)
        model = K.Sequential([K.Input((3, 4)), *GUESSED[name](), L.Dense(1, kernel_initializer="ones")])
        model.compile(tfdpfl.DPSGD(0.1, 0.0, learning_rate=1.0), "mse")
        before = model.get_weights()
        model.fit(*data, verbose=0, shuffle=False, **fit)
        return [b - a for a, b in zip(model.get_weights(), before, strict=True)]

    free = update(tf.data.Dataset.from_tensor_slices((x, y)).batch(rows))
    assert_close(update(x, y, batch_size=rows), free)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_stateful_layer_is_refused_for_what_it_keeps():
    model = K.Sequential([K.Input((3, 4), batch_size=6), L.LSTM(3, stateful=True), L.Dense(1)])
    model.compile(tfdpfl.DPSGD(0.1, 1.0), "mse")
    with pytest.raises(PrivacyError, match="reads a variable that the step itself writes batch data to"):
        model.fit(normal(6, 3, 4), normal(6, 1), batch_size=6, verbose=0)


# -- the loss as it is written -----------------------------------------------------------------------------------------

FORMS = {
    "s / n": lambda s, n, k: s / n, "s / T": lambda s, n, k: s / k, "s / (T - 1)": lambda s, n, k: s / (k - 1),
    "s / T / n": lambda s, n, k: s / k / n, "s / n / T": lambda s, n, k: s / n / k,
    "s / 7 / n": lambda s, n, k: s / 7.0 / n, "s / (n T)": lambda s, n, k: s / (n * k),
    "(1 / n) s": lambda s, n, k: (1 / n) * s, "s / (n T + n)": lambda s, n, k: s / (n * k + n),
}  # fmt: skip


def all_forms(x, w, forms=FORMS):
    y = tf.tanh(x @ w)
    number = lambda t: tf.cast(t, tf.float32)
    return [f(tf.reduce_sum(y**2), number(tf.shape(y)[0]), number(tf.shape(y)[1])) for f in forms]


def check_forms(forms, batch, rows, length):
    w, x = tf.Variable(normal(2, 3)), normal(rows, length, 2, seed=1)

    @tf.function(input_signature=[tf.TensorSpec([batch, length, 2])], autograph=False)
    def norms(x):
        return [per_example_norms(loss, [w]) for loss in all_forms(x, w, forms)]

    for i, found in enumerate(norms(tf.constant(x))):
        for row in range(rows):
            with tf.GradientTape() as tape:
                loss = all_forms(x[row : row + 1], w, forms)[i]
            np.testing.assert_allclose(found[row], tf.norm(tape.gradient(loss, w)), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "length"), [(3, 6), (4, 5)])
def test_what_a_loss_is_divided_by_is_what_it_says(rows, length):
    """Each example's loss is the expression on a batch of that example, whether the size divides the length or not."""
    check_forms(list(FORMS.values()), rows, rows, length)


factors = st.lists(st.sampled_from(["n", "k", "7", "k-1", "1"]), max_size=3)


@pytest.mark.slow
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(over=factors, times=st.booleans(), rows=st.integers(2, 5), times_length=st.integers(1, 3), known=st.booleans())
def test_any_quotient_of_sizes_and_lengths_is_what_it_says(over, times, rows, times_length, known):
    """With a length that the size divides."""

    def form(s, n, k):
        of = {"n": n, "k": k, "7": 7.0, "k-1": k - 0.5, "1": tf.constant(1.0)}
        for factor in over:
            s = (1 / of[factor]) * s if times else s / of[factor]
        return s

    check_forms([form], rows if known else None, rows, rows * times_length)


@pytest.mark.slow
@pytest.mark.parametrize("own_step", [True, False])
def test_an_unreduced_loss_is_summed_over_positions_as_the_tape_sums_it(own_step):
    """[batch, words], whose gradient is that of the sum. The mean over the batch alone is taken by the optimizer."""
    x, y, w = normal(4, 5, 3), rng().integers(0, 2, (4, 5)), tf.Variable(normal(3, 2))
    losses = lambda x, y: tf.nn.sparse_softmax_cross_entropy_with_logits(y, x @ w)
    optimizer = tfdpfl.DPSGD(1e9, 0.0, learning_rate=1.0)

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            value = losses(x, y)
        if own_step:
            optimizer.apply_gradients(zip(tape.gradient(value, [w]), [w], strict=True))
        else:
            optimizer.minimize(value, [w], tape=tape)

    with tf.GradientTape() as tape:
        value = losses(x, y)
    want = tape.gradient(value, w).numpy() / 4
    before = w.numpy()
    step(tf.constant(x), tf.constant(y))
    np.testing.assert_allclose(before - w.numpy(), want, rtol=1e-4, atol=1e-6)


# -- tracing again -----------------------------------------------------------------------------------------------------


def test_a_size_that_is_a_python_number_is_refused_with_what_to_write():
    w = tf.Variable(normal(4))

    @tf.function
    def step(x):
        return clipped_gradients(tf.reduce_sum(x * w) / x.shape[0], [w], 1.0).norms

    with pytest.raises(PrivacyError, match=r"batches of 3 examples, but not.*tf\.shape\(x\)\[0\] in place of x\.shape"):
        step(normal(3, 4))


def test_an_error_after_the_loss_was_read_is_not_blamed_on_the_size():
    w = tf.Variable(normal(4))

    @tf.function
    def step(x):
        norms = clipped_gradients(tf.reduce_sum(x * w), [w], 1.0).norms
        raise ValueError("no such file")
        return norms

    with pytest.raises(ValueError, match="no such file"):
        step(normal(3, 4))


def test_a_graph_that_cannot_be_traced_again_is_refused():
    with (
        tf.Graph().as_default(),
        pytest.raises(PrivacyError, match=r"fixed size 3.*tf\.TensorSpec\(\[None, \.\.\.\]\)"),
    ):
        x, w = tf.compat.v1.placeholder(tf.float32, [3, 4]), tf.compat.v1.placeholder(tf.float32, [4])
        clipped_gradients(tf.reduce_sum(x * w), [w], 1.0)


def test_weights_that_are_as_long_as_the_batch_keep_their_shape():
    x, w = normal(3, 3), tf.constant(normal(3, seed=1))

    @tf.function
    def step(x, w):
        found = clipped_gradients(tf.reduce_sum(tf.tanh(tf.linalg.matvec(x, w))), [w], 1e9)
        assert found.sum[0].shape == [3] and w.shape == [3] and x.shape == [None, 3]
        return found.norms

    losses = lambda x: tf.tanh(tf.linalg.matvec(x, w))
    want = np.linalg.norm(per_example_gradients(losses, x, [w])[0], axis=1)
    np.testing.assert_allclose(step(x, w), want, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("way", [
    "a loop over a data set", "an iterator", "xla", "a reduction"])  # fmt: skip
def test_batches_are_freed_wherever_they_come_in(way):
    w, x = tf.Variable(normal(4)), normal(6, 4)
    data = tf.data.Dataset.from_tensor_slices(x).batch(3, drop_remainder=True)
    sizes = []

    def norms(x):
        sizes.append(x.shape[0])
        return per_example_norms(tf.reduce_sum(tf.tanh(x * w)) / tf.cast(tf.size(x), tf.float32), [w])

    def over_the_data():
        total = tf.zeros([])
        for batch in data:
            total += tf.reduce_sum(norms(batch))
        return total

    def reduced():
        return data.reduce(tf.zeros([]), lambda total, batch: total + tf.reduce_sum(norms(batch)))

    inner = tf.function(norms, jit_compile=way == "xla")
    iterator = iter(data)
    total = {
        "a loop over a data set": over_the_data, "a reduction": reduced,
        "an iterator": lambda: tf.add_n([tf.reduce_sum(norms(next(iterator))) for _ in range(2)]),
    }.get(way, lambda: tf.add_n([tf.reduce_sum(inner(tf.constant(part))) for part in np.split(x, 2)]))  # fmt: skip
    own = per_example_gradients(lambda x: tf.reduce_sum(tf.tanh(x * w), 1) / 4, x, [w])[0]
    np.testing.assert_allclose(tf.function(total)(), np.linalg.norm(own, axis=1).sum(), rtol=1e-5)
    assert sizes[0] == 3 and sizes[-1] is None


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_model_that_is_built_in_its_first_step_is_built_once():
    model = K.Sequential([L.Dense(3), L.Dense(1)])
    model.compile(tfdpfl.DPSGD(1e9, 0.0, learning_rate=0.1), "mse")
    x, y = normal(4, 3), normal(4, 1, seed=1)
    model.fit(x, y, batch_size=4, verbose=0)
    assert len(model.trainable_variables) == 4
    assert np.abs(model.get_weights()[0]).sum() > 0
    assert model.optimizer.num_dp_steps == 1


@pytest.mark.parametrize("built", [True, False])
def test_variables_that_the_first_step_makes_cost_no_second_trace(built):
    """Those of metrics, and of layers in a model that has seen no input."""
    traced = []

    class Counted(L.Dense):
        def call(self, x):
            traced.append(x.shape[0])
            return super().call(x)

    class Unbuilt(K.Model):
        def __init__(self):
            super().__init__()
            self.layer = Counted(3)

        def call(self, x):
            return self.layer(x)

    model = K.Sequential([K.Input((4,)), Counted(3)]) if built else Unbuilt()
    model.compile(tfdpfl.DPSGD(1.0, 0.0, learning_rate=0.0), "mse", metrics=["mae"])
    x, y = normal(12, 4), normal(12, 3)
    traced.clear()
    found = model.fit(x, y, batch_size=4, verbose=0).history
    assert traced[-1] is None and len(traced) <= (1 if built else 2)  # Keras 3 builds by a call
    np.testing.assert_allclose(found["mae"], [np.abs(model.predict(x, verbose=0) - y).mean()], rtol=1e-5)


def test_a_variable_that_begins_with_a_value_of_the_step_is_made_in_it():
    made = []

    @tf.function
    def step(x):
        clipped_gradients(tf.reduce_mean(example_losses(x @ w)), [w], 0.5)
        if not made:
            made.append(tf.Variable(tf.reduce_sum(x)))
        return made[0].assign_add(1.0)

    w, x = tf.Variable(normal(3, 2)), tf.constant(normal(4, 3))
    np.testing.assert_allclose([step(x), step(x)], tf.reduce_sum(x) + np.array([1, 2], "float32"), rtol=1e-5)
