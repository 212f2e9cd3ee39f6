"""Each line of a chain ends with SHA-256 of all before it, by hashlib, and a line that was touched is seen."""

import hashlib
import json

import pytest

from tfdpfl._chain import Chain

ROWS = [{"version": 1}, {"round": 0, "cohort": ["a", "b"]}, {"round": 1, "cohort": []}]


@pytest.fixture
def lines():
    chain, made = Chain(), []
    for row in ROWS:
        made.append(chain.seal(row))
        chain.add(made[-1])
    return made


def read(lines, required=True):
    chain = Chain()
    for line in lines:
        chain.check(line, required)
        chain.add(line)
    return chain


def test_a_line_holds_its_row_and_the_hash_of_all_up_to_there(lines):
    for number, (line, row) in enumerate(zip(lines, ROWS, strict=True)):
        saved = json.loads(line)
        digest = saved.pop("sha256")
        before = b"".join(lines[:number]) + line[: line.rindex(b', "sha256"')]
        assert saved == row and digest == hashlib.sha256(before).hexdigest()
    chain = read(lines)
    assert chain.hashed == 3 and chain.digest == hashlib.sha256(b"".join(lines)).hexdigest()
    assert chain.digests == {hashlib.sha256(b"".join(lines[:n])).hexdigest() for n in (1, 2, 3)}


def test_a_line_that_was_changed_lost_doubled_or_put_in_is_seen(lines):
    first, second, third = lines
    for touched in (
        [first, second.replace(b'"a"', b'"c"'), third], [first, third], [first, second, second, third],
        [second, first, third], [first, second, b'{"round": 7}\n'],
    ):  # fmt: skip
        with pytest.raises(ValueError, match="hash"):
            read(touched, required=False)


def test_a_line_without_a_hash_is_accepted_before_the_first_that_has_one_unless_hashes_are_required(lines):
    plain = b'{"version": 0}\n'
    assert read([plain], required=False).hashed == 0
    with pytest.raises(ValueError, match="it has no hash"):
        read([plain])
