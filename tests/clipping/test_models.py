"""explain, validate, fix and register_rule."""

import pytest
import tensorflow as tf
from model_cases import IMAGES, LABELS, LOSS, RNG, L, compiled, flat

from tfdpfl import PrivacyError
from tfdpfl.clipping import explain, validate


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
    (convolution,) = (row for row in table.rows if row.op == "Conv2D")
    # 5 positions of 3 × 4 entries for 6 filters: Gram matrices of single steps and of gradients, or (in C) gradients.
    assert (convolution.way, convolution.cost) in [("ghost", 5**2 * (4 + 6)), ("formed", 5 * 12 * 6)]
    assert {"ghost", "formed", "fallback"} == set(ways)
    for v in model.trainable_variables:
        assert (getattr(v, "path", None) or v.name) in str(table)


@pytest.mark.slow
def test_validate_accepts_a_model_that_keeps_examples_apart_and_says_what_it_compared(capsys):
    validate(compiled(L.Conv2D(4, 3), L.GroupNormalization(2), L.Dropout(0.5)), (IMAGES, LABELS))
    said = capsys.readouterr().out
    assert f"one of {len(IMAGES)} examples moved no other's" in said and "For 6 weights" in said


@pytest.mark.slow
@pytest.mark.one_stack
def test_a_data_set_stands_for_its_first_batch():
    model, batches = compiled(L.Conv2D(2, 3)), tf.data.Dataset.from_tensor_slices((IMAGES, LABELS)).batch(4)
    validate(model, batches)
    assert str(explain(model, batches)) == str(explain(model, (IMAGES, LABELS)))
    assert explain(model, batches.map(lambda x, y: x)) == explain(model, IMAGES)
    with pytest.raises(ValueError, match="without a batch"):
        explain(model, batches.take(0))


def test_validate_names_what_mixes():
    with pytest.raises(PrivacyError, match=r"batch_normalization.*GroupNormalization"):
        validate(compiled(L.Conv2D(4, 3), L.BatchNormalization()), (IMAGES, LABELS))


@pytest.mark.slow
def test_validate_says_where_numbers_cannot_be_compared():
    class Noisy(L.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    with pytest.warns(UserWarning, match="draws random numbers outside of training"):
        validate(*flat(Noisy()))


def test_validate_needs_two_examples():
    with pytest.raises(ValueError, match="at least two"):
        validate(compiled(L.Conv2D(2, 3)), (IMAGES[:1], LABELS[:1]))
