"""Draws: each example by its own coin, subsets and orders."""

import collections

import numpy as np
import pytest

from tfdpfl import _process
from tfdpfl.data.draws import Words


@pytest.mark.parametrize(("number", "rate"), [(40, 0.9), (2000, 0.002), (7, 0.5), (10**12, 1e-11)])
def test_coins_are_fair_at_every_rate(number, rate):
    words, runs = Words(11), 3000
    draws = [words.each(number, rate) for _ in range(runs)]
    assert all((np.diff(d) > 0).all() and (not len(d) or (d[0] >= 0 and d[-1] < number)) for d in draws)
    sizes = np.array([len(d) for d in draws])
    mean, variance = number * rate, number * rate * (1 - rate)
    assert abs(sizes.mean() - mean) < 5 * np.sqrt(variance / runs)
    assert abs(sizes.var() / variance - 1) < 5 * np.sqrt((2 + 1 / variance) / runs)
    places = np.concatenate(draws)  # spread evenly: the first, the last and all between
    assert abs(places.mean() / ((number - 1) / 2) - 1) < 5 * np.sqrt(1 / 3 / len(places)) + 1e-9
    if number < 100:
        counts = np.bincount(places, minlength=number)
        assert (np.abs(counts - runs * rate) < 5 * np.sqrt(runs * rate * (1 - rate))).all()


def test_draws_come_from_the_generator_of_noise_and_a_forked_process_has_its_own():
    from tfdpfl.noise.source import KeyStream, new_key

    assert (Words(5)(3) == KeyStream(new_key(5)).words(np.empty(3, np.uint64))).all()
    words = Words()
    words(1)
    parents = words._stream
    _process._renew()
    words(1)
    assert words._stream is not parents
    assert len(np.unique(Words(1)(200_000))) == 200_000  # more than one call of the generator fills


def test_subsets_and_orders_are_uniform():
    words = Words(2)
    counts = np.zeros((5, 5))
    for _ in range(4000):
        counts[np.arange(5), words.order(5)] += 1
    assert (np.abs(counts / 4000 - 0.2) < 5 * np.sqrt(0.16 / 4000)).all()
    pairs = collections.Counter(tuple(words.some(np.array([3, 5, 8, 9]), 2)) for _ in range(3000))
    assert len(pairs) == 6 and all(abs(n / 3000 - 1 / 6) < 5 * np.sqrt(5 / 36 / 3000) for n in pairs.values())
