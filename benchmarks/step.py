"""Times one training step, and its memory, of DP optimizers beside plain Keras.

    python benchmarks/step.py --models mnist_cnn --batches 250 --competitors plain,tfdpfl

Each competitor is built in a process of its own, so that its peak memory is its own; the rounds alternate
between these processes, so that a noisy machine slows all alike. A step is one call of the model's compiled
train function on a batch that stays in memory. A ratio is the median over rounds of the ratio to plain Keras
within the round. Growth is the peak beyond that of a process that has only TensorFlow and the batch in it.
A competitor that fails is shown with the reason; with BENCHMARK_DEBUG set its traceback is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _models import MODELS
from tqdm import tqdm

CLIP, NOISE_MULTIPLIER = 1.0, 1.1
BASELINE = "baseline"  # imports TensorFlow and makes the batch: what every competitor's memory has in common


# What is compared: each makes a compiled model.


def _plain(build, batch_size):
    return _compiled(build(), "adam")


def _tfdpfl(build, batch_size, noise_multiplier=NOISE_MULTIPLIER):
    import tfdpfl

    return _compiled(build(), tfdpfl.DPAdam(l2_norm_clip=CLIP, noise_multiplier=noise_multiplier))


def _tfdpfl_noiseless(build, batch_size):
    """For the noise's share of a step: every other part of it is there."""
    return _tfdpfl(build, batch_size, noise_multiplier=0.0)


def _tfp_optimizer(class_name):
    def compiled(build, batch_size):
        import tensorflow_privacy

        optimizer = getattr(tensorflow_privacy, class_name)(
            l2_norm_clip=CLIP, noise_multiplier=NOISE_MULTIPLIER, num_microbatches=batch_size
        )
        return _compiled(build(), optimizer, reduction="none")

    return compiled


def _tfp_model(with_registry):
    def compiled(build, batch_size):
        import tensorflow as tf
        from tensorflow_privacy.privacy.fast_gradient_clipping import layer_registry
        from tensorflow_privacy.privacy.keras_models import dp_keras_model

        plain = build()
        registry = layer_registry.make_default_layer_registry() if with_registry else None
        if isinstance(plain, tf.keras.Sequential):
            # Without its input layer a Sequential has no graph, and the fast way is off.
            layers = [tf.keras.layers.InputLayer(plain.input_shape[1:]), *plain.layers]
            make, structure = dp_keras_model.DPSequential, {"layers": layers}
        else:
            make, structure = dp_keras_model.DPModel, {"inputs": plain.inputs, "outputs": plain.outputs}
        model = make(CLIP, NOISE_MULTIPLIER, layer_registry=registry, **structure)
        if with_registry and not model._enable_fast_peg_computation:
            raise NotSupported("a layer is not in TF Privacy's registry")
        return _compiled(model, "adam")

    return compiled


COMPETITORS = {
    "plain": _plain,
    "tfdpfl": _tfdpfl,
    "tfdpfl_noiseless": _tfdpfl_noiseless,
    "tfp_model_fast": _tfp_model(with_registry=True),
    "tfp_model": _tfp_model(with_registry=False),
    "tfp_vectorized": _tfp_optimizer("VectorizedDPKerasAdamOptimizer"),
    "tfp": _tfp_optimizer("DPKerasAdamOptimizer"),
}


class NotSupported(Exception):
    """The competitor does not do this model."""


def _compiled(model, optimizer, reduction="sum_over_batch_size"):
    import tensorflow as tf

    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    model.compile(optimizer=optimizer, loss=loss)
    return model


# The worker process.


def work(connection: Connection, model_name: str, batch_size: int, competitor: str) -> None:
    """Builds and warms up; then answers a number of steps with their seconds, and "peak" with its MB."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    try:
        import tensorflow as tf

        tf.get_logger().setLevel("ERROR")
        model_entry = MODELS[model_name]
        data = tf.data.Dataset.from_tensors(model_entry.batch(batch_size)).repeat()
        batches = iter(data)
        if competitor == BASELINE:
            next(batches)
            step = None
        else:
            model = COMPETITORS[competitor](model_entry.build, batch_size)
            model.make_train_function()

            def step() -> float:
                start = time.perf_counter()
                model.train_function(batches)
                return time.perf_counter() - start

            step()
        connection.send(("ready", step() if step else 0.0))
        while (request := connection.recv()) is not None:
            if request == "peak":
                connection.send(("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))
            else:
                connection.send(("seconds", [step() for _ in range(request)]))
    except Exception as error:
        out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError"
        reason = str(error) if isinstance(error, NotSupported) else type(error).__name__
        connection.send(("failed", "out of memory" if out_of_memory else reason))
        if "BENCHMARK_DEBUG" in os.environ:
            raise


class Failed(Exception):
    """The worker gave no answer; the text is what the table shows."""


class Worker:
    """A competitor's process, seen from the parent."""

    def __init__(self, model: str, batch_size: int, competitor: str, timeout: float, memory_limit_mb: float):
        self.competitor, self._timeout, self._memory_limit_mb = competitor, timeout, memory_limit_mb
        context = multiprocessing.get_context("spawn")
        self._connection, child = context.Pipe()
        self._process = context.Process(target=work, args=(child, model, batch_size, competitor), daemon=True)
        self._process.start()
        child.close()

    def ask(self, request: Any) -> Any:
        """Sends a request and returns its answer. Raises Failed."""
        try:
            self._connection.send(request)
        except OSError:
            raise self._died() from None
        return self.answer()

    def answer(self) -> Any:
        """Waits for an answer within the limits of time and memory. Raises Failed."""
        end = time.monotonic() + self._timeout
        try:
            while not self._connection.poll(0.1):
                if time.monotonic() > end:
                    raise Failed(f"time out ({self._timeout:.0f} s)")
                if self._resident_mb() > self._memory_limit_mb:
                    raise Failed("out of memory")
            kind, value = self._connection.recv()
        except EOFError:
            raise self._died() from None
        if kind == "failed":
            raise Failed(value)
        return value

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(2)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._connection.close()

    def _resident_mb(self) -> float:
        with contextlib.suppress(OSError):
            pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
            return int(pages) * resource.getpagesize() / 2**20
        return 0.0

    def _died(self) -> Failed:
        self._process.join(5)
        code = self._process.exitcode
        return Failed("out of memory" if code == -9 else f"died ({code})")


# The parent.


@dataclasses.dataclass
class Result:
    """One line of the table. Times are in milliseconds, memory in MB; None where the competitor failed."""

    model: str
    batch_size: int
    competitor: str
    failure: str | None = None
    rounds_ms: list[float] = dataclasses.field(default_factory=list)
    ms: float | None = None
    time_ratio: float | None = None
    peak_mb: float | None = None
    peak_ratio: float | None = None
    growth_mb: float | None = None
    growth_ratio: float | None = None


def compare(model: str, batch_size: int, options: argparse.Namespace, progress: tqdm) -> list[Result]:
    """Measures all competitors on one model and batch size."""
    names = [BASELINE, *options.competitors]
    results = {name: Result(model, batch_size, name) for name in names}
    workers: dict[str, Worker] = {}
    steps: dict[str, int] = {}

    def attempt(name: str, action: Any) -> None:
        progress.set_description(f"{model} {batch_size} {name}")
        try:
            action()
        except Failed as failure:
            results[name].failure = str(failure)
            if worker := workers.pop(name, None):
                worker.close()
        progress.update()

    def build(name: str) -> None:
        workers[name] = Worker(model, batch_size, name, options.timeout, options.memory_limit)
        seconds = workers[name].answer()
        steps[name] = max(1, min(options.steps, int(options.round_seconds / max(seconds, 1e-6))))

    def run(name: str) -> None:
        seconds = workers[name].ask(steps[name])
        results[name].rounds_ms.append(statistics.median(seconds) * 1000)

    def measure_memory(name: str) -> None:
        results[name].peak_mb = workers[name].ask("peak")

    try:
        for name in names:
            attempt(name, lambda name=name: build(name))
        for _ in range(options.rounds):
            for name in options.competitors:
                attempt(name, lambda name=name: run(name) if name in workers else None)
        for name in names:
            attempt(name, lambda name=name: measure_memory(name) if name in workers else None)
    finally:
        for worker in workers.values():
            worker.close()
    _summarise(results)
    return [results[name] for name in options.competitors]


def _summarise(results: dict[str, Result]) -> None:
    common, plain = results[BASELINE], results.get("plain")
    for result in results.values():
        if result.failure:
            continue
        result.ms = statistics.median(result.rounds_ms) if result.rounds_ms else None
        if result.peak_mb and common.peak_mb:
            result.growth_mb = result.peak_mb - common.peak_mb
    for result in results.values():
        if result.failure or plain is None or plain.failure or result is common:
            continue
        pairs = zip(result.rounds_ms, plain.rounds_ms, strict=True)
        result.time_ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        result.peak_ratio = result.peak_mb / plain.peak_mb
        if result.growth_mb and plain.growth_mb:
            result.growth_ratio = result.growth_mb / plain.growth_mb


COLUMNS = {
    "ms a step": ("ms", "{:.2f}"),
    "× plain": ("time_ratio", "{:.2f}"),
    "peak MB": ("peak_mb", "{:.0f}"),
    "peak × plain": ("peak_ratio", "{:.2f}"),
    "growth MB": ("growth_mb", "{:.0f}"),
    "growth × plain": ("growth_ratio", "{:.2f}"),
}


def table(results: list[Result]) -> str:
    """The results in Markdown."""
    rows = [["model", "batch", "competitor", *COLUMNS], ["---"] * (3 + len(COLUMNS))]
    for result in results:
        values = [(getattr(result, field), form) for field, form in COLUMNS.values()]
        cells = ["–" if value is None else form.format(value) for value, form in values]
        cells[0] = result.failure or cells[0]
        rows.append([result.model, str(result.batch_size), result.competitor, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"| {line} |" for line in lines)


def plot(results: list[Result], path: Path, title: str) -> None:
    """Draws the times as bars."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    shown = [result for result in results if result.ms is not None][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.3 * len(shown)), layout="constrained")
    bars = axes.barh(
        [f"{result.model}, {result.batch_size}: {result.competitor}" for result in shown],
        [result.ms for result in shown],
        color=["C0" if result.competitor.startswith("tfdpfl") else "0.7" for result in shown],
    )
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set(xscale="log", xlabel="ms a step", title=title)
    axes.margins(x=0.15)
    figure.savefig(path, dpi=150)


def _stack() -> str:
    return "tff" if importlib.util.find_spec("tensorflow_privacy") else "keras3"


def _options(arguments: list[str] | None) -> argparse.Namespace:
    def names(known: dict[str, Any]) -> Any:
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            if unknown := [name for name in chosen if name not in known]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(known)}")
            return chosen

        return parse

    with open("/proc/meminfo") as file:
        available_mb = next(int(line.split()[1]) for line in file if line.startswith("MemAvailable")) / 1024
    default = [name for name in COMPETITORS if _stack() == "tff" or not name.startswith("tfp")]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names(MODELS), default=list(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--batches", type=lambda text: [int(size) for size in text.split(",")], default=[250])
    parser.add_argument(
        "--competitors", type=names(COMPETITORS), default=default, help=f"of {', '.join(COMPETITORS)}"
    )
    parser.add_argument("--steps", type=int, default=30, help="most steps a round")
    parser.add_argument(
        "--round-seconds", type=float, default=2.0, help="slow competitors do fewer steps, at least one"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for a build or a round")
    parser.add_argument(
        "--memory-limit", type=float, default=0.8 * available_mb, help="MB for one competitor"
    )
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / f"step-{_stack()}")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints the table, and writes it beside a JSON file and a picture."""
    options = _options(arguments)
    combinations = [(model, size) for model in options.models for size in options.batches]
    counted = 2 + len(options.competitors) * (options.rounds + 2)
    results: list[Result] = []
    with tqdm(total=counted * len(combinations), disable=None) as progress:
        for model, batch_size in combinations:
            results += compare(model, batch_size, options, progress)
    versions = {name: metadata.version(name) for name in ("tensorflow", "keras", "numpy")}
    stack = f"TensorFlow {versions['tensorflow']}, Keras {versions['keras']}, {os.cpu_count()} cores"
    text = table(results)
    print(f"{stack}\n\n{text}")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "versions": versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "steps": options.steps,
        "rounds": options.rounds,
        "results": [dataclasses.asdict(result) for result in results],
    }
    options.output.with_name(options.output.name + ".md").write_text(f"{stack}\n\n{text}\n")
    options.output.with_name(options.output.name + ".json").write_text(json.dumps(record, indent=1) + "\n")
    if importlib.util.find_spec("matplotlib") and any(result.ms for result in results):
        plot(results, options.output.with_name(options.output.name + ".png"), stack)


if __name__ == "__main__":
    main()
