"""Which kernels a process uses, and why it uses none."""

import numpy as np
import pytest

from tfdpfl import native


def test_the_switch_turns_the_kernels_off_and_says_so(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert native.kernels() == native.Kernels(None, missing="TFDPFL_NATIVE=0 is set")


def test_an_unknown_switch_is_refused(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "avx1024")
    with pytest.raises(ValueError, match=r"TFDPFL_NATIVE='avx1024' is not known.*Set it to 0, 1, plain, avx2, avx512"):
        native.kernels()


@pytest.fixture
def anew():
    """Loads the library again, before and after."""
    caches = native._loaded, native._chosen
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("content, why", [(None, "no C compiler"), (b"no library", "cannot be loaded")])
def test_a_library_that_is_missing_or_broken_is_done_without(content, why, anew, monkeypatch, tmp_path):
    monkeypatch.delenv(native.SWITCH, raising=False)
    path = tmp_path / "_kernels.so"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(native, "LIBRARY", path)
    found = native.kernels()
    assert found.library is None and why in found.missing


@pytest.mark.parametrize("setting, most", [("1", 1), ("1,4", 1), ("", 4096), ("many", 4096)])
def test_threads_are_no_more_than_the_environment_allows(setting, most, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert 1 <= native.count_threads() <= most


@pytest.mark.skipif(not native.LIBRARY.exists(), reason="the kernels are not built")
@pytest.mark.parametrize("words, out, near", [
    (np.zeros(4, np.int32), np.zeros(4, np.float32), np.zeros(2, np.uint32)),
    (np.zeros(3, np.uint32), np.zeros(4, np.float32), np.zeros(2, np.uint32)),
    (np.zeros(4, np.uint32), np.zeros(4), np.zeros(2, np.uint32)),
    (np.zeros(4, np.uint32), np.zeros((2, 2), np.float32), np.zeros(2, np.uint32)),
    (np.zeros(4, np.uint32), np.zeros(8, np.float32)[::2], np.zeros(2, np.uint32)),
    (np.zeros(4, np.uint32), np.zeros(4, np.float32), np.zeros(1, np.uint32)),
])  # fmt: skip
def test_arrays_that_normals_do_not_fit_are_refused(words, out, near, monkeypatch):
    monkeypatch.delenv(native.SWITCH, raising=False)
    with pytest.raises(ValueError, match=r"do not fit together\. Pass contiguous arrays"):
        native.kernels().normals(words, 1.0, out, near)
    assert not out.any()
