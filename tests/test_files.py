"""Files that outlive a crash: a file is whole before and after it is replaced, and one process at a time holds it."""

import os

import pytest

from tfdpfl import _files


def test_a_file_is_replaced_as_a_whole_and_synced_before_it_has_its_name(tmp_path, monkeypatch):
    path, synced = tmp_path / "ledger", []
    path.write_bytes(b"old")

    def fsync(descriptor):
        synced.append((os.path.realpath(f"/proc/self/fd/{descriptor}"), path.read_bytes()))

    monkeypatch.setattr(os, "fsync", fsync)
    _files.replace(path, lambda file: file.write(b"new"))
    assert path.read_bytes() == b"new" and path.stat().st_mode & 0o077 == 0
    # The content first, while the name still has the old one; then the folder, in which the name stands.
    assert synced == [(f"{path}.new", b"old"), (str(tmp_path), b"new")]

    def broken(file):
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        _files.replace(path, broken)
    assert path.read_bytes() == b"new"


def test_all_that_a_folder_holds_is_synced(tmp_path, synced):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("")
    _files.sync_tree(tmp_path)
    assert set(synced) == {str(path) for path in (tmp_path, *tmp_path.rglob("*"))} and len(set(synced)) == 4


def test_a_file_that_is_held_is_refused_until_it_is_closed(tmp_path):
    path = tmp_path / "ledger"
    with open(path, "w") as held, open(path, "w") as other:
        _files.lock(held, "ledger_path", path)
        with pytest.raises(ValueError, match=r"ledger_path='.*ledger' is in use by another process"):
            _files.lock(other, "ledger_path", path)
    with open(path, "w") as next_one:
        _files.lock(next_one, "ledger_path", path)
