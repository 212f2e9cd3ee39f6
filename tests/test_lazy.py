"""A lazy module is imported when something of it is first used, and then is that module to all that uses it."""

import subprocess
import sys

import pytest
from dp_accounting import dp_event

from tfdpfl import _lazy


def test_what_a_lazy_module_has_is_what_the_module_has():
    assert _lazy.dp_event.GaussianDpEvent is dp_event.GaussianDpEvent
    with pytest.raises(AttributeError):
        _ = _lazy.dp_event.NoSuchDpEvent


def test_importing_a_lazy_module_loads_nothing():
    code = (
        "import sys; from tfdpfl._lazy import dp_event; assert 'dp_accounting' not in sys.modules;"
        "dp_event.NoOpDpEvent(); assert 'dp_accounting' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
