"""Chains lines of JSON by hashes: each line ends with the hash of all that its file holds up to there.

So a line that is changed, lost or put in later is seen. Lines that are cut off at the end are not: whoever keeps a
second file stores the chain's digest in it, and finds it among `Chain.digests` later.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from tfdpfl._types import JsonValue

__all__ = ["Chain"]

_HASH = b', "sha256": "'


class Chain:
    """The hashes of a file, line by line.

    Attributes:
      hashed: how many lines carry a hash.
      digests: the hash of the file after each line.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.hashed = 0
        self.digests: set[str] = set()

    @property
    def digest(self) -> str:
        """The hash of all lines so far."""
        return self._digest.hexdigest()

    def seal(self, line: Mapping[str, JsonValue]) -> bytes:
        """Returns a line with its hash, as it is to follow. `add` it once it is in the file."""
        before = json.dumps(line).encode()[:-1]
        return before + _HASH + self._after(before) + b'"}\n'

    def check(self, line: bytes, required: bool) -> None:
        """Compares a line with the lines before it.

        Args:
          line: the next one, with its newline.
          required: whether it must have a hash. It also must if a line before it has one.

        Raises:
          ValueError: the line's hash is another, or is missing.
        """
        before, mark, _ = line.rpartition(_HASH)
        if mark and line != before + _HASH + self._after(before) + b'"}\n':
            raise ValueError("its hash is not that of the lines up to it")
        if not mark and (self.hashed or required):
            raise ValueError("it has no hash, though all lines of its version have")

    def add(self, line: bytes) -> None:
        """Goes on to the line after this."""
        self._digest.update(line)
        self.hashed += _HASH in line
        self.digests.add(self.digest)

    def _after(self, before: bytes) -> bytes:
        digest = self._digest.copy()
        digest.update(before)
        return digest.hexdigest().encode()
