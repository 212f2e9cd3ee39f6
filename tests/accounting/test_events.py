"""Events that dp-accounting lacks are priced, saved and loaded."""

import json

import dp_accounting
import pytest

from tfdpfl.accounting import PrivacyLedger
from tfdpfl.accounting.events import gaussian_of_group, thresholded
from tfdpfl.errors import PrivacyError
from tfdpfl.noise.strategies import moved_normals


def test_a_ledger_of_events_that_dp_accounting_lacks_is_loaded_again():
    ledger = (
        PrivacyLedger().add(moved_normals(0.5, [(4.0, 0.25)])).add(thresholded(dp_accounting.GaussianDpEvent(2), 1e-9))
    )
    restored = PrivacyLedger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert restored.epsilon(1e-5) == ledger.epsilon(1e-5) > PrivacyLedger().add(moved_normals(0.5, [])).epsilon(1e-5)


def test_gaussian_noise_has_a_kth_of_its_sigma_for_a_group_and_no_other_noise_has_a_price():
    gaussian, composed = dp_accounting.GaussianDpEvent, dp_accounting.ComposedDpEvent
    times = dp_accounting.SelfComposedDpEvent
    nothing, open_ = dp_accounting.NoOpDpEvent(), dp_accounting.NonPrivateDpEvent()
    event = composed([gaussian(6.0), times(composed([gaussian(3.0), nothing]), 5), open_])
    assert gaussian_of_group(event, 3) == composed([gaussian(2.0), times(composed([gaussian(1.0), nothing]), 5), open_])
    for other in (
        dp_accounting.PoissonSampledDpEvent(0.1, gaussian(1.0)), moved_normals(0.5, [(4.0, 0.25)]),
        thresholded(gaussian(2.0), 1e-9), times(dp_accounting.LaplaceDpEvent(1.0), 2),
    ):  # fmt: skip
        with pytest.raises(PrivacyError, match="has no known ε for max_examples_per_user=2"):
            gaussian_of_group(other, 2)
