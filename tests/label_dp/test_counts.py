"""Counts of the true labels, estimated from noisy ones."""

import math

import numpy as np
import pytest

from tfdpfl.label_dp import RandomizedResponse, debiased_label_counts


def test_the_debiased_counts_are_unbiased():
    y = np.repeat([0, 1, 2, 3], [6000, 3000, 1000, 0])
    mechanism = RandomizedResponse(1.0, 4).fit(y)
    noisy = mechanism.transform(y)
    counts = mechanism.label_counts(noisy)
    spread = math.sqrt(len(y)) / (math.e - 1) * (math.e + 3) / 2
    assert counts.sum() == pytest.approx(10_000) and abs(counts - [6000, 3000, 1000, 0]).max() < 5 * spread
    nearest = debiased_label_counts(noisy, mechanism.transition_matrix_, simplex=True)
    assert nearest.min() >= 0 and nearest.sum() == pytest.approx(10_000)
    exact = mechanism.transition_matrix_.T @ [6000, 3000, 1000, 0]
    whole = np.repeat(["b", "a", "d", "c"], np.round(exact).astype(int))
    by_name = debiased_label_counts(whole, mechanism.transition_matrix_, classes=["b", "a", "d", "c"])
    assert by_name == pytest.approx([6000, 3000, 1000, 0], abs=10)


def test_the_counts_of_many_classes_take_no_matrix():
    y = np.random.default_rng(0).integers(0, 40, 1000)
    few = RandomizedResponse(0.5, 40)
    noisy = few.fit_transform(y)
    assert np.allclose(few.label_counts(noisy), debiased_label_counts(noisy, few.transition_matrix_), rtol=1e-9)
    many = RandomizedResponse(8.0, 100_000)
    counts = many.label_counts(many.fit_transform(np.repeat(7, 10_000)))
    assert counts.shape == (100_000,) and counts.sum() == pytest.approx(10_000)
    assert counts[7] == pytest.approx(10_000, abs=5 * 10_000**0.5 / (math.exp(4) / 100_000**0.5))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: debiased_label_counts([0, 1], np.ones((2, 2)) / 2), "cannot be inverted"),
        (lambda: RandomizedResponse(1e-9, 2).fit([0]).label_counts([0, 1]), "epsilon=1e-09 leaves nothing to count"),
        (lambda: debiased_label_counts([0, 1], np.ones((2, 3))), r"\[K, K\], got the shape \[2, 3\]"),
        (lambda: debiased_label_counts([0, 1], np.eye(2), classes=[0]), "1 entries for 2 rows"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
