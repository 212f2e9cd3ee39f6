"""The C functions themselves, called with NumPy's arrays, against sums in float64."""

import ctypes
import itertools
import os

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdpfl import native

LIBRARY = ctypes.CDLL(os.environ.get("TFDPFL_LIBRARY", str(native.LIBRARY)))  # that of sanitize.sh
LIBRARY.tfdpfl_filters.argtypes = [ctypes.c_void_p] * 7 + [ctypes.c_int] * 2
LIBRARY.tfdpfl_row_norms.argtypes = (
    [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 4 + [ctypes.c_void_p] * 2 + [ctypes.c_int] * 2
)
LIBRARY.tfdpfl_normals.argtypes = [
    *(ctypes.c_void_p, ctypes.c_int64, ctypes.c_float), *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int),
]  # fmt: skip
LIBRARY.tfdpfl_normals.restype = ctypes.c_int64
SETS = range(LIBRARY.tfdpfl_instructions() + 1)
# Numbers around each array, that no kernel may write, or use. The sanitizer sees every access outside by itself.
GUARD = 0 if "TFDPFL_LIBRARY" in os.environ else 64


def guarded(values):
    """A copy between numbers that are not finite, so that a read outside spoils the result; and the whole memory."""
    memory = np.full(values.size + 2 * GUARD, np.nan, np.float32)
    inside = memory[GUARD : GUARD + values.size].reshape(values.shape)
    inside[...] = values
    return inside, memory


def run(x, dy, kernel, strides, rates, pads, *, c=None, form=False, norms=True, threads=1, instructions=0,
        depthwise=False):  # fmt: skip
    """What the library makes: (each, norms, total), None for what is not asked for."""
    weights = (*kernel, dy.shape[-1]) if depthwise else (*kernel, x.shape[-1], dy.shape[-1])
    shapes = [(len(x), *weights), (len(x),), weights]
    wanted = [form, norms, c is not None]
    inputs = [guarded(x), guarded(dy), (c, None) if c is None else guarded(c)]
    outputs = [guarded(np.zeros(s, np.float32)) if w else (None, None) for s, w in zip(shapes, wanted, strict=True)]
    flat = [1] * (5 - x.ndim)  # the depth of flat images
    settings = [n for of in (kernel, strides, rates) for n in (*flat, *of)] + [0] * len(flat) + [*pads, depthwise]
    sizes = [len(x), *flat, *x.shape[1:], *flat, *dy.shape[1:], *settings]
    sizes = (ctypes.c_int64 * len(sizes))(*sizes)
    pointers = [None if a is None else a.ctypes.data for a, _ in inputs + outputs]
    assert LIBRARY.tfdpfl_filters(sizes, *pointers, threads, instructions) == 0
    for inside, memory in outputs:
        if inside is not None:
            assert np.isnan(memory[:GUARD]).all() and np.isnan(memory[GUARD + inside.size :]).all()
    return [inside for inside, _ in outputs]


def one_by_one(x, dy, kernel, strides, rates, pads):
    """Each example's gradient, in float64: [batch, *kernel, channels, filters]."""
    out = dy.shape[1:-1]
    reach = [(o - 1) * s + (k - 1) * r + 1 for o, s, k, r in zip(out, strides, kernel, rates, strict=True)]
    behind = [max(m - n - p, 0) for m, n, p in zip(reach, x.shape[1:-1], pads, strict=True)]
    x = np.pad(x.astype(np.float64), [(0, 0), *zip(pads, behind, strict=True), (0, 0)])
    result = np.zeros((len(x), *kernel, x.shape[-1], dy.shape[-1]))
    for place in itertools.product(*map(range, kernel)):
        met = tuple(slice(k * r, k * r + (o - 1) * s + 1, s) if o else slice(0)
                    for k, r, o, s in zip(place, rates, out, strides, strict=True))  # fmt: skip
        pixels, of_places = (t.reshape(len(x), np.prod(out), t.shape[-1]) for t in (x[(slice(None), *met)], dy))
        result[(slice(None), *place)] = np.einsum("btc,btp->bcp", pixels, of_places)
    return result


def close(got, want, tolerance=1e-5):
    assert np.abs(got - want).max(initial=0) <= tolerance * max(np.abs(want).max(initial=0), 1e-30)


pairs = lambda low, high: st.tuples(st.integers(low, high), st.integers(low, high))


@pytest.mark.slow
@settings(max_examples=150)
@given(batch=st.integers(0, 5), out=pairs(0, 6), kernel=pairs(1, 5), strides=pairs(1, 3), rates=pairs(1, 3),
       pads=pairs(0, 3), cut=pairs(-4, 3), depth=st.none() | st.tuples(*(
           st.integers(low, high) for low, high in ((0, 3), (1, 3), (1, 2), (1, 2), (0, 2), (-2, 2)))),
       channels=st.sampled_from([1, 2, 3, 5, 8, 17, 24]),
       filters=st.sampled_from([1, 2, 4, 7, 8, 9, 16, 17, 24, 31, 32, 33, 48, 65]), threads=st.integers(1, 4),
       seed=st.integers(0, 99))  # fmt: skip
def test_any_convolution_agrees_with_sums_in_float64(
    batch, out, kernel, strides, rates, pads, cut, depth, channels, filters, threads, seed
):
    """``cut``: how many pixels of the last window are beyond the image's end, or how many behind it nobody meets.
    ``depth``: the same numbers of the first of three axes."""
    if depth is not None:
        of = zip(depth, (out, kernel, strides, rates, pads, cut), strict=True)
        out, kernel, strides, rates, pads, cut = ((first, *others) for first, others in of)
    rng = np.random.default_rng(seed)
    size = [max((o - 1) * s + (k - 1) * r + 1 - p - e, 1)
            for o, s, k, r, p, e in zip(out, strides, kernel, rates, pads, cut, strict=True)]  # fmt: skip
    x = rng.normal(size=(batch, *size, channels)).astype(np.float32)
    dy = rng.normal(size=(batch, *out, filters)).astype(np.float32)
    c = rng.uniform(size=batch).astype(np.float32) * (rng.uniform(size=batch) < 0.7)
    geometry = kernel, strides, rates, pads
    true = one_by_one(x, dy, *geometry)
    for instructions in SETS:
        how = {"threads": threads, "instructions": instructions}
        each, norms, _ = run(x, dy, *geometry, form=True, **how)
        _, again, total = run(x, dy, *geometry, c=c, **how)
        alone = run(x, dy, *geometry, **how)[1]
        close(each, true)
        close(norms, (true**2).sum(tuple(range(1, true.ndim))))
        close(total, np.tensordot(c, true, 1))
        np.testing.assert_array_equal(alone, norms)
        np.testing.assert_array_equal(again[c != 0], norms[c != 0])
        if channels == filters:
            own = true[..., range(channels), range(channels)]
            each, norms, _ = run(x, dy, *geometry, form=True, depthwise=True, **how)
            close(each, own)
            close(norms, (own**2).sum(tuple(range(1, own.ndim))))
            close(run(x, dy, *geometry, c=c, depthwise=True, **how)[2], np.tensordot(c, own, 1))


@pytest.mark.parametrize("instructions", SETS)
def test_images_with_a_depth_agree_with_sums_in_float64(instructions):
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=s).astype(np.float32) for s in ((4, 7, 9, 6, 5), (4, 3, 9, 3, 18)))
    geometry = (3, 2, 3), (2, 1, 2), (1, 2, 1), (0, 1, 1)
    true = one_by_one(x, dy, *geometry)
    c = np.array([1, 0, 0.5, 2], np.float32)
    each, norms, _ = run(x, dy, *geometry, form=True, instructions=instructions)
    close(each, true)
    close(norms, (true**2).sum((1, 2, 3, 4, 5)))
    close(run(x, dy, *geometry, c=c, threads=2, instructions=instructions)[2], np.tensordot(c, true, 1))
    x, dy = (rng.normal(size=(2, 40, 60, 30, filters)).astype(np.float32) for filters in (3, 17))  # several passes
    geometry = (1, 1, 1), (1, 1, 1), (1, 1, 1), (0, 0, 0)
    close(run(x, dy, *geometry, form=True, instructions=instructions)[0], one_by_one(x, dy, *geometry))


@pytest.mark.parametrize("geometry", [((5, 3), (2, 1), (1, 1), (2, 1)), ((3, 1), (2, 1), (1, 2), (0, 0))],
                         ids=["padded", "valid"])  # fmt: skip
@pytest.mark.parametrize("channels", [1, 7, 16, 24, 33])
@pytest.mark.parametrize("instructions", SETS)
def test_a_channel_of_a_depthwise_convolution_meets_its_own_filter_alone(channels, geometry, instructions):
    rng = np.random.default_rng(channels)
    x, dy = (rng.normal(size=(5, *s, channels)).astype(np.float32) for s in ((11, 8), (5, 8)))
    x[:, :, :, 0] *= 100
    true = one_by_one(x, dy, *geometry)[..., range(channels), range(channels)]
    c = np.array([1, 0, 0.5, 2, 1], np.float32)
    each, norms, _ = run(x, dy, *geometry, form=True, instructions=instructions, depthwise=True)
    total = run(x, dy, *geometry, c=c, threads=2, instructions=instructions, depthwise=True)[2]
    for channel in range(channels):
        close(each[..., channel], true[..., channel])
        close(total[..., channel], np.tensordot(c, true, 1)[..., channel])
    close(norms, (true**2).sum((1, 2, 3)))
    x[0], dy[1] = np.nan, np.inf  # an example's channels lie beside those of the next
    norms = run(x, dy, *geometry, instructions=instructions, depthwise=True)[1]
    assert not np.isfinite(norms[:2]).any() and np.isfinite(norms[2:]).all()


@pytest.mark.parametrize("instructions", SETS)
def test_norms_are_those_of_the_very_gradients_that_are_added(instructions):
    """Terms that cancel leave rounding noise, which must have the norm that is told: in several passes over an image
    too large for the cache, too."""
    rng = np.random.default_rng(0)
    x = np.repeat(rng.normal(size=(3, 1, 1, 24)), 300, 1).repeat(120, 2).astype(np.float32)
    dy = rng.normal(size=(3, 300, 120, 17)).astype(np.float32)
    geometry = (1, 1), (1, 1), (1, 1), (0, 0)
    close(run(x, dy, *geometry, form=True, instructions=instructions)[0], one_by_one(x, dy, *geometry))
    dy -= dy.mean((1, 2), keepdims=True)
    each, norms, _ = run(x, dy, *geometry, form=True, threads=2, instructions=instructions)
    close(norms, (each.astype(np.float64) ** 2).sum((1, 2, 3, 4)), 1e-6)
    for i in range(3):
        c = np.eye(3, dtype=np.float32)[i]
        np.testing.assert_array_equal(run(x, dy, *geometry, c=c, threads=2, instructions=instructions)[2], each[i])
    dy = rng.normal(size=x.shape).astype(np.float32)
    each = run(x, dy, *geometry, form=True, depthwise=True, instructions=instructions)[0]
    close(each, np.einsum("bijc,bijc->bc", x.astype(np.float64), dy)[:, None, None])


def test_an_example_that_is_not_finite_is_left_out_by_a_factor_of_zero():
    x, dy = np.ones((3, 5, 5, 2), np.float32), np.ones((3, 3, 3, 4), np.float32)
    x[0], dy[1] = np.nan, np.inf
    geometry = (3, 3), (1, 1), (1, 1), (0, 0)
    norms = run(x, dy, *geometry)[1]
    assert not np.isfinite(norms[:2]).any() and np.isfinite(norms[2])
    c = np.array([0, 0, 1], np.float32)
    close(run(x, dy, *geometry, c=c)[2], one_by_one(x, dy, *geometry)[2])


def test_the_sum_is_the_same_in_every_run_of_as_many_threads():
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=s).astype(np.float32) for s in ((99, 16, 16, 16), (99, 16, 16, 32)))
    c = np.ones(99, np.float32)
    made = [run(x, dy, (3, 3), (1, 1), (1, 1), (1, 1), c=c, threads=3)[2] for _ in range(5)]
    assert all((m == made[0]).all() for m in made)


# Batch, images, channels, places, filters; of each axis windows, strides, rates, zeros; depthwise.
SIZES = [2, 1, 9, 9, 3, 1, 7, 7, 4, 1, 3, 3, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("at, size", [
    (0, -1), (1, -1), (2, -1), (4, -1), (5, -1), (6, -1), (8, -1), (9, 0), (10, 0), (11, -3), (12, 0), (13, 0),
    (14, -1), (15, 0), (16, 0), (17, -1), (18, -1), (20, -1), (21, 2), (21, -1), (21, 1),
    (0, 1 << 40), (1, 1 << 40), (2, 1 << 62), (5, 1 << 40), (6, 1 << 40), (8, 1 << 38), (10, 1 << 36), (12, 1 << 50),
    (13, 1 << 50), (16, 1 << 50), (18, 1 << 30), (20, 1 << 30),
])  # fmt: skip
def test_sizes_that_no_memory_has_are_refused(at, size):
    sizes = (ctypes.c_int64 * 22)(*[size if i == at else n for i, n in enumerate(SIZES)])
    assert LIBRARY.tfdpfl_filters(sizes, None, None, None, None, None, None, 1, 0) == 1


@pytest.mark.parametrize("units, length, width, vocabulary, threads", [
    (5, 1, 1, 2, 1), (3, 7, 16, 3, 1), (9, 64, 33, 40, 2), (2, 300, 5, 9000, 3), (1200, 40, 130, 3, 2), (3, 0, 4, 2, 1),
    (3, 4, 0, 2, 1), (0, 4, 4, 2, 1),
])  # fmt: skip
def test_norms_of_rows_agree_with_tables_in_float64(units, length, width, vocabulary, threads):
    """Ids that the table does not have count for nothing."""
    rng = np.random.default_rng(length)
    ids = rng.integers(-2, vocabulary + 2, (units, length))
    rows = rng.normal(size=(units, length, width)).astype(np.float32)
    tables, inside = np.zeros((units, vocabulary, width)), (ids >= 0) & (ids < vocabulary)
    for u, t in zip(*np.nonzero(inside), strict=True):
        tables[u, ids[u, t]] += rows[u, t]
    alone = (ids[:, :, None] == ids[:, None]).sum(2) == 1
    squares = (rows.astype(np.float64) ** 2).sum(2)
    (x, _), sizes = guarded(rows), (units, length, width, vocabulary)
    for instructions in SETS:
        made = [guarded(np.zeros(units, np.float32)) for _ in range(2)]
        pointers = ids.ctypes.data, x.ctypes.data, *sizes, *(got.ctypes.data for got, _ in made)
        assert LIBRARY.tfdpfl_row_norms(*pointers, threads, instructions) == 0
        for (got, memory), want in zip(
            made, [(tables**2).sum((1, 2)), (squares * (inside & ~alone)).sum(1)], strict=True
        ):
            close(got, want)
            assert np.isnan(memory[:GUARD]).all() and np.isnan(memory[GUARD + units :]).all()


@pytest.mark.parametrize("sizes, how", [
    ((-1, 2, 2), (1, 0)), ((2, -1, 2), (1, 0)), ((2, 2, -1), (1, 0)), ((1 << 20, 1 << 20, 2), (1, 0)),
    ((1, (1 << 28) + 1, 1), (1, 0)), ((2, 2, 2), (0, 0)), ((2, 2, 2), (1, -1)), ((2, 2, 2), (1, SETS[-1] + 1)),
])  # fmt: skip
def test_norms_of_rows_that_no_memory_has_are_refused(sizes, how):
    assert LIBRARY.tfdpfl_row_norms(None, None, *sizes, 9, None, None, *how) == 1


@pytest.mark.parametrize("threads, instructions", [(0, 0), (1, -1), (1, SETS[-1] + 1)])
def test_instructions_that_the_processor_lacks_are_refused(threads, instructions):
    sizes = (ctypes.c_int64 * 22)(*SIZES)
    assert LIBRARY.tfdpfl_filters(sizes, None, None, None, None, None, None, threads, instructions) == 1


@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("half", [0, 1, 3, 16, 127, 128, 1000, 100_003])
def test_normals_are_those_of_box_and_muller(half, instructions):
    """Words near 0 or 2^32 are told, and no others; all others give normals, to rounding."""
    rng = np.random.default_rng(half)
    words = rng.integers(0, 2**32, 2 * half, dtype=np.uint32)
    ends = np.array([0, 2**20 - 1, 2**20, 2**31, 2**32 - 2**20 - 1, 2**32 - 2**20, 2**32 - 1], np.uint32)
    words[half // 3 : half // 3 + 7] = ends[: min(7, 2 * half - half // 3)]
    words[half:] = np.resize(ends, half) if half < 128 else words[half:]
    out, memory = guarded(np.zeros(2 * half, np.float32))
    near = np.full(half, 7, np.uint32)
    found = LIBRARY.tfdpfl_normals(words.ctypes.data, half, 2.5, out.ctypes.data, near.ctypes.data, instructions)
    assert np.isnan(memory[:GUARD]).all() and np.isnan(memory[GUARD + 2 * half :]).all()
    radii = words[:half].astype(np.int64)
    is_near = (radii < 2**20) | (radii >= 2**32 - 2**20)
    np.testing.assert_array_equal(near[:found], np.flatnonzero(is_near))
    assert (near[found:] == 7).all()
    low = np.maximum(radii, 1) * 2.0**-32
    turns = words[half:].view(np.int32) * (np.pi * 2.0**-31)
    want = 2.5 * np.sqrt(-2 * np.log(low)) * np.array([np.cos(turns), np.sin(turns)])
    np.testing.assert_allclose(out.reshape(2, -1)[:, ~is_near], want[:, ~is_near], rtol=1e-4, atol=3e-6)
    accurate = ~is_near & (radii < 2**31)  # nearer 1, float32 has fewer digits of u than the word
    np.testing.assert_allclose(out.reshape(2, -1)[:, accurate], want[:, accurate], rtol=1e-6, atol=1e-6)


def test_normals_of_no_size_are_refused():
    for half, instructions in ((-1, 0), (1 << 33, 0), (0, -1), (0, SETS[-1] + 1)):
        assert LIBRARY.tfdpfl_normals(None, half, 1.0, None, None, instructions) == -1


class Arrays(ctypes.Structure):
    _fields_ = [("count", ctypes.c_int), *((name, ctypes.c_void_p) for name in ("starts", "sizes", "data"))]


def drawn_in_c(key, sizes, stddev, instructions):
    """One call's normals, an array for each size, as the op has them laid out: each array begins a line of 16."""
    starts = np.cumsum([0] + [-(-size // 16) * 16 for size in sizes])
    arrays = [guarded(np.zeros(size, np.float32)) for size in sizes]
    places = np.array([a.ctypes.data for a, _ in arrays], np.uint64)
    begins, lengths = (np.array(x, np.int64) for x in (starts[:-1], sizes))
    to = Arrays(len(sizes), begins.ctypes.data, lengths.ctypes.data, places.ctypes.data)
    code = LIBRARY.tfdpfl_draw(key, ctypes.byref(to), ctypes.c_int64(starts[-1]), ctypes.c_float(stddev), instructions)
    for inside, memory in arrays:
        assert np.isnan(memory[:GUARD]).all() and np.isnan(memory[GUARD + inside.size :]).all()
    return code, starts, [inside for inside, _ in arrays]


def normals_of(key, total, stddev):
    """Float64 normals of AES-128's key stream, by another library: of stretches of 2^17 radii, as many angles, and 64
    bits more for each radius near an end."""
    encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    bits = lambda dtype, n: np.frombuffer(encryptor.update(bytes(n * np.dtype(dtype).itemsize)), dtype)
    parts = []
    for at in range(0, total, 2**18):
        half = min(2**17, (total - at) // 2)
        radii, turns = bits(np.uint32, half).astype(np.float64), bits(np.int32, half) * (np.pi * 2.0**-31)
        near = (radii < 2**20) | (radii >= 2**32 - 2**20)
        more = (bits(np.uint64, near.sum()) + 0.5) * 2.0**-64
        above = radii[near] >= 2**31
        ends = (np.where(above, 2.0**32 - 1 - radii[near], radii[near]) + more) * 2.0**-32
        square = -2 * np.log(np.maximum(radii, 1) * 2.0**-32)
        square[near] = -2 * np.where(above, np.log1p(-ends), np.log(ends))
        parts += [np.sqrt(square) * np.cos(turns), np.sqrt(square) * np.sin(turns)]
    return stddev * np.concatenate(parts)


draws = pytest.mark.skipif(not LIBRARY.tfdpfl_draws(SETS[-1]), reason="this processor has no instructions for AES")


@draws
@pytest.mark.parametrize("instructions", SETS)
@pytest.mark.parametrize("sizes", [[1], [16], [33, 1, 0, 700], [5] * 40, [2047, 2048, 2049], [300_001, 7, 2**18]],
                         ids=str)  # fmt: skip
def test_a_draw_is_the_key_stream_by_box_and_muller(sizes, instructions):
    key = bytes(range(len(sizes), len(sizes) + 16))
    code, starts, got = drawn_in_c(key, sizes, 2.5, instructions)
    want = normals_of(key, int(starts[-1]), 2.5)
    assert code == 0
    for start, normals in zip(starts, got, strict=False):
        np.testing.assert_allclose(normals, want[start : start + normals.size], rtol=1e-4, atol=1e-5)
    if sum(sizes) > 2**18:  # one normal of 32,000 is beyond 4.2 deviations
        assert np.abs(got[0]).max() > 4.2 * 2.5


@draws
def test_draws_that_no_stream_has_are_refused():
    bad = {"odd": (15, 0), "negative": (-2, 0), "unknown instructions": (16, -1), "lacking": (16, SETS[-1] + 1)}
    to = Arrays(1, *[np.zeros(1, np.int64).ctypes.data] * 3)
    for total, instructions in bad.values():
        call = bytes(16), ctypes.byref(to), ctypes.c_int64(total), ctypes.c_float(1), instructions
        assert LIBRARY.tfdpfl_draw(*call) == 1


def test_a_forked_process_computes_the_same():
    rng = np.random.default_rng(0)
    x, dy = (rng.normal(size=s).astype(np.float32) for s in ((64, 16, 16, 16), (64, 16, 16, 32)))
    norms = lambda: run(x, dy, (3, 3), (1, 1), (1, 1), (1, 1), threads=4)[1]
    before = norms()
    child = os.fork()
    if child == 0:
        os._exit(0 if (norms() == before).all() else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
