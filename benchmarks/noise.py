"""What a normal costs: each generator of tfdpfl.noise beside TensorFlow's, numpy's, and Philox's words alone.

    python benchmarks/noise.py [--sizes 1e4 1e6 3e6 2e7] [--rounds 15]

CPU time is that of the whole process (median over rounds that alternate between the competitors), wall time the least
of the rounds; it says little where the load, which stands above the table, is more than the cores. The table takes the
place of the same stack's in benchmarks/results/noise.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import cryptography
import numpy as np
import tensorflow as tf
from tqdm import tqdm

from tfdpfl import noise

RESULTS = Path(__file__).parent / "results" / "noise.md"
BASELINE = "tf.random.stateless_normal"


def competitors(n: int) -> dict[str, Callable[[], object]]:
    """By name, what makes n numbers; those of TensorFlow traced and compiled."""
    rng, seed = np.random.Generator(np.random.SFC64()), tf.constant([1, 2])
    source, philox_key, step = noise.Source(), tf.constant(noise.new_key()), tf.Variable(0, dtype=tf.int64)
    counter, key = tf.zeros([2], tf.uint64), tf.ones([1], tf.uint64)

    def words():
        return tf.raw_ops.StatelessRandomUniformFullIntV2(shape=[n], key=key, counter=counter, alg=1, dtype=tf.uint32)

    def normal():
        return tf.random.stateless_normal([n], seed)

    def ours():
        return source.gaussian([[n]], 1.0)[0]

    def philox():
        return noise.gaussian([[n]], 1.0, philox_key, step.assign_add(1))[0]

    made = {
        BASELINE: tf.function(normal),
        "Philox words alone": tf.function(words),
        "numpy SFC64": lambda: rng.standard_normal(n, np.float32),
        "tfdpfl AES": tf.function(ours),
        "tfdpfl Philox": tf.function(philox),
        "tfdpfl Philox, XLA": tf.function(philox, jit_compile=True),
    }
    made["tfdpfl AES"]()
    assert source.generator == noise.AES
    return made


def measure(n: int, rounds: int) -> list[list[str]]:
    made = competitors(n)
    calls = max(1, min(200, 1_000_000 // n))
    cpu: dict[str, list[float]] = {name: [] for name in made}
    wall: dict[str, list[float]] = {name: [] for name in made}
    for turn in range(rounds + 1):
        for name, make in made.items():
            began = time.process_time(), time.perf_counter()
            for _ in range(calls):
                make()
            if turn:  # the first warms up
                cpu[name].append((time.process_time() - began[0]) / calls)
                wall[name].append((time.perf_counter() - began[1]) / calls)
    base = statistics.median(cpu[BASELINE])
    rows = []
    for name in made:
        middle, least = statistics.median(cpu[name]), min(wall[name])
        cells = [middle * 1e6, middle / n * 1e9, middle / base, least * 1e6, least / n * 1e9]
        rows.append([f"{n:,}", name, *(f"{x:.{digits}f}" for x, digits in zip(cells, (0, 2, 2, 0, 2), strict=True))])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e4, 1e6, 3e6, 2e7])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    load = [os.getloadavg()[0]]
    rows = [row for n in tqdm(args.sizes) for row in measure(int(n), args.rounds)]
    stack = f"TensorFlow {tf.__version__}, numpy {np.__version__}"
    head = ["numbers", "generator", "CPU µs", "CPU ns a number", "× stateless_normal", "wall µs", "wall ns a number"]
    table = "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])
    load.append(os.getloadavg()[0])
    command = " ".join(["python benchmarks/noise.py", *sys.argv[1:]])
    machine = (
        f"{os.cpu_count()} cores, load {min(load):.1f} to {max(load):.1f}; cryptography {cryptography.__version__}"
    )
    section = f"## {stack}\n\n`{command}`; {machine}\n\n{table}\n"
    print(section)
    sections = {}
    if RESULTS.exists():
        for part in RESULTS.read_text().split("## ")[1:]:
            sections[part.split("\n")[0]] = f"## {part.strip()}\n"
    sections[stack] = section
    note = (
        "Made in each stack's environment by the command above its table, whose docstring says what the columns are.\n"
    )
    RESULTS.write_text("\n".join(["# What a normal costs\n", note, *(sections[name] for name in sorted(sections))]))


if __name__ == "__main__":
    main()
