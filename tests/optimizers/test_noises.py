"""The noise that an optimizer's arguments ask for: one kind, and nothing that looks like one."""

import pytest

import tfdpfl


def test_two_kinds_of_noise_and_what_is_none_are_refused():
    with pytest.raises(ValueError, match="noise=Tree together with secure_noise=True"):
        tfdpfl.DPFTRL(1.0, 1.0, secure_noise=True)
    with pytest.raises(ValueError, match="secure_noise=1"):
        tfdpfl.DPSGD(1.0, 1.0, secure_noise=1)
