"""DP-AdaFEST: which rows of a table are trained, their sums, both noises, the price, and what is refused."""

import itertools
from collections import Counter

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
from tfdpfl.optimizers._sparse_noise import SparseNoise

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


def gradients(x=X, y=Y, tables=TABLES):
    """Of each example, for words, users and top, by the chain rule; and the rows that it looks up, 0 or 1."""
    words, users, top = (t.astype(float) for t in tables)
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


def kept_means(clip, sparse, x=X, y=Y, tables=TABLES, unit=1):
    """What an optimizer without noise must see, if so many rows after each other are one unit; how many rows of each
    table are kept; and the share of units within the clip."""
    found, maps = gradients(x, y, tables)
    units = len(y) // unit
    found = [g.reshape(units, unit, *g.shape[1:]).mean(1) for g in found]
    maps = [m.reshape(units, unit, -1).max(1) for m in maps]
    norms = c.norms_of(found)
    factors = np.minimum(1, clip / norms)
    assert np.any(factors < 1) and np.any(factors == 1)
    sums = [np.tensordot(factors, g, 1) / units for g in found]
    named = range(2) if sparse.tables is None else [["words", "users"].index(name) for name in sparse.tables]
    parts = np.minimum(1, sparse.clip / np.sqrt(sum(maps[i].sum(1) for i in named)))
    number = []
    for i in named:
        rows = parts @ maps[i] >= sparse.threshold
        sums[i] *= rows[:, None]
        number.append(rows.sum())
    return sums, number, np.mean(norms <= clip)


SPARSE = AdaFEST(threshold=4.0, clip=1.5)


@pytest.mark.parametrize("name, kwargs", [
    ("SGD", {"momentum": 0.9, "global_clipnorm": 0.1}), ("Adagrad", {}),
    pytest.param("Adam", {}, marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.slow
def test_the_rows_that_enough_examples_look_up_are_trained_by_any_optimizer(name, kwargs):
    base = getattr(keras.optimizers, name)
    model = model_of(tfdpfl.make_dp_optimizer_class(base)(2.0, 0.0, learning_rate=0.1, sparse=SPARSE, **kwargs))
    sums, number, _ = kept_means(2.0, SPARSE)
    assert all(0 < n < rows for n, rows in zip(number, (WORDS, USERS), strict=True))
    plain, other = base(learning_rate=0.1, **kwargs), keras.Model(*layers())
    other.set_weights(TABLES)
    want = c.update_of(other, lambda: plain.apply_gradients(
        [(tf.constant(s, tf.float32), v) for s, v in zip(sums, other.trainable_variables, strict=True)]))  # fmt: skip
    got = c.update_of(model, lambda: model.train_on_batch(X, Y))
    for g, w, s in zip(got, want, sums, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-5)
        assert np.all(g[s == 0] == 0)


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


CLIPS = keras.optimizers.schedules.PiecewiseConstantDecay([0], [30.0, 15.0])
ADAPTIVE = tfdpfl.AdaptiveClip(initial=20.0, learning_rate=0.7)
BESIDE = [
    pytest.param({"gradient_accumulation_steps": 3, "expected_batch_size": 25}, 3, marks=pytest.mark.one_stack),
    pytest.param({"num_microbatches": 5}, 1, marks=pytest.mark.one_stack),
    pytest.param({"l2_norm_clip": CLIPS}, 1, marks=pytest.mark.one_stack),
    ({"gradient_accumulation_steps": 3, "rows_per_unit": 2, "l2_norm_clip": ADAPTIVE}, 3),
]


@pytest.mark.parametrize("beside, parts", BESIDE, ids=lambda d: "+".join(d) if isinstance(d, dict) else "")
@pytest.mark.both_stacks
@pytest.mark.slow
def test_rows_are_chosen_once_an_update_by_its_units_with_any_clip(beside, parts):
    """Two updates of 20 examples, each of one batch or of three unequal ones."""
    sparse, given = AdaFEST(threshold=2.0, clip=1.5), {"l2_norm_clip": 20.0, **beside}
    model = model_of(tfdpfl.DPSGD(noise_multiplier=0.0, learning_rate=0.01, sparse=sparse, **given))
    tables, clip, unit = list(TABLES), 20.0, 4 if "num_microbatches" in beside else beside.get("rows_per_unit", 1)
    for update, ends in enumerate(([0, 20], [20, 40]) if parts == 1 else ([0, 6, 8, 20], [20, 24, 34, 40])):
        for a, b in itertools.pairwise(ends):
            model.train_on_batch([x[a:b] for x in X], Y[a:b])
        rows = slice(ends[0], ends[-1])
        clip = (30.0, 15.0)[update] if given["l2_norm_clip"] is CLIPS else clip
        means, number, within = kept_means(clip, sparse, [x[rows] for x in X], Y[rows], tables, unit)
        assert any(0 < n < of for n, of in zip(number, (WORDS, USERS), strict=True))
        scale = 20 / beside.get("expected_batch_size", 20)
        tables = [t - 0.01 * scale * m for t, m in zip(tables, means, strict=True)]
        for got, want in zip(model.get_weights(), tables, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)
        if given["l2_norm_clip"] is ADAPTIVE:
            clip *= np.exp(-0.7 * (within - 0.5))
            assert model.optimizer.current_clip == pytest.approx(clip, rel=1e-5)
    assert model.optimizer.num_dp_steps == 2


@pytest.mark.both_stacks
@pytest.mark.slow
def test_a_poisson_sample_in_physical_batches_keeps_the_rows_of_the_whole():
    """They have blank rows, too."""
    seen = []
    for parts in (1, 2):
        optimizer = tfdpfl.DPSGD(
            2.0, 0.0, learning_rate=0.3, sparse=SPARSE, expected_batch_size=20, gradient_accumulation_steps=parts
        )
        how = {} if parts == 1 else {"physical_batch_size": 10}
        data = tfdpfl.data.poisson_batches(((X[0], X[1]), Y), 0.5, 4, seed=3, **how)
        model, budget = model_of(optimizer, "mse"), tfdpfl.callbacks.PrivacyBudget(delta=1e-3, accountant="rdp")
        model.fit(data, callbacks=[budget], verbose=0)
        assert optimizer.executed == [(0.0, 4)] and budget.ledger.unknown_steps == 0
        seen.append(model.get_weights())
    for a, b, start in zip(*seen, TABLES, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
        assert np.any(a != start)


@pytest.mark.both_stacks
@pytest.mark.slow
def test_what_is_counted_of_a_part_is_in_memory_alone_and_a_restart_begins_anew(tmp_path):
    given = {"learning_rate": 0.3, "sparse": SPARSE, "gradient_accumulation_steps": 2}
    model = model_of(tfdpfl.DPSGD(2.0, 0.0, **given))
    half, other = ([x[:20] for x in X], Y[:20]), ([x[20:] for x in X], Y[20:])
    model.train_on_batch(*half), model.train_on_batch(*other)
    state = lambda: [np.asarray(v).tobytes() for v in [*model.weights, *model.optimizer.variables]]
    before, tables = state(), model.get_weights()
    model.train_on_batch(*half)
    assert state() == before and int(model.optimizer._dp.pending) == 1
    (partial,) = model.optimizer._dp._accumulators.values()
    kept = [*partial.sums, *partial.tables]
    assert len(kept) == 1 + 2 + 2 and all(np.any(v.numpy()) for v in kept)  # of the other weights, counts and tables
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    again = model_of(tfdpfl.DPSGD(2.0, 0.0, **given))
    for batch in (half, half, other):
        again.train_on_batch(*batch)
    again.load_weights(path)
    assert not int(again.optimizer._dp.pending) and again.optimizer.num_dp_steps == 2  # its own, and the file's
    for batch in (half, other):  # whose sums are not those of the first process's part
        again.train_on_batch(*batch)
    want = kept_means(2.0, SPARSE, tables=tables)[0]
    for got, t, m in zip(again.get_weights(), tables, want, strict=True):
        np.testing.assert_allclose(got, t - 0.3 * m, atol=1e-5)
    assert again.optimizer.num_dp_steps == 3


def scaled_by_their_noise(monkeypatch):
    """What a step releases before its noise, each over the standard deviation of that: vectors in order, as it runs."""
    vectors, rows, draw = [], SparseNoise.rows, SparseNoise.draw

    def keep(pairs):
        flat = [tf.reshape(tf.cast(t, tf.float64) / tf.cast(std, tf.float64), [-1]) for t, std in pairs]
        tf.numpy_function(lambda v: vectors.append(v), [tf.concat(flat, 0)], [])

    def whole(table):
        if isinstance(table, tf.IndexedSlices):
            return tf.math.unsorted_segment_sum(table.values, table.indices, tf.get_static_value(table.dense_shape)[0])
        return table

    def seen_rows(self, z, stddev, divisor, counts, tables, keys):
        of_counts = self.sparse.split(z)[1] * self.sparse.clip
        of_tables = stddev if divisor is None else stddev * divisor
        keep([*((t, of_counts) for t in counts), *((whole(t), of_tables) for t in tables)])
        return rows(self, z, stddev, divisor, counts, tables, keys)

    def seen_draw(self, mean, counter):
        keep(zip(mean.sums, mean.stddevs, strict=True))
        return draw(self, mean, counter)

    monkeypatch.setattr(SparseNoise, "rows", seen_rows)
    monkeypatch.setattr(SparseNoise, "draw", seen_draw)
    return vectors


ALL = {
    "noise_multiplier": keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.5, 2.0]),
    "gradient_accumulation_steps": 2, "l2_norm_clip": tfdpfl.AdaptiveClip(initial=0.7, clipped_count_stddev=3.0),
}  # fmt: skip
# fit shuffles rows, and not units, so that nothing is known of how units are drawn.
SAID = [
    ({}, True), ({"gradient_accumulation_steps": 4}, True), ({"gradient_accumulation_steps": 4}, False),
    ({"rows_per_unit": 2, "gradient_accumulation_steps": 2}, False), ({"num_microbatches": 5}, False), (ALL, True),
]  # fmt: skip


@pytest.mark.parametrize(
    "beside, known", SAID, ids=lambda v: ("+".join(v) or "alone") if isinstance(v, dict) else str(v)
)
@pytest.mark.slow
def test_a_unit_moves_all_that_an_update_releases_by_what_the_ledger_says(beside, known, monkeypatch):
    """Over the noise, and with `fit`. If nobody says how batches are drawn, each of the parts may hold the unit."""
    vectors, parts = scaled_by_their_noise(monkeypatch), beside.get("gradient_accumulation_steps", 1)
    unit, halved = beside.get("rows_per_unit", 1), "num_microbatches" in beside
    given = {"l2_norm_clip": 0.7, "noise_multiplier": 1.5, "expected_batch_size": 40, "learning_rate": 1e-3, **beside}
    x, y = [t.copy() for t in X], Y.copy()
    places = [2] if known else range(2, 40, 40 // parts)
    for at in places:  # far beyond both clips
        y[at : at + unit], x[0][at : at + unit] = 1e4, np.arange(LENGTH)
        x[1][at : at + unit] = 1
    weight = np.ones(40, "float32")
    for at in places:
        weight[at : at + unit] = 0
    seen = []
    for w in (np.ones(40, "float32"), weight):
        model = model_of(tfdpfl.DPSGD(sparse=AdaFEST(threshold=4.0, clip=1.5), **given), "mse")
        told = [tfdpfl.callbacks.PrivacyBudget(delta=1e-3, accountant="rdp")] if known else []
        model.fit(x, y, sample_weight=w, batch_size=40 // parts, shuffle=False, verbose=0, callbacks=told)
        ((multiplier, number),) = model.optimizer.executed
        assert number == 1 and multiplier == 1.5 / (1 if known else parts) / (2 if halved else 1)
        seen.append(np.concatenate(vectors))
        vectors.clear()
    moved = np.linalg.norm(seen[0] - seen[1]) * multiplier
    assert (0.2 if halved else 0.998) < moved <= 1.0001


def test_tables_can_be_named_and_the_others_are_trained_whole():
    sparse = AdaFEST(threshold=12.0, tables=["users"])
    model = model_of(tfdpfl.DPSGD(2.0, 0.0, learning_rate=1.0, sparse=sparse))
    sums, (number,), _ = kept_means(2.0, sparse)
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
    return abs(got.mean() - p) < 6 * np.sqrt(p * (1 - p) / got.size)


DECAY = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])
COUNTED = tfdpfl.AdaptiveClip(initial=0.5, learning_rate=1e-9, clipped_count_stddev=1.2)


@pytest.mark.parametrize("beside, of_steps", [
    ({}, [(1.0, 2.0, 0)] * 2), ({"gradient_accumulation_steps": 3}, [(1.0, 2.0, 0)] * 2),
    ({"noise_multiplier": DECAY}, [(1.0, 2.0, 0), (0.5, 1.0, 0)]), ({"l2_norm_clip": COUNTED}, [(1.0, 2.0, 2.4)] * 2),
], ids=["alone", "parts", "schedule", "adaptive"])  # fmt: skip
@pytest.mark.slow
def test_counts_and_kept_rows_have_their_noise_whether_looked_up_or_not(beside, of_steps):
    """All gradients are tiny: what moves a row is noise. Each step has its z, the counts', and twice the deviation of a
    clip's count, if it has one."""
    rows, n, clip, parts = 20_000, 3000, 0.5, beside.get("gradient_accumulation_steps", 1)
    model = keras.Sequential([
        keras.Input((1,), dtype="int32"), keras.layers.Embedding(rows, 4, embeddings_initializer="zeros", name="only"),
        keras.layers.Flatten(),
        keras.layers.Dense(2000, use_bias=False, kernel_initializer=keras.initializers.Constant(1e-6)),
    ])  # fmt: skip
    given = {"l2_norm_clip": clip, "noise_multiplier": 1.0, "learning_rate": 1.0, "expected_batch_size": 10, **beside}
    of_counts = None if "noise_multiplier" in beside else 2.0  # twice that of each step, and of all steps
    sparse = AdaFEST(threshold=3.0, noise_multiplier=of_counts, tables=["only"])
    model.compile(tfdpfl.DPSGD(sparse=sparse, **given), loss=squared_error)
    x, y = np.arange(n)[:, None], np.full((n, 2000), 0.01, "float32")
    before, start = None, model.get_weights()
    for z, z_counts, of_clip in of_steps:
        model.set_weights(start)
        for i in range(parts - 1):
            nothing = c.update_of(model, lambda i=i: model.train_on_batch(x[i::parts], y[i::parts]))
            assert not any(np.any(t) for t in nothing)
        table, top = c.update_of(model, lambda: model.train_on_batch(x[parts - 1 :: parts], y[parts - 1 :: parts]))
        kept = np.any(table != 0, 1)
        assert share(kept[:n], (3 - 1) / z_counts) and share(kept[n:], 3 / z_counts)
        assert not any(share(kept[n:], 3 / (f * z_counts)) for f in (2 / 3, 3 / 2))
        others = [z_counts**-2, of_clip and of_clip**-2]
        stddev = (z**-2 - sum(others)) ** -0.5 * clip / 10
        for noise in (top, table[:n][kept[:n]], table[n:][kept[n:]]):
            assert abs(noise.std() / stddev - 1) < 6 / np.sqrt(2 * noise.size)
            assert np.all(noise != 0) and abs(noise.mean()) < 6 * stddev / np.sqrt(noise.size)
        if before is not None:  # other noise, on the counts too
            assert (kept & before)[n:].sum() < 2 * norm.sf(1.5) * before[n:].sum()
        before = kept

        # What ran is priced as the releases that it was.
        joint = dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(s) for s in (
            stddev * 10 / clip, z_counts, *([of_clip] if of_clip else []))])  # fmt: skip
        for q in (1.0, 0.01):
            epsilons = []
            for event in (joint, dp_accounting.GaussianDpEvent(z)):
                accountant = RdpAccountant()
                accountant.compose(dp_accounting.PoissonSampledDpEvent(q, event), 2)
                epsilons.append(accountant.get_epsilon(1e-5))
            assert epsilons[0] == pytest.approx(epsilons[1], rel=1e-9)
    # Nobody said how the parts are drawn.
    assert sorted(model.optimizer.executed) == sorted(Counter(z / parts for z, _, _ in of_steps).items())


def test_workers_draw_counts_and_rows_of_two_keys():
    """All draw the same, and neither is made of the other's numbers."""
    noise = tfdpfl.DPSGD(1.0, 1.0, sparse=AdaFEST(threshold=1e-3))._dp.noise

    @tf.function
    def rows(keys):
        return noise.rows(1.0, tf.constant(1.0), None, [tf.zeros([2000])], [tf.zeros([2000, 1])], keys)

    one, two = tf.constant([[1, 2], [3, 4]], tf.int64), tf.constant([[1, 2], [5, 6]], tf.int64)
    drawn = [map(np.array, rows(keys)) for keys in (one, one, two)]
    (values, kept), (again, kept_again), (other, kept_by_other) = drawn
    np.testing.assert_array_equal(kept, kept_again)
    np.testing.assert_array_equal(kept, kept_by_other)
    np.testing.assert_array_equal(values, again)
    assert 900 < len(kept) < 1100 and abs(np.corrcoef(values[:, 0], other[:, 0])[0, 1]) < 0.2
    # The numbers by which the rows were kept are above 0: these are as many below.
    assert abs(values.mean()) < 5 * values.std() / np.sqrt(len(kept))
    np.testing.assert_allclose(values.std(), (1 - 1 / 4) ** -0.5, rtol=0.12)


@pytest.mark.parametrize("beside", [
    {"secure_noise": True}, {"noise": tfdpfl.noise.Tree()},
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
    falls = keras.optimizers.schedules.PiecewiseConstantDecay([3], [1.0, 2.5])
    with pytest.raises(ValueError, match=r"not above the optimizer's 2\.5"):  # in any of its steps
        tfdpfl.DPSGD(1.0, falls, sparse=AdaFEST(threshold=1.0, noise_multiplier=2.0))
    clip = tfdpfl.AdaptiveClip(clipped_count_stddev=0.55)
    tfdpfl.DPSGD(clip, 1.0)
    with pytest.raises(ValueError, match=r"clipped_count_stddev=0.55 is at most half of.*leaves 1.1547 of"):
        tfdpfl.DPSGD(clip, 1.0, sparse=AdaFEST(threshold=1.0))
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


def test_bias_correction_is_refused():
    model = model_of(tfdpfl.DPAdamBC(1.0, 1.0, expected_batch_size=40, sparse=SPARSE))
    with pytest.raises(PrivacyError, match="only to some rows"):
        model.train_on_batch(X, Y)
