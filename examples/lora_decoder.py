"""Fine-tunes a decoder of KerasHub by LoRA on the texts of many users, with privacy for each user.

    pip install keras-hub
    python examples/lora_decoder.py --data-dir FOLDER_WITH_SHAKESPEARE

The public model is a GPT-2 or Gemma of your size, made from a config and trained here on Shakespeare's plays, so
nothing is downloaded. If you pass neither --data-dir nor TFDPFL_DATA_DIR, it reads what Python's standard library says
about itself instead. Then LoRA learns from the users: each module of the installed packages stands for one, and its
docstrings are the user's texts. All texts of a user are one unit. A batch has a few random windows of each sampled
user, whose mean gradient is clipped once.

The program trains LoRA without and with privacy, each in a process of its own, on batches of the same mean size. It
prints the perplexity on users that were held out, tokens a second (of CPU time without a GPU), peak memory and the
privacy statement. On a GPU make it larger. This is the size of GPT-2:

    python examples/lora_decoder.py --layers 12 --heads 12 --width 768 --length 512 --users 8000 --batch-size 512 \
        --physical-batch-size 64 --bfloat16 --jit
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import tensorflow as tf

import tfdpfl
from tfdpfl import datasets

try:
    import keras_hub
except ImportError as error:
    raise SystemExit(f"This example needs KerasHub, and Keras 3: pip install keras-hub ({error})") from None

CHARACTERS = 128  # each is a token; what is not ASCII is a "?"
HELD_OUT = 0.1  # of the users
PARTS = ("public", "plain", "private")


def docstrings(path: Path) -> str:
    """What a module says about itself. The file is read, not imported."""
    return "\n".join(re.findall(r'"""(.+?)"""', path.read_text("utf-8", "ignore"), re.DOTALL))


def windows(text: str, length: int, most: int | None = None) -> np.ndarray:
    """int32 [n, length + 1]: windows that share no character but their ends, at most so many."""
    codes = np.frombuffer(text.encode("ascii", "replace"), np.uint8).astype(np.int32)
    starts = np.arange(0, len(codes) - length, length)[:most]
    return codes[starts[:, None] + np.arange(length + 1)]


def read_public(data_dir: str | None, length: int) -> np.ndarray:
    try:
        text = "\n\n".join(f"{who}:\n{said}" for who, said in datasets.load_shakespeare(data_dir).items())
    except FileNotFoundError as error:
        print(f"{error} The public text is that of the standard library.")
        text = "\n\n".join(docstrings(path) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    return windows(text, length)


def read_users(most: int, length: int) -> list[np.ndarray]:
    """The windows of each user who has any. Which modules are users does not depend on what they say."""
    paths = sorted(Path(np.__file__).parents[1].rglob("*.py"))
    users: list[np.ndarray] = []
    for i in np.random.default_rng(0).permutation(len(paths)):
        found = windows(docstrings(paths[i]), length, 64)
        if len(found):
            users.append(found)
        if len(users) == most:
            break
    return users


def inputs_and_next(rows: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What KerasHub's decoders are given, and the character that follows each."""
    given, following = rows[:, :-1], rows[:, 1:]
    return {"token_ids": given, "padding_mask": np.ones_like(given)}, following


def make_model(given: argparse.Namespace) -> tuple[tf.keras.Model, tf.keras.Model]:
    """The model that is trained, and its backbone.

    The `fit` of KerasHub's tasks maps the data once more, so nothing would know how its batches were sampled. A model
    of the same layers has the `fit` of Keras.
    """
    size = {"vocabulary_size": CHARACTERS, "num_layers": given.layers, "hidden_dim": given.width,
            "intermediate_dim": 4 * given.width}  # fmt: skip
    models = keras_hub.models
    if given.family == "gpt2":
        backbone = models.GPT2Backbone(**size, num_heads=given.heads, max_sequence_length=given.length, dropout=0.0)
        task = models.GPT2CausalLM(backbone=backbone, preprocessor=None)
    else:
        heads = {"num_query_heads": given.heads, "num_key_value_heads": 1, "head_dim": given.width // given.heads}
        backbone = models.GemmaBackbone(**size, **heads)
        task = models.GemmaCausalLM(backbone=backbone, preprocessor=None)
    return tf.keras.Model(task.input, task.output), backbone


def compile_model(model: tf.keras.Model, optimizer: object, given: argparse.Namespace) -> None:
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=given.jit)


def perplexity(model: tf.keras.Model, users: list[np.ndarray], given: argparse.Namespace) -> float:
    rows = np.concatenate([windows[: given.windows] for windows in users])
    return math.exp(model.evaluate(*inputs_and_next(rows), batch_size=given.physical_batch_size, verbose=0))


def peak_memory() -> float:
    """The largest memory of this process so far, in MiB: the GPU's, or what the operating system saw."""
    if tf.config.list_physical_devices("GPU"):
        return tf.config.experimental.get_memory_info("GPU:0")["peak"] / 2**20
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 2**10 if found else math.nan


class Clock(tf.keras.callbacks.Callback):
    """Measures the time of all batches but the first ones, in which TensorFlow traces: CPU time, or the GPU's."""

    def __init__(self, skipped: int):
        super().__init__()
        self.skipped, self.batches, self.started = skipped, 0, 0.0
        on_gpu = tf.config.list_physical_devices("GPU")
        self.now = time.perf_counter if on_gpu else time.process_time  # the second holds on a busy machine, too

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1
        self.ended = self.now()
        if self.batches == self.skipped:
            self.started = self.ended

    @property
    def seconds_a_batch(self) -> float:
        return (self.ended - self.started) / (self.batches - self.skipped)


def run(part: str, given: argparse.Namespace, folder: Path) -> None:
    """One training. It leaves what it measured in the folder; the public one leaves its weights there."""
    tf.keras.utils.set_random_seed(given.seed)  # of the weights; the batches and the noise stay secret
    tf.keras.mixed_precision.set_global_policy("mixed_bfloat16" if given.bfloat16 else "float32")
    users = read_users(given.users, given.length)
    held_out, users = users[: int(HELD_OUT * len(users))], users[int(HELD_OUT * len(users)) :]
    model, backbone = make_model(given)
    if part == "public":
        rows = read_public(given.data_dir, given.length)[: 32 * given.public_steps]
        compile_model(model, tf.keras.optimizers.Adam(2e-3), given)
        epochs = max(given.public_steps * 32 // len(rows), 1)
        model.fit(*inputs_and_next(rows), batch_size=32, epochs=epochs, verbose=2)
        model.save_weights(folder / "public.weights.h5")
        found = {"tokens": rows[:, 1:].size, "perplexity": perplexity(model, held_out, given)}
    else:
        model.load_weights(folder / "public.weights.h5")
        backbone.enable_lora(given.rank)
        ids = np.repeat(np.arange(len(users)), [len(windows) for windows in users])
        plan = tfdpfl.plan(
            *inputs_and_next(np.concatenate(users)), user_ids=ids, examples_per_user=given.windows,
            target_epsilon=given.epsilon, delta=given.delta, batch_size=given.batch_size, num_epochs=given.epochs,
            l2_norm_clip=given.clip, physical_batch_size=given.physical_batch_size,
        )  # fmt: skip
        parts = tfdpfl.data.declared_sampling(plan.batches).physical_batches
        if part == "private":
            optimizer, callbacks = plan.optimizer("adam", learning_rate=given.learning_rate), plan.callbacks
        else:
            accumulation = {"gradient_accumulation_steps": parts} if parts > 1 else {}
            optimizer, callbacks = tf.keras.optimizers.Adam(given.learning_rate, **accumulation), []
        compile_model(model, optimizer, given)
        before, clock = peak_memory(), Clock(skipped=parts)
        model.fit(plan.batches, epochs=plan.epochs, callbacks=[*callbacks, clock], verbose=2)
        tokens = given.batch_size * given.windows * given.length / parts
        found = {
            "trained": sum(int(np.prod(v.shape)) for v in model.trainable_variables), "all": model.count_params(),
            "tokens_a_second": tokens / clock.seconds_a_batch, "memory": peak_memory(), "memory_before": before,
            "perplexity": perplexity(model, held_out, given), "users": len(users), "windows": len(ids),
            "noise_multiplier": plan.noise_multiplier, "updates": plan.epochs * plan.steps_per_epoch,
            "statement": plan.statement() if part == "private" else "",
        }  # fmt: skip
    (folder / f"{part}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", help="a folder with the plays' input.txt; default: $TFDPFL_DATA_DIR")
    parser.add_argument("--family", choices=["gpt2", "gemma"], default="gpt2")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--length", type=int, default=64, help="characters of a window")
    parser.add_argument("--rank", type=int, default=8, help="of LoRA's matrices")
    parser.add_argument("--users", type=int, default=3000, help="the most; a tenth is held out")
    parser.add_argument("--windows", type=int, default=2, help="of a user in a batch")
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--batch-size", type=int, default=150, help="expected number of users in an update")
    parser.add_argument("--physical-batch-size", type=int, default=100, help="rows that are in memory at once")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--clip", type=float, default=0.1, help="L2 norm of one user's gradient")
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--public-steps", type=int, default=1000, help="updates of 32 windows on the public text")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16, and keep weights in float32")
    parser.add_argument("--jit", action="store_true", help="compile steps with XLA")
    parser.add_argument("--seed", type=int, default=0, help="of the weights")
    parser.add_argument("--quick", action="store_true", help="a tiny model, in one process: to see that it runs")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # of a child process
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.quick:
        given.layers, given.width, given.heads, given.length, given.rank = 1, 16, 2, 16, 2
        given.users, given.batch_size, given.physical_batch_size, given.epochs = 300, 40, 40, 1
        given.public_steps = 1
    if given.part:
        return run(given.part, given, given.folder)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for part in PARTS:
            if given.quick:
                run(part, given, folder)
            else:
                arguments = [*sys.argv, "--part", part, "--folder", name]
                subprocess.run([sys.executable, *arguments], check=True)
        public, plain, private = (json.loads((folder / f"{part}.json").read_text()) for part in PARTS)
    print(f"\n{private['trained']:,} of {private['all']:,} weights are trained, on {private['windows']:,} windows of "
          f"{private['users']:,} users\n\n{private['statement']}\n")  # fmt: skip
    print(f"perplexity on other users: {public['perplexity']:.2f} of the public model, {plain['perplexity']:.2f} with "
          f"plain LoRA, {private['perplexity']:.2f} with private LoRA")  # fmt: skip
    figures = {"tokens a second": "tokens_a_second"}
    if not given.quick:  # else both ran in one process
        figures["peak memory in MiB"] = "memory"
        figures["of it before the training"] = "memory_before"
    for what, name in figures.items():
        print(f"{what}: {plain[name]:,.0f} plain, {private[name]:,.0f} private: "
              f"{private[name] / plain[name]:.2f} times")  # fmt: skip


if __name__ == "__main__":
    main()
