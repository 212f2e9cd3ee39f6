"""What tests of the engine share: the records of ops, put back as they were, and what the fallback was left."""

import pytest

from tfdpfl.clipping import engine as engine_module
from tfdpfl.clipping import registry
from tfdpfl.clipping.pipeline import ClippingPipeline


@pytest.fixture
def rules():
    """The records of ops, which are as they were when a test ends."""
    known = dict(registry.OPS)
    yield registry.OPS
    registry.OPS.clear()
    registry.OPS.update(known)


@pytest.fixture
def replayed(monkeypatch):
    """What the plans of a test leave to the fallback."""
    found = []

    class Seen(ClippingPipeline):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(any(part.replayed for part in self.parts))

    monkeypatch.setattr(engine_module, "ClippingPipeline", Seen)
    return found
