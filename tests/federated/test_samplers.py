"""Samplers keep what they declare: rates, sizes, limits, and the same cohort for the same round."""

import collections
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tfdpfl.federated.privacy import Participation
from tfdpfl.federated.samplers import (
    AvailabilityClientSampler,
    BoundedParticipationSampler,
    FixedSizeClientSampler,
    PoissonClientSampler,
)

DRAWS = 10_000
IDS = [f"client {i}" for i in range(20)]


def everyone(round_num):
    return IDS


KINDS = {
    "poisson": lambda seed=None, ids=IDS: PoissonClientSampler(ids, 0.3, seed),
    "fixed": lambda seed=None, ids=IDS: FixedSizeClientSampler(ids, 5, seed),
    "bounded": lambda seed=None, ids=IDS: BoundedParticipationSampler(ids, 3, 40, 2, seed),
    "availability": lambda seed=None, ids=IDS: AvailabilityClientSampler(ids, 3, everyone, 40, 2, seed),
}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)


def two_sided(count, n, p):
    """Fails once in 10^9 runs where p is the truth."""
    assert stats.binomtest(int(count), n, p).pvalue > 1e-9


def test_poisson_takes_every_client_at_its_rate_independently_of_others_and_of_rounds():
    rate = 0.07
    sampler = PoissonClientSampler(IDS, rate)
    drawn = np.zeros((DRAWS, len(IDS)), bool)
    for r in range(DRAWS):
        drawn[r] = np.isin(IDS, sampler(r))
    for i in range(len(IDS)):
        two_sided(drawn[:, i].sum(), DRAWS, rate)
        two_sided((drawn[:, i] & drawn[:, i - 1]).sum(), DRAWS, rate**2)
        two_sided((drawn[1:, i] & drawn[:-1, i]).sum(), DRAWS - 1, rate**2)
    for shift in range(1, 9):  # a stream that overlaps the next round's would show its clients there, shifted
        together = drawn[1:, :-shift] & drawn[:-1, shift:]
        two_sided(together.sum(), together.size, rate**2)
    # Sizes are binomial, the empty cohort as often as it should be.
    two_sided((drawn.sum(1) == 0).sum(), DRAWS, (1 - rate) ** len(IDS))
    want = stats.binom(len(IDS), rate).pmf(range(4)) * DRAWS
    got = np.bincount(drawn.sum(1), minlength=4)
    sizes = stats.chisquare([*got[:4], got[4:].sum()], [*want, DRAWS - want.sum()])
    assert sizes.pvalue > 1e-8


def test_a_wrong_rate_would_be_seen():
    sampler = PoissonClientSampler(IDS, 0.07)
    drawn = sum(len(sampler(r)) for r in range(DRAWS))
    for wrong in (0.07 * 2 / 3, 0.07 * 3 / 2):
        assert stats.binomtest(drawn, DRAWS * len(IDS), wrong).pvalue < 1e-9


def test_poisson_at_rate_one_takes_all():
    assert PoissonClientSampler(IDS, 1)(3) == IDS


def test_fixed_size_takes_exactly_that_many_distinct_clients_uniformly():
    sampler = FixedSizeClientSampler(IDS, 5)
    count = collections.Counter()
    pairs = 0
    for r in range(DRAWS):
        cohort = sampler(r)
        assert len(set(cohort)) == 5 and set(cohort) <= set(IDS)
        count.update(cohort)
        pairs += {IDS[0], IDS[1]} <= set(cohort)
    for client in IDS:
        two_sided(count[client], DRAWS, 5 / 20)
    two_sided(pairs, DRAWS, 5 * 4 / (20 * 19))


@settings(max_examples=60)
@given(
    population=st.integers(1, 30),
    data=st.data(),
    max_participations=st.none() | st.integers(1, 5),
    min_separation=st.integers(1, 12),
)
def test_limits_are_never_exceeded_whatever_rounds_are_asked_for(population, data, max_participations, min_separation):
    size = data.draw(st.integers(1, population))
    rounds = sorted(set(data.draw(st.lists(st.integers(0, 80), max_size=60))))
    sampler = BoundedParticipationSampler(range(population), size, max_participations, min_separation)
    seen = collections.defaultdict(list)
    cohorts = {}
    for r in rounds:
        cohorts[r] = sampler(r)
        assert len(cohorts[r]) == len(set(cohorts[r])) <= size
        for client in cohorts[r]:
            seen[client].append(r)
    for taken in seen.values():
        assert max_participations is None or len(taken) <= max_participations
        assert all(np.diff(taken) >= min_separation)
    # It leaves no one out who could have come.
    for r in rounds:
        could = [
            c
            for c in range(population)
            if sum(t < r for t in seen[c]) < (max_participations or 1000)
            and all(r - t >= min_separation for t in seen[c] if t < r)
        ]
        assert len(cohorts[r]) == min(size, len(could))
    assert all(sampler(r) == cohorts[r] for r in rounds)


@pytest.mark.slow
def test_limits_hold_over_ten_thousand_rounds():
    sampler = BoundedParticipationSampler(range(500), 7, 120, 31, seed=1)
    last, count = np.full(500, -31), np.zeros(500, int)
    for r in range(DRAWS):
        cohort = sampler(r)
        assert all(r - last[cohort] >= 31)
        last[cohort] = r
        count[cohort] += 1
    assert count.max() == 120 and count.sum() == 500 * 120


def test_availability_takes_only_those_who_are_there():
    sampler = AvailabilityClientSampler(IDS, 4, lambda r: IDS[: r % 7], max_participations=200)
    for r in range(200):
        cohort = sampler(r)
        assert len(cohort) == min(4, r % 7) and set(cohort) <= set(IDS[: r % 7])


@kinds
def test_a_round_asked_for_again_has_the_same_clients_and_rounds_differ(make):
    sampler = make()
    first = [sampler(r) for r in range(30)]
    assert first == [sampler(r) for r in range(30)]
    assert len({tuple(cohort) for cohort in first}) > 20


@kinds
def test_without_a_seed_two_samplers_differ_and_with_one_they_do_not(make):
    draw = lambda seed: [sampler(r) for sampler in [make(seed)] for r in range(30)]
    assert draw(None) != draw(None)
    assert draw(5) == draw(5) != draw(6)


@kinds
def test_a_restarted_sampler_goes_on_as_the_first_would_have(make):
    whole, begun, resumed = make(3), make(3), make()
    want = [whole(r) for r in range(40)]
    for r in range(17):
        begun(r)
    resumed.set_state(json.loads(json.dumps(begun.get_state())))
    assert [resumed(r) for r in range(40)] == want
    assert whole.seeded and resumed.seeded and not make().seeded
    resumed.set_state(make().get_state())
    assert not resumed.seeded


def test_a_restarted_availability_sampler_remembers_who_took_part_not_who_is_there_now():
    first = AvailabilityClientSampler(IDS, 4, lambda r: IDS[:4], max_participations=1)
    taken = first(0)
    second = AvailabilityClientSampler(IDS, 4, lambda r: IDS[2:8], max_participations=1)
    second.set_state(json.loads(json.dumps(first.get_state())))
    assert second(0) == taken
    assert set(second(1)) == set(IDS[4:8])


def test_a_bounded_sampler_told_of_earlier_rounds_keeps_its_limits_over_them():
    sampler = BoundedParticipationSampler(range(6), 3, max_participations=1)
    sampler.remember({0: ["0", "4"], 1: ["5"]})
    assert sampler(0) == [0, 4]
    assert sorted(sampler(2)) == [1, 2, 3]
    assert sampler(3) == []


def test_what_is_declared():
    assert PoissonClientSampler(IDS, 0.3).participation == Participation(
        sampling="poisson", population=20, clients_per_round=6.0
    )
    assert FixedSizeClientSampler(IDS, 5).participation == Participation(
        sampling="fixed_size", population=20, clients_per_round=5
    )
    assert BoundedParticipationSampler(IDS, 5, 4, 3).participation == Participation(
        sampling="bounded", population=20, clients_per_round=5, max_participations=4, min_separation=3
    )
    # Nothing is limited and no randomness claimed: a client may be in every round.
    assert AvailabilityClientSampler(IDS, 5, everyone).participation.sampling == "none"
    assert BoundedParticipationSampler(IDS, 5, min_separation=2).participation.sampling == "bounded"


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: PoissonClientSampler([], 0.1), "client_ids must name at least one"),
        (lambda: PoissonClientSampler("abc", 0.1), "client_ids must name at least one"),
        (lambda: PoissonClientSampler(["a", "b", "a"], 0.1), "distinct, got 'a'"),
        (lambda: PoissonClientSampler(IDS, 0), "sampling_rate must be"),
        (lambda: PoissonClientSampler(IDS, -0.1), "sampling_rate must be"),
        (lambda: PoissonClientSampler(IDS, 1.01), "sampling_rate must be at most 1"),
        (lambda: PoissonClientSampler(IDS, float("nan")), "sampling_rate must be"),
        (lambda: PoissonClientSampler(IDS, True), "sampling_rate must be"),
        (lambda: PoissonClientSampler(IDS, 0.1, seed=-1), "seed must be"),
        (lambda: FixedSizeClientSampler(IDS, 21), "at most the 20 clients"),
        (lambda: FixedSizeClientSampler(IDS, 0), "clients_per_round must be"),
        (lambda: FixedSizeClientSampler(IDS, 2.5), "clients_per_round must be"),
        (lambda: BoundedParticipationSampler(IDS, 21), "at most the 20 clients"),
        (lambda: BoundedParticipationSampler(IDS, 5, 0), "max_participations must be"),
        (lambda: BoundedParticipationSampler(IDS, 5, 1, 0), "min_separation must be"),
        (lambda: AvailabilityClientSampler(IDS, 5, lambda r: ["nobody"])(0), "named 'nobody'"),
        (lambda: PoissonClientSampler(IDS, 0.1)(-1), "round_num must be"),
        (lambda: PoissonClientSampler(IDS, 0.1)(0.5), "round_num must be"),
    ],
)
def test_bad_input_is_named_with_its_mend(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_round_before_one_that_was_drawn_is_refused():
    sampler = BoundedParticipationSampler(IDS, 5, 1)
    sampler(4)
    with pytest.raises(ValueError, match="rising order"):
        sampler(3)


def test_a_state_of_another_sampler_is_refused():
    with pytest.raises(ValueError, match="kind"):
        PoissonClientSampler(IDS, 0.1).set_state(FixedSizeClientSampler(IDS, 2).get_state())
    with pytest.raises(ValueError, match="population"):
        PoissonClientSampler(IDS, 0.1).set_state(PoissonClientSampler(IDS[1:], 0.1).get_state())
