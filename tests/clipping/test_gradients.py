"""Norms and clipped sums of every kind of layer are those of the examples one by one."""

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, check, check_model, check_models, example_losses, normal, per_example_gradients, raw, rng
from layer_cases import NESTED, SIMPLE, B, check_layers, ids, image, layers_of, sequence, stack, tanh, vector

from tfdpfl.clipping import gradients, per_example_norms
from tfdpfl.clipping.gradients import Costs, _not_broadcast, added, joined, products, reshaped, squares


@pytest.mark.parametrize("cases", layers_of(NESTED))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)


# Functional and subclassed models


def attention(masked=False, causal=False):
    query, value = K.Input((3, 4)), K.Input((5, 2))
    mask = K.Input((3, 5), dtype="bool") if masked else None
    y = L.MultiHeadAttention(2, 3, output_shape=4)(query, value, attention_mask=mask, use_causal_mask=causal)
    x = [normal(B, 3, 4), normal(B, 5, 2)] + [rng(0).random((B, 3, 5)) < 0.6] * masked
    return K.Model([query, value] + [mask] * masked, y), x


def several_inputs_and_outputs():
    a, b = K.Input((4,)), K.Input((5, 2))
    h = L.Concatenate()([tanh(3)(a), L.Flatten()(L.Conv1D(2, 2)(b))])
    return K.Model([a, b], [L.Dense(2)(h), tanh(3)(h)]), [normal(B, 4), normal(B, 5, 2)]


def dict_of_inputs():
    inputs = {"ids": K.Input((5,), dtype="int32", name="ids"), "x": K.Input((4,), name="x")}
    h = L.GlobalAveragePooling1D()(L.Embedding(6, 3)(inputs["ids"])) + tanh(3)(inputs["x"])
    return K.Model(inputs, {"y": L.Dense(2)(h), "z": h}), {"ids": ids(B, 5), "x": normal(B, 4)}


def shared_layer():
    a, b = K.Input((4,)), K.Input((4,))
    d = tanh(4)
    return K.Model([a, b], L.Dense(2)(L.Multiply()([d(d(a)), d(b)]))), [normal(B, 4), normal(B, 4, seed=1)]


def shared_convolution():
    a = K.Input((6, 6, 3))
    c = L.Conv2D(3, 3, padding="same", activation="tanh")
    return K.Model(a, c(c(a))), normal(B, 6, 6, 3)


def shared_embedding():
    a, b = K.Input((3,), dtype="int32"), K.Input((4,), dtype="int32")
    e = L.Embedding(6, 3)
    return K.Model([a, b], L.Concatenate(axis=1)([e(a), tanh(3)(e(b))])), [ids(B, 3), ids(B, 4, seed=1)]


def shared_at_different_ranks():
    a, b = K.Input((4,)), K.Input((5, 4))
    d = tanh(3)
    return K.Model([a, b], [d(a), d(b)]), [normal(B, 4), normal(B, 5, 4)]


FUNCTIONAL = {
    f.__name__.replace("_", " "): f
    for f in (attention, several_inputs_and_outputs, dict_of_inputs, shared_layer, shared_convolution)
}
FUNCTIONAL |= {
    "shared embedding": shared_embedding,
    "layer shared at different ranks": shared_at_different_ranks,
    "attention masked": lambda: attention(masked=True),
    "attention causal": lambda: attention(causal=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("names", [list(FUNCTIONAL)[i::3] for i in range(3)], ids=" + ".join)
def test_models_agree_with_examples_one_by_one(names):
    check_models([FUNCTIONAL[name]() for name in names])


def test_subclassed_model_agrees():
    class Two(K.Model):
        def __init__(self):
            super().__init__()
            self.a, self.b = tanh(4), L.Dense(3)

        def call(self, x, training=False):
            return self.b(tf.concat([self.a(x["u"]), x["v"]], -1))

    check_model(Two(), {"u": normal(B, 3), "v": normal(B, 2)})


# Sizes, types and other ways to hold weights


@pytest.mark.parametrize("name", [  # the rest: test_batch_shapes.py, of sizes that could be another axis's
    "dense of rank 3", "conv1d same dilated", "lstm",
    *[pytest.param(n, marks=[pytest.mark.slow, pytest.mark.one_stack]) for n in (
        "masked embedding into lstm", "masking into rnn", "conv2d grouped", "layernorm of rank 3", "transposed conv2d",
        "depthwise conv2d",
        *[n for n in ["groupnorm"] if n in SIMPLE])],
])  # fmt: skip
def test_static_batch_size_agrees(name):
    x, layers = SIMPLE[name]
    check_model(stack(*layers()), x, batch=len(x))


@pytest.mark.slow
@pytest.mark.one_stack
def test_causal_mask_spread_over_a_static_batch_agrees():
    model, x = attention(causal=True)
    check_model(model, x, batch=len(x[0]))


@pytest.mark.slow
@pytest.mark.parametrize("layers", [
    *[pytest.param(layers, marks=pytest.mark.one_stack) for layers in (
        lambda: [tanh(3), L.GlobalAveragePooling1D()],
        lambda: [L.Conv1D(3, 2, padding="causal"), L.GlobalMaxPooling1D()])],
    lambda: [L.LayerNormalization(), L.GRU(2, return_sequences=True)],
], ids=["dense", "conv1d", "layernorm and gru"])  # fmt: skip
def test_free_lengths_agree(layers):
    check_model(K.Sequential([K.Input((None, 4)), *layers(), L.Dense(2)]), sequence, signature_shape=(None, None, 4))


def test_float64_agrees_to_float64():
    model = K.Sequential([K.Input((4,), dtype="float64"), tanh(5, dtype="float64"), L.Dense(2, dtype="float64")])
    check_model(model, vector.astype("float64"), tolerance=1e-12)


@pytest.mark.parametrize("layers", [
    lambda p: [tanh(5, dtype=p), L.Dense(2, dtype=p)],
    lambda p: [L.Conv2D(3, 3, dtype=p), L.Flatten(dtype=p), L.Dense(2)],
], ids=["dense", "conv2d"])  # fmt: skip
def test_mixed_bfloat16_agrees_to_its_precision(layers):
    policy = "mixed_bfloat16"
    made = layers(policy)
    check_model(stack(*made), image if isinstance(made[0], L.Conv2D) else vector, tolerance=0.03)


@pytest.mark.parametrize("name", [
    "dense of rank 3",
    *[pytest.param(n, marks=[pytest.mark.slow, pytest.mark.one_stack]) for n in (
        "conv2d same strided", "embedding of repeated ids", "masked embedding into lstm")],
])  # fmt: skip
@pytest.mark.slow
def test_xla_agrees(name):
    x, layers = SIMPLE[name]
    check_model(stack(*layers()), x, batch=len(x), jit=True)


@pytest.mark.parametrize(("name", "m"), [
    ("dense of rank 3", 1), ("dense of rank 3", 2), ("conv2d same strided", 2), ("embedding of repeated ids", 2),
    *[pytest.param(n, m, marks=[pytest.mark.slow, pytest.mark.one_stack]) for n, m in [
        ("conv2d of many channels", 1), ("lstm", 2), ("layernorm of rank 3", 2), ("depthwise conv2d", 2),
        ("depthwise conv2d", B), ("dense of width 1", 1)]],
])  # fmt: skip
def test_microbatches_clip_the_mean_gradient_of_consecutive_groups(name, m):
    x, layers = SIMPLE[name]
    check_model(stack(*layers()), x, m=min(m, len(x)))


def test_norms_agree_with_the_jacobian():
    model = stack(L.Conv2D(3, 3, activation="tanh"), L.Flatten(), L.Dense(2))
    model(image)
    with tf.GradientTape(persistent=True) as tape:
        losses = example_losses(model(image))
    jacobian = [j.numpy() for j in tape.jacobian(losses, raw(model.trainable_variables), experimental_use_pfor=False)]
    one_by_one = per_example_gradients(lambda x: example_losses(model(x)), image, model.trainable_variables)
    for j, o in zip(jacobian, one_by_one, strict=True):
        np.testing.assert_allclose(j, o, atol=1e-6)


@pytest.mark.parametrize("layers", [
    pytest.param(lambda: [L.Dense(5, "relu"), L.Dense(4, "tanh"), L.Dense(3)], id="dense"),
    pytest.param(lambda: [L.Reshape((4, 4, 1)), L.Conv2D(3, 2, activation="elu"), L.MaxPooling2D(2), L.Flatten(),
                          L.Dense(3, "softplus")], id="pooling", marks=[pytest.mark.slow, pytest.mark.one_stack]),
    pytest.param(lambda: [L.Dense(5, "sigmoid"), L.Dense(4, "selu"), L.Dense(3, tf.nn.leaky_relu)], id="others",
                 marks=[pytest.mark.slow, pytest.mark.one_stack]),
])  # fmt: skip
@pytest.mark.parametrize("use", ["adversarial example", pytest.param("penalty", marks=pytest.mark.slow)])
def test_gradients_of_the_inputs_keep_examples_apart(layers, use):
    model = K.Sequential([K.Input((16,)), *layers()])

    def entropies(x):
        return tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(x[:, 0] > 0, tf.int32), model(x))

    def losses(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            first = entropies(x)
        slope = tape.gradient(first, x)
        if use == "penalty":
            return first + tf.reduce_sum(tf.square(slope), 1)
        return entropies(tf.stop_gradient(x + 0.1 * tf.sign(slope)))

    check(losses, normal(5, 16), model.trainable_variables)


# -- terms that cancel -------------------------------------------------------------------------------------------

CANCEL = {  # rows' offset, and what is done to all gradients but the first so that their sum is (nearly) zero
    "centred": lambda x, g: (x, g - g.mean(1, keepdims=True)),
    "far from zero": lambda x, g: (x + 1000, g - g.mean(1, keepdims=True)),
    "near duplicates": lambda x, g: (
        x[:, :1] + 1e-5 * x, np.where(np.arange(g.shape[1])[:, None], -g[:, :1] / (g.shape[1] - 1), g)),
    "alike": lambda x, g: (np.repeat(x[:, :1], x.shape[1], 1), g - g.mean(1, keepdims=True)),
}  # fmt: skip


@pytest.mark.parametrize("length", [2, 3, 24])
@pytest.mark.parametrize("how", list(CANCEL.values()), ids=list(CANCEL))
def test_a_norm_whose_terms_cancel_is_never_too_small(how, length):
    """As of a siamese pair: a sum of Gram products is then rounding noise, and may be negative."""
    x, g = (t.astype("float32") for t in how(normal(32, length, 100), normal(32, length, 200, seed=1)))
    w = tf.Variable(normal(100, 200))

    @tf.function(input_signature=[tf.TensorSpec([None, length, n]) for n in (100, 200)])
    def norms(x, g):
        return per_example_norms(tf.reduce_sum(tf.matmul(x, w) * g), [w])

    wide = [t.astype(np.float64) for t in (x, g)]
    true2 = (np.einsum("bta,btp->bap", *wide) ** 2).sum((1, 2))
    terms2 = ((wide[0] ** 2).sum(2) * (wide[1] ** 2).sum(2)).sum(1)
    got2 = norms(x, g).numpy().astype(np.float64) ** 2
    assert (got2 >= true2 * 0.998).all()
    assert (got2 <= true2 * 1.001 + 1e-4 * terms2).all()


@pytest.mark.parametrize("kernels", [True, False])
def test_the_norm_of_rows_that_cancel_in_a_table_is_never_too_small(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(gradients, "find_obstacle", lambda *_, **__: "none here")
    g = CANCEL["centred"](0, normal(32, 24, 100))[1].astype("float32")
    w = tf.Variable(normal(6, 100))

    @tf.function(input_signature=[tf.TensorSpec([None, 24, 100])])
    def norms(g):
        return per_example_norms(tf.reduce_sum(tf.gather(w, tf.fill(tf.shape(g)[:2], 3)) * g), [w])

    wide = g.astype(np.float64)
    true2, terms2 = (wide.sum(1) ** 2).sum(1), (wide**2).sum((1, 2))
    got2 = norms(g).numpy().astype(np.float64) ** 2
    assert (got2 >= true2 * 0.998).all() and (got2 <= true2 * 1.001 + 1e-4 * terms2).all()


def test_a_square_below_the_smallest_number_counts():
    w = tf.Variable(normal(4, 3))

    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None, 3])])
    def norms(x, g):
        return per_example_norms(tf.reduce_sum(tf.matmul(x, w) * g), [w])

    x = np.eye(2, 4, dtype="f") * 1e19
    assert norms(x, np.full([2, 3], 5e-20, "f")).numpy().min() >= 0.5 * np.sqrt(3)


def test_gram_matrices_of_the_same_rows_are_made_once():
    value = normal(5, 4, 6)

    @tf.function
    def grams(x):
        flat = tf.reshape(x, [-1, 6])
        again, other, halves = tf.reshape(flat, [-1, 4, 6]), x + 1.0, tf.reshape(flat, [-1, 2, 6])
        assert products(x) is products(again)
        return products(x), products(other), products(halves), products(tf.reshape(x, [-1, 6, 4]))

    shapes = [value, value + 1, value.reshape(10, 2, 6), value.reshape(5, 6, 4)]
    for gram, rows in zip(grams(tf.constant(value)), shapes, strict=True):
        np.testing.assert_allclose(gram, rows @ rows.transpose(0, 2, 1), rtol=1e-5, atol=1e-5)


def test_gram_matrices_of_other_rows_are_others_where_their_shape_is_not_known():
    value = normal(4, 6, 3)

    @tf.function(input_signature=[tf.TensorSpec([None, None, 3])])
    def grams(x):
        units, length = tf.unstack(tf.shape(x)[:2])
        return products(x), products(tf.reshape(x, [2 * units, length // 2, 3]))

    for gram, rows in zip(grams(tf.constant(value)), (value, value.reshape(8, 3, 3)), strict=True):
        np.testing.assert_allclose(gram, rows @ rows.transpose(0, 2, 1), rtol=1e-5, atol=1e-5)


def test_a_shape_without_entries_keeps_its_number_of_units():
    @tf.function(input_signature=[tf.TensorSpec([None, 0])])
    def made(x):
        return reshaped(x, [tf.shape(x)[0], 2, 0])

    assert made(tf.zeros([3, 0])).shape == (3, 2, 0)


def test_squares_of_the_same_rows_are_added_up_once():
    value = normal(6, 4, 6)

    @tf.function(input_signature=[tf.TensorSpec([None, 4, 6])])
    def sums(x):
        flat, halves, pairs = (tf.reshape(x, [-1, *shape]) for shape in ([24], [2, 6], [48]))
        assert squares(x) is squares(flat)
        return squares(x), squares(halves), squares(pairs), squares(x + 1.0)

    shapes = [value.reshape(6, -1), value.reshape(12, -1), value.reshape(3, -1), (value + 1).reshape(6, -1)]
    for found, rows in zip(sums(tf.constant(value)), shapes, strict=True):
        np.testing.assert_allclose(found, (rows**2).sum(1), rtol=1e-5)


def test_gradients_are_joined_once_for_the_kernels_that_take_in_the_same():
    value = normal(5, 4, 6)

    @tf.function
    def rows(x):
        again = tf.reshape(tf.reshape(x, [-1, 6]), [-1, 4, 6])
        assert joined([x, x]) is joined([again, x])
        return joined([x, again]), joined([x, x + 1.0]), joined([x + 1.0, x])

    for found, parts in zip(rows(tf.constant(value)), [(0, 0), (0, 1), (1, 0)], strict=True):
        np.testing.assert_array_equal(found, np.concatenate([value + p for p in parts], 1))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_table_of_few_rows_is_added_to_what_may_have_another_type(dtype):
    rows, to = normal(3, 2), tf.constant(np.ones([4, 2], dtype))

    @tf.function
    def summed(rows, to):
        return added(tf.identity(tf.math.unsorted_segment_sum(rows, tf.constant([1, 3, 1]), 4)), to)

    table = np.ones([4, 2])
    np.add.at(table, [1, 3, 1], rows)
    np.testing.assert_allclose(summed(tf.constant(rows), to), table, rtol=1e-6)


def test_only_a_broadcast_that_was_none_is_undone():
    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1])])
    def gradients(x, same, narrow):
        one, other = tf.gradients(tf.sin(x + same), [x, same])
        assert _not_broadcast(one) is _not_broadcast(other)
        wide, summed = tf.gradients(tf.sin(x + narrow), [x, narrow])
        assert _not_broadcast(summed) is summed
        return [one, _not_broadcast(one), wide, _not_broadcast(wide)]

    one, its_source, wide, wides_source = gradients(normal(3, 4), normal(3, 4), normal(3, 1))
    np.testing.assert_array_equal(one, its_source)
    np.testing.assert_array_equal(wide, wides_source)


# Norms, clip and sum over the plain filter gradient, Keras 3, two cores, AVX-512: measured 2026-11-25, (gradients
# formed by TensorFlow's ops, Gram matrices, formed and stored by a kernel). The last two are whole steps.
@pytest.mark.parametrize(("costs", "formed", "native"), [
    (Costs(676, 9, 32, 9, True), True, True),  # 28x28x1 to 32, 3x3: 1.77, 2.05, 0.63
    (Costs(121, 288, 64, 9, True), True, True),  # 13x13x32 to 64, 3x3: 1.63, 4.02, 1.16
    (Costs(64, 1152, 128, 9, True), False, False),  # 8x8x128 to 128, 3x3: 2.27, 1.47, 1.70
    (Costs(256, 288, 32, 9, True), True, True),  # 16x16x32 to 32, 3x3: 1.81, 1.79 and more memory, 1.07
    (Costs(25, 256, 32, 4, True), False, True),  # 13x13x16 to 32, 4x4 by strides of 2: 2.21, 2.33, 1.38
    (Costs(196, 64, 64), True, True),  # 14x14x64 to 64, 1x1: 1.22, 1.20, 1.09
    (Costs(128, 256, 1024), False, False),  # a transformer's wide layer: 1.44 times plain's memory, against 1.06
    (Costs(1, 784, 1024), False, False),  # a dense layer: the norm is a product of two norms
])  # fmt: skip
def test_gradients_are_formed_where_that_takes_less_time_and_no_more_memory(costs, formed, native):
    assert costs.forms == formed
    assert costs.native == native
