"""explain, validate, fix and register_rule."""

import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import PrivacyError
from tfdpfl.clipping import explain, fix, fixing, register_rule, registry, validate
from tfdpfl.clipping.gradients import MaterializedGradient, summed_to

RNG = np.random.default_rng(0)
L = tf.keras.layers
IMAGES, LABELS = RNG.normal(size=(6, 10, 10, 3)).astype("float32"), RNG.integers(0, 4, 6)
KERAS_3 = not hasattr(tf.keras, "__internal__")
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


@pytest.mark.parametrize("op_type", [None, "Nope"])
def test_a_rule_for_no_op_is_refused(op_type):
    with pytest.raises(ValueError, match=f"op_type={op_type!r} is no op"):
        register_rule(op_type, batch_axis=0)


def test_what_is_no_model_cannot_be_fixed():
    with pytest.raises(TypeError, match="model=None is not a Keras model"):
        fix(None)


@pytest.fixture
def rules():
    """The tables of moves and rules, which are as they were when a test ends."""
    known = {name: dict(getattr(registry, name)) for name in ("BATCHING_RULES", "RULES")}
    yield registry
    for name, table in known.items():
        getattr(registry, name).clear()
        getattr(registry, name).update(table)


def norms_of(loss, *weights):
    """A function of a batch of 3 numbers each: the norms of its examples' gradients."""
    spec = [tf.TensorSpec([None, 3])]
    return tf.function(lambda x: tfdpfl.clipping.per_example_norms(loss(x), list(weights)), spec, autograph=False)


@pytest.mark.parametrize("axis", [0, 1])
def test_a_promise_is_tried_on_random_numbers(axis, rules):
    register_rule("ReverseV2", batch_axis=0)(lambda use, units: None)
    w = tf.Variable([1.0, 2.0, 3.0])
    norms = norms_of(lambda x: tf.reduce_sum(tf.raw_ops.ReverseV2(tensor=x, axis=[axis]) * w), w)
    x = IMAGES[:, 0, 0]
    if axis:
        np.testing.assert_allclose(norms(x), np.linalg.norm(x, axis=1), rtol=1e-6)
    else:
        with pytest.raises(PrivacyError, match=r"ReverseV2.*one example changes the values or the gradients of others"):
            norms(x)


def flat(*layers):
    model = tf.keras.Sequential([tf.keras.Input((5,)), *layers, L.Dense(4)])
    model.compile(optimizer="sgd", loss=LOSS)
    return model, (RNG.normal(size=(6, 5)).astype("float32"), LABELS)


def products(use):
    return tf.einsum("bi,bj->bij", use.inputs[0], use.g)


WRONG = {
    "short": lambda use: 0.01 * products(use),
    "none": lambda use: 0 * products(use),
    "mean": lambda use: 0 * products(use) + tf.reduce_mean(products(use), 0, keepdims=True),
    "sign": lambda use: products(use) * tf.sign(tf.reduce_sum(products(use))),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_step_is_not_traced_with_a_rule_that_is_wrong(kind, rules):
    register_rule("MatMul")(lambda use, units: MaterializedGradient([WRONG[kind](use)]))
    w = tf.Variable(np.ones((3, 2), "float32"))
    with pytest.raises(PrivacyError, match=r"Your rule for MatMul \(<lambda>\) does not give the gradients of"):
        norms_of(lambda x: tf.reduce_sum(tf.sin(x @ w)), w)(IMAGES[:, 0, 0])


@pytest.mark.slow
def test_fit_refuses_a_rule_that_is_wrong_and_changes_nothing(rules):
    model, (x, y) = flat()
    register_rule("MatMul")(lambda use, units: MaterializedGradient([WRONG["short"](use)]))
    model.compile(optimizer=tfdpfl.DPSGD(1.0, 1.0), loss=LOSS)
    before = model.get_weights()
    with pytest.raises(PrivacyError, match="Your rule for MatMul"):
        model.fit(x, y, verbose=0)
    assert all(map(np.array_equal, before, model.get_weights()))


def test_a_rule_that_cannot_be_compared_gives_way_to_the_exact_fallback(rules):
    def works_elsewhere_alone(use, units):
        if use.op.name.startswith("tfdpfl"):
            raise KeyError("another graph")
        return MaterializedGradient([WRONG["short"](use)])

    register_rule("MatMul")(works_elsewhere_alone)
    w, x = tf.Variable(np.ones((3, 2), "float32")), IMAGES[:, 0, 0]
    with pytest.warns(UserWarning, match=r"\(works_elsewhere_alone\) cannot be compared .* KeyError: 'another graph'"):
        norms = norms_of(lambda x: tf.reduce_sum(x @ w), w)(x)
    np.testing.assert_allclose(norms, np.sqrt(2) * np.linalg.norm(x, axis=1), rtol=1e-6)


@pytest.mark.slow
def test_validate_compares_rules_with_exact_gradients(rules):
    """This rule is right on the random numbers that a step is traced with."""
    short = lambda use: tf.where(tf.reduce_max(use.inputs[0]) > 1000, 0.01, 1.0) * products(use)
    register_rule("MatMul")(lambda use, units: MaterializedGradient([short(use)]))
    model, (x, y) = flat()
    with pytest.raises(PrivacyError, match="Your rules are used for MatMul"):
        validate(model, (5000 * x, y))


@pytest.mark.slow
def test_validate_accepts_a_rule_that_is_right(rules):
    register_rule("MatMul")(lambda use, units: MaterializedGradient([products(use)]))
    validate(*flat(L.Dense(3, activation="tanh")))


@pytest.mark.slow
def test_validate_says_where_numbers_cannot_be_compared():
    class Noisy(L.Layer):
        def call(self, x):
            return x + tf.random.normal(tf.shape(x))

    with pytest.warns(UserWarning, match="draws random numbers outside of training"):
        validate(*flat(Noisy()))


@pytest.mark.slow
def test_reports_and_ledgers_name_the_rules_of_users(rules):
    model, (x, y) = flat()
    register_rule("MatMul")(lambda use, units: MaterializedGradient([products(use)]))
    model.compile(optimizer=tfdpfl.DPSGD(1.0, 1.0), loss=LOSS)
    budget = tfdpfl.callbacks.PrivacyBudget(delta=1e-3, accountant="rdp")
    model.fit(x, y, verbose=0, callbacks=[budget])
    ledger = tfdpfl.PrivacyLedger.from_dict(budget.ledger.to_dict())
    merged = tfdpfl.PrivacyLedger().merge(ledger).of_dataset(None)
    for report in (budget.report(), merged.report(1e-3, "rdp")):
        assert "rules that a user registered for these ops: MatMul." in report.statement()
    assert ledger == budget.ledger != tfdpfl.PrivacyLedger()


def test_validate_needs_two_examples():
    with pytest.raises(ValueError, match="at least two"):
        validate(compiled(L.Conv2D(2, 3)), (IMAGES[:1], LABELS[:1]))


def test_a_registered_rule_is_used_and_exact(rules):
    known = rules.BATCHING_RULES["Mul"]
    calls = []

    @register_rule("Mul")
    def scale(use, units):
        calls.append(use)
        return summed_to(use.g * use.inputs[1 - use.at], use.out, use.shape, units)

    w = tf.Variable([1.0, 2.0, 3.0])
    x = RNG.normal(size=(5, 3)).astype("float32")
    np.testing.assert_allclose(norms_of(lambda x: tf.reduce_sum(x * w), w)(x), np.linalg.norm(x, axis=1), rtol=1e-6)
    assert calls and rules.BATCHING_RULES["Mul"] is known


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
