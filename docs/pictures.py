"""Draws the pictures of concepts.md, random-allocation.md and noise.md into docs/_static: python docs/pictures.py."""

import textwrap
from pathlib import Path

import matplotlib
import numpy as np
from scipy.optimize import brentq
from scipy.stats import norm

import tfdpfl

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent / "_static"
RUN = dict(num_examples=60_000, batch_size=256, delta=1e-5)


def axes():
    # As wide as a phone: a reader there need not scroll. textwrap keeps the titles within it.
    _, ax = plt.subplots(figsize=(4.8, 3.4), dpi=160, layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def save(ax, name, title):
    ax.set_title(textwrap.fill(title, 50), fontsize=11, loc="left")
    ax.figure.savefig(HERE / f"{name}.png")
    plt.close(ax.figure)


def delta_of(mu, epsilon):
    """δ of the Gaussian mechanism at μ = 1/σ (Balle and Wang 2018, theorem 8)."""
    return norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)


def attacker():
    ax = axes()
    chance = np.logspace(-4, 0, 200)
    for epsilon in (0.5, 1, 3, 8):
        mu = brentq(lambda mu, epsilon=epsilon: delta_of(mu, epsilon) - 1e-5, 1e-3, 20)
        ax.plot(chance, norm.cdf(norm.ppf(chance) + mu), label=f"ε = {epsilon:g}")
    ax.plot(chance, chance, ":", color="0.5", label="guessing")
    ax.set(
        xscale="log", ylim=(0, 1), xlabel="share of outsiders wrongly called members", ylabel="share of members found"
    )
    ax.xaxis.set_major_formatter("{x:g}")
    ax.legend()
    save(ax, "concept-epsilon", "At ε = 1 the best attack is hardly better than guessing")


def sampling():
    ax = axes()
    epochs = [1, 2, 5, 10, 20, 50, 100]
    for kind, label in (("shuffle", "shuffled, as fit does with arrays"), ("poisson", "Poisson batches")):
        values = [tfdpfl.compute_epsilon(noise_multiplier=1.1, num_epochs=e, sampling=kind, **RUN) for e in epochs]
        ax.plot(epochs, values, marker="o", label=label)
    ax.set(xscale="log", yscale="log", xlabel="epochs", ylabel="ε at δ = 1e-5")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.legend()
    save(ax, "concept-sampling", "With the same noise, Poisson batches have a tenth of the ε, or less")


def allocation():
    ax = axes()
    epochs = [1, 2, 5, 10, 20, 50, 100]
    labels = {"shuffle": "shuffled batches", "poisson": "Poisson batches", "random_allocation": "random allocation"}
    for kind, label in labels.items():
        values = [tfdpfl.compute_epsilon(noise_multiplier=1.1, num_epochs=e, sampling=kind, **RUN) for e in epochs]
        ax.plot(epochs, values, marker="o", label=label)
    ax.set(xscale="log", yscale="log", xlabel="epochs", ylabel="ε at δ = 1e-5")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.legend()
    save(ax, "random-allocation", "Random allocation has no larger ε than Poisson batches")


def batch():
    ax = axes()
    sizes = [64, 128, 256, 512, 1024, 2048, 4096]
    for epsilon in (1, 3):
        noise = [
            tfdpfl.compute_noise_multiplier(
                target_epsilon=epsilon, delta=1e-5, num_examples=60_000, batch_size=b, num_epochs=10) / b
            for b in sizes
        ]  # fmt: skip
        ax.plot(sizes, noise, marker="o", label=f"ε = {epsilon}")
    ax.set(xscale="log", yscale="log", xlabel="batch size, for ten epochs", ylabel="noise in the mean gradient / clip")
    ax.xaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.legend()
    save(ax, "concept-batch", "Larger batches have less noise in each step")


def accountants():
    ax = axes()
    steps = [1, 3, 10, 30, 100, 300, 1000, 3000]
    for name in ("rdp", "pld"):
        values = [tfdpfl.compute_epsilon(noise_multiplier=1.1, num_steps=t, accountant=name, **RUN) for t in steps]
        ax.plot(steps, values, marker="o", label=name.upper())
    ax.set(xscale="log", xlabel="steps", ylabel="ε at δ = 1e-5", ylim=(0, None))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.legend()
    save(ax, "concept-accountants", "Both are upper bounds; PLD is closer, above all for few steps")


def units():
    ax = axes()
    counts = range(1, 11)
    values = [
        tfdpfl.compute_epsilon(noise_multiplier=1.1, num_epochs=10, max_examples_per_user=k, **RUN) for k in counts
    ]
    ax.bar(counts, values, width=0.7)
    ax.set(xlabel="examples of one person", ylabel="that person's ε", xticks=list(counts))
    save(ax, "concept-units", "ε is 0.92 for one example, and 5.6 for a person with five")


def kinds():
    ax = axes()
    epochs = [1, 2, 5, 10, 20, 50]
    noise = tfdpfl.noise
    made = {
        "independent": lambda **uses: noise.Banded(bands=1, **uses),
        "Tree": lambda **uses: noise.Tree(**uses),
        "Banded, 8 bands": lambda **uses: noise.Banded(bands=8, **uses),
        "BandedInverse, 8 bands": lambda **uses: noise.BandedInverse(bands=8, **uses),
        "BandedInverse, 8 best": lambda **uses: noise.BandedInverse(bands=8, coefficients="best", **uses),
        "BLT": lambda **uses: noise.BLT(**uses),
    }
    for label, make in made.items():
        errors = [make(min_separation=64, max_participations=e).error(64 * e) for e in epochs]
        ax.plot(epochs, errors, marker="o", label=label, linestyle=":" if label == "BLT" else "-")
    ax.set(xscale="log", yscale="log", xlabel="epochs of 64 steps", ylabel="noise in the running sums / clip")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_formatter("{x:g}")
    ax.legend(fontsize=8)
    save(ax, "noise-kinds", "At the same ε, BLT and the best BandedInverse have the least noise of these six")


def pairs():
    lines = tfdpfl.noise.compare(640, 64, 10, target_epsilon=2, delta=1e-5, sampling_rate=1 / 64)
    ax = tfdpfl.plots.noise_errors(lines, most=10, ax=axes())
    save(ax, "noise-pairs", "At ε = 2: few bands, in groups")


if __name__ == "__main__":
    for draw in (attacker, sampling, allocation, batch, accountants, units, kinds, pairs):
        draw()
