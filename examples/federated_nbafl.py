"""NbAFL on images: N clients, K of them a round, noise at clients and server; what is claimed and what holds.

    python examples/federated_nbafl.py --data-dir FOLDER_WITH_MNIST

Without --data-dir (or TFDPFL_DATA_DIR) MNIST is downloaded by Keras; without a network the digits of scikit-learn take
its place. Trains with the noise that the paper's formulas ask for, with noise calibrated by an accountant to the same
ε, and without, and prints for each the ε that the paper's formula claims beside the ones that are proven.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdpfl import datasets, plots
from tfdpfl.federated import FixedSizeClientSampler, build_nbafl, local_runtime, train
from tfdpfl.federated import data as fd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder with MNIST; default: $TFDPFL_DATA_DIR, else a download")
    parser.add_argument("--clients", type=int, default=30, help="N")
    parser.add_argument("--clients-per-round", type=int, default=10, help="K")
    parser.add_argument("--rounds", type=int, default=20, help="T")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--clip", type=float, default=5.0, help="C, the L2 norm of a client's weights")
    parser.add_argument("--local-epochs", type=int, default=2)
    parser.add_argument("--output", default="federated_nbafl.png", help="the picture to write")
    parser.add_argument("--quick", action="store_true", help="two rounds of few clients and small digits")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.clients, arguments.clients_per_round, arguments.rounds = 6, 3, 2

    data = datasets.load_digits() if arguments.quick else datasets.load_image_data(arguments.data_dir)
    parts = fd.partition_iid(len(data.x_train), arguments.clients, seed=0)
    raw = fd.from_partition((data.x_train, data.y_train), parts)
    clients = raw.batch(20, epochs=arguments.local_epochs)
    smallest = min(raw.num_examples.values())
    print(f"{data.name}: {arguments.clients} clients with {smallest} examples or one more, "
          f"{arguments.clients_per_round} a round, {arguments.rounds} rounds")  # fmt: skip

    def make_model() -> tf.keras.Model:
        layers = tf.keras.layers
        return tf.keras.Sequential(
            [tf.keras.Input(data.x_train.shape[1:]), layers.Flatten(), layers.Dense(data.num_classes)]
        )

    def evaluate(weights) -> dict[str, float]:
        judge = make_model()  # a Keras model from before a process was built is of no use any more
        weights.assign_weights_to(judge)
        predicted = judge(data.x_test).numpy()
        return {"accuracy": float(np.mean(predicted.argmax(1) == data.y_test))}

    model = dict(loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), input_spec=clients.element_spec)

    def build(**more):
        return build_nbafl(
            make_model, epsilon=arguments.epsilon, delta=arguments.delta, l2_norm_clip=arguments.clip,
            num_rounds=arguments.rounds, num_clients=arguments.clients, clients_per_round=arguments.clients_per_round,
            min_dataset_size=smallest, client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.1), **model, **more,
        )  # fmt: skip

    def plain():
        return tff.learning.algorithms.build_unweighted_fed_avg(
            lambda: tff.learning.models.from_keras_model(make_model(), **model),
            tff.learning.optimizers.build_sgdm(0.1),
        )

    methods = {
        "no noise": plain,
        "published, one upload seen": lambda: build(calibration="published", num_exposures=1),
        "published, all uploads seen": lambda: build(calibration="published"),
        "sound, one upload seen": lambda: build(num_exposures=1),
        "sound, all uploads seen": lambda: build(),
    }
    histories = {}
    rows = []
    with local_runtime():
        for name, make in methods.items():
            print(name)
            process = make()
            sampler = FixedSizeClientSampler(clients.client_ids, arguments.clients_per_round)
            histories[name] = train(
                process, clients, num_rounds=arguments.rounds, sampler=sampler, delta=arguments.delta,
                eval_fn=evaluate, rounds_per_evaluation=2, rounds_per_price=arguments.rounds,
            )  # fmt: skip
            rows.append((name, histories[name]["accuracy"][-1], getattr(process, "nbafl", None)))

    print(f"\nδ = {arguments.delta:g}; the formulas were asked for ε = {arguments.epsilon:g}")
    print(f"{'':<29}{'accuracy':>9}{'σ_u':>10}{'σ_d':>10}{'claimed ε':>11}{'uploads ε':>11}{'models ε':>11}")
    for name, accuracy, plan in rows:
        figures = ""
        if plan is not None:
            figures = (
                f"{plan.sigma_u:>10.4g}{plan.sigma_d:>10.4g}{plan.claimed_epsilon:>11.3g}{plan.upload_epsilon:>11.4g}"
                f"{plan.release_epsilon:>11.4g}"
            )
        print(f"{name:<29}{accuracy:>9.1%}{figures}")
    print(
        "\nClaimed: by the paper's formula, which divides the sensitivity by a client's number of examples. Uploads:\n"
        "proven against who sees so many of a client's uploads. Models: against who sees the released models alone.\n"
        "Sound noise is this large since it hides a client's whole weights, however little the client changed them:\n"
        "build_dp_fed_avg hides the change alone, with far less (examples/federated_levels.py)."
    )

    try:
        ax = plots.panels(1)[0]
    except ImportError as error:
        print(f"\nNo picture: {error}")
        return
    for name, history in histories.items():
        points = [(i + 1, a) for i, a in enumerate(history["accuracy"]) if not np.isnan(a)]
        ax.plot(*zip(*points, strict=True), marker=".", label=name)
    ax.set(xlabel="round", ylabel="accuracy", title=f"NbAFL on {data.name}", ylim=(0, 1))
    ax.locator_params(axis="x", integer=True)
    ax.legend()
    ax.figure.savefig(arguments.output, dpi=150)
    print(f"\nAccuracy over the rounds: {arguments.output}")


if __name__ == "__main__":
    main()
