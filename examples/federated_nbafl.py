"""Trains NbAFL on images, and compares the ε that its paper claims with the ε that is proven.

    python examples/federated_nbafl.py --data-dir FOLDER_WITH_MNIST

If you pass neither --data-dir nor TFDPFL_DATA_DIR, Keras downloads MNIST. Without a network the program uses the
digits of scikit-learn. Images are reduced to 7 x 7. There are N clients, K of them in each round.

- First the program trains with the noise of the paper's formulas, with noise that an accountant calibrates to the
  same ε, and without noise.
- Then it trains in a setting in which NbAFL with the correct noise does learn. It needs some thousand clients, each
  of which takes part once.
- At last it trains with noise in every step, as DP-SGD inside the clients does.

Each row shows the claimed ε and the proven ones, the noise of clients and server, and the accuracy on the test data
of the server and of the clients.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdpfl import datasets, plots
from tfdpfl.federated import (
    BoundedParticipationSampler,
    FixedSizeClientSampler,
    build_example_dp_fed_avg,
    build_nbafl,
    compute_federated_noise_multiplier,
    local_runtime,
    nbafl,
    train,
)
from tfdpfl.federated import data as fd


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder with MNIST; default: $TFDPFL_DATA_DIR, else a download")
    parser.add_argument("--clients", type=int, default=30, help="N")
    parser.add_argument("--clients-per-round", type=int, default=10, help="K")
    parser.add_argument("--rounds", type=int, default=10, help="T")
    parser.add_argument("--many", type=int, default=3000, help="clients where sound NbAFL learns, all in one round")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--clip", type=float, default=1.0, help="C, the L2 norm of a client's weights")
    parser.add_argument("--local-epochs", type=int, default=2)
    parser.add_argument("--output", default="federated_nbafl.png", help="the picture to write")
    parser.add_argument("--quick", action="store_true", help="two rounds of few clients and small digits")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.clients, arguments.clients_per_round, arguments.rounds, arguments.many = 4, 4, 2, 40

    data = datasets.load_digits() if arguments.quick else datasets.load_image_data(arguments.data_dir)
    x_train, x_test = small(data.x_train), small(data.x_test)
    delta, epsilon, clip = arguments.delta, arguments.epsilon, arguments.clip

    def make_model() -> tf.keras.Model:
        layers = tf.keras.layers
        return tf.keras.Sequential(
            [
                tf.keras.Input(x_train.shape[1:]),
                layers.Flatten(),
                layers.Dense(data.num_classes, kernel_initializer="zeros"),  # random weights would be clipped, too
            ]
        )

    def accuracy(weights, x, y) -> float:
        judge = make_model()  # a Keras model from before a process was built is of no use any more
        weights.assign_weights_to(judge)
        return float(np.mean(judge(x).numpy().argmax(1) == y))

    # A tenth of each client's data is for its own evaluation.
    def split(number: int):
        parts = fd.partition_iid(len(x_train), number, seed=0)
        own = [rows[: max(1, len(rows) // 10)] for rows in parts]
        train_on = [rows[max(1, len(rows) // 10) :] for rows in parts]
        return fd.from_partition((x_train, data.y_train), train_on), own

    few, own_few = split(arguments.clients)
    many, own_many = split(arguments.many)
    clients = few.batch(20, epochs=arguments.local_epochs)
    thousands = many.batch(6, epochs=5 * arguments.local_epochs)  # they train once, so they train long
    smallest = min(few.num_examples.values())
    print(f"{data.name}: {arguments.clients} clients with {smallest} examples or one more, "
          f"{arguments.clients_per_round} a round, {arguments.rounds} rounds; or {arguments.many} clients with "
          f"{min(many.num_examples.values())}, all in one round")  # fmt: skip
    model = dict(loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True), input_spec=clients.element_spec)
    local = dict(client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.5))

    def build(**more):
        settings = dict(num_rounds=arguments.rounds, num_clients=arguments.clients,
                        clients_per_round=arguments.clients_per_round, min_dataset_size=smallest, **more)  # fmt: skip
        return build_nbafl(make_model, epsilon=epsilon, delta=delta, l2_norm_clip=clip, **local, **model, **settings)

    def build_many():
        return build_nbafl(
            make_model, epsilon=epsilon, delta=delta, l2_norm_clip=clip, num_rounds=1, num_clients=arguments.many,
            min_dataset_size=min(many.num_examples.values()), **local, **model,
        )  # fmt: skip

    def plain():
        return tff.learning.algorithms.build_unweighted_fed_avg(
            lambda: tff.learning.models.from_keras_model(make_model(), **model), local["client_optimizer_fn"]
        )

    fixed = FixedSizeClientSampler(clients.client_ids, arguments.clients_per_round)
    steps, batch = 20, min(50, smallest)
    z = compute_federated_noise_multiplier(
        target_epsilon=epsilon, delta=delta, num_rounds=arguments.rounds, participation=fixed.participation,
        level="example", num_examples=smallest, batch_size=batch, local_steps=steps,
    )  # fmt: skip

    def each_step():
        return build_example_dp_fed_avg(
            make_model, l2_norm_clip=1.0, noise_multiplier=z, batch_size=batch, local_steps=steps, **local, **model
        )

    methods = {
        "no noise": (plain, few),
        "published, one upload seen": (lambda: build(calibration="published", num_exposures=1), few),
        "published, all uploads seen": (lambda: build(calibration="published"), few),
        "sound, one upload seen": (lambda: build(num_exposures=1), few),
        "sound, all uploads seen": (lambda: build(), few),
        f"sound, {arguments.many} clients once": (build_many, many),
        "noise in every step": (each_step, few),
    }
    if arguments.quick:  # each calibration and each number of uploads once, not each pair of them
        for pair in ("no noise", "published, all uploads seen", "sound, one upload seen"):
            del methods[pair]
    results, rows = {}, []
    with local_runtime():
        for name, (make, data_of) in methods.items():
            print(f"{name:<29}", end="", flush=True)
            process, once = make(), data_of is many
            sampler = BoundedParticipationSampler(thousands.client_ids, arguments.many, 1) if once else fixed
            batches = thousands if once else few.batch(20) if make is each_step else clients
            history = train(
                process, batches, num_rounds=1 if once else arguments.rounds, sampler=sampler, delta=delta,
                rounds_per_price=arguments.rounds, progress=False,
            )  # fmt: skip
            weights = process.get_model_weights(history.state)
            results[name] = accuracy(weights, x_test, data.y_test)
            theirs = (own_many if once else own_few)[:30]
            own = [accuracy(weights, x_train[mine], data.y_train[mine]) for mine in theirs]
            print(f"{results[name]:.1%}", flush=True)
            proven = history.epsilon.get("example", np.nan)
            own = own if not once else [float(np.mean(own))]  # two examples each say little of one
            rows.append((name, own, getattr(process, "nbafl", None), proven))

    print(f"\nδ = {delta:g}; all were asked for ε = {epsilon:g}")
    print(f"{'':<29}{'accuracy':>9}{'at clients':>15}{'σ_u':>9}{'σ_d':>9}{'claimed ε':>11}{'uploads ε':>11}"
          f"{'models ε':>10}")  # fmt: skip
    for name, own, plan, proven in rows:
        figures = f"{'one example: ':>40}{proven:>10.3g}" if proven == proven else ""
        if plan is not None:
            figures = (
                f"{plan.sigma_u:>9.3g}{plan.sigma_d:>9.3g}{plan.claimed_epsilon:>11.3g}{plan.upload_epsilon:>11.4g}"
                f"{plan.release_epsilon:>10.4g}"
            )
        print(f"{name:<29}{results[name]:>9.1%}{f'{min(own):.0%} to {max(own):.0%}':>15}{figures}")
    five = nbafl.noise_of(
        epsilon=epsilon, delta=delta, l2_norm_clip=clip, num_rounds=10, num_clients=5, num_exposures=1,
        min_dataset_size=smallest, calibration="published",
    )  # fmt: skip
    print(f"The server adds noise where few clients' is too little for many rounds: as published, with 5 clients in "
          f"each of 10 rounds, σ_d = {five.sigma_d:.3g}")  # fmt: skip
    print(
        "\nClaimed: by the paper's formula, which divides the sensitivity by a client's number of examples. Uploads:\n"
        "proven against who sees so many of a client's uploads. Models: against who sees the released models alone.\n"
        "σ_u is each client's noise, σ_d the server's on the mean, where the clients' do not do. Sound noise is this\n"
        "large since it hides a client's whole weights; it sinks in the mean of thousands. build_dp_fed_avg hides the\n"
        "change alone, with far less noise (examples/federated_levels.py). Noise in every step hides one example of a\n"
        "client, and not the client: it is DP-SGD, with its own ε."
    )

    try:
        ax = plots.panels(1)[0]
    except ImportError as error:
        print(f"\nNo picture: {error}")
        return
    names, values = [*results][::-1], [*results.values()][::-1]
    colours = {"p": "C3", "s": "C0"}
    bars = ax.barh(names, values, 0.6, color=[colours.get(name[0], "0.6") for name in names])
    ax.bar_label(bars, [f"{value:.0%}" for value in values], padding=3)
    ax.axvline(1 / data.num_classes, color="0.5", linestyle=":", label="guessing")
    ax.set(xlabel=f"accuracy on {data.name}", xlim=(0, 1.08))
    proven = {row[0]: row[2].release_epsilon for row in rows if row[2] is not None}
    labels = [f"{name}\n(proven ε {proven[name]:.2g})" if name in proven else name for name in names]
    ax.set_yticks(range(len(names)), labels)
    ax.figure.suptitle(f"Asked for ε = {epsilon:g}: what is published learns, but its ε does not hold")
    ax.legend(loc="center right")
    ax.figure.savefig(arguments.output, dpi=150)
    print(f"\nAccuracy of each: {arguments.output}")


def small(images: np.ndarray) -> np.ndarray:
    """Means over squares, so that 28 x 28 becomes 7 x 7: few weights need little noise in all."""
    images = images.reshape(*images.shape[:3])
    side = max(1, images.shape[1] // 7)
    rows = images.shape[1] // side
    cut = images[:, : rows * side, : rows * side].reshape(len(images), rows, side, rows, side)
    return cut.mean((2, 4)).astype(np.float32)


if __name__ == "__main__":
    main()
