"""Modules that take a while to import, and are imported when something of them is first used."""

from __future__ import annotations

import importlib
import types
from typing import Any

__all__ = ["dp_event"]


class _LazyModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


dp_event: Any = _LazyModule("dp_accounting.dp_event")
