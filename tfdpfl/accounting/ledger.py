"""The record of what ran, row by row, so that ε can be asked of it at any time, and saved next to the model."""

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from tfdpfl import _formats
from tfdpfl._lazy import dp_event
from tfdpfl._names import accept_old_names
from tfdpfl._types import DpEvent, Json, JsonValue, Keywords
from tfdpfl.accounting import _checks
from tfdpfl.accounting.arguments import LedgerArguments, StepArguments, shows_arguments
from tfdpfl.accounting.events import composed, event_named, gaussian_of_group
from tfdpfl.accounting.pricing import price
from tfdpfl.accounting.promises import Promise
from tfdpfl.accounting.report import FIGURES, OF_SEVERAL_EXAMPLES, USERS_ARE_UNITS, PrivacyReport, report_of
from tfdpfl.accounting.run import ADJACENCIES, OLD_NAMES, SAVED_AS, UNITS, Run
from tfdpfl.accounting.sampling import EVERY_BATCH
from tfdpfl.errors import PrivacyError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from tfdpfl.accounting.correlated import CorrelatedRun

__all__ = ["PrivacyLedger", "check_ledger"]

Number = TypeVar("Number", int, float)


class _Row:
    """One entry of a ledger: a `run`, which has its event and its numbers, and what is known of it besides."""

    run: "Run | CorrelatedRun | _Applied"
    dataset: str | None = None
    origins: tuple[tuple[str, int], ...] = ()  # of counted steps: who took them, and how many steps came before
    unknown: bool = False  # whether nothing is known of the steps but their noise

    def text(self) -> str:
        """Returns a line for a report, which lists runs by itself."""
        raise NotImplementedError

    def saved(self) -> Json:
        """Returns the row as values that JSON can hold; `_row_of` is the inverse."""
        raise NotImplementedError

    def add_to(self, ledger: "PrivacyLedger") -> None:
        """Adds the row to a ledger, which may hold some of its steps already."""
        ledger._rows.append(self)

    @property
    def most(self) -> int:
        """How many examples of a user its neighbours differ in."""
        return getattr(self.run, "max_examples_per_user", 1)

    def of_group(self, number: int) -> "_Row":
        """Returns the row for neighbours that differ in so many examples."""
        return _OfGroup(self, number)


@dataclass(frozen=True)
class _OfGroup(_Row):
    """A row whose noise is Gaussian, for neighbours that differ in several examples."""

    row: _Row
    max_examples_per_user: int

    @property
    def run(self) -> Any:  # type: ignore[override]
        return self

    def stated_for(self, adjacency: str) -> DpEvent | None:
        event = self.row.run.stated_for(adjacency)
        return None if event is None else gaussian_of_group(event, self.max_examples_per_user)


@dataclass(frozen=True)
class _Applied(_Row):
    event: DpEvent
    count: int
    adjacency: str
    unit: str | None = None
    name: str | None = None

    @property
    def run(self) -> "_Applied":  # type: ignore[override]
        return self

    @property
    def steps(self) -> int:
        return self.count

    participations = steps

    def stated_for(self, adjacency: str) -> DpEvent | None:
        return dp_event.SelfComposedDpEvent(self.event, self.count) if adjacency == self.adjacency else None

    def text(self) -> str:
        kind = type(self.event).__name__.removesuffix("DpEvent")
        sigma = getattr(getattr(self.event, "event", self.event), "noise_multiplier", None)
        noise = "" if sigma is None else f", noise multiplier {sigma:g}"
        releases = f"{self.count} {'release' if self.count == 1 else 'releases'}"
        return f"{self.name or kind}, {releases}{noise}, adjacency {self.adjacency}"

    def saved(self) -> Json:
        more = {key: value for key in ("unit", "name") if (value := getattr(self, key)) is not None}
        return {"event": _encode(self.event), "count": self.count, "adjacency": self.adjacency, **more}

    def add_to(self, ledger: "PrivacyLedger") -> None:
        ledger.add(self.event, self.count, adjacency=self.adjacency, unit=self.unit, name=self.name)


@dataclass(frozen=True)
class _Recorded(_Row):
    """Steps that add up, in their order."""

    run: Run

    def saved(self) -> Json:
        return {"run": _saved_run(self.run)}

    def of_group(self, number: int) -> _Row:
        return _Recorded(dataclasses.replace(self.run, max_examples_per_user=number))


@dataclass(frozen=True)
class _Counted(_Row):
    """The first steps that one optimizer object took: `run` has their number, and what is known of them."""

    run: Run
    origins: tuple[tuple[str, int], ...]
    dataset: str | None
    unknown: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        return self.origins, self.dataset, self.unknown, _mechanism(self.run)

    def text(self) -> str:
        return (
            f"{self.run.steps} steps of which only the noise multiplier {self.run.noise_multiplier:g} is known: ε "
            "counts them as if every example took part in each"
        )

    def saved(self) -> Json:
        ((origin, _),) = self.origins
        return {"run": _saved_run(self.run), "origin": origin, "dataset": self.dataset, "unknown": self.unknown}

    def of_group(self, number: int) -> _Row:
        # Where nothing but the noise is known of the batches, all of the group may be in each.
        more: Keywords = {"num_examples": number, "batch_size": number} if self.unknown else {}
        return dataclasses.replace(self, run=dataclasses.replace(self.run, max_examples_per_user=number, **more))

    def add_to(self, ledger: "PrivacyLedger") -> None:
        for i, row in enumerate(ledger._rows):
            if isinstance(row, _Counted) and row.key == self.key:
                ledger._rows[i] = dataclasses.replace(row, run=_longest(row.run, self.run))
                return
        ledger._rows.append(self)


@dataclass(frozen=True)
class _Correlated(_Row):
    """A training with correlated noise. `origins` tells who took its steps: each begins after so many of them."""

    run: "CorrelatedRun"
    origins: tuple[tuple[str, int], ...]
    dataset: str | None

    def text(self) -> str:
        return self.run.text()

    def goes_on_from(self, other: "_Correlated") -> bool:
        """Whether the other is what this one was earlier, or the same."""
        steps = other.run.steps
        begun = tuple(origin for origin in self.origins if origin[1] < steps)
        alike = self.dataset == other.dataset and begun == other.origins and self.run.steps >= steps
        # Steps that an example moves by more clips count for the earlier ones, too.
        alike &= self.run.noise == other.run.noise and self.run.noise_multiplier <= other.run.noise_multiplier
        return alike and bool(other.origins)

    def saved(self) -> Json:
        return {"correlated": self.run.to_dict(), "origins": self.origins, "dataset": self.dataset}

    def add_to(self, ledger: "PrivacyLedger") -> None:
        others = [row for row in ledger._rows if isinstance(row, _Correlated)]
        longer = any(row.goes_on_from(self) and not self.goes_on_from(row) for row in others)
        if longer or not self.run.num_steps:
            return
        earlier = [row for row in others if self.goes_on_from(row)]
        # Of the same steps, seen twice, the more cautious view stands.
        views = [self.run, *(row.run for row in earlier if row.goes_on_from(self))]
        run = dataclasses.replace(
            self.run, min_separation=min(run.min_separation for run in views),
            max_participations=_most([run.max_participations for run in views]),
        )  # fmt: skip
        ledger._rows = [row for row in ledger._rows if row not in earlier] + [dataclasses.replace(self, run=run)]


_USER_RULES = (
    "The clip relies on rules that a user registered for these ops: {}. tfdpfl.clipping.validate(model, batch) "
    "compares them with exact gradients; nothing proves them."
)
_ONCE = (
    "A step of which only the noise is known counts each example once. A batch that is drawn with replacement may hold "
    "an example several times, and ε does not cover that: draw without replacement, or by tfdpfl.data.poisson_batches."
)
_SEEDED = (
    "The noise of {} comes from a seed: anyone who knows it can subtract the noise. To publish a result, draw it with "
    "seed=None."
)


# The fields of a saved `Run`, by the version of the format that has them. A field that is new is left out of the file
# as long as it is at its default, so that older releases go on reading what they can read.
_RUN_FIELDS = {
    1: frozenset(
        "num_examples batch_size noise_multiplier num_epochs num_steps sampling num_microbatches adjacency "
        "starts_mid_epoch max_examples_per_user truncated_batch_size unit uneven_batches discrete".split()
    ),
}
_ABOUT = ("user_rules", "seeded")  # what `report` says of the rows, and the saved ledger has


def _saved_run(run: Run) -> Json:
    saved = {}
    for field in dataclasses.fields(run):
        name, value = SAVED_AS.get(field.name, field.name), getattr(run, field.name)
        if value is not None and (name in _RUN_FIELDS[1] or value != field.default):
            saved[name] = value
    return saved


def _run_of(saved: Json) -> Run:
    """Returns the run that `_saved_run` saved."""
    fields = {saved_as: name for name, saved_as in SAVED_AS.items()}
    return Run(**{fields.get(name, name): value for name, value in saved.items()})


def _row_of(saved: Json) -> _Row:
    if "correlated" in saved:
        from tfdpfl.accounting.correlated import CorrelatedRun  # it loads numpy, which most need not

        run_of_all = CorrelatedRun.from_dict(saved["correlated"])
        return _Correlated(run_of_all, tuple(map(tuple, saved["origins"])), saved["dataset"])
    if "run" not in saved:
        more = {key: saved.get(key) for key in ("unit", "name")}
        return _Applied(_decode(saved["event"]), saved["count"], saved["adjacency"], **more)
    run = _run_of(saved["run"])
    if "origin" not in saved:
        return _Recorded(run)
    return _Counted(run, ((saved["origin"], 0),), saved["dataset"], saved["unknown"])


def _version_of(runs: Sequence[Json]) -> int:
    """The oldest version of the format that has all fields of these saved runs."""
    names = {name for run in runs for name in run}
    for version, offered in _RUN_FIELDS.items():
        if names <= offered:
            return version
    raise AssertionError(f"no version of the saved ledger has {sorted(names - offered)}: add one to _RUN_FIELDS")


def check_ledger(ledger: object) -> None:
    """Raises if an argument is neither a ledger nor None."""
    if not isinstance(ledger, PrivacyLedger | None):
        raise ValueError(f"ledger={ledger!r:.99} must be a PrivacyLedger: PrivacyLedger.from_dict makes one.")


class PrivacyLedger:
    """A record of the mechanisms that ran on one data set.

    Rows of the same mechanism merge, so that a record per step stays one row. `to_dict` is JSON-ready and
    `from_dict` its inverse.

    Attributes:
        user_rules: The types of the ops for which rules of `tfdpfl.clipping.register_rule` were in force. The clip
            relies on them, so `report` names them.
        seeded: The mechanisms whose noise came from a seed that someone knows, which `report` names too.

        ledger = PrivacyLedger()
        ledger.record(1.1, num_steps=240, num_examples=60000, batch_size=250, sampling="shuffle")
        ledger.epsilon(delta=1e-5)
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self.user_rules: frozenset[str] = frozenset()
        self.seeded: frozenset[str] = frozenset()
        self._goes_on = True  # whether the last shuffled row is of the pass that the next recorded step is in

    @accept_old_names(**OLD_NAMES)
    @shows_arguments(LedgerArguments)
    def record(
        self,
        noise_multiplier: float,
        num_steps: int | None = None,
        *,
        num_epochs: float | None = None,
        new_pass: bool = False,
        **run: "Unpack[LedgerArguments]",
    ) -> "PrivacyLedger":
        """Adds DP-SGD steps that ran, in their order, and returns the ledger.

        Args:
            noise_multiplier: σ of these steps.
            num_steps: Noisy updates; 1 if neither this nor `num_epochs` is given.
            num_epochs: In their place: passes over the data, which begin anew. Under `"shuffle"` also beside
                `num_steps`, if the passes were begun and not all ended.
            num_examples: As all that follow, see `compute_epsilon`.
            new_pass: Under `"shuffle"`, that the first of these steps begins a new pass over the data though
                the last pass may not have ended, as every call of `fit` does. Without it, steps continue the
                pass that the last ones were in.
        """
        if num_steps is None and num_epochs is None:
            num_steps = 1
        made = Run(noise_multiplier=noise_multiplier, num_epochs=num_epochs, num_steps=num_steps, **run)
        if made.steps == 0:
            return self
        new_pass = new_pass or num_epochs is not None
        # Where an epoch was begun matters under shuffle, so there only neighbours merge.
        shuffled = made.scheme.counts_passes
        if not shuffled:  # steps add up; epochs of a fraction of steps, rounded each, do not
            made = dataclasses.replace(made, num_steps=made.steps, num_epochs=None)
        own = self._rows if self._goes_on else []
        earlier = own[-1:] if shuffled else self._rows
        for i, row in enumerate(earlier, start=len(self._rows) - len(earlier)):
            joined = _joined(row, made, goes_on=not (shuffled and new_pass))
            if joined is not None:
                self._rows[i] = _Recorded(joined)
                return self
        if shuffled and not new_pass and not self._passes_are_whole:
            made = dataclasses.replace(made, starts_mid_epoch=True)
        self._goes_on |= shuffled
        self._rows.append(_Recorded(made))
        return self

    @property
    def _recorded(self) -> list[Run]:
        return [row.run for row in self._rows if isinstance(row, _Recorded)]

    @property
    def _shuffled(self) -> list[Run]:
        return [run for run in self._recorded if run.scheme.counts_passes]

    @property
    def _passes_are_whole(self) -> bool:
        """Whether the next shuffled step begins a new pass over the data."""
        shuffled = self._shuffled
        return not shuffled or (self._goes_on and shuffled[-1].whole_passes)

    def add(
        self,
        event: DpEvent,
        count: int = 1,
        *,
        adjacency: str = "add_or_remove_one",
        unit: str | None = None,
        name: str | None = None,
    ) -> "PrivacyLedger":
        """Adds `count` applications of any dp-accounting event, and returns the ledger.

        Args:
            event: The event; noise multipliers in it are relative to the sensitivity under `adjacency`.
            count: How often it ran.
            adjacency: The neighbouring relation that the event is stated for.
            unit: "example" if the event protects one example each, "user" if users; None if it protects whatever the
                other entries do. A ledger of users refuses to add up events of examples.
            name: What was released, for the statement; None names the kind of event.
        """
        if not isinstance(event, dp_event.DpEvent):
            raise ValueError(f"event must be a dp_accounting.DpEvent, got {event!r}: record() takes a σ")
        count = _checks.whole("count", count, 0, "count the applications")
        adjacency = _checks.choice("adjacency", adjacency, ADJACENCIES)
        unit = _checks.optional(_checks.choice, "unit", unit, UNITS)
        made = _Applied(event, count, adjacency, unit, name)
        for i, row in enumerate(self._rows):
            if isinstance(row, _Applied) and dataclasses.replace(row, count=count) == made:
                self._rows[i] = dataclasses.replace(row, count=row.count + count)
                return self
        if count:
            self._rows.append(made)
        return self

    @accept_old_names(**OLD_NAMES)
    @shows_arguments(StepArguments)
    def count(
        self,
        origin: str,
        noise_multiplier: float,
        num_steps: int,
        *,
        num_examples: int | None = None,
        batch_size: int | None = None,
        sampling: str = EVERY_BATCH.name,
        num_epochs: int | None = None,
        dataset: str | None = None,
        **run: "Unpack[StepArguments]",
    ) -> "PrivacyLedger":
        """Notes that `origin` has taken `num_steps` such steps in all, and returns the ledger.

        Steps that `record` is told add up; these do not: of two notes on the same steps of the same origin the higher
        number stands. So the ledgers of one training, taken at different times, `merge` without counting a step twice.

        Args:
            origin: Names one optimizer object in one process. Another process, or a copy, has another.
            noise_multiplier: As all that follow, see `record`.
            num_examples: None if nothing is known of the batches: every example is then taken to be in each.
            dataset: A name for the data set, if it has one.
        """
        unknown, uneven = num_examples is None, False
        if num_examples is None or batch_size is None:
            num_examples, batch_size, sampling = 1, 1, EVERY_BATCH.name
            run = {**run, "adjacency": "zero_out", "truncated_batch_size": None}
        elif num_epochs is not None:
            uneven = num_steps > num_epochs * -(-num_examples // batch_size)
        made = Run(
            num_examples=num_examples, batch_size=batch_size, noise_multiplier=noise_multiplier, num_steps=num_steps,
            sampling=sampling, num_epochs=num_epochs, uneven_batches=uneven or None, **run,
        )  # fmt: skip
        if made.steps:
            _Counted(made, ((origin, 0),), dataset, unknown).add_to(self)
        return self

    def count_correlated(
        self, origins: Sequence[tuple[str, int]], run: "CorrelatedRun", *, dataset: str | None = None
    ) -> "PrivacyLedger":
        """Notes that a training with correlated noise has come as far as `run` says, and returns the ledger.

        Of two notes on the same training the longer one stands; trainings that have only their beginnings in common add
        up.

        Args:
            origins: Who took the steps: (a name, the number of steps before), the first first. Without any the
                training is one by itself.
            run: What ran, from the first step on.
            dataset: A name for the data set, if it has one.
        """
        if run.num_steps:
            _Correlated(run, tuple(origins), dataset).add_to(self)
        return self

    def merge(self, other: "PrivacyLedger") -> "PrivacyLedger":
        """Adds what another ledger holds, and returns this one. Steps that optimizers counted are known by their
        origin, so those that both ledgers hold count once; all else adds up. A `record` that follows goes on in the
        pass that this ledger was in, not in one of the other's.
        """
        if other._shuffled and not self._shuffled:
            self._goes_on = False
        self._rows = [*map(_Recorded, other._recorded), *self._rows]
        self.user_rules |= other.user_rules
        self.seeded |= other.seeded
        for row in list(other._rows):
            if not isinstance(row, _Recorded):
                row.add_to(self)
        return self

    def of_dataset(self, dataset: str | None) -> "PrivacyLedger":
        """The rows that may be about this data set: those with its name, and those with none. Of a data set without a
        name all rows may be.
        """
        ledger = copy.copy(self)
        ledger._rows = [row for row in self._rows if dataset is None or row.dataset in (None, dataset)]
        return ledger

    def covers(self, other: "PrivacyLedger") -> bool:
        """Returns whether the releases (`add`) and the counted steps of `other` are in this ledger, too."""
        held = [row for row in self._rows if isinstance(row, _Applied)]
        return other.origins <= self.origins and all(
            any(dataclasses.replace(mine, count=row.count) == row and mine.count >= row.count for mine in held)
            for row in other._rows
            if isinstance(row, _Applied)
        )

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def steps(self) -> int:
        """Noisy updates and applications of events, all rows together."""
        return sum(row.run.steps for row in self._rows)

    @property
    def origins(self) -> set[str]:
        """Whose counted steps the ledger holds."""
        return {origin for row in self._rows for origin, _ in row.origins}

    @property
    def unknown_steps(self) -> int:
        """Steps of which nothing is known but their noise."""
        return sum(row.run.steps for row in self._rows if row.unknown)

    @property
    def dp_event(self) -> DpEvent:
        """All that ran, as one dp-accounting event for `adjacency`."""
        return self._event(1)

    def _event(self, max_examples_per_user: int) -> DpEvent:
        adjacency, rows = self.adjacency, self._rows_for(max_examples_per_user)
        events = [event for row in rows if (event := row.run.stated_for(adjacency)) is not None]
        return composed(events)

    def _rows_for(self, number: int) -> list[_Row]:
        """Returns the rows for neighbours that differ in so many examples, or in those that they were recorded for."""
        _checks.whole("max_examples_per_user", number, 1, "count the examples of the user with the most")
        if self.unit == "user" and number > 1:  # and refuses several
            raise PrivacyError(
                f"max_examples_per_user={number} is for steps that clip each example by itself, but this ledger's "
                "steps clip all examples of a user together, so its ε is that of a user: leave it out"
            )
        rows = [row if number == 1 or row.most > 1 else row.of_group(number) for row in self._rows]
        users = sorted({row.most for row in rows})
        if users[1:]:
            raise PrivacyError(
                f"the ledger's rows are for users of up to {' and '.join(map(str, users))} examples, which do not "
                "add up: record them with the same max_examples_per_user"
            )
        return rows

    @property
    def unit(self) -> str | None:
        """Returns the unit that the entries protect: "example" or "user".

        It is None if the ledger contains only events that do not state a unit.

        Raises:
            PrivacyError: They protect different units.
        """
        units = sorted(filter(None, {row.run.unit for row in self._rows}))
        if units[1:] and not any(row.run.unit == "example" and not row.unknown for row in self._rows):
            raise PrivacyError(
                f"{self.unknown_steps} steps ran of which only the noise is known, and the others protect users. A "
                "user may have had rows in several places of such a step, so no ε of a user is known. Give every fit "
                "a PrivacyBudget, and leave out train_on_batch."
            )
        if units[1:]:
            raise PrivacyError(
                f"the ledger's rows protect different units ({' and '.join(units)}), which do not add up: a user may "
                "have many examples. Record all with the same unit. Give a ledger of its own to what protects single "
                "examples: tfdpfl.preprocessing, or PrivateMetrics without user_ids"
            )
        return units[0] if units else None

    @property
    def adjacencies(self) -> set[str]:
        """Returns the neighbouring relations that the entries are stated for."""
        return {str(row.run.adjacency) for row in self._rows}

    @property
    def adjacency(self) -> str:
        """The neighbouring relation that all rows hold for. It is the one that they were recorded for. Where these
        differ, it is `"replace_one"` if some are for that and all can be, else `"zero_out"`.

        Raises:
            PrivacyError: There is none.
        """
        stated = self.adjacencies or {"add_or_remove_one"}
        if len(stated) == 1:
            return stated.pop()
        # A DP-SGD step with an example blanked is the step without it. Of a row that replaces one, fewer neighbours
        # than it was recorded for would be less than was asked.
        common = "replace_one" if "replace_one" in stated else "zero_out"
        if all(row.run.stated_for(common) is not None for row in self._rows):
            return common
        raise PrivacyError(
            f"the ledger's rows are stated for different neighbours ({', '.join(sorted(stated))}), which do not add "
            f"up. {self._one_adjacency(common)}"
        )

    def _one_adjacency(self, common: str) -> str:
        """Returns what to do for all rows to be for the same neighbours, whichever of them are not."""
        strange = [row for row in self._rows if row.run.stated_for(common) is None]
        if any(getattr(row.run, "truncated_batch_size", None) for row in strange):
            return (
                "Batches with a truncated_batch_size are priced under add_or_remove_one alone: draw them without it, "
                "or train a new model, all of whose steps are such batches."
            )
        added = [row for row in strange if isinstance(row, _Applied)]
        if not added:
            return "Record them with the same adjacency."
        names = ", ".join(dict.fromkeys(row.name or type(row.event).__name__ for row in added))
        return (
            f"The steps are for {common!r}, so add {names} for it, too: pass adjacency={common!r} to ledger.add, or to "
            "the adapt of a layer of tfdpfl.preprocessing. Or train with Poisson batches, which are for the same "
            "neighbours as a new ledger."
        )

    def epsilon(self, delta: float, accountant: str = "pld", max_examples_per_user: int = 1) -> float:
        """Returns an upper bound on the ε of all that ran, at `delta`.

        Args:
            delta: δ.
            accountant: "pld" or "rdp".
            max_examples_per_user: How many examples neighbours may differ in: the ε of a user who has no more. What was
                recorded for users stays as it was recorded.

        Raises:
            PrivacyError: as `tfdpfl.accounting.price`, or something ran that has no ε for such neighbours.
        """
        return price(self._event(max_examples_per_user), delta, accountant, self.adjacency).epsilon

    def report(
        self, delta: float, accountant: str = "pld", notes: Sequence[str] = (), max_examples_per_user: int = 1
    ) -> PrivacyReport:
        """Returns the ε of all that ran, with all that it depends on.

        `notes` are sentences to put beside it. All else is as in `epsilon`.
        """
        adjacency, rows = self.adjacency, self._rows_for(max_examples_per_user)
        most, notes = rows[0].most if rows else max_examples_per_user, [*notes, *self._cautions()]
        recorded = [row.run for row in rows if isinstance(row, _Recorded)]
        counted = [row.run for row in rows if isinstance(row, _Counted) and not row.unknown]
        others = [row for row in self._rows if row.unknown or not isinstance(row, _Recorded | _Counted)]
        runs = [dataclasses.replace(run, adjacency=adjacency) for run in [*recorded, *_added_up(counted)]]
        if not runs and self.unit == "user":
            notes.append(USERS_ARE_UNITS)
        if not runs and most > 1:
            notes.append(OF_SEVERAL_EXAMPLES.format(k=most))
        texts, event = [row.text() for row in others], self._event(max_examples_per_user)
        report = report_of(runs, event, delta, accountant, adjacency, texts=texts, notes=tuple(notes))
        report = dataclasses.replace(report, unit=self.unit, max_examples_per_user=most)
        return self._of_all(report, others) if others else report

    def _of_all(self, report: PrivacyReport, others: list[_Row]) -> PrivacyReport:
        """Returns a report of the runs with its numbers those of all rows: what only some have is not the ledger's."""
        unknown: Keywords = dict.fromkeys(FIGURES)
        if not all(isinstance(row, _Applied) for row in others):
            unknown["sampling"] = None  # other steps were drawn otherwise; releases are no steps
        touched = report.participations + sum(row.run.participations for row in others)
        return dataclasses.replace(report, steps=self.steps, participations=touched, **unknown)

    def _cautions(self) -> Iterator[str]:
        if self.user_rules:
            yield _USER_RULES.format(", ".join(sorted(self.user_rules)))
        if self.seeded:
            yield _SEEDED.format(" and ".join(sorted(self.seeded)))
        if self.unknown_steps:
            yield _ONCE

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        return [self.report(delta).promise("ledger", self)]

    def to_dict(self) -> Json:
        """The ledger as values that JSON can hold."""
        rows = [row.saved() for row in self._rows]
        about = {name: sorted(kept) for name in _ABOUT if (kept := getattr(self, name))}
        version = _version_of([row["run"] for row in rows if "run" in row])
        return {**_formats.stamp(version), "rows": rows, **about}

    @classmethod
    def from_dict(cls, saved: Json) -> "PrivacyLedger":
        """The ledger that `to_dict` saved.

        Raises:
            ValueError: `saved` is not what `to_dict` gives.
            PrivacyError: A newer release saved it, in a way that this one does not know.
        """
        if not isinstance(saved, dict) or not {"version", "rows"} <= saved.keys():
            raise ValueError(f"saved must be what PrivacyLedger.to_dict gave, got {saved!r:.99}")
        _formats.refuse_newer("The saved ledger", saved, max(_RUN_FIELDS))
        ledger = cls()
        try:
            for name in _ABOUT:
                setattr(ledger, name, frozenset(saved.get(name, ())))
            for row in saved["rows"]:
                _row_of(row).add_to(ledger)
        except (KeyError, TypeError) as error:
            raise ValueError(f"saved is not what PrivacyLedger.to_dict gave: {error}") from error
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrivacyLedger) and all(
            getattr(self, name) == getattr(other, name) for name in ("_rows", *_ABOUT)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PrivacyLedger({len(self)} rows, {self.steps} steps)"


def _most(numbers: Sequence[Number | None]) -> Number | None:
    """Returns the largest of these numbers, or None if one is not known."""
    known = [number for number in numbers if number is not None]
    return max(known) if len(known) == len(numbers) else None


def _longest(a: Run, b: Run) -> Run:
    """Returns one run for two views of the same steps, that of the more of them."""
    return dataclasses.replace(
        a, num_steps=max(a.steps, b.steps), num_epochs=_most([a.num_epochs, b.num_epochs]),
        uneven_batches=a.uneven_batches or b.uneven_batches,
    )  # fmt: skip


def _joined(row: _Row, made: Run, goes_on: bool) -> Run | None:
    """Returns a recorded run with one that ran after it, or None where the two do not cost what one run does.

    Args:
        goes_on: Whether the steps of the second are in the passes of the first.
    """
    if not isinstance(row, _Recorded) or not _same_mechanism(row.run, made):
        return None
    run = row.run
    if run.num_epochs is None and made.num_epochs is None:
        return dataclasses.replace(run, num_steps=run.steps + made.steps) if goes_on else None
    if run.num_epochs is None or made.num_epochs is None or not float(run.num_epochs).is_integer():
        return None
    counted = run.num_steps is not None or made.num_steps is not None
    steps = run.steps + made.steps if counted else None
    return dataclasses.replace(run, num_epochs=run.num_epochs + made.num_epochs, num_steps=steps)


def _mechanism(run: Run) -> Run:
    """A run without its length."""
    return dataclasses.replace(run, num_steps=0, num_epochs=None, starts_mid_epoch=False, uneven_batches=None)


def _same_mechanism(a: Run, b: Run) -> bool:
    return _mechanism(a) == dataclasses.replace(b, num_steps=0, num_epochs=None)


def _added_up(runs: list[Run]) -> list[Run]:
    """Runs of the same mechanism as one, for a report: those of many restarts are many."""
    sums: dict[tuple[Run, bool], Run] = {}
    for run in runs:
        key = (_mechanism(run), run.num_epochs is None)
        if key in sums:
            so_far = sums[key]
            epochs = None if run.num_epochs is None else run.num_epochs + (so_far.num_epochs or 0)
            uneven, steps = run.uneven_batches or so_far.uneven_batches, run.steps + so_far.steps
            run = dataclasses.replace(run, num_steps=steps, num_epochs=epochs, uneven_batches=uneven)
        sums[key] = run
    return list(sums.values())


def _encode(value: object) -> JsonValue:
    if hasattr(value, "__attrs_attrs__"):
        fields = {field.name: _encode(getattr(value, field.name)) for field in value.__attrs_attrs__}
        return {"type": type(value).__name__, **fields}
    return [_encode(item) for item in value] if isinstance(value, list | tuple) else value


def _decode(value: JsonValue) -> "DpEvent | JsonValue":
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    event = event_named(value["type"])
    if not (isinstance(event, type) and issubclass(event, dp_event.DpEvent)):
        raise ValueError(f"dp-accounting has no event named {value['type']!r}: load it where it was saved")
    return event(**{name: _decode(item) for name, item in value.items() if name != "type"})
