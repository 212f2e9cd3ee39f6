"""A random search costs what its event costs, draws as the theorem asks, and lets nothing but the best out."""

import dataclasses
import math

import numpy as np
import pytest
from dp_accounting import dp_event
from scipy import stats

import tfdpfl
from tfdpfl.accounting import PrivacyLedger, Run, price
from tfdpfl.errors import PrivacyError
from tfdpfl.tuning import HyperParameters, RandomSearch, Selected

RUN = Run(num_examples=1000, batch_size=50, noise_multiplier=2.0, num_steps=40)
ALLOCATED = dict(num_examples=100, batch_size=10, noise_multiplier=2.0, num_epochs=1, sampling="random_allocation")
SPACE = {"rate": [0.1, 0.2, 0.3], "momentum": stats.uniform(0, 1)}


def search(**changes):
    return RandomSearch(**{"space": SPACE, "spends": RUN, "mean_runs": 10, "seed": 0, **changes})


@pytest.mark.parametrize("shape", [0.0, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("mean", [1.0, 1.5, 10.0])
def test_the_number_of_runs_has_the_distribution_that_is_priced(shape, mean):
    one = search(mean_runs=mean, shape=shape)
    n = 4000
    numbers = np.array([one._number((i + 0.5) / n) for i in range(n)])  # its quantiles
    assert numbers.min() == 1 and numbers.mean() == pytest.approx(mean, rel=0.1 if shape == 0 else 0.02)
    if shape == 1 and mean > 1:
        assert (numbers == stats.geom.ppf((np.arange(n) + 0.5) / n, 1 / mean)).all()
    elif shape == 0 and mean > 1:
        chances = stats.logser.pmf(np.arange(1, 60), 1 - one._gamma())
        assert np.abs([(numbers == k + 1).mean() - p for k, p in enumerate(chances)]).max() <= 1 / n
    elif mean > 1:  # negative binomial, given that it is not 0
        law = stats.nbinom(shape, one._gamma())
        at = law.cdf(0) + (1 - law.cdf(0)) * (np.arange(n) + 0.5) / n
        assert (numbers == law.ppf(at)).mean() > 0.999
    assert len({search(seed=None).number_of_runs() for _ in range(40)}) > 3


def test_a_search_costs_the_theorems_price():
    alone = price(RUN.dp_event, 1e-5, "rdp").epsilon
    assert search(mean_runs=1).report(1e-5).epsilon == pytest.approx(alone, rel=0.01)
    costs = [search(mean_runs=mean).report(1e-5).epsilon for mean in (2, 10, 1000)]
    assert alone < costs[0] < costs[1] < costs[2] < 4 * alone  # hardly grows, where 1000 fixed runs would cost 1000 / δ
    assert search(shape=0).report(1e-5).epsilon < costs[1] < search(shape=5).report(1e-5).epsilon
    # The theorem itself, by hand, with the best order for ε hat; of finer orders than the accountant's.
    orders = np.arange(1.05, 300, 0.05)
    ran = Run(num_examples=10, batch_size=10, noise_multiplier=5.0, num_steps=1, sampling="none")
    rho, gamma = 1 / 50, 0.1
    steps = rho * orders
    hat = min(2 * (1 - 1 / a) * e + 2 * math.log(1 / gamma) / a for a, e in zip(orders, steps, strict=True))
    by_hand = steps + hat + math.log(10) / (orders - 1)
    want = min(by_hand + np.log1p(-1 / orders) - np.log(1e-5 * orders) / (orders - 1))
    assert want <= search(spends=ran).report(1e-5).epsilon <= 1.01 * want
    pure = search(spends=PrivacyLedger().add(dp_event.LaplaceDpEvent(1.0)), mean_runs=1e6, shape=0.5)
    assert pure.report(1e-6).epsilon == pytest.approx(2.5, rel=0.02)  # ε (2 + shape)


def test_the_best_run_is_kept_and_each_search_is_paid():
    seen = []

    def train(parameters):
        seen.append(parameters)
        return [math.nan, parameters["momentum"]][len(seen) > 1], len(seen), RUN.dp_event

    one = search(seed=next(s for s in range(99) if search()._number(search()._uniform(s)) == 6))
    best = one.run(train)
    scores = [p["momentum"] for p in seen[1:]]
    assert len(seen) == 6 and best == Selected(seen[1:][np.argmax(scores)], max(scores), 2 + int(np.argmax(scores)))
    assert {p["rate"] for p in seen} <= {0.1, 0.2, 0.3} and len(set(scores)) == len(scores)
    first = one.report(1e-5)
    assert "does not cover their number" in first.statement() and one.ledger.steps == 1
    assert "The number of runs comes from seed=" in first.statement()
    assert "comes from seed" not in search(seed=None).report(1e-5).statement()
    assert one.run(train, maximize=False).score == min(p["momentum"] for p in seen[len(scores) + 1 :])
    assert one.report(1e-5).epsilon > first.epsilon and one.ledger.steps == 2


class HyperModel:
    """As keras-tuner's users write it."""

    def build(self, hp):
        asked = [hp.Float("rate", 1e-4, 1e-1, sampling="log"), hp.Int("units", 8, 11), hp.Choice("kind", ["a", "b"])]
        if asked[-1] == "a":
            return [*asked, hp.Boolean("bias"), hp.Fixed("depth", 3), None, hp.Int("units", 8, 11)]
        return [*asked, None, None, hp.Float("momentum", 0, 1), hp.Int("units", 8, 11)]


def test_a_model_that_asks_for_its_hyperparameters_is_searched():
    built = []

    def train(hp):
        built.append(HyperModel().build(hp))
        return hp.values["rate"], len(built), RUN.dp_event

    best = search(space=None, mean_runs=300, shape=5).run(train)
    for _, units, kind, bias, depth, momentum, again in built:
        assert units == again and (bias is None) == (depth is None) == (momentum is not None) == (kind == "b")
    rates = np.array([row[0] for row in built])
    assert best.score == max(rates) == best.parameters["rate"] and best.result == 1 + np.argmax(rates)
    assert set(best.parameters) >= {"rate", "units", "kind"} and len(set(rates)) == len(rates)
    assert stats.kstest(rates, stats.loguniform(1e-4, 1e-1).cdf).pvalue > 1e-6
    assert {row[1] for row in built} == {8, 9, 10, 11} and {row[2] for row in built} == {"a", "b"}
    assert {row[3] for row in built} == {True, False, None}


@pytest.mark.parametrize("ask, among", [
    (lambda hp: hp.Int("n", 6, 13, step=3), [6, 9, 12]),
    (lambda hp: hp.Int("n", 2, 32, step=2, sampling="log"), [2, 4, 8, 16, 32]),
    (lambda hp: hp.Int("n", 1, 4, sampling="log"), [1, 2, 3, 4]),
    (lambda hp: hp.Float("n", 0, 1, step=0.2), [0, 0.2, 0.4, 0.6, 0.8, 1]),
    (lambda hp: hp.Float("n", 0.001, 10, step=10, sampling="log"), [0.001, 0.01, 0.1, 1, 10]),
    (lambda hp: hp.Float("n", 1, 9, step=2, sampling="reverse_log"), [9, 8, 6, 2]),
], ids=lambda v: str(v) if isinstance(v, list) else "")  # fmt: skip
def test_steps_are_those_of_keras_tuner(ask, among):
    """The examples of its documentation; both ends are among them."""
    got = sorted({round(ask(HyperParameters(seed)), 9) for seed in range(200)})
    assert got == sorted(among)


@pytest.mark.parametrize("ask", [
    lambda hp: hp.Float("n", 2, 1), lambda hp: hp.Float("n", 0, 1, sampling="log"), lambda hp: hp.Choice("n", []),
    lambda hp: hp.Int("n", 1, 2, step=0), lambda hp: hp.Int("n", 1, 2, step=1, sampling="log"),
    lambda hp: hp.Int("n", 1, 2, sampling="lin"),
])  # fmt: skip
def test_ranges_without_numbers_are_refused_by_name(ask):
    with pytest.raises(ValueError, match="'n'"):
        ask(HyperParameters(0))


def test_a_run_that_spends_more_than_was_said_ends_the_search():
    spends = lambda **how: Run(**{**dict(num_examples=1000, batch_size=50, noise_multiplier=2.0, num_steps=40), **how})
    search().run(lambda p: (0.0, None, spends(num_steps=39)))  # stopped early
    for more in (dict(num_steps=41), dict(noise_multiplier=1.9), dict(batch_size=51), dict(adjacency="zero_out")):
        one = search()
        with pytest.raises(PrivacyError, match=r"All runs must cost the same"):
            one.run(lambda p, more=more: (0.0, None, spends(**more)))
        assert one.ledger.steps == 1  # it is paid nevertheless


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_runs": 10}, "num_runs=10: the best of a fixed number of runs may cost as many times"),
        ({"mean_runs": None}, "Give mean_runs"),
        ({"mean_runs": 0.5}, "mean_runs must be .* at least 1"),
        ({"shape": -1}, "shape must be"),
        ({"space": []}, "space=.* must be a dict"),
        ({"spends": 3.0}, "The cost of a run must be a plan"),
        ({"spends": dataclasses.replace(RUN, max_examples_per_user=3)}, "has no ε in a search.*Poisson batches"),
        ({"spends": Run(**ALLOCATED)}, "spends=Run.* has no ε in a search: the best of several runs is priced in"),
    ],
)
def test_a_search_without_a_price_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        search(**changes)


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("kept", ["model", "weights"])
def test_every_epsilon_of_the_best_model_includes_the_search(kept):
    import tensorflow as tf

    x, y, delta = np.random.default_rng(0).normal(size=(40, 4)), np.arange(40) % 2, 1e-3
    runs = []

    def train(parameters):
        model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])
        model.compile(tfdpfl.DPSGD(1.0, 2.0, learning_rate=parameters["rate"]), loss="mse")
        budget = tfdpfl.callbacks.PrivacyBudget(delta=delta, accountant="rdp")
        model.fit(x, y, batch_size=40, callbacks=[budget], verbose=0)
        runs.append(budget)
        return len(runs), {"model": model} if kept == "model" else model.get_weights(), budget

    spends = Run(num_examples=40, batch_size=40, noise_multiplier=2.0, num_epochs=1, sampling="shuffle")
    of_three = lambda seed: search(spends=spends, mean_runs=3, seed=seed)
    one = next(each for each in map(of_three, range(99)) if each._number(each._uniform(each._seed)) == 3)
    best, whole = one.run(train), one.report(delta).epsilon
    first, second, budget = runs
    assert first.report().epsilon == second.report().epsilon < whole <= budget.report().epsilon
    if kept == "weights":
        return
    later = tfdpfl.callbacks.PrivacyBudget(delta=delta, accountant="rdp")
    best.result["model"].fit(x, y, batch_size=40, callbacks=[later], verbose=0)
    assert later.report().epsilon > budget.report().epsilon - 1e-9 and "RandomSearch" in later.report().statement()
    with pytest.raises(PrivacyError, match="leaves no room"):
        stopped = tfdpfl.callbacks.PrivacyBudget(delta=delta, target_epsilon=whole, accountant="rdp")
        best.result["model"].fit(x, y, batch_size=40, callbacks=[stopped], verbose=0)
