"""Correlated noise on paper: matrices against numpy's algebra, sensitivities against every participation there is,
prices against published figures and against DP-SGD's."""

import itertools
import json
import math

import dp_accounting
import numpy as np
import pytest

import tfdpfl
from tfdpfl.accounting import compute_epsilon, price
from tfdpfl.accounting.correlated import CorrelatedRun, compute_correlated_noise_multiplier
from tfdpfl.accounting.participation import moved_by_toeplitz, tree_sensitivity
from tfdpfl.noise import BLT, Banded, BandedInverse, Tree, compare
from tfdpfl.noise.optimal import best_bands, best_buffers, inverse_square_root, square_root
from tfdpfl.noise.strategies import noise_from_dict


def worst(matrix, separation, most):
    """The largest squared norm of what one example adds, over all participations."""
    n, best = len(matrix), 0.0
    for chosen in range(1 << n):
        at = [i for i in range(n) if chosen >> i & 1]
        if len(at) <= most and all(b - a >= separation for a, b in itertools.pairwise(at)):
            best = max(best, (matrix[:, at].sum(1) ** 2).sum())
    return best


def kinds(separation, most, steps):
    yield from (Tree(), Tree(restart_every=4), Tree(restart_every=3))
    yield BLT(buffers=2, min_separation=separation, max_participations=most, num_steps=steps)
    yield Banded(bands=min(2, separation), min_separation=separation, max_participations=most, num_steps=steps)
    yield BandedInverse(bands=3, min_separation=separation, max_participations=most, num_steps=steps)


@pytest.mark.parametrize("separation, most", [(1, 1), (1, 3), (2, 4), (3, 2), (4, 11)])
def test_sensitivity_is_the_worst_over_all_participations(separation, most):
    for steps in (1, 5, 10):
        for noise in kinds(separation, most, 10):
            found = noise.sensitivity(steps, separation, most) ** 2
            # Exact, but for signs in the matrix: what one use takes from another counts as if it came on top.
            bound = worst(abs(noise.matrix(steps)), separation, most)
            assert found == pytest.approx(bound, rel=1e-9), (noise, steps)


def test_a_column_that_grows_or_is_negative_is_bounded_by_one_that_does_not():
    rng = np.random.default_rng(0)
    for _ in range(30):
        column = rng.normal(size=6)
        matrix = sum(np.diag(np.full(8 - i, c), -i) for i, c in enumerate(column))
        for separation, most in [(1, 8), (2, 3), (4, 2), (6, 2)]:
            bound = (moved_by_toeplitz(column, 8, separation, most) ** 2).sum()
            assert bound >= worst(abs(matrix), separation, most) - 1e-9
    # With no use near another it is exact.
    assert (moved_by_toeplitz(np.array([1.0, -2.0]), 8, 2, 3) ** 2).sum() == pytest.approx(15)


@pytest.mark.parametrize("noise", [*kinds(4, 3, 12), Banded(bands=4, min_separation=4, max_participations=3)], ids=str)
def test_inverse_and_errors_are_numpys(noise):
    inverse = np.linalg.inv(noise.matrix(12))
    if hasattr(noise, "inverse"):
        np.testing.assert_allclose(noise.inverse(12), inverse[:, 0], atol=1e-9)
    rows = np.tri(12) @ inverse
    np.testing.assert_allclose(noise.variances(12), (rows**2).sum(1), rtol=1e-9)
    norm = noise.sensitivity(12, noise.min_separation, noise.max_participations)
    assert noise.error(12) == pytest.approx(norm * np.linalg.norm(rows) / math.sqrt(12))
    assert noise.error(12, "max") == pytest.approx(norm * np.linalg.norm(rows, axis=1).max())


def test_the_square_root_has_the_published_coefficients():
    np.testing.assert_allclose(square_root(4), [1, 0.5, 0.375, 0.3125])
    c = Banded(bands=2, min_separation=2, max_participations=1, coefficients=square_root(2))
    np.testing.assert_allclose(c.variances(2), [1, 1.25])


def test_best_bands_are_a_least():
    c = np.array(best_bands(3, 40))

    def loss(c):
        noise = Banded(bands=3, min_separation=40, max_participations=1, coefficients=tuple(c))
        return noise.error(40)

    for step in (1e-3, 1e-2):
        for direction in ([0, 1, 0], [0, 0, 1], [0, 1, 1], [0, 1, -1]):
            for sign in (1, -1):
                assert loss(c) < loss(c + sign * step * np.array(direction))
    assert loss(c) < loss(square_root(3))


# -- the inverse has the bands ----------------------------------------------------------------------------------------


def lower(column, steps):
    """The lower triangular Toeplitz matrix of these diagonals."""
    return sum(np.diag(np.full(steps - i, c), -i) for i, c in enumerate(column[:steps]))


def test_the_inverse_square_root_squared_takes_differences():
    r = inverse_square_root(6)
    np.testing.assert_allclose(r[:4], [1, -1 / 2, -1 / 8, -1 / 16])
    np.testing.assert_allclose(np.convolve(r, r)[:6], [1, -1, 0, 0, 0, 0], atol=1e-12)
    whole = BandedInverse(bands=9, max_participations=1, num_steps=9).matrix(9)
    np.testing.assert_allclose(whole @ whole, np.tri(9), atol=1e-6)  # with all bands C is the square root itself
    np.testing.assert_allclose(whole[:, 0], square_root(9), atol=1e-6)


# The last three columns grow somewhere, as 1, 0, 0, 1, 0, 0, 1, … does.
@pytest.mark.parametrize(
    "given, rel",
    [(None, 1e-7), ("best", 1e-6), ((2.0, -0.5, 0.0, -1.0), 0.8), ((1.0, -0.1, -0.8), 0.8), ((1.0, 0.0, -1.0), 0.8)],
)
@pytest.mark.parametrize("separation, most", [(1, 1), (1, 10), (2, 3), (3, 4), (4, 2), (9, 2)])
def test_a_banded_inverse_is_within_its_sensitivity_for_all_uses(given, rel, separation, most):
    """C is numpy's inverse of the bands, and tries of uses that add to and subtract from each other are among them."""
    bands = len(given) if isinstance(given, tuple) else 4
    noise = BandedInverse(bands=bands, coefficients=given, min_separation=separation, max_participations=most)
    for steps in (1, 5, 8):
        matrix = np.linalg.inv(lower(noise.coefficients, steps))
        most_moved = math.sqrt(worst(matrix, separation, most))
        bound = noise.sensitivity(steps, separation, most)
        assert (1 - 1e-6) * most_moved <= bound <= (1 + rel) * most_moved
        rng = np.random.default_rng(0)
        for _ in range(50):
            u, at = np.zeros([steps, 3]), rng.integers(separation)
            for _ in range(most):
                if at >= steps:
                    break
                u[at] = (lambda v: v / np.linalg.norm(v))(rng.normal(size=3))  # a clipped gradient
                at += separation + rng.integers(2)
            assert np.linalg.norm(matrix @ u) <= bound * (1 + 1e-6)


@pytest.mark.parametrize("kind", ["rms", "max"])
def test_best_coefficients_of_the_inverse_are_the_least_of_a_grid(kind):
    """Two and three bands, by numpy's matrices, for three uses of 5 in 15 steps."""

    def error(*r):
        inverse = lower(np.array([1.0, *r]), 15)
        c = np.linalg.inv(inverse)
        if (np.diff(c[:, 0]) > 1e-9).any():
            return math.inf  # uses as early as can be might not be the worst
        rows = np.linalg.norm(np.tri(15) @ inverse, axis=1)
        return np.linalg.norm(c[:, [0, 5, 10]].sum(1)) * (rows.max() if kind == "max" else np.sqrt((rows**2).mean()))

    how = dict(min_separation=5, max_participations=3, objective=kind, coefficients="best")
    grid = -np.linspace(0, 1, 51)
    least = {2: min(error(a) for a in grid), 3: min(error(a, b) for a in grid for b in grid if a + b >= -1)}
    for bands, found in least.items():
        noise = BandedInverse(bands=bands, **how)
        assert noise.error(15, kind) == pytest.approx(error(*noise.coefficients[1:]), rel=1e-6)
        assert 0.99 * found < noise.error(15, kind) <= found * (1 + 1e-6)
    assert BandedInverse(bands=20, **how).error(15, kind) <= BandedInverse(bands=15, **how).error(15, kind) * (1 + 1e-9)


def test_banded_inverses_have_the_errors_of_their_column_for_epochs_in_order():
    how = {"min_separation": 64, "max_participations": 10}
    default, best = (BandedInverse(bands=8, coefficients=c, **how).error(640) for c in (None, "best"))
    assert best < 0.71 * default and default < 0.8 * Banded(bands=8, **how).error(640)
    assert best == pytest.approx(BLT(**how).error(640), rel=0.02)
    lines = {line.noise.text(): line.error for line in compare(40, 4, 10)}
    tried = [BandedInverse(bands=b, coefficients="best", min_separation=4, max_participations=10) for b in (4, 8, 16)]
    assert [lines[noise.text()] for noise in tried] == [noise.error(40) for noise in tried]
    # A column that may grow is better for one use (3.78 if it may not), and worse for uses that are close (5.91).
    single = BandedInverse(bands=4, coefficients="best", min_separation=640, max_participations=1)
    assert single.error(640) < 3.6 and (np.diff(single.column(640)) > 0.01).any()
    close = BandedInverse(bands=8, coefficients="best", min_separation=2, max_participations=5, num_steps=20)
    assert close.error(20) < 5.76 and (np.diff(close.column(20)) < 1e-6).all()
    # With an example in every step nothing is gained, and the best are those of independent noise.
    one = BandedInverse(bands=3, coefficients="best", max_participations=20, num_steps=20)
    assert one.coefficients == pytest.approx((1, 0, 0), abs=1e-5)


@pytest.mark.slow
@pytest.mark.one_stack
def test_best_buffers_are_jax_privacys():
    """Its golden values: 100,000 steps, one participation, largest error."""
    decay, scale = best_buffers(2, 100_000)
    np.testing.assert_allclose(decay, [0.9999528892, 0.9857068667], rtol=1e-5)
    np.testing.assert_allclose(scale, [0.0122853238, 0.1878393665], rtol=1e-5)


@pytest.mark.parametrize("steps, buffers, factor", [(10, 1, 1.04), (1000, 3, 1.03), (10_000, 3, 1.03)])
def test_few_buffers_come_near_the_bound(steps, buffers, factor):
    """Of the best root loss, 1 + ln n / π (Mathias 1993, Corollary 3.5)."""
    noise = BLT(buffers=buffers, num_steps=steps, max_participations=1, objective="max")
    assert noise.error(steps, "max") <= factor * (1 + math.log(steps) / math.pi)


def test_correlated_noise_beats_independent_noise_for_epochs_in_order():
    how = {"min_separation": 64, "max_participations": 10}
    independent = Banded(bands=1, **how).error(640)
    assert independent == pytest.approx(math.sqrt(10 * 320.5))
    errors = [Tree(restart_every=64, **how).error(640), Banded(bands=4, **how).error(640), BLT(**how).error(640)]
    assert all(error < 0.55 * independent for error in errors)
    assert errors[2] == min(errors)


# -- prices ----------------------------------------------------------------------------------------------------------


def epsilon(noise, z, delta=1e-5, accountant="pld", **how):
    run = CorrelatedRun(noise=noise, noise_multiplier=z, **how)
    return price(run.dp_event, delta, accountant, run.adjacency).epsilon


def test_one_band_under_cyclic_sampling_is_dp_sgd():
    noise = Banded(bands=1, min_separation=1, max_participations=1)
    ours = epsilon(noise, 1.1, num_steps=2400, sampling_rate=250 / 60000)
    dp_sgd = compute_epsilon(num_examples=60000, batch_size=250, noise_multiplier=1.1, num_epochs=10, delta=1e-5)
    assert ours == pytest.approx(dp_sgd, rel=1e-9)


@pytest.mark.parametrize("uses", [1, 3])
def test_bands_under_cyclic_sampling_cost_a_sampled_step_each_round(uses):
    """⌈n/b⌉ rounds at q = participations · b / n, here 2403 steps of 8 groups."""
    noise = Banded(bands=5, min_separation=8, max_participations=uses)
    ours = epsilon(noise, 1.1, num_steps=2403, min_separation=8, sampling_rate=10 * 8 / 2400)
    sigma = 1.1 * math.sqrt(uses)  # uses is what σ is over; a round has one
    theirs = compute_epsilon(num_examples=2400, batch_size=80, noise_multiplier=sigma, num_steps=301, delta=1e-5)
    assert ours == pytest.approx(theirs, rel=1e-9)


@pytest.mark.slow
def test_noise_found_for_cyclic_sampling_is_for_all_rounds_of_the_groups():
    """By dp-accounting: a Poisson-sampled Gaussian for each of ten rounds. The noise is made for one."""
    noise = Banded(bands=4, min_separation=4, max_participations=1, num_steps=40)
    how = dict(num_steps=40, sampling_rate=0.5)
    sigma = compute_correlated_noise_multiplier(noise, target_epsilon=2.0, delta=1e-5, accountant="rdp", **how)
    step = dp_accounting.PoissonSampledDpEvent(0.5, dp_accounting.GaussianDpEvent(sigma))
    assert 1.99 < dp_accounting.rdp.RdpAccountant().compose(step, 10).get_epsilon(1e-5) <= 2.001
    run = CorrelatedRun(noise=noise, noise_multiplier=sigma, min_separation=4, max_participations=1, **how)
    assert run.participations == 10  # no data set bounds the rounds that an example is taken in


@pytest.mark.slow
def test_sampling_counts_for_no_matrix_that_is_wider_than_the_groups():
    limits = {"min_separation": 8, "max_participations": 10}
    wide = Banded(bands=8, **limits)
    how = {"num_steps": 80, "sampling_rate": 0.1, "adjacency": "zero_out"}
    assert not CorrelatedRun(noise=wide, noise_multiplier=1, min_separation=7, **how).amplified
    for noise in (BLT(**limits), BandedInverse(bands=2, **limits)):
        assert epsilon(noise, 1.0, min_separation=8, **how) == epsilon(noise, 1.0, num_steps=80, min_separation=8)


@pytest.mark.slow
def test_a_training_as_it_was_said_to_be_costs_one_gaussian():
    one = compute_epsilon(num_examples=1, batch_size=1, noise_multiplier=1.0, num_steps=1, sampling="none", delta=1e-5)
    how = {"min_separation": 30, "max_participations": 5}
    for noise in (Banded(bands=4, **how), BandedInverse(bands=4, coefficients="best", **how), BLT(**how)):
        assert epsilon(noise, 1.0, num_steps=150, **how) == pytest.approx(one, rel=1e-3)
        assert epsilon(noise, 1.0, num_steps=50, **how) < 0.9 * one  # less ran
        assert epsilon(noise, 1.0, num_steps=180, min_separation=30, max_participations=6) > 1.05 * one
        assert epsilon(noise, 1.0, num_steps=150, min_separation=1, max_participations=5) > 1.3 * one
        assert epsilon(noise, 1.0, num_steps=150) > 4 * one  # nothing known: in every step
        assert epsilon(noise, 1.0, num_steps=150, adjacency="replace_one", **how) == pytest.approx(
            epsilon(noise, 0.5, num_steps=150, **how)
        )
        z = compute_correlated_noise_multiplier(noise, target_epsilon=one, delta=1e-5, num_steps=150)
        assert z == pytest.approx(1.0, rel=1e-3)
        assert epsilon(noise, z, num_steps=150, **how) <= one


def test_gboards_training_is_priced_as_published():
    """z=7, 2000 rounds, at most 6 uses 313 apart: (8.90, 1e-10) for a tree whose every node is used (as TFF's is). Ours
    adds nodes up as they are: those that are a second half are in no sum, so it costs less."""
    every_node = tree_sensitivity(2000, 6, 313)
    assert every_node / (2 * 7**2) == pytest.approx(0.81, abs=0.005)
    how = {"num_steps": 2000, "min_separation": 313, "max_participations": 6, "delta": 1e-10, "accountant": "rdp"}
    ours = Tree().sensitivity(2000, 313, 6) ** 2
    assert epsilon(Tree(), 7 * math.sqrt(ours / every_node), **how) == pytest.approx(8.90, rel=0.01)
    assert ours < every_node and epsilon(Tree(), 7, **how) < 8.90


def test_where_the_normals_end_is_in_the_price():
    """Each of the noises that an example moves may be where the neighbour's cannot."""
    noise = Tree()
    few = CorrelatedRun(noise=noise, noise_multiplier=2, num_steps=4, max_participations=1).dp_event
    assert few.shifts[0] == (3, 0.5)
    assert price(few, 1e-300, adjacency="zero_out").epsilon == math.inf
    how = {"min_separation": 2, "max_participations": 2}
    noise = Banded(bands=2, coefficients=(1, 0.5), **how)
    moved = CorrelatedRun(noise=noise, noise_multiplier=1, num_steps=9, **how).dp_event
    unit = math.sqrt(2 * 1.25)
    assert sum(n * s**2 for n, s in moved.shifts) == pytest.approx(2 * 1.25 / unit**2, rel=0.1)
    assert [n for n, _ in moved.shifts] == [2, 2]
    assert epsilon(Tree(), 0.1, num_steps=1000, delta=1e-5) == math.inf  # one use in a node moves it by ten deviations


def test_no_noise_no_steps_and_neighbours_without_a_price():
    assert epsilon(Tree(), 0, num_steps=3) == math.inf
    assert epsilon(Tree(), 1, num_steps=0) == 0
    with pytest.raises(tfdpfl.PrivacyError, match="add_or_remove_one"):
        CorrelatedRun(noise=Tree(), noise_multiplier=1, num_steps=3, adjacency="add_or_remove_one")
    with pytest.raises(tfdpfl.PrivacyError, match="replace_one"):
        CorrelatedRun(noise=Tree(), noise_multiplier=1, num_steps=3, sampling_rate=0.1, adjacency="replace_one")


@pytest.mark.parametrize(
    "make, said",
    [
        (lambda: Tree(restart_every=0), "restart_every"),
        (lambda: Banded(bands=3, min_separation=2, max_participations=1), "bands=3 is more than min_separation=2"),
        (lambda: Banded(bands=2, min_separation=2), "max_participations=None"),
        (lambda: Banded(bands=2, min_separation=2, max_participations=1, coefficients=(0.0, 1.0)), "coefficients"),
        (lambda: Banded(bands=2, min_separation=2, max_participations=1, coefficients=3), "coefficients"),
        (lambda: BandedInverse(bands=0, max_participations=1), "bands"),
        (lambda: BandedInverse(bands=2), "max_participations=None"),
        (lambda: BandedInverse(bands=2, max_participations=1, coefficients="worst"), "coefficients='worst'.*\"best\""),
        (lambda: BandedInverse(bands=2, max_participations=1, coefficients=(1.0, 0.1)), "the others at most 0"),
        (lambda: BandedInverse(bands=2, max_participations=1, coefficients=(1.0, -1.1)), "sum at least 0"),
        (lambda: BandedInverse(bands=2, max_participations=1, coefficients=(-1.0, -0.1)), "first of them above 0"),
        (lambda: BandedInverse(bands=2, max_participations=1, coefficients=(1e-40, 0.0)), "first of them above 0"),
        (lambda: BandedInverse(bands=2, max_participations=1, coefficients=(1e40, 0.0)), "first of them above 0"),
        (lambda: BandedInverse(bands=2, max_participations=1, coefficients=(1.0,)), "give 2 numbers"),
        (lambda: BandedInverse(bands=2, max_participations=1, coefficients=(1.0, math.nan)), "coefficients"),
        (lambda: BLT(max_participations=0), "max_participations"),
        (lambda: BLT(max_participations=1, num_steps=9, decay=(0.5, 1.5), scale=(0.1, 0.1)), "decay"),
        (lambda: BLT(max_participations=1, num_steps=9, decay=(0.5, 0.1), scale=(0.7, 0.4)), "scale"),
        (lambda: BLT(max_participations=1, num_steps=9, decay=(0.5, 0.1)), "both decay and scale"),
        (lambda: BLT(buffers=20, max_participations=1), "buffers=20"),
        (lambda: noise_from_dict({"noise": "Pink"}), "Pink"),
        (lambda: noise_from_dict({"noise": "Tree", "leaves": 3}), "leaves"),
        (lambda: CorrelatedRun(noise="tree", noise_multiplier=1, num_steps=1), "noise='tree'"),
        (lambda: CorrelatedRun(noise=Tree(), noise_multiplier=1, num_steps=1, sampling_rate=1.5), "sampling_rate"),
    ],
)
def test_bad_arguments_are_named(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_noise_and_runs_come_back_from_json():
    for noise in kinds(2, 3, 12):
        run = CorrelatedRun(noise=noise, noise_multiplier=1.5, num_steps=7, min_separation=2, max_participations=3)
        assert CorrelatedRun.from_dict(json.loads(json.dumps(run.to_dict()))) == run
    best = BandedInverse(bands=3, coefficients="best", min_separation=4, max_participations=3)
    saved = json.loads(json.dumps(best.to_dict()))
    assert noise_from_dict(saved) == best and len(saved["coefficients"]) == 3  # as found, not to be found anew
