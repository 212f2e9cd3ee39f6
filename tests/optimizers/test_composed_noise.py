"""Correlated noise for units of several rows, and with a clip that changes: what a unit moves, and what it costs."""

import itertools

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.accounting.correlated import CorrelatedRun
from tfdpfl.callbacks import PrivacyBudget
from tfdpfl.data import cyclic_poisson, declared_sampling, fixed_order
from tfdpfl.errors import PrivacyError
from tfdpfl.noise import BLT, Banded, BandedInverse, Source, Tree
from tfdpfl.optimizers import _accumulator, _step_table

X, Y = c.examples(24)
HOW = {"min_separation": 4, "max_participations": 2}


def model_of(noise, rows=3, **kwargs):
    return c.compiled(tfdpfl.DPSGD(0.4, 2.0, noise=noise, rows_per_unit=rows, learning_rate=1.0, **kwargs))


@pytest.mark.slow
def test_all_rows_of_a_unit_move_a_step_by_the_clip():
    x = X.copy()
    x[3:6] *= 1e4
    updates = []
    for weights in (np.ones(24, "float32"), np.where(np.arange(24) // 3 == 1, 0, 1).astype("float32")):
        model = model_of(Tree(), seed=5, expected_batch_size=1)  # both draw the same noise
        before = c.flat(model.get_weights())
        model.train_on_batch(x, Y, sample_weight=weights)
        updates.append(c.flat(model.get_weights()) - before)
    assert 0.95 * 0.4 < np.linalg.norm(updates[0] - updates[1]) <= 0.4 * (1 + 1e-4)


@pytest.mark.slow
def test_units_cost_what_as_many_examples_do():
    def of(data, rows, **fit):
        budget = PrivacyBudget(delta=1e-5)
        model = model_of(Banded(bands=2, **HOW), rows, expected_batch_size=6)
        model.fit(data, epochs=2, callbacks=[budget], verbose=0, **fit)
        (row,) = budget.ledger.to_dict()["rows"]
        return budget.report().epsilon, row["correlated"]

    alone = of(fixed_order((X, Y), 6), 1)
    assert of(fixed_order((X, Y), 6, copies=2), 2) == alone
    assert alone[1]["num_steps"] == 8 and alone[1]["max_participations"] == 2 and alone[1]["min_separation"] == 4


def test_batches_that_are_not_of_whole_units_are_refused():
    for data, rows, message in [
        (fixed_order((X, Y), 6), 2, "1 rows are one example, and the optimizer clips 2 as one"),
        (fixed_order((X, Y), 6, copies=2), 1, "2 rows are one example, and the optimizer clips each row by itself"),
        (X, 3, "fit would split units"),
    ]:
        model = model_of(Tree(), rows)
        fit = {} if isinstance(data, tf.data.Dataset) else {"y": Y, "batch_size": 6}
        with pytest.raises(PrivacyError, match=message):
            model.fit(data, callbacks=[PrivacyBudget(delta=1e-5)], verbose=0, **fit)
        assert not int(model.optimizer.iterations)


def test_copies_come_one_after_the_other_each_augmented_by_itself():
    data = fixed_order((X, Y), 6, copies=2, augment=lambda x, y: (x + tf.random.uniform([]), y))
    x, y = next(iter(data))
    np.testing.assert_array_equal(y, np.repeat(Y[:6], 2))
    shift = x.numpy() - np.repeat(X[:6], 2, axis=0)
    assert len(np.unique(shift[:, 0].round(4))) == 12


STEPS = 6


@pytest.mark.slow
def test_the_noise_of_each_step_has_the_size_of_its_clip_and_multiplier():
    """They change in the middle. A kernel without a gradient shows the noise: over both, that of one clip."""
    halved = tf.keras.optimizers.schedules.PiecewiseConstantDecay([STEPS // 2 - 1], [1.0, 0.5])
    seen = []
    for clip, multiplier in ((1.0, 1.0), (halved, halved)):
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
        noise = BandedInverse(bands=3, **HOW)
        model.compile(
            tfdpfl.DPSGD(clip, multiplier, noise=noise, seed=5, expected_batch_size=1, learning_rate=1.0), "mse"
        )
        weights = [model.get_weights()[0]]
        for _ in range(STEPS):
            model.train_on_batch(np.zeros((2, 3), "float32"), np.zeros((2, 2), "float32"))
            weights.append(model.get_weights()[0])
        seen.append(np.diff(weights, axis=0).reshape(STEPS, -1))
    one, changing = seen
    np.testing.assert_allclose(changing, one * np.repeat([1, 0.25], STEPS // 2)[:, None], atol=1e-6)
    assert (np.abs(one) > 0).all()
    assert model.optimizer.ledger.to_dict()["rows"][0]["correlated"]["noise_multiplier"] == 0.5  # the least


EACH_KIND = [Tree(), Banded(bands=2, **HOW), BLT(**HOW), BandedInverse(bands=3, coefficients="best", **HOW)]


@pytest.mark.parametrize("noise", EACH_KIND, ids=lambda noise: type(noise).__name__)
def test_sums_and_counts_together_are_within_the_event_of_the_noise(noise):
    """Of every choice of steps that an example may be in: what it moves of all base normals and all counts."""
    z, of_count, (steps, apart, most) = 1.5, 1.0, (8, 4, 2)
    of_sums, _ = tfdpfl.AdaptiveClip(clipped_count_stddev=of_count).split(z, 8)
    run = CorrelatedRun(noise=noise, noise_multiplier=z, num_steps=steps, min_separation=apart, max_participations=most)
    moved = []
    for used in itertools.product([0, 1], repeat=steps):
        at = np.flatnonzero(used)
        if len(at) <= most and (np.diff(at) >= apart).all():
            sums = np.linalg.norm(noise.matrix(steps) @ used) / (noise.unit * of_sums)
            counts = np.sqrt(len(at)) / 2 / (of_count * noise.unit / noise.least_shift)
            moved.append(np.hypot(sums, counts))
    assert 0.7 < max(moved) * run.dp_event.gaussian.noise_multiplier <= 1 + 1e-9
    assert noise.least_shift <= np.linalg.norm(noise.matrix(steps), axis=0).min() * (1 + 1e-9)


@pytest.mark.slow
def test_an_adaptive_clip_has_fresh_noise_on_its_count_beside_the_correlated_rows():
    noise = Banded(bands=2, **HOW)
    z, of_count, eta, width = 1.5, 1.0, 0.02, 20_000
    clip = tfdpfl.AdaptiveClip(initial=2.0, clipped_count_stddev=of_count, learning_rate=eta)
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(width, use_bias=False)])
    model.compile(tfdpfl.DPSGD(clip, z, noise=noise, learning_rate=1.0, expected_batch_size=8), loss="mse")
    x, y = np.zeros((2, 1), "float32"), np.zeros((2, width), "float32")
    step = lambda: c.flat(c.update_of(model, lambda: model.train_on_batch(x, y))) * 8
    clips = [2.0]
    for i in range(400):
        drawn = step()
        if i == 0:
            want = clip.split(z, 8)[0] * 2.0 * noise.unit / noise.coefficients[0]
            assert drawn.std() == pytest.approx(want, rel=0.03)
        clips.append(model.optimizer.current_clip)
    counts = -np.diff(np.log(clips)) / eta * 8
    # 400 normals: tails below 1e-7, also those of 2/3 and 3/2 into these bounds
    assert 0.8165 < np.std(counts) / (of_count * noise.unit / noise.least_shift) < 1.2247
    (row,) = model.optimizer.ledger.to_dict()["rows"]
    assert row["correlated"]["noise_multiplier"] == z and row["correlated"]["num_steps"] == 400


@pytest.mark.slow
def test_an_example_moves_each_step_by_the_clip_of_that_step():
    halved = tf.keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.5, 0.25])
    x, moved = 1e4 * X, []
    for weights in (np.ones(24, "float32"), np.where(np.arange(24) == 4, 0, 1).astype("float32")):
        model = c.compiled(tfdpfl.DPSGD(halved, 2.0, noise=Tree(), seed=5, expected_batch_size=1, learning_rate=1.0))
        start, updates = model.get_weights(), []
        for _ in range(2):
            model.set_weights(start)
            model.train_on_batch(x, Y, sample_weight=weights)
            updates.append(c.flat(model.get_weights()) - c.flat(start))
        moved.append(updates)
    sizes = np.linalg.norm(np.subtract(*moved), axis=1)
    assert sizes == pytest.approx([0.5, 0.25], rel=1e-3)


# -- updates of several batches ----------------------------------------------------------------------------------

BANDED = Banded(bands=2, **HOW)


def fitted(data, parts=1, noise=BANDED, epochs=2, multiplier=2.0, **kwargs):
    """The weights, and the trainings in the ledger."""
    fit, budget = kwargs.pop("fit", {}), kwargs.pop("budget", None) or PrivacyBudget(delta=1e-5)
    model = c.compiled(tfdpfl.DPSGD(0.4, multiplier, noise=noise, gradient_accumulation_steps=parts,
                                    learning_rate=1.0, seed=5, **kwargs))  # fmt: skip
    model.fit(data, epochs=epochs, callbacks=[budget], verbose=0, **fit)
    return c.flat(model.get_weights()), [row["correlated"] for row in budget.ledger.to_dict()["rows"]]


@pytest.mark.slow
def test_an_update_of_several_batches_is_that_of_one_large_batch():
    whole, training = fitted(fixed_order((X, Y), 6))
    ((steps, apart, uses),) = [(t["num_steps"], t["min_separation"], t["max_participations"]) for t in training]
    assert (steps, apart, uses) == (8, 4, 2)
    cut = fixed_order((X, Y), 6, physical_batch_size=2)
    assert declared_sampling(cut).physical_batches == 3 and len(list(cut)) == 12
    own = tf.data.Dataset.from_tensor_slices((X, Y)).batch(2)
    stated = PrivacyBudget(24, 1e-5, sampling="fixed_order", batch_size=2)
    for data, kwargs in [(cut, {}), (fixed_order((X, Y), 2), {}), (own, {"budget": stated})]:
        weights, found = fitted(data, 3, **kwargs)
        assert found == training
        np.testing.assert_allclose(weights, whole, atol=1e-5)


def products(y, prediction):
    """A loss whose gradient at an example does not depend on the weights."""
    return tf.reduce_sum(y * prediction, -1)


def linear(*args, **kwargs):
    model = tf.keras.Sequential([tf.keras.Input((X.shape[1],)), tf.keras.layers.Dense(2, use_bias=False)])
    settings = {"noise": BANDED, "gradient_accumulation_steps": 3, "expected_batch_size": 5, "learning_rate": 0.5}
    model.compile(tfdpfl.DPSGD(*args, **{**settings, **kwargs}), loss=products)
    return model


def clipped_sum(x, y, clip):
    products = x[:, :, None] * y[:, None]
    norms = np.sqrt((products**2).sum((1, 2), keepdims=True))
    return (products * np.minimum(1, clip / np.maximum(norms, 1e-12))).sum(0)


@pytest.mark.slow
def test_an_example_moves_all_updates_together_by_what_the_noise_is_made_for():
    """Without noise: one example counts in two of eight updates, which are four apart, and in no more of them."""
    model, sums = linear(0.4, 0.0), []
    for gone in (None, 0, 11):
        x = np.where(np.arange(24)[:, None] == gone, 0, X).astype("float32")
        weights = []
        for number, batch in enumerate(2 * list(fixed_order((x, 9 * X[:, :2]), 6, physical_batch_size=2))):
            weights += [model.get_weights()[0]] if number % 3 == 0 else []
            model.train_on_batch(*batch)
        sums.append(np.diff([*weights, model.get_weights()[0]], axis=0) * 5 / 0.5 / 0.4)
    for moved, uses in zip(sums[0] - sums[1:], ([0, 4], [1, 5]), strict=True):
        assert np.flatnonzero(np.abs(moved).max((1, 2)) > 1e-4).tolist() == uses
        size = np.linalg.norm(BANDED.matrix(8) @ moved.reshape(8, -1))
        assert 0.999 * BANDED.unit < size < BANDED.unit * (1 + 1e-4)


class Stop(Exception):
    pass


@pytest.mark.slow
@pytest.mark.both_stacks
def test_updates_of_several_batches_are_those_of_numpy_also_if_one_is_interrupted_and_the_model_loaded(
    tmp_path, monkeypatch
):
    """The batch of the update that was not made counts for nothing: neither its gradient, nor a row of noise."""
    z, at = np.random.default_rng(0).normal(size=(5, 2 * X.shape[1])).astype("float32"), tf.Variable(0)
    monkeypatch.setattr(
        Source, "gaussian", lambda self, shapes, stddev, key=None: [stddev * tf.constant(z)[at.assign_add(1) - 1]]
    )
    data, model = fixed_order((X, X[:, :2]), 6, physical_batch_size=2), linear(0.3, 1.7)
    weights = model.get_weights()[0].astype("float64")

    def stop(batch, logs=None):
        if batch == 3:
            raise Stop

    budget = PrivacyBudget(delta=1e-5)
    with pytest.raises(Stop):
        model.fit(data, verbose=0, callbacks=[budget, tf.keras.callbacks.LambdaCallback(on_train_batch_end=stop)])
    path = str(tmp_path / ("model.keras" if c.keras3() else "model.h5"))
    model.save(path)
    model = tf.keras.models.load_model(path, custom_objects={"products": products})
    budget = PrivacyBudget(delta=1e-5)
    model.fit(data, verbose=0, callbacks=[budget])

    noise = np.linalg.solve(BANDED.matrix(5), z.astype("float64")) * 1.7 * 0.3 * BANDED.unit
    for row, begin in zip(noise, [0, 0, 6, 12, 18], strict=True):
        part = slice(begin, begin + 6)
        weights -= 0.5 * (clipped_sum(X[part], X[part, :2], 0.3) + row.reshape(-1, 2)) / 5
    np.testing.assert_allclose(model.get_weights()[0], weights, atol=1e-5)
    # The examples of the first update came again in the next one.
    (run,) = [row["correlated"] for row in budget.ledger.to_dict()["rows"]]
    assert (run["num_steps"], run["min_separation"], run["max_participations"]) == (5, 1, 2)
    assert run["noise_multiplier"] == 1.7


@pytest.mark.slow
def test_groups_that_are_sampled_in_turns_may_be_cut_into_batches():
    once = Banded(bands=2, min_separation=2, max_participations=1)
    data = cyclic_poisson((X, Y), 4, groups=2, expected_batch_size=6, physical_batch_size=3)
    _, (training,) = fitted(data, 2, once, expected_batch_size=6)
    assert (training["num_steps"], training["min_separation"], training["sampling_rate"]) == (8, 2, 0.5)
    assert training["noise_multiplier"] == 2.0
    parts = [set(np.unique(x)) for x in cyclic_poisson(np.arange(1, 25), 4, groups=2, expected_batch_size=6,
                                                       physical_batch_size=3)]  # fmt: skip
    assert all(not a & b for a, b in zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.slow
def test_a_target_counts_updates_of_several_batches():
    data = fixed_order((X, Y), 3)
    _, (three,) = fitted(data, 2, Tree(), epochs=3)
    target = tfdpfl.PrivacyLedger().count_correlated((), CorrelatedRun.from_dict(three)).epsilon(1e-5)
    budget = PrivacyBudget(delta=1e-5, target_epsilon=1.0001 * target)
    _, (found,) = fitted(data, 2, Tree(), epochs=4, budget=budget)
    assert found["num_steps"] == 12


@pytest.mark.parametrize(
    "data, parts, fit, message",
    [
        (fixed_order((X, Y), 5), 2, {}, "gradient_accumulation_steps=2 batches may reach into the next pass"),
        (fixed_order((X, Y), 4), 2, {"steps_per_epoch": 4}, "may reach into the next pass"),
        (fixed_order((X, Y), 6, physical_batch_size=2), 2, {}, "3 batches of the data make one sample"),
        (fixed_order((X, Y), 4), 3, {}, "made for min_separation=4 steps .* keep 2"),
    ],
)
def test_batches_that_do_not_make_whole_updates_are_refused(data, parts, fit, message):
    with pytest.raises(PrivacyError, match=message):
        fitted(data, parts, fit=fit)


def test_batches_that_reach_into_the_next_pass_are_refused():
    """One of them may hold an example twice, and moves it by two clips."""
    stream = tf.data.Dataset.from_tensor_slices((X, Y)).repeat().batch(5)
    with pytest.raises(PrivacyError, match="A batch of this stream may reach"):
        fitted(stream, noise=Tree(), fit={"steps_per_epoch": 5},
               budget=PrivacyBudget(24, 1e-5, sampling="shuffle", batch_size=5))  # fmt: skip


@pytest.mark.parametrize("noise", [None, Tree()], ids=["fresh", "tree"])
@pytest.mark.parametrize(
    "batch, rows, groups, message",
    [
        (6, 4, 2, r"Batches of 6 examples are cut into 2 parts .* a batch size that 4 divides"),
        (10, 4, 2, "Batches of 10 examples are cut into 3 parts"),
        (8, 4, 4, "last batch of an epoch has 4 of the 20 examples, in 2 parts, which num_microbatches=4"),
        pytest.param(8, 4, 2, None, marks=pytest.mark.slow),
    ],
)
def test_parts_that_are_not_of_whole_microbatches_are_refused_at_the_start(noise, batch, rows, groups, message):
    data = fixed_order((X[:20], Y[:20]), batch, physical_batch_size=rows)
    kwargs = {"num_microbatches": groups, "gradient_accumulation_steps": declared_sampling(data).physical_batches}
    model = c.compiled(tfdpfl.DPSGD(0.4, 2.0, noise=noise, **kwargs))
    budget = PrivacyBudget(delta=1e-5)
    if message is None:
        model.fit(data, callbacks=[budget], verbose=0)
        return
    with pytest.raises(PrivacyError, match=message):
        model.fit(data, callbacks=[budget], verbose=0)
    assert not int(model.optimizer.iterations)


def test_a_last_batch_that_has_no_example_for_each_part_is_refused():
    with pytest.raises(ValueError, match=r"physical_batch_size=3 cuts each batch into 2 parts, .* pass has 1 examples"):
        fixed_order(X[:7], 6, physical_batch_size=3)


@pytest.mark.one_stack
def test_an_update_that_was_given_up_leaves_the_turns_of_the_next_unknown():
    """The groups' turns have moved on, and the noise has not: an example comes back a step too early."""
    counter, found = _step_table.Counter(), []
    part = lambda: _accumulator.Part(
        [tf.ones([2])], [], tf.ones([]), counter.drawn(tf.zeros([])), tf.constant(6.0, tf.float64), tf.ones([])
    )
    partial = _accumulator.GradientAccumulator(2, part(), in_turns=True)

    def done(whole):
        found.append((whole.drawn.known.numpy().tolist(), float(whole.multiplier)))
        return whole.sums

    said = (0.0, 8, 24, 6, 0)
    counter.announce(said, 2, 0, 2)
    partial.add(part(), done, list)
    partial.drop()
    partial.add(part(), done, list)  # the second of its update, of which the first is lost
    for _ in range(2):
        counter.announce(said, 2, 0, 2)
        for _ in range(2):
            partial.add(part(), done, list)
    assert found == [([0.0] * 6, 3.0), ([*said, 0], 6.0)]


# -- how far an example moves a step -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [{"num_microbatches": 2}, {"gradient_accumulation_steps": 3}], ids=lambda how: next(iter(how))
)
def test_an_example_that_moves_a_step_by_several_clips_costs_as_much(how):
    """Its group's clipped mean turns round; or all three parts hold it, since nothing is known of them."""
    clips, updates = 2 if "num_microbatches" in how else 3, []
    for sign in (1, -1) if clips == 2 else (1, 0):
        model = c.compiled(
            tfdpfl.DPSGD(0.4, 2.0, noise=Tree(), expected_batch_size=1, learning_rate=1.0, seed=5, **how)
        )
        before = c.flat(model.get_weights())
        weights = np.where(np.arange(24) == 0, 1e4 * sign, 1e-3).astype("float32")
        for _ in range(how.get("gradient_accumulation_steps", 1)):
            model.train_on_batch(X, Y, sample_weight=weights)
        updates.append(c.flat(model.get_weights()) - before)
    moved = np.linalg.norm(np.subtract(*updates)) / 0.4
    assert 0.95 * clips < moved <= clips * (1 + 1e-4)
    (training,) = [row["correlated"] for row in model.optimizer.ledger.to_dict()["rows"]]
    assert training["noise_multiplier"] == 2.0 / clips


@pytest.mark.slow
def test_a_target_knows_that_groups_cost_twice():
    data = fixed_order((X, Y), 6)
    _, (training,) = fitted(data, epochs=1, num_microbatches=2)
    assert training["noise_multiplier"] == 1.0
    target = tfdpfl.PrivacyLedger().count_correlated((), CorrelatedRun.from_dict(training)).epsilon(1e-5)
    _, (found,) = fitted(
        data, epochs=2, num_microbatches=2, budget=PrivacyBudget(delta=1e-5, target_epsilon=1.001 * target)
    )
    assert found == training


@pytest.mark.one_stack
def test_the_least_noise_of_all_steps_prices_them_all():
    model = model_of(Tree(), 1)
    for _ in range(2):
        model.train_on_batch(X, Y)
    dp = model.optimizer._dp
    rows = dp.rows()
    rows = np.concatenate([rows, rows])
    rows[1, [_step_table.MULTIPLIER, _step_table.STEPS]] = [0.5, 1]
    stray = rows[1:].copy()
    stray[:, _step_table.ORIGIN] += 1
    for counted, multiplier in [(rows[:1], 2.0), (rows, 0.5), (np.concatenate([rows[:1], stray]), 0.5)]:
        found = [row["correlated"] for row in dp.noise.segments.ledger(counted).to_dict()["rows"]]
        assert {row["noise_multiplier"] for row in found} == {multiplier}
    earlier, later = (dp.noise.segments.ledger(some) for some in (rows[:1], rows))
    assert earlier.merge(later).steps == 3


# -- users -------------------------------------------------------------------------------------------------------

OWNERS = np.array([7, 3, 5, 3] * 2 + [1, 2, 4, 6, 8, 1] * 2 + [9, 10, 11, 12])  # twelve users, of 1, 2 or 4 rows


def of_users(batch_size=3, **kwargs):
    return fixed_order((X, Y), batch_size, user_ids=OWNERS, examples_per_user=2, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2])
def test_all_that_a_user_has_moves_all_updates_together_by_what_the_noise_is_made_for(parts):
    """Without noise, over two passes. The user has other rows, and more of them, or all of them are blanked."""
    of_3, big = OWNERS[:, None] == 3, 1e3 * np.random.default_rng(3).normal(size=X.shape).astype("float32")
    more, fewer = np.concatenate([np.where(of_3, big, X), big[:4]]), ~np.isin(np.arange(24), [1, 3])
    others = {  # what a neighbour may have, and how many clips from it
        "blank": (np.where(of_3, 0, X), OWNERS, 1),
        "other rows": (np.where(of_3, big, X), OWNERS, 2),
        "fewer rows": (np.where(of_3, big, X)[fewer], OWNERS[fewer], 2),
        "more rows": (more, np.append(OWNERS, [3] * 4), 2),
    }

    model = linear(0.4, 0.0, rows_per_unit=4, gradient_accumulation_steps=parts)
    start = model.get_weights()

    def updates(x, ids):
        model.set_weights(start)
        data = fixed_order((x, 9 * x[:, :2]), 3, user_ids=ids, examples_per_user=4, physical_batch_size=12 // parts)
        assert declared_sampling(data).physical_batches == parts
        weights = []
        for number, batch in enumerate(2 * list(data)):
            weights += [model.get_weights()[0]] if number % parts == 0 else []
            model.train_on_batch(*batch)
        return np.diff([*weights, model.get_weights()[0]], axis=0) * 5 / 0.5 / 0.4

    own = updates(X, OWNERS)
    for name, (x, ids, clips) in others.items():
        moved = own - updates(x.astype("float32"), ids)
        # User 3 is the third of the first batch, whatever they have; and of no other one.
        assert np.flatnonzero(np.abs(moved).max((1, 2)) > 1e-4).tolist() == [0, 4], name
        size = np.linalg.norm(BANDED.matrix(8) @ moved.reshape(8, -1)) / BANDED.unit
        assert 0.1 < size < clips * (1 + 1e-4), name


@pytest.mark.slow
def test_users_come_in_the_order_of_their_ids_whichever_examples_they_have():
    def users(ids):
        return [set(np.asarray(ids, object)[batch.numpy()].tolist()) for batch in
                fixed_order(np.arange(len(ids)), 2, user_ids=ids, examples_per_user=1)]  # fmt: skip

    assert users([5, 3, 9, 3, 7]) == users([3, 3, 9, 5, 7]) == [{3, 5}, {7, 9}]
    assert users(["b", "c", "a"]) == users(np.array(["c", "b", "a", "b"], object)) == [{"a", "b"}, {"c"}]
    assert users(np.array([("b", 1), 10, "9", "a", 2], object).tolist()[1:]) == [{2, "9"}, {10, "a"}]
    orders = [declared_sampling(of_users()).order, declared_sampling(fixed_order((X, Y), 3)).order]
    ids = OWNERS.copy()
    ids[0] = 1
    moved = fixed_order((X, Y), 3, user_ids=ids, examples_per_user=2)
    assert orders[0] == declared_sampling(of_users()).order != declared_sampling(moved).order != orders[1] != orders[0]


@pytest.mark.slow
def test_users_in_turns_are_sampled_as_wholes():
    ids = np.arange(2000) // 5
    data = cyclic_poisson(ids, 4, groups=2, expected_batch_size=100, user_ids=ids, examples_per_user=3)
    batches = [batch.numpy().reshape(-1, 3) for batch in data]
    assert all((batch == batch[:, :1]).all() for batch in batches)
    users = [set(batch[:, 0].tolist()) for batch in batches]
    assert not (users[0] | users[2]) & (users[1] | users[3])
    sizes = [len(u) for u in users]  # 400 users, two groups, a coin of 1/2: standard deviation 8.7
    assert all(100 - 6 * 9 < size < 100 + 6 * 9 for size in sizes)
    said = declared_sampling(data)
    assert (said.unit, said.rows_per_unit, said.num_examples, said.min_separation) == ("user", 3, 400, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["BLT", "cyclic"])
def test_users_cost_what_as_many_examples_do_and_the_statement_names_them(kind):
    data, alone = of_users(), fixed_order((X[:12], Y[:12]), 3)
    noise = BLT(**HOW)
    if kind == "cyclic":
        noise, how = Banded(bands=2, min_separation=2, max_participations=1), {"groups": 2, "expected_batch_size": 3}
        data = cyclic_poisson((X, Y), 4, user_ids=OWNERS, examples_per_user=2, **how)
        alone = cyclic_poisson((X[:12], Y[:12]), 4, **how)
    found = []
    for batches, rows in ((data, 2), (alone, 1)):
        budget, model = PrivacyBudget(delta=1e-5), model_of(noise, rows, expected_batch_size=3)
        for _ in range(2):
            model.fit(batches, callbacks=[budget], verbose=0)
        found.append(budget)
    users, examples = found
    assert users.report().epsilon == examples.report().epsilon and users.epsilon() < 10
    assert users.ledger.unit == "user" and examples.ledger.unit == "example"
    assert "uses of one user" in str(users.report().rows) or "groups of users" in str(users.report().rows)
    assert "other users for training users" in str(users.report())
    assert "The unit is a user" in str(users.report()) and "The unit is a user" not in str(examples.report())
    loaded = tfdpfl.PrivacyLedger.from_dict(users.ledger.to_dict())
    assert loaded.unit == "user" and loaded.epsilon(1e-5) == users.report().epsilon
    assert "unit" not in str(examples.ledger.to_dict())  # as a release wrote it that knew no users here


@pytest.mark.slow
def test_one_training_does_not_clip_users_and_examples():
    model = model_of(Banded(bands=2, **HOW), 2, expected_batch_size=3)
    model.fit(of_users(), verbose=0, callbacks=[PrivacyBudget(delta=1e-5)])
    steps = int(model.optimizer.iterations)
    with pytest.raises(PrivacyError, match=r"different units \(example and user\).*new optimizer"):
        model.fit(fixed_order((X, Y), 6, copies=2), verbose=0, callbacks=[PrivacyBudget(delta=1e-5)])
    assert int(model.optimizer.iterations) == steps


@pytest.mark.slow
def test_users_in_a_fixed_order_cost_what_shuffled_ones_do_with_independent_noise():
    budget, model = PrivacyBudget(delta=1e-5), model_of(None, 2)
    model.fit(of_users(), epochs=2, callbacks=[budget], verbose=0)
    epsilon = tfdpfl.compute_epsilon(
        num_examples=12, batch_size=3, noise_multiplier=2.0, num_epochs=2, sampling="shuffle", delta=1e-5)  # fmt: skip
    assert budget.report().epsilon == pytest.approx(epsilon, rel=1e-9) and budget.ledger.unit == "user"
