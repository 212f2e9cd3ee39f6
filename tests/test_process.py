"""What a process must not share with its parent is renewed in every fork of it."""

import os
import weakref
from unittest import mock

import pytest

from tfdpfl import _process

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")


@needs_fork
def test_one_object_that_cannot_be_renewed_does_not_keep_the_others():
    class Fails:
        def _renew(self):
            raise RuntimeError

    class Counts:
        renewed = 0

        def _renew(self):
            self.renewed += 1

    objects = [cls() for cls in [Fails, Counts] * 10]
    with mock.patch.object(_process, "_OBJECTS", weakref.WeakSet()):
        for each in objects:
            _process.renew_after_fork(each)
        with pytest.raises(RuntimeError):
            _process._renew()
    assert [each.renewed for each in objects[1::2]] == [1] * 10
