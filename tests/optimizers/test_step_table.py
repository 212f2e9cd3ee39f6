"""What ran is what is priced: whose steps they were and how batches were drawn, through copies, files and restarts."""

import contextlib
import copy
import json
import pathlib
import pickle
import subprocess
import sys
import warnings

import conftest as c
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import tensorflow as tf
from step_cases import DELTA, Also, N, X, Y, Z, budget, compiled, draws, everyone, fit, slices, uses

import tfdpfl
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.errors import PrivacyError
from tfdpfl.optimizers import _step_table

keras = tf.keras
KERAS3 = c.keras3()


# -- the table ---------------------------------------------------------------------------------------------------


class Steps:
    """An optimizer's counter and its saved table, without a model."""

    def __init__(self):
        self.counter, self.saved = (
            _step_table.Counter(),
            tf.Variable(np.zeros([_step_table.ROWS, len(_step_table.COLUMNS)])),
        )
        count = tf.function(lambda z: self.counter.count(self.counter.drawn(tf.zeros([])), z, self.saved))
        self.take = lambda z=1.0: count(tf.constant(z, tf.float64))

    def announce(self, steps, passes=0, sampling=1, n=100, batch=10, data=0.0):
        self.counter.passes[(data, sampling, n, batch, 0)] = passes
        self.counter.announce((data, sampling, n, batch, 0), steps)

    @property
    def ledger(self):
        return _step_table.ledger_of(self.counter.rows(self.saved))

    @property
    def rows(self):
        return [(z, n) for *_, z, n, _ in self.counter.rows(self.saved).tolist()]


@pytest.mark.slow
def test_every_step_is_in_the_table_once():
    steps = Steps()
    for z in (1.0, 1.0, 2.0, 1.0, 0.0, 2.0):
        steps.take(z)
    assert sorted(steps.rows) == [(0.0, 1), (1.0, 3), (2.0, 2)]
    assert steps.counter.steps == 6 and steps.ledger.steps == steps.ledger.unknown_steps == 6


def test_what_is_announced_holds_for_so_many_steps_and_no_more():
    steps = Steps()
    steps.announce(2)
    for _ in range(3):
        steps.take()
    assert steps.ledger.unknown_steps == 1 and steps.ledger.steps == 3
    poisson, unknown = (row["run"] for row in steps.ledger.to_dict()["rows"])
    assert (poisson["sampling"], poisson["num_steps"], poisson["batch_size"]) == ("poisson", 2, 10)
    assert (unknown["sampling"], unknown["num_steps"]) == ("none", 1)


def test_passes_are_counted_as_they_begin():
    steps = Steps()
    for passes in (1, 1, 2):
        steps.announce(1, passes, sampling=2)
        steps.take()
    (row,) = steps.ledger.to_dict()["rows"]
    assert row["run"]["num_epochs"] == 2 and row["run"]["num_steps"] == 3


def test_a_pass_with_two_noises_is_one_use_at_the_lesser():
    steps = Steps()
    for z in (1.0, 0.5):
        steps.announce(1, 1, sampling=2)
        steps.take(z)
    (row,) = steps.ledger.to_dict()["rows"]
    assert row["run"]["noise_multiplier"] == 0.5 and row["run"]["num_epochs"] == 1


def test_a_full_table_merges_at_the_least_noise_and_loses_no_step():
    steps = Steps()
    noises = [1.0 + i / 10 for i in range(_step_table.ROWS + 4)]
    noises += [0.5, 3.0, 0.5]
    for z in noises:
        steps.take(z)
    saved = [(z, n) for *_, z, n, _ in steps.saved.numpy().tolist() if n]
    for rows in (saved, steps.rows):
        assert sum(n for _, n in rows) >= len(noises)
        for z in noises:  # at least as many steps at this noise or less as there were
            assert sum(n for m, n in rows if m <= z) >= sum(m <= z for m in noises)


def test_a_table_that_is_taken_back_takes_back_no_step():
    steps = Steps()
    steps.take(), steps.take()
    early = steps.saved.numpy()
    steps.take(), steps.take()
    steps.saved.assign(early)
    assert steps.counter.taken_back(steps.saved) == 2 and steps.rows == [(1.0, 4)]
    steps.take()
    assert steps.rows == [(1.0, 5)] and steps.saved.numpy()[:, _step_table.STEPS].sum() == 5
    steps.take(2.0)
    steps.saved.assign(0 * early)
    assert steps.rows == [(1.0, 5), (2.0, 1)]
    steps.take(2.0)
    assert steps.saved.numpy()[:, _step_table.STEPS].sum() == 7  # whatever saves it next


HOW = st.sampled_from([(0.0, 0.0), (1.0, 0.0), (1.0, 20.0), (2.0, 0.0)])  # Poisson samples alone are cut to a size
TABLES = st.lists(
    st.builds(
        lambda origin, data, how, batch, *ran: (origin, data, how[0], 100.0, batch, how[1], *ran),
        st.sampled_from([1.0, 2.0, 3.0]), st.sampled_from([0.0, 7.0]), HOW, st.sampled_from([10.0, 20.0]),
        st.sampled_from([0.5, 1.0]), st.integers(1, 9).map(float), st.integers(1, 9).map(float),
    ),
    max_size=8, unique_by=lambda row: row[: _step_table.STEPS],
).map(lambda rows: np.array(rows, float).reshape(-1, len(_step_table.COLUMNS)))  # fmt: skip


@hypothesis.given(TABLES, TABLES, TABLES)
@pytest.mark.slow
def test_tables_unite_in_any_order_and_none_counts_twice(a, b, d):
    as_set = lambda rows: {tuple(row) for row in rows}
    assert as_set(_step_table.merge_tables(a, a)) == as_set(a)
    assert as_set(_step_table.merge_tables(a, b)) == as_set(_step_table.merge_tables(b, a))
    assert as_set(_step_table.merge_tables(_step_table.merge_tables(a, b), d)) == as_set(
        _step_table.merge_tables(a, _step_table.merge_tables(b, d))
    )
    both = _step_table.merge_tables(a, b)
    for rows in (a, b):
        for row in rows:
            same = both[(both[:, _step_table.KEY] == row[_step_table.KEY]).all(1)]
            assert len(same) == 1 and (same[0] >= row).all()


@hypothesis.given(TABLES)
def test_folding_keeps_every_step_and_the_rows_of_its_own(rows):
    folded = _step_table.compact(rows, 1.0)
    for column in (_step_table.STEPS, _step_table.PASSES):
        assert folded[:, column].sum() == rows[:, column].sum()
    own = lambda rows: {tuple(row) for row in rows if row[_step_table.ORIGIN] == 1.0}
    assert own(folded) == own(rows)
    assert len({tuple(row[_step_table.DATA : _step_table.STEPS]) for row in folded if row[0] != 1.0}) == len(
        [row for row in folded if row[0] != 1.0]
    )


@hypothesis.given(TABLES, TABLES)
def test_folded_rows_beside_those_that_went_into_them_count_no_less(a, b):
    steps = lambda rows: rows[:, _step_table.STEPS].sum()
    assert steps(_step_table.merge_tables(_step_table.compact(a, 1.0), b)) >= steps(_step_table.merge_tables(a, b))


@hypothesis.given(TABLES, TABLES)
@pytest.mark.slow
def test_ledgers_of_tables_merge_as_the_tables_do(a, b):
    of = _step_table.ledger_of
    merged = of(a).merge(of(b))
    assert merged.steps >= of(_step_table.merge_tables(a, b)).steps
    again = PrivacyLedger.from_dict(json.loads(json.dumps(merged.to_dict())))
    assert again == merged and again.merge(of(a)) == merged


@pytest.mark.slow
def test_microbatches_halve_the_multiplier_unless_each_is_one_example():
    for microbatches, want in ((4, 1.0), (2, 0.5), (None, 1.0)):
        model = compiled(1.0, num_microbatches=microbatches)
        model.train_on_batch(X[:4], Y[:4])
        assert model.optimizer.executed == [(want, 1)]


def test_what_was_not_finite_is_counted_and_not_saved(tmp_path):
    model = compiled()
    x = X[:8].copy()
    x[2], x[5] = np.nan, np.inf
    for _ in range(2):
        model.train_on_batch(x, Y[:8])
    assert model.optimizer.num_nonfinite == 4
    names = [v.name for v in (model.optimizer.variables if KERAS3 else model.optimizer.variables())]
    assert not any("nonfinite" in name for name in names)


# -- whose steps they were ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_ledger_and_an_optimizer_with_as_many_steps_are_not_taken_for_the_same():
    """Step totals were compared, so that ten steps of one hid ten steps of the other."""
    other = budget(N)
    fit(compiled(), other)  # 10 steps, one use of each example
    model, watched = compiled(), budget(N, ledger=other.ledger)
    everyone(model, 10)
    with pytest.warns(UserWarning, match="10 steps ran of which only the noise is known"):
        fit(model, watched)
    assert watched.report().epsilon == pytest.approx(uses(1 + 10 + 1))


@pytest.mark.slow
def test_steps_that_a_ledger_and_the_optimizer_both_know_count_once():
    model, first = compiled(), budget(N)
    fit(model, first)
    saved = PrivacyLedger.from_dict(json.loads(json.dumps(first.ledger.to_dict())))
    second = budget(N, ledger=saved)
    fit(model, second)
    assert second.report().epsilon == pytest.approx(uses(2)) and second.ledger.steps == 20
    assert PrivacyLedger().merge(first.ledger).merge(second.ledger).merge(saved).epsilon(DELTA, "rdp") == (
        pytest.approx(uses(2))
    )


@pytest.mark.slow
def test_steps_before_do_not_take_the_next_fits_sampling():
    model, watched = compiled(expected_batch_size=2.0), budget(N)
    everyone(model, 5)
    with pytest.warns(UserWarning, match="5 steps ran of which only the noise"):
        model.fit(draws(), callbacks=[watched], verbose=0)
    assert uses(5) <= watched.report().epsilon <= uses(8)
    assert watched.report().sampling is None and "5 steps of which only the noise multiplier 2" in str(watched.report())


@pytest.mark.slow
def test_a_model_that_was_trained_without_privacy_since_has_no_report():
    model, watched = compiled(), budget(N)
    fit(model, watched)
    model.compile("adam", loss=model.loss)
    assert watched.report().epsilon == pytest.approx(uses(1))
    fit(model)
    with pytest.raises(PrivacyError, match="compiled with Adam since and trained"):
        watched.report()


@pytest.mark.slow
def test_steps_that_another_callback_takes_are_not_of_the_fits_batches():
    model, watched = compiled(expected_batch_size=2.0), budget(N)
    extra = Also(on_train_batch_end=lambda: everyone(model, 1), on_epoch_end=lambda: everyone(model, 1))
    model.fit(draws(3), callbacks=[watched, extra], verbose=0)
    assert watched.ledger.steps == 3 + 3 + 1 and watched.ledger.unknown_steps == 4
    assert watched.report().epsilon >= uses(4)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_batch_that_never_came_announces_no_step_after_the_epoch():
    """Where the data's length is not known, Keras begins a batch, and then finds that there is none."""
    signature = (tf.TensorSpec((None, c.WIDTH)), tf.TensorSpec((None,), tf.int32))
    data = tf.data.Dataset.from_generator(lambda: iter([(X[:2], Y[:2])] * 3), output_signature=signature)
    model, watched = compiled(expected_batch_size=2.0), budget(N, sampling="poisson", batch_size=2)
    model.fit(data, callbacks=[watched, Also(on_epoch_end=lambda: everyone(model, 1))], verbose=0)
    assert watched.ledger.steps == 4 and watched.ledger.unknown_steps == 1


def test_a_training_that_was_interrupted_leaves_nothing_announced_for_later_steps():
    model, watched = compiled(expected_batch_size=2.0), budget(N)

    def stop():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.fit(draws(3), callbacks=[watched, Also(on_train_batch_begin=stop)], verbose=0)
    assert watched.report().epsilon == 0
    everyone(model, 1)
    assert watched.ledger.unknown_steps == 1


@pytest.mark.parametrize("held", [False, True])
def test_steps_taken_for_a_batch_that_was_cut_off_are_steps_of_every_example(held):
    model, watched, caught = compiled(), budget(N), []

    def stop():
        raise KeyboardInterrupt

    for _ in range(3):
        try:
            fit(model, watched, Also(on_train_batch_begin=stop), batch_size=N)
        except KeyboardInterrupt as error:
            if held:
                caught.append(error)
        everyone(model, 1)
    assert watched.report().epsilon >= uses(3)
    assert watched.ledger.unknown_steps == 3


@pytest.mark.slow
def test_a_fit_inside_of_a_watched_fit_needs_a_callback_of_its_own():
    model, watched, other = compiled(), budget(N, target_epsilon=uses(2)), compiled()
    with pytest.raises(PrivacyError, match="fit that is still running"):
        fit(model, watched, Also(on_epoch_end=lambda: fit(other, watched)), epochs=2)
    apart = budget(N, target_epsilon=uses(2))
    model = compiled()
    log = fit(model, apart, Also(on_epoch_end=lambda: fit(compiled(), budget(N))), epochs=5)
    assert len(log.history["epsilon"]) == 2 and log.history["epsilon"][-1] <= uses(2)


@pytest.mark.slow
def test_two_callbacks_of_one_fit_agree_or_are_refused():
    model, first, second = compiled(), budget(N), budget(N, accountant="pld")
    fit(model, first, second)
    assert first.ledger == second.ledger and first.ledger.unknown_steps == 0
    with pytest.raises(PrivacyError, match="say different things"):
        fit(model, budget(N, dataset_name="north"), budget(N, dataset_name="south"))
    fit(model, first, second, batch_size=50)
    assert first.report().epsilon == pytest.approx(uses(2))


@pytest.mark.slow
def test_passes_of_a_fit_inside_of_another_add_up():
    model = compiled()
    data = slices(20)
    said = {"sampling": "shuffle", "batch_size": 20}
    outer, extra = budget(N, **said), []

    def inner():
        if not extra:
            extra.append(budget(N, **said))
            model.fit(data, callbacks=extra, epochs=2, verbose=0)

    model.fit(data, epochs=3, callbacks=[outer, Also(on_epoch_end=inner)], verbose=0)
    assert outer.report().epsilon == pytest.approx(uses(5)) == pytest.approx(extra[0].report().epsilon)


@pytest.mark.slow
def test_batches_that_cross_the_border_of_two_passes_are_a_use_in_each():
    """shuffle, repeat, batch: with 200 examples two batches of 120 are 240 uses."""
    model, watched = compiled(), budget(N, sampling="shuffle", batch_size=120)
    stream = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N).repeat().batch(120)
    model.fit(stream, steps_per_epoch=2, epochs=5, callbacks=[watched], verbose=0)
    assert watched.report().epsilon >= uses(6)
    arrays = budget(N)
    fit(compiled(), arrays, batch_size=120, epochs=5)
    assert arrays.report().epsilon == pytest.approx(uses(5))


@pytest.mark.slow
def test_an_example_is_used_no_more_often_than_there_were_steps():
    model, watched = compiled(), budget(N)
    fit(model, watched, batch_size=N, epochs=2)
    assert watched.report().participations == 2
    rows = np.array([[1.0, 0, 2, N, 50, 0, Z, 3, 9]])
    assert _step_table.ledger_of(rows).report(DELTA, "rdp").participations == 3


@pytest.mark.slow
@pytest.mark.both_stacks
def test_an_execution_that_the_data_end_in_announces_no_more_than_it_takes():
    model, watched = c.compiled(tfdpfl.DPSGD(1.0, Z, expected_batch_size=2.0), steps_per_execution=8), budget(N)
    extra = Also(on_train_batch_end=lambda: everyone(model, 8))
    with contextlib.suppress(tf.errors.OutOfRangeError):  # Keras 2, after its own end of the data
        model.fit(draws(10), callbacks=[extra, watched], verbose=0)
    assert watched.ledger.unknown_steps >= watched.ledger.steps - 10


@pytest.mark.parametrize("way", ["shared layer", "custom loop", "other model"])
@pytest.mark.slow
@pytest.mark.both_stacks
def test_steps_on_the_same_weights_count_whoever_took_them(way):
    model, watched = compiled(), budget(N)
    if way == "shared layer":
        other = keras.Sequential([keras.Input((c.WIDTH,)), model.layers[0], keras.layers.Dense(c.CLASSES)])
        other.compile(tfdpfl.DPSGD(1.0, Z), loss=model.loss)
        everyone(other, 4)
        fit(model, watched)
    elif way == "custom loop":
        optimizer = tfdpfl.DPSGD(1.0, Z)
        optimizer.build(model.trainable_variables)

        @tf.function(input_signature=[tf.TensorSpec([None, c.WIDTH])])
        def step(x):
            optimizer.minimize(lambda: tf.reduce_mean(model(x) ** 2), model.trainable_variables)

        for _ in range(4):
            step(X)
        fit(model, watched)
    else:
        fit(model, watched)
        model.compile(tfdpfl.DPSGD(1.0, Z), loss=model.loss)
        everyone(model, 3)
        del model
        fit(compiled(), watched)
    assert watched.report().epsilon == pytest.approx(uses(5))


@pytest.mark.slow
def test_a_target_that_another_callback_passed_is_said():
    model, watched = compiled(), budget(N, target_epsilon=uses(3))
    with pytest.raises(PrivacyError, match="leave train_on_batch out of callbacks"):
        fit(model, watched, Also(on_epoch_end=lambda: everyone(model, 9)))


@pytest.mark.slow
def test_batches_from_a_seed_are_said():
    model, watched = compiled(expected_batch_size=2.0), budget(N)
    model.fit(draws(seed=5), callbacks=[watched], verbose=0)
    assert "Poisson batches come from seed=5" in str(watched.report())


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.skipif(KERAS3, reason="Keras 3 loads no SavedModel as a model")
@pytest.mark.parametrize("name", ["savedmodel", "model.h5"])
def test_a_whole_model_of_keras_2_brings_its_ledger(name, tmp_path):
    model, watched = compiled(), budget(N)
    fit(model, budget(N), epochs=3)
    model.save(tmp_path / name)
    loaded = keras.models.load_model(tmp_path / name)
    assert loaded.optimizer.num_dp_steps == 30
    fit(loaded, watched)
    assert watched.report().epsilon == pytest.approx(uses(4))
    assert "tfdpfl_rows" not in model.optimizer.get_config()


@pytest.mark.slow
def test_copies_share_what_ran_before_and_add_what_each_runs(tmp_path):
    """K-fold, or one template for three hospitals."""
    model = compiled()
    fit(model, budget(N))
    model.save(tmp_path / "template.keras")
    watched = budget(N)
    for _ in range(3):
        fit(keras.models.load_model(tmp_path / "template.keras"), watched)
    assert watched.ledger.steps == 10 + 3 * 10
    assert watched.report().epsilon == pytest.approx(uses(1 + 3))


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "copy"])
@pytest.mark.slow
def test_a_copied_optimizer_knows_what_ran_and_is_another_from_then_on(way):
    model = compiled()
    fit(model, budget(N))
    how = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda o: pickle.loads(pickle.dumps(o))}[way]
    copied = c.classifier()
    copied.compile(how(model.optimizer), loss=model.loss)
    assert copied.optimizer.ledger == model.optimizer.ledger
    watched = budget(N)
    fit(model, watched), fit(copied, watched)
    assert watched.report().epsilon == pytest.approx(uses(3)) and watched.ledger.steps == 30


@pytest.mark.slow
def test_a_state_that_is_loaded_in_mid_run_is_said_and_takes_nothing_back():
    model, watched = compiled(), budget(N)
    fit(model, watched)
    early = np.asarray(model.optimizer._dp_ledger)
    fit(model, watched)
    model.optimizer._dp_ledger.assign(early)
    assert watched.report().epsilon == pytest.approx(uses(2))
    with pytest.warns(UserWarning, match="knows of 10 steps less"):
        fit(model, watched)
    assert watched.report().epsilon == pytest.approx(uses(3)) and "stay counted" in str(watched.report())


@pytest.mark.slow
def test_a_run_of_many_restarts_folds_into_few_rows_and_loses_no_step():
    restarts, table = 3 * _step_table.ROWS, None
    for _ in range(restarts):
        steps = Steps()
        if table is not None:
            steps.saved.assign(table)
        steps.counter.write_back(steps.saved)
        steps.announce(1, passes=1, sampling=2)
        steps.counter.count(steps.counter.drawn(tf.zeros([])), tf.constant(1.0, tf.float64), steps.saved)
        table = steps.saved.numpy()
    assert steps.ledger.steps == restarts and steps.ledger.unknown_steps == 0
    assert steps.ledger.report(DELTA, "rdp").participations == restarts
    assert (table[:, _step_table.STEPS] > 0).sum() < _step_table.ROWS // 2 + 2


# -- weights that come from elsewhere ----------------------------------------------------------------------------


@pytest.mark.slow
def test_weights_that_something_else_changed_are_said():
    model, watched = compiled(), budget(N)
    fit(model, watched)
    model.set_weights(c.weights(3))
    with pytest.warns(UserWarning, match="not those that private steps left"):
        fit(model, watched)
    assert "something else changed them" in str(watched.report())


@pytest.mark.slow
def test_a_training_without_privacy_between_two_private_ones_is_said():
    model, watched, private = compiled(), budget(N), lambda: tfdpfl.DPSGD(1.0, Z)
    for optimizer in (private(), "sgd", private()):
        model.compile(optimizer, loss=model.loss)
        if optimizer == "sgd":
            fit(model)
            continue
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            fit(model, watched)
    assert any("training with another optimizer" in str(w.message) for w in said)


@pytest.mark.slow
def test_weights_that_early_stopping_goes_back_to_are_known(recwarn):
    model, watched = compiled(), budget(N)
    stops = keras.callbacks.EarlyStopping(monitor="loss", mode="max", patience=1, restore_best_weights=True)
    for _ in range(2):
        fit(model, watched, stops, epochs=4)
    assert not [w for w in recwarn if "something else changed" in str(w.message)]


@pytest.mark.slow
def test_weights_that_another_optimizer_left_are_said(tmp_path):
    """Keras 2's h5 brings weights without their ledger."""
    model = compiled()
    fit(model, budget(N))
    model.save_weights(tmp_path / "some.weights.h5")
    other, watched = c.classifier(seed=2), budget(N)
    other.load_weights(tmp_path / "some.weights.h5")
    other.compile(tfdpfl.DPSGD(1.0, Z), loss=model.loss)
    with pytest.warns(UserWarning, match="those that 10 private steps on another model left"):
        fit(other, watched)
    known = budget(N, ledger=model.optimizer.ledger)
    fit(other, known)
    assert known.report().epsilon == pytest.approx(uses(3))


@pytest.mark.slow
def test_single_weights_that_another_model_left_are_said_and_ones_own_are_not(recwarn):
    """Of a model that is trained on two data sets, the steps on the other data set are left out on purpose."""
    model, other = compiled(), c.classifier(seed=2)
    for name in ("north", "south", "north"):
        fit(model, budget(N, dataset_name=name))
    assert not [w for w in recwarn if "another model" in str(w.message)]
    other.layers[-1].set_weights(model.layers[-1].get_weights())
    other.compile(tfdpfl.DPSGD(1.0, Z), loss=model.loss)
    with pytest.warns(UserWarning, match="Some weights are those that 30 private steps on another model left"):
        fit(other, budget(N))


def test_a_file_without_a_ledger_is_said(tmp_path):
    plain = c.compiled(keras.optimizers.SGD(0.1, momentum=0.9))
    plain.fit(X, Y, verbose=0)
    plain.save(tmp_path / "plain.keras")
    with __import__("zipfile").ZipFile(tmp_path / "plain.keras") as archive:
        archive.extract("model.weights.h5", tmp_path)
    model = compiled(momentum=0.9)
    model.optimizer.build(model.trainable_variables)
    before = copy.deepcopy(model.optimizer.ledger)
    if KERAS3:
        with pytest.warns(UserWarning, match="no ledger of a DP optimizer"):
            model.load_weights(tmp_path / "model.weights.h5")
    assert model.optimizer.ledger == before


# -- data sets ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_steps_on_a_data_set_of_another_name_are_not_in_this_ones_epsilon():
    model, first, second = compiled(), budget(N, dataset_name="north"), budget(N, dataset_name="south")
    fit(model, first, epochs=3)
    fit(model, second)
    assert second.report().epsilon == pytest.approx(uses(1)) and first.report().epsilon == pytest.approx(uses(3))
    all_of_it = budget(N, ledger=model.optimizer.ledger)
    assert all_of_it.report().epsilon == pytest.approx(uses(4))
    with pytest.raises(ValueError, match="other data sets than dataset_name='east'"):
        budget(N, dataset_name="east", ledger=first.ledger)
    everyone(model, 2)  # on which data is not known: they count for both
    assert second.report().epsilon == pytest.approx(uses(3)) and first.report().epsilon == pytest.approx(uses(5))


@pytest.mark.slow
def test_an_expected_batch_size_far_from_the_batches_is_said():
    model, watched = compiled(expected_batch_size=40.0), budget(N)
    with pytest.warns(UserWarning, match=r"expected_batch_size=40, but batches hold 20 .* 0.5 times"):
        fit(model, watched)
    assert "expected_batch_size=40" in str(watched.report())


@pytest.mark.slow
def test_a_seed_and_the_generator_are_in_the_statement():
    model, watched = compiled(seed=7), budget(N)
    fit(model, watched)
    assert "seed=7: anyone who knows it can subtract the noise" in str(watched.report())
    assert model.optimizer._dp.source.generator in str(watched.report())


# -- kills -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trainings_that_are_killed_and_resumed_count_every_step_and_repeat_no_noise():
    """The short form of the benchmark: 1,000 of them take half an hour. Correlated noise goes on as one mechanism.
    `BackupAndRestore` is in test_accumulator.py, and a whole model's file in test_correlated_noise.py."""
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "kills.py"
    run = [sys.executable, str(script), "--kills", "2", "--ways", "loop,banded"]
    done = subprocess.run(run, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("\n") == 4 and "BROKEN" not in done.stdout


def test_the_bytes_that_mark_a_table_are_in_tables_of_every_version():
    for version in (1, 2, 999):
        table = _step_table.empty_table()
        table[-1, 0] += 1 - version
        assert _step_table.mark_of_any_version() in table.tobytes() and _step_table.is_table(table)
    assert _step_table.mark_of_any_version() not in np.zeros([64, 9]).tobytes()
