"""One federated task, five ways to protect it: what each level costs in accuracy, and what its ε is about.

    python examples/federated_levels.py

A hundred clients with 50 to 150 synthetic examples each. Compares federated averaging without privacy with DP-SGD
inside the clients (example level), noise by the server on sums of clipped updates (client, or user, level), DP-FTRL
(client level without relying on sampling), and noise by each client (local level). Then prices one client-level
training by advanced-looking but wrong square roots, by RDP and by PLD.
"""

from __future__ import annotations

import argparse
import math
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdpfl import plots
from tfdpfl.federated import (
    BoundedParticipationSampler,
    PoissonClientSampler,
    RoundsRun,
    build_dp_fed_avg,
    build_dp_ftrl,
    build_example_dp_fed_avg,
    build_local_dp_fed_avg,
    local_runtime,
    train,
)
from tfdpfl.federated import data as fd

FEATURES, CLASSES, DELTA = 32, 10, 1e-5


def make_data(clients: int, rng: np.random.Generator):
    """Gaussian features, of which the one with the label's number is raised by 2."""
    sizes = rng.choice([50, 75, 100, 125, 150], clients)
    y = rng.integers(0, CLASSES, sizes.sum() + 2000)
    x = rng.normal(size=(len(y), FEATURES)).astype(np.float32)
    x[np.arange(len(y)), y] += 2
    parts = np.split(np.arange(sizes.sum()), np.cumsum(sizes)[:-1])
    return fd.from_partition((x, y.astype(np.int32)), parts), (x[sizes.sum() :], y[sizes.sum() :])


def make_model() -> tf.keras.Model:
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [tf.keras.Input((FEATURES,)), layers.Dense(64, activation="relu"), layers.Dense(CLASSES)]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--clients-per-round", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--noise-multiplier", type=float, default=1.0, help="of the client level")
    parser.add_argument("--clip", type=float, default=1.0, help="L2 norm of a client's update")
    parser.add_argument("--output", default="federated_levels.png", help="the picture to write")
    parser.add_argument("--quick", action="store_true", help="three rounds of few clients: to see that it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.clients, arguments.clients_per_round, arguments.rounds = 12, 4, 3
    k, rounds, z, clip = arguments.clients_per_round, arguments.rounds, arguments.noise_multiplier, arguments.clip

    raw, (x_test, y_test) = make_data(arguments.clients, np.random.default_rng(0))
    batch = 16
    clients = raw.batch(batch)

    def evaluate(weights) -> dict[str, float]:
        judge = make_model()  # a Keras model from before a process was built is of no use any more
        weights.assign_weights_to(judge)
        return {"accuracy": float(np.mean(judge(x_test).numpy().argmax(1) == y_test))}

    model = dict(loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), input_spec=clients.element_spec)
    common = dict(clients_per_round=k, client_optimizer_fn="sgd", **model)
    poisson = PoissonClientSampler(clients.client_ids, k / arguments.clients)
    # Each client once in so many rounds, as a server can enforce that cannot vouch for its sampling.
    apart = arguments.clients // k
    bounded = BoundedParticipationSampler(clients.client_ids, k, math.ceil(rounds / apart), apart)

    def plain():
        return tff.learning.algorithms.build_unweighted_fed_avg(
            lambda: tff.learning.models.from_keras_model(make_model(), **model),
            tff.learning.optimizers.build_sgdm(0.1),
        )

    methods = {
        "no privacy": (plain, poisson),
        "example level": (
            lambda: build_example_dp_fed_avg(
                make_model, l2_norm_clip=1.0, noise_multiplier=1.0, batch_size=batch, local_steps=6,
                client_optimizer_fn="sgd", **model,
            ),
            poisson,
        ),
        "client level": (lambda: build_dp_fed_avg(make_model, noise_multiplier=z, clip=clip, **common), poisson),
        "client level, DP-FTRL": (
            lambda: build_dp_ftrl(make_model, noise_multiplier=2 * z, clip=clip, **common, server_optimizer_fn="sgd"),
            bounded,
        ),
        "local level": (
            lambda: build_local_dp_fed_avg(make_model, noise_multiplier=2 * z, clip=clip, **common),
            bounded,
        ),
    }  # fmt: skip
    histories = {}
    with local_runtime():
        for name, (build, sampler) in methods.items():
            print(name, flush=True)
            histories[name] = train(
                build(), clients, num_rounds=rounds, sampler=sampler, delta=DELTA, eval_fn=evaluate,
                rounds_per_evaluation=max(1, rounds // 8), rounds_per_price=max(1, rounds // 4), accountant="rdp",
            )  # fmt: skip

    levels = ("example", "client", "local")
    print(f"\n{'':<24}{'accuracy':>9}" + "".join(f"{'ε, ' + level:>13}" for level in levels) + f"   (δ = {DELTA:g})")
    for name, history in histories.items():
        spent = "".join(f"{history.epsilon.get(level, math.inf):>13.3g}" for level in levels)
        print(f"{name:<24}{history['accuracy'][-1]:>9.1%}{spent}")
    print("An ε of one level says nothing of another: an example's is about one record, a client's about all of them.\n"
          "DP-FTRL's holds whoever is chosen; the other client level's only where cohorts are drawn at random and kept "
          "secret.")  # fmt: skip

    (level,) = build_dp_fed_avg(make_model, noise_multiplier=z, clip=clip, **common).privacy
    q = k / arguments.clients
    print(f"\nOne client-level training, z = {z:g}, {k} of {arguments.clients} clients by Poisson sampling")
    print(f"{'rounds':>8}{'q√(2T ln(1.25/δ))/z':>22}{'RDP':>8}{'PLD':>8}")
    for after in sorted({1, max(1, rounds // 4), rounds}):
        run = RoundsRun(rounds=after, participation=poisson.participation)
        folklore = q * math.sqrt(2 * after * math.log(1.25 / DELTA)) / z
        proven = [level.price(run, DELTA, accountant).epsilon for accountant in ("rdp", "pld")]
        print(f"{after:>8}{folklore:>22.3f}{proven[0]:>8.3f}{proven[1]:>8.3f}")
    print("The first column is a formula seen in tutorials. It is no bound.")

    try:
        left, right = plots.panels(2)
    except ImportError as error:
        print(f"\nNo picture: {error}")
        return
    for name, history in histories.items():
        points = [(i + 1, a) for i, a in enumerate(history["accuracy"]) if not math.isnan(a)]
        left.plot(*zip(*points, strict=True), marker=".", label=name)
    left.set(xlabel="round", ylabel="accuracy", ylim=(0, 1))
    left.legend()
    plots.epsilon_over_time(histories["client level"], ax=right)
    left.figure.savefig(arguments.output, dpi=150)
    print(f"\nAccuracy and ε over the rounds: {arguments.output}")


if __name__ == "__main__":
    main()
