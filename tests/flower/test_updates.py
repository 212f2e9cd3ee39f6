"""The sum of clipped updates, in numpy alone."""

import math

import numpy as np
import pytest

pytest.importorskip("flwr")

from flower_fakes import FakeGrid, model
from strategy_cases import CLIENTS, fixed

from tfdpfl import PrivacyError
from tfdpfl.flower.updates import ClippedSum


def test_the_norm_is_over_all_arrays_together():
    base = {"a": np.zeros((2, 2)), "b": np.zeros((2, 2))}
    norm = ClippedSum(base, 1.0).add({"a": np.array([[1, 2], [3, 4]]), "b": np.array([[5, 6], [7, 8]])})
    assert norm == pytest.approx(math.sqrt(sum(i * i for i in range(1, 9))))


def test_clipping_scales_all_arrays_by_one_factor():
    update = {"a": np.array([[1.5, -0.5], [2.0, -1.0]]), "b": np.array([0.5, -0.5])}
    total = ClippedSum({k: np.zeros_like(v) for k, v in update.items()}, 1.5)
    norm = total.add(update)
    assert norm == pytest.approx(math.sqrt(8.0))
    for name, value in update.items():
        np.testing.assert_allclose(total.total[name], value * 1.5 / math.sqrt(8.0))


def test_an_update_within_the_clip_stays_as_it_is():
    base = {k: np.arange(3.0) + i for i, k in enumerate("abc")}
    total = ClippedSum(base, 4.0)
    total.add({k: v - 0.5 for k, v in base.items()})
    assert all((part == -0.5).all() for part in total.total.values())


def test_arrays_that_are_neither_weights_nor_counters_are_refused():
    for dtype in (np.complex64, np.dtype("V2")):  # bfloat16 arrives as two bytes
        base = {"w": np.zeros(3, np.float32), "half": np.zeros(2, dtype)}
        with pytest.raises(ValueError, match="'half' is of"):
            ClippedSum(base, 1.0)
    strategy = fixed()
    with pytest.raises(PrivacyError, match="'c' is of complex64"):
        strategy.start(FakeGrid(CLIENTS, None), model(c=np.zeros(2, np.complex64)), num_rounds=1)
    assert strategy.rounds_charged == 0


def test_the_norm_of_a_half_precision_update_is_that_of_what_is_added():
    """Differences in float16 round by up to 1/2048, all to the client's advantage if it looks for such numbers."""
    base = np.random.default_rng(0).uniform(1, 2, 60).astype(np.float16)
    others = np.arange(2**16, dtype=np.uint16).view(np.float16)
    others = others[np.isfinite(others)]
    sent = []
    for b in base:
        exact, believed = others.astype(np.float64) - float(b), np.abs((others - b).astype(np.float64))
        gain = np.where((believed > 0.5) & (believed < 1e4), np.abs(exact) / np.maximum(believed, 0.5), 0.0)
        sent.append(others[gain.argmax()])
    sent = np.array(sent, np.float16)
    total = ClippedSum({"w": base}, float(np.linalg.norm((sent - base).astype(np.float64))))
    total.add({"w": sent})
    assert np.linalg.norm(total.total["w"]) <= total.l2_norm_clip * (1 + 1e-6)
