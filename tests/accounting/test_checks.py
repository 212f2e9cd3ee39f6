"""A bad argument is refused by name, with its value and the remedy."""

import json
import math

import numpy as np
import pytest
from accounting_cases import RUN

from tfdpfl.accounting import compute_epsilon, privacy_report, privacy_statement


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (dict(num_examples=0), "num_examples must be a whole number of at least 1, got 0"),
        (dict(num_examples=10.5), "num_examples.*10.5"),
        (dict(num_examples=True), "num_examples.*True"),
        (dict(num_examples="60000"), "num_examples.*'60000'"),
        (dict(batch_size=0), "batch_size.*at least 1, got 0"),
        (dict(batch_size=60001), "batch_size must be at most num_examples=60000, got 60001.*swap"),
        (dict(noise_multiplier=-1.0), "noise_multiplier.*at least 0, got -1.0"),
        (dict(noise_multiplier=math.nan), "noise_multiplier.*nan"),
        (dict(noise_multiplier=math.inf), "noise_multiplier.*inf"),
        (dict(noise_multiplier=False), "noise_multiplier.*False"),
        (dict(delta=0), "delta must be strictly between 0 and 1, got 0"),
        (dict(delta=1), "delta.*got 1: use a value well below 1 / num_examples"),
        (dict(delta=-1e-5), "delta.*-1e-05"),
        (dict(delta=math.nan), "delta.*nan"),
        (dict(num_steps=-1), "num_steps.*at least 0, got -1"),
        (dict(num_steps=1.5), "num_steps.*1.5"),
        (dict(num_steps=None), "exactly one of num_epochs and num_steps"),
        (dict(num_epochs=1), "exactly one of num_epochs and num_steps, got num_epochs=1 and num_steps=10"),
        (dict(num_steps=None, num_epochs=-1), "num_epochs.*-1"),
        (dict(num_steps=None, num_epochs=math.inf), "num_epochs.*inf"),
        (dict(sampling="Bernoulli"), "sampling must be one of 'poisson', 'shuffle', 'fixed_size', 'none'"),
        (dict(sampling=None), "sampling.*None"),
        (dict(accountant="gdp"), "accountant must be one of 'pld', 'rdp', got 'gdp'"),
        (dict(adjacency="friends"), "adjacency must be one of 'add_or_remove_one'"),
        (dict(num_microbatches=3), "num_microbatches must divide batch_size=250, got 3"),
        (dict(num_microbatches=0), "num_microbatches.*0"),
    ],
)
def test_a_bad_argument_is_named_with_its_value_and_the_mend(bad, message):
    args = {**RUN, "num_steps": 10, **bad}
    for function in (compute_epsilon, privacy_report, privacy_statement):
        with pytest.raises(ValueError, match=message):
            function(**args)


def test_numpy_numbers_and_whole_floats_are_numbers():
    run = dict(num_examples=np.int64(60000), batch_size=np.int32(250), noise_multiplier=np.float32(2.0))
    epsilon = compute_epsilon(**run, num_steps=60000 / 250, delta=np.float64(1e-5), accountant="rdp")
    assert epsilon == compute_epsilon(**{**RUN, "noise_multiplier": 2.0}, num_steps=240, accountant="rdp")
    json.dumps(privacy_report(**run, num_steps=1, delta=1e-5, accountant="rdp").to_dict())
