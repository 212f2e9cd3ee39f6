"""Trains a keyboard that predicts the next character, with privacy for each writer.

    python examples/federated_shakespeare.py --data-dir FOLDER_WITH_SHAKESPEARE

Every speaker of Shakespeare's plays is a client. If you pass neither --data-dir nor TFDPFL_DATA_DIR, the clients are
the modules of Python's standard library, and their texts are its docstrings. The clip adapts to the median norm of
the clients' updates, and training stops when the budget is spent.
"""

from __future__ import annotations

import argparse
import ast
import os
import string
import sysconfig
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdpfl import datasets, plots
from tfdpfl.federated import (
    AdaptiveClip,
    NoisedMetrics,
    PoissonClientSampler,
    build_dp_fed_avg,
    local_runtime,
    train,
)
from tfdpfl.federated import data as fd

LENGTH = 40
# Fixed beforehand, so that it says nothing of anyone's text; all else is number 0.
ALPHABET = {character: i for i, character in enumerate(string.printable, start=1)}


def read_docstrings() -> dict[str, str]:
    """What each module of the standard library says about itself. Files are read, not imported."""
    texts = {}
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        owners = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        texts[path.stem] = "\n".join(filter(None, map(ast.get_docstring, owners)))
    return texts


def windows(text: str, most: int) -> np.ndarray:
    """[n, LENGTH + 1] characters as numbers, ``most`` rows at most, which bounds a round's work."""
    codes = np.array([ALPHABET.get(character, 0) for character in text], np.int32)
    rows = min(len(codes) // (LENGTH + 1), most)
    return codes[: rows * (LENGTH + 1)].reshape(rows, LENGTH + 1)


def make_model() -> tf.keras.Model:
    """Sees the eight characters before the one that it predicts."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            tf.keras.Input((LENGTH,), dtype=tf.int32),
            layers.Embedding(len(ALPHABET) + 1, 16),
            layers.Conv1D(64, 8, padding="causal", activation="relu"),
            layers.Dense(len(ALPHABET) + 1),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder with the plays' input.txt; default: $TFDPFL_DATA_DIR")
    parser.add_argument("--sampling-rate", type=float, default=0.25)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--noise-multiplier", type=float, default=0.9)
    parser.add_argument("--target-epsilon", type=float, default=10.0)
    parser.add_argument("--checkpoint-dir", help="a folder to go on from when run again")
    parser.add_argument("--output", default="federated_shakespeare.png", help="the picture to write")
    parser.add_argument("--quick", action="store_true", help="two rounds: to see that it runs")
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds

    given = arguments.data_dir or os.environ.get(datasets.DATA_DIR_VARIABLE)
    texts = datasets.load_shakespeare(given) if given else read_docstrings()
    rows = {who: windows(text, most=30) for who, text in texts.items()}
    rows = {who: part for who, part in rows.items() if len(part)}
    names = sorted(rows)
    np.random.default_rng(0).shuffle(names)
    strangers, writers = names[: len(names) // 10], names[len(names) // 10 :]
    held_out = np.concatenate([rows[who] for who in strangers])
    everything = np.concatenate([rows[who] for who in writers])
    ids = np.repeat(writers, [len(rows[who]) for who in writers])
    clients = fd.from_arrays((everything[:, :-1], everything[:, 1:]), ids).batch(10)
    expected = arguments.sampling_rate * len(clients)
    delta = 1 / len(clients) ** 1.1
    print(f"{len(clients)} writers, {expected:.0f} a round, {len(strangers)} more to test on, delta = {delta:.2g}")

    most_common = np.bincount(held_out[:, 1:].ravel()).max() / held_out[:, 1:].size
    print(f"always the commonest character: {most_common:.1%} right", flush=True)
    begun = time.monotonic()

    def evaluate(weights) -> dict[str, float]:
        judge = make_model()  # a Keras model from before a process was built is of no use any more
        weights.assign_weights_to(judge)
        accuracy = float(np.mean(judge(held_out[:, :-1]).numpy().argmax(-1) == held_out[:, 1:]))
        print(f"after {time.monotonic() - begun:4.0f} s: {accuracy:.1%} right on strangers' texts", flush=True)
        return {"accuracy": accuracy}

    process = build_dp_fed_avg(
        make_model,
        clients_per_round=expected,
        noise_multiplier=arguments.noise_multiplier,
        l2_norm_clip=AdaptiveClip(initial=0.3),
        client_optimizer_fn=tff.learning.optimizers.build_sgdm(0.5),
        server_optimizer_fn=tff.learning.optimizers.build_sgdm(1.0, momentum=0.9),
        metrics=NoisedMetrics(noise_multiplier=3.0, bound={"loss": 6.0}),
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        input_spec=clients.element_spec,
    )
    with local_runtime():
        history = train(
            process,
            clients,
            num_rounds=rounds,
            sampler=PoissonClientSampler(clients.client_ids, arguments.sampling_rate),
            delta=delta,
            target_epsilon=arguments.target_epsilon,
            eval_fn=evaluate,
            rounds_per_evaluation=5,
            rounds_per_price=5,
            progress=False,
            checkpoint_dir=arguments.checkpoint_dir,
        )

    print(f"\n{'round':>6}{'clip':>9}{'loss, noised':>14}{'accuracy':>10}{'ε':>8}")
    for i, row in enumerate(history.rows, start=1):
        if "accuracy" in row:
            spent = f"{row['client_epsilon']:.2f}" if "client_epsilon" in row else ""
            print(f"{i:>6}{row['clip']:>9.3f}{row['loss']:>14.2f}{row['accuracy']:>10.1%}{spent:>8}")
    print(f"always the commonest character: {most_common:.1%}\n")
    if history.stopped_by:
        print(f"Stopped: another round would pass epsilon = {arguments.target_epsilon:g}.")
    print(history.statement())

    try:
        left, right = plots.panels(2)
    except ImportError as error:
        print(f"\nNo picture: {error}")
        return
    points = [(i, row["accuracy"]) for i, row in enumerate(history.rows, start=1) if "accuracy" in row]
    left.plot(*zip(*points, strict=True), marker="o", label="the private model")
    left.axhline(most_common, color="C3", linestyle="--", label="always the commonest character")
    left.set(xlabel="round", ylabel="next characters guessed right", ylim=(0, None))
    verdict = "It learns to spell" if points[-1][1] > most_common else "It has not learnt yet"
    left.set_title(f"{verdict}: {points[-1][1]:.0%} of next characters, {most_common:.0%} without learning")
    left.legend(loc="lower right")
    plots.epsilon_over_time(history, target=arguments.target_epsilon, ax=right)
    right.set_ylabel("ε of one writer, with all of their texts")
    right.set_title(f"{len(clients)} writers stay within their budget")
    left.figure.savefig(arguments.output, dpi=150)
    print(f"\nAccuracy and ε over the rounds: {arguments.output}")


if __name__ == "__main__":
    main()
