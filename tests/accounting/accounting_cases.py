"""What tests of accounting share: runs, the closed form of Gaussian noise, and ε by integration."""

import math

from scipy import optimize, special

from tfdpfl.accounting.pricing import SUPPORT

MNIST = dict(num_examples=60000, batch_size=250, delta=1e-5)
RUN = dict(**MNIST, noise_multiplier=1.1)
DATA = dict(num_examples=60000, batch_size=250)


def gaussian_epsilon(sigma, delta):
    """The Gaussian mechanism's exact ε (Balle & Wang 2018, arXiv:1805.06530, Theorem 8)."""

    def excess(epsilon):
        a, b = 1 / (2 * sigma), epsilon * sigma
        return special.ndtr(a - b) - math.exp(epsilon + special.log_ndtr(-a - b)) - delta

    return optimize.brentq(excess, 0, 200 + 1 / sigma**2, xtol=1e-12)


def beyond(sigma, uses=1):
    return uses * math.exp(-((SUPPORT - 1 / sigma) ** 2) / 2)
