"""Models that people train, each classified right: exact against examples one by one, or refused with the op's name."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, check_models, normal, rng

from tfdpfl import PrivacyError
from tfdpfl.clipping import clipped_gradients

pytestmark = pytest.mark.slow
B = 4
relu = {"activation": "tanh"}  # smooth, so that rounding moves no unit across a kink


def ids(*shape, high=6, seed=0):
    return rng(seed).integers(0, high, (B, *shape)).astype("int32")


def words(n, high=6, seed=0):
    return K.Input((n,), dtype="int32"), ids(n, high=high, seed=seed)


def numbers(*shape, seed=0):
    return K.Input(shape), normal(B, *shape, seed=seed)


def made(f):
    """A layer of a function of its inputs and of the weights that it is given shapes for."""

    def build(*shapes):
        class Made(L.Layer):
            def build(self, _):
                self.ws = [self.add_weight(name=f"w{i}", shape=s, initializer="glorot_normal") for i, s in
                           enumerate(shapes)]  # fmt: skip
                self.built = True

            def call(self, *inputs):
                return f(*inputs, *[tf.convert_to_tensor(w) for w in self.ws])

        return Made()

    return build


def of(function):
    return made(function)()


# Exact


def logistic_regression():
    x, data = numbers(4)
    return K.Model(x, L.Dense(1)(x)), data


def multilayer_perceptron():
    x, data = numbers(5)
    return K.Model(x, L.Dense(3)(L.Dense(6, **relu)(L.Dense(6, **relu)(x)))), data


def wide_and_deep():
    (x, a), (i, b) = numbers(4), words(2)
    deep = L.Dense(4, **relu)(L.Concatenate()([x, L.Flatten()(L.Embedding(6, 3)(i))]))
    return K.Model([x, i], L.Add()([L.Dense(1)(x), L.Dense(1)(deep)])), [a, b]


def highway_network():
    x, data = numbers(4)
    gate, h = L.Dense(4, activation="sigmoid")(x), L.Dense(4, **relu)(x)
    return K.Model(x, L.Dense(2)(of(lambda g, h, x: g * h + (1 - g) * x)(gate, h, x))), data


def several_tasks():
    x, data = numbers(4)
    shared = L.Dense(5, **relu)(x)
    return K.Model(x, [L.Dense(1)(shared), L.Dense(3)(L.Dense(3, **relu)(shared))]), data


def autoencoder():
    x, data = numbers(6)
    return K.Model(x, L.Dense(6)(L.Dense(2, **relu)(x))), data


def deep_sets():
    x, data = numbers(5, 3)
    y = L.Dense(4, **relu)(x)
    return K.Model(x, L.Dense(2)(L.Dense(4, **relu)(of(lambda y: tf.reduce_sum(y, 1))(y)))), data


def steps_of_an_ode():
    x, data = numbers(4)
    field, y = L.Dense(4, **relu), x
    for _ in range(5):
        y = of(lambda y, dy: y + 0.2 * dy)(y, field(y))
    return K.Model(x, L.Dense(2)(y)), data


def mixture_of_experts():
    x, data = numbers(4)
    gate = L.Dense(3, activation="softmax")(x)
    experts = made(lambda x, g, w: tf.einsum("be,bej->bj", g, tf.tanh(tf.einsum("bi,eij->bej", x, w))))((3, 4, 5))
    return K.Model(x, L.Dense(2)(experts(x, gate))), data


def hypernetwork():
    (x, a), (z, b) = numbers(4), numbers(3, seed=1)
    weights = L.Reshape((4, 2))(L.Dense(8, **relu)(z))
    return K.Model([x, z], of(lambda x, w: tf.einsum("bi,bij->bj", x, w))(x, weights)), [a, b]


def siamese():
    (x, a), (y, b) = numbers(4), numbers(4, seed=1)
    tower = K.Sequential([K.Input((4,)), L.Dense(5, **relu), L.Dense(3, **relu)])
    return K.Model([x, y], L.Dense(1)(of(lambda u, v: (u - v) ** 2)(tower(x), tower(y)))), [a, b]


def two_towers():
    (user, a), (item, b) = words(1, high=50), words(3, high=80, seed=1)
    u = L.Dense(4)(L.Flatten()(L.Embedding(50, 6)(user)))
    v = L.Dense(4)(L.GlobalAveragePooling1D()(L.Embedding(80, 6)(item)))
    return K.Model([user, item], L.Dot(1, normalize=True)([u, v])), [a, b]


def ranker_of_raw_features():
    """As recommenders are served: what looks words and numbers up is in the model."""
    item, genres, numeric = K.Input((), dtype="int64"), K.Input((3,), dtype="string"), K.Input((2,))
    known = L.StringLookup(vocabulary=["war", "art"], num_oov_indices=2)(genres)
    parts = [
        L.Embedding(9, 4)(L.IntegerLookup(vocabulary=list(range(8)))(item)),
        L.GlobalAveragePooling1D()(L.Embedding(4, 3)(known)),
        L.Flatten()(L.Embedding(5, 2)(L.Hashing(5)(genres))),
        L.CategoryEncoding(4, "multi_hot")(L.Discretization([-1.0, 0.0, 1.0])(numeric)),
        L.Normalization(mean=[1.0, 2.0], variance=[3.0, 4.0])(numeric),
    ]
    kinds = np.array(["war", "art", "zoo"])[rng().integers(0, 3, (B, 3))].astype(object)
    data = [rng(1).integers(0, 12, B), kinds, normal(B, 2)]
    return K.Model([item, genres, numeric], L.Dense(1)(L.Dense(4, **relu)(L.Concatenate()(parts)))), data


def factorization_machine():
    i, data = words(5, high=20)
    v = L.Embedding(20, 3)(i)
    pairs = of(lambda v: tf.reduce_sum(tf.reduce_sum(v, 1) ** 2 - tf.reduce_sum(v**2, 1), 1, keepdims=True))(v)
    linear = of(lambda w: tf.reduce_sum(w, 1))(L.Embedding(20, 1)(i))
    return K.Model(i, L.Add()([linear, pairs])), data


def neural_collaborative_filtering():
    (user, a), (item, b) = words(1), words(1, seed=1)
    flat = lambda width, i: L.Flatten()(L.Embedding(6, width)(i))
    product = L.Multiply()([flat(3, user), flat(3, item)])
    deep = L.Dense(4, **relu)(L.Concatenate()([flat(2, user), flat(2, item)]))
    return K.Model([user, item], L.Dense(1)(L.Concatenate()([product, deep]))), [a, b]


def features_that_interact():
    (x, a), (i, b) = numbers(4), words(3)
    rows = L.Concatenate(axis=1)([L.Reshape((1, 4))(L.Dense(4, **relu)(x)), L.Embedding(6, 4)(i)])
    return K.Model([x, i], L.Dense(1)(L.Flatten()(of(lambda r: r @ tf.transpose(r, [0, 2, 1]))(rows)))), [a, b]


def residual_network(norm=lambda: L.GroupNormalization(2)):
    x, data = numbers(8, 8, 3)
    y = L.Conv2D(4, 3, padding="same")(x)
    for strides in (1, 2):
        z = L.Activation("tanh")(norm()(y))
        short = L.Conv2D(4, 1, strides, use_bias=False)(z) if strides > 1 else y
        z = L.Conv2D(4, 3, strides, padding="same", use_bias=False)(z)
        y = L.Add()([short, L.Conv2D(4, 3, padding="same", use_bias=False)(L.Activation("tanh")(norm()(z)))])
    return K.Model(x, L.Dense(3)(L.GlobalAveragePooling2D()(y))), data


def inception_block():
    x, data = numbers(6, 6, 3)
    branches = [L.Conv2D(2, k, padding="same", **relu)(x) for k in (1, 3, 5)]
    pooled = L.Conv2D(2, 1)(L.AveragePooling2D(3, 1, padding="same")(x))
    return K.Model(x, L.Dense(2)(L.GlobalMaxPooling2D()(L.Concatenate()([*branches, pooled])))), data


def dense_block():
    x, data = numbers(5, 5, 2)
    y = x
    for _ in range(3):
        y = L.Concatenate()([y, L.Conv2D(2, 3, padding="same", **relu)(L.LayerNormalization()(y))])
    return K.Model(x, L.Dense(2)(L.GlobalAveragePooling2D()(y))), data


def inverted_residual_with_squeeze_and_excite():
    x, data = numbers(6, 6, 3)
    y = L.DepthwiseConv2D(3, padding="same", **relu)(L.Conv2D(6, 1, **relu)(x))
    scale = L.Dense(6, activation="sigmoid")(L.Dense(2, **relu)(L.GlobalAveragePooling2D(keepdims=True)(y)))
    y = L.Add()([x, L.Conv2D(3, 1)(L.Multiply()([y, scale]))])
    return K.Model(x, L.Dense(2)(L.Flatten()(y))), data


def fast_text():
    i, data = words(7, high=30)
    return K.Model(i, L.Dense(2)(L.GlobalAveragePooling1D()(L.Embedding(30, 4)(i)))), data


def text_convolutions():
    i, data = words(8, high=30)
    x = L.Embedding(30, 4)(i)
    pooled = [L.GlobalMaxPooling1D()(L.Conv1D(3, k, **relu)(x)) for k in (2, 3, 4)]
    return K.Model(i, L.Dense(2)(L.Concatenate()(pooled))), data


def masked_lstm():
    i, data = words(5)
    return K.Model(i, L.Dense(2)(L.LSTM(3)(L.Embedding(6, 3, mask_zero=True)(i)))), data


def stacked_gru():
    x, data = numbers(4, 3)
    return K.Model(x, L.Dense(2)(L.GRU(3)(L.GRU(4, return_sequences=True, unroll=True)(x)))), data


def temporal_convolutions():
    x, data = numbers(10, 3)
    y = L.Conv1D(4, 1)(x)
    for rate in (1, 2, 4):
        y = L.Add()([y, L.Conv1D(4, 2, dilation_rate=rate, padding="causal", **relu)(y)])
    return K.Model(x, L.Dense(2)(y)), data


def gated_waves():
    x, data = numbers(8, 2)
    gate = L.Conv1D(3, 2, padding="causal", activation="sigmoid")(x)
    return K.Model(x, L.Conv1D(2, 1)(L.Multiply()([L.Conv1D(3, 2, padding="causal", **relu)(x), gate]))), data


# What test_ecosystem.py trains is not here: the rest is.
EXACT = [logistic_regression, multilayer_perceptron, wide_and_deep, highway_network, several_tasks, autoencoder,
         deep_sets, steps_of_an_ode, mixture_of_experts, hypernetwork, siamese, two_towers,
         ranker_of_raw_features, factorization_machine, neural_collaborative_filtering, features_that_interact,
         residual_network, inception_block, dense_block, inverted_residual_with_squeeze_and_excite, fast_text,
         text_convolutions, masked_lstm, stacked_gru, temporal_convolutions, gated_waves]  # fmt: skip


@pytest.mark.parametrize("part", range(4))
@pytest.mark.slow
def test_models_that_keep_examples_apart_are_exact(part):
    K.utils.set_random_seed(1)
    check_models([build() for build in EXACT[part::4]], 2e-5)


# Refused


def with_batch_normalisation():
    return residual_network(L.BatchNormalization)


def negatives_in_the_batch():
    (x, a), (y, b) = numbers(4), numbers(4, seed=1)
    scores = of(lambda u, v: u @ tf.transpose(v))(L.Dense(3)(x), L.Dense(3)(y))
    return K.Model([x, y], scores), [a, b]


def minibatch_discrimination():
    x, data = numbers(4)
    y = L.Dense(3)(x)
    near = of(lambda y: tf.reduce_sum(tf.exp(-tf.reduce_sum(tf.abs(y[:, None] - y[None]), 2)), 1, keepdims=True))(y)
    return K.Model(x, L.Dense(1)(L.Concatenate()([y, near]))), data


def attention_between_examples():
    x, data = numbers(4)
    return K.Model(x, L.Dense(1)(of(lambda y: tf.nn.softmax(y @ tf.transpose(y)) @ y)(L.Dense(3)(x)))), data


def running_mean():
    x, data = numbers(4)

    class Centred(L.Layer):
        def build(self, _):
            self.mean = self.add_weight(name="mean", shape=(4,), initializer="zeros", trainable=False)
            self.built = True

        def call(self, x):
            self.mean.assign(0.9 * tf.convert_to_tensor(self.mean) + 0.1 * tf.reduce_mean(x, 0))
            return x - tf.convert_to_tensor(self.mean)

    return K.Model(x, L.Dense(2)(Centred()(x))), data


def ranking_within_the_batch():
    x, data = numbers(4)
    return K.Model(x, of(lambda s: tf.nn.log_softmax(s, axis=0))(L.Dense(1)(x))), data


def mixed_up_examples():
    x, data = numbers(4)
    return K.Model(x, L.Dense(2)(of(lambda x: 0.7 * x + 0.3 * tf.reverse(x, [0]))(L.Dense(4)(x)))), data


REFUSED = {
    with_batch_normalisation: "batch_normalization.*GroupNormalization",
    negatives_in_the_batch: "MatMul",
    minibatch_discrimination: "Sub",
    attention_between_examples: "MatMul",
    running_mean: "reads a variable that the step itself writes",
    ranking_within_the_batch: "LogSoftmax|Softmax|batch",
    mixed_up_examples: "ReverseV2",
}


@pytest.mark.parametrize(("build", "message"), REFUSED.items(), ids=lambda v: getattr(v, "__name__", ""))
def test_a_model_whose_examples_meet_is_refused_with_the_ops_name(build, message):
    model, x = build()
    spec = tf.nest.map_structure(lambda a: tf.TensorSpec([None, *a.shape[1:]], a.dtype), x)

    @tf.function(input_signature=[spec])
    def step(x):
        loss = tf.add_n([tf.reduce_mean(o**2) for o in tf.nest.flatten(model(x, training=True))])
        return clipped_gradients(loss, model.trainable_variables, 1.0).norms

    with pytest.raises(PrivacyError, match=f"(?s){message}"):
        step.get_concrete_function()
