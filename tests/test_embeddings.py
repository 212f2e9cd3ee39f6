"""The noise of AdaFEST's counts and of its gradients cost together what the optimizer's noise costs."""

import json

import pytest

from tfdpfl.accounting import PrivacyLedger
from tfdpfl.embeddings import AdaFEST


@pytest.mark.parametrize("given", [None, 1.2, 9.0])
def test_the_two_noises_cost_together_what_one_of_the_total_costs(given):
    gradients, counts = AdaFEST(threshold=4.0, noise_multiplier=given).split(1.1)
    once = dict(num_examples=10, batch_size=10, sampling="none")
    both = PrivacyLedger().record(gradients, 5, **once).record(counts, 5, **once)
    assert both.epsilon(1e-5) == pytest.approx(PrivacyLedger().record(1.1, 5, **once).epsilon(1e-5), rel=1e-4)
    assert counts == (given or 2.2) and gradients > 1.1


def test_counts_of_less_noise_than_the_total_leave_nothing_for_the_gradients():
    for least in (1.0, 1.1):
        with pytest.raises(ValueError, match=r"is not above the optimizer's 1\.1"):
            AdaFEST(threshold=4.0, noise_multiplier=least).split(1.1)
    assert AdaFEST(threshold=4.0).split(0.0) == (0.0, 0.0)


def test_arguments_go_through_json():
    saved = json.loads(json.dumps(AdaFEST(threshold=4.0, tables=["words"]).to_dict()))
    assert AdaFEST(**saved) == AdaFEST(threshold=4.0, tables=("words",))
