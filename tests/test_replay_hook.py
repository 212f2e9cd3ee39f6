"""Without a replay a release is let out as it is; with one the tape sees copies, and says what is let out."""

import numpy as np
import pytest

from tfdpfl import _replay_hook

VALUES, NOISE = np.array([1.0, 2.0]), np.array([0.5, -0.5])


@pytest.fixture
def seen(monkeypatch):
    """What a tape is shown, which lets out nines."""
    shown = []

    class Tape:
        def take(self, release):
            shown.append(release)
            return [np.full_like(part, 9) for part in release.out]

    monkeypatch.setattr(_replay_hook, "tape", Tape())
    return shown


def test_without_a_tape_nothing_happens_to_a_release():
    out = VALUES + NOISE
    assert _replay_hook.released([VALUES], [out], [NOISE], [1.0], 0.5)[0] is out
    assert _replay_hook.drawn(VALUES, out, 1.0, None) is out
    values = VALUES.copy()
    _replay_hook.add([values], [NOISE], [1.0], 0.5)
    np.testing.assert_array_equal(values, out)


def test_a_tape_sees_copies_and_says_what_is_let_out(seen):
    out = VALUES + NOISE
    (let_out,) = _replay_hook.released([VALUES], [out], [NOISE], [2], 0.5, norm=1)
    (release,) = seen
    assert let_out.tolist() == [9, 9] and out.tolist() == [1.5, 1.5]
    for shown, given in ((release.values, VALUES), (release.noise, NOISE), (release.out, out)):
        assert shown[0] is not given and np.array_equal(shown[0], given)
    # A unit that is replaced moves twice as far as one that is added, where nothing else is said.
    assert (release.scales, release.bound, release.replaced, release.norm) == ([2.0], 0.5, 1.0, 1)
    assert release.where.rpartition(":")[0] == __file__


def test_noise_that_is_added_in_place_is_shown_with_the_values_before_it(seen):
    values = VALUES.copy()
    _replay_hook.add([values], iter([NOISE]), [1.0], 0.5, replaced=0.5)
    (release,) = seen
    assert np.array_equal(release.values[0], VALUES) and np.array_equal(release.noise[0], NOISE)
    assert np.array_equal(release.out[0], VALUES + NOISE) and values.tolist() == [9, 9]
    assert release.replaced == 0.5 and release.where.rpartition(":")[0] == __file__


def test_what_is_drawn_is_shown_with_its_epsilon_and_loss(seen):
    loss = lambda one, other, said: 0.0
    assert _replay_hook.drawn(np.array([1]), np.array([2]), 0.7, loss).tolist() == [9]
    assert (seen[0].bound, seen[0].replaced, seen[0].loss) == (0.7, 0.7, loss)
