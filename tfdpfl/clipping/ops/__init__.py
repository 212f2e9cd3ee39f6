"""Knows the ops, one family a file: each file declares the records of its ops at its end (`registry.teach`). A new file
is found by itself."""

import importlib
import pkgutil

__all__: list[str] = []

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
