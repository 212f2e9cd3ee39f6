"""What DP costs a federated round, beside TFF's plain federated averaging on the same clients, round by round in turn.

    python benchmarks/federated.py [--rounds 30] [--cohorts 20 100 1000] [--long 200]

A two-layer model of 50,890 weights, 100 examples a client in batches of 20. Writes results/federated.md and .json.
Times are medians over rounds, and ratios medians of a round's to the plain one's of the same turn, as other work
disturbs both. Memory is that of Python and of TFF's worker together, with cohorts of 8 to 12 clients.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import time

import numpy as np
import tensorflow as tf
import tensorflow_federated as tff

from tfdpfl.federated import (
    build_distributed_dp_fed_avg,
    build_dp_fed_avg,
    build_dp_ftrl,
    build_example_dp_fed_avg,
    build_local_dp_fed_avg,
    local_runtime,
)

RESULTS = pathlib.Path(__file__).parent / "results"
EXAMPLES, BATCH = 100, 20


def model_fn():
    return tf.keras.Sequential([
        tf.keras.layers.InputLayer((784,)), tf.keras.layers.Dense(64, "relu"), tf.keras.layers.Dense(10),
    ])  # fmt: skip


def clients(number):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(EXAMPLES, 784)).astype("float32")
    y = rng.integers(0, 10, EXAMPLES).astype("int32")
    return [tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH) for _ in range(number)]


def processes(cohort):
    sgd = tff.learning.optimizers.build_sgdm(0.05)
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    spec = clients(1)[0].element_spec
    model = {"client_optimizer_fn": sgd, "loss": loss, "input_spec": spec}
    dp = {"clients_per_round": cohort, "noise_multiplier": 1.0, **model}
    examples = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "batch_size": BATCH, **model}

    def variable():
        return tff.learning.models.from_keras_model(model_fn(), loss=loss, input_spec=spec)

    return {
        "TFF, plain": tff.learning.algorithms.build_unweighted_fed_avg(variable, client_optimizer_fn=sgd),
        "client level, adaptive clip": build_dp_fed_avg(model_fn, **dp),
        "client level, fixed clip": build_dp_fed_avg(model_fn, l2_norm_clip=0.1, **dp),
        "DP-FTRL": build_dp_ftrl(model_fn, l2_norm_clip=0.1, **dp),
        "local": build_local_dp_fed_avg(model_fn, l2_norm_clip=0.1, **dp),
        "distributed (Skellam)": build_distributed_dp_fed_avg(model_fn, l2_norm_clip=0.1, **dp),
        "example level, batches": build_example_dp_fed_avg(model_fn, sampling="batches", **examples),
        "example level, Poisson": build_example_dp_fed_avg(model_fn, local_steps=EXAMPLES // BATCH, **examples),
    }


def in_turn(cohort, rounds, names=None):
    """Of each process, milliseconds a round and times the plain round: one round of each, and again."""
    data = clients(cohort)
    running = {name: process for name, process in processes(cohort).items() if names is None or name in names}
    states = {name: process.initialize() for name, process in running.items()}
    times = {name: [] for name in running}
    for number in range(rounds + 2):
        order = list(running.items())
        for name, process in order if number % 2 else reversed(order):
            began = time.perf_counter()
            states[name] = process.next(states[name], data).state
            if number >= 2:  # the first ones trace and warm up
                times[name].append(1e3 * (time.perf_counter() - began))
    plain = np.array(times["TFF, plain"])
    return {name: (np.median(found), np.median(np.array(found) / plain)) for name, found in times.items()}


def megabytes():
    """Resident memory of this process and its descendants, of which one is the worker."""
    rss, parent = {}, {}
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines = dict(line.split(":", 1) for line in (entry / "status").read_text().splitlines())
            except (OSError, ValueError):
                continue
            rss[int(entry.name)] = int(lines.get("VmRSS", "0 kB").split()[0]) / 1024
            parent[int(entry.name)] = int(lines["PPid"])

    def ours(process):
        while process > 1 and process != os.getpid():
            process = parent.get(process, 0)
        return process == os.getpid()

    return sum(size for process, size in rss.items() if ours(process))


def over_rounds(name, rounds):
    """Memory while a process runs with cohorts of varying size."""
    process, data = processes(10)[name], clients(12)
    state, found = process.initialize(), {}
    marks = {rounds // 4, rounds // 2, 3 * rounds // 4, rounds}
    rng = np.random.default_rng(0)
    for number in range(1, rounds + 1):
        state = process.next(state, data[: rng.integers(8, 13)]).state
        if number in marks:
            found[number] = megabytes()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="with 20 clients; fewer with more")
    parser.add_argument("--cohorts", type=int, nargs="*", default=[20, 100, 1000])
    parser.add_argument("--long", type=int, default=200)
    arguments = parser.parse_args()
    two = ["TFF, plain", "client level, adaptive clip"]
    with local_runtime():
        found = {
            cohort: in_turn(cohort, max(4, arguments.rounds * 20 // cohort), two if cohort >= 1000 else None)
            for cohort in arguments.cohorts
        }
    memory = {}
    for name in two:
        with local_runtime():
            memory[name] = over_rounds(name, arguments.long)
    lines = [
        f"TensorFlow Federated {tff.__version__}, {os.cpu_count()} cores. {__doc__.split(chr(10) * 2)[2].strip()}",
        "",
        "| clients | process | ms a round | × plain |",
        "| --- | --- | --- | --- |",
    ]
    for cohort, times in found.items():
        lines += [f"| {cohort} | {name} | {ms:.0f} | {ratio:.2f} |" for name, (ms, ratio) in times.items()]
    lines += ["", "| memory, MB, at round | " + " | ".join(map(str, memory[two[0]])) + " |", "| --- |" + " --- |" * 4]
    for name, sizes in memory.items():
        lines.append(f"| {name} | " + " | ".join(f"{mb:.0f}" for mb in sizes.values()) + " |")
    text = "\n".join(lines) + "\n"
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "federated.md").write_text(text)
    results = {"ms_and_times_plain": found, "memory_mb": memory}
    (RESULTS / "federated.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
