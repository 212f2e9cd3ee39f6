"""Nobody knows the random numbers that a model draws for each example."""

import numpy as np
import pytest
import tensorflow as tf
from neighbour_cases import (
    FromTensorFlow,
    K,
    L,
    Sums,
    X,
    Y,
    layers,
)

import tfdpfl
from tfdpfl import PrivacyError


class FromConstant(L.Layer):
    def call(self, x):
        return x + tf.random.stateless_normal(tf.shape(x), seed=[1, 2])


class Projected(L.Layer):
    """A public matrix, the same in each step."""

    def call(self, x):
        return x @ tf.random.stateless_normal([5, 5], seed=[1, 2])


class FromGenerator(L.Layer):
    """In a function of its own."""

    def __init__(self):
        super().__init__()
        generator = tf.random.Generator.from_seed(3)
        self.drawn = tf.function(lambda x: x + generator.normal(tf.shape(x)))

    def call(self, x):
        return self.drawn(x)


class InALoop(L.Layer):
    def call(self, x):
        turn = lambda i, x: (i + 1, tf.ensure_shape(x + tf.random.normal(tf.shape(x)), [None, 5]))
        return tf.while_loop(lambda i, _: i < 2, turn, [0, x])[1]


class InAFunction(L.Layer):
    def call(self, x):
        return tf.function(lambda x: x + tf.random.normal(tf.shape(x)))(x)


DRAWING = {
    "Dropout": lambda: L.Dropout(0.5, seed=1), "GaussianNoise": lambda: L.GaussianNoise(1.0, seed=1),
    "tf.random": FromTensorFlow, "generator": FromGenerator, "loop": InALoop,
}  # fmt: skip


def drawn_twice(layer, **settings):
    """The sums of two processes that set the same seed."""
    made = []
    for _ in range(2):
        K.utils.set_random_seed(0)
        model = K.Sequential(layers(layer()))
        made.append(Sums(model, **settings)([(X, Y)]))
    return made


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize(
    "name", ["Dropout", *[pytest.param(name, marks=pytest.mark.slow) for name in list(DRAWING)[1:]]]
)
def test_nobody_knows_what_a_model_draws_for_each_example(name):
    one, other = drawn_twice(DRAWING[name])
    assert np.linalg.norm(one - other) > 0.1
    if name in ("Dropout", "tf.random", "generator"):  # for tests: by Keras's seeds, TensorFlow's and a variable's
        one, other = drawn_twice(DRAWING[name], seed=0)
        assert (one == other).all()


@pytest.mark.slow
def test_a_step_draws_other_numbers_than_the_one_before_it():
    """Also where the state that Keras or TensorFlow draws from is set back, as by loading a file."""
    for name in ("Dropout", "tf.random"):
        sums = Sums(K.Sequential(layers(DRAWING[name]())))
        found = sums.each([[(X, Y)]] * 3)
        assert np.linalg.norm(found[0] - found[1]) > 0.1 and np.linalg.norm(found[1] - found[2]) > 0.1


@pytest.mark.slow
@pytest.mark.both_stacks
def test_what_is_drawn_for_no_example_stays_as_the_user_seeded_it():
    one, other = drawn_twice(Projected)
    assert (one == other).all()


@pytest.mark.parametrize(("layer", "match"), [
    (FromConstant, "for each example from a constant seed.*Draw without a seed"),
    pytest.param(InAFunction, r"in a tf.function.*tf.random.set_seed\(None\)", marks=pytest.mark.slow),
])  # fmt: skip
def test_seeds_that_are_known_and_stay_so_are_refused(layer, match):
    K.utils.set_random_seed(0)
    sums = Sums(K.Sequential(layers(layer())))
    with pytest.raises(PrivacyError, match=match):
        sums([(X, Y)])


@pytest.mark.slow
def test_the_fix_for_a_function_that_draws_works():
    tf.random.set_seed(None)
    model = K.Sequential(layers(InAFunction()))
    model.compile(tfdpfl.DPSGD(1.0, 1.0, learning_rate=0.1), K.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(X, Y, batch_size=6, verbose=0)
    assert model.optimizer.num_dp_steps == 2
