"""Tests of what the segments of correlated noise make of the ways to draw batches."""

import numpy as np
import pytest
import tensorflow as tf

from tfdpfl.accounting.sampling import BY_CODE, CYCLIC_POISSON, FIXED_ORDER, SHUFFLED
from tfdpfl.noise import Banded
from tfdpfl.optimizers._noise_segments import COLUMNS, ID, ROWS, STEP, NoiseSegments, _Training


def test_only_samplings_that_keep_uses_apart_limit_them():
    rows = {code: {(0.0, float(code), 48.0, 12.0, 0.0)} for code in BY_CODE}
    limits = {code: _Training(steps=6, passes=3, sampled=row).limits(2) for code, row in rows.items()}
    for unit in ("example", "user"):
        assert limits.pop(SHUFFLED.code(unit=unit)) == {"max_participations": 3}
        assert limits.pop(FIXED_ORDER.code(unit=unit)) == {"min_separation": 4, "max_participations": 3}
        assert limits.pop(CYCLIC_POISSON.code(unit=unit)) == {"min_separation": 2, "sampling_rate": 0.5}
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
