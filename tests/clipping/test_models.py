"""explain, validate, fix and register_rule."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.clipping import explain, fix, register_rule, registry, validate
from tfdpfl.clipping.gradients import summed_to

RNG = np.random.default_rng(0)
L = tf.keras.layers
IMAGES, LABELS = RNG.normal(size=(6, 10, 10, 3)).astype("float32"), RNG.integers(0, 4, 6)
LOSS = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def compiled(*layers):
    model = tf.keras.Sequential([tf.keras.Input((10, 10, 3)), *layers, L.Flatten(), L.Dense(4)])
    model.compile(optimizer="sgd", loss=LOSS)
    return model


class Endless(L.Layer):
    """A loop for which no limit is known."""

    def __init__(self, width):
        super().__init__()
        self.matrix = self.add_weight(shape=(width, width), initializer="glorot_uniform")

    def call(self, x):
        matrix = tf.convert_to_tensor(self.matrix)
        turn = lambda n, y: (n - 1, tf.tanh(tf.matmul(y, matrix)))
        return tf.while_loop(lambda n, y: n > 0, turn, (tf.constant(2), x))[1]


@pytest.mark.slow
def test_explain_tells_the_way_of_every_variable():
    inputs = tf.keras.Input((7,), dtype="int32")
    x = L.Embedding(30, 5)(inputs)
    x = L.LSTM(4, return_sequences=True)(x)
    x = Endless(4)(x)
    x = L.Conv1D(6, 3)(x)
    model = tf.keras.Model(inputs, L.Dense(4)(L.Flatten()(x)))
    model.compile(optimizer="sgd", loss=LOSS)
    table = explain(model, (RNG.integers(0, 30, (6, 7)), LABELS))
    ways = [row.way for row in table.rows]
    assert len({row.variable for row in table.rows}) == len(model.trainable_variables)
    assert [row.op for row in table.rows[1:4]] == ["MatMul", "MatMul", "BiasAdd"]  # the LSTM's
    assert ways.count("fallback") == 1
    assert {"ghost", "formed", "fallback"} == set(ways)
    for v in model.trainable_variables:
        assert (getattr(v, "path", None) or v.name) in str(table)


def test_validate_accepts_a_model_that_keeps_examples_apart():
    validate(compiled(L.Conv2D(4, 3), L.GroupNormalization(2), L.Dropout(0.5)), (IMAGES, LABELS))


@pytest.mark.slow
@pytest.mark.one_stack
def test_a_data_set_stands_for_its_first_batch():
    model, batches = compiled(L.Conv2D(2, 3)), tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(4)
    validate(model, batches)
    assert str(explain(model, batches)) == str(explain(model, (IMAGES, LABELS)))
    assert explain(model, batches.map(lambda x, y: x)) == explain(model, IMAGES)
    with pytest.raises(ValueError, match="holds no batch"):
        explain(model, batches.take(0))


def test_validate_names_what_mixes():
    with pytest.raises(PrivacyError, match=r"batch_normalization.*GroupNormalization"):
        validate(compiled(L.Conv2D(4, 3), L.BatchNormalization()), (IMAGES, LABELS))


@pytest.mark.parametrize("op_type", [None, "Nope"])
def test_a_rule_for_no_op_is_refused(op_type):
    with pytest.raises(ValueError, match=f"op_type={op_type!r} is no op"):
        register_rule(op_type, batch_axis=0)


def test_what_is_no_model_cannot_be_fixed():
    with pytest.raises(TypeError, match="model=None is no Keras model"):
        fix(None)


def test_validate_sees_a_false_promise_by_its_numbers():
    """A rule registered for an op that in truth mixes examples: the graph's analysis believes it, the numbers tell."""

    class Reversed(L.Layer):
        def call(self, x):
            return x + tf.raw_ops.ReverseV2(tensor=x, axis=[0])

    known = registry.MOVES["ReverseV2"]
    register_rule("ReverseV2", batch_axis=0)(lambda use, units: None)
    try:
        with pytest.raises(PrivacyError, match="Changing example 0 changed"):
            validate(compiled(Reversed(), L.Conv2D(2, 3)), (IMAGES, LABELS))
    finally:
        registry.MOVES["ReverseV2"] = known
        del registry.RULES["ReverseV2"]


def test_validate_needs_two_examples():
    with pytest.raises(ValueError, match="two at least"):
        validate(compiled(L.Conv2D(2, 3)), (IMAGES[:1], LABELS[:1]))


def test_a_registered_rule_is_used_and_exact():
    old, known = registry.RULES["Mul"], registry.MOVES["Mul"]
    calls = []

    @register_rule("Mul")
    def scale(use, units):
        calls.append(use)
        return summed_to(use.g * use.inputs[1 - use.at], use.out, use.shape, units)

    try:
        w = tf.Variable([1.0, 2.0, 3.0])
        x = RNG.normal(size=(5, 3)).astype("float32")

        @tf.function(input_signature=[tf.TensorSpec([None, 3])])
        def norms(x):
            return tfdpfl.clipping.per_example_norms(tf.reduce_sum(x * w), [w])

        np.testing.assert_allclose(norms(x), np.linalg.norm(x, axis=1), rtol=1e-6)
        assert calls and registry.MOVES["Mul"] is known
    finally:
        registry.RULES["Mul"] = old


@pytest.mark.one_stack
@pytest.mark.slow
def test_fix_takes_layers_without_weights_as_they_are():
    """A Lambda's function has no config that Keras could make it from."""
    double = L.Lambda(lambda x: 2 * x, name="double")
    for model in (
        tf.keras.Sequential([tf.keras.Input((6,)), L.Dense(4), L.BatchNormalization(), double, L.Dense(1)]),
        tf.keras.Model(
            x := tf.keras.Input((6,)), L.Dense(1)(double(L.Dropout(0.5)(L.BatchNormalization()(L.Dense(4)(x)))))
        ),
    ):
        fixed = fix(model).model
        assert [type(layer).__name__ for layer in fixed.layers].count("LayerNormalization") == 1
        fixed.compile(tfdpfl.DPSGD(1.0, 1.0, learning_rate=0.1), "mse")
        fixed.fit(np.ones((8, 6)), np.ones((8, 1)), verbose=0)
        model(np.ones((2, 6), "float32"))  # the old one is as it was


def test_fix_names_the_layer_that_it_cannot_copy():
    class Mine(tf.keras.regularizers.Regularizer):
        def __call__(self, w):
            return tf.reduce_sum(w * w)

    model = tf.keras.Sequential(
        [tf.keras.Input((6,)), L.Dense(4, kernel_regularizer=Mine(), name="penalised"), L.BatchNormalization()]
    )
    with pytest.raises(PrivacyError, match=r"'penalised' \(Dense\) cannot be copied.*get_config"):
        fix(model)


@pytest.mark.slow
def test_fix_replaces_batch_normalisation_and_copies_the_rest():
    inner = tf.keras.Sequential([tf.keras.Input((8, 8, 6)), L.Conv2D(4, 3), L.BatchNormalization(name="inner_bn")])
    inputs = tf.keras.Input((10, 10, 3))
    x = L.Conv2D(6, 3)(inputs)
    x = L.BatchNormalization(name="first_bn")(x)
    x = L.Flatten()(inner(x))
    x = L.BatchNormalization(name="flat_bn")(x)
    model = tf.keras.Model(inputs, L.Dense(4)(x))
    fixed = fix(model)
    text = str(fixed)
    assert "first_bn" in text and "GroupNormalization(groups=6)" in text
    assert "inner_bn" in text and "flat_bn: BatchNormalization → LayerNormalization" in text
    np.testing.assert_array_equal(fixed.model.layers[1].get_weights()[0], model.layers[1].get_weights()[0])
    np.testing.assert_array_equal(fixed.model.layers[-1].get_weights()[0], model.layers[-1].get_weights()[0])
    fixed.model.compile(optimizer=tfdpfl.DPSGD(1.0, 1.0), loss=LOSS)
    fixed.model.fit(IMAGES, LABELS, verbose=0)
    validate(fixed.model, (IMAGES, LABELS))
    assert "Nothing" in str(fix(fixed.model))


def test_fix_refuses_a_subclassed_model():
    class Own(tf.keras.Model):
        def call(self, x):
            return x

    with pytest.raises(PrivacyError, match=r"Own is a subclassed model.*GroupNormalization"):
        fix(Own())
