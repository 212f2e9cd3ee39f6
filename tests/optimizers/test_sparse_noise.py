"""DP-AdaFEST: which rows of a table are trained, their sums, both noises, the price, and what is refused."""

import conftest as c
import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

import tfdpfl
from tfdpfl import AdaFEST, PrivacyError
from tfdpfl.clipping.pipeline import ClippingPipeline
from tfdpfl.optimizers import _replicas

keras = tf.keras
WORDS, USERS, LENGTH = 20, 6, 4
rng = np.random.default_rng(0)
TABLES = [rng.normal(size=s).astype("float32") for s in ((WORDS, 3), (USERS, 2), (LENGTH * 3 + 2, 1))]
X = [np.minimum(rng.geometric(0.2, size=(40, LENGTH)) - 1, WORDS - 1), rng.integers(0, USERS, (40, 1))]
Y = rng.normal(size=(40, 1)).astype("float32")


def squared_error(y, out):
    return tf.reduce_mean(tf.reduce_sum(tf.square(out - tf.cast(y, out.dtype)), 1))


def layers(words=WORDS, length=LENGTH, **kwargs):
    inputs = [keras.Input((length,), dtype="int32"), keras.Input((1,), dtype="int32")]
    word = keras.layers.Embedding(words, 3, name="words", **kwargs)(inputs[0])
    user = keras.layers.Embedding(USERS, 2, name="users")(inputs[1])
    flat = [keras.layers.Flatten()(word), keras.layers.Flatten()(user)]
    out = keras.layers.Dense(1, use_bias=False, name="top", dtype="float32")(keras.layers.Concatenate()(flat))
    return inputs, out


def model_of(optimizer, loss=squared_error, **kwargs):
    model = keras.Model(*layers(**kwargs))
    model.set_weights(TABLES)
    model.compile(optimizer, loss=loss)
    return model


def gradients(x=X, y=Y):
    """Of each example, for words, users and top, by the chain rule; and the rows that it looks up, 0 or 1."""
    words, users, top = (t.astype(float) for t in TABLES)
    n = len(y)
    h = np.concatenate([words[x[0]].reshape(n, -1), users[x[1]].reshape(n, -1)], 1)
    r = 2 * (h @ top - y)  # [n, 1]
    of_words, of_users, at = np.zeros((n, WORDS, 3)), np.zeros((n, USERS, 2)), np.arange(n)
    for t in range(LENGTH):
        of_words[at, x[0][:, t]] += r * top[3 * t : 3 * t + 3, 0]
    of_users[at, x[1][:, 0]] += r * top[-2:, 0]
    maps = [np.zeros((n, WORDS)), np.zeros((n, USERS))]
    for m, ids in zip(maps, x, strict=True):
        m[at[:, None], ids] = 1
    return [of_words, of_users, h[:, :, None] * r[:, None]], maps


def kept_means(clip, sparse):
    """What an optimizer without noise must see; and how many rows of each table are kept."""
    found, maps = gradients()
    factors = np.minimum(1, clip / c.norms_of(found))
    assert np.any(factors < 1) and np.any(factors == 1)
    sums = [np.tensordot(factors, g, 1) / len(Y) for g in found]
    named = range(2) if sparse.tables is None else [["words", "users"].index(name) for name in sparse.tables]
    parts = np.minimum(1, sparse.clip / np.sqrt(sum(maps[i].sum(1) for i in named)))
    number = []
    for i in named:
        rows = parts @ maps[i] >= sparse.threshold
        sums[i] *= rows[:, None]
        number.append(rows.sum())
    return sums, number


SPARSE = AdaFEST(threshold=4.0, clip=1.5)


@pytest.mark.parametrize("name, kwargs", [
    ("SGD", {}), ("SGD", {"momentum": 0.9, "global_clipnorm": 0.1}), ("Adagrad", {}),
    pytest.param("Adam", {}, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.slow
def test_the_rows_that_enough_examples_look_up_are_trained_by_any_optimizer(name, kwargs):
    base = getattr(keras.optimizers, name)
    model = model_of(tfdpfl.make_dp_optimizer_class(base)(2.0, 0.0, learning_rate=0.1, sparse=SPARSE, **kwargs))
    sums, number = kept_means(2.0, SPARSE)
    assert all(0 < n < rows for n, rows in zip(number, (WORDS, USERS), strict=True))
    plain, other = base(learning_rate=0.1, **kwargs), keras.Model(*layers())
    other.set_weights(TABLES)
    want = c.update_of(other, lambda: plain.apply_gradients(
        [(tf.constant(s, tf.float32), v) for s, v in zip(sums, other.trainable_variables, strict=True)]))  # fmt: skip
    got = c.update_of(model, lambda: model.train_on_batch(X, Y))
    for g, w, s in zip(got, want, sums, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5)
        assert np.all(g[s == 0] == 0)


@pytest.mark.one_stack
@pytest.mark.slow
def test_blanks_that_fill_up_a_batch_are_not_counted():
    """Poisson batches have rows of weight 0 where fewer were drawn, and looked-up words in them."""
    weight = np.repeat([1.0, 0.0], 20).astype("float32")
    optimizers = [tfdpfl.DPSGD(2.0, 0.0, learning_rate=1.0, sparse=SPARSE, expected_batch_size=40) for _ in range(2)]
    models = [model_of(optimizer, "mse") for optimizer in optimizers]
    blanks, none = (
        c.update_of(model, lambda model=model, batch=batch: model.train_on_batch(*batch))
        for model, batch in zip(models, [(X, Y, weight), ([x[:20] for x in X], Y[:20])], strict=True)
    )
    assert 0 < np.count_nonzero(blanks[0]) < blanks[0].size
    for a, b in zip(blanks, none, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_tables_can_be_named_and_the_others_are_trained_whole():
    sparse = AdaFEST(threshold=12.0, tables=["users"])
    model = model_of(tfdpfl.DPSGD(2.0, 0.0, learning_rate=1.0, sparse=sparse))
    sums, (number,) = kept_means(2.0, sparse)
    assert number < USERS
    for g, s in zip(c.update_of(model, lambda: model.train_on_batch(X, Y)), sums, strict=True):
        np.testing.assert_allclose(g, -s, atol=1e-5)
    again = type(model.optimizer).from_config(model.optimizer.get_config())
    assert again.sparse == sparse


@pytest.mark.slow
def test_one_example_moves_counts_and_sums_by_no_more_than_their_clips():
    variables = [tf.Variable(t) for t in TABLES]

    @tf.function(
        reduce_retracing=True,
        input_signature=[
            tf.TensorSpec([None, LENGTH], tf.int64),
            tf.TensorSpec([None, 1], tf.int64),
            tf.TensorSpec([None, 1]),
        ],
    )
    def step(words, users, y):  # fmt: skip
        rows = tf.concat([tf.reshape(tf.gather(variables[0], words), [-1, 3 * LENGTH]),
                          tf.reshape(tf.gather(variables[1], users), [-1, 2])], 1)  # fmt: skip
        plan = ClippingPipeline(squared_error(y, rows @ variables[2]), variables, None)
        plan.leave_in_rows(plan.looked_up())
        clipped = plan.finish(plan.squared_norms(), 0.7)
        counts = plan.clipped_counts([0, 1], 1.3, ~tf.math.is_finite(clipped.norms))
        return counts, [tf.convert_to_tensor(s) for s in clipped.sum]

    def both(rows, y=Y):
        return [c.flat([t.numpy() for t in part]) for part in step(X[0][rows], X[1][rows], y[rows])]

    every, wild, bad = np.arange(40), Y.copy(), Y.copy()
    wild[3], bad[3] = 1e4, np.nan
    (counts, sums), (less, sums_less) = both(every, wild), both(np.delete(every, 3), wild)
    assert np.linalg.norm(counts - less) == pytest.approx(1.3, rel=1e-5)
    assert np.linalg.norm(sums - sums_less) == pytest.approx(0.7, rel=1e-4)
    maps = np.concatenate(gradients()[1], 1)
    np.testing.assert_allclose(counts, (maps * np.minimum(1, 1.3 / np.sqrt(maps.sum(1)))[:, None]).sum(0), rtol=1e-5)
    for got, want in zip(both(every, bad), (less, sums_less), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def share(got, z):
    """Whether a share of many rows is that of normals beyond z standard deviations."""
    p = norm.sf(z)
    return abs(got.mean() - p) < 5 * np.sqrt(p * (1 - p) / got.size)


@pytest.mark.one_stack
@pytest.mark.slow
def test_counts_and_kept_rows_have_their_noise_whether_looked_up_or_not():
    """All gradients are tiny: what moves a row is noise."""
    rows, n, z, z_counts, clip = 20_000, 3000, 1.0, 2.0, 0.5
    sparse = AdaFEST(threshold=3.0, noise_multiplier=z_counts, tables=["only"])
    model = keras.Sequential([
        keras.Input((1,), dtype="int32"), keras.layers.Embedding(rows, 4, embeddings_initializer="zeros", name="only"),
        keras.layers.Flatten(),
        keras.layers.Dense(2000, use_bias=False, kernel_initializer=keras.initializers.Constant(1e-6)),
    ])  # fmt: skip
    model.compile(tfdpfl.DPSGD(clip, z, learning_rate=1.0, expected_batch_size=10, sparse=sparse), loss=squared_error)
    x, y = np.arange(n)[:, None], np.full((n, 2000), 0.01, "float32")
    table, top = c.update_of(model, lambda: model.train_on_batch(x, y))
    kept = np.any(table != 0, 1)
    assert share(kept[:n], (3 - 1) / z_counts) and share(kept[n:], 3 / z_counts)
    assert not any(share(kept[n:], 3 / (f * z_counts)) for f in (2 / 3, 3 / 2))
    stddev = (z**-2 - z_counts**-2) ** -0.5 * clip / 10
    for noise in (top, table[:n][kept[:n]], table[n:][kept[n:]]):
        assert abs(noise.std() / stddev - 1) < 4.5 / np.sqrt(2 * noise.size)
        assert np.all(noise != 0) and abs(noise.mean()) < 5 * stddev / np.sqrt(noise.size)
    before = kept
    table, _ = c.update_of(model, lambda: model.train_on_batch(x, y))
    both = (np.any(table != 0, 1) & before)[n:]
    assert both.sum() < 2 * norm.sf(1.5) * before[n:].sum()  # other noise, on the counts too

    # What ran is priced as the two releases that it was.
    assert model.optimizer.executed == [(z, 2)]
    z_sums = stddev * 10 / clip
    joint = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(s) for s in (z_sums, z_counts)])
    for q in (1.0, 0.01):
        epsilons = []
        for event in (joint, dp_accounting.GaussianDpEvent(z)):
            accountant = RdpAccountant()
            accountant.compose(dp_accounting.PoissonSampledDpEvent(q, event), 2)
            epsilons.append(accountant.get_epsilon(1e-5))
        assert epsilons[0] == pytest.approx(epsilons[1], rel=1e-9)


@pytest.mark.parametrize("beside", [
    {"num_microbatches": 2}, {"gradient_accumulation_steps": 2}, {"rows_per_unit": 2}, {"secure_noise": True},
    {"noise": tfdpfl.noise.Tree()}, {"l2_norm_clip": tfdpfl.AdaptiveClip()},
], ids=lambda d: next(iter(d)))  # fmt: skip
def test_what_has_no_common_form_with_it_is_refused(beside):
    with pytest.raises(ValueError, match="together with sparse=AdaFEST"):
        tfdpfl.DPSGD(**{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "sparse": AdaFEST(threshold=1.0), **beside})


@pytest.mark.parametrize("bad", [
    {"threshold": 0}, {"threshold": np.nan}, {"threshold": 1, "clip": 0}, {"threshold": 1, "noise_multiplier": -1},
    {"threshold": 1, "tables": "words"}, {"threshold": 1, "tables": []}, {"threshold": 1, "tables": [3]},
], ids=str)  # fmt: skip
def test_arguments_out_of_range_are_refused(bad):
    with pytest.raises(ValueError, match=list(bad)[-1]):
        AdaFEST(**bad)


def test_counts_that_cost_more_than_the_whole_step_are_refused():
    with pytest.raises(ValueError, match="not above the optimizer's 1"):
        tfdpfl.DPSGD(1.0, 1.0, sparse=AdaFEST(threshold=1.0, noise_multiplier=1.0))
    with pytest.raises(ValueError, match=r"sparse=3 must be None"):
        tfdpfl.DPSGD(1.0, 1.0, sparse=3)
    sums, counts = AdaFEST(threshold=1.0).split(1.5)
    assert sums**-2 + counts**-2 == pytest.approx(1.5**-2) and counts == 3.0


def tied():
    (inputs, _), table = layers(), keras.layers.Embedding(WORDS, 3, name="words")
    h = keras.layers.Flatten()(table(inputs[0]))[:, :3]

    class Tied(keras.Model):
        def call(self, x, training=None):
            return super().call(x) @ tf.transpose(tf.convert_to_tensor(table.embeddings))

    return Tied([inputs[0], inputs[1]], h)


@pytest.mark.parametrize("why, make, given, more", [
    ("no lookup of rows", tied, {}, {}),
    ("has a regularizer", lambda: keras.Model(*layers(embeddings_regularizer="l2")), {}, {}),
    ("finds none of its tables", lambda: keras.Model(*layers()), {"tables": ["wards", "users"]}, {}),
    ("XLA compiles", lambda: keras.Model(*layers()), {}, {"jit_compile": True}),
], ids=lambda v: v if isinstance(v, str) else "")  # fmt: skip
def test_models_whose_rows_cannot_be_left_out_are_refused(why, make, given, more):
    model = make()
    sparse = AdaFEST(threshold=1.0, **given)
    model.compile(tfdpfl.DPSGD(1.0, 1.0, sparse=sparse), loss=squared_error, **more)
    before = model.get_weights()
    with pytest.raises(PrivacyError, match=why):
        model.train_on_batch(X, Y)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert model.optimizer.num_dp_steps == 0


def test_replicas_and_bias_correction_are_refused(monkeypatch):
    model = model_of(tfdpfl.DPAdamBC(1.0, 1.0, expected_batch_size=40, sparse=SPARSE))
    with pytest.raises(PrivacyError, match="only to some rows"):
        model.train_on_batch(X, Y)
    monkeypatch.setattr(_replicas, "number", lambda: 2)
    monkeypatch.setattr(_replicas, "among_replicas", lambda: True)
    with pytest.raises(PrivacyError, match="sparse=AdaFEST on 2 replicas"):
        model_of(tfdpfl.DPSGD(1.0, 1.0, sparse=SPARSE)).train_on_batch(X, Y)
