"""Has every `fit` of a private model say how its batches are drawn, with `PrivacyBudget` or without."""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = ["watch"]


@functools.cache
def watch(callback_list: type) -> None:
    """Has `tfdpfl.callbacks` look at each `fit` that begins. ``callback_list`` is Keras's class of that name.

    Keras tells an optimizer nothing of a `fit` but the steps that it traces, and a second `fit` traces none.
    """
    begin = callback_list.on_train_begin  # type: ignore[attr-defined]

    @functools.wraps(begin)
    def on_train_begin(self: Any, logs: dict | None = None) -> Any:
        # By name, because callbacks are built on optimizers.
        importlib.import_module("tfdpfl.callbacks._watch").join(self)
        return begin(self, logs)

    callback_list.on_train_begin = on_train_begin  # type: ignore[attr-defined]
