"""Protects one federated task in five ways at the same ε, and shows what each costs in accuracy.

    python examples/federated_levels.py

A hundred clients have 50 to 150 synthetic examples each. The program trains federated averaging

- without privacy,
- with DP-SGD inside the clients (example level),
- with noise by the server on sums of clipped updates (client level, also called user level),
- with DP-FTRL (client level without relying on sampling),
- with noise by each client (local level).

Each uses the least noise that meets --epsilon. Then the program varies the noise of the client level. It shows the
loss and the average clipped norm, and computes ε by a wrong but popular square root, by RDP and by PLD.
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
    NoisedMetrics,
    PoissonClientSampler,
    RoundsRun,
    build_dp_fed_avg,
    build_dp_ftrl,
    build_example_dp_fed_avg,
    build_local_dp_fed_avg,
    compute_federated_noise_multiplier,
    local_runtime,
    train,
)
from tfdpfl.federated import data as fd

FEATURES, CLASSES, DELTA = 32, 10, 1e-5
VARIED = (0.5, 1.0, 2.0)  # noise multipliers, of which a quick run takes the last


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
    parser.add_argument("--epsilon", type=float, default=8.0, help="that every method is given")
    parser.add_argument("--clip", type=float, default=1.0, help="L2 norm of a client's update")
    parser.add_argument("--output", default="federated_levels.png", help="the picture to write")
    parser.add_argument("--quick", action="store_true", help="three rounds of few clients: to see that it runs")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.clients, arguments.clients_per_round, arguments.rounds = 12, 4, 3
    varied = VARIED[-1:] if arguments.quick else VARIED
    k, rounds, clip, epsilon = arguments.clients_per_round, arguments.rounds, arguments.clip, arguments.epsilon

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

    def noise(sampler, **level):
        return compute_federated_noise_multiplier(
            target_epsilon=epsilon, delta=DELTA, num_rounds=rounds, participation=sampler.participation, **level
        )

    steps, smallest = 6, min(raw.num_examples.values())
    z = {
        "example level": noise(poisson, level="example", num_examples=smallest, batch_size=batch, local_steps=steps),
        "client level": noise(poisson, level="client"),
        "client level, DP-FTRL": noise(bounded, level="tree"),
        "local level": noise(bounded, level="local"),
    }

    def client_level(multiplier, **more):
        return build_dp_fed_avg(make_model, noise_multiplier=multiplier, l2_norm_clip=clip, **common, **more)

    methods = {
        "no privacy": (plain, poisson),
        "example level": (
            lambda: build_example_dp_fed_avg(
                make_model, l2_norm_clip=1.0, noise_multiplier=z["example level"], batch_size=batch, local_steps=steps,
                client_optimizer_fn="sgd", **model,
            ),
            poisson,
        ),
        "client level": (lambda: client_level(z["client level"]), poisson),
        "client level, DP-FTRL": (
            lambda: build_dp_ftrl(
                make_model, noise_multiplier=z["client level, DP-FTRL"], l2_norm_clip=clip, **common,
                server_optimizer_fn="sgd",
            ),
            bounded,
        ),
        "local level": (
            lambda: build_local_dp_fed_avg(make_model, noise_multiplier=z["local level"], l2_norm_clip=clip, **common),
            bounded,
        ),
    }  # fmt: skip
    if arguments.quick:
        del methods["local level"]
    # What is told of a round costs, too: a fifth of the noise on updates here, for both figures together.
    told = {"loss": 5.0, "update_norm": clip}
    for multiplier in varied:
        metrics = NoisedMetrics(noise_multiplier=5 * multiplier, bound=told)
        methods[f"σ = {multiplier:g}"] = (lambda m=multiplier, told=metrics: client_level(m, metrics=told)), poisson

    histories = {}
    with local_runtime():
        for name, (build, sampler) in methods.items():
            print(name, end=" ", flush=True)
            histories[name] = train(
                build(), clients, num_rounds=rounds, sampler=sampler, delta=DELTA, eval_fn=evaluate, progress=False,
                rounds_per_evaluation=max(1, rounds // 4), rounds_per_price=rounds,
            )  # fmt: skip
            print(f"{histories[name]['accuracy'][-1]:.1%}", flush=True)

    levels = ("example", "client", "local")
    print(f"\nEach with the least noise for ε = {epsilon:g} after {rounds} rounds, δ = {DELTA:g}")
    print(f"{'':<24}{'accuracy':>9}{'σ':>8}" + "".join(f"{'ε, ' + level:>12}" for level in levels))
    compared = {name: history for name, history in histories.items() if not name.startswith("σ")}
    for name, history in compared.items():
        spent = "".join(f"{history.epsilon.get(level, math.inf):>12.3g}" for level in levels)
        print(f"{name:<24}{history['accuracy'][-1]:>9.1%}{z.get(name, 0):>8.3g}{spent}")
    print("An ε of one level says nothing of another: an example's is about one record, a client's about all of them.\n"
          "The example level is planned for a client in every round, and comes out lower as none is.\n"
          "DP-FTRL's holds whoever is chosen; the other client level's only where cohorts are drawn at random and kept "
          "secret.")  # fmt: skip

    print(f"\nClient level, {k} of {arguments.clients} clients a round, the noise varied. Loss and norm are noisy "
          "means of the last 5 rounds, paid for in ε")  # fmt: skip
    print(f"{'noise':>8}{'ε':>8}{'accuracy':>10}{'loss':>8}{'average clipped norm':>22}")
    for multiplier in varied:
        history = histories[f"σ = {multiplier:g}"]
        loss, norm = (float(np.mean(history[name][-5:])) for name in told)
        print(f"{multiplier:>8g}{history.epsilon['client']:>8.2f}{history['accuracy'][-1]:>10.1%}{loss:>8.2f}"
              f"{norm:>22.2f}")  # fmt: skip

    q = k / arguments.clients
    level = client_level(1.0).privacy[0]
    print(f"\nOne client-level training, σ = 1, {k} of {arguments.clients} clients by Poisson sampling")
    print(f"{'rounds':>8}{'q√(2T ln(1.25/δ))/σ':>22}{'RDP':>8}{'PLD':>8}")
    for after in sorted({1, max(1, rounds // 4), rounds}):
        run = RoundsRun(rounds=after, participation=poisson.participation)
        folklore = q * math.sqrt(2 * after * math.log(1.25 / DELTA))
        proven = [level.price(run, DELTA, accountant).epsilon for accountant in ("rdp", "pld")]
        print(f"{after:>8}{folklore:>22.3f}{proven[0]:>8.3f}{proven[1]:>8.3f}")
    print("The first column is a formula seen in tutorials. It is no bound.")

    try:
        left, right = plots.panels(2)
    except ImportError as error:
        print(f"\nNo picture: {error}")
        return
    reached = {name.replace(", ", ",\n").replace(" level", "\nlevel"): history["accuracy"][-1]
               for name, history in compared.items()}  # fmt: skip
    bars = left.bar(list(reached), list(reached.values()), 0.6, color=["0.6", "C0", "C1", "C1", "C3"])
    left.bar_label(bars, [f"{value:.0%}" for value in reached.values()], padding=2)
    left.axhline(1 / CLASSES, color="0.5", linestyle=":", label=f"guessing: {1 / CLASSES:.0%}")
    left.set(ylabel="accuracy on unseen data", ylim=(0, 1.08))
    most = min(compared, key=lambda name: compared[name]["accuracy"][-1])
    left.set_title(f"All planned for ε = {epsilon:g}: the {most} costs most")
    left.legend(loc="upper right")
    points = [(histories[f"σ = {m:g}"].epsilon["client"], histories[f"σ = {m:g}"]["accuracy"][-1], m) for m in varied]
    right.plot([e for e, _, _ in points], [a for _, a, _ in points], "o-", color="C1")
    for e, a, m in points:
        right.annotate(f"σ = {m:g}", (e, a), textcoords="offset points", xytext=(8, -12))
    right.axhline(compared["no privacy"]["accuracy"][-1], color="0.6", linestyle="--", label="without privacy")
    right.axhline(1 / CLASSES, color="0.5", linestyle=":", label="guessing")
    right.set(xlabel="ε of one client (smaller is safer)", ylabel="accuracy on unseen data", ylim=(0, 1.08))
    right.margins(x=0.18)
    right.set_title("Client level: twice the noise, a fraction of the ε")
    right.legend(loc="upper right")
    right.figure.savefig(arguments.output, dpi=150)
    print(f"\nAccuracy at one ε, and over the noise: {arguments.output}")


if __name__ == "__main__":
    main()
