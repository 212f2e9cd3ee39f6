"""The recipes of examples/flower_recipes.py do what their names say, also beneath a private strategy."""

import importlib
import logging
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
import flwr.simulation
from flower_fakes import FakeGrid
from flwr.app import Context, RecordDict

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def recipes(monkeypatch):
    logging.getLogger("flwr").setLevel(logging.ERROR)
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("flower_recipes")


def run(recipes, name, rounds, clients=60, sent=None, **changes):
    """Returns the last model, the strategy, and what each client keeps."""
    strategy, app = recipes.strategy_of(name, **changes), recipes.client_of(name)
    nodes = [Context(1, 101 + i, {"partition-id": i}, RecordDict(), {}) for i in range(clients)]

    def answer(message, number):
        if sent is not None:
            sent.append(message.content)
        return app(message, nodes[number])

    result = strategy.start(FakeGrid(clients, answer), recipes.record_of(recipes.beginning(name)), num_rounds=rounds)
    kept = [{k: recipes.arrays(r) for k, r in node.state.array_records.items()} for node in nodes]
    return recipes.arrays(result.arrays), strategy, kept


def close(a, b, **how):
    assert a.keys() == b.keys()
    for key, value in a.items():
        np.testing.assert_allclose(value, b[key], **how)


def loss(w, x, y):
    scores = x @ w["kernel"] + w["bias"]
    return float(np.mean(np.log(np.exp(scores).sum(1)) - scores[np.arange(len(y)), y]))


def test_fedprox_descends_the_loss_and_its_proximal_term(recipes, monkeypatch):
    x, y = recipes.of_client(3)
    start = {k: 0.01 * np.random.default_rng(1).normal(size=v.shape) for k, v in recipes.linear().items()}
    w, mu = start, 0.7
    for _ in range(2):  # by differences: the gradient of the term is 0 in the first step

        def objective(w):
            return loss(w, x, y) + mu / 2 * sum(np.sum((w[k] - start[k]) ** 2) for k in w)

        new = {}
        for k, value in w.items():
            new[k] = value.copy()
            for at in list(np.ndindex(value.shape))[::23]:
                up, down = ({**w, k: value.copy()} for _ in range(2))
                up[k][at] += 1e-5
                down[k][at] -= 1e-5
                new[k][at] -= recipes.RATE * (objective(up) - objective(down)) / 2e-5
        monkeypatch.setattr(recipes, "STEPS", 1 if w is start else 2)
        found = recipes.fedprox(start, {"proximal-mu": mu}, {}, x, y)
        for k in w:
            np.testing.assert_allclose(found[k].reshape(-1)[::23], new[k].reshape(-1)[::23], atol=1e-9)
        w = found


@pytest.mark.slow
def test_scaffold_leaves_no_drift_and_the_server_has_the_mean_of_the_control_variates(recipes, monkeypatch):
    monkeypatch.setattr(recipes, "SAMPLING", 1.0)
    free = dict(noise_multiplier=0.0, l2_norm_clip=1e3, sampling_rate=1.0)
    w, _, kept = run(recipes, "scaffold", 6, **free)
    scale = recipes.STEPS * recipes.RATE
    for key in recipes.linear():
        mean = np.mean([one["control"][key] for one in kept], axis=0)
        np.testing.assert_allclose(w[f"control/{key}"] / scale, mean, atol=1e-9)
    # FedProx without its term is FedAvg, and so is SCAFFOLD without its correction.
    averaged = lambda sent, config, *more: recipes.fedprox(sent, {"proximal-mu": 0.0}, *more)
    monkeypatch.setitem(recipes.RECIPES, "fedprox", averaged)
    found = {"scaffold": w, "averaged": run(recipes, "fedprox", 6, **free)[0]}
    x, y = (np.concatenate(part) for part in zip(*map(recipes.of_client, range(60)), strict=True))
    losses = {name: loss(model, x, y) for name, model in found.items()}
    assert losses["scaffold"] < losses["averaged"] - 0.02, losses


def test_one_clip_bounds_the_model_and_the_control_variate_together(recipes):
    w, strategy, _ = run(recipes, "scaffold", 1, noise_multiplier=0.0, l2_norm_clip=0.25)
    moved = np.sqrt(sum(np.sum(value**2) for value in w.values()))  # from 0
    assert 0.02 < moved <= 0.25 * len(strategy.cohorts[0]) / (recipes.SAMPLING * 60) + 1e-9
    assert any(np.any(value) for key, value in w.items() if key.startswith("control/"))


def test_a_personal_layer_never_leaves_its_client(recipes):
    sent = []
    w, _, kept = run(recipes, "personal", 3, sent=sent, sampling_rate=1.0, noise_multiplier=0.0)
    assert {*w} == {"hidden"} and all({*content["arrays"]} == {"hidden"} for content in sent)
    assert all(np.any(one["head"]["kernel"]) for one in kept) and not np.allclose(
        kept[0]["head"]["kernel"], kept[1]["head"]["kernel"]
    )
    x, y = recipes.of_client(0)
    head = kept[0]["head"]
    mine = np.tanh(x @ w["hidden"]) @ head["kernel"] + head["bias"]
    assert np.mean(mine.argmax(1) == y) > 0.8


def test_a_private_regression_is_fitted_once_however_often_it_is_asked(recipes, monkeypatch):
    fits, real = [], recipes.DPLogisticRegression.fit
    monkeypatch.setattr(recipes.DPLogisticRegression, "fit", lambda self, *xy: fits.append(self) or real(self, *xy))
    w, _, kept = run(recipes, "dp-logistic", 2, clients=3)
    assert len(fits) == 3 and all(one.price(recipes.DELTA).epsilon <= recipes.EPSILON for one in fits)
    rows = [len(recipes.of_hospital(i)[1]) for i in range(3)]
    mean = {k: np.average([one["fitted"][k] for one in kept], axis=0, weights=rows) for k in recipes.linear()}
    close({k: w[k] for k in mean}, mean, atol=1e-6)
    assert recipes.accuracy(w) > 0.6


@pytest.mark.slow
def test_scikit_learn_goes_on_from_what_it_is_sent(recipes):
    w, _, _ = run(recipes, "sklearn", 1, noise_multiplier=0.0, l2_norm_clip=1e3, sampling_rate=1.0)
    x, y = recipes.of_client(5)
    assert len({*y}) < 10
    again = recipes.sklearn(w, {}, {}, x, y)
    assert 0 < np.abs(again["kernel"] - w["kernel"]).max() < 1 and recipes.accuracy(w) > 0.5


def test_a_recipe_runs_as_its_command_does(recipes, monkeypatch, capsys):
    def simulate(server, client, num_supernodes):
        nodes = [Context(1, 101 + i, {"partition-id": i}, RecordDict(), {}) for i in range(num_supernodes)]
        grid = FakeGrid(num_supernodes, lambda message, i: client(message, nodes[i]))
        server(grid, Context(1, 0, {}, RecordDict(), {}))

    monkeypatch.setattr(flwr.simulation, "run_simulation", simulate)
    monkeypatch.setattr(recipes, "ROUNDS", 4)
    recipes.main(["fedprox"])
    said = capsys.readouterr().out
    assert "4 rounds, sampling poisson, 30 clients a round" in said and "client level: epsilon = 4." in said
    # Ten classes. Noise and cohorts leave 60 % with a deviation of 8 %: below 20 % in one run of 10⁶.
    assert int(said.split("accuracy ")[1].split("%")[0]) > 20
