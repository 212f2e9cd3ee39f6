"""Times one training step, and its memory, of DP training beside plain training, in this package and its peers.

    python benchmarks/step.py --models mnist_cnn --batches 250 --competitors keras3,tfdpfl3

Each competitor is built in a process of its own, by the Python of its own environment (`make bench` installs them), so
that its peak memory is its own. The rounds alternate between these processes, of which one runs and the others wait.
With --apart no two of them live at the same time. A step is one update of the weights on a batch that stays in memory.

Time is the CPU time of the process, which other work on the machine moves less than wall time. A ratio is the median
over rounds of the ratio to the plain step of the same framework within the round. Beside it stands the least wall time
of a step in all rounds, and its ratio. The first step, which traces, is one sample of CPU time; of Keras it is a `fit`
of one batch. A stock step is a private one without the package's own kernels: TensorFlow's ops alone. Growth is
the peak beyond that of a process that has only the framework and the batch in it. A competitor that fails, or runs out
of time or memory, is shown so; with BENCHMARK_DEBUG set its traceback is printed.

With --keep, what the output has of others stays. Rows that were measured before 24 November 2026 are of wall time (the
median, and the first step) and are marked so. With --pages, the tables of README.md and docs/figures.md are made anew
from the output, and nothing is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import os
import platform
import re
import resource
import selectors
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from _models import DEFAULT, MODELS
from tqdm import tqdm

HERE = Path(__file__).parent


class Competitor(NamedTuple):
    """What is compared: an environment under .venv, and what _worker.py makes there."""

    environment: str
    framework: str
    mode: str
    reference: str | None  # the plain step that it is held against


COMPETITORS = {
    "keras3": Competitor("keras3", "keras", "plain", None),
    "tfdpfl3": Competitor("keras3", "keras", "tfdpfl", "keras3"),
    "tfdpfl3_noiseless": Competitor("keras3", "keras", "noiseless", "keras3"),
    "tfdpfl3_stock": Competitor("keras3", "keras", "stock", "keras3"),
    "keras2": Competitor("tff", "keras", "plain", None),
    "tfdpfl2": Competitor("tff", "keras", "tfdpfl", "keras2"),
    "tfdpfl2_noiseless": Competitor("tff", "keras", "noiseless", "keras2"),
    "tfdpfl2_stock": Competitor("tff", "keras", "stock", "keras2"),
    "torch": Competitor("opacus", "torch", "plain", None),
    "opacus_hooks": Competitor("opacus", "torch", "hooks", "torch"),
    "opacus_ghost": Competitor("opacus", "torch", "ghost", "torch"),
    "jax": Competitor("jax", "jax", "plain", None),
    "jax_privacy": Competitor("jax", "jax", "private", "jax"),
    "tfp_model_fast": Competitor("tff", "keras", "DPModel fast", "keras2"),
    "tfp_model": Competitor("tff", "keras", "DPModel", "keras2"),
    "tfp_vectorized": Competitor("tff", "keras", "VectorizedDPKerasAdamOptimizer", "keras2"),
    "tfp": Competitor("tff", "keras", "DPKerasAdamOptimizer", "keras2"),
}


class Failed(Exception):
    """The worker gave no answer; the text is what the table shows."""


class Worker:
    """A competitor's process, seen from the parent."""

    def __init__(self, model: str, batch_size: int, entry: Competitor, timeout: float, memory_limit_mb: float):
        self._timeout, self._memory_limit_mb = timeout, memory_limit_mb
        python = HERE.parent / ".venv" / entry.environment / "bin" / "python"
        if not python.exists():
            raise Failed("not installed")
        command = [str(python), str(HERE / "_worker.py"), entry.framework, entry.mode, model, str(batch_size)]
        log = None if "BENCHMARK_DEBUG" in os.environ else subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
        )
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def ask(self, request: Any) -> Any:
        """Sends a request and returns its answer. Raises Failed."""
        try:
            self._process.stdin.write(f"{request}\n")
        except OSError:
            raise self._died() from None
        return self.answer()

    def answer(self) -> Any:
        """Waits for an answer within the limits of time and memory. Raises Failed."""
        end = time.monotonic() + self._timeout
        while not self._selector.select(0.1):
            if time.monotonic() > end:
                raise Failed(f"time out ({self._timeout:.0f} s)")
            if self._resident_mb() > self._memory_limit_mb:
                raise Failed("out of memory")
        line = self._process.stdout.readline()
        if not line:
            raise self._died()
        kind, value = json.loads(line)
        if kind == "failed":
            raise Failed(value)
        return value

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.communicate()
        self._selector.close()

    def _resident_mb(self) -> float:
        with contextlib.suppress(OSError):
            pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
            return int(pages) * resource.getpagesize() / 2**20
        return 0.0

    def _died(self) -> Failed:
        code = self._process.wait(5)
        return Failed("out of memory" if code == -9 else f"died ({code})")


@dataclasses.dataclass
class Result:
    """One line of the table. Times are in milliseconds, memory in MB; None where the competitor failed."""

    model: str
    batch_size: int
    competitor: str
    failure: str | None = None
    clock: str = "wall, earlier"  # of ms, ratios and the first step
    rounds_ms: list[float] = dataclasses.field(default_factory=list)
    ms: float | None = None
    time_ratio: float | None = None
    wall_ms: float | None = None
    wall_ratio: float | None = None
    noise_share: float | None = None
    first_s: float | None = None
    first_ratio: float | None = None
    peak_mb: float | None = None
    peak_ratio: float | None = None
    growth_mb: float | None = None
    growth_ratio: float | None = None
    command: str = ""

    @property
    def us_an_example(self) -> float | None:
        return self.ms and 1000 * self.ms / self.batch_size


def compare(model: str, batch_size: int, options: argparse.Namespace, progress: tqdm) -> list[Result]:
    """Measures all competitors on one model and batch size."""
    chosen = {name: COMPETITORS[name] for name in options.competitors}
    bare = {f"import {e.environment}": e._replace(mode="import") for e in chosen.values()}
    results = {name: Result(model, batch_size, name, clock="CPU") for name in [*bare, *chosen]}
    workers: dict[str, Worker] = {}
    steps: dict[str, int] = {}

    def attempt(name: str, action: Callable[[str], None]) -> None:
        progress.set_description(f"{model} {batch_size} {name}")
        if not results[name].failure:
            try:
                action(name)
            except Failed as failure:
                results[name].failure = str(failure)
                if worker := workers.pop(name, None):
                    worker.close()
        progress.update()

    def build(name: str) -> None:
        entry = {**bare, **chosen}[name]
        workers[name] = Worker(model, batch_size, entry, options.timeout, options.memory_limit)
        results[name].first_s, seconds = workers[name].answer()
        steps[name] = max(1, min(options.steps, int(options.round_seconds / max(seconds, 1e-6))))

    def run(name: str) -> None:
        result, (cpu, wall) = results[name], workers[name].ask(steps[name])
        result.rounds_ms.append(cpu * 1000)
        result.wall_ms = min(wall * 1000, result.wall_ms or math.inf)

    def measure_memory(name: str) -> None:
        results[name].peak_mb = workers[name].ask("peak")

    def alone(name: str) -> None:
        build(name)
        if name in chosen:
            run(name)
        measure_memory(name)
        workers.pop(name).close()

    try:
        if options.apart:
            for name in [*bare, *[*chosen] * options.rounds]:
                attempt(name, alone)
        else:
            for name in results:
                attempt(name, build)
            for number in range(options.rounds):  # whoever runs later in a round takes a little longer
                for name in reversed(chosen) if number % 2 else chosen:
                    attempt(name, run)
            for name in results:
                attempt(name, measure_memory)
    finally:
        for worker in workers.values():
            worker.close()
    for name, entry in chosen.items():
        _summarise(results[name], results.get(entry.reference or name), results[f"import {entry.environment}"])
    for name in chosen:
        quiet = results.get(f"{name}_noiseless")
        if quiet is not None and quiet.ms and results[name].ms:
            pairs = zip(quiet.rounds_ms, results[name].rounds_ms, strict=True)
            results[name].noise_share = max(0.0, 1 - statistics.median(q / r for q, r in pairs))
    return [results[name] for name in chosen]


def _summarise(result: Result, plain: Result | None, bare: Result) -> None:
    if result.failure:
        return
    result.ms = statistics.median(result.rounds_ms)
    if bare.peak_mb:
        result.growth_mb = result.peak_mb - bare.peak_mb
    if plain is None or plain.failure:
        return
    pairs = zip(result.rounds_ms, plain.rounds_ms, strict=True)
    result.time_ratio = statistics.median(ours / theirs for ours, theirs in pairs)
    result.wall_ratio = result.wall_ms / plain.wall_ms
    result.first_ratio = result.first_s / plain.first_s
    result.peak_ratio = result.peak_mb / plain.peak_mb
    if bare.peak_mb and plain.peak_mb > bare.peak_mb:
        result.growth_ratio = result.growth_mb / (plain.peak_mb - bare.peak_mb)


COLUMNS = {
    "ms a step": ("ms", "{:.2f}"),
    "µs an example": ("us_an_example", "{:.0f}"),
    "× plain": ("time_ratio", "{:.2f}"),
    "clock": ("clock", "{}"),
    "least wall ms": ("wall_ms", "{:.2f}"),
    "wall × plain": ("wall_ratio", "{:.2f}"),
    "noise's share": ("noise_share", "{:.0%}"),
    "first step s": ("first_s", "{:.1f}"),
    "first × plain": ("first_ratio", "{:.2f}"),
    "peak MB": ("peak_mb", "{:.0f}"),
    "peak × plain": ("peak_ratio", "{:.2f}"),
    "growth MB": ("growth_mb", "{:.0f}"),
    "growth × plain": ("growth_ratio", "{:.2f}"),
}


SHORT = {
    "mlp": "MLP", "mlp_256": "MLP, width 256", "mlp_4096": "MLP, width 4096", "mnist_cnn": "MNIST CNN",
    "cnn": "CNN, 3×3", "resnet": "ResNet-14", "transformer": "transformer",
    "embedding": "embedding", "lstm": "LSTM, unrolled",
    "lstm_rolled": "LSTM, loop", "tied_decoder": "decoder, tied",
    "tabular": "30 columns", "text_cnn": "text, Conv1D", "separable_cnn": "separable convolutions", "vgg": "VGG",
    "vision_transformer": "vision transformer", "unet": "U-Net", "bidirectional_gru": "GRU, both ways",
    "recommender": "10,000 items",
}  # fmt: skip
STEPS = {  # the competitors, as the tables name them
    "keras3": "Keras 3, plain",
    "tfdpfl3": "tfdpfl, Keras 3",
    "tfdpfl3_noiseless": "tfdpfl, Keras 3, no noise",
    "tfdpfl3_stock": "tfdpfl, Keras 3, no kernels in C",
    "keras2": "Keras 2, plain",
    "tfdpfl2": "tfdpfl, Keras 2",
    "tfdpfl2_noiseless": "tfdpfl, Keras 2, no noise",
    "tfdpfl2_stock": "tfdpfl, Keras 2, no kernels in C",
    "torch": "PyTorch, plain",
    "opacus_hooks": "Opacus, hooks",
    "opacus_ghost": "Opacus, ghost clipping",
    "jax": "JAX, plain",
    "jax_privacy": "jax-privacy",
    "tfp_model_fast": "TF Privacy, DPModel, fast clipping",
    "tfp_model": "TF Privacy, DPModel",
    "tfp_vectorized": "TF Privacy, vectorized optimizer",
    "tfp": "TF Privacy, drop-in optimizer",
}


def table(results: list[Result]) -> str:
    """The results in Markdown."""
    rows = [["model", "batch", "step", *COLUMNS], ["---"] * (3 + len(COLUMNS))]
    for result in results:
        values = [(getattr(result, field), form) for field, form in COLUMNS.values()]
        cells = ["–" if value is None else form.format(value) for value, form in values]
        cells[0] = result.failure or cells[0]
        rows.append([SHORT[result.model], str(result.batch_size), STEPS[result.competitor], *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"| {line} |" for line in lines)


def summary(results: list[Result]) -> str:
    """The geometric mean over models of each competitor's ratio, by clock and batch size, over the models that it
    did."""
    lines = []
    for name, size, clock in itertools.product(
        COMPETITORS, sorted({r.batch_size for r in results}), sorted({r.clock for r in results})
    ):
        of = [r for r in results if (r.competitor, r.batch_size, r.clock) == (name, size, clock)]
        ratios = [r.time_ratio for r in of if r.time_ratio]
        if COMPETITORS[name].reference and ratios:
            mean = math.exp(statistics.fmean(map(math.log, ratios)))
            models = f"{len(ratios)} models" if len(ratios) > 1 else "1 model"
            lines.append(f"- {STEPS[name]}, batch {size} ({clock}): {mean:.2f} × plain, geometric mean of {models}")
    return "\n".join(lines)


LABELS = {
    "mlp": "MLP 784-1024-1024-10", "mnist_cnn": "MNIST CNN", "resnet": "ResNet-14, GroupNormalization",
    "transformer": "transformer encoder, 4 layers, 128 tokens", "embedding": "50,000 words, embedding",
    "lstm": "LSTM, unrolled, 32 steps", "lstm_rolled": "the same LSTM as a loop, Keras's default",
    "tied_decoder": "decoder, tied weights",
}  # fmt: skip
PEERS = {"opacus_ghost": "Opacus ghost", "jax_privacy": "jax-privacy", "tfp": "TF Privacy drop-in"}
DRAWN = {"tfdpfl3": "tfdpfl, Keras 3", "tfdpfl2": "tfdpfl, Keras 2", **PEERS}


def page_table(results: list[Result], size: int, short: bool) -> str:
    """A batch size's ratios as the pages show them; ``short`` is README's."""
    found = {(r.model, r.competitor): r for r in results if r.batch_size == size}
    columns = []
    for number in "32":
        more = [("wall", "wall_ratio"), ("first", "first_ratio"), ("peak", "peak_ratio")][2 if short else 0 :]
        columns += [(head, f"tfdpfl{number}", field) for head, field in [(f"Keras {number}", "time_ratio"), *more]]
    columns += [(head, name, "time_ratio") for name, head in [*PEERS.items()][: 2 if short or size != 64 else 3]]
    # A star: of an earlier day, and of wall time. A column that has no other figures has it at its head.
    earlier = {name for _, name, _ in columns} - {name for (_, name), r in found.items() if r.clock == "CPU"}
    lines = [["model", *(head + "*" * (name in earlier) for head, name, _ in columns)], ["---"] * (1 + len(columns))]
    rows = [[found.get((model, name)) for _, name, _ in columns] for model in LABELS]
    for label, row in zip(LABELS.values(), rows, strict=True):
        cells = zip(row, columns, strict=True)
        lines.append([label, *(_cell(result, name, field, earlier) for result, (_, name, field) in cells)])
    ratios = [
        [value for r in of if r and (value := getattr(r, field))]
        for of, (_, _, field) in zip(zip(*rows, strict=True), columns, strict=True)
    ]
    lines.append(["*geometric mean*", *(f"*{statistics.geometric_mean(of):.2f}*" if of else "" for of in ratios)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cell(result: Result | None, name: str, field: str, earlier: set[str]) -> str:
    if result is None:
        return ""
    if result.failure:
        return re.sub(r" \(.*|:.*", "", result.failure)
    value = getattr(result, field)
    if value is None:
        return ""
    figure = f"{value:.2f}" if name not in PEERS else f"{value:.1f}" if value < 10 else f"{value:.0f}"
    return figure + "*" * (result.clock != "CPU" and name not in earlier)


def means_table(results: list[Result]) -> str:
    """Returns the geometric means over models of tfdpfl and of its peers, one row for each batch size."""
    shown = {name: head for name, head in DRAWN.items() if name != "tfp"}
    lines = [["batch size", *shown.values()], ["---"] * (1 + len(shown))]
    for size in (64, 256, 1024):
        found = [r for r in results if r.batch_size == size and r.model in LABELS and r.time_ratio]
        means = [statistics.geometric_mean(r.time_ratio for r in found if r.competitor == name) for name in shown]
        lines.append([str(size), *(f"{mean:.1f}" for mean in means)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def range_of(results: list[Result]) -> str:
    """Returns the least and the greatest ratio of CPU time at batch 256, over the models and both stacks."""
    ratios = [r.time_ratio for r in results if r.batch_size == 256 and r.competitor in ("tfdpfl3", "tfdpfl2")
              and r.model in LABELS and r.time_ratio]  # fmt: skip
    return f"{min(ratios):.2f} to {max(ratios):.2f}"


def pages(results: list[Result], root: Path = HERE.parent) -> dict[Path, str]:
    """Returns the text of the pages that show what is made from ``results``: tables, means, and a range of ratios."""
    made = {}
    for name in ("README.md", "docs/index.md", "docs/figures.md", "docs/faq.md"):
        path = root / name
        text = path.read_text()
        for mark, of in (
            (r"means", lambda _: means_table(results) + "\n"),
            (r"range", lambda _: range_of(results)),
            (r"step (\d+)", lambda found, name=name: page_table(results, int(found[2]), name == "README.md") + "\n"),
        ):
            text = re.sub(rf"(?s)(<!-- {mark} -->\n?).*?(<!-- end -->)",
                          lambda found, of=of: found[1] + of(found) + found[found.re.groups], text)  # fmt: skip
        made[path] = text
    return made


def plot(results: list[Result], path: Path, title: str) -> None:
    """Draws the ratio of each competitor to its plain step, one panel for each batch size; a failure has no bar."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch
    from matplotlib.ticker import FixedLocator, LogLocator, NullFormatter

    sizes = sorted({r.batch_size for r in results})
    models = list(dict.fromkeys(r.model for r in results))
    shown = [name for name in DRAWN if any(r.competitor == name and r.ms for r in results)]
    clocks = {r.clock for r in results if r.competitor in shown}
    least = 0.8 * min([1, *(r.time_ratio for r in results if r.time_ratio and r.competitor in shown)])
    figure, axes = pyplot.subplots(
        1, len(sizes), figsize=(1.5 + 3.3 * len(sizes), 1.2 + (0.1 + 0.14 * len(shown)) * len(models)), sharey=True,
        squeeze=False, layout="constrained",
    )  # fmt: skip
    for axis, size in zip(axes[0], sizes, strict=True):
        axis.set(xscale="log", xlabel="× plain step", title=f"batch {size}")
        for i, name in enumerate(shown):
            for r in [r for r in results if (r.competitor, r.batch_size) == (name, size)]:
                at, star = (
                    models.index(r.model) + 0.8 * (i + 0.5) / len(shown),
                    "*" * (r.clock != "CPU" and len(clocks) > 1),
                )
                if r.time_ratio:
                    bar = axis.barh(at, r.time_ratio - least, 0.8 / len(shown), left=least, color=f"C{i}")
                    axis.bar_label(bar, [f"{r.time_ratio:.2f}{star}"], padding=2, fontsize=6)
                elif r.failure:
                    why = "no memory" if "memory" in r.failure else "too slow" if "time out" in r.failure else "fails"
                    axis.text(1.02 * least, at, f"{why}{star}", color=f"C{i}", fontsize=6, va="center")
        axis.axvline(1, color="0.5", linewidth=0.8)
        axis.set_yticks([i + 0.4 for i in range(len(models))], [SHORT[model] for model in models])
        axis.margins(x=0.2)
        axis.set_xlim(left=least)
        narrow = axis.get_xlim()[1] < 5
        axis.xaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 4]) if narrow else LogLocator())
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter(NullFormatter())
    axes[0][0].invert_yaxis()
    if len(shown) > 1:
        patches = [Patch(color=f"C{i}") for i in range(len(shown))]
        figure.legend(
            patches, [DRAWN[name] for name in shown], fontsize=8, loc="outside lower center", ncols=len(shown)
        )
    stars = "CPU time" if "CPU" in clocks else "wall time"
    stars += "; *: wall time on earlier days" * (len(clocks) > 1)
    figure.suptitle(f"{title}: a private step divided by a plain step ({stars})", fontsize=10)
    figure.savefig(path, dpi=130)


def _versions(environments: set[str]) -> dict[str, str]:
    """What is installed where."""
    wanted = ("tensorflow", "keras", "tensorflow-privacy", "torch", "opacus", "jax", "jax-privacy")
    found = {}
    for environment in sorted(environments):
        libraries = (HERE.parent / ".venv" / environment / "lib").glob("python3*/site-packages/*.dist-info")
        pairs = [p.name.removesuffix(".dist-info").replace("_", "-").rsplit("-", 1) for p in libraries]
        found[environment] = ", ".join(f"{name} {version}" for name, version in sorted(pairs) if name in wanted)
    return found


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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names(MODELS), default=DEFAULT, help=f"of {', '.join(MODELS)}")
    parser.add_argument("--batches", type=lambda text: [int(size) for size in text.split(",")], default=[64, 256, 1024])
    parser.add_argument(
        "--competitors", type=names(COMPETITORS), default=list(COMPETITORS), help=f"of {', '.join(COMPETITORS)}"
    )
    parser.add_argument("--steps", type=int, default=30, help="most steps a round")
    parser.add_argument(
        "--round-seconds", type=float, default=0.5, help="CPU time; slow competitors do fewer steps, at least one"
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for a build or a round")
    parser.add_argument("--memory-limit", type=float, default=0.6 * available_mb, help="MB for one competitor")
    parser.add_argument(
        "--apart", action="store_true", help="one process at a time, a new one each round: where two do not fit"
    )
    parser.add_argument(
        "--keep", action="store_true", help="what the output has of other models, batches and competitors stays"
    )
    parser.add_argument(
        "--pages", action="store_true", help="measure nothing; draw the picture and fill the pages' tables again"
    )
    parser.add_argument("--output", type=Path, default=HERE / "results" / "step", help="where tables and plots go")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measures, prints the tables, and writes them, all in one JSON file and a picture, after each combination."""
    options = _options(arguments)
    if options.pages:
        kept = _kept(options.output, [], [])
        for path, text in pages(kept).items():
            path.write_text(text)
        plot(kept, options.output.with_name(options.output.name + ".png"), f"{os.cpu_count()} cores")
        return
    combinations = [(model, size) for size in options.batches for model in options.models]
    environments = {COMPETITORS[name].environment for name in options.competitors}
    visits = (1, options.rounds) if options.apart else (2, options.rounds + 2)  # of a bare process, of a competitor
    counted = visits[0] * len(environments) + visits[1] * len(options.competitors)
    versions = _versions({entry.environment for entry in COMPETITORS.values()})
    options.output.parent.mkdir(parents=True, exist_ok=True)
    models, order = list(MODELS), list(COMPETITORS)
    results = _kept(options.output, combinations, options.competitors) if options.keep else []
    with tqdm(total=counted * len(combinations), disable=None) as progress:
        for model, batch_size in combinations:
            found = compare(model, batch_size, options, progress)
            for result in found:
                result.command = shlex.join(["python", "benchmarks/step.py", *(arguments or sys.argv[1:])])
            progress.write(table(found))
            results = sorted(
                results + found, key=lambda r: (r.batch_size, models.index(r.model), order.index(r.competitor))
            )
            _write(options.output, results, versions)
    print(f"\n{summary(results)}")


def _kept(output: Path, combinations: list[tuple[str, int]], competitors: list[str]) -> list[Result]:
    """What an earlier run measured and this one will not. Its ratios are to the plain step of its own run."""
    path = output.with_name(output.name + ".json")
    if not path.exists():
        return []
    earlier = [Result(**found) for found in json.loads(path.read_text())["results"]]
    earlier = [r for r in earlier if r.competitor in COMPETITORS]
    return [r for r in earlier if (r.model, r.batch_size) not in combinations or r.competitor not in competitors]


def _write(output: Path, results: list[Result], versions: dict[str, str]) -> None:
    record = {
        "versions": versions,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "results": [dataclasses.asdict(result) for result in results],
    }
    output.with_name(output.name + ".json").write_text(json.dumps(record, indent=1) + "\n")
    stack = f"{os.cpu_count()} cores; " + "; ".join(f"{k}: {v}" for k, v in versions.items())
    commands = "\n".join(f"- `{command}`" for command in dict.fromkeys(r.command for r in results))
    names = "The commands call models and competitors by the names that the program accepts, or accepted then."
    text = "\n\n".join([stack, table(results), summary(results), names, commands])
    output.with_name(output.name + ".md").write_text(f"{text}\n")
    if any(result.ms for result in results):
        plot(results, output.with_name(output.name + ".png"), stack.split(";")[0])


if __name__ == "__main__":
    main()
