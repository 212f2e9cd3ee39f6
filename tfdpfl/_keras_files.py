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

# What registers classes with Keras.
_MODULES = ("optimizers", "label_dp.losses", "label_dp.pipeline")


def register() -> None:
    """Imports the modules whose classes Keras looks up by name, unless Keras runs on another backend."""
    from tfdpfl.errors import PrivacyError

    with contextlib.suppress(PrivacyError):
        for name in _MODULES:
            importlib.import_module(f"tfdpfl.{name}")


class AfterKeras(importlib.abc.MetaPathFinder):
    """Registers them as soon as Keras 3 is imported. (Keras 2 imports the module that a file names by itself.)

    An import hook, because `import tfdpfl` is not to take the seconds that TensorFlow takes.
    """

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _keras_is_there(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _keras_is_there(keras: ModuleType) -> None:
    ours = [module for name, module in list(sys.modules.items()) if name.startswith("tfdpfl.")]
    if any(getattr(module.__spec__, "_initializing", False) for module in ours):
        return  # one of them imports Keras, and does not yet have what the others take from it
    if keras.__version__.startswith("3.") and keras.backend.backend() == "tensorflow":
        register()
