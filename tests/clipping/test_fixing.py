"""`fix` replaces each layer that mixes examples, copies the rest as it is, and refuses what it cannot copy."""

import numpy as np
import pytest
import tensorflow as tf
from model_cases import IMAGES, LABELS, LOSS, RNG, L, compiled

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.clipping import fix, fixing, validate

KERAS_3 = not hasattr(tf.keras, "__internal__")


def test_what_is_no_model_cannot_be_fixed():
    with pytest.raises(TypeError, match="model=None is not a Keras model"):
        fix(None)


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


class WithoutConfig(tf.keras.regularizers.Regularizer):
    def __call__(self, w):
        return tf.reduce_sum(w * w)


def test_fix_keeps_a_layer_that_keras_cannot_make_from_its_config():
    model = tf.keras.Sequential(
        [tf.keras.Input((6,)), L.Dense(4, kernel_regularizer=WithoutConfig(), name="penalised"), L.BatchNormalization()]
    )
    fixed = fix(model)
    assert "penalised: kept in both models, because Keras cannot make a Dense" in str(fixed)
    assert fixed.model.get_layer("penalised") is model.get_layer("penalised")


def normalized(adapted):
    """A model that normalizes its inputs by what it has learned of them, and then mixes examples."""
    inputs = tf.keras.Input((3,))
    return tf.keras.Model(inputs, L.Dense(2)(L.BatchNormalization()(L.Dense(4)(adapted(inputs)))))


def test_fix_keeps_the_statistics_of_normalization():
    x = RNG.normal(100.0, 20.0, (512, 3)).astype("float32")
    layer = L.Normalization(name="adapted")
    layer.adapt(x)
    fixed = fix(normalized(layer)).model.get_layer("adapted")
    assert fixed is not layer
    np.testing.assert_allclose(fixed(x), (x - x.mean(0)) / x.std(0), atol=1e-3)


@pytest.mark.slow
def test_fix_leaves_frozen_normalizations_of_a_pretrained_model_as_they_are():
    inputs = tf.keras.Input((3,))
    norm = L.BatchNormalization(name="learned")
    base = tf.keras.Model(inputs, norm(inputs), name="base")
    norm.moving_mean.assign([1.0, 2.0, 3.0])
    norm.moving_variance.assign([4.0, 9.0, 16.0])
    base.trainable = False
    assert fix(base).model is base
    inputs = tf.keras.Input((3,))
    model = tf.keras.Model(inputs, L.Dense(1)(L.BatchNormalization(name="new")(base(inputs))))
    fixed = fix(model)
    assert fixed.changes == ("new: BatchNormalization → LayerNormalization",)
    x = RNG.normal(size=(5, 3)).astype("float32")
    copied = fixed.model.get_layer("base")
    assert copied is not base and not copied.trainable_weights
    np.testing.assert_allclose(copied(x, training=True), (x - [1, 2, 3]) / [2, 3, 4], rtol=1e-3, atol=1e-3)
    fixed.model.compile(tfdpfl.DPSGD(1.0, 0.0), "mse")
    fixed.model.fit(x, x[:, :1], verbose=0)


def test_fix_returns_a_model_that_has_nothing_to_replace():
    model = tf.keras.Sequential([tf.keras.Input((3,)), L.Normalization(), L.Dense(1)])
    fixed = fix(model)
    assert fixed.model is model
    assert str(fixed) == "Nothing to change."


class Words(L.Layer):
    """A layer with a weight, a vocabulary that it learned, and a random generator."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.lookup, self.drop = L.StringLookup(), L.Dropout(0.5)

    def build(self, shape):
        self.table = self.add_weight(shape=(9,), initializer="ones", name="table")
        self.built = True

    def call(self, x, training=False):
        return self.drop(tf.gather(tf.convert_to_tensor(self.table), self.lookup(x)), training=training)


@pytest.mark.slow
def test_fix_keeps_vocabularies_random_generators_and_what_is_frozen():
    words = Words(name="words")
    words.lookup.adapt(np.array(["c", "b", "b", "a", "a", "a"]))
    inputs = tf.keras.Input((2,), dtype=tf.string)
    model = tf.keras.Model(inputs, L.BatchNormalization()(words(inputs)))
    words.table.assign(np.arange(9, dtype="float32"))
    words.trainable = False
    copied = fix(model).model.get_layer("words")
    text = tf.constant([["a", "b"], ["c", "d"]])
    assert copied is not words and copied.lookup.get_vocabulary() == ["[UNK]", "a", "b", "c"]
    np.testing.assert_array_equal(copied(text), [[1.0, 2.0], [3.0, 0.0]])
    assert not copied.trainable_weights
    if KERAS_3:  # on Keras 2 Dropout draws from a generator that all layers share
        ones = np.ones((4, 50), "float32")
        first, second = (np.asarray(layer.drop(ones, training=True)) for layer in (words, copied))
        np.testing.assert_array_equal(first, second)


class Scaled(L.Layer):
    """A layer whose config leaves out an argument."""

    def __init__(self, factor=1.0, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")
        self.built = True

    def call(self, x):
        return self.factor * self.scale * x

    def get_config(self):
        return super().get_config()


def test_fix_refuses_a_copy_that_computes_something_else():
    model = normalized(Scaled(3.0, name="scaled"))
    with pytest.raises(PrivacyError, match=r"The copy of 'scaled' \(Scaled\) is not the same.*outputs.*get_config"):
        fix(model)


class Block(L.Layer):
    """A user's layer, in which are what mixes examples as an attribute, in a list, and in a model."""

    def __init__(self, width=4, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self._steps = [L.Conv2D(width, 3, padding="same"), L.BatchNormalization(name="listed")]
        self.inner = tf.keras.Sequential([L.Conv2D(width, 1), L.BatchNormalization(name="nested")])
        self.last = L.BatchNormalization(name="attribute")

    def build(self, shape):
        after = (*shape[:-1], self.width)
        for layer, seen in [(self._steps[0], shape), *((x, after) for x in (self._steps[1], self.inner, self.last))]:
            layer.build(seen)
        self.built = True

    def call(self, x):
        for layer in self._steps:
            x = layer(x)
        return self.last(self.inner(x))

    def get_config(self):
        return {**super().get_config(), "width": self.width}


class Tree(tf.keras.Model):
    """A subclassed model of such layers."""

    def __init__(self, width=4, **kwargs):
        super().__init__(**kwargs)
        self.width, self.block, self.head = width, Block(width), L.Dense(4)

    def build(self, shape):
        self.block.build(shape)
        self.head.build((None, 10 * 10 * self.width))
        self.built = True

    def call(self, x):
        return self.head(tf.reshape(self.block(x), [-1, 10 * 10 * self.width]))

    def get_config(self):
        return {"width": self.width, "name": self.name}


@pytest.mark.slow
@pytest.mark.parametrize("subclassed", [False, True])
def test_fix_replaces_layers_inside_of_a_users_own(subclassed):
    if subclassed:
        model = Tree()
        model(IMAGES)
    else:
        model = compiled(Block(name="block"))
    (model.block if subclassed else model.get_layer("block"))._steps[0].trainable = False
    before = [np.array(v) for v in model.weights]
    fixed = fix(model)
    for name in ("listed", "nested", "attribute"):
        assert f"{name}: BatchNormalization → GroupNormalization(groups=4)" in str(fixed)
    assert "Block still makes a BatchNormalization when Keras loads it" in str(fixed)
    assert len(fixed.model.weights) == len(model.weights) - 6  # three moving means and variances
    for a, b in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(a, b)
    old, new = (m.block if subclassed else m.get_layer("block") for m in (model, fixed.model))
    np.testing.assert_array_equal(old._steps[0].get_weights()[0], new._steps[0].get_weights()[0])
    assert not new._steps[0].trainable and new.inner.layers[0].trainable
    fixed.model.compile(optimizer=tfdpfl.DPSGD(1.0, 1.0), loss=LOSS)
    fixed.model.fit(IMAGES, LABELS, verbose=0)
    assert fix(fixed.model).model is fixed.model


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


def test_fix_refuses_a_subclassed_model_that_it_cannot_copy():
    class Own(tf.keras.Model):
        def __init__(self, norm):
            super().__init__()
            self.norm = norm

        def call(self, x):
            return self.norm(x)

    model = Own(L.BatchNormalization())
    model(np.ones((2, 3), "float32"))
    with pytest.raises(PrivacyError, match=r"Own is a subclassed model, which Keras cannot.*GroupNormalization"):
        fix(model)


def test_fix_asks_for_a_model_that_is_built():
    with pytest.raises(PrivacyError, match=r"has seen no input.*model\.build"):
        fix(tf.keras.Sequential([L.Dense(3), L.BatchNormalization()]))


def test_fix_refuses_what_it_cannot_reach(monkeypatch):
    monkeypatch.setattr(fixing, "_replace_inside", lambda layer, changes: None)
    model = tf.keras.Sequential([tf.keras.Input((6, 4)), L.TimeDistributed(L.BatchNormalization(name="deep"))])
    with pytest.raises(PrivacyError, match="'deep' is a BatchNormalization that fix cannot reach"):
        fix(model)
