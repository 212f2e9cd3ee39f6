"""Extracts what the windows of a convolution meet."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpfl.clipping.gradients import dims_of, products, reshaped, volume
from tfdpfl.clipping.graph import channels_first

__all__ = ["Window", "places_of"]

# Pixels that are copied one by one cost alike, however few their channels. With fewer than GATHERED_CHANNELS, a row of
# the window is laid out first, by a convolution with an identity, if it has at most ROW_ENTRIES; and a whole window, if
# it has at most IDENTITY_ENTRIES.
GATHERED_CHANNELS, ROW_ENTRIES, IDENTITY_ENTRIES = 8, 128, 32
# Windows' places are computed while tracing where they are fewer than this; as constants they are held in memory.
CONSTANT_PLACES = 1 << 20


@dataclasses.dataclass
class Window:
    """A convolution's geometry, in spatial axes only."""

    size: list[int]
    strides: list[int]
    rates: list[int]
    padding: str
    explicit: list[int]
    channels_first: bool

    @classmethod
    def of(cls, op: tf.Operation, weight: list[int]) -> Window:
        first = channels_first(op)
        spatial = slice(2, None) if first else slice(1, -1)
        padding = tf.compat.as_str(op.get_attr("padding"))
        explicit = list(op.get_attr("explicit_paddings")) if padding == "EXPLICIT" else []
        pairs = [explicit[2 * i : 2 * i + 2] for i in range(len(explicit) // 2)][spatial]
        return cls(
            size=weight[:-2],
            strides=list(op.get_attr("strides"))[spatial],
            rates=list(op.get_attr("dilations"))[spatial],
            padding=padding,
            explicit=[p for pair in pairs for p in pair],
            channels_first=first,
        )

    def settings(self) -> tuple[int, ...]:
        """Sizes, strides, rates, and zeros before the first pixel (-1 for "SAME"), of depth (1, 1, 1 and 0 in a flat
        image), height and width each."""
        before = self.explicit[::2] or [-1 if self.padding == "SAME" else 0] * len(self.size)
        flat = 3 - len(self.size)
        of_axes = ((1, self.size), (1, self.strides), (1, self.rates), (0, before))
        return tuple(number for of_depth, of in of_axes for number in (*[of_depth] * flat, *of))

    def pads(self, x: tf.Tensor, out: list) -> list[list]:
        """How many zeros the convolution puts before and behind each axis."""
        if self.explicit:
            return [self.explicit[i : i + 2] for i in range(0, len(self.explicit), 2)]
        result = []
        for k, s, r, o, n in zip(self.size, self.strides, self.rates, out, places_of(x), strict=True):
            need = (o - 1) * s + (k - 1) * r + 1 - n
            need = tf.maximum(need, 0) if isinstance(need, tf.Tensor) else max(need, 0)
            before = need // 2 if self.padding == "SAME" else 0
            result.append([before, need - before])
        return result

    def fitted(self, x: tf.Tensor, out: list) -> tf.Tensor:
        """x padded as the convolution pads it."""
        return filled(x, self.pads(x, out))

    def pieces(self, x: tf.Tensor, out: list, at_once: int | None = None, parts: int = 1) -> list[Callable]:
        """Returns a function that makes what each window meets, [B, *out, entries x C], in the order of the kernel: so
        many entries of the window at once, or as many as take twice the memory of what they are copied from (thrice is
        a little faster, but 1.3 x plain's peak in a ResNet), or more of a large window. Of a batch that comes in 4
        ``parts``, 5 times what a part takes: 1.25 times the memory of the whole."""
        if max(self.size) == max(self.strides) == 1 and not self.explicit:
            return [lambda: x]
        entries, pads = math.prod(self.size) * x.shape[-1], self.pads(x, out)
        if len(self.size) == 2 and entries <= IDENTITY_ENTRIES and all_known(*pads):
            return [lambda: laid_out(x, self.size, self.strides, self.rates, [[0, 0], *pads, [0, 0]])]
        x, window = self.beside(filled(x, pads))
        x, window = window.in_rows(x)
        met = window.meets(places_of(x), out)
        few = max((1 + parts) * math.prod(window.strides), met.shape[1] * parts // 8, IDENTITY_ENTRIES // x.shape[-1])
        at_once = at_once or few
        return [functools.partial(copied, x, met[:, i : i + at_once], out) for i in range(0, met.shape[1], at_once)]

    def beside(self, x: tf.Tensor) -> tuple[tf.Tensor, Window]:
        """As many pixels of the last axis as its stride, which lie beside one another, as one of more channels."""
        *sizes, k = self.size
        *strides, s = self.strides
        n, cin = x.shape[-2:]
        few = cin < GATHERED_CHANNELS
        if s == 1 or k % s or self.rates[-1] > 1 or n is None or (n % s and not few):
            return x, self
        x = filled(x, [*[[0, 0]] * len(sizes), [0, -n % s]])
        *lead, _, _ = dims_of(x)
        x = reshaped(x, [*lead, x.shape[-2] // s, s * cin])
        return x, dataclasses.replace(self, size=[*sizes, k // s], strides=[*strides, 1])

    def in_rows(self, x: tf.Tensor) -> tuple[tf.Tensor, Window]:
        """Returns, for few channels, what a window's row meets (or as many rows as the window moves by) as one
        pixel."""
        *_, wide = self.size
        cin = x.shape[-1]
        if len(self.size) < 2 or wide == 1 or cin >= GATHERED_CHANNELS or wide * cin > ROW_ENTRIES:
            return x, self
        (*_, high, _), (*_, down, aside), (*_, rate, across) = self.size, self.strides, self.rates
        rows = down if high % down == 0 and rate == 1 and down * wide * cin <= IDENTITY_ENTRIES else 1
        *lead, height, width, _ = dims_of(x)
        images = reshaped(x, [volume(lead), height, width, cin])
        laid = laid_out(images, [rows, wide], [rows, aside], [1, across])
        x = reshaped(laid, [*lead, *dims_of(laid)[1:]])
        moved = dataclasses.replace(
            self,
            size=[*self.size[:-2], high // rows, 1],
            strides=[*self.strides[:-2], down // rows, 1],
            rates=[*self.rates[:-1], 1],
        )
        return x, moved

    def views(self, x: tf.Tensor, out: list) -> list[tf.Tensor]:
        """For each entry of the window, the pixels that it meets, [B, *out, C]."""
        x = self.fitted(x, out)
        met = self.meets(places_of(x), out)
        return [copied(x, met[:, i : i + 1], out) for i in range(met.shape[1])]

    def meets(self, places: list, out: list) -> np.ndarray | tf.Tensor:
        """Which pixels, of all `places` in order, the entries of each window meet: [windows, entries]."""
        small = all_known(places, out) and math.prod(out) * math.prod(self.size) <= CONSTANT_PLACES
        numbers = functools.partial(np.arange, dtype=np.int32) if small else tf.range
        reshape = np.reshape if small else tf.reshape
        n, met = len(out), 0
        for axis, (k, s, r, o, length) in enumerate(zip(self.size, self.strides, self.rates, out, places, strict=True)):
            at = s * numbers(o)[:, None] + r * numbers(k)[None]
            shape = [1] * (2 * n)
            shape[axis], shape[n + axis] = o, k
            met = met * length + reshape(at, shape)
        return reshape(met, [-1, math.prod(self.size)])

    def gram(self, x: tf.Tensor, out: list) -> Callable | None:
        """Makes the patches' Gram matrices [B, T, T] from those of the pixels, along which two patches move together.
        None where that costs more, or strides do not divide the window."""
        places = [o + (k // s - 1) * r for k, s, r, o in zip(self.size, self.strides, self.rates, out, strict=True)]
        if not all_known(places, places_of(x)):
            return None
        uneven = any(k % s for k, s in zip(self.size, self.strides, strict=True))
        if max(self.strides) > 1 and (uneven or max(self.rates) > 1):
            return None
        entries, length = math.prod(self.size) // math.prod(self.strides), math.prod(out)
        if entries == 1 or math.prod(places) ** 2 > entries * length**2:
            return None

        def made() -> tf.Tensor:
            # Of strides, what they pass over is one pixel.
            block = dataclasses.replace(self, size=self.strides, rates=[1] * len(out))
            fitted = self.fitted(x, out)
            pixels = pixels_of(copied(fitted, block.meets(places_of(fitted), places), places))
            gram = reshaped(products(pixels), [-1, *places, *places])
            for axis, (k, s, r, o) in enumerate(zip(self.size, self.strides, self.rates, out, strict=True)):
                before, between = [slice(None)] * (1 + axis), [slice(None)] * (len(out) - 1)
                moved = [slice(i * r, i * r + o) for i in range(k // s)]
                gram = tf.add_n([gram[(*before, at, *between, at)] for at in moved])
            return reshaped(gram, [-1, length, length])

        return made


def places_of(x: tf.Tensor) -> list:
    """The lengths of the axes between the first and the last; tensors, where they are not known while tracing."""
    lengths = x.shape[1:-1].as_list()
    return lengths if None not in lengths else [tf.shape(x)[i] if n is None else n for i, n in enumerate(lengths, 1)]


def all_known(*lengths: list) -> bool:
    """Whether all of them are, while tracing."""
    return not any(isinstance(n, tf.Tensor) for part in lengths for n in part)


def pixels_of(x: tf.Tensor) -> tf.Tensor:
    """[B, *places, C] to [B, pixels, C]."""
    return reshaped(x, [x.shape[0] or -1, volume(places_of(x)), x.shape[-1]])


def copied(x: tf.Tensor, met: np.ndarray | tf.Tensor, out: list) -> tf.Tensor:
    """The pixels that entries of windows meet, as in `Window.meets`: [B, *out, entries x C]. Faster than
    tf.image.extract_patches, and mostly than slices."""
    if met.shape[1] == 1 and met.shape[0] is not None and met.shape[0] == x.shape[1:-1].num_elements():
        return x  # each window meets a pixel of its own
    pixels = tf.gather(pixels_of(x), tf.reshape(met, [-1]), axis=1)
    return reshaped(pixels, [x.shape[0] or -1, *out, met.shape[1] * x.shape[-1]])


def filled(x: tf.Tensor, pads: list[list]) -> tf.Tensor:
    """x with zeros before and behind its axes between the first and the last."""
    if all_known(*pads) and not np.any(pads):
        return x
    width, channels = x.shape[-2:]
    if width is None or not all_known(*pads):
        return tf.pad(x, [[0, 0], *pads, [0, 0]])
    # A row of pixels as one axis: the same in a third of the time, if channels are few.
    rows = reshaped(x, [*dims_of(x)[:-2], width * channels])
    rows = tf.pad(rows, [[0, 0], *pads[:-1], [n * channels for n in pads[-1]]])
    return reshaped(rows, [*dims_of(rows)[:-1], width + sum(pads[-1]), channels])


def laid_out(x: tf.Tensor, size: list, strides: list, rates: list, pads: list | str = "VALID") -> tf.Tensor:
    """Returns what each window of images meets, [B, *out, entries x C], by a convolution with an identity: fast for few
    entries, with whose square its work grows."""
    entries = math.prod(size) * x.shape[-1]
    eye = tf.reshape(tf.eye(entries, dtype=x.dtype), [*size, x.shape[-1], entries])
    return tf.nn.conv2d(x, eye, strides, pads, dilations=rates)
