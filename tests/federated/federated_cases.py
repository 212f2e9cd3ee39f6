"""What tests of prices of rounds share: runs of rounds, and the exact δ of Gaussian noise."""

import math

from scipy.stats import norm

from tfdpfl.federated.privacy import Participation, RoundsRun


def rounds(number, sampling="none", population=100, cohort=10.0, cohorts=(), examples=None, **limits):
    participation = Participation(sampling=sampling, population=population, clients_per_round=cohort, **limits)
    return RoundsRun(rounds=number, participation=participation, cohorts=cohorts, num_examples=examples or {})


def gaussian_delta(epsilon, mu):
    """Balle and Wang 2018: the δ of a Gaussian mechanism of sensitivity over noise μ."""
    return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
