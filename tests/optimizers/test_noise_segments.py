"""Tests of what the segments of correlated noise make of the ways to draw batches."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl.accounting.sampling import B_MIN_SEP, BY_CODE, CYCLIC_POISSON, FIXED_ORDER, SHUFFLED
from tfdpfl.noise import Banded, Source, Tree
from tfdpfl.optimizers import _replicas
from tfdpfl.optimizers._noise_segments import COLUMNS, ID, PARENT, ROWS, SINCE, STEP, NoiseSegments, _Training
from tfdpfl.optimizers._step_table import Counter


def test_only_samplings_that_keep_uses_apart_limit_them():
    rows = {code: {(0.0, float(code), 48.0, 12.0, 0.0)} for code in BY_CODE}
    limits = {code: _Training(steps=6, passes=3, sampled=row).limits(2) for code, row in rows.items()}
    for unit in ("example", "user"):
        assert limits.pop(SHUFFLED.code(unit=unit)) == {"max_participations": 3}
        assert limits.pop(FIXED_ORDER.code(unit=unit)) == {"min_separation": 4, "max_participations": 3}
        for scheme, rate in ((CYCLIC_POISSON, 1 / 2), (B_MIN_SEP, 1 / 3)):
            assert limits.pop(scheme.code(unit=unit)) == {
                "min_separation": 2, "sampling_rate": pytest.approx(rate), "sampling": scheme.name,
            }  # fmt: skip
    assert not any(limits.values())


@pytest.mark.parametrize(("scheme", "step", "anew"), [
    (CYCLIC_POISSON, 3, True), (CYCLIC_POISSON, 4, False), (SHUFFLED, 3, False),
])  # fmt: skip
def test_noise_begins_anew_where_a_pass_begins_the_turns_of_the_groups_anew(scheme, step, anew):
    segments = NoiseSegments(Banded(bands=2, min_separation=2, max_participations=1), 1.0)
    table = np.zeros([1 + ROWS, len(COLUMNS)])
    table[0, [ID, STEP]] = table[1, [ID, STEP]] = 1, step
    segments.table = tf.Variable(table)
    segments._own.assign(table)
    segments.begin_pass(scheme.code())
    assert (segments._own.numpy()[0, ID] == 0) == anew


def test_workers_have_one_segment_and_a_process_that_goes_on_by_itself_has_its_own(monkeypatch):
    def segments():
        made = NoiseSegments(Tree(), 1.0)
        made.build([(2,)], [0], lambda name, value: tf.Variable(value))
        return made

    def step(workers, sources):
        monkeypatch.setattr(_replicas, "workers", lambda: workers)
        for each, source in zip(both, sources, strict=True):
            each._go_on(source, counter, tf.zeros([6], tf.float64))
            yield float(counter.origin)

    def states():
        return [tuple(float(v) for v in each.state()) for each in both]

    both, counter = [segments(), segments()], Counter()
    shared = lambda: [Source().shared(key) for key in 2 * [Source().fresh_key()]]
    first, second = [set(step(2, shared())) for _ in range(2)]
    assert first == second and len(first) == 1 and len(set(states())) == 1
    # What each takes by itself is another segment, which goes on from the one of both.
    alone = list(step(1, [Source(), Source()]))
    assert len({*first, *alone}) == 3 and len(set(states())) == 2
    for each, origin in zip(both, alone, strict=True):
        (row,) = [row for row in each.rows() if row[ID] == origin]
        assert {row[PARENT]} == first and row[SINCE] == 2
    # They do not agree any more, also where only one of them would begin a segment.
    for change in (
        lambda one: one._own[0, ID].assign(0.0), lambda one: one.table[0, ID].assign(5.0),
        lambda one: one.table[0, STEP].assign(9.0), lambda one: one._workers.assign(1.0),
    ):  # fmt: skip
        both = [segments(), segments()]
        assert set(step(2, shared())) and len(set(states())) == 1
        change(both[1])
        assert len(set(states())) == 2
