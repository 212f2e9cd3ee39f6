"""`tfdpfl.plan`: its figures are the accountant's, it trains to its target, its pieces go together or not at all."""

import copy
import math

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.accounting import monte_carlo
from tfdpfl.accounting.correlated import CorrelatedRun
from tfdpfl.callbacks import PrivacyBudget
from tfdpfl.data import declared_sampling, poisson_batches
from tfdpfl.errors import PrivacyError

N, DELTA = 200, 1e-4
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 4)).astype("float32"), RNG.integers(0, 3, N)
FOUR = dict(target_epsilon=2.0, batch_size=20, num_epochs=2)


def plan(x=X, y=Y, **changes):
    return tfdpfl.plan(x, y, **{**FOUR, "delta": DELTA, "accountant": "rdp", **changes})


def model_with(optimizer):
    model = tf.keras.Sequential([tf.keras.layers.Dense(3)])  # not built: as tutorials write it
    model.compile(optimizer, tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def gaussian_ledger():
    return tfdpfl.PrivacyLedger().add(dp_accounting.GaussianDpEvent(9.0))


def spent(sigma, batch, steps):
    return tfdpfl.compute_epsilon(
        num_examples=N, batch_size=batch, noise_multiplier=sigma, num_steps=steps, delta=DELTA, accountant="rdp"
    )


@pytest.mark.slow
def test_the_plans_own_optimizer_goes_with_batches_that_are_cut():
    made = plan(physical_batch_size=5)
    fit = {"x": made.batches, "callbacks": [made.callback]}
    optimizer = made.optimizer("sgd")
    assert optimizer._dp.parts == declared_sampling(made.batches).physical_batches == 4
    made.check(optimizer, fit)
    with pytest.raises(PrivacyError, match=r"gradient_accumulation_steps=4, and the plan has 1"):
        whole = plan(noise_multiplier=made.noise_multiplier, target_epsilon=None)
        whole.check(optimizer, {"x": whole.batches, "callbacks": [whole.callback]})


@pytest.mark.slow
def test_five_lines_train_to_the_target_and_say_so():
    made = plan()
    model = model_with(made.optimizer("adam", learning_rate=1e-2))
    log = model.fit(made.batches, epochs=made.epochs, callbacks=[made.callback], verbose=0)
    assert model.optimizer.num_dp_steps == made.epochs * made.steps_per_epoch == 20
    assert log.history["epsilon"][-1] == pytest.approx(made.epsilon) == spent(made.noise_multiplier, 20, 20)
    assert 0.99 * 2.0 < made.callback.report().epsilon <= 2.0
    assert "epsilon = 2 at delta = 0.0001" in made.statement() and ", 20 steps" in made.statement()
    optimizer = model.optimizer
    assert (optimizer.l2_norm_clip, optimizer.expected_batch_size) == (1.0, 20)
    assert float(optimizer.learning_rate) == pytest.approx(1e-2)
    with pytest.raises(PrivacyError, match="no room for another"):  # the target is spent
        model.fit(made.batches, callbacks=[made.callback], verbose=0)


@pytest.mark.parametrize(
    ("changes", "sampling"),
    [
        ({}, "random_allocation"),
        ({"batch_size": 110}, "poisson"),  # of which an epoch has one batch, so that examples miss epochs
        ({"steps_per_epoch": 5}, "poisson"),
        ({"secure_noise": True}, "poisson"),
    ],
)
def test_the_best_sampling_is_random_allocation_where_it_costs_no_more(changes, sampling):
    given = {"target_epsilon": None, "noise_multiplier": 2.0, "accountant": "pld", **changes}
    best, poisson = plan(sampling="best", **given), plan(**given)
    assert best.sampling == sampling == declared_sampling(best.batches).kind
    if sampling == "poisson":
        assert best.target_epsilon == poisson.target_epsilon
    else:
        assert best.target_epsilon == plan(sampling=sampling, **given).target_epsilon < poisson.target_epsilon


@pytest.mark.parametrize("metrics", [None, ["accuracy"]])
def test_the_report_of_a_plan_says_what_a_user_is_that_shares_examples(metrics):
    users = tfdpfl.data.bound_owners([{i, i - i % 4} for i in range(N)])
    made = plan(user_ids=users, examples_per_user=1, noise_multiplier=9.0, target_epsilon=None, metrics=metrics)
    assert "so ε protects each owner" in made.report().statement()


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("sampling", ["shuffle", pytest.param("poisson", marks=pytest.mark.slow)])
def test_a_plan_prices_an_owner_of_several_examples(sampling, shown):
    metrics = tfdpfl.callbacks.PrivateMetrics(metrics=["accuracy"], noise_std=0.1) if shown else None
    how = dict(sampling=sampling, target_epsilon=4.0, metrics=metrics)
    one, made = plan(**how), plan(max_examples_per_user=3, **how)
    assert made.noise_multiplier > 1.5 * one.noise_multiplier
    assert 0.99 * 4.0 < made.epsilon <= 4.0 and made.report().max_examples_per_user == 3
    length = {"num_epochs": 2} if sampling == "shuffle" else {"num_steps": 20}
    priced = tfdpfl.compute_epsilon(
        num_examples=N, batch_size=20, noise_multiplier=made.noise_multiplier, delta=DELTA, accountant="rdp",
        sampling=sampling, max_examples_per_user=3, **length,
    )  # fmt: skip
    assert made.epsilon > priced if shown else made.epsilon == priced
    assert "No user may have more than 3 examples" in made.statement()
    assert made.callback.max_examples_per_user == 3


@pytest.mark.slow
def test_the_best_sampling_for_owners_is_one_that_has_a_price():
    made = plan(sampling="best", noise_multiplier=9.0, target_epsilon=None, max_examples_per_user=3)
    assert made.sampling == "poisson"


@pytest.mark.parametrize("changes", [{"batch_size": None, "num_epochs": 40}, {"num_epochs": None}])
def test_a_plan_for_owners_finds_what_is_missing(changes):
    made = plan(noise_multiplier=9.0, max_examples_per_user=3, **changes)
    run = dict(num_examples=N, noise_multiplier=9.0, delta=DELTA, accountant="rdp", max_examples_per_user=3)
    if "batch_size" in changes:
        more = dict(batch_size=made.batch_size + 1, num_steps=40 * (N // (made.batch_size + 1)))
    else:
        more = dict(batch_size=20, num_steps=(made.epochs + 1) * 10)
    assert made.epsilon <= 2.0 < tfdpfl.compute_epsilon(**run, **more)


def test_what_owners_spent_before_is_priced_for_owners():
    before = tfdpfl.PrivacyLedger().add(dp_accounting.GaussianDpEvent(9.0), adjacency="zero_out")
    one, made = (plan(ledger=before, max_examples_per_user=k, sampling="shuffle") for k in (1, 3))
    assert one.noise_multiplier < made.noise_multiplier and made.epsilon <= 2.0
    with pytest.raises(PrivacyError, match="nothing is left"):
        plan(ledger=before, max_examples_per_user=9, target_epsilon=before.epsilon(DELTA, "rdp", 9))
    with pytest.raises(PrivacyError, match="LaplaceDpEvent"):
        plan(ledger=tfdpfl.PrivacyLedger().add(dp_accounting.LaplaceDpEvent(1.0)), max_examples_per_user=3)


@pytest.mark.slow
def test_any_three_give_the_fourth():
    sigma = plan().noise_multiplier
    assert spent(sigma, 20, 20) <= 2.0 < spent(0.998 * sigma, 20, 20)
    three = dict(target_epsilon=None, noise_multiplier=sigma)
    assert plan(**three).target_epsilon == spent(sigma, 20, 20)
    longest = plan(num_epochs=None, noise_multiplier=1.5)
    assert spent(1.5, 20, longest.epochs * 10) <= 2.0 < spent(1.5, 20, (longest.epochs + 1) * 10)
    for length, steps in (({}, lambda size: 2 * (N // size)), ({"steps_per_epoch": 7}, lambda size: 14)):
        size = plan(batch_size=None, noise_multiplier=1.5, **length).batch_size
        assert spent(1.5, size, steps(size)) <= 2.0 < spent(1.5, size + 1, steps(size + 1)) and 1 < size < N
    assert plan(batch_size=None, noise_multiplier=50.0).batch_size == N


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_epochs": None}, "Give three of .*; noise_multiplier, num_epochs are missing"),
        ({"noise_multiplier": 1.0}, "all four are given: leave one out"),
        ({"num_epochs": 2.5}, "num_epochs must be a whole number of at least 1, got 2.5"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": N + 1}, "batch_size must be at most num_examples=200"),
        ({"target_epsilon": -1.0}, "target_epsilon must be .* above 0"),
        ({"delta": 2}, "delta must be strictly between 0 and 1"),
        ({"l2_norm_clip": 0.0}, "l2_norm_clip must be .* above 0"),
        ({"sampling": "weighted"}, "sampling='weighted' has no plan"),
        ({"sampling": "b_min_sep"}, "needs min_separation, which is also the number of bands"),
        ({"sampling": "b_min_sep", "min_separation": 2, "secure_noise": True}, "a step has one kind of noise"),
        (
            {"sampling": "b_min_sep", "min_separation": 2, "batch_size": None, "noise_multiplier": 1.0},
            "is a simulation",
        ),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be"),
        ({"num_epochs": None, "noise_multiplier": 1.5, "steps_per_epoch": 999}, "allows .* steps, and"),
        ({"batch_size": None, "noise_multiplier": 0.1}, "less than batches of one example cost"),
        ({"y": Y[1:]}, "same first dimension"),
        ({"max_examples_per_user": 0}, "max_examples_per_user must be a whole number of at least 1, got 0"),
        (
            {"max_examples_per_user": 2, "user_ids": np.arange(N), "examples_per_user": 1},
            "max_examples_per_user=2 is for examples that are clipped one by one",
        ),
        ({"max_examples_per_user": 2, "sampling": "random_allocation"}, "no known ε for max_examples_per_user=2"),
        (
            {"max_examples_per_user": 2, "sampling": "b_min_sep", "min_separation": 2},
            "no known ε for max_examples_per_user=2",
        ),
        ({"max_examples_per_user": 2, "secure_noise": True}, "no ε is known for discrete noise"),
        ({"y": np.array(["a", "b", "c"])[Y]}, r"y holds words, .*classes.index\(label\) for label in y"),
    ],
)
def test_a_plan_that_cannot_be_made_is_refused_in_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_an_argument_by_another_name_is_named_by_ours():
    for wrong, ours in (("epsilon", "target_epsilon"), ("max_grad_norm", "l2_norm_clip"), ("users", "user_ids")):
        with pytest.raises(TypeError, match=rf"plan\(\) got an unexpected keyword argument '{wrong}': .*{ours}\?"):
            plan(**{wrong: 1})
    for wrong, ours in (("number_of_examples", "num_examples"), ("sigma", "noise_multiplier"), ("zzz", "help")):
        with pytest.raises(TypeError, match=rf"privacy_statement\(\) got an unexpected .*'{wrong}': .*{ours}"):
            tfdpfl.privacy_statement(**{wrong: 1})


def test_what_the_plan_decides_is_not_given_to_its_optimizer():
    made = plan()
    for wrong in ({"noise_multiplier": 0.1}, {"l2_norm_clip": 9.0}, {"expected_batch_size": 5}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* is decided by the plan"):
            made.optimizer("sgd", **wrong)
    with pytest.raises(ValueError, match="must be a name or a class"):
        made.optimizer(tf.keras.optimizers.SGD(0.1))
    for kind in ("sgd", tf.keras.optimizers.SGD, tfdpfl.DPSGD):
        assert type(made.optimizer(kind, learning_rate=0.1)) is tfdpfl.DPSGD


@pytest.fixture(scope="module")
def plans():
    return plan(), plan(num_epochs=3)


@pytest.mark.parametrize(
    ("optimizer", "data", "callback", "message"),
    [
        (0, 0, 1, "the batches of another plan|the plan's callback is not"),
        (0, 1, 0, "the batches of another plan"),
        (1, 0, 0, "the batches of another plan|noise_multiplier="),
        (0, 0, None, "callback is not among"),
        (0, "budget", None, "callback is not among"),
        (0, "arrays", 0, "fit was given an object of type ndarray, not the batches"),
        (0, "drawn", 0, "fit was given an object of type .*, not the batches"),
        (0, "mapped", 0, "fit was given an object of type .*, not the batches"),
        ("own", 0, 0, "optimizer has noise_multiplier=.*another plan"),
        ("own", 0, None, "callback is not among"),
        ("clip", 0, 0, "optimizer has l2_norm_clip=5.0, and the plan has 1.0"),
    ],
)
def test_a_piece_with_what_is_not_its_plans_is_refused_before_the_first_update(
    plans, optimizer, data, callback, message
):
    own = {
        "own": lambda: tfdpfl.DPSGD(1.0, 0.1, expected_batch_size=20),
        "clip": lambda: tfdpfl.DPSGD(5.0, plans[0].noise_multiplier, expected_batch_size=20),
    }
    model = model_with(own[optimizer]() if optimizer in own else plans[optimizer].optimizer("sgd"))
    model.build((None, 4))
    budgets = [] if callback is None else [plans[callback].callback]
    if data == "budget" or (optimizer == "own" and callback is None):
        budgets = [PrivacyBudget(delta=DELTA, accountant="rdp")]
    given = {
        "arrays": lambda: (X, Y),
        "drawn": lambda: (poisson_batches((X, Y), expected_batch_size=20, steps=2),),
        "mapped": lambda: (plans[0].batches.map(lambda x, y: (x, y)),),
    }
    given = given[data]() if data in given else (plans[data if data in (0, 1) else 0].batches,)
    before = model.get_weights()
    with pytest.raises(PrivacyError, match=f"(?i){message}"):
        model.fit(*given, callbacks=budgets, verbose=0)
    for a, b in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_a_second_fit_with_another_plans_pieces_is_refused_though_nothing_is_traced_anew(plans):
    one, other = plan(), plan()  # the same settings
    model = model_with(one.optimizer("sgd"))
    model.fit(one.batches, callbacks=[one.callback], verbose=0)
    for a, b in ((other, other), (other, one), (one, other)):
        with pytest.raises(PrivacyError, match=r"another plan|callback is not"):
            model.fit(a.batches, callbacks=[b.callback], verbose=0)
    assert model.optimizer.num_dp_steps == 10


@pytest.mark.slow
def test_a_loaded_model_goes_on_within_the_target(tmp_path):
    made = plan()
    model = model_with(made.optimizer("sgd"))
    model.fit(made.batches, callbacks=[made.callback], verbose=0)
    model.save(tmp_path / "model.keras")
    again = plan()  # in a new process all is made anew
    loaded = tf.keras.models.load_model(tmp_path / "model.keras")
    log = loaded.fit(again.batches, epochs=5, callbacks=[again.callback], verbose=0)
    assert again.callback.report().steps == 20 and log.history["epsilon"][-1] <= 2.0
    assert math.isclose(again.callback.report().epsilon, again.epsilon)


@pytest.mark.slow
def test_a_copy_of_a_plans_callback_is_the_plans():
    made = plan()
    for _ in range(2):
        model = model_with(made.optimizer("sgd"))
        model.fit(made.batches, callbacks=[copy.deepcopy(made.callback)], verbose=0)
    assert made.callback.report().steps == 20 and made.callback.report().epsilon == pytest.approx(made.epsilon)
    with pytest.raises(PrivacyError, match="no room for another"):
        model_with(made.optimizer("sgd")).fit(made.batches, callbacks=[copy.deepcopy(made.callback)], verbose=0)


@pytest.mark.slow
def test_a_plan_of_secure_noise_ends_where_it_was_planned_to():
    made = plan(secure_noise=True)
    settings = dict(num_examples=N, batch_size=20, num_steps=20, delta=DELTA)
    assert made.noise_multiplier == tfdpfl.compute_noise_multiplier(target_epsilon=2.0, secure_noise=True, **settings)
    model = model_with(made.optimizer("sgd", secure_noise=True))
    model.fit(made.batches, epochs=made.epochs, callbacks=[made.callback], verbose=0)
    assert model.optimizer.secure_noise and model.optimizer.num_dp_steps == 20
    assert made.callback.report().epsilon == pytest.approx(made.epsilon) and 1.98 < made.epsilon <= 2.0
    with pytest.raises(ValueError, match="secure_noise=True is decided by the plan"):
        plan().optimizer("sgd", secure_noise=True)
    with pytest.raises(PrivacyError, match="optimizer has secure_noise=False, and the plan has True"):
        model_with(tfdpfl.DPSGD(1.0, made.noise_multiplier, expected_batch_size=20)).fit(
            made.batches, callbacks=[made.callback], verbose=0
        )


@pytest.mark.slow
def test_a_plan_of_random_allocation_with_private_metrics_ends_where_it_was_planned_to():
    metrics = tfdpfl.callbacks.PrivateMetrics(noise_std=0.2)
    made = plan(sampling="random_allocation", num_selected=2, num_epochs=2, metrics=metrics)
    assert made.steps_per_epoch == 2 * -(-N // 20) and 1.99 < made.epsilon <= 2.0
    alone = plan(sampling="random_allocation", num_selected=2, num_epochs=2)
    assert alone.noise_multiplier < made.noise_multiplier and alone.callbacks == [alone.callback]
    model = model_with(made.optimizer("sgd"))
    log = model.fit(made.batches, epochs=made.epochs, callbacks=made.callbacks, verbose=0)
    assert set(log.history) == {"loss", "accuracy", "epsilon"} and len(log.history["loss"]) == 2
    assert made.callback.report().epsilon == pytest.approx(made.epsilon) and metrics.ledger.steps == 2
    with pytest.raises(ValueError, match="num_epochs cannot be computed together with metrics"):
        plan(num_epochs=None, noise_multiplier=1.0, metrics=["loss"])


@pytest.mark.slow
def test_a_plan_takes_what_a_ledger_leaves_of_the_target():
    """Against dp-accounting's own composition of both events."""
    ledger, spent_before = tfdpfl.PrivacyLedger(), dp_accounting.GaussianDpEvent(4.0)
    made = plan(ledger=ledger.add(spent_before))
    both = dp_accounting.rdp.RdpAccountant()
    step = dp_accounting.PoissonSampledDpEvent(20 / N, dp_accounting.GaussianDpEvent(made.noise_multiplier))
    both.compose(spent_before).compose(step, 20)
    assert 1.98 < both.get_epsilon(DELTA) <= 2.0 and both.get_epsilon(DELTA) == pytest.approx(made.epsilon, 1e-3)
    assert made.noise_multiplier > 1.05 * plan().noise_multiplier
    assert "Gaussian, 1 release, noise multiplier 4, adjacency" in made.statement()
    assert "sampling: poisson" in made.statement()
    budget = made.callback
    assert budget.ledger.epsilon(DELTA, "rdp") == ledger.epsilon(DELTA, "rdp") > 0
    given = plan(ledger=ledger, target_epsilon=None, noise_multiplier=made.noise_multiplier)
    assert given.target_epsilon == pytest.approx(made.epsilon) == given.callback.target_epsilon
    with pytest.raises(ValueError, match="batch_size cannot be computed together with metrics or a ledger"):
        plan(ledger=ledger, batch_size=None, noise_multiplier=1.0)
    with pytest.raises(PrivacyError, match=r"The ledger has spent ε = 0\.\d+ of target_epsilon=0\.5: nothing is left"):
        plan(ledger=ledger, target_epsilon=0.5)
    with pytest.raises(PrivacyError, match="for different neighbours"):
        plan(ledger=ledger, sampling="shuffle")
    with pytest.raises(ValueError, match=r"ledger=0\.5 must be a PrivacyLedger"):
        plan(ledger=0.5)


@pytest.mark.slow
def test_examples_that_rest_have_banded_noise_and_train_to_the_target(monkeypatch):
    monkeypatch.setattr(monte_carlo, "RUNS", 1 << 15)
    how = dict(sampling="b_min_sep", min_separation=4, delta=0.02, accountant="pld")
    monte_carlo.simulated.cache_clear()
    made = plan(user_ids=np.arange(N) // 2, examples_per_user=1, batch_size=10, ledger=gaussian_ledger(), **how)
    assert 1 < monte_carlo.simulated.cache_info().misses <= 4  # each price takes minutes
    assert (made.epochs, made.steps_per_epoch) == (1, 20)
    assert made.noise == tfdpfl.noise.Banded(bands=4, min_separation=4, max_participations=1, num_steps=20)
    model = model_with(made.optimizer("sgd"))
    model.fit(made.batches, epochs=made.epochs, callbacks=made.callbacks, verbose=0)
    assert made.callback.report().epsilon == pytest.approx(made.epsilon)
    assert 0.97 * 2.0 < made.epsilon <= 2.0
    ledger = gaussian_ledger().count_correlated((), CorrelatedRun(
        noise=made.noise, noise_multiplier=made.noise_multiplier, num_steps=20, min_separation=4, unit="user",
        sampling_rate=10 / (100 - 3 * 10), sampling="b_min_sep",
    ))  # fmt: skip
    assert made.epsilon == pytest.approx(ledger.epsilon(0.02)) and "one user rests for 3 steps" in made.statement()
    with pytest.raises(PrivacyError, match=r"no room for another .*compute_correlated_noise_multiplier finds"):
        model.fit(made.batches, callbacks=[made.callback], verbose=0)
    other = plan(batch_size=10, noise_multiplier=made.noise_multiplier, target_epsilon=None)
    with pytest.raises(PrivacyError, match=r"has noise=Banded\(.*, and the plan has None"):
        other.check(model.optimizer, {"x": other.batches, "callbacks": [other.callback]})
    again = tfdpfl.noise.compute_correlated_noise_multiplier(
        made.noise, target_epsilon=2.0, delta=0.02, num_steps=20, sampling_rate=10 / 70, sampling="b_min_sep"
    )
    assert again == pytest.approx(plan(num_epochs=2, batch_size=10, **how, x=X[:100], y=Y[:100]).noise_multiplier)
