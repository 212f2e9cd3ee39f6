"""Whose an example is."""

from __future__ import annotations

import dataclasses
import decimal
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np

from tfdpfl._types import Arrays, Nest
from tfdpfl.accounting import _checks
from tfdpfl.data.draws import Words

__all__ = ["Users", "bound_owners", "select_examples", "users_of"]

_OWNERS = (
    "Examples have several owners. A user is here a set of owners with all examples that exactly they own. No owner is "
    "in two sets, and an example of a set that was not chosen is left out, so ε protects each owner. It holds if it is "
    "public which owners an example has, and what the examples contain is private."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Users:
    """Users and the numbers of their examples: those of user u are ``rows[starts[u]:starts[u + 1]]``.

    The users' order depends on their ids alone, not on which examples they have.

    Attributes:
        chosen_from: The number of the examples that ``rows`` were chosen from, or None if ``rows`` are all.
        note: A sentence for the statement, or None.
    """

    rows: np.ndarray
    starts: np.ndarray
    chosen_from: int | None = None
    note: str | None = None

    @property
    def number(self) -> int:
        return len(self.starts) - 1

    def some_of(self, users: np.ndarray, each: int, words: Words) -> np.ndarray:
        """``each`` random examples of every user, one user after the other: int64 [len(users) * each].

        A user who has fewer comes with all of them, again and again in one random order. So each of their examples
        stands for its share of the user's mean on average.
        """
        begin, count = self.starts[users], np.diff(self.starts)[users]
        whose = np.repeat(np.arange(len(users)), count)
        first = np.cumsum(count) - count
        rows = self.rows[np.arange(len(whose)) + np.repeat(begin - first, count)]
        shuffled = rows[np.lexsort([words(len(rows)), whose])]
        return shuffled[(first[:, None] + np.arange(each) % count[:, None]).ravel()]


def users_of(user_ids: Arrays, num_examples: int) -> Users:
    """From an id for each example, or from {user: numbers of their examples}; what it made, it takes again.

    Ids of one value are one user, whatever their type: 12, "12" and 12.0, as pandas reads one column of a large file.
    (Two users that are taken for one are both protected; one that is taken for two is not.)

    Raises:
        ValueError: an example has no user or two, or a user has no examples.
    """
    if isinstance(user_ids, Users):
        if user_ids.chosen_from not in (None, num_examples):
            raise ValueError(
                f"user_ids was made by bound_owners for {user_ids.chosen_from} examples, and the data have "
                f"{num_examples}: pass the owners of these data."
            )
        return user_ids
    return _grouped(*(_of_mapping if isinstance(user_ids, Mapping) else _of_array)(user_ids, num_examples))


def _of_mapping(user_ids: Mapping, num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples' numbers, and whose each is."""
    parts = [np.asarray(rows).ravel() for rows in user_ids.values()]
    without = next((user for user, rows in zip(user_ids, parts, strict=True) if not len(rows)), None)
    if without is not None:
        raise ValueError(
            f"user_ids has a user without examples, {without!r}: leave them out. (Who has none takes no part, and "
            "is not to count among those that are sampled.)"
        )
    rows = np.concatenate(parts) if parts else np.empty(0, np.int64)
    if sorted(rows.tolist()) != list(range(num_examples)):
        raise ValueError(
            f"user_ids names {len(rows)} examples ({len(set(rows.tolist()))} different ones) of {num_examples}: "
            "give each example's number, from 0 on, to one user."
        )
    return rows.astype(np.int64), np.repeat(_numbered(user_ids), [len(part) for part in parts])


def _of_array(user_ids: Arrays, num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the examples' numbers, and whose each is."""
    ids = np.asarray(user_ids.to_numpy() if hasattr(user_ids, "to_numpy") else user_ids)
    if ids.shape != (num_examples,):
        raise ValueError(
            f"user_ids must be one id for each of the {num_examples} examples, got the shape {list(ids.shape)}."
        )
    missing = np.array([i is None or i != i for i in ids]) if ids.dtype.kind in "Of" else np.zeros(1, bool)
    if missing.any():
        raise ValueError(
            f"user_ids has no user for {int(missing.sum())} examples, the first at {int(missing.argmax())}: leave "
            "these out, or give each an id of its own."
        )
    if ids.dtype.kind == "O":
        return np.arange(num_examples), _numbered(ids)
    values, whose = np.unique(ids, return_inverse=True)
    return np.arange(num_examples), _numbered(values)[whose] if ids.dtype.kind in "US" else whose


def bound_owners(owners: Iterable[Arrays]) -> Users:
    """Chooses examples of several owners so that each owner takes part as one user.

    Use it if an example belongs to several persons, as a message belongs to its sender and its readers:

        users = tfdpfl.data.bound_owners(owners)
        batches = tfdpfl.data.poisson_batches((x, y), ..., user_ids=users, examples_per_user=2)

    A user is a set of owners with all examples that exactly these owners have. Sets are chosen greedily, those of the
    fewest owners first and then by their first example. A set that shares an owner with a chosen one is left out, with
    its examples.

    Args:
        owners: For each example its owners: a list, tuple, set or array of ids, or one id. Ids of one value are one
            owner, as in `poisson_batches`.

    Returns:
        The users, for ``user_ids`` of `poisson_batches`, `random_allocation`, `cyclic_poisson`, `fixed_order` and
        `plan`. ``number`` counts them, and ``rows`` has the numbers of the chosen examples.

    Raises:
        ValueError: An example has no owner, or ``owners`` is a mapping.

    Guarantee:
        Neighbours differ in all examples of one owner, whose set is removed or blanked. No other set changes, so the
        sensitivity is that of one user. Which owners an example has is public, as in the fixed-graph model of Ganesh
        et al. 2025, "It's My Data Too", arXiv:2503.03622. With one example of each set this is its greedy selection of
        one example for each owner.

    Example:
        >>> users = tfdpfl.data.bound_owners([["ann", "bob"], ["bob"], ["cem", "dan"], ["dan", "cem"]])
        >>> users.number, users.rows.tolist()
        (2, [1, 2, 3])
    """
    sets = _sets_of(owners)
    chosen: dict[frozenset, list[int]] = {}
    taken: set[Hashable] = set()
    for number in _fewest_first(sets):
        group = sets[number]
        # Only equal sets share a user: of two owners who share some examples, one would leave half a user behind.
        if group not in chosen and taken.isdisjoint(group):
            chosen[group] = []
            taken |= group
        if group in chosen:
            chosen[group].append(number)
    rows = np.array([n for numbers in chosen.values() for n in numbers], np.int64)
    starts = np.cumsum([0, *map(len, chosen.values())])
    return Users(rows, starts, len(sets), _OWNERS)


def select_examples(owners: Iterable[Arrays], max_examples_per_owner: int) -> np.ndarray:
    """Chooses examples of several owners so that no owner has more than so many of them.

    It keeps more examples than `bound_owners` if most owners share their examples with different people. Each example
    is then sampled and clipped by itself, and ε of an owner is that of a group of examples:

        kept = tfdpfl.data.select_examples(owners, max_examples_per_owner=3)
        plan = tfdpfl.plan(
            x[kept], y[kept], target_epsilon=4.0, delta=1e-5, batch_size=64, num_epochs=3, max_examples_per_user=3)

    Examples are chosen greedily, those of the fewest owners first and then by their order. One is left out if an owner
    of it has the most already (Ganesh et al. 2025, "It's My Data Too", arXiv:2503.03622, with another order).

    Args:
        owners: As in `bound_owners`.
        max_examples_per_owner: The most examples of one owner.

    Returns:
        The numbers of the chosen examples, in order: int64 [how many].

    Raises:
        ValueError: as `bound_owners`, or the number is not a whole one above 0.

    Guarantee:
        Neighbours differ in the contents of all examples of one owner, which are blanked. Which owners an example has
        is public, so the same examples are chosen. At most ``max_examples_per_owner`` of them differ, each of which
        moves the clipped sum by C where it is sampled. With ``max_examples_per_user`` `plan`, `PrivacyBudget` and
        `compute_epsilon` have the ε of an owner; without it theirs protects one example alone.

    Example:
        >>> tfdpfl.data.select_examples([["ann", "bob"], ["bob"], ["ann", "cem"], ["bob", "cem"]], 2).tolist()
        [0, 1, 2]
    """
    most = _checks.whole("max_examples_per_owner", max_examples_per_owner, 1, "count the examples of one owner")
    sets, kept = _sets_of(owners), []
    counts: dict[Hashable, int] = {}
    for number in _fewest_first(sets):
        if all(counts.get(owner, 0) < most for owner in sets[number]):
            kept.append(number)
            counts.update((owner, counts.get(owner, 0) + 1) for owner in sets[number])
    return np.array(sorted(kept), np.int64)


def _sets_of(owners: Iterable[Arrays]) -> list[frozenset]:
    if isinstance(owners, Mapping):
        raise ValueError("owners is a mapping: pass the owners of each example, in the order of the examples.")
    return [_owners_of(number, ids) for number, ids in enumerate(owners)]


def _fewest_first(sets: Sequence[frozenset]) -> list[int]:
    return sorted(range(len(sets)), key=lambda number: len(sets[number]))


def _owners_of(number: int, ids: Arrays) -> frozenset:
    ids = ids.tolist() if isinstance(ids, np.ndarray | np.generic) else ids
    found = frozenset(map(_value, [ids] if isinstance(ids, str | bytes) or not hasattr(ids, "__len__") else ids))
    if not found or any(i is None or i != i for i in found):
        raise ValueError(
            f"owners has no owner for example {number}, or one that is missing: leave the example out, or give it an "
            "id of its own."
        )
    return found


_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,4})?\s*", re.ASCII)


def _numbered(ids: Iterable[Arrays]) -> np.ndarray:
    """Which user each id is, from 0 on, in the order of the ids."""
    numbers: dict[Hashable, int] = {}
    whose = np.array([numbers.setdefault(_value(i), len(numbers)) for i in ids], np.int64)
    places = np.empty(len(numbers), np.int64)
    places[[numbers[user] for user in sorted(numbers, key=_place)]] = np.arange(len(numbers))
    return places[whose]


def _place(user: object) -> tuple[int, Arrays]:
    """What ids of all types are ordered by: numbers, then texts, then others."""
    if isinstance(user, int | float | decimal.Decimal):
        return 0, decimal.Decimal(user)
    return (1, user) if isinstance(user, str) else (2, repr(user))


def _value(user: object) -> Nest:
    """What is equal for two ids of one user."""
    user = user.item() if isinstance(user, np.generic) else user
    text = user.decode("utf-8", "surrogateescape") if isinstance(user, bytes) else user
    return decimal.Decimal(text) if isinstance(text, str) and _NUMBER.fullmatch(text) else text


def _grouped(rows: np.ndarray, whose: np.ndarray) -> Users:
    order = np.argsort(whose, kind="stable")
    return Users(rows[order], np.cumsum([0, *np.bincount(whose)]))
