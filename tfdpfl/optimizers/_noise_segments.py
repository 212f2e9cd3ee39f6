"""Which steps of correlated noise belong together, and what they cost.

With correlated noise the steps of a training are one mechanism. They may be taken by several processes, each of which
goes on from a state that an earlier one saved. A state may be taken up twice, from when on there are two trainings
with a common past. So a table of segments is kept beside the noise: a segment is what one optimizer object in one
process took in a row. Its row says which segment it goes on from, and after how many steps. `_step_table` counts the
steps of each.

Each end of such a tree is priced as a whole training. That is an upper bound for all of them together: what an example
moves in the common past counts once for each.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfdpfl._process import renew_after_fork
from tfdpfl._types import DpEvent, Keywords
from tfdpfl._variables import in_memory
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.accounting.correlated import CorrelatedRun
from tfdpfl.accounting.pricing import are_gaussian, leaves_of, mu_of_gaussians
from tfdpfl.accounting.sampling import BY_CODE
from tfdpfl.errors import PrivacyError
from tfdpfl.noise.correlated import Stream
from tfdpfl.noise.source import Source
from tfdpfl.noise.strategies import Noise
from tfdpfl.optimizers import _replicas, _step_table

__all__ = ["NoiseSegments"]

ROWS = 128
COLUMNS = ("id", "parent", "since", "pass_begun", "separation")
ID, PARENT, SINCE, PASS_BEGUN, SEPARATION = range(len(COLUMNS))
# The first row of the table: the segment that the state is of, the step that comes next, and whose noise it is.
STEP, KIND, LOST = 1, 2, 3
# Of what this object keeps, in the same row: in which order its data last came, a number. A state that a pass was begun
# with, and that this object did not leave, is there by the negative of its segment.
ORDER = 4

# Samplings of which nothing goes on when the data begin anew, as the step table has them.
STARTS_ANEW = [float(number) for number, (scheme, _) in BY_CODE.items() if scheme.starts_anew]

_Segments = dict[float, np.ndarray]  # rows of the table, by id


class NoiseSegments:
    """Draws the correlated noise of one optimizer object in one process, and keeps account of its segments."""

    def __init__(self, noise: Noise, noise_multiplier: float):
        self.noise, self.noise_multiplier = noise, noise_multiplier
        # What the state of one training is of no use for another: for other noise, or noise of another size.
        self.kind = _step_table.number_of(json.dumps([noise.to_dict(), noise_multiplier], sort_keys=True))
        self.stream: Stream | None = None
        self._places: dict[int, int] = {}
        self.table: Any = None  # the optimizer's variable
        # In no file: the segment that this object is in and the step that it expects; all its segments.
        self._own = in_memory(np.zeros([1 + ROWS, len(COLUMNS)]))
        self._workers = in_memory(np.float64(0))  # that took the last step together
        self.loaded = np.zeros([0, len(COLUMNS)])
        renew_after_fork(self)

    def _renew(self) -> None:
        self._own[0, :ORDER].assign(np.zeros(ORDER))  # the next step begins a segment of this process

    def build(self, shapes: list, ids: list[int], add_state: Callable[[str, np.ndarray], tf.Variable]) -> None:
        """Makes what is saved, for the weights that the optimizer is for."""
        table = np.zeros([1 + ROWS, len(COLUMNS)])
        table[0, KIND] = self.kind
        self.table = add_state("dp_noise_steps", table)
        self.stream = Stream(self.noise, shapes, add_state)
        self._places = {i: place for place, i in enumerate(ids)}

    @property
    def variables(self) -> list:
        """Returns what is saved."""
        return [] if self.stream is None else [self.table, *self.stream.state]

    def state(self) -> list[tf.Tensor]:
        """Returns numbers that no two states share, nor two objects of which one would go on from a state and one would
        begin a segment there."""
        heads = [tf.convert_to_tensor(table)[0, : STEP + 1] for table in (self._own, self.table)]
        return [*tf.unstack(tf.concat(heads, 0)), tf.convert_to_tensor(self._workers)]

    def next(self, source: Source, counter: _step_table.Counter, known: tf.Tensor, ids: list[int]) -> list[tf.Tensor]:
        """Draws the next row of noise for the weights of these ids, of unit base normals. It is traced before the step
        is counted, so that the step counts for the right segment.

        Args:
          source: of the fresh normals.
          counter: of the steps.
          known: how the batch was drawn (`BatchSampling.known`).
          ids: of the variables of the weights.
        """
        assert self.stream is not None
        if not self._places.keys() >= set(ids):
            raise PrivacyError(
                "The optimizer's correlated noise was made for other weights than this step trains. Compile the model "
                "again with a new optimizer, or freeze and unfreeze layers before its first step."
            )
        step = self._go_on(source, counter, known)
        rows = self.stream.next(source, tf.cast(step, tf.int64))
        return [rows[self._places[i]] for i in ids]

    def _go_on(self, source: Source, counter: _step_table.Counter, known: tf.Tensor) -> tf.Tensor:
        """Returns the step's number, from 0. Begins a segment where the state is not what this object left."""
        own, saved = tf.convert_to_tensor(self._own), tf.convert_to_tensor(self.table)
        goes_on = (own[0, ID] > 0) & tf.reduce_all(tf.equal(own[0, : STEP + 1], saved[0, : STEP + 1]))
        # All workers have the same segments. Steps that one of them took by itself would be others.
        goes_on &= tf.equal(self._workers, float(_replicas.workers()))
        # Of new groups nothing goes on: an example may be in another one.
        anew = ~goes_on & tf.reduce_any(tf.equal(known[1], STARTS_ANEW))
        step = tf.where(anew, tf.zeros_like(saved[0, STEP]), saved[0, STEP])
        drawn = tf.bitwise.bitwise_and(source.unique(), (1 << 51) - 1)
        current = tf.where(goes_on, own[0, ID], tf.cast(drawn, tf.float64) + 1)
        parent = tf.where(anew, tf.zeros_like(step), saved[0, ID])
        of_parent = tf.equal(saved[1:, ID], parent) & (parent > 0)
        begun, apart = tf.unstack(tf.reduce_sum(tf.where(of_parent[:, None], saved[1:, PASS_BEGUN:], 0.0), 0))
        # Where a state is taken up in the middle of a pass, what comes next may have come just before it.
        pass_begins = tf.equal(own[0, ID], -saved[0, ID]) & tf.equal(own[0, STEP], saved[0, STEP])
        apart = tf.where(pass_begins | tf.equal(step, 0), apart, 1.0)
        row = tf.stack([current, parent, step, begun, apart])
        tables = []
        for table in (own, saved):
            free = tf.equal(table[1:, ID], 0)
            here = tf.one_hot(tf.argmax(tf.cast(free, tf.int32)), ROWS, True, False) & free & ~goes_on
            rows = tf.where(here[:, None], row, table[1:])
            lost = tf.maximum(table[0, LOST], tf.cast(~goes_on & ~tf.reduce_any(free), tf.float64))
            head = tf.stack([current, step + 1, tf.constant(self.kind, tf.float64), lost, table[0, ORDER]])
            tables.append(tf.concat([head[None], rows], 0))
        self._own.assign(tables[0])
        self.table.assign(tables[1])
        self._workers.assign(float(_replicas.workers()))
        counter.origin.assign(current)
        return step

    # -- what Python says between steps ------------------------------------------------------------------------------

    def begin_pass(self, sampling: int) -> None:
        """Notes that a pass over the data begins with the next step, and how long the last one was."""
        if self.table is None:
            return
        own, saved = self._own.numpy(), np.array(self.table)
        step = saved[0, STEP]
        for table in (own, saved):
            for row in table[1:]:
                if row[ID] == saved[0, ID] > 0:
                    length = step - row[PASS_BEGUN]
                    if length > 0 and row[PASS_BEGUN] >= 0:
                        row[SEPARATION] = min(row[SEPARATION] or length, length)
                    row[PASS_BEGUN] = step
        if not (own[0, ID] > 0 and (own[0, : STEP + 1] == saved[0, : STEP + 1]).all()):
            own[0, [ID, STEP]] = -saved[0, ID], step
        if sampling in STARTS_ANEW and step % self.noise.min_separation:
            own[0] = 0  # the turns of the groups begin anew: so does the noise
        self._own.assign(own)
        self.table.assign(saved)

    def begin_data(self, sampling: int, order: float) -> None:
        """Notes that a fit begins. Its groups may be others. Its data may come in another order (a number for each)
        than those before, so that an example may be used again at once."""
        own, (scheme, _) = self._own.numpy(), BY_CODE[sampling]
        if scheme.starts_anew:
            own[0] = 0
        elif scheme.same_order:
            if own[0, ORDER] not in (0, order) and self.table is not None:
                saved = np.array(self.table)
                for table in (own, saved):
                    table[1:][table[1:, ID] == saved[0, ID], SEPARATION] = 1
                self.table.assign(saved)
            own[0, ORDER] = order
        self._own.assign(own)

    @property
    def order_is_not_known(self) -> bool:
        """Whether steps were taken before this object's, on data in an order that it has not seen."""
        return self.table is not None and np.array(self.table)[0, STEP] > 0 == self._own.numpy()[0, ORDER]

    # -- saving ------------------------------------------------------------------------------------------------------

    def check(self, saved: np.ndarray | None) -> None:
        """Raises a `PrivacyError` where a table to be loaded is of another noise."""
        shape = (1 + ROWS, len(COLUMNS))
        if saved is None or tuple(saved.shape) != shape or np.asarray(saved)[0, KIND] not in (0, self.kind):
            raise PrivacyError(
                "The file does not hold the correlated noise of this optimizer, so no step can continue from it. "
                f"Compile the model with the file's noise_multiplier and noise (here {self.noise_multiplier:g}, "
                f"{self.noise}), or load the file before compile and give PrivacyBudget that training's ledger=."
            )

    def merge(self, rows: np.ndarray) -> None:
        """Takes in segments that came another way than in the saved table."""
        self.loaded = merge_tables(self.loaded, rows)

    def rows(self) -> np.ndarray:
        """Returns all segments that are known."""
        saved = np.zeros([1, len(COLUMNS)]) if self.table is None else np.array(self.table)
        own = self._own.numpy()
        if max(saved[0, LOST], own[0, LOST]) > 0:
            raise PrivacyError(
                f"This training was continued from saved states more than {ROWS} times: its ε is not known any more."
            )
        self.loaded = merge_tables(self.loaded, saved[1:], own[1:])
        return self.loaded

    def write_back(self) -> None:
        """Writes all segments that are known into the table that is saved."""
        if self.table is None:
            return
        rows = self.rows()
        if len(rows) <= ROWS:
            table = np.array(self.table)
            table[1:] = 0
            table[1 : 1 + len(rows)] = rows
            self.table.assign(table)

    # -- what it costs -----------------------------------------------------------------------------------------------

    def ledger(
        self, counted: np.ndarray, more_steps: int = 0, more_passes: int = 0, batches: tuple = (), clips: int = 1
    ) -> PrivacyLedger:
        """Returns what ran, and what would have run after more steps from the state as it is.

        Args:
          counted: entries of the step table.
          more_steps: how many more; 0 for what ran.
          more_passes: how many passes over the data they begin.
          batches: how their batches would be drawn (see `Counter.announce`).
          clips: how many clips an example would move each of them by, at most.
        """
        segments = {row[ID]: row for row in self.rows()}
        steps: dict[float, list[np.ndarray]] = {}
        for row in counted:
            steps.setdefault(row[_step_table.ORIGIN], []).append(row)
        # Steps of which it is not known where they belong may have come at any place.
        strays = _Training()
        strays.add([row for i in steps if i not in segments for row in steps[i]])
        trainings = self._trainings(segments, steps)
        if more_steps:
            trainings = self._continued(trainings, segments, more_steps, more_passes, batches)
            trainings[-1].multiplier = self.noise_multiplier / clips
        ledger = PrivacyLedger()
        for training in trainings:
            path = _path(segments, training.last)
            training.add([row for i in path for row in steps.get(i, [])])
            origins = tuple((f"{int(i):x}", int(segments[i][SINCE])) for i in reversed(path))
            ledger.count_correlated(origins, self._run(training, strays), dataset=training.dataset)
        if strays.counted:  # or of a training by itself, as what a file told without its segments
            ledger.count_correlated((), self._run(_Training(), strays))
        return ledger

    def as_one_gaussian(self, counted: np.ndarray) -> float:
        """Returns the noise multiplier of one Gaussian mechanism that costs no less than what ran."""
        gaussians = _of_gaussians(self.ledger(counted).dp_event)
        if gaussians is None:  # it is amplified by sampling
            least, steps = float(counted[:, _step_table.MULTIPLIER].min()), int(counted[:, _step_table.STEPS].sum())
            run = CorrelatedRun(noise=self.noise, noise_multiplier=least, num_steps=steps)
            gaussians = _of_gaussians(run.dp_event)
        if not gaussians or min(event.noise_multiplier for event, _ in gaussians) <= 0:
            return 0.0
        return 1 / mu_of_gaussians(gaussians)

    @staticmethod
    def _trainings(segments: _Segments, steps: dict[float, list[np.ndarray]]) -> list[_Training]:
        """Returns the ends of the tree that the segments make: those that no other goes on from where they end."""
        ends = {i: int(row[SINCE] + sum(r[_step_table.STEPS] for r in steps.get(i, []))) for i, row in segments.items()}
        continued = {row[PARENT] for row in segments.values() if row[SINCE] >= ends.get(row[PARENT], math.inf)}
        return [_Training(i, end, segments[i][SEPARATION]) for i, end in ends.items() if i not in continued and end > 0]

    def _continued(
        self, trainings: list[_Training], segments: _Segments, more_steps: int, more_passes: int, batches: tuple
    ) -> list[_Training]:
        """Returns the trainings with the one that the state is of taken so many steps further."""
        head = np.zeros(len(COLUMNS)) if self.table is None else np.array(self.table)[0]
        current, step = float(head[ID]), int(head[STEP])
        if (
            batches[1] in STARTS_ANEW and float(self._own[0, ID]) != current
        ):  # the groups are others: a training of its own
            next_ = _Training(steps=more_steps)
        else:
            trainings = [t for t in trainings if (t.last, t.steps) != (current, step)]
            next_ = _Training(current, step + more_steps)
            if current:
                next_.separation, length = segments[current][SEPARATION], step - segments[current][PASS_BEGUN]
                if length > 0:  # the last pass ends here
                    next_.separation = min(next_.separation or length, length)
        next_.sampled, next_.passes = {tuple(float(b) for b in batches)}, more_passes
        next_.whole_passes = more_passes > 1
        return [*trainings, next_]

    def _run(self, training: _Training, strays: _Training) -> CorrelatedRun:
        how, more = training.limits(self.noise.min_separation), strays.counted
        if more:
            how = {"max_participations": how["max_participations"] + more} if "max_participations" in how else {}
        return CorrelatedRun(
            noise=self.noise, noise_multiplier=min(training.multiplier, strays.multiplier, self.noise_multiplier),
            num_steps=training.steps + more, unit=unit_of(training.sampled | strays.sampled), **how,
        )  # fmt: skip


def _of_gaussians(event: DpEvent) -> list[tuple[DpEvent, int]] | None:
    """Returns the Gaussian mechanisms that an event is made of, and how often each is; None if it is of others."""
    found = [(getattr(leaf, "gaussian", leaf), number) for leaf, number in leaves_of(event) if number]
    return found if are_gaussian(found) else None


def unit_of(sampled: set[tuple]) -> str:
    """Returns what was clipped in the steps of one training.

    Raises:
      PrivacyError: Not the same in all. A step that clips users bounds what a user moves, but no single example.
    """
    units = sorted({BY_CODE[int(sampling)][1].unit for _, sampling, *_ in sampled})
    if units[1:]:
        raise PrivacyError(
            f"The steps of one training with correlated noise clip different units ({' and '.join(units)}), so no ε is "
            "known for it. Compile the model with a new optimizer, or draw all batches with user_ids."
        )
    return units[0] if units else "example"


@dataclasses.dataclass
class _Training:
    """One training: the segment that it ended in, and all before that one.

    Attributes:
      last: that segment; 0 for none.
      steps: in all.
      separation: fewest steps of a pass that another followed; 0 if none did.
      sampled: all ways in which its batches were drawn (data set, sampling, examples, batch size, cut).
      passes: over the data.
      whole_passes: whether it is taken to go on by whole passes.
      counted: steps that the step table has of it.
      multiplier: the noise of the base normals over the sensitivity of any of these steps, the least.
    """

    last: float = 0.0
    steps: int = 0
    separation: float = 0.0
    sampled: set[tuple] = dataclasses.field(default_factory=set)
    passes: int = 0
    whole_passes: bool = False
    counted: int = 0
    multiplier: float = math.inf

    def add(self, rows: list[np.ndarray]) -> None:
        """Adds what the step table tells of the segments."""
        self.sampled |= {tuple(row[_step_table.DATA : _step_table.MULTIPLIER]) for row in rows}
        self.passes += int(sum(row[_step_table.PASSES] for row in rows))
        self.counted += int(sum(row[_step_table.STEPS] for row in rows))
        self.multiplier = min([self.multiplier, *(float(row[_step_table.MULTIPLIER]) for row in rows)])

    @property
    def dataset(self) -> str | None:
        names = {data for data, *_ in self.sampled}
        name = names.pop() if len(names) == 1 else 0.0
        return f"{int(name):x}" if name > 0 else None

    def limits(self, groups: int) -> Keywords:
        """Returns how often an example can take part, as `CorrelatedRun` accepts it; nothing if that is not known.

        Args:
          groups: the declared separation of uses, if the sampling starts anew.
        """
        if len(self.sampled) != 1:
            return {}
        ((_, sampling, n, batch, _),) = self.sampled
        scheme, code = BY_CODE[sampling]
        if scheme.same_order:
            # A pass that another follows: as long as was seen, and if none was, as the data are.
            of_data, seen = int(n // batch), int(self.separation)
            apart = min(seen or of_data, of_data) if self.whole_passes or self.passes > 1 else self.steps
            return {"min_separation": max(apart, 1), "max_participations": self.passes}
        if scheme.starts_anew:
            return {
                "min_separation": groups, "sampling_rate": scheme.rate(batch, int(n), groups), "sampling": scheme.name,
            }  # fmt: skip
        return {"max_participations": self.passes} if scheme.separates_uses and not code.across_passes else {}


def _path(segments: _Segments, last: float) -> list[float]:
    """Returns a segment and all that it goes on from, itself first."""
    path = [last] if last else []
    while path and segments[path[-1]][PARENT] in segments:
        path.append(segments[path[-1]][PARENT])
    return path


def merge_tables(*tables: np.ndarray) -> np.ndarray:
    """Returns the segments of all tables. Two records of one segment are the same, but for passes that ended since."""
    found: dict[float, np.ndarray] = {}
    for row in np.concatenate(tables):
        if row[ID] > 0:
            other = found.setdefault(row[ID], row.copy())
            if row[SEPARATION] and (not other[SEPARATION] or row[SEPARATION] < other[SEPARATION]):
                other[SEPARATION] = row[SEPARATION]
            other[PASS_BEGUN] = max(other[PASS_BEGUN], row[PASS_BEGUN])
    return np.array(list(found.values())).reshape(-1, len(COLUMNS))
