"""What a step costs on a model whose embedding table is large: plain, with AdaFEST, and with noise on every row.

    python benchmarks/embeddings.py --rounds 9

CPU time of the process, median of interleaved rounds; the batch's words follow Zipf's law.
"""

import argparse
import statistics
import time
from importlib import metadata

import numpy as np
import tensorflow as tf

import tfdpfl

keras = tf.keras


def model_of(optimizer, vocabulary, width, length):
    model = keras.Sequential([
        keras.Input((length,), dtype="int32"), keras.layers.Embedding(vocabulary, width),
        keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(1),
    ])  # fmt: skip
    model.compile(optimizer, loss=keras.losses.BinaryCrossentropy(from_logits=True))
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("vocabulary", 1_000_000), ("width", 64), ("batch", 1024), ("length", 64), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--optimizer", default="SGD")
    parser.add_argument("--dense", action="store_true", help="also with noise on every row")
    args = parser.parse_args()
    base = getattr(keras.optimizers, args.optimizer)
    private = tfdpfl.make_dp_optimizer_class(base)
    common = {"learning_rate": 0.1}
    sparse = tfdpfl.AdaFEST(threshold=8.0, noise_multiplier=2.0)
    optimizers = {"plain": base(**common), "AdaFEST": private(1.0, 1.0, sparse=sparse, **common)}
    if args.dense:
        optimizers["all rows"] = private(1.0, 1.0, **common)
    rng = np.random.default_rng(0)
    ranks = rng.zipf(1.2, size=(args.batch, args.length))
    x = ((ranks - 1) % args.vocabulary).astype("int32")
    y = rng.integers(0, 2, (args.batch, 1)).astype("float32")
    models = {name: model_of(o, args.vocabulary, args.width, args.length) for name, o in optimizers.items()}
    spent = {name: [] for name in models}
    for at in range(args.rounds + 2):
        for name, model in models.items():
            begun = time.process_time(), time.perf_counter()
            model.train_on_batch(x, y)
            if at >= 2:
                spent[name].append((time.process_time() - begun[0], time.perf_counter() - begun[1]))
    print(f"{args.optimizer}, table {args.vocabulary} x {args.width}, batch {args.batch} x {args.length}, "
          f"Keras {metadata.version('keras')}, TensorFlow {tf.__version__}")  # fmt: skip
    print("| step | CPU ms | of plain | wall ms (least) |\n| --- | --- | --- | --- |")
    plain = statistics.median(cpu for cpu, _ in spent["plain"])
    for name, times in spent.items():
        cpu = statistics.median(cpu for cpu, _ in times)
        print(f"| {name} | {1e3 * cpu:.0f} | {cpu / plain:.2f} | {1e3 * min(wall for _, wall in times):.0f} |")


if __name__ == "__main__":
    main()
