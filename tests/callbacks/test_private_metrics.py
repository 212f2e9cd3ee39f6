"""Tests of `callbacks.PrivateMetrics`: what is shown has noise and a price, and what Keras measures is hidden."""

import functools
import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
from scipy.stats import chi2

import tfdpfl
from tfdpfl.accounting import Run, price
from tfdpfl.callbacks import PrivacyBudget, PrivateMetrics
from tfdpfl.data import bound_owners, poisson_batches
from tfdpfl.errors import PrivacyError

N, DELTA = 120, 1e-4
X, Y = np.random.default_rng(0).normal(size=(N, 4)).astype("float32"), np.arange(N) % 3


def compiled(**kwargs):
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    optimizer = tfdpfl.DPSGD(1.0, 2.0, learning_rate=0.1, **kwargs)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"])
    return model


class Spy(tf.keras.callbacks.Callback):
    """Keeps the names of all logs that it sees, by hook."""

    def __init__(self):
        super().__init__()
        self.seen = {}
        for hook in ("train_batch_end", "test_batch_end", "test_end", "epoch_end", "train_end"):
            setattr(self, f"on_{hook}", functools.partial(self._see, hook))

    def _see(self, hook, *args, logs=None):
        given = logs or next((given for given in args if isinstance(given, dict)), ())
        self.seen.setdefault(hook, set()).update(given)


class Fixed:
    """A model that predicts its inputs, on the data of `metrics`."""

    loss = "sparse_categorical_crossentropy"

    def __call__(self, x, training=None):
        return x


def begun(metrics, model):
    metrics._batches, metrics._weights, metrics._units = metrics._to_evaluate({})
    metrics.set_model(model)
    metrics._event, metrics._values = metrics.event(metrics._units), metrics._values_of
    metrics._releases.counts[metrics._event] = 0
    return metrics


@pytest.mark.slow
def test_a_fit_shows_noisy_figures_alone_and_the_ledger_holds_them(tmp_path, capsys):
    metrics, budget, spy = PrivateMetrics(noise_std=0.05), PrivacyBudget(delta=DELTA, target_epsilon=30.0), Spy()
    model = compiled(expected_batch_size=30)
    stop = tf.keras.callbacks.EarlyStopping("loss", patience=9)
    log = model.fit(
        poisson_batches((X, Y), expected_batch_size=30, steps=4), epochs=2, validation_data=(X[:9], Y[:9]),
        callbacks=[metrics, budget, stop, spy, tf.keras.callbacks.CSVLogger(tmp_path / "log.csv")],
    )  # fmt: skip
    assert set(log.history) == spy.seen.pop("epoch_end") == {"loss", "accuracy", "epsilon"}
    assert spy.seen.pop("train_end") <= {"epsilon"}
    assert set(spy.seen) == {"train_batch_end", "test_batch_end", "test_end"} and not any(spy.seen.values())
    assert "val_" not in capsys.readouterr().out
    columns, *rows = (line.split(",") for line in (tmp_path / "log.csv").read_text().split())
    blank = {column for i, column in enumerate(columns) if all(row[i] == "NA" for row in rows)}
    assert set(columns) - blank == {"accuracy", "epoch", "epsilon", "loss"}
    step = dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(2.0))
    release = dp_accounting.GaussianDpEvent(0.05 * N / math.sqrt(2))
    whole = dp_accounting.ComposedDpEvent(
        [dp_accounting.SelfComposedDpEvent(step, 8), dp_accounting.SelfComposedDpEvent(release, 2)]
    )
    assert log.history["epsilon"][-1] == budget.report().epsilon == pytest.approx(price(whole, DELTA).epsilon, rel=1e-9)
    # The first epoch's ε has the release that was still to come: the target had to leave room for it.
    early = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(step, 4), *[release] * 2])
    assert log.history["epsilon"][0] == pytest.approx(price(early, DELTA).epsilon, rel=1e-9)
    loss, accuracy = model.evaluate(X, Y, verbose=0)  # which is the user's own look at the data
    assert abs(log.history["accuracy"][-1] - accuracy) < 0.25 and abs(log.history["loss"][-1] - loss) < 1.25


@pytest.mark.slow
def test_validation_on_private_data_costs_its_own_ledger_and_public_figures_may_stay():
    ours = PrivateMetrics((X[:60], Y[:60]), validation=True, noise_std=0.1, every=2, keep=["val_loss"])
    model, spy = compiled(), Spy()
    log = model.fit(X[60:], Y[60:], batch_size=20, epochs=3, validation_data=(X[:9], Y[:9]), verbose=0,
                    callbacks=[ours, budget := PrivacyBudget(delta=DELTA), spy])  # fmt: skip
    assert "of the validation data, which are of other people" in str(budget.report()) and budget.ledger.steps == 9
    assert "PrivateMetrics of the validation data, 1 release, noise" in str(ours.ledger.report(DELTA))
    assert set(log.history) - {"epsilon"} == {"val_loss", "val_accuracy"}
    assert set(log.history) == spy.seen["epoch_end"]
    assert spy.seen["test_end"] == {"loss"} and not spy.seen["train_batch_end"]
    assert len(log.history["val_accuracy"]) == 2 and len(set(log.history["val_accuracy"])) == 1  # released once
    assert ours.ledger.steps == 1 and ours.ledger.epsilon(DELTA) == price(ours.event(60), DELTA).epsilon
    with pytest.raises(PrivacyError, match="EarlyStopping comes before PrivateMetrics"):
        model.fit(X, Y, callbacks=[tf.keras.callbacks.EarlyStopping("loss"), PrivateMetrics()], verbose=0)
    with pytest.raises(PrivacyError, match="depends on the other examples"):
        coupled = lambda y, p: tf.nn.softmax(tf.reduce_sum(p, 1))
        model.fit(X, Y, callbacks=[PrivateMetrics(metrics={"coupled": coupled})], verbose=0)
    with pytest.raises(PrivacyError, match="PrivateMetrics cannot evaluate"):
        model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(9), callbacks=[PrivateMetrics()], verbose=0)


@pytest.mark.slow
def test_the_noise_in_each_metric_has_the_deviation_that_was_asked_for():
    x = np.tile([[0.9, 0.1], [0.1, 0.9]], (30, 1)).astype("float32")
    metrics = begun(PrivateMetrics((x, np.zeros(60, int)), noise_std=0.02, loss_bound=4.0), Fixed())
    metrics._batches = [(tf.constant(x), tf.zeros(60, tf.int64))]
    shown = np.array([list(metrics._release().values()) for _ in range(500)])
    assert metrics.ledger.steps == 500 and not metrics.ledger.seeded
    exact = np.array([(-math.log(0.9) - math.log(0.1)) / 2, 0.5])
    scale = np.array([4 * 0.02, 0.02])
    assert (np.abs(shown.mean(0) - exact) < 6 * scale / math.sqrt(500)).all()
    z = ((shown - exact) / scale) ** 2
    for wrong, accepted in ((1.0, True), (2 / 3, False), (1.5, False)):
        statistic = z.sum(0) / wrong**2
        p = 2 * np.minimum(chi2.cdf(statistic, 500), chi2.sf(statistic, 500))
        assert (p > 1e-8).all() if accepted else (p < 1e-8).all()


def test_an_example_moves_the_sums_by_no_more_than_the_event_says():
    worst = [[0.0, 1.0], [1.0, 0.0], [np.nan, 1.0], [1e30, -1e30], [-5.0, 3.0], [0.5, 0.5]]
    x, y = np.array(worst, "float32"), np.array([0, 0, 1, 1, 0, 1])
    metrics = begun(PrivateMetrics((x, y), noise_std=0.1), Fixed())
    values = metrics._values_of(tf.constant(x), tf.constant(y)).numpy()
    assert ((values >= 0) & (values <= 1)).all()  # so that it is √2 at most, for two metrics
    assert metrics.event(6).noise_multiplier == pytest.approx(0.1 * 6 / math.sqrt(2))
    differences = np.linalg.norm(values[:, None] - values[None], axis=-1)
    assert max(differences.max(), np.linalg.norm(values, axis=1).max()) <= math.sqrt(2)


@pytest.mark.parametrize("bound", [False, True])
def test_a_user_counts_once_however_many_examples_are_theirs(bound):
    users = bound_owners([0, 0, 0, 1, 2, 2, (1, 2)]) if bound else np.array([0, 0, 0, 1, 2, 2])
    x = np.array([[1.0, 0], [1, 0], [0, 1], [1, 0], [0, 1], [0, 1], [1, 0]], "float32")[: 6 + bound]
    metrics = begun(
        PrivateMetrics((x, np.zeros(len(x), int)), metrics=["accuracy"], user_ids=users, noise_std=1e-6), Fixed()
    )
    assert metrics.event(3).noise_multiplier == pytest.approx(3e-6) and metrics._units == 3
    assert metrics._release()["accuracy"] == pytest.approx((2 / 3 + 1 + 0) / 3, abs=1e-4)


def test_accuracy_to_three_thousandths_costs_less_than_one_percent_of_the_noise():
    n, epochs, sigma = 60_000, 10, 0.792  # the noise of about ε = 2 at δ = 1e-5
    release = PrivateMetrics(noise_std=0.003).event(n)
    assert release.noise_multiplier == pytest.approx(127.3, abs=0.1)
    run = lambda z: Run(num_examples=n, batch_size=256, noise_multiplier=z, num_epochs=epochs).dp_event
    alone = price(run(sigma), 1e-5).epsilon
    assert alone == pytest.approx(2, abs=0.1)
    shown = lambda z: dp_accounting.ComposedDpEvent([run(z), dp_accounting.SelfComposedDpEvent(release, epochs)])
    assert price(shown(1.01 * sigma), 1e-5).epsilon < alone < price(shown(sigma), 1e-5).epsilon


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"metrics": ["auc"]}, "only 'loss' and 'accuracy' are known by name"),
        ({"metrics": []}, "nothing would be shown"),
        ({"noise_std": 0}, "noise_std"),
        ({"validation": True}, "validation=True needs the validation data"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrivateMetrics(**arguments)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_releases_of_a_fit_that_no_budget_watched_are_in_the_epsilon_of_one_that_saw_the_model():
    model, metrics = compiled(expected_batch_size=40), PrivateMetrics(noise_std=0.1)
    earlier, later = PrivacyBudget(delta=DELTA), PrivacyBudget(delta=DELTA)
    batches = poisson_batches((X, Y), expected_batch_size=40, steps=2)
    for callbacks in ([earlier], [metrics], [later]):
        model.fit(batches, callbacks=callbacks, verbose=0)
    for budget in (earlier, later):
        assert budget.ledger.steps == 3 * 2 + 1
    model.fit(batches, callbacks=[metrics, later], verbose=0)
    assert later.ledger.steps == 4 * 2 + 2


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_known_seed_of_the_noise_is_in_the_reports():
    metrics, budget = PrivateMetrics(noise_std=0.1, seed=0), PrivacyBudget(delta=DELTA)
    assert not metrics.ledger.seeded  # nothing was released
    batches = poisson_batches((X, Y), expected_batch_size=40, steps=1)
    compiled(expected_batch_size=40).fit(batches, callbacks=[metrics, budget], verbose=0)
    for report in (metrics.ledger.report(DELTA), budget.report()):
        assert "The noise of PrivateMetrics comes from a seed" in str(report.notes)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_rows_that_the_optimizer_protects_together_do_not_count_by_themselves():
    model = compiled(rows_per_unit=4)
    with pytest.raises(PrivacyError, match="rows_per_unit=4 the optimizer protects 4 rows together"):
        model.fit(X, Y, batch_size=40, shuffle=False, callbacks=[PrivateMetrics()], verbose=0)
    metrics = PrivateMetrics(user_ids=np.arange(N) // 4)
    model.fit(X, Y, batch_size=40, shuffle=False, callbacks=[metrics, PrivacyBudget(delta=DELTA)], verbose=0)
    assert metrics.ledger.epsilon(DELTA) == pytest.approx(
        price(dp_accounting.GaussianDpEvent(0.01 * N / 4 / math.sqrt(2)), DELTA).epsilon
    )


def test_a_split_by_keras_is_named():
    with pytest.raises(PrivacyError, match=r"validation_split=0\.2 lets Keras split"):
        compiled().fit(X, Y, validation_split=0.2, callbacks=[PrivateMetrics()], verbose=0)


@pytest.mark.parametrize(
    "given",
    [
        lambda: (X, Y),
        lambda: (X[:9], Y[:9]),
        lambda: (X[[5, 3, 70]].astype("float64"), Y[[5, 3, 70]]),
        lambda: tf.data.Dataset.from_tensor_slices((X, Y)).take(9),
    ],
    ids=["same", "view", "chosen", "dataset"],
)
@pytest.mark.parametrize("drawn", [False, True], ids=["arrays", "poisson"])
def test_training_data_are_no_validation_data(given, drawn):
    data = {"x": poisson_batches((X, Y), expected_batch_size=40, steps=1)} if drawn else {"x": X, "y": Y}
    with pytest.raises(PrivacyError, match="validation=True is for data of other people"):
        compiled(expected_batch_size=40).fit(**data, callbacks=[PrivateMetrics(given(), validation=True)], verbose=0)


def test_validation_data_of_which_one_example_is_trained_on_are_taken_for_other_peoples():
    others = PrivateMetrics((np.concatenate([X[:9], X[:1] + 1]), Y[:10]), validation=True)
    others.set_model(compiled())
    for data in ({"x": X}, {"x": poisson_batches((X, Y), expected_batch_size=40, steps=1)}):
        assert others._to_evaluate(data)[-1] == 10


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_target_holds_for_arrays_with_the_releases_to_come():
    metrics, budget = PrivateMetrics(noise_std=0.05), PrivacyBudget(delta=DELTA, target_epsilon=6.0)
    log = compiled().fit(X, Y, batch_size=40, epochs=9, callbacks=[metrics, budget], verbose=0)

    def epsilon(epochs):
        step, release = (dp_accounting.GaussianDpEvent(z) for z in (2.0, 0.05 * N / math.sqrt(2)))
        events = [dp_accounting.SelfComposedDpEvent(event, epochs) for event in (step, release)]
        return price(dp_accounting.ComposedDpEvent(events), DELTA, adjacency="zero_out").epsilon

    ran = len(log.history["epsilon"])
    assert budget.report().adjacency == "zero_out" and 1 < ran < 9
    assert budget.report().epsilon == pytest.approx(epsilon(ran), rel=1e-9) and epsilon(ran) <= 6.0


@pytest.mark.slow
@pytest.mark.both_stacks
def test_metrics_of_single_examples_do_not_add_up_with_steps_of_users():
    metrics = PrivateMetrics((X, Y))
    model = compiled(expected_batch_size=40)
    budget = PrivacyBudget(delta=DELTA)
    model.fit(poisson_batches((X, Y), expected_batch_size=40, steps=1), callbacks=[metrics, budget], verbose=0)
    assert metrics.ledger.unit == "example" == budget.ledger.unit
    users = tfdpfl.PrivacyLedger().record(1.0, num_examples=10, batch_size=2, unit="user")
    with pytest.raises(PrivacyError, match="PrivateMetrics without user_ids"):
        users.merge(metrics.ledger).epsilon(DELTA)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda y, p: tf.fill(tf.shape(y), tf.reduce_min(tf.cast(tf.argmax(p, -1) == y, tf.float32))),
            "on the other examples",
        ),
        (lambda y, p: tf.reduce_mean(tf.cast(tf.argmax(p, -1) == y, tf.float32)), "a number for each example"),
    ],
)
def test_a_metric_of_a_whole_batch_is_refused_whatever_the_model_predicts(function, message):
    model = compiled()
    model.set_weights([np.zeros((4, 3)), np.array([0.0, 0.0, 1.0])])
    with pytest.raises(PrivacyError, match=message):
        model.fit(X, Y, callbacks=[PrivateMetrics(metrics={"right": function})], verbose=0)
    assert not int(model.optimizer.iterations)


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_fit_that_was_refused_releases_nothing_more():
    batches, metrics = poisson_batches((X, Y), expected_batch_size=40, steps=2), PrivateMetrics(noise_std=0.1)
    model, budget = compiled(expected_batch_size=40), PrivacyBudget(delta=DELTA, target_epsilon=3.0)
    model.fit(batches, epochs=1, callbacks=[metrics, budget], verbose=0)
    spent = budget.report().epsilon
    with pytest.raises(PrivacyError, match="leaves no room"):
        model.fit(batches, epochs=99, callbacks=[metrics, budget], verbose=0)
    assert budget.report().epsilon == spent <= 3.0
