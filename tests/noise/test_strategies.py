"""Correlated noise on paper: matrices against numpy's algebra, sensitivities against every participation there is."""

import json
import math

import numpy as np
import pytest
from matrices import lower, worst

from tfdpfl.accounting.correlated import CorrelatedRun
from tfdpfl.noise import BLT, Banded, BandedInverse, Tree, compare
from tfdpfl.noise.strategies import noise_from_dict


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


@pytest.mark.slow
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


def test_correlated_noise_beats_independent_noise_for_epochs_in_order():
    how = {"min_separation": 64, "max_participations": 10}
    independent = Banded(bands=1, **how).error(640)
    assert independent == pytest.approx(math.sqrt(10 * 320.5))
    errors = [Tree(restart_every=64, **how).error(640), Banded(bands=4, **how).error(640), BLT(**how).error(640)]
    assert all(error < 0.55 * independent for error in errors)
    assert errors[2] == min(errors)


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
