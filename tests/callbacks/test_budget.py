"""PrivacyBudget prices what ran, and stops in time."""

import contextlib
import copy
import gc
import json
import math
import pickle
import warnings

import numpy as np
import pytest
import tensorflow as tf
from budget_cases import (
    DELTA,
    KERAS_2,
    N,
    PrivacyBudget,
    Thrice,
    X,
    Y,
    compiled,
    own_batches,
    price,
    uses,
)

import tfdpfl
from tfdpfl import callbacks
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.data import poisson_batches
from tfdpfl.errors import PrivacyError


@pytest.mark.slow
@pytest.mark.both_stacks
def test_poisson_batches_are_priced_by_the_steps_that_ran():
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(poisson_batches((X, Y), expected_batch_size=20, steps=7), epochs=2, callbacks=[budget], verbose=0)
    want = [price(batch_size=20, noise_multiplier=2.0, num_steps=k) for k in (7, 14)]
    assert log.history["epsilon"] == pytest.approx(want)
    assert budget.report().sampling == "poisson" and budget.report().steps == 14
    assert budget.epsilon() == log.history["epsilon"][-1]
    assert budget.epsilon(1e-3) == pytest.approx(price(batch_size=20, noise_multiplier=2.0, num_steps=14, delta=1e-3))


@pytest.mark.slow
def test_shuffled_arrays_are_priced_by_passes_without_amplification():
    model, budget = compiled(), PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(X, Y, batch_size=30, epochs=3, callbacks=[budget], verbose=0)  # 7 steps, the last one partial
    want = [price(batch_size=30, noise_multiplier=2.0, num_epochs=k, sampling="shuffle") for k in (1, 2, 3)]
    assert log.history["epsilon"] == pytest.approx(want)
    assert budget.report().adjacency == "zero_out"
    with pytest.warns(UserWarning, match="The loss is NaN. Look for missing values first"):
        model.fit(np.where(X > 2, np.nan, X), Y, batch_size=30, callbacks=[budget], verbose=0)
    # An independent truth: k uses of one example at noise σ are one at σ / sqrt(k); its δ(ε) has a closed form.
    from scipy.stats import norm

    epsilon, mu = log.history["epsilon"][-1], math.sqrt(3) / 2.0
    exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert exact <= DELTA * 1.001


def test_the_default_accountant_is_the_tight_one():
    model, budget = compiled(), callbacks.PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    tight = price(batch_size=20, noise_multiplier=2.0, num_epochs=1, sampling="shuffle", accountant="pld")
    assert log.history["epsilon"] == pytest.approx([tight])
    assert tight < price(batch_size=20, noise_multiplier=2.0, num_epochs=1, sampling="shuffle")


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_training_stops_before_the_step_that_would_pass_the_target(steps_per_execution):
    target = price(batch_size=20, noise_multiplier=2.0, num_steps=10)
    model = compiled(expected_batch_size=20, steps_per_execution=steps_per_execution)
    budget = PrivacyBudget(num_examples=N, delta=DELTA, target_epsilon=target * 1.0001)
    batches = poisson_batches((X, Y), expected_batch_size=20, steps=8)
    log = model.fit(batches, epochs=5, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 10 // steps_per_execution * steps_per_execution
    assert log.history["epsilon"][-1] <= target * 1.0001
    weights = model.get_weights()
    with pytest.raises(PrivacyError, match=r"target_epsilon=.*no room"):
        model.fit(batches, epochs=1, callbacks=[PrivacyBudget(N, DELTA, target)], verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])


@pytest.mark.slow
@pytest.mark.parametrize("steps", [None, 10])
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_a_target_that_no_training_reaches_stops_none(accountant, steps):
    model, rng = compiled(z=1e4, expected_batch_size=20.0), np.random.default_rng(0)
    data = tf.data.Dataset.from_generator(
        lambda: ((X[drawn], Y[drawn]) for drawn in rng.random((10, N)) < 0.1),
        output_signature=(tf.TensorSpec((None, 4)), tf.TensorSpec((None,), tf.int64)),
    )
    budget = PrivacyBudget(N, DELTA, 1e3, sampling="poisson", batch_size=20, accountant=accountant)
    log = model.fit(data, epochs=2, steps_per_epoch=steps and steps // 2, callbacks=[budget], verbose=0)
    assert len(log.history["epsilon"]) == 2
    assert model.optimizer.num_dp_steps == (steps or 20)


def test_shuffled_training_stops_before_the_epoch_that_would_pass_the_target():
    target = price(batch_size=20, noise_multiplier=2.0, num_epochs=2, sampling="shuffle")
    model = compiled()
    budget = PrivacyBudget(num_examples=N, delta=DELTA, target_epsilon=target * 1.0001)
    log = model.fit(X, Y, batch_size=20, epochs=5, callbacks=[budget], verbose=0)
    assert len(log.history["epsilon"]) == 2
    assert log.history["epsilon"][-1] <= target * 1.0001


@pytest.mark.slow
def test_a_step_of_which_nothing_is_known_says_that_users_have_no_epsilon():
    model, budget = compiled(expected_batch_size=10, rows_per_unit=2), PrivacyBudget(delta=DELTA)
    users = poisson_batches(
        (X, Y), expected_batch_size=10, steps=2, user_ids=np.arange(N) // 2, examples_per_user=2)  # fmt: skip
    model.fit(users, callbacks=[budget], verbose=0)
    assert budget.report().unit == "user"
    model.train_on_batch(X[:20], Y[:20])
    with pytest.raises(
        PrivacyError, match="1 steps ran of which only the noise is known, and the others protect users"
    ):
        budget.report()


@pytest.mark.slow
@pytest.mark.parametrize("hidden", [False, True])
def test_examples_without_a_finite_gradient_are_said_where_the_loss_hides_them(hidden, recwarn):
    """A relu makes 0 of NaN, so the loss is finite. A statement says nothing, because it is published."""
    layers = [tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential([tf.keras.Input((4,)), *layers])
    model.compile(tfdpfl.DPSGD(1.0, 2.0, learning_rate=0.1), loss="mse")
    callbacks = [tfdpfl.callbacks.PrivateMetrics(noise_std=0.1)] if hidden else []
    budget = PrivacyBudget(delta=DELTA)
    x = np.where(np.arange(N)[:, None] < 7, np.nan, X)
    log = model.fit(x, Y, batch_size=20, epochs=2, callbacks=[*callbacks, budget], verbose=0)
    assert np.isfinite(log.history["loss"]).all() and model.optimizer.num_nonfinite == 14
    said = [str(w.message) for w in recwarn if "not finite" in str(w.message)]
    assert [text.split(".")[0] for text in said] == ([] if hidden else ["The gradients of 7 examples were not finite"])
    assert "not finite" not in str(budget.report())


def test_a_statement_says_why_the_noise_of_microbatches_counts_as_half():
    budget, model = PrivacyBudget(delta=DELTA), compiled(num_microbatches=5)
    model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    assert "num_microbatches=5 clips mean gradients of groups" in str(budget.report())
    assert "noise_multiplier=2.0 counts as half" in str(budget.report()) and budget.report().noise_multiplier == 1.0


@pytest.mark.slow
def test_a_last_batch_that_is_nearly_all_noise_is_said():
    model, budget = compiled(), PrivacyBudget(delta=DELTA)
    with pytest.warns(UserWarning, match=r"has 2 of the 200 examples.* 11 times the noise .*\(x\[:198\]\)"):
        model.fit(X, Y, batch_size=22, callbacks=[budget], verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.fit(X, Y, batch_size=24, callbacks=[budget], verbose=0)  # 8 are left


def test_a_target_that_is_spent_says_by_what():
    budget = PrivacyBudget(delta=DELTA, target_epsilon=uses(1) * 1.0001)
    compiled().fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    with pytest.raises(PrivacyError, match="room for another epoch: 10 steps that this PrivacyBudget counts have cost"):
        compiled().fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)


@pytest.mark.slow
def test_steps_of_a_training_before_count():
    model = compiled(expected_batch_size=20)
    batches = poisson_batches((X, Y), expected_batch_size=20, steps=5)
    model.fit(batches, callbacks=[PrivacyBudget(delta=DELTA)], verbose=0)
    log = model.fit(batches, callbacks=[PrivacyBudget(delta=DELTA)], verbose=0)
    assert log.history["epsilon"][-1] == pytest.approx(price(batch_size=20, noise_multiplier=2.0, num_steps=10))


@pytest.mark.parametrize("poisson", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_steps_that_no_fit_took_count_as_steps_of_every_example(poisson):
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(delta=DELTA)
    batches = poisson_batches((X, Y), expected_batch_size=20, steps=3)
    fit = lambda: model.fit(*((batches,) if poisson else (X, Y)), batch_size=None if poisson else 20,
                            callbacks=[budget], verbose=0)  # fmt: skip
    fit()
    seen = budget.report().epsilon
    for _ in range(4):
        model.train_on_batch(X, Y)
    after = budget.report().epsilon
    assert after > max(seen, uses(4))
    assert after <= uses(5) * 1.0001
    assert "A batch that is drawn with replacement may hold an example several times" in str(budget.report())
    fit()
    assert budget.report().steps == (10 if poisson else 24)
    assert budget.report().epsilon > after


@pytest.mark.slow
def test_epsilon_never_falls_when_the_sampling_or_the_optimizer_changes():
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(delta=DELTA)
    found = []
    model.fit(X, Y, batch_size=N, epochs=10, callbacks=[budget], verbose=0)
    found.append(budget.report().epsilon)
    model.fit(poisson_batches((X, Y), sampling_rate=0.01, steps=3), callbacks=[budget], verbose=0)
    found.append(budget.report().epsilon)
    model.compile(tfdpfl.DPSGD(1.0, 2.0, expected_batch_size=20), model.loss)
    model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    found.append(budget.report().epsilon)
    assert found[0] == pytest.approx(uses(10)) and found[0] < found[1] < found[2]
    assert found[2] >= uses(11)
    assert budget.ledger.steps == 10 + 3 + 10


@pytest.mark.slow
def test_a_ledger_tells_what_a_callback_before_saw(recwarn):
    model, first = compiled(), PrivacyBudget(delta=DELTA)
    model.fit(X, Y, batch_size=N, epochs=10, callbacks=[first], verbose=0)
    saved = PrivacyLedger.from_dict(json.loads(json.dumps(first.ledger.to_dict())))
    second = PrivacyBudget(delta=DELTA, ledger=saved)
    model.fit(X, Y, batch_size=20, callbacks=[second], verbose=0)
    assert second.report().epsilon == pytest.approx(uses(11))
    assert not [w for w in recwarn if "did not see" in str(w.message)]
    assert second.report().steps == 20
    stops = PrivacyBudget(delta=DELTA, target_epsilon=uses(13) * 1.0001, ledger=second.ledger)
    log = model.fit(X, Y, batch_size=20, epochs=9, callbacks=[stops], verbose=0)
    assert len(log.history["epsilon"]) == 2 and log.history["epsilon"][-1] == pytest.approx(uses(13))
    with pytest.raises(ValueError, match="PrivacyLedger"):
        PrivacyBudget(delta=DELTA, ledger=saved.to_dict())


def test_a_callback_that_saw_no_fit_knows_no_epsilon():
    budget = PrivacyBudget(N, DELTA)
    with pytest.raises(PrivacyError, match="saw no training"):
        budget.report()
    compiled().fit(X, Y, epochs=0, callbacks=[budget], verbose=0)
    assert budget.report().epsilon == 0


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("copied", [copy.copy, lambda budget: copy.deepcopy([budget])[0]])
def test_copies_of_a_budget_spend_one_target(copied):
    """As keras-tuner and scikit-learn's clone copy it, for each trial."""
    target = uses(2) * 1.0001
    budget, fitted = PrivacyBudget(N, DELTA, target), []
    for _ in range(3):
        model, trial = compiled(), copied(budget)
        with contextlib.suppress(PrivacyError):
            model.fit(X, Y, batch_size=100, callbacks=[trial], verbose=0)
        fitted.append(model.optimizer.num_dp_steps)
    assert fitted == [2, 2, 0]  # no room for a third pass
    assert (
        trial.report().epsilon == budget.report().epsilon == pytest.approx(uses(2))
        and budget.report().epsilon <= target
    )


def test_a_budget_is_not_taken_to_another_process_with_its_target():
    with pytest.raises(PrivacyError, match=r"target_epsilon=3\) cannot be pickled"):
        pickle.dumps(PrivacyBudget(N, DELTA, 3.0))
    budget = PrivacyBudget(N, DELTA, dataset_name="a")
    compiled().fit(X, Y, batch_size=100, callbacks=[budget], verbose=0)
    loaded = pickle.loads(pickle.dumps(budget))
    assert loaded.ledger == budget.ledger and loaded.report().epsilon == budget.report().epsilon


class Loads(tf.keras.callbacks.Callback):
    """As Keras's BackupAndRestore does."""

    def __init__(self, table):
        super().__init__()
        self.table = table

    def on_train_begin(self, logs=None):
        self.model.optimizer._dp_ledger.assign(self.table)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_state_that_a_later_callback_loads_is_a_past_like_any_other():
    first, budget = compiled(), PrivacyBudget(N, DELTA)
    first.fit(X, Y, batch_size=20, epochs=2, callbacks=[budget], verbose=0)
    loads = Loads(np.asarray(first.optimizer._dp_ledger))
    log = compiled().fit(X, Y, batch_size=20, callbacks=[PrivacyBudget(N, DELTA, uses(4)), loads], verbose=0)
    assert log.history["epsilon"] == pytest.approx([uses(3)])
    known = PrivacyBudget(N, DELTA, ledger=budget.ledger)
    log = compiled().fit(X, Y, batch_size=20, callbacks=[known, loads], verbose=0)
    assert log.history["epsilon"] == pytest.approx([uses(3)])
    with pytest.raises(PrivacyError, match="no room"):
        compiled().fit(X, Y, batch_size=20, callbacks=[PrivacyBudget(N, DELTA, uses(2)), loads], verbose=0)


@pytest.mark.slow
def test_one_device_of_a_strategy_is_like_none():
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = compiled()
    budget = PrivacyBudget(N, DELTA)
    model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    assert budget.report().steps == 10


@pytest.mark.slow
def test_a_training_that_the_target_ends_says_so(capsys):
    budget = PrivacyBudget(N, DELTA, uses(2) * 1.0001)
    compiled().fit(X, Y, batch_size=20, epochs=5, callbacks=[budget], verbose=2)
    assert "PrivacyBudget stops the training in epoch 2, before" in capsys.readouterr().out
    compiled().fit(X, Y, batch_size=20, epochs=2, callbacks=[PrivacyBudget(N, DELTA, uses(2) * 1.0001)], verbose=2)
    assert "stops" not in capsys.readouterr().out


class Tracks(Thrice):
    """As Keras's examples write a train_step of their own."""

    def __init__(self):
        super().__init__()
        self.tracker, self.other = tf.keras.metrics.Mean(name="loss"), tf.keras.metrics.SparseCategoricalAccuracy()

    @property
    def metrics(self):
        return [self.tracker]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            out = self(x, training=True)
            loss = tf.reduce_mean((out - tf.one_hot(y, 3)) ** 2)
        self.optimizer.minimize(loss, self.trainable_variables, **({"tape": tape} if KERAS_2 else {}))
        self.tracker.update_state(loss)
        self.other.update_state(y, out)
        return {"loss": self.tracker.result()}


@pytest.mark.slow
@pytest.mark.both_stacks
def test_metrics_that_a_model_keeps_are_shown_not_trained():
    model = Tracks()
    model.compile(tfdpfl.DPSGD(1.0, 2.0))
    log = model.fit(X, Y, batch_size=20, callbacks=[PrivacyBudget(delta=DELTA)], verbose=0)
    assert np.isfinite(log.history["epsilon"][-1]) and model.tracker.result() > 0


@pytest.mark.slow
def test_several_updates_on_one_batch_are_each_a_use_of_its_examples():
    model, budget = Thrice(), PrivacyBudget(delta=DELTA)
    model.compile(tfdpfl.DPSGD(1.0, 2.0))
    model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 30
    assert budget.report().epsilon >= uses(3)
    model.compile(tfdpfl.DPSGD(1.0, 2.0))
    with pytest.raises(PrivacyError, match=r"3 steps on 1 batches, so target_epsilon=.*one update on each batch"):
        model.fit(X, Y, batch_size=20, callbacks=[PrivacyBudget(N, DELTA, 100.0)], verbose=0)


@pytest.mark.slow
def test_steps_after_a_fit_count_when_the_model_is_gone():
    model, budget = compiled(), PrivacyBudget(delta=DELTA)
    model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    fitted = budget.report().epsilon
    for _ in range(3):
        model.train_on_batch(X, Y)
    del model
    compiled().fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    tf.keras.backend.clear_session()
    gc.collect()
    assert budget.ledger.steps == 10 + 3 + 10 and budget.report().epsilon > fitted


@pytest.mark.slow
def test_microbatches_cost_what_twice_the_sensitivity_costs():
    model, budget = compiled(num_microbatches=5), PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(X, Y, batch_size=20, epochs=1, callbacks=[budget], verbose=0)
    want = price(batch_size=20, noise_multiplier=1.0, num_epochs=1, sampling="shuffle")
    assert log.history["epsilon"][-1] == pytest.approx(want)


@pytest.mark.slow
def test_no_noise_is_an_infinite_epsilon():
    model = compiled(0.0)
    assert model.fit(X, Y, callbacks=[PrivacyBudget(N, DELTA)], verbose=0).history["epsilon"] == [math.inf]


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("poisson", [True, False])
def test_epsilon_target_and_report_are_those_of_an_owner_of_several_examples(poisson):
    how = {"batch_size": 20, "noise_multiplier": 4.0, "max_examples_per_user": 3}
    how |= {} if poisson else {"sampling": "shuffle"}
    length = "num_steps" if poisson else "num_epochs"
    model = compiled(4.0, expected_batch_size=20)
    target = 1.0001 * price(**how, **{length: 30 if poisson else 3})
    budget = PrivacyBudget(N, DELTA, target, max_examples_per_user=3)
    data = {"x": poisson_batches((X, Y), expected_batch_size=20, steps=10)} if poisson else {"x": X, "y": Y}
    log = model.fit(**data, epochs=9, batch_size=None if poisson else 20, callbacks=[budget], verbose=0)
    want = [price(**how, **{length: k}) for k in ((10, 20, 30) if poisson else (1, 2, 3))]
    assert log.history["epsilon"] == pytest.approx(want)
    asked = rf"have cost {want[-1]:.5g}\..*noise_multiplier\(..., sampling=.*, max_examples_per_user=3\) finds"
    with pytest.raises(PrivacyError, match=asked):
        model.fit(**data, batch_size=None if poisson else 20, callbacks=[budget], verbose=0)
    report = budget.report()
    assert report.epsilon == pytest.approx(want[-1]) and report.max_examples_per_user == 3
    [promise] = budget.promises(DELTA)
    assert promise.unit == "user of at most 3 examples" and promise.ledger is None
    of_one = PrivacyBudget(N, DELTA, ledger=budget.ledger).report()
    assert of_one.epsilon < want[-1] and of_one.max_examples_per_user == 1
    together = tfdpfl.audit.report({"owners": budget, "examples": of_one}, delta=DELTA)
    assert [total.unit for total in together.totals] == ["user of at most 3 examples", "example"]


def test_a_sampling_without_a_price_for_owners_is_refused_before_a_step():
    for batches in (
        tfdpfl.data.random_allocation((X, Y), expected_batch_size=20),
        poisson_batches((X, Y), expected_batch_size=20, steps=3, user_ids=np.arange(N) // 2, examples_per_user=2),
    ):
        users = {"rows_per_unit": 2} if tfdpfl.data.declared_sampling(batches).unit == "user" else {}
        model = compiled(expected_batch_size=20, **users)
        budget = PrivacyBudget(delta=DELTA, max_examples_per_user=3)
        with pytest.raises(ValueError, match="max_examples_per_user=3"):
            model.fit(batches, callbacks=[budget], verbose=0)
        assert model.optimizer.num_dp_steps == 0
    model = compiled(noise=tfdpfl.noise.Tree())
    with pytest.raises(PrivacyError, match=r"correlated noise .* has no known ε for max_examples_per_user=3"):
        model.fit(X, Y, callbacks=[PrivacyBudget(N, DELTA, max_examples_per_user=3)], verbose=0)
    assert model.optimizer.num_dp_steps == 0


def test_own_batches_of_an_owner_need_no_warning_of_owners():
    for k in (1, 3):
        budget = PrivacyBudget(N, DELTA, sampling="shuffle", batch_size=20, max_examples_per_user=k)
        compiled().fit(own_batches([20] * 10), callbacks=[budget], verbose=0)
        assert ("max_examples_per_user=k gives that of k rows" in budget.report().statement()) == (k == 1)
        assert pickle.loads(pickle.dumps(budget)).max_examples_per_user == k


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delta": None}, "delta"),
        ({"delta": 1.5}, "delta"),
        *[({"target_epsilon": v}, f"target_epsilon must be .* got {v!r}") for v in (-1, "1", True, np.inf, np.nan)],
        ({"sampling": "often"}, "sampling must be one of .*'often'"),
        *[({"accountant": v}, f"accountant must be one of .*{v!r}") for v in ("pldd", None)],
        *[
            ({"batch_size": v}, f"batch_size must be a whole number .* got {v!r}")
            for v in (0, -3, True, 20.5, "20", np.nan)
        ],
        ({"batch_size": N + 1}, f"batch_size={N + 1} is more than num_examples={N}"),
        *[({"max_examples_per_user": v}, "max_examples_per_user must be a whole number") for v in (0, "3", 1.5)],
        *[({"num_examples": v}, f"num_examples must be a whole number .* got {v!r}") for v in ("200", 0, np.nan, 2.5)],
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrivacyBudget(**{"num_examples": N, "delta": DELTA, **arguments})


@pytest.mark.parametrize("others", [lambda: [], lambda: [callbacks.AveragedWeights()]], ids=["alone", "averaged"])
def test_a_model_that_fit_builds_trains_with_its_budget(others):
    """Keras 2 knows no weights of it before its first step, but for those of layers that were built elsewhere."""
    shared = tf.keras.layers.Dense(4)
    shared.build([None, X.shape[1]])
    model, budget = tf.keras.Sequential([shared, tf.keras.layers.Dense(3)]), PrivacyBudget(N, DELTA)
    model.compile(tfdpfl.DPSGD(1.0, 2.0, learning_rate=0.1), tf.keras.losses.SparseCategoricalCrossentropy(True))
    model.fit(X, Y, batch_size=20, callbacks=[budget, *others()], verbose=0)
    assert budget.report().epsilon == pytest.approx(uses(1))


def test_an_epoch_ends_without_a_look_at_the_frames_of_fit(monkeypatch):
    """In Python 3.11 that look freed the iterator of the epoch before, and waited 20 ms for its threads."""
    looks = []
    monkeypatch.setattr("tfdpfl.callbacks.budget.running_models", lambda: looks.append(1) or [model])
    model = compiled()
    seen = tf.keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: looks.append(0))
    model.fit(X, Y, batch_size=100, epochs=3, callbacks=[PrivacyBudget(N, DELTA), seen], verbose=0)
    first, last = looks.index(0), len(looks) - looks[::-1].index(0)
    assert 1 in looks[:first] and looks[first:last] == [0, 0, 0]


def test_an_epoch_that_ends_counts_what_an_inner_fit_left_that_was_interrupted():
    class Interrupts(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    class Inner(tf.keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with contextlib.suppress(KeyboardInterrupt):
                other.fit(X, Y, batch_size=100, callbacks=[Interrupts(), copy.copy(budget)], verbose=0)

    model, other, budget = compiled(), compiled(), PrivacyBudget(N, DELTA)
    log = model.fit(X, Y, batch_size=100, callbacks=[Inner(), budget], verbose=0)
    assert budget.ledger.unknown_steps == 1
    assert log.history["epsilon"] == [budget.epsilon()]
