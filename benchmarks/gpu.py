"""Measures a machine in one command: private steps beside plain ones on each device, and whether they are right.

    python benchmarks/gpu.py                    # the whole table; half an hour on a GPU
    python benchmarks/gpu.py --quick            # two small models; a few minutes on two cores
    python benchmarks/gpu.py --devices GPU --parts steps --minutes 5 --output gpu.md   # what five minutes allow

Run it where TensorFlow sees the device that you want to know about. For a machine without internet, download the wheels
elsewhere, then install from the folder:

    pip download -d wheels . -r requirements/keras3.txt 'tensorflow[and-cuda]==2.21.*' keras-hub
    pip install --no-index --find-links wheels -r requirements/keras3.txt 'tensorflow[and-cuda]' keras-hub tfdpfl

The report has five parts: the machine; the noise's scale, tested on both sides; norms and clipped sums against one
example at a time, to 1e-4; a private fine-tuning of a KerasHub model by LoRA; a plain and a private step (Adam, noise
multiplier 1.1) with and without XLA, in float32 and in bfloat16. A device that TensorFlow does not see has rows that
say "not measured". Then XLA on the CPU is the nearest thing. The file of `--output` is written after each row.

Times are medians over rounds that alternate between plain and private: wall time on a GPU, CPU time on a CPU. Plain
LSTMs use cuDNN's kernel where Keras does; private ones are built with `use_cudnn=False`.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import scipy.stats
import tensorflow as tf
from _models import MODELS

import tfdpfl
from tfdpfl import native
from tfdpfl.clipping import clipped_gradients

CLIP, NOISE_MULTIPLIER = 1.0, 1.1
TOLERANCE = 1e-4
FULL, QUICK = ["mlp", "mnist_cnn", "resnet", "transformer", "embedding", "lstm"], ["mlp", "mnist_cnn"]
POLICIES = ["float32", "mixed_bfloat16"]
PARTS = ["machine", "noise", "sums", "lora", "steps"]
NOT_MEASURED = "not measured"
NOISE_HEADER = ["device", "generator", "deviation over wanted", "KS p", "beyond 4 deviations", "right"]
SUMS_HEADER = ["device", "layers", "XLA", "largest error", "right"]
STEPS_HEADER = ["device", "model", "batch", "type", "XLA", "plain ms", "private ms", "× plain", "first plain s",
                "first private s"]  # fmt: skip
KERAS = tf.keras


def describe_machine() -> Iterator[str]:
    """Yields lines on the software, the devices and the kernels."""
    kernels = native.kernels()
    yield f"- tfdpfl {tfdpfl.__version__}, TensorFlow {tf.__version__}, Python {platform.python_version()}"
    yield f"- {os.cpu_count()} cores, {platform.machine()}; kernels: {kernels.instructions or kernels.missing}"
    for device in tf.config.list_physical_devices():
        details = tf.config.experimental.get_device_details(device) if device.device_type == "GPU" else {}
        yield f"- {device.name} {details.get('device_name', '')}".rstrip()


def devices(kinds: list[str]) -> list[tuple[str, str | None]]:
    """Returns the kinds of devices that rows are about, with TensorFlow's name of each, None if there is none."""
    return [(kind, f"/{kind}:0" if tf.config.list_physical_devices(kind) else None) for kind in kinds]


def steps_on(device: str) -> Any:
    """Returns where `fit` runs on a device: a GPU is TensorFlow's default, and the pipeline of its data the host's."""
    return tf.device(None if "GPU" in device else device)


def without_cudnn(model: Any) -> Any:
    """Returns the model, whose LSTMs will run in TensorFlow's own ops: cuDNN's give no example's gradient."""
    for layer in model.layers:
        if getattr(layer, "use_cudnn", None):
            layer.use_cudnn, layer.supports_jit = False, True
    return model


def make_table(header: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


# Steps.


class Training:
    """A compiled model whose steps can be timed."""

    def __init__(self, model: Any, optimizer: Any, batch: tuple[np.ndarray, np.ndarray], xla: bool):
        loss = KERAS.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model = model
        self.model.compile(optimizer=optimizer, loss=loss, jit_compile=xla)
        data = tf.data.Dataset.from_tensors(batch).repeat()
        self.batches = iter(data)
        started = time.perf_counter()
        self.model.fit(data.take(1), verbose=0)
        self.first = time.perf_counter() - started

    def seconds(self, steps: int, clock: Callable[[], float]) -> float:
        """Returns the time of a step, the last of which has ended."""
        started = clock()
        for _ in range(steps):
            logs = self.model.train_function(self.batches)
        for value in tf.nest.flatten(logs):
            float(value)  # waits for the device
        return (clock() - started) / steps


def compare_steps(name: str, size: int, xla: bool, clock: Callable[[], float], options: Any) -> list[str]:
    """Returns the cells of a row: times of a plain and of a private step, their ratio, and those of first steps."""
    batch = MODELS[name].batch(size)
    optimizers = [KERAS.optimizers.Adam(), tfdpfl.DPAdam(l2_norm_clip=CLIP, noise_multiplier=NOISE_MULTIPLIER)]
    models = MODELS[name].build(KERAS), without_cudnn(MODELS[name].build(KERAS))
    plain, private = (Training(m, optimizer, batch, xla) for m, optimizer in zip(models, optimizers, strict=True))
    both = plain, private
    steps = max(1, min(options.steps, int(options.round_seconds / max(private.seconds(1, time.perf_counter), 1e-6))))
    rounds = [[each.seconds(steps, clock) for each in both] for _ in range(options.rounds)]
    times = [statistics.median(column) for column in zip(*rounds, strict=True)]
    ratio = statistics.median(ours / theirs for theirs, ours in rounds)
    return [*(f"{1000 * t:.2f}" for t in times), f"{ratio:.2f}", *(f"{each.first:.1f}" for each in both)]


def step_rows(options: Any) -> Iterator[list[str]]:
    """Yields the rows of the table of steps, until the time is over. A row that fails says how."""
    for size, xla, policy in itertools.product(options.batches, options.xla, POLICIES):
        for name, (kind, device) in itertools.product(options.models, devices(options.devices)):
            row = [kind, name, str(size), policy.removeprefix("mixed_"), xla]
            if time.monotonic() > options.deadline:
                return
            if device is None:
                yield [*row, NOT_MEASURED, "", "", "", ""]
                continue
            KERAS.backend.clear_session()
            KERAS.mixed_precision.set_global_policy(policy)
            clock = time.process_time if kind == "CPU" else time.perf_counter
            try:
                with steps_on(device):
                    cells = compare_steps(name, size, xla == "yes", clock, options)
            except Exception as error:
                cells = [f"fails: {type(error).__name__}", "", "", "", ""]
                print(error, file=sys.stderr)
            finally:
                KERAS.mixed_precision.set_global_policy("float32")
            yield [*row, *cells]


# Exactness.


def small_models() -> dict[str, tuple[Any, np.ndarray]]:
    """Returns models of each family of layers, with a batch."""
    layers, rng = KERAS.layers, np.random.default_rng(0)
    image = rng.normal(size=(8, 14, 14, 3)).astype("float32")
    words = rng.integers(0, 50, (8, 12)).astype("int32")
    series = rng.normal(size=(8, 10, 6)).astype("float32")
    tokens = KERAS.Input((12,), dtype="int32")
    x = layers.Embedding(50, 16)(tokens)
    x = layers.Add()([x, layers.MultiHeadAttention(2, 8)(x, x)])
    attention = KERAS.Model(tokens, layers.Dense(3)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))))
    convolutions = [layers.Conv2D(8, 3, strides=2, padding="same", activation="tanh"), layers.GroupNormalization(4),
                    layers.DepthwiseConv2D(3), layers.Conv2D(16, 3), layers.GlobalAveragePooling2D()]  # fmt: skip
    return {
        "dense": (KERAS.Sequential([layers.Dense(20, "tanh"), layers.Dense(3)]), series[:, 0]),
        "convolutions": (KERAS.Sequential([*convolutions, layers.Dense(3)]), image),
        "attention": (attention, words),
        "LSTM": (without_cudnn(KERAS.Sequential([layers.LSTM(12), layers.Dense(3)])), series),
    }


def largest_error(model: Any, x: np.ndarray, device: str, xla: bool) -> float:
    """Returns how far norms and clipped sums are from those of one example at a time, relative to their largest."""
    losses = lambda images: tf.reduce_mean((model(images) - tf.constant([1.0, -2.0, 0.5])) ** 2, 1)  # noqa: E731
    losses(tf.constant(x))
    variables = [getattr(v, "value", v) for v in model.trainable_variables]
    with tf.device("/CPU:0"):
        rows = []
        for i in range(len(x)):
            with tf.GradientTape() as tape:
                loss = losses(tf.constant(x[i : i + 1]))[0]
            found = tape.gradient(loss, variables, unconnected_gradients="zero")
            rows.append([np.asarray(tf.convert_to_tensor(g), np.float64) for g in found])
    gradients = [np.stack(column) for column in zip(*rows, strict=True)]
    norms = np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))
    clip = float(np.median(norms))
    factors = np.minimum(1, clip / norms)

    @tf.function(jit_compile=xla)
    def clipped(x: tf.Tensor) -> Any:
        made = clipped_gradients(tf.reduce_mean(losses(x)), variables, clip)
        return made.norms, made.sum

    with tf.device(device):
        got_norms, got = clipped(tf.constant(x))
    pairs = [(got_norms, norms), *((g, np.tensordot(factors, w, 1)) for g, w in zip(got, gradients, strict=True))]
    scale = max(np.abs(want).max() for _, want in pairs[1:])
    errors = [np.abs(np.asarray(tf.convert_to_tensor(g)) - want).max() for g, want in pairs]
    return max(errors[0] / norms.max(), max(errors[1:]) / scale)


def exactness_rows(kinds: list[str]) -> Iterator[list[str]]:
    """Yields the rows of the table of errors."""
    tf.config.experimental.enable_tensor_float_32_execution(False)
    for kind, device in devices(kinds):
        for name, (model, x) in small_models().items():
            for xla in (False, True):
                row = [kind, name, "yes" if xla else "no"]
                if device is None:
                    yield [*row, NOT_MEASURED, ""]
                    continue
                try:
                    error = largest_error(model, x, device, xla)
                    yield [*row, f"{error:.1e}", "yes" if error <= TOLERANCE else "NO"]
                except Exception as error:
                    print(error, file=sys.stderr)
                    yield [*row, f"fails: {type(error).__name__}", "NO"]
    tf.config.experimental.enable_tensor_float_32_execution(True)


# Noise.


def noise_rows(kinds: list[str], count: int) -> Iterator[list[str]]:
    """Yields the rows of the table of noise: its scale is accepted, and two thirds and three halves of it are not."""
    stddev = 2.5
    for kind, device in devices(kinds):
        if device is None:
            yield [kind, NOT_MEASURED, "", "", "", ""]
            continue
        source = tfdpfl.noise.Source()
        draw = tf.function(lambda source=source: source.gaussian([[count]], stddev)[0])
        with tf.device(device):
            drawn = [draw().numpy().astype(np.float64) for _ in range(2)]
        values = drawn[0]

        def is_accepted(scale: float, values: np.ndarray = values) -> bool:
            square = float((values**2).sum()) / scale**2
            tail = min(scipy.stats.chi2.cdf(square, count), scipy.stats.chi2.sf(square, count))
            return 2 * tail > 1e-6

        shape = scipy.stats.kstest(values / stddev, "norm").pvalue
        far = int((np.abs(values) > 4 * stddev).sum())
        right = is_accepted(stddev) and not is_accepted(stddev * 2 / 3) and not is_accepted(stddev * 3 / 2)
        right = right and shape > 1e-6 and not np.array_equal(*drawn)
        expected = 2 * scipy.stats.norm.sf(4) * count
        yield [kind, source.generator, f"{values.std() / stddev:.5f}", f"{shape:.3f}", f"{far} of {expected:.0f}",
               "yes" if right else "NO"]  # fmt: skip


# Fine-tuning.


def fine_tune(device: str, quick: bool) -> str:
    """Trains the LoRA weights of a small model of KerasHub, made from a config, and returns what it took."""
    import keras_hub

    layers, width = (1, 32) if quick else (4, 256)
    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=500, num_layers=layers, num_query_heads=4, num_key_value_heads=1, hidden_dim=width,
        intermediate_dim=2 * width, head_dim=width // 4,
    )  # fmt: skip
    backbone.enable_lora(rank=4)
    tokens = np.random.default_rng(0).integers(0, 500, (8, 16)).astype("int32")
    inputs = {"token_ids": KERAS.Input((16,), dtype="int32"), "padding_mask": KERAS.Input((16,), dtype="int32")}
    model = KERAS.Model(inputs, KERAS.layers.Dense(2)(backbone(inputs)[:, -1]))
    x, y = {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, tokens[:, 0] % 2
    with steps_on(device):
        training = Training(model, tfdpfl.DPAdam(l2_norm_clip=CLIP, noise_multiplier=NOISE_MULTIPLIER), (x, y), False)
        seconds = training.seconds(5, time.perf_counter)
    weights = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    return f"{weights} trainable weights, first step {training.first:.1f} s, then {1000 * seconds:.1f} ms a step"


def fine_tuning_rows(kinds: list[str], quick: bool) -> Iterator[list[str]]:
    """Yields the rows on KerasHub."""
    for kind, device in devices(kinds):
        if importlib.util.find_spec("keras_hub") is None:
            yield [kind, f"{NOT_MEASURED}: keras_hub is not installed"]
        elif device is None:
            yield [kind, NOT_MEASURED]
        else:
            try:
                yield [kind, fine_tune(device, quick)]
            except Exception as error:
                yield [kind, f"fails: {type(error).__name__}: {str(error)[:200]}"]


def main(arguments: list[str] | None = None) -> int:
    """Prints the report, and writes it. Returns 1 if something was not right, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two small models, one batch size, few rounds")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--devices", type=lambda text: text.split(","), default=["GPU", "CPU"], help="GPU, CPU")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="after these, no row of steps begins")
    parser.add_argument("--models", type=lambda text: text.split(","), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--batches", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--xla", type=lambda text: text.split(","), default=["no", "yes"], help="no, yes")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--steps", type=int, default=30, help="most steps a round")
    parser.add_argument("--round-seconds", type=float, help="slow models do fewer steps a round, at least one")
    parser.add_argument("--output", type=Path, help="a Markdown file for the report")
    options = parser.parse_args(arguments)
    tf.get_logger().setLevel("ERROR")
    warnings.simplefilter("ignore", UserWarning)
    quick, kinds = options.quick, options.devices
    options.deadline = time.monotonic() + 60 * options.minutes
    options.models = options.models or (QUICK if quick else FULL)
    options.batches = options.batches or ([64] if quick else [64, 256, 1024])
    options.rounds = options.rounds or (3 if quick else 7)
    options.round_seconds = options.round_seconds or (0.1 if quick else 0.5)
    lines: list[str] = []

    def write(text: str) -> None:
        print(text, flush=True)
        lines.append(text)
        if options.output:
            options.output.write_text("\n".join(lines) + "\n")

    def write_rows(part: str, title: str, header: list[str], rows: Iterator[list[str]]) -> list[list[str]]:
        if part not in options.parts:
            return []
        write(f"\n## {title}\n\n{make_table(header, [])}")
        made = []
        for row in rows:
            write("| " + " | ".join(row) + " |")
            made.append(row)
        return made

    write(f"# `python benchmarks/gpu.py {' '.join(sys.argv[1:])}`, {time.strftime('%Y-%m-%d')}\n")
    for line in describe_machine() if "machine" in options.parts else ():
        write(line)
    accepted = "Noise: its scale is accepted, and two thirds and three halves of it are not"
    sums = f"Clipped sums against one example at a time, to {TOLERANCE:g}"
    checked = write_rows("noise", accepted, NOISE_HEADER, noise_rows(kinds, 1 << (18 if quick else 22)))
    checked += write_rows("sums", sums, SUMS_HEADER, exactness_rows(kinds))
    tuned = fine_tuning_rows(kinds, quick)
    write_rows("lora", "LoRA of a KerasHub model", ["device", "private fine-tuning"], tuned)
    write_rows("steps", "Steps", STEPS_HEADER, step_rows(options))
    return int(any(row[-1] == "NO" for row in checked))


if __name__ == "__main__":
    sys.exit(main())
