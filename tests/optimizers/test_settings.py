"""The arguments of a DP optimizer."""

import json
import re

import numpy as np
import pytest

import tfdpfl

BAD = [
    ({"noise_multiplier": -0.1}, "noise_multiplier=-0.1", "compute_noise_multiplier"),
    ({"noise_multiplier": float("nan")}, "noise_multiplier=nan", "compute_noise_multiplier"),
    ({"noise_multiplier": float("inf")}, "noise_multiplier=inf", "compute_noise_multiplier"),
    ({"noise_multiplier": True}, "noise_multiplier=True", "compute_noise_multiplier"),
    ({"noise_multiplier": "1.0"}, "noise_multiplier='1.0'", "compute_noise_multiplier"),
    ({"noise_multiplier": None}, "noise_multiplier=None", "compute_noise_multiplier"),
    ({"noise_multiplier": 1e-30}, "noise_multiplier=1e-30", "Scale the loss"),
    ({"expected_batch_size": 1e30}, "expected_batch_size=1e+30", "Scale the loss"),
    ({"l2_norm_clip": 0}, "l2_norm_clip=0", "1.0 is usual"),
    ({"l2_norm_clip": -1.0}, "l2_norm_clip=-1.0", "1.0 is usual"),
    ({"l2_norm_clip": float("nan")}, "l2_norm_clip=nan", "1.0 is usual"),
    ({"l2_norm_clip": float("inf")}, "l2_norm_clip=inf", "1.0 is usual"),
    ({"l2_norm_clip": False}, "l2_norm_clip=False", "1.0 is usual"),
    ({"l2_norm_clip": "big"}, "l2_norm_clip='big'", "1.0 is usual"),
    ({"num_microbatches": 0}, "num_microbatches=0", "None clips every example"),
    ({"num_microbatches": -3}, "num_microbatches=-3", "None clips every example"),
    ({"num_microbatches": 2.0}, "num_microbatches=2.0", "None clips every example"),
    ({"num_microbatches": True}, "num_microbatches=True", "None clips every example"),
    ({"expected_batch_size": 0}, "expected_batch_size=0", "sampling rate"),
    ({"expected_batch_size": -5}, "expected_batch_size=-5", "sampling rate"),
    ({"expected_batch_size": "5"}, "expected_batch_size='5'", "sampling rate"),
    ({"seed": -1}, "seed=-1", "None"),
    ({"seed": 1.5}, "seed=1.5", "None"),
    ({"seed": True}, "seed=True", "None"),
    ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0", "how many batches"),
    ({"gradient_accumulation_steps": 2.0}, "gradient_accumulation_steps=2.0", "how many batches"),
    ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps=True", "how many batches"),
]


@pytest.mark.parametrize("given, named, mend", BAD, ids=[named for _, named, _ in BAD])
def test_a_bad_argument_is_named_with_its_value_and_the_mend(given, named, mend):
    with pytest.raises(ValueError, match=f"(?s){re.escape(named)}.*{re.escape(mend)}"):
        tfdpfl.DPAdam(**{"l2_norm_clip": 1.0, "noise_multiplier": 1.0, **given})


def test_numpy_numbers_are_numbers():
    optimizer = tfdpfl.DPSGD(
        np.float32(1.5), np.float64(0.5), num_microbatches=np.int64(4), seed=np.int32(3), expected_batch_size=8
    )
    own = {k: optimizer.get_config()[k] for k in ("l2_norm_clip", "noise_multiplier", "num_microbatches", "seed")}
    assert json.loads(json.dumps(own)) == {
        "l2_norm_clip": 1.5,
        "noise_multiplier": 0.5,
        "num_microbatches": 4,
        "seed": 3,
    }


@pytest.mark.parametrize("name", [
    "l2_norm_clip", "noise_multiplier", "num_microbatches", "expected_batch_size", "gradient_accumulation_steps",
])  # fmt: skip
def test_a_setting_that_is_traced_cannot_be_changed_behind_its_steps(name):
    optimizer = tfdpfl.DPAdam(1.0, 1.5)
    before = getattr(optimizer, name, None)
    with pytest.raises(AttributeError, match=rf"{name} is part of steps.*Compile.*DPAdam\({name}=3"):
        setattr(optimizer, name, 3)
    assert getattr(optimizer, name, None) == before
