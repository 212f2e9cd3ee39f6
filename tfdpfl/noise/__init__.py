"""Draws noise, and states how far one example moves it.

`strategies` has one class for each kind of correlated noise; `source` draws normals, and `discrete` whole numbers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfdpfl.noise import strategies
from tfdpfl.noise.strategies import *  # noqa: F403

# What imports TensorFlow, or imports this package.
_WHERE = {
    **dict.fromkeys(["AES", "PHILOX", "Source", "gaussian", "new_key"], "tfdpfl.noise.source"),
    **dict.fromkeys(["discrete_gaussian", "grid"], "tfdpfl.noise.discrete"),
    **dict.fromkeys(["Compared", "compare", "compute_correlated_noise_multiplier"], "tfdpfl.accounting.correlated"),
}

__all__ = ["Noise", *strategies.KINDS, *_WHERE]  # noqa: F405

if TYPE_CHECKING:
    from tfdpfl.accounting.correlated import Compared, compare, compute_correlated_noise_multiplier
    from tfdpfl.noise.discrete import discrete_gaussian, grid
    from tfdpfl.noise.source import AES, PHILOX, Source, gaussian, new_key


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
