"""Writes docs/combinations.md: `python tests/combinations.py` tries each pair of features of an optimizer.

Of pairs that work on one device it takes two steps. `test_combinations.py` compares the page with what is refused now.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import tfdpfl
from tfdpfl.noise import BLT, Banded, BandedInverse, Tree
from tfdpfl.optimizers import _privatizer, _replicas

PAGE = Path(__file__).parents[1] / "docs" / "combinations.md"
ROWS = 4

_Schedule = tf.keras.optimizers.schedules.PiecewiseConstantDecay
_USES = {"min_separation": 2, "max_participations": 2}


@contextlib.contextmanager
def _as_if(replicas: int, workers: int) -> Iterator[None]:
    """A strategy's replicas, for `check_replicas` alone."""
    seen = {"number": replicas, "workers": workers, "among_replicas": True}
    with contextlib.ExitStack() as stack:
        for name, value in seen.items():
            stack.enter_context(mock.patch.object(_replicas, name, lambda value=value: value))
        yield


@contextlib.contextmanager
def _xla() -> Iterator[None]:
    with mock.patch.object(_privatizer, "compiled", lambda: True):
        yield


# Each feature: the arguments of an optimizer, or the context of its step.
FEATURES: dict[str, dict[str, Any] | Callable[[], contextlib.AbstractContextManager]] = {
    "`secure_noise`": {"secure_noise": True},
    "`Tree` noise": {"noise": Tree()},
    "`Banded` noise": {"noise": Banded(bands=2, **_USES)},
    "`BandedInverse` noise": {"noise": BandedInverse(bands=2, **_USES)},
    "`BLT` noise": {"noise": BLT(**_USES)},
    "`AdaFEST`": {"sparse": tfdpfl.AdaFEST(threshold=0.5, clip=1.0)},
    "accumulation, physical batches": {"gradient_accumulation_steps": 2},
    "users, copies": {"rows_per_unit": 2},
    "microbatches": {"num_microbatches": ROWS},
    "`AdaptiveClip`": {"l2_norm_clip": tfdpfl.AdaptiveClip(initial=1.0)},
    "`PerLayerClip`": {"l2_norm_clip": tfdpfl.PerLayerClip(1.0)},
    "`AutomaticClip`": {"l2_norm_clip": tfdpfl.AutomaticClip(1.0)},
    "schedule of noise": {"noise_multiplier": _Schedule([5], [1.0, 2.0])},
    "schedule of clips": {"l2_norm_clip": _Schedule([5], [1.0, 0.5])},
    "replicas": lambda: _as_if(2, 1),
    "workers": lambda: _as_if(4, 2),
    "XLA": _xla,
}

# Why a pair is refused: what the refusal says, what is missing, and the reason. A refusal must match one of them.
REASONS: list[tuple[str, str, str]] = [
    (r"a step has one kind of noise", "choose one", "A step has one kind of noise."),
    (r"both state whose mean", "choose one", "Both state whose mean gradient is clipped."),
    (r"which XLA does not compile", "platform", "XLA does not compile a sum over replicas inside a step."),
    (r"draws on the host's CPU", "platform", "XLA has no generator for discrete noise. Python draws it."),
    (
        r"AdaFEST in a step that XLA compiles", "platform",
        "XLA must know the number of rows before the step runs, and `AdaFEST` knows it during the step.",
    ),
]  # fmt: skip


def _made(*features: str) -> Any:
    arguments: dict[str, Any] = {"l2_norm_clip": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4.0}
    for name in features:
        given = FEATURES[name]
        arguments.update(given if isinstance(given, dict) else {})
    return tfdpfl.DPSGD(learning_rate=0.1, **arguments)


def step(*features: str) -> None:
    """Takes a step with these features, on one device."""
    rows, jit = "`AdaFEST`" in features, "XLA" in features
    start = [tf.keras.Input((1,), dtype="int32"), tf.keras.layers.Embedding(20, 3), tf.keras.layers.Flatten()]
    model = tf.keras.Sequential([*(start if rows else [tf.keras.Input((4,))]), tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(_made(*features), loss, jit_compile=jit)
    x = np.arange(ROWS, dtype="int32")[:, None] if rows else np.ones((ROWS, 4), "float32")
    for _ in range(2):
        model.train_on_batch(x, np.arange(ROWS) % 3)


def refusal(one: str, other: str) -> str:
    """What is said of a pair before its first step, "" if nothing is."""
    given = [FEATURES[name] for name in (one, other)]
    if all(isinstance(arguments, dict) for arguments in given) and set(given[0]) & set(given[1]):
        return "the same argument"
    try:
        optimizer = _made(one, other)
        with contextlib.ExitStack() as stack:
            for context in given:
                if callable(context):
                    stack.enter_context(context())
            optimizer._dp.check_replicas()
        if "XLA" in (one, other) and {"`secure_noise`", "`AdaFEST`"} & {one, other}:
            step(one, other)
    except ValueError as error:  # a PrivacyError is one
        return str(error)
    return ""


def pairs() -> dict[tuple[str, str], str]:
    """The refusal of each pair that is not of one argument."""
    found = {pair: refusal(*pair) for pair in itertools.combinations(FEATURES, 2)}
    return {pair: said for pair, said in found.items() if said != "the same argument"}


def reason(said: str) -> int:
    """The number of the reason for a refusal."""
    return next(i for i, (pattern, *_) in enumerate(REASONS, 1) if re.search(pattern, said))


INTRO = """# Combinations

This page shows which features of an optimizer work together. A test compares the page with what the optimizers accept
and refuse.

- `✓`: the pair is accepted. The script below also took two steps with each such pair on one device. For replicas and
  workers it only calls the checks.
- A number: the pair is refused before the first step, for the [reason](#reasons) of this number.
- `·`: both are values of one argument, so you cannot give both.

Every feature works with independent noise, with a number as clip, and on one device. On Keras 3 no feature works on
several workers.

Some features belong to the data, but the optimizer needs an argument for them. Look for this argument's column:

- If you sample users or copies, the optimizer needs `rows_per_unit`. The column is "users, copies".
- If you cut batches into physical batches, it needs `gradient_accumulation_steps`. The column is "accumulation,
  physical batches".

The page does not cover how batches are sampled. [Sampling](training.md#sampling) lists all kinds, and
[Noise](noise.md#which-pair-of-noise-and-sampling) shows which kinds fit correlated noise.

If you change an optimizer in a clone of the repository, write this page anew by this command:

    $ python tests/combinations.py

## Pairs
"""


def page() -> str:
    """The page, of the pairs as they are now."""
    found, names = pairs(), list(FEATURES)
    used = sorted({reason(said) for said in found.values() if said})
    number = {i: str(n) for n, i in enumerate(used, 1)}

    def cell(one: str, other: str) -> str:
        said = found.get((one, other), found.get((other, one)))
        if one == other or said is None:
            return "·"
        return number[reason(said)] if said else "✓"

    rows = [["feature", *names[1:]]] + [
        [one, *(cell(one, other) if i < j else "" for j, other in enumerate(names[1:], 1))]
        for i, one in enumerate(names[:-1])
    ]
    reasons = [["number", "what is missing", "reason"]] + [[number[i], *REASONS[i - 1][1:]] for i in used]

    def table(rows: list[list[str]]) -> str:
        return "\n".join("| " + " | ".join(row) + " |" for row in [rows[0], ["---"] * len(rows[0]), *rows[1:]])

    return "\n".join([INTRO, table(rows), "", "## Reasons", "", table(reasons), ""])


def main() -> None:
    for (one, other), said in pairs().items():
        if not said and not {"replicas", "workers"} & {one, other}:
            step(one, other)
            print(one, other, flush=True)
    PAGE.write_text(page(), "utf-8")


if __name__ == "__main__":
    main()
