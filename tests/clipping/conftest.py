"""What tests of the engine share: the tables of rules, put back as they were, and what the fallback was left."""

import pytest

from tfdpfl.clipping import engine as engine_module
from tfdpfl.clipping import registry
from tfdpfl.clipping.pipeline import ClippingPipeline


@pytest.fixture
def rules():
    """The tables of moves and rules, which are as they were when a test ends."""
    known = {name: dict(getattr(registry, name)) for name in ("BATCHING_RULES", "RULES")}
    yield registry
    for name, table in known.items():
        getattr(registry, name).clear()
        getattr(registry, name).update(table)


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
