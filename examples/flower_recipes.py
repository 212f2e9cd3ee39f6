"""Runs what people ask for in a private federation: each recipe is one function that trains at a client.

    python examples/flower_recipes.py fedprox      # clients stay near the server's model
    python examples/flower_recipes.py scaffold     # control variates, in the same clip as the model
    python examples/flower_recipes.py personal     # the last layer stays with its client
    python examples/flower_recipes.py sklearn      # clients train by scikit-learn
    python examples/flower_recipes.py dp-logistic  # each hospital protects its own patients

The data are scikit-learn's digits. In all but the last recipe 60 clients hold two or three kinds of digits each, and
the server protects clients. In the last, 3 hospitals fit a private logistic regression each, and the server averages
them.
"""

from __future__ import annotations

import argparse
import functools
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # it is 15: on a busy machine clients would hardly run

import flwr.simulation
import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg, FedProx
from sklearn.datasets import load_digits
from sklearn.linear_model import SGDClassifier

from tfdpfl.convex import DPLogisticRegression
from tfdpfl.flower import DifferentialPrivacyFixedClipping

CLIENTS, HOSPITALS, TEST = 60, 3, 297
STEPS, RATE = 10, 0.5  # of a client's gradient descent
SAMPLING = 0.5  # each client takes part in a round with this probability
HIDDEN = 16
ROUNDS = 20
EPSILON, DELTA = 4.0, 1e-4  # of each patient of a hospital


@functools.cache
def digits():
    """Features between 0 and 1, whose bounds are public."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    return x[order] / 16, y[order]


def of_client(number: int):
    """Two runs of a list that is sorted by label."""
    x, y = (part[TEST:] for part in digits())
    runs = np.array_split(np.argsort(y, kind="stable"), 2 * CLIENTS)
    mine = np.concatenate([runs[number], runs[2 * CLIENTS - 1 - (7 * number) % CLIENTS]])
    return x[mine], y[mine]


def of_hospital(number: int):
    x, y = (part[TEST:] for part in digits())
    return x[number::HOSPITALS], y[number::HOSPITALS]


def residuals(w, x, y):
    """The gradient of the mean cross-entropy with respect to the scores."""
    scores = x @ w["kernel"] + w["bias"]
    p = np.exp(scores - scores.max(1, keepdims=True))
    return (p / p.sum(1, keepdims=True) - np.eye(10)[y]) / len(y)


def gradient(w, x, y):
    """The same with respect to the weights of a softmax regression."""
    r = residuals(w, x, y)
    return {"kernel": x.T @ r, "bias": r.sum(0)}


def linear():
    return {"kernel": np.zeros((64, 10)), "bias": np.zeros(10)}


# The recipes. Each takes the server's arrays, the round's config, what the client keeps, and its data.


def fedprox(sent, config, kept, x, y):
    """FedProx adds mu / 2 times the squared distance from the server's model to the loss."""
    w = sent
    for _ in range(STEPS):
        g = gradient(w, x, y)
        w = {k: w[k] - RATE * (g[k] + config["proximal-mu"] * (w[k] - sent[k])) for k in w}
    return w


def scaffold(sent, config, kept, x, y):
    """SCAFFOLD corrects each step by the difference of the server's and the client's mean gradient.

    The change of the client's control variate leaves the client with the change of the model, as arrays of one
    message. So one clip bounds both, and one noise protects both. The server's control variate travels times `scale`,
    because the clip is shared by their lengths.
    """
    scale = STEPS * RATE / SAMPLING
    own = kept.get("control", linear())
    control = {k: sent[f"control/{k}"] / scale for k in own}
    start = {k: sent[k] for k in own}
    w = start
    for _ in range(STEPS):
        g = gradient(w, x, y)
        w = {k: w[k] - RATE * (g[k] - own[k] + control[k]) for k in w}
    new = {k: own[k] - control[k] + (start[k] - w[k]) / (STEPS * RATE) for k in w}
    kept["control"] = new
    # The server divides by SAMPLING * CLIENTS, and SCAFFOLD by all clients.
    return {**w, **{f"control/{k}": sent[f"control/{k}"] + SAMPLING * scale * (new[k] - own[k]) for k in w}}


def personal(sent, config, kept, x, y):
    """The client trains all layers, and sends all but the last one. Nobody else ever sees that layer."""
    shared, head = sent["hidden"], kept.get("head", {"kernel": np.zeros((HIDDEN, 10)), "bias": np.zeros(10)})
    for _ in range(STEPS):
        features = np.tanh(x @ shared)
        g, r = gradient(head, features, y), residuals(head, features, y)
        shared = shared - RATE * x.T @ (r @ head["kernel"].T * (1 - features**2))
        head = {k: head[k] - RATE * g[k] for k in head}
    kept["head"] = head
    return {"hidden": shared}


def sklearn(sent, config, kept, x, y):
    """scikit-learn goes on from the server's coefficients. All clients name the same classes, also those they lack."""
    model = SGDClassifier(loss="log_loss", penalty=None, learning_rate="constant", eta0=0.05)
    model.partial_fit(x[:1], y[:1], classes=np.arange(10))  # makes the arrays
    model.coef_[:], model.intercept_[:] = sent["kernel"].T, sent["bias"]
    for _ in range(3):
        model.partial_fit(x, y)
    return {"kernel": model.coef_.T, "bias": model.intercept_}


def dp_logistic(sent, config, kept, x, y):
    """A fit costs its ε, so the hospital fits once, and sends the same coefficients if it is asked again."""
    if "fitted" not in kept:
        model = DPLogisticRegression(epsilon=EPSILON, delta=DELTA, data_norm=4.0, classes=np.arange(10)).fit(x, y)
        kept["fitted"] = {"kernel": model.coef_.T, "bias": model.intercept_}
    return kept["fitted"]


RECIPES = {f.__name__.replace("_", "-"): f for f in (fedprox, scaffold, personal, sklearn, dp_logistic)}


def beginning(name: str) -> dict[str, np.ndarray]:
    """The arrays that the server begins with."""
    if name == "personal":
        return {"hidden": np.random.default_rng(0).normal(size=(64, HIDDEN)) / 8}
    control = {f"control/{k}": v for k, v in linear().items()} if name == "scaffold" else {}
    return {**linear(), **control}


def strategy_of(name: str, **changes: float):
    if name == "dp-logistic":
        return FedAvg(fraction_evaluate=0.0)  # what arrives is private already
    inner = FedProx(proximal_mu=0.1, fraction_evaluate=0.0) if name == "fedprox" else FedAvg(fraction_evaluate=0.0)
    how = {"noise_multiplier": 1.0, "l2_norm_clip": 2.0, "sampling_rate": SAMPLING, **changes}
    return DifferentialPrivacyFixedClipping(inner, population=CLIENTS, delta=1e-3, **how)


def client_of(name: str) -> ClientApp:
    app, train_on = ClientApp(), of_hospital if name == "dp-logistic" else of_client

    @app.train()
    def train(message: Message, context) -> Message:
        x, y = train_on(int(context.node_config["partition-id"]))
        records = context.state.array_records  # Flower keeps them from round to round
        kept = {key: arrays(record) for key, record in records.items()}
        config = message.content.config_records.get("config", {})
        new = RECIPES[name](arrays(message.content["arrays"]), config, kept, x, y)
        for key, value in kept.items():
            context.state[key] = record_of(value)
        content = RecordDict({"arrays": record_of(new), "metrics": MetricRecord({"num-examples": len(y)})})
        return Message(content, reply_to=message)

    return app


def arrays(record: ArrayRecord) -> dict[str, np.ndarray]:
    return {key: array.numpy() for key, array in record.items()}


def record_of(values: dict[str, np.ndarray]) -> ArrayRecord:
    return ArrayRecord({key: Array(np.ascontiguousarray(value)) for key, value in values.items()})


def accuracy(w: dict[str, np.ndarray]) -> float:
    x, y = (part[:TEST] for part in digits())
    if "hidden" in w:
        # The last layers are the clients' own: one that half of the test digits trained takes their place.
        x = np.tanh(x @ w["hidden"])
        half, w = len(y) // 2, {"kernel": np.zeros((HIDDEN, 10)), "bias": np.zeros(10)}
        for _ in range(300):
            g = gradient(w, x[:half], y[:half])
            w = {k: w[k] - RATE * g[k] for k in w}
        x, y = x[half:], y[half:]
    return float(np.mean((x @ w["kernel"] + w["bias"]).argmax(1) == y))


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", choices=[*RECIPES])
    parser.add_argument("--quick", action="store_true", help="two rounds")
    arguments = parser.parse_args(given)
    name = arguments.recipe
    server = ServerApp()

    @server.main()
    def serve(grid, context):
        strategy = strategy_of(name)
        rounds = 1 if name == "dp-logistic" else 2 if arguments.quick else ROUNDS
        result = strategy.start(grid, record_of(beginning(name)), num_rounds=rounds)
        print(f"{name}: accuracy {accuracy(arrays(result.arrays)):.0%}")
        print(
            strategy.statement()
            if rounds > 1
            else f"epsilon = {EPSILON:g} at delta = {DELTA:g} for each patient of a hospital"
        )

    nodes = HOSPITALS if name == "dp-logistic" else CLIENTS
    flwr.simulation.run_simulation(server, client_of(name), num_supernodes=nodes)


if __name__ == "__main__":
    main()
