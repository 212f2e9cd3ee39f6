"""Optional kernels in C: per-example filter gradients of convolutions on CPUs.

TensorFlow has no op that keeps the filter gradients of a batch's examples apart. The kernels do, and cost as many
multiplications as the plain filter gradient. They are built at installation if there is a C compiler. Without them, and
wherever they do not apply, the engine uses TensorFlow's own ops, and results agree to rounding.

Set ``TFDPFL_NATIVE`` to ``0`` to use none, or to ``plain``, ``avx2`` or ``avx512`` to use no wider instructions.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import sys
from pathlib import Path

SWITCH = "TFDPFL_NATIVE"
INSTRUCTIONS = ("plain", "avx2", "avx512")  # by the number that the kernels know them by
LIBRARY = Path(__file__).with_name("_kernels.so")
_INTERFACE = 1  # that of tensorflow.c


@dataclasses.dataclass(frozen=True)
class Kernels:
    """The loaded kernels, or why there are none.

    Attributes:
      library: the C functions, or None.
      instructions: the instruction set in use, one of `INSTRUCTIONS`.
      missing: why `library` is None; empty otherwise.
    """

    library: ctypes.CDLL | None
    instructions: str = ""
    missing: str = ""


def kernels() -> Kernels:
    """Returns the kernels that this process can use, as ``TFDPFL_NATIVE`` is now."""
    return _chosen(os.environ.get(SWITCH, "").strip().lower())


@functools.cache
def _chosen(wanted: str) -> Kernels:
    if wanted == "0":
        return Kernels(None, missing=f"{SWITCH}=0 is set")
    if wanted not in ("", "1", *INSTRUCTIONS):
        raise ValueError(
            f"{SWITCH}={wanted!r} is not known, so that it is not clear which kernels to use. Set it to 0, 1, "
            f"{', '.join(INSTRUCTIONS)}, or not at all."
        )
    library, missing = _loaded()
    if library is None:
        return Kernels(None, missing=missing)
    widest = library.tfdpfl_instructions()
    return Kernels(library, INSTRUCTIONS[min(widest, INSTRUCTIONS.index(wanted) if wanted in INSTRUCTIONS else widest)])


@functools.cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    if not LIBRARY.exists():
        return None, "they were not built, since there was no C compiler at installation"
    try:
        library = ctypes.CDLL(str(LIBRARY))
        found = library.tfdpfl_interface()
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY.name} cannot be loaded: {error}"
    if found != _INTERFACE:
        return None, f"{LIBRARY.name} was built from other sources; install the package again"
    pointer, number = ctypes.c_void_p, ctypes.c_int
    library.tfdpfl_filters.argtypes = [pointer] * 7 + [number] * 2
    library.tfdpfl_register.argtypes = [ctypes.c_char_p]
    return library, ""


@functools.cache
def register_ops() -> str:
    """Makes the kernels known to TensorFlow. Returns an empty string, or why that failed."""
    import tensorflow as tf

    library, missing = _loaded()
    if library is None:
        return missing
    name = "libtensorflow_framework.2.dylib" if sys.platform == "darwin" else "libtensorflow_framework.so.2"
    code = library.tfdpfl_register(str(Path(tf.sysconfig.get_lib()) / name).encode())
    return f"TensorFlow {tf.__version__} does not take kernels from C (code {code})" if code else ""


def count_threads() -> int:
    """Returns how many threads a kernel may use: the least of the cores, ``OMP_NUM_THREADS``, and what TensorFlow's
    intra-op setting allows."""
    import tensorflow as tf

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    limits = [cores or 1, tf.config.threading.get_intra_op_parallelism_threads()]
    for name in ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"):
        first = os.environ.get(name, "").split(",")[0].strip()
        limits.append(int(first) if first.isdigit() else 0)
    return min(limit for limit in limits if limit > 0)
