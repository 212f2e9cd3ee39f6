"""Makes Keras find the classes of tfdpfl in files, whichever of the two is imported first."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["AfterKeras", "register"]

# What registers classes with Keras.
_MODULES = ("optimizers", "label_dp.losses", "label_dp.pipeline", "preprocessing", "features")


def register() -> None:
    """Imports the modules whose classes Keras looks up by name, unless Keras runs on another backend."""
    from tfdpfl.errors import PrivacyError

    with contextlib.suppress(PrivacyError):
        for name in _MODULES:
            importlib.import_module(f"tfdpfl.{name}")


class AfterKeras(importlib.abc.MetaPathFinder):
    """Registers them as soon as Keras 3 is imported. (Keras 2 imports the module that a file names by itself.)

    This is an import hook, because `import tfdpfl` must not take the seconds that TensorFlow takes. TensorFlow and
    Keras import each other, so the one that was asked for is ready last.
    """

    def __init__(self) -> None:
        self._searching = False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        self._register_if_ready()  # if one of our modules imported Keras, not before it was ready itself
        if name not in ("keras", "tensorflow") or self._searching:
            return None
        self._searching = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searching = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                module.__spec__._initializing = False  # type: ignore[union-attr]
                self._register_if_ready()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def _register_if_ready(self) -> None:
        keras, tensorflow = sys.modules.get("keras"), sys.modules.get("tensorflow")
        if keras is None or tensorflow is None or self not in sys.meta_path:
            return
        # All modules are looked at last, because this runs once for each of the thousands that TensorFlow imports.
        if _is_initializing(tensorflow) or _is_initializing(keras):
            return
        if any(_is_initializing(m) for name, m in list(sys.modules.items()) if name.split(".")[0] == "tfdpfl"):
            return
        sys.meta_path.remove(self)
        if keras.__version__.startswith("3.") and keras.backend.backend() == "tensorflow":
            register()


def _is_initializing(module: ModuleType) -> bool:
    return getattr(module.__spec__, "_initializing", False)
