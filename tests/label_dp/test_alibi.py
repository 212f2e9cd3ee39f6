"""ALIBI's noise is Laplace noise, and its soft labels obey Bayes' rule."""

import numpy as np
import pytest
from scipy import stats

from tfdpfl.label_dp import ALIBI


def test_alibis_noise_is_laplace_of_scale_two_over_epsilon():
    alibi = ALIBI(0.7, 5)
    alibi.fit_transform(np.full(4000, 2))
    noise = alibi.noisy_ - np.eye(5)[2]
    assert stats.kstest(noise.ravel(), stats.laplace(scale=2 / 0.7).cdf).pvalue > 1e-8
    # Low bits that depend on the label would be a leak that no amount of noise covers.
    assert (alibi.noisy_ * 1024 == np.round(alibi.noisy_ * 1024)).all()


def test_alibis_posterior_is_bayes_rule():
    alibi = ALIBI(1.0, 3)
    soft = alibi.fit_transform([0, 1, 2, 2])
    density = np.array([
        [stats.laplace(scale=2).pdf(row - np.eye(3)[k]).prod() for k in range(3)] for row in alibi.noisy_
    ])  # fmt: skip
    assert soft == pytest.approx(density / density.sum(axis=1, keepdims=True))
    prior = np.array([0.7, 0.3, 0.0])
    weighted = density * prior
    assert alibi.posterior(prior) == pytest.approx(weighted / weighted.sum(axis=1, keepdims=True))
    assert alibi.releases_ == 1  # denoising is for nothing
    with pytest.raises(ValueError, match="2 rows for 4 examples"):
        alibi.posterior(np.full((2, 3), 1 / 3))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ALIBI(1e3, 5), "epsilon=1000 is larger"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_by_name(call, message):
    with pytest.raises(ValueError, match=message):
        call()
