"""What ran, row by row, so that ε can be asked of it at any time, and saved next to the model."""

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tfdpfl.accounting import _checks
from tfdpfl.accounting.pricing import price
from tfdpfl.accounting.report import PrivacyReport, report_of
from tfdpfl.accounting.run import ADJACENCIES, Run
from tfdpfl.errors import PrivacyError

if TYPE_CHECKING:
    from dp_accounting import DpEvent


@dataclass(frozen=True)
class _Applied:
    event: "DpEvent"
    count: int
    adjacency: str


class PrivacyLedger:
    """A record of the mechanisms that ran on one data set.

    Rows of the same mechanism merge, so that a record per step stays one row. `to_dict` is JSON-ready and
    `from_dict` its inverse.

        ledger = PrivacyLedger()
        ledger.record(1.1, steps=240, num_examples=60000, batch_size=250, sampling="shuffle")
        ledger.epsilon(delta=1e-5)
    """

    def __init__(self) -> None:
        self._rows: list[Run | _Applied] = []

    def record(
        self,
        noise_multiplier: float,
        steps: int | None = None,
        *,
        epochs: float | None = None,
        num_examples: int,
        batch_size: int,
        sampling: str = "poisson",
        num_microbatches: int | None = None,
        adjacency: str | None = None,
        new_pass: bool = False,
    ) -> "PrivacyLedger":
        """Adds DP-SGD steps that ran, in their order, and returns the ledger. Arguments are those of
        `compute_epsilon`.

        Args:
            noise_multiplier: σ of these steps.
            steps: Noisy updates; 1 if neither this nor `epochs` is given.
            epochs: In their place: passes over the data, which begin anew. Under `"shuffle"` also beside
                `steps`, if the passes were begun and not all ended.
            num_examples: As those that follow, see `compute_epsilon`.
            new_pass: Under `"shuffle"`, that the first of these steps begins a new pass over the data though
                the last pass may not have ended, as every call of `fit` does. Without it, steps continue the
                pass that the last ones were in.
        """
        run = Run(
            num_examples=num_examples,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            num_epochs=epochs,
            num_steps=1 if steps is None and epochs is None else steps,
            sampling=sampling,
            num_microbatches=num_microbatches,
            adjacency=adjacency,
        )
        if run.steps == 0:
            return self
        new_pass = new_pass or epochs is not None
        # Where an epoch was begun matters under shuffle, so there only neighbours merge.
        shuffled = run.sampling == "shuffle"
        if not shuffled:  # steps add up; epochs of a fraction of steps, rounded each, do not
            run = dataclasses.replace(run, num_steps=run.steps, num_epochs=None)
        earlier = self._rows[-1:] if shuffled else self._rows
        for i, row in enumerate(earlier, start=len(self._rows) - len(earlier)):
            if not isinstance(row, Run) or not _same_mechanism(row, run):
                continue
            if row.num_epochs is not None and run.num_epochs is not None and float(row.num_epochs).is_integer():
                counted = row.num_steps is not None or run.num_steps is not None
                self._rows[i] = dataclasses.replace(
                    row,
                    num_epochs=row.num_epochs + run.num_epochs,
                    num_steps=row.steps + run.steps if counted else None,
                )
                return self
            if row.num_epochs is None and run.num_epochs is None and not (shuffled and new_pass):
                self._rows[i] = dataclasses.replace(row, num_steps=row.steps + run.steps)
                return self
        begun = any(isinstance(row, Run) and row.sampling == "shuffle" for row in self._rows)
        if shuffled and begun and not new_pass:
            run = dataclasses.replace(run, starts_mid_epoch=True)
        self._rows.append(run)
        return self

    def add(
        self, event: "DpEvent", count: int = 1, *, adjacency: str = "add_or_remove_one"
    ) -> "PrivacyLedger":
        """Adds `count` applications of any dp-accounting event, and returns the ledger.

        Args:
            event: The event; noise multipliers in it are relative to the sensitivity under `adjacency`.
            count: How often it ran.
            adjacency: The neighbouring relation that the event is stated for.
        """
        from dp_accounting import dp_event

        if not isinstance(event, dp_event.DpEvent):
            raise ValueError(f"event must be a dp_accounting.DpEvent, got {event!r}: record() takes a σ")
        count = _checks.whole("count", count, 0, "count the applications")
        adjacency = _checks.choice("adjacency", adjacency, ADJACENCIES)
        for i, row in enumerate(self._rows):
            if isinstance(row, _Applied) and (row.event, row.adjacency) == (event, adjacency):
                self._rows[i] = dataclasses.replace(row, count=row.count + count)
                return self
        if count:
            self._rows.append(_Applied(event, count, adjacency))
        return self

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    @property
    def steps(self) -> int:
        """Noisy updates and applications of events, all rows together."""
        return sum(row.steps if isinstance(row, Run) else row.count for row in self._rows)

    @property
    def dp_event(self) -> "DpEvent":
        """All that ran, as one dp-accounting event for `adjacency`."""
        from dp_accounting import dp_event

        events = [
            row.dp_event if isinstance(row, Run) else dp_event.SelfComposedDpEvent(row.event, row.count)
            for row in self._rows
        ]
        if not events:
            return dp_event.NoOpDpEvent()
        return events[0] if len(events) == 1 else dp_event.ComposedDpEvent(events)

    @property
    def adjacency(self) -> str:
        """The neighbouring relation that all rows are stated for.

        Raises:
            PrivacyError: There is none.
        """
        stated = {str(row.adjacency) for row in self._rows} or {"add_or_remove_one"}
        if len(stated) == 1:
            return stated.pop()
        # A DP-SGD step with an example blanked is the step without it, so such a row holds for both
        # relations.
        if "replace_one" not in stated and all(
            isinstance(row, Run) or row.adjacency == "zero_out" for row in self._rows
        ):
            return "zero_out"
        raise PrivacyError(
            f"the ledger's rows are stated for different neighbours ({', '.join(sorted(stated))}), "
            "which do not add up: record them with the same adjacency"
        )

    def epsilon(self, delta: float, accountant: str = "pld") -> float:
        """Returns an upper bound on the ε of all that ran, at `delta`. Raises as `tfdpfl.accounting.price`
        does.
        """
        return price(self.dp_event, delta, accountant, self.adjacency).epsilon

    def report(self, delta: float, accountant: str = "pld") -> PrivacyReport:
        """Returns the ε of all that ran, with all that it depends on."""
        runs = [row for row in self._rows if isinstance(row, Run)]
        report = report_of(runs, self.dp_event, delta, accountant, self.adjacency)
        if len(runs) == len(self._rows):
            return report
        applied = sum(row.count for row in self._rows if isinstance(row, _Applied))
        # What only some of the rows have is not the whole ledger's.
        of_runs = "sampling noise_multiplier num_examples batch_size num_microbatches sampling_rate"
        unknown: dict[str, Any] = dict.fromkeys(of_runs.split())
        return dataclasses.replace(
            report, steps=report.steps + applied, participations=report.participations + applied, **unknown
        )

    def to_dict(self) -> dict[str, Any]:
        """The ledger as values that JSON can hold."""
        rows: list[dict[str, Any]] = []
        for row in self._rows:
            if isinstance(row, Run):
                rows.append({"run": {k: v for k, v in dataclasses.asdict(row).items() if v is not None}})
            else:
                rows.append({"event": _encode(row.event), "count": row.count, "adjacency": row.adjacency})
        return {"version": 1, "rows": rows}

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "PrivacyLedger":
        """The ledger that `to_dict` saved.

        Raises:
            ValueError: `saved` is not what `to_dict` gives.
        """
        if not isinstance(saved, dict) or saved.get("version") != 1:
            raise ValueError(
                f"saved must be what PrivacyLedger.to_dict gave, of version 1, got {saved!r:.99}"
            )
        ledger = cls()
        try:
            for row in saved["rows"]:
                if "run" in row:
                    ledger._rows.append(Run(**row["run"]))
                else:
                    ledger.add(_decode(row["event"]), row["count"], adjacency=row["adjacency"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"saved is not what PrivacyLedger.to_dict gave: {error}") from error
        return ledger

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PrivacyLedger) and self._rows == other._rows

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PrivacyLedger({len(self)} rows, {self.steps} steps)"


def _same_mechanism(a: Run, b: Run) -> bool:
    alike: dict[str, Any] = {"num_steps": 0, "num_epochs": None}
    return dataclasses.replace(a, **alike, starts_mid_epoch=False) == dataclasses.replace(b, **alike)


def _encode(value: Any) -> Any:
    if hasattr(value, "__attrs_attrs__"):
        fields = {field.name: _encode(getattr(value, field.name)) for field in value.__attrs_attrs__}
        return {"type": type(value).__name__, **fields}
    return [_encode(item) for item in value] if isinstance(value, list | tuple) else value


def _decode(value: Any) -> Any:
    from dp_accounting import dp_event

    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    event = getattr(dp_event, value["type"], None)
    if not (isinstance(event, type) and issubclass(event, dp_event.DpEvent)):
        raise ValueError(f"dp-accounting has no event named {value['type']!r}: load it where it was saved")
    return event(**{name: _decode(item) for name, item in value.items() if name != "type"})
