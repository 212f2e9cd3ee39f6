"""Correlated noise in the optimizers: its covariance against the matrix, the update against numpy, what goes on after a
save, and what is told of it."""

import dataclasses
import itertools
import pickle

import conftest as c
import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.accounting import monte_carlo
from tfdpfl.accounting.correlated import CorrelatedRun
from tfdpfl.callbacks import PrivacyBudget
from tfdpfl.noise import BLT, Banded, BandedInverse, Source, Tree

HOW = {"min_separation": 4, "max_participations": 3}
NOISES = [Tree(restart_every=5), Banded(bands=3, **HOW), BandedInverse(bands=4, **HOW), BLT(**HOW)]
WIDE = (500, 300)


def wide(noise, multiplier=2.0, optimizer=tfdpfl.DPSGD, **kwargs):
    """A layer whose kernel has no gradient (its input is 0): its steps are the noise alone."""
    model = tf.keras.Sequential([tf.keras.Input((WIDE[0],)), tf.keras.layers.Dense(WIDE[1])])
    settings = {"expected_batch_size": 1, "learning_rate": 1.0, **kwargs}
    model.compile(optimizer(0.5, multiplier, noise=noise, **settings), loss="mse")
    return model


def rows_of(model, steps):
    """The noise of so many steps, over C."""
    x, y = np.zeros((2, WIDE[0]), "float32"), np.zeros((2, WIDE[1]), "float32")
    rows = []
    for _ in range(steps):
        before = model.get_weights()[0]
        model.train_on_batch(x, y)
        rows.append((before - model.get_weights()[0]).ravel() / 0.5)
    return np.array(rows)


def covariance(noise, rows):
    """Of ``C W``, which is to be white, in the noise's own units."""
    base = noise.matrix(len(rows)) @ rows / (2.0 * noise.unit)
    return base @ base.T / base.shape[1]


# On the older stack one that has matrices of its own: what holds and saves them is the same for all.
@pytest.fixture(scope="module", params=[
    *[pytest.param(noise, marks=pytest.mark.one_stack) for noise in NOISES[:-1]], NOISES[-1],
], ids=lambda noise: type(noise).__name__)  # fmt: skip
def begun(request, tmp_path_factory):
    """A noise, its rows of six steps, and the file that the model was saved in."""
    model = wide(request.param)
    rows = rows_of(model, 6)
    path = str(tmp_path_factory.mktemp("models") / ("model.keras" if c.keras3() else "model.h5"))
    model.save(path)
    return request.param, rows, path, model


@pytest.mark.slow
def test_the_noise_has_the_matrix_covariance_also_after_a_load(begun):
    noise, rows, path, _ = begun
    cov = covariance(noise, np.vstack([rows, rows_of(tf.keras.models.load_model(path), 4)]))
    # The deviation of an entry is at most sqrt(2 / 150,000), 0.0037: 6 of them.
    np.testing.assert_allclose(cov, np.eye(10), atol=0.022)
    assert abs(np.diag(cov).mean() - 1) < 0.01  # and so neither 2/3 nor 3/2


one_kind = pytest.mark.parametrize("begun", NOISES[-1:], indirect=True, ids=lambda noise: type(noise).__name__)


@one_kind
@pytest.mark.slow
def test_each_that_goes_on_from_one_state_is_a_training_of_its_own(begun):
    """Two that load one file, and one whose state is put back."""
    noise, rows, path, _ = begun
    loaded, again = (tf.keras.models.load_model(path) for _ in range(2))
    variables = loaded.optimizer.variables if c.keras3() else loaded.optimizer.variables()
    saved = [np.array(v) for v in variables]
    later = [rows_of(again, 4), rows_of(loaded, 4)]
    for v, value in zip(variables, saved, strict=True):
        v.assign(value)
    later.append(rows_of(loaded, 4))
    # They never add the same base normals.
    bases = [(noise.matrix(10) @ np.vstack([rows, more]))[6:] for more in later]
    for one, other in itertools.combinations(bases, 2):
        assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.02 for a, b in zip(one, other, strict=True))
    # Each is one training of ten steps; together they are several.
    of_one, of_two = again.optimizer.ledger, loaded.optimizer.ledger
    assert (of_one.steps, of_two.steps, loaded.optimizer.num_dp_steps) == (10, 20, 14)
    assert of_two.epsilon(1e-5) > 1.2 * of_one.epsilon(1e-5)
    all_three = tfdpfl.PrivacyLedger().merge(of_one).merge(of_two)
    assert all_three.steps == 30 and all_three.epsilon(1e-5) > 1.2 * of_two.epsilon(1e-5)
    assert tfdpfl.PrivacyLedger().merge(of_one).merge(of_one) == of_one
    assert tfdpfl.PrivacyLedger.from_dict(all_three.to_dict()) == all_three
    assert pickle.loads(pickle.dumps(loaded.optimizer)).ledger == of_two


@one_kind
@pytest.mark.slow
def test_another_noises_file_is_refused_and_nothing_is_loaded(begun, tmp_path):
    noise, _, path, model = begun
    if not c.keras3():
        pytest.skip("Keras 2 makes the optimizer from the file")
    weights = str(tmp_path / "w.weights.h5")
    model.save_weights(weights)
    for other, multiplier in [(dataclasses.replace(noise, min_separation=5), 2.0), (noise, 1.9)]:
        mine = wide(other, multiplier)
        mine.optimizer.build(mine.trainable_variables)
        before = [np.array(v) for v in mine.optimizer.variables]
        with pytest.raises(ValueError, match="does not hold the correlated noise"):  # Keras makes it one
            mine.load_weights(weights)
        for v, value in zip(mine.optimizer.variables, before, strict=True):
            np.testing.assert_array_equal(np.array(v), value)


@one_kind
def test_config_and_classes_come_back(begun):
    noise, _, path, model = begun
    assert type(model.optimizer).from_config(model.optimizer.get_config()).noise == noise
    assert tf.keras.models.load_model(path).optimizer.noise == noise
    ftrl = tfdpfl.DPFTRL(1.0, 2.0)
    assert ftrl.noise == Tree() and type(pickle.loads(pickle.dumps(ftrl))) is tfdpfl.DPFTRL
    got = tf.keras.optimizers.get({"class_name": "tfdpfl>DPFTRL", "config": ftrl.get_config()})
    assert type(got) is tfdpfl.DPFTRL and got.noise == Tree()


@pytest.mark.parametrize("noise", NOISES[1:], ids=lambda noise: type(noise).__name__)
@pytest.mark.slow
def test_the_weights_are_those_of_dp_sgd_in_numpy(noise, monkeypatch):
    """With known base normals: per-example clip, sum, C⁻¹ Z by numpy's solver, denominator."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 8, 3)).astype("float32"), rng.normal(size=(4, 8, 2)).astype("float32")
    z = rng.normal(size=(4, 8)).astype("float32")
    at = tf.Variable(0)

    def gaussian(self, shapes, stddev, key=None):
        return [stddev * tf.constant(z)[at.assign_add(1) - 1]]

    monkeypatch.setattr(Source, "gaussian", gaussian)
    model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
    model.compile(tfdpfl.DPSGD(0.3, 1.7, noise=noise, learning_rate=0.5, expected_batch_size=5), loss="mse")
    kernel, bias = (w.astype(np.float64) for w in model.get_weights())
    w = np.linalg.solve(noise.matrix(4), z.astype(np.float64)) * 1.7 * 0.3 * noise.unit
    for t in range(4):
        residual = x[t] @ kernel + bias - y[t]  # of the mean of two squares
        sums = [np.zeros_like(kernel), np.zeros_like(bias)]
        for i in range(8):
            g = [np.outer(x[t, i], residual[i]), residual[i]]
            clip = min(1, 0.3 / np.sqrt(sum((p**2).sum() for p in g)))
            sums = [s + clip * p for s, p in zip(sums, g, strict=True)]
        kernel = kernel - 0.5 * (sums[0] + w[t, :6].reshape(3, 2)) / 5
        bias = bias - 0.5 * (sums[1] + w[t, 6:]) / 5
        model.train_on_batch(x[t], y[t])
    for ours, theirs in zip(model.get_weights(), (kernel, bias), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_neighbours_differ_by_no_more_than_the_sensitivity_of_a_banded_inverse():
    """The loss is linear, so one example's gradients do not change the others'. With it and without it both trainings
    draw the same noise; what it moves, over C, is the sensitivity."""
    noise = BandedInverse(bands=4, coefficients="best", **HOW)
    x = np.random.default_rng(0).normal(size=(12, 5, 3)).astype("float32")
    x[::4, 0] = [30.0, 0.0, 0.0]  # far above the clip, three times, four steps apart
    moved = []
    for there in (1.0, 0.0):
        model = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(1, use_bias=False)])
        optimizer = tfdpfl.DPSGD(0.3, 1.7, noise=noise, learning_rate=1.0, expected_batch_size=1, seed=5)
        model.compile(optimizer, loss=lambda y, out: tf.reduce_sum(y * out, -1))
        weights = [model.get_weights()[0]]
        for t in range(12):
            w = np.ones(5, "float32")
            w[0] = there if t % 4 == 0 else 1.0
            model.train_on_batch(x[t], np.ones((5, 1), "float32"), sample_weight=w)
            weights.append(model.get_weights()[0])
        moved.append(-np.diff(weights, axis=0).reshape(12, -1))
    found = np.linalg.norm(noise.matrix(12) @ (moved[0] - moved[1]))
    bound = 0.3 * noise.sensitivity(12, 4, 3)
    assert 0.999 * bound < found <= bound * (1 + 1e-4)
    assert noise.unit * 0.3 == pytest.approx(bound)  # so that noise multiplier 1.7 is that of one Gaussian mechanism


# -- what is told of it ----------------------------------------------------------------------------------------------

X, Y = c.examples(48)
ORDERED = {"num_examples": 48, "delta": 1e-5, "sampling": "fixed_order", "batch_size": 12}


def in_order(batch=12):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch)


def fitted(noise, data, epochs, budget, multiplier=1.0, optimizer=tfdpfl.DPAdam, model=None, **kwargs):
    model = model or c.compiled(optimizer(1.0, multiplier, noise=noise, expected_batch_size=12))
    model.fit(data, epochs=epochs, verbose=0, callbacks=[budget], **kwargs)
    return model


def of_rows(ledger):
    """(steps, separation, uses) of each training in it."""
    rows = [row["correlated"] for row in ledger.to_dict()["rows"]]
    return [(row["num_steps"], row["min_separation"], row["max_participations"]) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "noise",
    [Banded(bands=3, **HOW), BandedInverse(bands=3, coefficients="best", **HOW)],
    ids=lambda n: type(n).__name__,
)
def test_a_training_as_planned_costs_one_gaussian_and_what_is_more_costs_more(noise):
    one = tfdpfl.compute_epsilon(
        num_examples=1, batch_size=1, noise_multiplier=1.0, num_steps=1, sampling="none", delta=1e-5)  # fmt: skip
    budget = PrivacyBudget(**ORDERED)
    model = fitted(noise, in_order(), 3, budget)
    assert of_rows(budget.ledger) == [(12, 4, 3)]
    assert budget.ledger.epsilon(1e-5) == pytest.approx(one, rel=1e-6)
    said = str(budget.report())
    assert noise.text() in said and "other examples for training examples" in said
    x, y = X[:12], Y[:12]
    model.train_on_batch(x, y)  # nobody said what is in it
    assert of_rows(model.optimizer.ledger) == [(13, 1, None)]
    assert model.optimizer.ledger.epsilon(1e-5) > 2 * one


@pytest.mark.slow
def test_a_pass_that_is_cut_brings_uses_nearer():
    budget = PrivacyBudget(**ORDERED)
    model = fitted(Tree(), in_order(), 2, budget)
    fitted(None, in_order(), 1, budget, model=model, steps_per_epoch=3)
    assert of_rows(budget.ledger) == [(11, 4, 3)]
    fitted(None, in_order(), 1, budget, model=model)  # it begins at the first batch: three steps after the last time
    assert of_rows(budget.ledger) == [(15, 3, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("other", ["reversed", "generated"])
def test_data_of_ones_own_in_another_order_may_use_an_example_again_at_once(other):
    """The last batch of the one pass may be the first of the next: the noises of two steps in a row."""
    generated = tf.data.Dataset.from_generator(lambda: in_order(), output_signature=in_order().element_spec)
    data = {"reversed": tf.data.Dataset.from_tensor_slices((X[::-1], Y[::-1])).batch(12), "generated": generated}[other]
    noise, budget = Banded(bands=3, **HOW), PrivacyBudget(**ORDERED)
    model = fitted(noise, in_order(), 1, budget)
    fitted(None, in_order(), 1, budget, model=model)
    assert of_rows(budget.ledger) == [(8, 4, 2)]  # made anew, but from the same tensors
    fitted(None, data, 1, budget, model=model)
    assert of_rows(budget.ledger) == [(12, 1, 3)]
    moved = np.linalg.norm(noise.matrix(12)[:, [3, 7, 8]].sum(1)) / noise.unit
    assert budget.ledger.epsilon(1e-5) >= 0.999 * tfdpfl.compute_epsilon(
        num_examples=1, batch_size=1, noise_multiplier=1 / moved, num_steps=1, sampling="none", delta=1e-5)  # fmt: skip


@pytest.mark.slow
def test_batches_that_fit_shuffles_have_no_fixed_order():
    class Batches(getattr(tf.keras.utils, "PyDataset", tf.keras.utils.Sequence)):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return X[12 * i : 12 * i + 12], Y[12 * i : 12 * i + 12]

    noise = Banded(bands=3, **HOW)
    with pytest.raises(tfdpfl.PrivacyError, match=r"fit shuffles the batches of a Batches.* shuffle=False"):
        fitted(noise, Batches(), 3, PrivacyBudget(**ORDERED))
    budget = PrivacyBudget(**ORDERED)
    fitted(noise, Batches(), 3, budget, shuffle=False)
    assert of_rows(budget.ledger) == [(12, 4, 3)]


@pytest.mark.slow
def test_a_load_goes_on_with_the_passes(tmp_path):
    path = str(tmp_path / ("m.keras" if c.keras3() else "m.h5"))
    noise = Banded(bands=3, **HOW)
    fitted(noise, in_order(), 2, PrivacyBudget(**ORDERED)).save(path)
    budget = PrivacyBudget(**ORDERED)
    fitted(None, in_order(), 1, budget, model=tf.keras.models.load_model(path))
    assert of_rows(budget.ledger) == [(12, 4, 3)]
    assert "in the same order as before" in str(budget.report())


@pytest.mark.slow
def test_arrays_that_fit_shuffles_bound_the_uses_alone():
    budget = PrivacyBudget(delta=1e-5)
    model = c.compiled(tfdpfl.DPFTRL(1.0, 4.0))
    model.fit(X, Y, batch_size=12, epochs=2, verbose=0, callbacks=[budget])
    assert of_rows(budget.ledger) == [(8, 1, 2)]


@pytest.mark.slow
def test_the_target_is_kept_and_reached():
    noise = Banded(bands=2, min_separation=4, max_participations=30)
    budget = PrivacyBudget(target_epsilon=1.0, **ORDERED)
    fitted(noise, in_order(), 30, budget)
    (steps, _, _), = of_rows(budget.ledger)  # fmt: skip
    assert budget.ledger.epsilon(1e-5) <= 1.0 and 0 < steps < 120
    with pytest.raises(tfdpfl.PrivacyError, match="leaves no room"):
        fitted(noise, in_order(), 3, PrivacyBudget(target_epsilon=0.1, **ORDERED), multiplier=0.5)


def declared(kind, apart, data):
    rate = min(0.25 * apart, 1.0) if kind == "cyclic_poisson" else 0.25
    data.tfdpfl_sampling = tfdpfl.data.SamplingDeclaration(kind, rate, 48, 8, min_separation=apart)
    return data


@pytest.mark.slow
def test_groups_in_turns_are_priced_with_their_sampling_and_begin_anew_with_new_data():
    noise = Banded(bands=2, min_separation=2, max_participations=1)
    budget = PrivacyBudget(delta=1e-5)
    data = declared("cyclic_poisson", 2, in_order(6))
    model = fitted(noise, data, 3, budget, multiplier=2.0)
    once = tfdpfl.compute_epsilon(num_examples=48, batch_size=24, noise_multiplier=2.0, num_steps=12, delta=1e-5)
    assert budget.ledger.epsilon(1e-5) == pytest.approx(once, rel=1e-9)
    assert budget.ledger.adjacency == "add_or_remove_one"
    fitted(None, declared("cyclic_poisson", 2, in_order(6)), 3, budget, model=model)
    twice = tfdpfl.compute_epsilon(num_examples=48, batch_size=24, noise_multiplier=2.0, num_steps=24, delta=1e-5)
    assert budget.ledger.epsilon(1e-5) == pytest.approx(twice, rel=1e-9)
    assert [steps for steps, _, _ in of_rows(budget.ledger)] == [24, 24]


@pytest.mark.slow
def test_each_pass_of_resting_examples_is_a_training_of_its_own(monkeypatch):
    monkeypatch.setattr(monte_carlo, "RUNS", 1 << 16)
    noise, budget = Banded(bands=2, min_separation=2, max_participations=1), PrivacyBudget(delta=1e-2)
    data = tfdpfl.data.b_min_sep((X, Y), 6, min_separation=2, expected_batch_size=12)
    model = fitted(noise, data, 1, budget, multiplier=2.0)
    fitted(None, data, 1, budget, model=model)
    assert [steps for steps, _, _ in of_rows(budget.ledger)] == [6, 6]
    assert tfdpfl.data.declared_sampling(data).sampling_rate == pytest.approx(12 / 36)
    run = CorrelatedRun(
        noise=noise, noise_multiplier=2.0, num_steps=6, min_separation=2, sampling_rate=12 / 36, sampling="b_min_sep"
    )
    twice = tfdpfl.accounting.price(dp_accounting.SelfComposedDpEvent(run.dp_event, 2), 1e-2).epsilon
    assert budget.ledger.epsilon(1e-2) == pytest.approx(twice, rel=1e-9)
    with pytest.raises(tfdpfl.PrivacyError, match="One pass"):
        model.fit(data, epochs=1, steps_per_epoch=3, callbacks=[budget], verbose=0)
    assert budget.ledger.steps == 12


@pytest.mark.parametrize(
    "noise, data, said",
    [
        (Tree(), lambda: tfdpfl.data.poisson_batches((X, Y), 0.25, 4), "does not bound how often"),
        (Banded(bands=3, **HOW), lambda: declared("fixed_order", 3, in_order()), "keep 3"),
        (Banded(bands=3, **HOW), lambda: declared("cyclic_poisson", 5, in_order()), "5 groups"),
        (Banded(bands=3, **HOW), lambda: declared("b_min_sep", 5, in_order()), "until the 5th step"),
        (Banded(bands=3, **HOW), lambda: declared("b_min_sep", 4, in_order()), "One pass .* is a whole training"),
    ],
)
def test_data_that_do_not_bound_the_uses_are_refused(noise, data, said):
    with pytest.raises(tfdpfl.PrivacyError, match=said):
        fitted(noise, data(), 2, PrivacyBudget(delta=1e-5))


def test_what_says_it_keeps_an_order_and_shuffles_is_refused():
    model = c.compiled(tfdpfl.DPSGD(1.0, 1.0, noise=Banded(bands=3, **HOW)))
    with pytest.raises(tfdpfl.PrivacyError, match="closer together"):
        shuffled = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(48).batch(12)
        fitted(None, shuffled, 1, PrivacyBudget(**ORDERED), model=model)
    assert model.optimizer.num_dp_steps == 0


@pytest.mark.one_stack
def test_more_epochs_than_the_noise_was_made_for_are_refused():
    model = c.compiled(tfdpfl.DPSGD(1.0, 1.0, noise=Banded(bands=3, **HOW)))
    with pytest.raises(tfdpfl.PrivacyError, match="max_participations=3"):
        fitted(None, in_order(), 4, PrivacyBudget(**ORDERED), model=model)
    assert model.optimizer.num_dp_steps == 0
    with pytest.raises(tfdpfl.PrivacyError, match="keep 1"):
        model.fit(X, Y, epochs=1, verbose=0, callbacks=[PrivacyBudget(delta=1e-5)])


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="noise='tree'"):
        tfdpfl.DPSGD(1.0, 1.0, noise="tree")


def fixed(order=slice(None)):
    return tfdpfl.data.fixed_order((X[order], Y[order]), 12)


@pytest.mark.slow
def test_data_in_another_order_bring_uses_next_to_each_other():
    """An example of the last batch may come in the first one after it."""
    budget = PrivacyBudget(delta=1e-5)
    model = fitted(Tree(), fixed(), 1, budget)
    fitted(None, fixed(), 1, budget, model=model)  # another data set of the same order
    assert of_rows(budget.ledger) == [(8, 4, 2)]
    stops = PrivacyBudget(delta=1e-5, target_epsilon=1.001 * budget.ledger.epsilon(1e-5))
    with pytest.raises(tfdpfl.PrivacyError, match="leaves no room"):
        fitted(None, fixed(slice(None, None, -1)), 1, stops, model=model)
    fitted(None, fixed(slice(None, None, -1)), 1, budget, model=model)
    assert of_rows(budget.ledger) == [(12, 1, 3)]


@pytest.mark.both_stacks
@pytest.mark.slow
def test_a_backup_goes_on_with_whole_passes(tmp_path):
    """Keras 2 loads it into the optimizer's variables when they are made: the pass is noted for that state."""
    data, budget = fixed(), PrivacyBudget(delta=1e-5)
    for epochs in (1, 3):
        model = c.compiled(tfdpfl.DPSGD(1.0, 1.0, noise=Tree(), expected_batch_size=12))
        kept = tf.keras.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)
        model.fit(data, epochs=epochs, verbose=0, callbacks=[budget, kept])
    assert of_rows(model.optimizer.ledger) == [(12, 4, 3)]


@pytest.mark.slow
def test_a_state_that_is_put_back_within_a_pass_brings_uses_next_to_each_other():
    """The batch that follows it may be one of those just before it."""

    class Back(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            found = self.model.optimizer.variables
            found = found() if callable(found) else found
            if self.model.optimizer.num_dp_steps == 3:
                self.saved = [np.array(v) for v in found]
            if self.model.optimizer.num_dp_steps == 6:
                for v, value in zip(found, self.saved, strict=True):
                    v.assign(value)

    budget = PrivacyBudget(delta=1e-5)
    model = c.compiled(tfdpfl.DPSGD(1.0, 1.0, noise=Tree(), expected_batch_size=12))
    model.fit(fixed(), epochs=3, verbose=0, callbacks=[budget, Back()])
    # Batches 0 1 2 | 3 0 1, and from the state after 2: 2 3 0 1 2 3, the first of which was the one before.
    assert sorted(of_rows(budget.ledger)) == [(6, 4, 2), (9, 1, 5)]


@pytest.mark.slow
def test_steps_of_which_the_segments_are_lost_are_priced_as_steps():
    """A SavedModel of Keras 2 brings the rows alone. (12 steps before were 4 steps with more uses, once.)"""
    model = c.compiled(tfdpfl.DPSGD(1.0, 2.0, noise=Tree()))
    for _ in range(3):
        model.train_on_batch(X[:12], Y[:12])
    alone = model.optimizer.ledger.epsilon(1e-5)
    other = c.compiled(tfdpfl.DPSGD(1.0, 2.0, noise=Tree()))
    other.optimizer._dp.counter.merge(model.optimizer._dp.rows(), other.optimizer._dp_ledger)
    other.train_on_batch(X[:12], Y[:12])
    assert sorted(of_rows(other.optimizer.ledger)) == [(3, 1, None), (4, 1, None)]
    assert other.optimizer.ledger.epsilon(1e-5) > 1.2 * alone


@pytest.mark.parametrize("kind", ["fixed_order", "cyclic_poisson"])
@pytest.mark.slow
def test_more_uses_than_the_data_declare_are_refused_before_the_first(kind):
    if kind == "fixed_order":
        noise, data = Tree(), tfdpfl.data.fixed_order((X, Y), 12, max_participations=2)
    else:
        noise = Banded(bands=2, min_separation=2, max_participations=1)
        data = tfdpfl.data.cyclic_poisson(
            (X, Y), steps=4, groups=2, expected_batch_size=12, max_participations=2)  # fmt: skip
    enough = 2 if kind == "fixed_order" else 1
    model = c.compiled(tfdpfl.DPSGD(1.0, 1.0, noise=noise, expected_batch_size=12))
    with pytest.raises(tfdpfl.PrivacyError, match="declared with max_participations=2"):
        fitted(None, data, enough + 1, PrivacyBudget(delta=1e-5), model=model)
    assert model.optimizer.num_dp_steps == 0
    fitted(None, data, enough, PrivacyBudget(delta=1e-5), model=model)
    with pytest.raises(tfdpfl.PrivacyError, match="declared with max_participations=2"):
        fitted(None, data, 1, PrivacyBudget(delta=1e-5), model=model)
