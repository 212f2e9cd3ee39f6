"""Whose an example is."""

import itertools

import numpy as np
import pytest

from tfdpfl.data import (
    bound_owners,
    poisson_batches,
    select_examples,
)
from tfdpfl.data.users import users_of


@pytest.mark.parametrize(
    "ids",
    [
        np.array([12, "12", 12.0, 13.0, 13, 13], dtype=object),  # as pandas makes of chunks of mixed types
        np.array(["12", "12.0", " 12", "13", "+13", "1.3e1"]),
        np.array([b"12", "12", 12, 13, b"13", np.float32(13)], dtype=object),
        {12: [0], "12": [1, 2], 13: [3], "13.0": [5, 4]},
        [12, 12, 12, 13, 13, 13],
    ],
)
def test_ids_of_one_value_are_one_user(ids):
    users = users_of(ids, 6)
    rows = [users.rows[a:b].tolist() for a, b in itertools.pairwise(users.starts)]
    assert sorted(map(sorted, rows)) == [[0, 1, 2], [3, 4, 5]]


def test_examples_of_several_owners_are_chosen_so_that_each_owner_is_in_one_user():
    owners = [["a", "b"], ["b"], {"c", "d"}, ("d", "c", "c"), "e", 7, np.array([7.0]), ["7", "a"], ["a", "f", "g"], "b"]
    users = bound_owners(owners)
    rows = [users.rows[a:b].tolist() for a, b in itertools.pairwise(users.starts)]
    assert rows == [[1, 9], [4], [5, 6], [2, 3], [8]]  # 0 shares b with 1, and 7 shares 7 with 5
    one_each = bound_owners(np.array([3, 1, 3, 2]))
    assert [one_each.rows[a:b].tolist() for a, b in itertools.pairwise(one_each.starts)] == [[0, 2], [1], [3]]
    for wrong, message in (
        ([["a"], []], "no owner for example 1"), ([["a"], ["b", None]], "no owner for example 1"),
        ([np.nan], "no owner for example 0"), ({"a": [0]}, "owners is a mapping"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            bound_owners(wrong)
    with pytest.raises(ValueError, match="for 10 examples, and the data have 20"):
        poisson_batches(np.arange(20), 0.5, 1, user_ids=users, examples_per_user=1)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_no_owner_has_more_examples_than_the_most_and_none_is_left_out_without_need(most):
    rng = np.random.default_rng(0)
    owners = [rng.choice(40, 1 + rng.integers(3), replace=False) for _ in range(150)]
    kept = select_examples(owners, most)
    counts = np.bincount(np.concatenate([owners[i] for i in kept]), minlength=40)
    assert counts.max() == most and (np.diff(kept) > 0).all()
    for i in set(range(150)) - set(kept.tolist()):
        assert (counts[owners[i]] == most).any()
    assert select_examples([["7", "a"], [7, "b", "c"], np.array([7.0]), "d"], 1).tolist() == [2, 3]
    for wrong in (0, 1.5):
        with pytest.raises(ValueError, match="max_examples_per_owner must be a whole number of at least 1"):
            select_examples(owners, wrong)


def test_ids_of_different_values_are_different_users():
    ids = ["12", "21", "a", "A", "1_2", "12345678901234567890", "12345678901234567891", "nan", "infinity", "", "1e400"]
    assert users_of(np.array(ids), len(ids)).number == len(ids)
    assert users_of(np.array(ids, dtype=object), len(ids)).number == len(ids)
