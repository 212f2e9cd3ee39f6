"""What one client can do to a mean, and how much noise the mean has."""

import collections
import functools
import math

import numpy as np
import pytest
import tensorflow as tf
from tff_cases import check_noise, tff

from tfdpfl import AdaptiveClip
from tfdpfl.federated import aggregators

pytestmark = pytest.mark.usefixtures("runtime")

SIZE = 2000
VECTOR = tff.to_type(collections.OrderedDict(a=(np.float32, [SIZE - 4]), b=(np.float32, [2, 2])))


def update(norm, seed=0):
    v = np.random.default_rng(seed).normal(size=SIZE)
    v = (norm * v / np.linalg.norm(v)).astype("float32")
    return collections.OrderedDict(a=v[:-4], b=v[-4:].reshape(2, 2))


def unpack(value):
    return np.concatenate([value["a"], value["b"].ravel()]).astype(np.float64)


FACTORIES = {
    "fixed": lambda z, n: aggregators.clipped_mean(0.5, z, n),
    "adaptive": lambda z, n: aggregators.clipped_mean(AdaptiveClip(initial=0.5), z, n),
    "tree": lambda z, n: aggregators.TreeMean(0.5, z, n, 8),
    "local": lambda z, n: aggregators.locally_noised_mean(0.5, z, n),
    "distributed": lambda z, n: aggregators.secure_mean(0.5, z, n, 20)[0],
}

# Secure aggregation compiles slowly; the server's noise is one code for both clips.
KINDS = [pytest.param(name, marks=[pytest.mark.slow] * (name in ("adaptive", "distributed"))) for name in FACTORIES]


@functools.cache
def process_of(name, z, clients):
    """One for all tests, because each that is made is compiled anew."""
    return FACTORIES[name](z, clients).create(VECTOR)


def aggregate(process, cohort, state=None):
    return process.next(process.initialize() if state is None else state, cohort)


@pytest.mark.parametrize("name", KINDS)
def test_removing_a_client_moves_the_mean_by_the_clip_over_the_expected_cohort(name):
    process = process_of(name, 0.0, 10)
    others = [update(0.3, 1), update(7.0, 2)]
    for norm, moved in [(0.2, 0.2), (0.6, 0.5), (3e30, 0.5)]:  # the last one's square is no float32
        with_it, without = (aggregate(process, cohort) for cohort in ([update(norm), *others], others))
        difference = np.linalg.norm(unpack(with_it.result) - unpack(without.result))
        assert difference == pytest.approx(moved / 10, rel=2e-3)
        assert difference <= 0.5 / 10 * (1 + (1e-3 if name == "distributed" else 1e-6))


@pytest.mark.parametrize("name", KINDS)
def test_an_update_that_is_not_finite_counts_as_zeros(name):
    process = process_of(name, 0.0, 10)
    bad = [update(1.0), update(1.0)]
    bad[0]["a"][7] = np.nan
    bad[1]["b"][0, 0] = np.inf
    with_them, without = (aggregate(process, [update(0.3, 1), *more]) for more in (bad, []))
    np.testing.assert_allclose(unpack(with_them.result), unpack(without.result), atol=2e-6)


@pytest.mark.parametrize("name", [kind for kind in KINDS if kind.values[0] in ("fixed", "adaptive", "distributed")])
@pytest.mark.parametrize("cohort", [0, 4])
def test_noise_has_the_stated_deviation_and_is_new_in_every_round(name, cohort):
    if name == "distributed" and cohort == 0:
        cohort = 2  # its noise comes from the clients: half of them, half the variance
    process = process_of(name, 3.0, 4)
    zeros = [update(0.0)] * cohort
    first = aggregate(process, zeros)
    again = unpack(aggregate(process, zeros).result)  # a round that is run again from its state
    later = unpack(aggregate(process, zeros, first.state).result)
    first = unpack(first.result)
    stddev = 3.0 * 0.5 / 4
    if name == "adaptive":
        stddev = AdaptiveClip().split(3.0, 4)[0] * 0.5 / 4
    if name == "distributed":
        stddev *= math.sqrt(cohort / 4)
    check_noise(first, stddev)
    check_noise(again, stddev)
    for other in (again, later):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.15
    # The tensors of one update have noise of their own.
    assert not np.isclose(first[-4:], first[:4]).all()


def test_every_client_adds_local_noise_of_its_own():
    process = process_of("local", 3.0, 1)
    for cohort in (1, 8):
        check_noise(unpack(aggregate(process, [update(0.0)] * cohort).result), 3.0 * 0.5 * math.sqrt(cohort))


def test_two_runs_of_one_process_share_no_noise():
    process = process_of("fixed", 3.0, 4)
    one, two = (unpack(aggregate(process, []).result) for _ in range(2))
    assert abs(np.corrcoef(one, two)[0, 1]) < 0.15


@pytest.mark.slow
def test_tree_noise_is_that_of_the_nodes_and_restarts():
    """The running total after t rounds has the variance of the nodes of [1, t], a node of level k having
    1 / (2 - 2^-k) of a leaf's, and what the trees before it had."""
    process = process_of("tree", 1.0, 1)
    state, total, totals = process.initialize(), 0.0, []
    for _ in range(16):
        output = aggregate(process, [], state)
        state, total = output.state, total + unpack(output.result)
        totals.append(total)
    variances = [sum(1 / (2 - 2.0**-k) for k in range(4) if t >> k & 1) for t in range(1, 9)]
    for t, found in enumerate(totals):
        variance = variances[t % 8] + (variances[7] if t >= 8 else 0.0)
        check_noise(found, 0.5 * math.sqrt(variance))
    # The second tree's noise is new: its total is not the first's again.
    assert abs(np.corrcoef(totals[7], totals[15] - totals[7])[0, 1]) < 0.15
    # Within a tree it is not: a third of the first leaf's noise is in the node above it, a correlation of 0.41.
    assert abs(np.corrcoef(totals[0], totals[1])[0, 1]) > 0.15


@pytest.mark.slow
def test_a_tree_round_that_is_run_again_draws_new_noise():
    process = process_of("tree", 1.0, 1)
    state = aggregate(process, []).state
    one, two = (unpack(aggregate(process, [], state).result) for _ in range(2))
    assert np.isclose(one, two).mean() < 0.01  # of 2000 normals some are close


def adaptive_rounds(clip, z, clients, cohort, fresh=False):
    """The next clip after each of many rounds of a cohort; with ``fresh`` each of them begins at the same clip."""
    query = aggregators.AdaptivelyClippedSum(clip, z, clients, aggregators.Secret())

    @tf.function
    def round_of(state):
        params, sample = query.derive_sample_params(state), query.initial_sample_state(cohort[0])
        for record in cohort:
            sample = query.accumulate_record(params, sample, record)
        return query.get_noised_result(sample, state)[1]

    state = begun = query.initial_global_state()
    while True:
        state = round_of(begun if fresh else state)
        yield float(query.derive_metrics(state)["clip"])


def of_norm(norm):
    return tf.constant([norm, 0.0])


@pytest.mark.parametrize(("start", "quantile", "goal"), [(0.01, 0.8, 1.6), (100.0, 0.5, 1.0)])
def test_the_adaptive_clip_reaches_the_true_quantile(start, quantile, goal):
    # Of these norms the median is 1, and four fifths are below any clip from 1.4 to 1.8.
    clip = AdaptiveClip(initial=start * goal, target_quantile=quantile)
    rounds = adaptive_rounds(clip, 0.1, 5.0, [of_norm(norm) for norm in (0.2, 0.6, 1.0, 1.4, 1.8)])
    assert np.median([next(rounds) for _ in range(100)][-30:]) == pytest.approx(goal, rel=0.15)


@pytest.mark.parametrize(("count", "end"), [(2.0, 1e-8), (-2.0, 1e10)])
def test_the_adaptive_clip_stays_within_the_range_that_float32_can_measure(count, end):
    query = aggregators._Quantile(1.0, 0.5, 1e4, 0.0, 4.0, True, secret=aggregators.Secret())
    state = query.initial_global_state()
    for _ in range(2):
        clip, state, _ = query.get_noised_result(tf.constant(count), state)
        assert float(clip) == float(state.current_estimate) == pytest.approx(end)


def test_the_count_of_the_adaptive_clip_has_noise():
    clip = AdaptiveClip(initial=1.0, learning_rate=1.0, clipped_count_stddev=0.4)
    rounds = adaptive_rounds(clip, 0.5, 4.0, [of_norm(0.5)] * 2 + [of_norm(2.0)] * 2, fresh=True)
    check_noise(np.array([math.log(next(rounds)) for _ in range(420)]), 0.4 / 4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("size", [1e-6, 1e-2, 3.0])
def test_updates_of_any_width_have_at_most_the_norm_of_the_clip_after_they_are_rounded(dtype, size):
    rng = np.random.default_rng(0)
    for _ in range(20):
        record = [tf.cast(size * rng.normal(size=400), dtype), tf.cast(size * rng.normal(size=(3, 7)), dtype)]
        for clip in (size, 1e9):
            clipped, norm = aggregators.clip_by_norm(record, clip)
            exact = np.sqrt(sum(np.sum(np.asarray(tf.cast(t, tf.float64)) ** 2) for t in clipped))
            assert exact <= clip * (1 + 1e-6) and clipped[0].dtype == dtype
            assert exact > 0.95 * min(clip, float(norm)) or size == 1e-6
