"""Keeps a table of a DP optimizer's steps, which is saved with it, and makes a ledger of such tables.

A row says: the optimizer object ``origin`` took its first ``steps`` steps at this noise, their batches drawn this way
from this data set. Each object in each process has an origin of its own, so a copy, a loaded model or a restarted
process never continues a row of another. Rows of one origin are the same steps (the longer one holds the other). Rows
of two origins are different steps (they add up). So tables that met on different ways can always be united.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
import secrets
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tfdpfl import _formats
from tfdpfl._process import renew_after_fork
from tfdpfl._types import Keywords
from tfdpfl._variables import in_memory, value_of
from tfdpfl._version import __version__
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.accounting.run import options_of
from tfdpfl.accounting.sampling import BY_CODE, Code, SamplingScheme

__all__ = [
    "DATA",
    "SAMPLING",
    "UNKNOWN",
    "BatchSampling",
    "Counter",
    "compact",
    "empty_table",
    "is_table",
    "ledger_of",
    "mark_of_any_version",
    "merge_tables",
    "new_origin",
    "number_of",
    "refuse_newer",
    "with_all_columns",
]  # fmt: skip

ROWS = 64
COLUMNS = ("origin", "data", "sampling", "num_examples", "batch_size", "truncated", "multiplier", "steps", "passes")
ORIGIN, DATA, SAMPLING, NUM_EXAMPLES, BATCH_SIZE, TRUNCATED, MULTIPLIER, STEPS, PASSES = range(len(COLUMNS))
KEY = slice(0, STEPS)  # what tells rows apart

UNKNOWN = next(number for number, (_, code) in BY_CODE.items() if code.unknown)
DISCRETE = 16  # the bit of a row's sampling that is set if the noise is discrete; no `Code` has it
SHARED = -1.0  # the data set of a row that stands for several, made where a table is full
_EXACT = 1 << 52  # float64 holds every whole number up to it

# Of the table, and of the segments of correlated noise beside it. It stands in the table's last row, which counts no
# steps and is given up only to a table that is full: so it is in every file that the table is in.
VERSION = 1
_MARK = -float(1 << 51)  # less the version, in place of an origin; the version of the package stands behind it


def new_origin() -> float:
    return float(1 + secrets.randbelow(_EXACT - 1))


def number_of(name: str | None) -> float:
    """Returns a data set's name as it stands in the table; 0 for none."""
    if name is None:
        return 0.0
    return float(1 + int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % (_EXACT - 1))


def empty_table() -> np.ndarray:
    """Returns a table of no steps, with the version of its format."""
    table = np.zeros([ROWS, len(COLUMNS)])
    release = [float(part) for part in re.findall(r"\d+", __version__)[:3]]
    table[-1, : 1 + len(release)] = [_MARK - VERSION, *release]
    return table


def _marks(table: np.ndarray) -> np.ndarray:
    """Returns the rows that hold a version; none where an array is no table."""
    if table.ndim != 2 or table.shape[1] < 4:
        return np.zeros([0, 4])
    return table[(table[:, ORIGIN] < _MARK) & (table[:, ORIGIN] > _MARK - 1000)]


def mark_of_any_version() -> bytes:
    """Returns bytes that stand in each file with a saved table, as far as it is not compressed."""
    return np.array(_MARK - VERSION, "<f8").tobytes()[2:]


def is_table(array: np.ndarray) -> bool:
    """Returns whether an array is a saved table, of whatever version."""
    return len(_marks(array)) > 0


def refuse_newer(table: np.ndarray) -> None:
    """Refuses a saved table of a newer version than this release reads. A table without a version is of before there
    were versions.

    Raises:
      PrivacyError: the table is of a newer version, or has a sampling of another release.
    """
    marks = _marks(table)
    for mark in marks[marks[:, ORIGIN] < _MARK - VERSION]:
        writer = "tfdpfl " + ".".join(f"{part:.0f}" for part in mark[1:4])
        saved = {"version": int(_MARK - mark[ORIGIN]), "written_by": writer}
        _formats.refuse_newer("The optimizer's saved table of steps", saved, VERSION)
    if table.shape == (ROWS, len(COLUMNS)):
        for code in dict.fromkeys(table[table[:, STEPS] > 0, SAMPLING].tolist()):
            if int(code) & ~DISCRETE in BY_CODE:
                continue
            raise _formats.NewerFormatError(
                f"The optimizer's saved table of steps has batches with the sampling of number {code:.0f}, which "
                f"tfdpfl {__version__} does not know: upgrade with pip install --upgrade tfdpfl."
            )


def with_all_columns(table: np.ndarray) -> np.ndarray:
    """Returns a saved table of this release's shape: columns that are new since it was saved are zero."""
    if not len(_marks(table)) or table.shape[1] >= len(COLUMNS):
        return table
    return np.pad(table, ((0, 0), (0, len(COLUMNS) - table.shape[1])))


@dataclasses.dataclass(frozen=True)
class BatchSampling:
    """How the batch of a step was drawn: data set, sampling, examples, batch size, cut, passes, zeros if that is not
    known; and which part of a logical batch it is, -1 if any."""

    known: tf.Tensor
    place: tf.Tensor


class Counter:
    """Counts the steps of one optimizer object in one process, and knows how their batches are drawn.

    It is in no file: nothing that is loaded takes back what it counted. (No tf.Module, which would be saved.)
    """

    def __init__(self):
        self.origin = in_memory(np.float64(new_origin()))
        self.table = in_memory(empty_table())
        # Data set, sampling, examples, batch size, the size that larger ones are cut to (0 for none); passes begun; of
        # a logical batch the next part, and of how many (0: any); for how many more batches that is known.
        self.batches = in_memory(np.zeros(9))
        # What workers that take steps together must agree on, besides: the order of the examples, and how many steps
        # the target allows (-1: any).
        self.share = in_memory(np.zeros(2))
        self.nonfinite = in_memory(np.int64(0))
        self.seen = in_memory(np.float64(0))  # units in the batches of which it was known how they were drawn
        self.discrete = False
        self.loaded = np.zeros([0, len(COLUMNS)])  # what tables held that were read before
        # Steps of other optimizers of this process, which the saved table is to have, too; and what they come from.
        self.of_others = np.zeros([0, len(COLUMNS)])
        self._origins_of_others: set[float] = set()
        self._taken_in: set[bytes] = set()
        self.watches: list[Callable] = []  # each ends a fit, if it was interrupted
        self.passes: dict[tuple, int] = {}  # over the data that were begun, by how they are drawn
        self._announced: tuple[tuple, tf.Tensor] = ((), tf.zeros([]))
        self._silence = tf.zeros([9], tf.float64)
        renew_after_fork(self)

    def _renew(self) -> None:
        self.origin.assign(new_origin())

    def announce(self, data: tuple[float, int, int, int, int], batches: int, part: int = 0, parts: int = 0) -> None:
        """Says how the next ``batches`` are drawn: (data set's number, sampling's, examples, batch size, cut to). With
        ``parts``, so many make a logical batch, of which that is the size; the next is its number ``part``. Of batches
        after these nothing is known."""
        said = (*data, self.passes.get(data, 0), part, parts, batches)
        if said != self._announced[0]:  # for most batches it is the same: to make a tensor costs more than to assign it
            self._announced = (said, tf.constant(said, tf.float64))
        # What `assign` does before it takes twice as long as this, and it is done for each batch.
        tf.raw_ops.AssignVariableOp(resource=self.batches.handle, value=self._announced[1])

    def silence(self) -> None:
        """Says that nothing is known of the batches from here on."""
        tf.raw_ops.AssignVariableOp(resource=self.batches.handle, value=self._silence)

    @property
    def steps(self) -> int:
        """How many steps this object took in this process."""
        return int(value_of(self.table)[:, STEPS].sum())

    def taken_back(self, saved: tf.Variable) -> int:
        """Returns how many of this object's steps the saved table does not know of: it was loaded since."""
        rows, own = np.asarray(saved), self.table.numpy()
        known = np.isin(rows[:, ORIGIN], [*own[own[:, STEPS] > 0, ORIGIN], self.origin.numpy()])
        return max(self.steps - int(rows[known, STEPS].sum()), 0)

    def drawn(self, nonfinite: tf.Tensor, units: tf.Tensor | float = 0.0) -> BatchSampling:
        """Returns how the batch of the step that is traced was drawn, of which so many units were not finite, and which
        has so many; the next one is another."""
        self.nonfinite.assign_add(tf.cast(nonfinite, tf.int64))
        before = tf.convert_to_tensor(self.batches)
        self.seen.assign_add(tf.where(before[-1] > 0, tf.cast(units, tf.float64), 0))
        after, known, place = _next_batch()(before)
        self.batches.assign(after)
        return BatchSampling(known, place)

    def count(
        self, drawn: BatchSampling, multiplier: tf.Tensor, saved: tf.Variable, origin: tf.Tensor | None = None
    ) -> None:
        """Counts a step that is traced, here and in the table that is saved. Several workers all count the first one's,
        by its ``origin``, so that they say the same."""
        shift = tf.constant(DISCRETE if self.discrete else 0, tf.float64)
        whose = self.origin if origin is None else origin
        own, kept = _counted()(self.table, saved, whose, drawn.known, shift, multiplier)
        self.table.assign(own)
        saved.assign(kept)

    def rows(self, saved: tf.Variable) -> np.ndarray:
        """Returns all that is known to have run: counted here, taken in from others, or in a table that was loaded."""
        return merge_tables(self.own_rows(saved), self.of_others)

    def own_rows(self, saved: tf.Variable) -> np.ndarray:
        """Returns `rows` without those of other optimizers of this process, which state themselves what ran."""
        for watch in list(self.watches):
            watch()
        table = value_of(saved)
        refuse_newer(table)
        kept = merge_tables(self.loaded, table, value_of(self.table))
        if self._origins_of_others:
            kept = kept[~np.isin(kept[:, ORIGIN], list(self._origins_of_others))]
        self.loaded = kept
        return kept

    def merge(self, rows: np.ndarray, saved: tf.Variable) -> None:
        """Takes in rows that came another way than in the saved table."""
        self.loaded = merge_tables(self.loaded, rows)
        self.write_back(saved)

    def take_in(self, rows: np.ndarray, saved: tf.Variable) -> None:
        """Takes in the rows of another optimizer of this process, so that a file with the saved table has them."""
        new = [row for row in rows if row.tobytes() not in self._taken_in]
        if not new:  # they may stand added up by now, and would count twice
            return
        self._taken_in |= {row.tobytes() for row in new}
        self._hold_of_others(merge_tables(self.of_others, np.array(new)))
        self.write_back(saved)

    def _hold_of_others(self, rows: np.ndarray) -> None:
        self.of_others = rows
        self._origins_of_others |= set(rows[:, ORIGIN].tolist())

    def write_back(self, saved: tf.Variable) -> None:
        """Writes all that is known to have run into the table that is saved, in fewer rows where it is half full."""
        rows = self.rows(saved)
        if len(rows) > ROWS // 2:
            self.loaded = compact(self.loaded, float(self.origin))
            self._hold_of_others(compact(self.of_others, float(self.origin)))
            rows = merge_tables(self.loaded, self.of_others)
        if len(rows) > ROWS:
            return  # more kinds of steps than a table has room for: it goes on as it is
        table = empty_table()
        table[: len(rows)] = rows
        if not np.array_equal(table, np.asarray(saved)):
            saved.assign(table)


def _traced_once(*shapes: tuple[int, ...]) -> Callable[[Callable], Callable[[], Callable]]:
    """Makes of a function of float64 tensors one that gives it traced. Each step that is traced calls the same graph:
    its hundred small ops were a sixth of what a small model's first step took."""

    def traced(function: Callable) -> Callable[[], Callable]:
        @functools.cache
        def made() -> Callable:
            with tf.init_scope():  # whatever is traced now must not be held by it
                specs = [tf.TensorSpec(shape, tf.float64) for shape in shapes]
                return tf.function(function, input_signature=specs, autograph=False).get_concrete_function()

        return made

    return traced


@_traced_once((9,))
def _next_batch(batches: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns what `Counter.batches` is after the step, and what is drawn for it (`BatchSampling`)."""
    known, (part, parts, more) = batches[:-3], tf.unstack(batches[-3:])
    after = tf.stack([tf.math.floormod(part + 1, tf.maximum(parts, 1)), parts, tf.maximum(more - 1, 0)])
    place = tf.where((more > 0) & (parts > 0), part, -1)
    drawn = tf.where(more > 0, known, tf.zeros_like(known))
    return tf.concat([known, after], 0), drawn, tf.cast(place, tf.int64)


@_traced_once((ROWS, len(COLUMNS)), (ROWS, len(COLUMNS)), (), (STEPS - 1,), (), ())
def _counted(
    own: tf.Tensor, kept: tf.Tensor, origin: tf.Tensor, known: tf.Tensor, shift: tf.Tensor, multiplier: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the table of what ran here, and the one that is saved, each with one step more that was drawn as is
    known."""
    passes = known[-1]
    key = tf.concat([[origin], (known + np.eye(STEPS - 1)[SAMPLING - DATA] * shift)[:-1], [multiplier]], 0)
    # A table that was emptied (an optimizer's variables are set to zero) begins anew with all that ran here.
    tables = tf.stack([own, tf.where(tf.reduce_any(kept[:, STEPS] > 0), kept, own)])
    used = tables[:, :, STEPS] > 0
    same = tf.reduce_all(tf.equal(tables[:, :, KEY], key), 2) & used
    # The row of this key; else the first that is free; else the first of all.
    place = tf.argmax(tf.where(same, 2, tf.where(used, 0, 1)), 1)
    here = tf.one_hot(place, ROWS, True, False)
    old = tf.gather(tables, place, batch_dims=1)
    full = tf.reduce_all(used, 1) & ~tf.reduce_any(same, 1)
    steps = old[:, STEPS] + 1
    # A table that was loaded may know of fewer steps of this object than it took.
    steps = tf.maximum(steps, tf.where(full[0], tf.zeros_like(steps), steps[0]))
    row = tf.concat([tf.stack([key, key]), tf.stack([steps, tf.maximum(old[:, PASSES], passes)], 1)], 1)
    # Where there is no row left, the first holds what would need more: at the least noise, of unknown batches.
    least = tf.minimum(old[:, MULTIPLIER], multiplier)
    zero = tf.zeros_like(least)
    shared = tf.stack([zero + origin, zero + SHARED, *[zero] * 4, least, old[:, STEPS] + 1, zero], 1)
    row = tf.where(full[:, None], shared, row)
    own, kept = tf.unstack(tf.where(here[:, :, None], row[:, None], tables))
    return own, kept


def merge_tables(*tables: np.ndarray) -> np.ndarray:
    """Returns the rows of all tables: of the same key the one with the most steps. None is lost, none counts twice."""
    found: dict[bytes, np.ndarray] = {}
    for row in np.concatenate(tables):
        if row[STEPS] > 0:
            key = row[KEY].tobytes()
            found[key] = np.maximum(found[key], row) if key in found else row
    return np.array(list(found.values())).reshape(-1, len(COLUMNS))


def compact(rows: np.ndarray, origin: float) -> np.ndarray:
    """Returns the rows with those of other origins added up where all else is the same. They have an origin of their
    own then, so that with the rows that went into it they count twice. This is more than what ran, never less."""
    sums: dict[bytes, np.ndarray] = {}
    for row in rows[rows[:, ORIGIN] != origin]:
        key = row[DATA:STEPS].tobytes()
        if key in sums:
            sums[key][[STEPS, PASSES]] += row[[STEPS, PASSES]]
            sums[key][ORIGIN] = new_origin()
        else:
            sums[key] = row.copy()
    return np.array([*rows[rows[:, ORIGIN] == origin], *sums.values()]).reshape(-1, len(COLUMNS))


def ledger_of(rows: np.ndarray) -> PrivacyLedger:
    """Returns a table's rows as a `PrivacyLedger`."""
    ledger = PrivacyLedger()
    passes: dict[bytes, np.ndarray] = {}
    for row in rows:
        if not _sampling_of(row)[0].counts_passes:
            _count(ledger, row)
        # A pass may have steps of more and of less noise; an example is in one of them.
        elif (key := row[:MULTIPLIER].tobytes()) in passes:
            other = passes[key]
            least, most = min(row[MULTIPLIER], other[MULTIPLIER]), max(row[PASSES], other[PASSES])
            passes[key] = np.array([*row[:MULTIPLIER], least, row[STEPS] + other[STEPS], most])
        else:
            passes[key] = row
    for row in passes.values():
        _count(ledger, row)
    return ledger


def _sampling_of(row: np.ndarray) -> tuple[SamplingScheme, Code]:
    return BY_CODE[int(row[SAMPLING]) & ~DISCRETE]


def _count(ledger: PrivacyLedger, row: np.ndarray) -> None:
    scheme, code = _sampling_of(row)
    origin, steps, data = f"{int(row[ORIGIN]):x}", int(row[STEPS]), float(row[DATA])
    known: Keywords = {}
    if code.unknown:
        # Rows that were shared may be of the same multiplier as steps of their origin, and are not the same steps.
        origin += "+" if data == SHARED else ""
    else:
        n, batch = int(row[NUM_EXAMPLES]), int(row[BATCH_SIZE])
        known = {
            "num_examples": n, "batch_size": batch, "sampling": scheme.name, "adjacency": code.adjacency,
            "truncated_batch_size": int(row[TRUNCATED]) or None, "unit": code.unit,
        }  # fmt: skip
        if scheme.counts_passes:
            # No example has more uses than there were steps, unless it is in one twice.
            epochs = int(row[PASSES]) or -(-steps // -(-n // batch))
            known["num_epochs"] = epochs if code.across_passes else min(epochs, steps)
        origin += "*" if code.across_passes else ""  # not the same steps as others of this batch size
    ledger.count(
        origin, float(row[MULTIPLIER]), steps, dataset=f"{int(data):x}" if data > 0 else None,
        **options_of(bool(int(row[SAMPLING]) & DISCRETE)), **known,
    )  # fmt: skip
