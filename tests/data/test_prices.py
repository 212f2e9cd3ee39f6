"""Compares each sampling's statements and price with the batches that are drawn under its name.

The adversary sees the noisy sum of every step. One example contributes 1 to each of its steps, or else nothing or -1;
every other example contributes 0, or -1. The batches that were drawn give the sums of the steps. The likelihood ratio
of their mixtures of Gaussians gives a lower bound on ε. No part of the accountant is in it.
"""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import data
from tfdpfl.accounting import compute_epsilon, monte_carlo
from tfdpfl.accounting.correlated import CorrelatedRun
from tfdpfl.accounting.pricing import price
from tfdpfl.accounting.sampling import SCHEMES
from tfdpfl.callbacks import PrivacyBudget
from tfdpfl.federated.samplers import FixedSizeClientSampler
from tfdpfl.noise import Banded

N, SIZE, STEPS, PASSES, TRAININGS, DELTA = 24, 8, 3, 2, 150, 1e-2
ROWS = (np.ones([N, 1], "float32"), np.arange(N, dtype="float32"))  # (x, y), where y is an example's number

# How batches of N examples are drawn in passes of STEPS batches, under every name that has a price. A sampling without
# a function in tfdpfl.data is drawn BY_HAND, as a list of the numbers of the examples in each batch.
DRAWN = {
    "poisson": lambda: data.poisson_batches(ROWS, expected_batch_size=SIZE, steps=STEPS, seed=1),
    "random_allocation": lambda: data.random_allocation(ROWS, expected_batch_size=SIZE, seed=1),
    "shuffle": lambda: data.shuffled_batches(ROWS, SIZE, seed=1),
    "fixed_order": lambda: data.fixed_order(ROWS, SIZE),
    "cyclic_poisson": lambda: data.cyclic_poisson(ROWS, STEPS, 1, groups=STEPS, expected_batch_size=SIZE / 2),
    "b_min_sep": lambda: data.b_min_sep(ROWS, STEPS * PASSES, 1, min_separation=STEPS, expected_batch_size=SIZE // 2),
}
BY_HAND = {
    "fixed_size": lambda: list(map(FixedSizeClientSampler(range(N), SIZE, 1), range(STEPS * PASSES * TRAININGS))),
    "none": lambda: [range(N)] * (STEPS * PASSES * TRAININGS),
}


@pytest.fixture(autouse=True)
def fewer_simulated_trainings(monkeypatch):
    monkeypatch.setattr(monte_carlo, "RUNS", 1 << 18)


def test_every_sampling_is_drawn_here():
    assert {*DRAWN, *BY_HAND} == set(SCHEMES), (
        "Say in DRAWN how the new sampling is drawn: its price is held against that."
    )


@pytest.fixture(scope="module", params=SCHEMES)
def drawn(request):
    """The scheme, its data set or list, and how often each training has each example in each step:
    [TRAININGS, steps, N]."""
    batches = (DRAWN | BY_HAND)[request.param]()
    made = isinstance(batches, tf.data.Dataset)
    passes = PASSES * TRAININGS * STEPS // data.declared_sampling(batches).steps if made else 0
    numbers = (y for _, y in batches.repeat(passes).as_numpy_iterator()) if made else batches
    uses = np.array([np.bincount(np.array(rows, int), minlength=N) for rows in numbers])
    return SCHEMES[request.param], batches, uses.reshape(TRAININGS, PASSES * STEPS, N)


@pytest.mark.slow
def test_what_a_sampling_states_is_true_of_what_is_drawn(drawn):
    scheme, batches, uses = drawn
    sizes, passes = uses.sum(2), uses.reshape(TRAININGS * PASSES, STEPS, N)
    others = sizes[..., None] - uses
    assert uses.max() == 1
    if isinstance(batches, tf.data.Dataset):
        assert data.declared_sampling(batches).scheme is scheme
    if scheme.once_a_pass:
        assert passes.sum(1).max() <= 1
    assert scheme.same_order == ((passes == passes[0]).all() and scheme.name != "none")
    if scheme.limits_batches:
        assert sizes.max() <= SIZE
    if scheme.separates_uses and isinstance(batches, tf.data.Dataset):
        apart = data.declared_sampling(batches).min_separation
        for later in range(1, apart):
            assert not (uses[:, later:] * uses[:, :-later]).any()
    if scheme.independent:  # how many others are in a step says nothing of whether an example is in it
        moved = (uses - uses.mean(0)) * (others - others.mean(0))
        assert abs(moved.sum()) < 6 * math.sqrt((moved**2).sum())
        assert sizes.std() > 1
    if "add_or_remove_one" in scheme.adjacencies:  # one example more moves no other one
        assert scheme.independent or uses.all()


def alike(uses):
    """Splits the examples into those that are ever in the same steps, and checks that all of a class come as often."""
    classes = {}
    for number, steps in enumerate(map(tuple, uses.any(0).T)):
        classes.setdefault(steps, []).append(number)
    for members in classes.values():
        counts = uses[..., members].sum((0, 1))
        assert (abs(counts - counts.mean()) < 6 * np.sqrt(counts.mean())).all()
    return list(classes.values())


def density(z, mixture, sigma):
    centers, weights = mixture
    exponent = (z @ centers.T - (centers**2).sum(1) / 2) / sigma**2 + np.log(weights)
    top = exponent.max(1, keepdims=True)
    return (top + np.log(np.exp(exponent - top).sum(1, keepdims=True)))[:, 0]


def shown(p, q, sigma, samples=20_000):
    """A lower bound on ε at DELTA: the largest log((P(E) - δ) / Q(E)) over sets E of large likelihood ratio. One half
    of the rows, [rows, steps], gives the ratio, and the other the probabilities."""

    def mixture(rows):
        centers, counts = np.unique(rows, axis=0, return_counts=True)
        return centers, counts / counts.sum()

    (p, q), (p_ratio, q_ratio) = ([mixture(rows[half::2]) for rows in (p, q)] for half in (0, 1))
    rng = np.random.default_rng(0)
    z = p[0][rng.choice(len(p[0]), samples, p=p[1])]
    z = z + sigma * rng.standard_normal(z.shape)
    order = np.argsort(density(z, q_ratio, sigma) - density(z, p_ratio, sigma))
    of_q = np.cumsum(np.exp(density(z, q, sigma) - density(z, p, sigma))[order]) / samples
    of_p = np.arange(1, samples + 1) / samples
    enough = of_p > 1.5 * DELTA
    return max(float(np.log((of_p - DELTA)[enough] / of_q[enough]).max()), 0.0)


def lower_bound(uses, replaced, sigma, matrix=None):
    """The largest ε that an adversary of the family shows, in either direction, if the example is replaced or blanked
    (which is as good as left out where others contribute nothing)."""
    sizes, found = uses.sum(2), []
    matrix = np.eye(uses.shape[1]) if matrix is None else matrix
    for members in alike(uses):
        mine = np.moveaxis(uses[..., members], 2, 1).reshape(-1, uses.shape[1])
        rest = np.repeat(sizes, len(members), axis=0) - mine
        # If sizes vary, what others contribute is more noise.
        for other in (0, -1) if sizes.std() == 0 else (0,):
            p, q = ((own * mine + other * rest) @ matrix.T for own in (1, -1 if replaced else 0))
            found += [shown(p, q, sigma), shown(q, p, sigma)]
    return max(found)


NOISE = Banded(bands=2, min_separation=STEPS, max_participations=PASSES)


def claimed(scheme, adjacency, sigma, batches):
    """The price of PASSES passes, and the matrix and deviation of the noise."""
    if scheme.fresh_noise:
        run = {"num_examples": N, "batch_size": SIZE, "noise_multiplier": sigma, "num_steps": PASSES * STEPS}
        return compute_epsilon(**run, sampling=scheme.name, adjacency=adjacency, delta=DELTA), None, sigma
    declared = data.declared_sampling(batches)
    run = CorrelatedRun(
        noise=NOISE, noise_multiplier=sigma, num_steps=PASSES * STEPS, min_separation=declared.min_separation,
        adjacency=adjacency,
        **({"sampling_rate": declared.sampling_rate, "sampling": scheme.name} if scheme.starts_anew else {}),
    )  # fmt: skip
    epsilon = price(run.dp_event, DELTA, "pld", adjacency).epsilon
    return epsilon, NOISE.matrix(PASSES * STEPS), sigma * NOISE.unit


# No more than this times the lower bound. Shuffling hides an example the better the more noise there is, of which no
# price knows, and only Rényi DP, which is loose, knows subsets of fixed size under "replace_one".
LOOSE = {("shuffle", 2.0): 1.7, ("fixed_size", 0.5): 2.5, ("fixed_size", 2.0): 2.3}


@pytest.mark.slow
@pytest.mark.parametrize("sigma", [0.5, 2.0])
def test_a_sampling_costs_no_less_and_hardly_more_than_an_adversary_shows(drawn, sigma):
    scheme, batches, uses = drawn
    bounds = {}
    for adjacency in scheme.adjacencies:
        epsilon, matrix, deviation = claimed(scheme, adjacency, sigma, batches)
        replaced = adjacency == "replace_one"
        bound = bounds[replaced] = bounds.get(replaced) or lower_bound(uses, replaced, deviation, matrix)
        # All draws are seeded: 3 % are for the adversary's finite samples, which are the same each time.
        assert 0.97 * bound < epsilon < LOOSE.get((scheme.name, sigma), 1.1) * bound, (adjacency, epsilon, bound)


@pytest.mark.slow
@pytest.mark.parametrize("drawn", DRAWN, indirect=True)
def test_fit_counts_what_was_drawn(drawn):
    scheme, batches, _ = drawn
    model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
    mean = data.declared_sampling(batches).expected_batch_size
    noise = None if scheme.fresh_noise else NOISE
    model.compile(tfdpfl.DPSGD(1.0, 1.0, expected_batch_size=mean, learning_rate=0.1, noise=noise), loss="mse")
    budget = PrivacyBudget(delta=DELTA)
    epochs = PASSES * STEPS // data.declared_sampling(batches).steps
    history = model.fit(batches, epochs=epochs, verbose=0, callbacks=[budget]).history
    expected = claimed(scheme, scheme.adjacencies[0], 1.0, batches)[0]
    assert history["epsilon"][-1] == pytest.approx(expected, rel=1e-3)
