"""A noisy sum is the sum plus normal noise of exactly the stated size."""

import numpy as np
import pytest
from scipy import stats

from tfdpfl._sums import noisy_sum
from tfdpfl.noise import Source


@pytest.mark.parametrize(("sensitivity", "noise_multiplier"), [(1.0, 2.0), (0.1, 5.0), (30.0, 0.5)])
def test_the_noise_is_normal_of_the_sensitivity_times_the_multiplier(sensitivity, noise_multiplier):
    values = np.linspace(-3, 3, 4000)
    noise = noisy_sum(values, sensitivity, noise_multiplier, Source()) - values
    law = stats.norm(scale=sensitivity * noise_multiplier)
    assert stats.kstest(noise, law.cdf).pvalue > 1e-9
    for times in (2 / 3, 3 / 2):
        assert stats.kstest(times * noise, law.cdf).pvalue < 1e-9
