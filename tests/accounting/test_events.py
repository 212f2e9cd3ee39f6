"""Events that dp-accounting lacks are priced, saved and loaded."""

import json

import dp_accounting

from tfdpfl.accounting import PrivacyLedger
from tfdpfl.accounting.events import thresholded
from tfdpfl.noise.strategies import moved_normals


def test_a_ledger_of_events_that_dp_accounting_lacks_is_loaded_again():
    ledger = (
        PrivacyLedger().add(moved_normals(0.5, [(4.0, 0.25)])).add(thresholded(dp_accounting.GaussianDpEvent(2), 1e-9))
    )
    restored = PrivacyLedger.from_dict(json.loads(json.dumps(ledger.to_dict())))
    assert restored.epsilon(1e-5) == ledger.epsilon(1e-5) > PrivacyLedger().add(moved_normals(0.5, [])).epsilon(1e-5)
