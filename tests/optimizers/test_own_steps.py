"""Train steps that ask a tape for gradients and apply them themselves: private, of the very loss, or refused."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.clipping import weight_uses

K = tf.keras
L = K.layers
CLIP, RATE = 0.7, 0.5
X, Y = c.examples(12)
REFUSED = "did not come through the clip"


def sgd(clip=CLIP, **kwargs):
    return tfdpfl.DPSGD(clip, 0.0, learning_rate=RATE, **kwargs)


def moved(sums, n=12):
    return [-RATE * g / n for g in sums]


def assert_same(a, b, rtol=1e-5):
    scale = max(np.abs(x).max() for x in b)
    for x, y in zip(a, b, strict=True):
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol * scale)


def loss_of(model, x, y):
    return tf.reduce_mean(c.cross_entropy()(y, model(x, training=True)))


def step_of(model, optimizer, between=lambda grads, variables, loss: grads, apply=None):
    """A step of one's own, as Keras's guides write it."""

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        variables = model.trainable_variables
        grads = between(tape.gradient(loss, variables), variables, loss)
        if apply is not None:
            apply(grads, variables)
        else:
            optimizer.apply_gradients(zip(grads, variables, strict=True))
        return loss

    return lambda: step(tf.constant(X), tf.constant(Y))


class OwnStep:
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class Own(OwnStep, K.Sequential):
    """A sequence of layers with a step of its own."""


class OwnModel(OwnStep, K.Model):
    """A graph of layers with a step of its own."""


@pytest.mark.slow
def test_a_train_step_that_applies_a_tapes_gradients_is_taken_as_it_is():
    model = Own([K.Input((c.WIDTH,)), L.Dense(c.HIDDEN, activation="tanh"), L.Dense(c.CLASSES)])
    model.set_weights(c.weights())
    model.compile(sgd(), loss=c.cross_entropy())
    update = c.update_of(model, lambda: model.fit(X, Y, batch_size=12, shuffle=False, verbose=0))
    assert_same(update, moved(c.clipped_sum(c.weights(), X, Y, CLIP)))
    assert model.optimizer.num_dp_steps == 1


STEPS, WORDS = 5, 7
ROWS = np.random.default_rng(3).normal(size=(12, STEPS, c.WIDTH)).astype("float32")


def recurrent(layers):
    return Own([K.Input((STEPS, c.WIDTH)), *layers, L.Dense(c.CLASSES)])


def masked():
    return Own([K.Input((STEPS,), dtype="int32"), L.Embedding(WORDS, 3, mask_zero=True), L.GRU(4), L.Dense(c.CLASSES)])


def two_in_turn():
    inputs = K.Input((STEPS, c.WIDTH))
    outputs, state, _ = L.LSTM(3, return_sequences=True, return_state=True)(inputs)
    outputs = L.Concatenate()([L.GRU(3)(outputs), state])
    return OwnModel(inputs, L.Dense(c.CLASSES)(outputs))


class Loop(L.Layer):
    """A loop of the user's own: a matrix on each row, until the last."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], 3), initializer="glorot_uniform", name="w")
        self.u = self.add_weight(shape=(3, 3), initializer="glorot_uniform", name="u")

    def call(self, x):
        rows, state = tf.transpose(x, [1, 0, 2]), tf.zeros([tf.shape(x)[0], 3])
        turn = lambda i, s: (i + 1, tf.tanh(tf.gather(rows, i) @ self.w + s @ self.u))
        return tf.while_loop(lambda i, s: i < tf.shape(rows)[0], turn, (0, state))[1]

    def compute_output_shape(self, shape):
        return (shape[0], 3)


LOOPS = {
    "lstm": lambda: recurrent([L.LSTM(3)]),
    "gru": lambda: recurrent([L.GRU(3, reset_after=False)]),
    "simple": lambda: recurrent([L.SimpleRNN(3, return_sequences=True), L.GlobalAveragePooling1D()]),
    "both ways": lambda: recurrent([L.Bidirectional(L.LSTM(2))]),
    "masked": masked,
    "two in turn": two_in_turn,
    "of the user's own": lambda: recurrent([Loop()]),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.both_stacks] * (k in ("lstm", "masked"))) for k in LOOPS]
)
def test_a_loop_whose_gradient_a_tape_took_is_opened_as_others_are(kind, monkeypatch):
    """For its backward pass a tape lets a loop fill lists, with what mixes the examples (a shape, a sum), too."""
    monkeypatch.setattr(weight_uses, "Replay", None)  # no loop is left to the fallback
    data = np.random.default_rng(0).integers(0, WORDS, (12, STEPS)) if kind == "masked" else ROWS
    assert_moves_by_the_clipped_sum(LOOPS[kind](), data)


def assert_moves_by_the_clipped_sum(model, data):
    model.compile(sgd(), loss=c.cross_entropy())
    weights = model.get_weights()

    def gradient(i):
        with tf.GradientTape() as tape:
            loss = c.cross_entropy()(Y[i : i + 1], model(data[i : i + 1], training=True))
        found = tape.gradient(loss, [getattr(v, "_value", v) for v in model.trainable_variables])
        return [tf.convert_to_tensor(g).numpy() for g in found]

    each = [gradient(i) for i in range(12)]
    factors = [min(1, CLIP / np.linalg.norm(c.flat(g))) for g in each]
    sums = [sum(f * g[k] for f, g in zip(factors, each, strict=True)) for k in range(len(weights))]
    model.fit(data, Y, batch_size=12, shuffle=False, verbose=0)
    assert_same([a - b for a, b in zip(model.get_weights(), weights, strict=True)], moved(sums))


class Endless(L.Layer):
    """A loop without a limit, which only the fallback can differentiate for each example."""

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1], shape[-1]), initializer="glorot_uniform", name="w")

    def call(self, x):
        turn = lambda n, s: (n - 1, tf.tanh(s @ self.w))
        return tf.while_loop(lambda n, s: tf.reduce_sum(n) > 0, turn, (tf.constant([3]), x))[1]

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("kind", [Own, K.Sequential])
def test_a_loop_that_is_left_to_the_fallback_trains(kind):
    """The fallback reads the weight in a loop within a loop, as often as there are examples, and writes nothing."""
    assert_moves_by_the_clipped_sum(kind([K.Input((c.WIDTH,)), Endless(), L.Dense(c.CLASSES)]), X)


def test_the_noise_is_there():
    model = c.classifier()
    step = step_of(model, tfdpfl.DPSGD(1e-3, 1e6, learning_rate=1.0))
    (update,) = [c.flat(c.update_of(model, step)) * 12 / 1e3]
    assert 0.5 < update.std() < 1.5  # the gradient's part is below 1e-6 of it


@pytest.mark.parametrize("way", ["reversed", "a part", "one by one"])
def test_which_variables_are_stepped_on_is_the_users_choice(way):
    model, optimizer = c.classifier(), sgd()

    def apply(grads, variables):
        pairs = list(zip(grads, variables, strict=True))
        optimizer.apply_gradients({"reversed": pairs[::-1], "a part": pairs[2:]}[way])

    def one_by_one(x, y):
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(model, x, y)
        optimizer.apply_gradients([(tape.gradient(loss, v), v) for v in model.trainable_variables])

    once = tf.function(one_by_one)
    step = (lambda: once(tf.constant(X), tf.constant(Y))) if way == "one by one" else step_of(
        model, optimizer, apply=apply)  # fmt: skip
    update = c.update_of(model, step)
    if way != "a part":
        assert_same(update, moved(c.clipped_sum(c.weights(), X, Y, CLIP)))
        return
    gradients = c.per_example_gradients(c.weights(), X, Y)[2:]
    factors = np.minimum(1, CLIP / c.norms_of(gradients))  # the norm is that of the part
    assert_same(update, [np.zeros((c.WIDTH, c.HIDDEN)), np.zeros(c.HIDDEN), *moved(
        np.tensordot(factors, g, 1) for g in gradients)])  # fmt: skip


CHANGED = {
    "scaled": lambda grads, variables, loss: [2 * g for g in grads],
    "clipped": lambda grads, variables, loss: tf.clip_by_global_norm(grads, 1.0)[0],
    "decayed": lambda grads, variables, loss: [g + 0.1 * v for g, v in zip(grads, variables, strict=True)],
    "identity": lambda grads, variables, loss: [tf.identity(g) for g in grads],
    "one is another": lambda grads, variables, loss: [*grads[:-1], tf.ones_like(grads[-1]) * loss],
    "swapped": lambda grads, variables, loss: [*grads[:1], grads[3], grads[2], grads[3]],
}


@pytest.mark.parametrize("change", CHANGED)
def test_what_was_done_to_gradients_is_refused(change):
    model = c.classifier()
    optimizer = sgd()
    step = step_of(model, optimizer, CHANGED[change])
    with pytest.raises(PrivacyError, match=REFUSED):
        step()
    assert_same(model.get_weights(), c.weights(), 0)
    assert optimizer.num_dp_steps == 0


def test_gradients_of_two_losses_are_refused():
    model, optimizer = c.classifier(), sgd()

    @tf.function
    def step(x, y):
        with tf.GradientTape(persistent=True) as tape:
            loss = loss_of(model, x, y)
            other = tf.reduce_mean(model(x) ** 2)
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables[:2]) + tape.gradient(other, variables[2:])
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    with pytest.raises(PrivacyError, match=REFUSED):
        step(X, Y)


def test_gradients_with_output_gradients_are_refused():
    model, optimizer = c.classifier(), sgd()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        variables = model.trainable_variables
        grads = tape.gradient(loss, variables, output_gradients=tf.reduce_sum(x))
        optimizer.apply_gradients(zip(grads, variables, strict=True))

    with pytest.raises(PrivacyError, match=REFUSED):
        step(X, Y)


def test_gradients_from_another_function_or_trace_are_refused():
    model, optimizer = c.classifier(), sgd()
    kept = []

    @tf.function
    def raw(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        kept[:] = tape.gradient(loss, model.trainable_variables)
        return list(kept)

    @tf.function
    def step(x, y):
        optimizer.apply_gradients(zip(raw(x, y), model.trainable_variables, strict=True))

    @tf.function
    def branch(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        pairs = list(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))
        tf.cond(loss > 0, lambda: (optimizer.apply_gradients(pairs), 0)[1], lambda: 0)

    for way in (step, branch):
        with pytest.raises(PrivacyError, match=REFUSED):
            way(X, Y)


def test_targets_that_are_a_list_are_added_up():
    model, optimizer = c.classifier(), sgd()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            losses = [0.25 * loss_of(model, x, y), 0.75 * loss_of(model, x, y)]
        optimizer.apply_gradients(zip(tape.gradient(losses, model.trainable_variables), model.trainable_variables,
                                      strict=True))  # fmt: skip

    assert_same(c.update_of(model, lambda: step(X, Y)), moved(c.clipped_sum(c.weights(), X, Y, CLIP)))


def test_embeddings_whose_gradients_are_slices_are_taken():
    ids, labels = np.random.default_rng(0).integers(0, 9, (12, 4)), X[:, :2]
    model = K.Sequential([K.Input((4,), dtype="int32"), L.Embedding(9, 3), L.Flatten(), L.Dense(2)])
    optimizer = sgd()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables,
                                      strict=True))  # fmt: skip

    def gradient(i):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids[i : i + 1]) - labels[i : i + 1]) ** 2)
        found = tape.gradient(loss, [getattr(v, "_value", v) for v in model.trainable_variables])
        return [tf.convert_to_tensor(g).numpy() for g in found]

    each = [gradient(i) for i in range(12)]
    factors = [min(1, CLIP / np.linalg.norm(c.flat(g))) for g in each]
    sums = [sum(f * g[k] for f, g in zip(factors, each, strict=True)) for k in range(len(each[0]))]
    assert_same(c.update_of(model, lambda: step(tf.constant(ids), tf.constant(labels))), moved(sums))


# -- what a tape did not record ------------------------------------------------------------------------------------


def bootstrapped(model, optimizer, way, stop=lambda t: t):
    """Q-learning: the target follows from the weights, and is a constant for the tape."""

    @tf.function
    def step(x, following):
        if way != "in the tape":
            best = tf.reduce_max(model(following), 1)
        with tf.GradientTape() as tape:
            if way == "in the tape":
                best = tf.reduce_max(model(following), 1)
            loss = tf.reduce_mean((1 + 0.9 * stop(best) - model(x)[:, 0]) ** 2)
            if way == "scaled":
                loss = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        if way == "minimize":
            optimizer.minimize(loss, variables, tape=tape)
        else:
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    return lambda: step(tf.constant(X), tf.constant(X[::-1].copy()))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["outside", "minimize", "in the tape", *(["scaled"] if c.keras3() else [])])
def test_what_the_tape_takes_for_a_constant_is_not_differentiated_behind_its_back(way):
    model, optimizer = c.classifier(), sgd()
    if way != "in the tape":
        with pytest.raises(PrivacyError, match=r"AddV2 .*outside of the tape.*wrap it in tf\.stop_gradient"):
            bootstrapped(model, optimizer, way)()
    stop = (lambda t: t) if way == "in the tape" else tf.stop_gradient
    update = c.update_of(model, bootstrapped(model, sgd(), way, stop))

    def gradient(i):
        with tf.GradientTape() as tape:
            best = stop(tf.reduce_max(model(X[::-1][i : i + 1]), 1))
            loss = tf.reduce_mean((1 + 0.9 * best - model(X[i : i + 1])[:, 0]) ** 2)
        return [g.numpy() for g in tape.gradient(loss, model.trainable_variables)]

    model.set_weights(c.weights())
    each = [gradient(i) for i in range(12)]
    factors = [min(1, CLIP / np.linalg.norm(c.flat(g))) for g in each]
    sums = [sum(f * g[k] for f, g in zip(factors, each, strict=True)) for k in range(4)]
    assert_same(update, moved(sums))


def test_another_network_outside_of_the_tape_is_a_constant():
    model, other, optimizer = c.classifier(), c.classifier(1), sgd()

    @tf.function
    def step(x):
        goal = other(x)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - goal) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables,
                                      strict=True))  # fmt: skip

    assert c.flat(c.update_of(model, lambda: step(tf.constant(X)))).any()


def test_while_another_tape_records_nothing_is_taken():
    model, optimizer = c.classifier(), sgd()

    @tf.function
    def step(x, y):
        with tf.GradientTape(persistent=True):
            with tf.GradientTape() as tape:
                loss = loss_of(model, x, y)
            grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    with pytest.raises(PrivacyError, match="after the with blocks of all tapes"):
        step(X, Y)


@pytest.mark.slow
def test_two_networks_each_with_its_tape_and_optimizer():
    """A GAN's step, as TensorFlow's guide writes it: two tapes at once, asked after both."""
    first, second = c.classifier(), c.classifier(1)
    one, two = sgd(), sgd()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape, tf.GradientTape() as other:
            loss, another = loss_of(first, x, y), loss_of(second, x, y)
        grads = tape.gradient(loss, first.trainable_variables)
        others = other.gradient(another, second.trainable_variables)
        one.apply_gradients(zip(grads, first.trainable_variables, strict=True))
        two.apply_gradients(zip(others, second.trainable_variables, strict=True))

    step(X, Y)
    for seed, model in enumerate((first, second)):
        want = moved(c.clipped_sum(c.weights(seed), X, Y, CLIP))
        assert_same([a - b for a, b in zip(model.get_weights(), c.weights(seed), strict=True)], want)
    assert one.num_dp_steps == two.num_dp_steps == 1


@pytest.mark.parametrize("private", [True, False])
def test_a_generator_that_sees_draws_alone_is_trained_by_the_plain_optimizer(private):
    generator = K.Sequential([K.Input((2,)), L.Dense(c.WIDTH)])
    critic, optimizer = c.classifier(), sgd()
    plain = sgd() if private else K.optimizers.Adam()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(critic, x, y)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, critic.trainable_variables), critic.trainable_variables, strict=True)
        )
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(critic(generator(tf.random.normal((4, 2)))))
        plain.apply_gradients(
            zip(tape.gradient(loss, generator.trainable_variables), generator.trainable_variables, strict=True)
        )

    if private:
        with pytest.raises(PrivacyError, match=r"keras\.optimizers\.Adam\), and draw a fixed number"):
            step(tf.constant(X), tf.constant(Y))
    else:
        before = generator.get_weights()
        step(tf.constant(X), tf.constant(Y))
        assert np.abs(generator.get_weights()[0] - before[0]).max() > 0


def test_the_call_of_a_tf_privacy_loop_says_what_takes_its_place():
    optimizer = tfdpfl.DPKerasSGDOptimizer(1.0, 1.1, learning_rate=0.1)
    with pytest.raises(PrivacyError, match=r"Write gradients = tape\.gradient\(loss, variables\)"):
        optimizer._compute_gradients(None, [], tape=None)
