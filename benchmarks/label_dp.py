"""How fast labels are released: 60,000 × 10 classes by every transformer, ten million labels, and the notebook's loop.

    python benchmarks/label_dp.py [--repeats 7]

Times are the fastest of the repeats, fit included (but not KMeans's clustering, which any prior would need).
"""

from __future__ import annotations

import argparse
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from tfdpfl.label_dp import ALIBI, RandomizedResponse, RandomizedResponseWithPrior, RROnBins, UnbiasedRandomizer

N, CLASSES = 60_000, 10


def fastest(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def one_at_a_time(priors: np.ndarray, y: np.ndarray, epsilon: float) -> np.ndarray:
    """What the public notebook does: a loop in Python that finds k and draws for each example by itself. (Its off by
    one in k is put right, which costs no time.)"""
    rng = np.random.default_rng()
    released = np.empty_like(y)
    other = np.exp(-epsilon)
    for i, label in enumerate(y):
        order = np.flipud(np.argsort(priors[i]))
        falling = priors[i][order]
        truth = [np.sum(falling[: k + 1]) / (1 + k * other) for k in range(len(falling))]
        k = int(np.argmax(truth)) + 1
        p = np.zeros_like(falling) + other / (1 + (k - 1) * other)
        p[label] = 1 / (1 + (k - 1) * other)
        p[order[k:]] = 0
        p /= np.sum(p)
        released[i] = rng.choice(len(falling), p=p)
    return released


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, N)
    few = rng.dirichlet(np.ones(CLASSES), 200)[rng.integers(0, 200, N)]
    many = rng.dirichlet(np.ones(CLASSES), N)
    x = np.zeros((N, 1))  # what is not looked at: the priors are given
    grid = (np.arange(100.0), np.full(100, 0.01))
    coarse = (np.arange(32.0), np.full(32, 1 / 32))
    bins, unbiased = RROnBins(1.0, prior=grid).fit([0]), UnbiasedRandomizer(1.0, prior=coarse).fit([0])
    rows = {
        "RandomizedResponse": (lambda: RandomizedResponse(1.0, CLASSES).fit_transform(y), 5),
        "RandomizedResponseWithPrior, 200 priors": (
            lambda: RandomizedResponseWithPrior(1.0, few, CLASSES).fit_transform(x, y),
            30,
        ),
        "RandomizedResponseWithPrior, 60,000 priors": (
            lambda: RandomizedResponseWithPrior(1.0, many, CLASSES).fit_transform(x, y),
            1500,
        ),
        "ALIBI": (lambda: ALIBI(1.0, CLASSES).fit_transform(y), None),
        "RROnBins, plan for 100 values": (lambda: RROnBins(1.0, prior=grid).fit([0]), None),
        "RROnBins, release": (lambda: bins.transform(y), None),
        "UnbiasedRandomizer, plan for 32 values": (lambda: UnbiasedRandomizer(1.0, prior=coarse).fit([0]), None),
        "UnbiasedRandomizer, release": (lambda: unbiased.transform(y % 32), None),
    }
    print(f"{N:,} labels, {CLASSES} classes, fastest of {repeats}")
    seconds = {}
    for name, (call, target) in rows.items():
        seconds[name] = fastest(call, repeats)
        aim = "" if target is None else f"   (aim: below {target} ms)"
        print(f"  {name:<46}{1e3 * seconds[name]:9.2f} ms{aim}")
    part = 6_000
    loop = fastest(lambda: one_at_a_time(many[:part], y[:part], 1.0), 1) * N / part
    print(f"  {'the loop, scaled from 6,000 labels':<46}{1e3 * loop:9.0f} ms")
    for name in list(rows)[1:3]:
        print(f"  {name}: {loop / seconds[name]:.0f} times as fast as the loop")

    large = rng.integers(0, CLASSES, 10_000_000, np.int8)
    mechanism = RandomizedResponse(1.0, CLASSES).fit(large[:10])
    spent = fastest(lambda: mechanism.transform(large), 1)
    tracemalloc.start()
    mechanism.transform(large)
    peak = tracemalloc.get_traced_memory()[1]
    print(f"10,000,000 int8 labels: {spent:.2f} s, {peak / 1e6:.0f} MB at the peak, the result's 10 MB included")


if __name__ == "__main__":
    main()
