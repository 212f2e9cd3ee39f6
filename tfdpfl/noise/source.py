"""Draws all random numbers that privacy depends on, from keys that one process alone holds.

Two generators. AES-128 in counter mode, which is cryptographic, makes the words of a step that runs uncompiled on the
host's CPU. Philox 4x32-10 (Salmon et al. 2011) makes them in a step that XLA compiles, where TensorFlow sees an
accelerator, and in TensorFlow Federated. It passes every statistical test, but is no cipher. Both are keyed with 128
bits of the operating system's entropy. Box and Muller (1958) make normals of the words.

One thing is not promised: the normals are float32. Sums with them can take only some of the floating-point numbers.
Which ones depends on what was there before the noise. Anyone who sees exact weights can learn from that more than ε
says (Mironov 2012, "On significance of the least significant bits for differential privacy"). No accountant prices
this. And the tails end: at 11.6 standard deviations from AES, at 9.49 from Philox, beyond which a normal has 2e-21 of
its mass.
"""

from __future__ import annotations

import math
import secrets
import threading
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from tensorflow.python.framework import op_def_library
from tensorflow.python.ops import control_flow_util

from tfdpfl import native
from tfdpfl._process import renew_after_fork
from tfdpfl._variables import in_memory
from tfdpfl.errors import PrivacyError
from tfdpfl.noise.discrete import discrete_gaussian

__all__ = ["AES", "PHILOX", "KeyStream", "Source", "bits_of_normals", "gaussian", "new_key"]

AES, PHILOX = "aes-128-ctr", "philox-4x32-10"

_PHILOX = 1
_SMALL = 1 << 14
# Pairs of normals made at once: their arrays fit the cache, and the calls of numpy, two dozen, cost a twentieth.
_PAIRS = 1 << 17
# Words nearer than this to either end get 64 bits more; beyond it float32 keeps no more digits than a word has.
_NEAR = np.uint32(1 << 20)
# A tensor whose first byte is so aligned is handed to TensorFlow without a copy.
_ALIGNED = 64


def new_key(seed: int | None = None) -> np.ndarray:
    """Returns a key of 128 bits as two int64: from the operating system's entropy, or from `seed` (for tests only).

    Raises `PrivacyError` where the system has no entropy to give.
    """
    return _entropy(2, seed)


def _entropy(count: int, seed: int | None) -> np.ndarray:
    if seed is not None:
        return np.random.SeedSequence(seed).generate_state(count, np.uint64).view(np.int64)
    try:
        return np.frombuffer(secrets.token_bytes(8 * count), np.int64).copy()
    except (NotImplementedError, OSError) as error:
        raise PrivacyError(
            "The operating system gives no random bytes (os.urandom failed), so there is no key for private noise: run "
            "on a system where os.urandom works."
        ) from error


class Source:
    """Draws noise for one object in one process, from keys that are in this process's memory alone.

    Every run of an op that `gaussian` traced draws fresh numbers, from any thread. A copy, a deepcopy, an unpickled
    one and the one in a forked process have keys of their own. Nothing that is loaded takes a stream back.

    Args:
      seed: for tests only. The k-th draw of a process is then the same each time.

    Raises `PrivacyError` where the operating system has no entropy to give.
    """

    generator: str | None
    """What the step that was traced last draws with: "aes-128-ctr" or "philox-4x32-10". None before."""

    def __init__(self, seed: int | None = None):
        self.generator = None
        self._seed = seed
        self._philox: tf.Variable | None = None
        self._renew()
        self._opened()
        renew_after_fork(self)

    def __reduce__(self):
        return Source, (self._seed,)

    def _renew(self) -> None:
        self._lock = threading.Lock()
        self._stream: KeyStream | None = None  # the next draw makes it: whatever fails, it is not the parent's
        if self._philox is None:
            return
        if "CPU" in self._philox.device:
            self._philox.assign(_entropy(3, self._seed))
        else:
            self._philox = None  # an accelerator's steps do not run on in a fork; one that is traced there starts anew

    @tf.autograph.experimental.do_not_convert
    def gaussian(self, shapes: Sequence, stddev: float | tf.Tensor, key: tf.Tensor | None = None) -> list[tf.Tensor]:
        """Draws independent float32 normals of mean 0 for every shape, fresh ones in every run.

        Args:
          shapes: static shapes of the tensors.
          stddev: standard deviation of every coordinate.
          key: int64 [2], secret, from `fresh_key` of whoever draws for several processes, which then draw the same. Use
            none twice. None draws from this object's stream.
        """
        shapes = [tf.TensorShape(shape) for shape in shapes]
        stddev = tf.cast(stddev, tf.float32)
        if _on_host():
            self.generator = AES
            if shapes and (self._seed is None or key is not None) and draws_in_c():
                return _from_c(shapes, stddev, key)
            return self._from_host(shapes, stddev, key)
        self.generator = PHILOX
        return gaussian(shapes, stddev, self._philox_key() if key is None else key, tf.zeros([], tf.int64))

    def arrays(self, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """Draws what `gaussian` draws with a deviation of 1, for what runs outside of TensorFlow."""
        assert tf.executing_eagerly(), "a graph would hold these numbers as constants"
        if not _on_host():
            return [drawn.numpy() for drawn in self.gaussian(shapes, 1.0)]
        self.generator = AES
        return self._arrays(shapes, np.float32(1))

    def _arrays(
        self, shapes: Sequence[Sequence[int]], stddev: np.ndarray | np.floating, *key: np.ndarray
    ) -> list[np.ndarray]:
        sizes, line = [math.prod(shape) for shape in shapes], _ALIGNED // 4  # tensorflow.c lays them out likewise
        starts = np.cumsum([0] + [-(-size // line) * line for size in sizes]).tolist()
        numbers = self._draw(lambda stream: stream.normals(starts[-1], stddev), *key)
        return [numbers[at : at + size].reshape(shape) for at, size, shape in zip(starts, sizes, shapes, strict=False)]

    def normals(self, shape: Sequence[int]) -> np.ndarray:
        """Draws float64 [shape]: independent normals of mean 0 and deviation 1, for what runs outside of TensorFlow.

        Each is a normal of `gaussian` and 2^-24 of another one, which fills the gaps that float32 leaves.
        """
        coarse, fine = (part.astype(np.float64) for part in self.arrays([shape, shape]))
        return coarse + 2.0**-24 * fine

    def _draw(self, take: Callable[[KeyStream], np.ndarray], *key: np.ndarray) -> np.ndarray:
        """Returns what is taken from the stream of a key, or from the host's if there is none."""
        if key:
            return take(KeyStream(*key))
        with self._lock:
            return take(self._opened())

    def _opened(self) -> KeyStream:
        """Returns the host's stream, for whoever holds the lock; its key is drawn when it is first asked for."""
        if self._stream is None:
            self._stream = KeyStream(new_key(self._seed))
        return self._stream

    @tf.autograph.experimental.do_not_convert
    def of_length(self, length: tf.Tensor, stddev: float | tf.Tensor, key: tf.Tensor | None = None) -> tf.Tensor:
        """Draws as `gaussian`, float32 [length], where the length (a scalar) is known only while the step runs. It
        must be no secret."""
        stddev = tf.cast(stddev, tf.float32)
        if not _on_host():
            self.generator = PHILOX
            first, counter = tf.unstack(tf.bitcast(self._philox_key() if key is None else key, tf.uint64))
            at = tf.stack([tf.zeros([], tf.uint64), counter])
            return _pairs(tf.cast(length + 1, tf.int64) // 2, stddev, tf.expand_dims(first, 0), at)[:length]
        self.generator = AES

        def draw(length, stddev, *key):
            return self._draw(lambda stream: stream.normals(int(length + length % 2), stddev), *key)[:length]

        inputs = [length, stddev, *_given(key)]
        return tf.ensure_shape(tf.numpy_function(draw, inputs, tf.float32), [None])

    @tf.autograph.experimental.do_not_convert
    def fresh_key(self) -> tf.Tensor:
        """Draws int64 [2]: a key for noise that is to be drawn again, another one in every run."""
        if not _on_host():
            return self._philox_key()

        draw = lambda: self._draw(lambda stream: stream.words(np.empty(2, np.int64)))  # noqa: E731
        return tf.ensure_shape(tf.numpy_function(draw, [], tf.int64), [2])

    def shared(self, key: tf.Tensor) -> Source:
        """Returns a source for one step that is traced, from which all processes draw the same.

        Args:
          key: int64 [2], secret, from `fresh_key` of one of them. Use none twice.
        """
        return _Shared(self, key)

    @tf.autograph.experimental.do_not_convert
    def discrete(self, size: int, sigma: float | tf.Tensor, key: tf.Tensor | None = None) -> tf.Tensor:
        """Draws int64 [size]: independent discrete Gaussians of this many whole steps; see `tfdpfl.noise.discrete`.
        ``key`` is as for `gaussian`.

        Raises `PrivacyError` where a step is compiled or runs on an accelerator, which Python cannot draw for.
        """
        if not _on_host():
            raise PrivacyError(
                "secure_noise=True draws on the host's CPU, but XLA compiles this step or it runs on an accelerator. "
                "Compile the model with jit_compile=False, and train where TensorFlow sees no accelerator."
            )
        self.generator = AES

        def draw(sigma, *key):
            return self._draw(lambda stream: discrete_gaussian(stream.words, size, int(sigma)), *key)

        inputs = [tf.cast(sigma, tf.int64), *_given(key)]
        return tf.ensure_shape(tf.numpy_function(draw, inputs, tf.int64), [size])

    def unique(self) -> tf.Tensor:
        """Returns an int64 that no other run, object or process gets: a name, no secret."""
        return self._philox_key()[0]

    @tf.autograph.experimental.do_not_convert
    def philox_key(self) -> tf.Tensor:
        """Draws int64 [2]: a key for Philox, another one in every run. It is a secret only of an object whose `unique`
        nobody asks."""
        return self._philox_key()

    @tf.autograph.experimental.do_not_convert
    def of_keys(self, size: int, keys: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        """Draws float32 [size]: the standard normals of the first key, less those of the next ``count`` of the others.

        Args:
          keys: int64 [any, 2], secret. A key gives the same normals whenever it is asked, by the same generator.
          count: int64 scalar, below the number of keys.
        """
        if _on_host():
            self.generator = AES
            row = tf.numpy_function(lambda keys, count: _of_keys(size, keys, int(count)), [keys, count], tf.float32)
            return tf.ensure_shape(row, [size])
        self.generator = PHILOX

        def node(i: tf.Tensor | int) -> tf.Tensor:
            return gaussian([[size]], 1.0, keys[i], tf.zeros([], tf.int64))[0]

        at, row = tf.ones([], tf.int64), node(0)
        return tf.while_loop(lambda i, _: i <= count, lambda i, row: (i + 1, row - node(i)), [at, row])[1]

    def _from_host(
        self, shapes: list[tf.TensorShape], stddev: tf.Tensor, key: tf.Tensor | None = None
    ) -> list[tf.Tensor]:
        def draw(stddev, *key):
            return self._arrays([shape.as_list() for shape in shapes], stddev, *key)

        # One call for all tensors: a call costs more than the numbers of a small one.
        normals = tf.nest.flatten(
            tf.numpy_function(draw, [stddev, *_given(key)], [tf.float32] * len(shapes)) if shapes else []
        )
        for normal, shape in zip(normals, shapes, strict=True):
            normal.set_shape(shape)
        return normals

    def _philox_key(self) -> tf.Tensor:
        """Draws int64 [2]: another one whenever the op runs."""
        with self._lock:
            if self._philox is None:
                self._philox = in_memory(_entropy(3, self._seed))
        # Reads and counts at once: of two threads that run a step each gets a state of its own.
        state = tf.raw_ops.RngReadAndSkip(resource=self._philox.handle, alg=_PHILOX, delta=tf.constant(1, tf.uint64))
        state = tf.bitcast(state, tf.uint64)
        return tf.raw_ops.StatelessRandomUniformFullIntV2(
            shape=[2], key=state[2:], counter=state[:2], alg=_PHILOX, dtype=tf.int64
        )


class _Shared(Source):
    """Draws from one key, which several processes have. Each call takes a key of its own from the generator's stream of
    that key, which draws nothing else. So calls are independent, and one key tells nothing of another.

    What it does not define would draw from this process's stream, and fails for want of its attributes.
    """

    def __init__(self, source: Source, key: tf.Tensor):
        self._source, self._key, self._taken = source, key, 0

    def gaussian(self, shapes: Sequence, stddev: float | tf.Tensor, key: tf.Tensor | None = None) -> list[tf.Tensor]:
        return self._source.gaussian(shapes, stddev, self.fresh_key() if key is None else key)

    def of_keys(self, size: int, keys: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
        return self._source.of_keys(size, keys, count)

    def unique(self) -> tf.Tensor:
        return self.fresh_key()[0]

    @tf.autograph.experimental.do_not_convert
    def fresh_key(self) -> tf.Tensor:
        at, self._taken = self._taken, self._taken + 1
        if not _on_host():
            first, counter = tf.unstack(tf.bitcast(self._key, tf.uint64))
            return tf.raw_ops.StatelessRandomUniformFullIntV2(
                shape=[2], key=first[None], counter=[tf.constant(at, tf.uint64), counter], alg=_PHILOX, dtype=tf.int64
            )
        keys = tf.numpy_function(
            lambda key: KeyStream(key).words(np.empty([at + 1, 2], np.int64)), [self._key], tf.int64
        )
        return tf.ensure_shape(keys[at], [2])


def _given(key: tf.Tensor | None) -> list[tf.Tensor]:
    return [] if key is None else [key]


def _on_host() -> bool:
    """Returns whether what is traced here runs op by op on this machine's CPU, and so can call Python."""
    if not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return False
    return all(device.device_type == "CPU" for device in tf.config.list_logical_devices())


def draws_in_c() -> bool:
    """Returns whether what is traced here can draw by the kernels' op, of which all memory is TensorFlow's own: it is
    added to in place, without a call of Python."""
    graph = not tf.executing_eagerly() and tf.compat.v1.executing_eagerly_outside_functions()
    return graph and native.kernels().draws


def _from_c(shapes: list[tf.TensorShape], stddev: tf.Tensor, key: tf.Tensor | None) -> list[tf.Tensor]:
    settings = [native.INSTRUCTIONS.index(native.kernels().instructions), *(shape.num_elements() for shape in shapes)]
    if key is None:
        key = tf.zeros([0], tf.int64)  # in every run the op takes a key of its own from the system's entropy
    made = op_def_library.apply_op(native.DRAW, key=key, stddev=stddev, N=len(shapes), settings=settings)
    for normals, size in zip(made, settings[1:], strict=True):
        normals.set_shape([size])
    return [tf.reshape(normals, shape) for normals, shape in zip(made, shapes, strict=True)]


def bits_of_normals() -> int:
    """Returns a number that machines share if they make the same normals of a key, which depends on the processor."""
    kind = f"{AES} {native.kernels().draws}" if _on_host() else PHILOX
    return zlib.crc32(kind.encode() + KeyStream(np.zeros(2, np.int64)).normals(4096, np.float32(1)).tobytes())


class KeyStream:
    """Draws words and normals from AES-128 in counter mode. Its position only goes on; one thread at a time.

    Args:
      key: from `new_key`.
    """

    def __init__(self, key: np.ndarray):
        self._encryptor = Cipher(algorithms.AES(key.tobytes()), modes.CTR(bytes(16))).encryptor()

    def words(self, out: np.ndarray) -> np.ndarray:
        """Fills ``out``, a contiguous array of integers, with the next bytes of the key stream."""
        self._encryptor.update_into(_ZEROS[: out.nbytes], out.view(np.uint8).data)
        return out

    def normals(self, size: int, stddev: np.ndarray | np.floating) -> np.ndarray:
        """Draws float32 [size], ``size`` being even; its first byte is aligned."""
        room = np.empty(size + _ALIGNED // 4, np.float32)
        start = -room.ctypes.data % _ALIGNED // 4
        numbers = room[start : start + size]
        pairs, kernels = min(size // 2, _PAIRS), native.kernels()
        in_c = kernels.instructions not in ("", "plain")  # without a processor's wide registers NumPy is faster
        words = np.empty(2 * pairs, np.uint32)
        scratch = np.empty(pairs, np.uint32) if in_c else np.empty((2, pairs), np.float32)
        for at in range(0, size, 2 * _PAIRS):
            part = numbers[at : at + 2 * _PAIRS]
            drawn = self.words(words[: part.size])
            if in_c:
                _normals_in_c(kernels, drawn, self._finer, stddev, part, scratch)
            else:
                _normals_in_numpy(drawn, self._finer, stddev, part, scratch)
        return numbers

    def _finer(self, count: int) -> np.ndarray:
        return self.words(np.empty(count, np.uint64))


_ZEROS = memoryview(bytes(8 * _PAIRS))


def _of_keys(size: int, keys: np.ndarray, count: int) -> np.ndarray:
    one = np.ones([], np.float32)
    row, *others = (KeyStream(key).normals(size + size % 2, one) for key in keys[: count + 1])
    for other in others:
        np.subtract(row, other, out=row)
    return row[:size]


def _normals_in_numpy(
    words: np.ndarray,
    finer: Callable[[int], np.ndarray],
    stddev: np.ndarray | np.floating,
    out: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Fills ``out`` with normals, in numpy, which takes two thirds of the CPU time of TensorFlow's ops.

    Half of the words give angles; half give radii, by u in (0, 1). Those within 2^-12 of 0 or 1 get 64 bits more, so
    that u goes down to 2^-97 and the support is 11.6 standard deviations.

    Args:
      words: uint32 [2 h], those of the radii first; they are overwritten.
      finer: gives as many uniform uint64 as it is asked for.
      stddev: float32 scalar.
      out: float32 [2 h].
      scratch: float32 [2, h or more].
    """
    half = out.size // 2
    radii, (radius, angle) = words[:half], scratch[:, :half]
    np.copyto(radius, radii, casting="unsafe")
    np.copyto(angle, words[half:].view(np.int32), casting="unsafe")
    np.add(radii, _NEAR, out=radii)  # now those near either end are the least
    near = np.flatnonzero(radii < 2 * _NEAR)
    np.multiply(radius, np.float32(2**-32), out=radius)
    with np.errstate(divide="ignore"):  # log(0), which is among those near an end
        np.log(radius, out=radius)
    np.multiply(radius, np.float32(-2), out=radius)
    if near.size:
        radius[near] = _squared_radii(radii[near] - _NEAR, finer)
    np.sqrt(radius, out=radius)
    np.multiply(radius, stddev, out=radius)
    np.multiply(angle, np.float32(math.pi * 2**-31), out=angle)
    # Into arrays that lie apart from the angles: next to them, numpy 1.25's cosine is twenty times as slow.
    np.cos(angle, out=out[:half])
    np.sin(angle, out=out[half:])
    np.multiply(out[:half], radius, out=out[:half])
    np.multiply(out[half:], radius, out=out[half:])


def _squared_radii(words: np.ndarray, finer: Callable[[int], np.ndarray]) -> np.ndarray:
    """Returns float64 [n], -2 log(u), of uint32 [n] near 0 or 2^32, by 64 bits more of each."""
    low = words < _NEAR
    # The distance to the end.
    distance = (np.where(low, words, ~words) + (finer(words.size) + 0.5) * 2.0**-64) * 2.0**-32
    return -2 * np.where(low, np.log(distance), np.log1p(-distance))


def _normals_in_c(
    kernels: native.Kernels,
    words: np.ndarray,
    finer: Callable[[int], np.ndarray],
    stddev: np.ndarray | np.floating,
    out: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Does the same as `_normals_in_numpy`, to rounding, of the same words; ``scratch`` is uint32 [h or more]."""
    near = kernels.normals(words, float(stddev), out, scratch)
    if near.size:
        cosines, sines = out.reshape(2, -1)
        radius = np.sqrt(_squared_radii(words[near], finer)) * stddev
        angle = words[out.size // 2 + near].view(np.int32) * (math.pi * 2.0**-31)
        cosines[near] = radius * np.cos(angle)
        sines[near] = radius * np.sin(angle)


def gaussian(shapes: Sequence, stddev: float | tf.Tensor, key: tf.Tensor, step: tf.Tensor) -> list[tf.Tensor]:
    """Draws independent float32 normals of mean 0 for every shape, a fresh set for every ``step``, by Philox.

    A function of the key and a counter, so that it needs no state, is the same in every replica, and compiles.

    Args:
      shapes: static shapes of the tensors.
      stddev: standard deviation of every coordinate.
      key: int64 [2], secret; half of it keys the cipher, half is added to its counter.
      step: int64 scalar. The same key and step give the same noise: never use a step twice.
    """
    first, second = tf.unstack(tf.bitcast(key, tf.uint64))
    # A step has a stream of its own, whatever the number of tensors, and each draw 2^40 blocks of it.
    stream = tf.bitcast(tf.convert_to_tensor(step), tf.uint64) + second
    sizes = [tf.TensorShape(shape).num_elements() for shape in shapes]
    # Small tensors share a draw: a dozen operations each would cost more than their numbers.
    small = [i for i, n in enumerate(sizes) if n < _SMALL]
    draws = [[i] for i in range(len(sizes)) if i not in set(small)] + ([small] if small else [])
    normals: dict[int, tf.Tensor] = {}
    stddev, cipher_key = tf.cast(stddev, tf.float32), tf.expand_dims(first, 0)
    for number, members in enumerate(draws):
        counter = tf.stack([tf.constant(number << 40, tf.uint64), stream])
        lengths = [sizes[i] for i in members]
        total = sum(lengths)
        drawn = _pairs(-(-total // 2), stddev, cipher_key, counter)
        if total % 2:
            drawn = drawn[:total]
        for i, part in zip(members, tf.split(drawn, lengths), strict=True):
            normals[i] = tf.reshape(part, shapes[i])
    return [normals[i] for i in range(len(sizes))]


@tf.function(
    input_signature=[
        tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float32), tf.TensorSpec([1], tf.uint64),
        tf.TensorSpec([2], tf.uint64),
    ],
    autograph=False,
)  # fmt: skip
def _pairs(half: tf.Tensor, stddev: tf.Tensor, key: tf.Tensor, counter: tf.Tensor) -> tf.Tensor:
    """Makes 2 half normals. Traced once for all draws: there may be hundreds in a model."""
    words = tf.raw_ops.StatelessRandomUniformFullIntV2(
        shape=[3 * half], key=key, counter=counter, alg=_PHILOX, dtype=tf.uint32
    )
    return _normals_in_graph(words[:half], words[half : 2 * half], words[2 * half :], stddev)


def _normals_in_graph(high: tf.Tensor, low: tf.Tensor, angle: tf.Tensor, stddev: tf.Tensor) -> tf.Tensor:
    """Makes twice as many normals as each of the uint32 [h]. Radii have 64 bits, so that the support is 9.49 standard
    deviations, in words that XLA can count before it runs."""
    high = tf.bitcast(high, tf.int32)
    below = high >= 0
    # How far the uniform number is from 0, or from 1: at either end float32 keeps its digits.
    whole = tf.cast(tf.bitwise.bitwise_xor(high, tf.bitwise.right_shift(high, 31)), tf.float32)
    distance = (whole + (tf.cast(low, tf.float32) + 0.5) * 2.0**-32) * 2.0**-32
    exponential = -tf.math.log(tf.where(below, distance, 1 - distance))
    series = distance + 0.5 * distance * distance
    exponential = tf.where(below | (distance > 2.0**-12), exponential, series)
    radius = (math.sqrt(2) * stddev) * tf.sqrt(exponential)  # here it scales half as many numbers
    angle = tf.cast(tf.bitcast(angle, tf.int32), tf.float32) * (math.pi * 2.0**-31)
    return tf.concat([radius * tf.cos(angle), radius * tf.sin(angle)], 0)
