"""Optional kernels in C: per-example gradients of convolutions, norms of embeddings, and normals, on CPUs.

TensorFlow has no op that keeps the filter gradients of a batch's examples apart. The kernels do, and cost as many
multiplications as the plain filter gradient. They are built at installation if there is a C compiler. Without them, and
wherever they do not apply, TensorFlow's own ops and NumPy do the same, and results agree to rounding.

Set ``TFDPFL_NATIVE`` to ``0`` to use none, or to ``plain``, ``avx2`` or ``avx512`` to use no wider instructions.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import os
import sys
from pathlib import Path

import numpy as np

__all__ = ["DRAW", "INSTRUCTIONS", "SWITCH", "Kernels", "count_threads", "kernels", "register_ops"]

SWITCH = "TFDPFL_NATIVE"
INSTRUCTIONS = ("plain", "avx2", "avx512")  # by the number that the kernels know them by
DRAW = "TfdpflNormals"
LIBRARY = Path(__file__).with_name("_kernels.so")
_INTERFACE = 6  # that of tensorflow.c


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

    @property
    def draws(self) -> bool:
        """Whether the op `DRAW` makes normals here, faster than NumPy does."""
        if self.library is None or register_ops():
            return False
        return bool(self.library.tfdpfl_draws(INSTRUCTIONS.index(self.instructions)))

    def normals(self, words: np.ndarray, stddev: float, out: np.ndarray, near: np.ndarray) -> np.ndarray:
        """Fills ``out`` with normals, of words for the radii and as many for the angles.

        Args:
          words: uint32 [2 h].
          stddev: the normals' standard deviation.
          out: float32 [2 h].
          near: uint32 [h or more], scratch.

        Returns:
          The places, below h, of words so near 0 or 2^32 that their pairs of normals must be made anew of more bits.
        """
        half = out.size // 2
        checked = (words, np.uint32, 2 * half), (out, np.float32, 2 * half), (near, np.uint32, near.size)
        fits = all(a.dtype == dtype and a.shape == (size,) and a.flags.c_contiguous for a, dtype, size in checked)
        if self.library is None or not fits or near.size < half or not out.flags.writeable or not near.flags.writeable:
            raise ValueError(
                f"words of {words.dtype} {words.shape}, normals of {out.dtype} {out.shape} and scratch of {near.dtype} "
                f"{near.shape} do not fit together. Pass contiguous arrays: uint32 [2 h], float32 [2 h], uint32 [h]."
            )
        places = words.ctypes.data, half, stddev, out.ctypes.data, near.ctypes.data
        return near[: self.library.tfdpfl_normals(*places, INSTRUCTIONS.index(self.instructions))]


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
    library.tfdpfl_normals.argtypes = [pointer, ctypes.c_int64, ctypes.c_float, pointer, pointer, number]
    library.tfdpfl_normals.restype = ctypes.c_int64
    library.tfdpfl_draws.argtypes = [number]
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
