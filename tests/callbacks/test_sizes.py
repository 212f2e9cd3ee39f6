"""Batches that are said to be drawn by independent coins have sizes that such draws can have."""

import numpy as np
import pytest
import tensorflow as tf
from budget_cases import DELTA, N, PrivacyBudget, X, Y, compiled, own_batches, price, uses
from scipy.stats import binom, poisson

from tfdpfl.callbacks._sizes import BatchSizes
from tfdpfl.data import poisson_batches
from tfdpfl.errors import PrivacyError


@pytest.mark.slow
@pytest.mark.both_stacks
def test_batches_of_one_size_are_no_independent_draws():
    """They are refused, and counted as if each example were in each, before a tenth step of a chance below 1e-9."""
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(N, DELTA, sampling="poisson", batch_size=20)
    with pytest.raises(PrivacyError, match="sampling='poisson', but each of the first 10 batches held 20 examples"):
        model.fit(own_batches([20] * 15), callbacks=[budget], verbose=0)
    assert budget.ledger.unknown_steps == 10 and budget.report().epsilon >= uses(10)


def refused_after(sizes, populations, epoch=10**6, batch_size=10**9):
    """How many batches of such sizes are believed, in epochs of so many; None if all are."""
    seen = BatchSizes("poisson", batch_size, 1)
    for i, (size, population) in enumerate(zip(sizes, populations, strict=True)):
        if i % epoch == 0:
            seen.begin_epoch()
        if seen.doubt(size, population) is not None:
            return i
    return None


def test_batches_are_believed_until_no_rate_explains_their_sizes():
    """The chance of each further batch of one size is SciPy's, at the rate at which it is largest."""
    for size, population in [(20, 200), (256, 60_000), (1, 10**6), (150, 200)]:
        most = binom.pmf(size, population, size / population)
        assert refused_after([size] * 200, [population] * 200) == int(np.ceil(np.log(1e-9) / np.log(most)))
    left = [200 - 20 * (i % 10) for i in range(40)]  # of an allocation: the last of a pass is what is left
    chances = np.cumsum([0, *(binom.logpmf(20, n, 20 / n) for n in left[1:])])
    assert refused_after([20] * 40, left) == int(np.argmax(chances < np.log(1e-9))) > 9
    for sizes in ([200] * 99, [0] * 99, [20, 21, *[20] * 97], [20, 20, 21, *[20] * 96]):  # all, none, and others
        assert refused_after(sizes, [200] * 99) is None


def test_epochs_of_the_sizes_of_the_one_before_are_the_same_batches():
    sizes = [18, 25, 20, 15]
    chances = np.cumsum([0.0] * 4 + [binom.logpmf(s, N, s / N) for s in sizes * 5])
    believed = int(np.argmax(chances < np.log(1e-9)))
    assert refused_after(sizes * 6, [N] * 24, epoch=4) == believed == 12
    assert refused_after([*sizes, 18, 25, 20, 16, *sizes * 6], [N] * 32, epoch=4) is None  # once they differed
    assert refused_after(sizes * 6, [N] * 24, epoch=5) is None


@pytest.mark.parametrize("batch_size", [1, 20, 256])
def test_batches_may_be_as_large_as_chance_makes_them_and_no_larger(batch_size):
    rng, populations = np.random.default_rng(0), [100 * batch_size] * 2000
    for _ in range(5):
        drawn = rng.binomial(100 * batch_size, 0.01, 2000)
        assert refused_after(drawn, populations, batch_size=batch_size) is None
        at = refused_after(2 * drawn, populations, batch_size=batch_size)
        rows = int(2 * drawn[: at + 1].sum())
        assert poisson.logsf(rows - 1, batch_size * (at + 1)) < np.log(1e-9) and at <= 150 / batch_size


@pytest.mark.slow
@pytest.mark.both_stacks
def test_copies_in_poisson_batches_are_refused_and_counted():
    """Each example moves the sum of a batch by two clips. The tail of Poisson's distribution says so after a batch."""
    model, budget = compiled(expected_batch_size=50), PrivacyBudget(N, DELTA, sampling="poisson", batch_size=50)
    drawn = poisson_batches((X, Y), expected_batch_size=50, steps=10)
    types = [spec.dtype for spec in drawn.element_spec]

    def thrice(x, y):  # in Python, where nobody reads what a function does
        made = tf.numpy_function(lambda *both: [np.repeat(part, 3, 0) for part in both], [x, y], types)
        return tuple(tf.ensure_shape(part, given.shape) for part, given in zip(made, (x, y), strict=True))

    copied = drawn.map(thrice)
    with pytest.raises(PrivacyError, match=r"sampling='poisson', but the first \d batches held \d+ examples, which is"):
        model.fit(copied, callbacks=[budget], verbose=0)
    steps = model.optimizer.num_dp_steps // 2  # each is counted once more
    exact = price(batch_size=50, noise_multiplier=2.0 / 3, num_steps=steps, sampling="none")
    assert 1 <= budget.ledger.unknown_steps <= 2 and budget.report().epsilon >= exact


@pytest.mark.slow
@pytest.mark.both_stacks
def test_batches_that_were_drawn_once_are_refused_as_poisson_batches(tmp_path):
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(N, DELTA, sampling="poisson", batch_size=20)
    poisson_batches((X, Y), expected_batch_size=20, steps=10).save(str(tmp_path))
    with pytest.raises(PrivacyError, match="the batches have the sizes that those of the epoch before had"):
        model.fit(tf.data.Dataset.load(str(tmp_path)), epochs=5, callbacks=[budget], verbose=0)
    unknown = budget.ledger.unknown_steps
    assert 10 < unknown < 30 and budget.report().epsilon >= uses(unknown)
