"""An ε with everything it depends on, as data and as English."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from tfdpfl import _formats
from tfdpfl._types import DpEvent, Json, Keywords, Promiser
from tfdpfl.accounting.arguments import RunArguments, build_run, shows_arguments
from tfdpfl.accounting.pricing import Price, check_accountant, check_delta, delta_warning, price
from tfdpfl.accounting.promises import PLANNED, Promise, fixed, promises_of
from tfdpfl.accounting.run import Run
from tfdpfl.accounting.sampling import SCHEMES, SHUFFLED, shuffled_adjacency
from tfdpfl.accounting.zcdp_and_gdp import Measures, zcdp_and_gdp
from tfdpfl.errors import PrivacyError

T = TypeVar("T")

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "ADJACENCY_TEXT",
    "FIGURES",
    "GENERAL_NOTES",
    "OF_SEVERAL_EXAMPLES",
    "USERS_ARE_UNITS",
    "PrivacyReport",
    "plain_words",
    "privacy_report",
    "privacy_statement",
    "report_of",
    "rounded_up",
]

FIGURES = ("noise_multiplier", "num_examples", "batch_size", "num_microbatches", "sampling_rate")  # of a report's runs
_KINDS = ("sampling", "truncated_batch_size", "unit")
_VERSION = 1  # of `PrivacyReport.to_dict`; fields may be added to it, and none may go
ADJACENCY_TEXT = {
    "add_or_remove_one": "data sets that differ in the presence of one example",
    "zero_out": "data sets of the same, public size, of which one has a blank, which contributes nothing, in place of "
    "one example",
    "replace_one": "data sets of the same size that differ in one example",
}
OF_SEVERAL_EXAMPLES = (
    "No user may have more than {k} examples: this ε assumes that. Each of them is clipped by itself, and all may be "
    "in one batch."
)
USERS_ARE_UNITS = (
    "The unit is a user: each is sampled with all their examples or not at all, and a batch's examples of one user "
    "are clipped as one."
)
_ACCOUNTANT_TEXT = {"pld": "privacy loss distributions (PLD)", "rdp": "Rényi differential privacy (RDP)"}
_GROUPED = (
    "Microbatches clip group means, so one example can move the clipped sum by twice the clip: sigma counts as half. "
    "This assumes that an example's presence does not move other examples to other groups."
)
_WHOLE_PASSES = (
    "The {steps} steps count as {passes} passes over the data, each with its last, smaller batch. If that batch "
    "was dropped (drop_remainder), give num_epochs: the passes were shorter, so there were more of them."
)
# The notes of each report.
GENERAL_NOTES = (
    "Covered: the trained weights, and whatever is computed from them alone.",
    "Not covered: training loss and metrics measured on the batches, choices made by looking at the data, "
    "and other runs on the same data, whose costs add up.",
    "The noise must come from a secret seed (seed=None draws one): anyone who knows it can subtract the noise.",
)


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """One (ε, δ) and what it is a figure of.

    Attributes:
        epsilon: Upper bound on ε; infinite where nothing is promised.
        delta: δ.
        adjacency: The neighbouring relation: `"add_or_remove_one"`, `"zero_out"` or `"replace_one"`.
        sampling: How examples came into the batches of the steps; None if it differs, or if what ran was given as
            events.
        accountant: The accountant that proved ε, which is not always the one that was asked for.
        noise_multiplier: σ; None if several, or none that is known.
        steps: Noisy updates.
        participations: Updates that one example could touch.
        num_examples, batch_size, num_microbatches: None if several, or not known.
        sampling_rate: `batch_size / num_examples`.
        shuffled_epsilon: For Poisson sampling, what the same run costs if batches were only shuffled
            (zero-out adjacency, or replace-one where that is the run's).
        max_examples_per_user: How many examples neighbours may differ in.
        truncated_batch_size: The size that larger batches are cut to, or None.
        unit: What is sampled, clipped and protected: "example" or "user"; None if nothing states it.
        rows: What ran, a line for each mechanism.
        notes: What the figure takes for granted, in sentences.
        event: What ran, for an accountant, if it is kept.
    """

    epsilon: float
    delta: float
    adjacency: str
    sampling: str | None
    accountant: str
    noise_multiplier: float | None
    steps: int
    participations: int
    num_examples: int | None
    batch_size: int | None
    num_microbatches: int | None = None
    sampling_rate: float | None = None
    shuffled_epsilon: float | None = None
    max_examples_per_user: int = 1
    truncated_batch_size: int | None = None
    unit: str | None = "example"
    rows: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    event: DpEvent | None = dataclasses.field(default=None, repr=False, compare=False)

    @functools.cached_property
    def others(self) -> Measures:
        """ρ of zCDP and μ of GDP where there are such, and how many members a membership test can find at most. They
        are found when they are first asked for."""
        if self.event is None:
            return Measures(None, None, None)
        return zcdp_and_gdp(self.event, self.accountant, self.adjacency)

    def promise(self, kind: str = "training", ledger: Promiser = None) -> Promise:
        """Returns what is guaranteed at this cost; of a ledger, if that is what the report is of."""
        unit = self.unit if ledger is None else ledger.unit
        if unit is not None and self.max_examples_per_user > 1:
            unit = f"user of at most {self.max_examples_per_user} examples"
        unknown = 0 if ledger is None else ledger.unknown_steps
        warnings = [f"of {unknown} steps nothing is known but their noise"] if unknown else []
        if ledger is not None and not len(ledger):
            warnings.append("its ledger is empty: nothing of it has run, or nothing was recorded")
        return Promise(
            kind=kind, adjacency=self.adjacency, unit=unit, ledger=ledger, event=self.event, sampling=self._sampling(),
            mechanisms=self.rows, notes=self.notes, warnings=warnings, num_units=self.num_examples,
            price=None if self.event is not None else fixed(self.epsilon, self.delta, self.accountant),
        )  # fmt: skip

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        return [self.promise()]

    def statement(self) -> str:
        """The report in English, several lines. ε is rounded up."""
        lines = ["Differential privacy statement", *self._in_plain_words()]
        lines.append(f"  epsilon = {rounded_up(self.epsilon)} at delta = {self.delta:g}")
        lines.append(f"  adjacency: {self.adjacency} ({self._neighbours()})")
        if self.sampling is not None:
            lines.append(f"  sampling: {self.sampling} ({self._of_unit(str(self._sampling()))})")
        lines.append(f"  accountant: {self.accountant} ({_ACCOUNTANT_TEXT[self.accountant]})")
        lines += self._others()
        lines.append(f"  mechanism: {self._mechanism()}")
        lines += [f"    {row}" for row in self.rows if len(self.rows) > 1]
        if self.shuffled_epsilon is not None:
            lines.append(
                f"  if the batches were only shuffled: epsilon = {rounded_up(self.shuffled_epsilon)} "
                f"at delta = {self.delta:g} (adjacency {shuffled_adjacency(self.adjacency)}, sampling {SHUFFLED.name})"
            )
        return "\n".join([*lines, *(f"  - {note}" for note in self.notes)])

    __str__ = statement

    def to_dict(self) -> Json:
        """The fields as values that strict JSON can hold: an infinite ε is the string "inf"."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "event"}
        return _formats.strict({**_formats.stamp(_VERSION), **fields, **self.others._asdict()})

    def _sampling(self) -> str | None:
        text = None if self.sampling is None else SCHEMES[self.sampling].text
        if text is None or self.truncated_batch_size is None:
            return text
        return f"{text}; of more than {self.truncated_batch_size} a random subset of so many stays"

    def _neighbours(self) -> str:
        text, k = self._of_unit(ADJACENCY_TEXT[self.adjacency]), self.max_examples_per_user
        return text if k == 1 else text.replace("one example", f"one user's examples, at most {k}")

    def _in_plain_words(self) -> list[str]:
        """Returns a sentence on what an attacker can do, if that is known: readers ask for this first."""
        if self.others.tpr_at_1_percent_fpr is None:
            return []
        unit = (self.unit or "example") if self.max_examples_per_user == 1 else "user"
        return ["  " + plain_words(unit, self.others.tpr_at_1_percent_fpr)]

    def _others(self) -> list[str]:
        rho, mu, _ = self.others
        if rho is None or mu is None or not 0 < rho < math.inf:
            return []
        return [f"  the same in other terms: zCDP rho = {rounded_up(rho)}, GDP mu = {rounded_up(mu)}"]

    def _of_unit(self, text: str) -> str:
        return text.replace("one example", "one user and all that is theirs").replace("example", "user") if (
            self.unit == "user"
        ) else text  # fmt: skip

    def _mechanism(self) -> str:
        if self.sampling is None or self.noise_multiplier is None or self.num_examples is None:
            several = f"{len(self.rows)} kinds of noisy results, {self.steps} results in all"
            return several if self.rows[1:] else self.rows[0] if self.rows else "none was recorded"
        batches = "expected batch size" if SCHEMES[self.sampling].independent else "batch size"
        sizes = f"{batches} {self.batch_size}" if self.batch_size is not None else "batches of several sizes"
        groups = f" in {self.num_microbatches} microbatches" if self.num_microbatches else ""
        return (
            f"DP-SGD, noise multiplier {self.noise_multiplier:g}, {self.steps} steps, {sizes}{groups} of "
            f"{self.num_examples} {self.unit}s; "
            f"one {self.unit} can touch {self.participations} of the steps"
        )


@shows_arguments(RunArguments)
def privacy_report(*, delta: float, accountant: str = "pld", **run: "Unpack[RunArguments]") -> PrivacyReport:
    """Returns `compute_epsilon` of the same arguments, with all that it depends on. Raises as that does."""
    made = build_run(**run)
    assert made.adjacency is not None
    whole = made.batch_size == made.num_examples
    changes: Keywords = {} if whole else made.scheme.if_only_shuffled(made.adjacency)
    shuffled = dataclasses.replace(made, **changes) if changes else None
    return report_of([made], made.dp_event, delta, accountant, made.adjacency, shuffled)


@shows_arguments(RunArguments)
def privacy_statement(*, delta: float, accountant: str = "pld", **run: "Unpack[RunArguments]") -> str:
    """Returns what a DP-SGD run promises, in English: ε with its δ, adjacency, sampling and accountant, and
    what is assumed.

    For Poisson sampling it also gives the price of the same run with batches that are only shuffled.
    Arguments and errors are those of `compute_epsilon`.
    """
    return privacy_report(delta=delta, accountant=accountant, **run).statement()


def report_of(
    runs: list[Run],
    event: DpEvent,
    delta: float,
    accountant: str,
    adjacency: str,
    shuffled: Run | None = None,
    texts: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> PrivacyReport:
    """The report of an event that `runs` make up.

    Args:
        runs: The rows that are runs, for neighbours of the same `max_examples_per_user`.
        event: All rows as one event.
        delta: As those that follow, see `tfdpfl.accounting.price`.
        shuffled: The run to price beside it.
        texts: The rows that are no runs, a text for each.
        notes: Sentences to put before the report's own.

    Raises:
        PrivacyError: The runs are for users of different numbers of examples.
    """
    users = sorted({run.max_examples_per_user for run in runs}) or [1]
    if users[1:]:
        raise PrivacyError(
            f"max_examples_per_user differs between the rows ({', '.join(map(str, users))}), which do not add up: "
            "record them with the same one"
        )
    delta, accountant = check_delta(delta), check_accountant(accountant)
    paid = price(event, delta, accountant, adjacency)
    of_runs: Keywords = {name: _only({getattr(run, name) for run in runs}) for name in (*FIGURES, *_KINDS)}
    return PrivacyReport(
        epsilon=paid.epsilon,
        delta=delta,
        adjacency=adjacency,
        accountant=paid.accountant,
        steps=sum(run.steps for run in runs),
        participations=sum(run.participations for run in runs),
        shuffled_epsilon=None
        if shuffled is None
        else price(shuffled.dp_event, delta, accountant, str(shuffled.adjacency)).epsilon,
        max_examples_per_user=users[0],
        rows=(*map(_row, runs), *texts),
        notes=(*notes, *_notes_on(runs, paid, delta, accountant), *GENERAL_NOTES),
        event=event,
        **of_runs,
    )


def _notes_on(runs: list[Run], paid: Price, delta: float, accountant: str) -> Iterator[str]:
    """Yields what must be said of this price of these runs."""
    if paid.epsilon == math.inf:
        yield "An infinite epsilon is no privacy at all: raise noise_multiplier."
    if paid.accountant != accountant:
        yield f"The {accountant} accountant has no better bound here; the figure is by {paid.accountant}."
    yield from dict.fromkeys(note for run in runs for note in run.notes)
    if any(run.grouped for run in runs):
        yield _GROUPED
    for run in runs:
        if run.takes_whole_passes:
            yield _WHOLE_PASSES.format(steps=run.steps, passes=run.participations)
    if {run.unit for run in runs} == {"user"}:
        yield USERS_ARE_UNITS
    if runs and runs[0].max_examples_per_user > 1:
        yield OF_SEVERAL_EXAMPLES.format(k=runs[0].max_examples_per_user)
    too_large = delta_warning(delta, _only({run.num_examples for run in runs}))
    if too_large:
        yield too_large


def plain_words(unit: str, share: float) -> str:
    """A sentence on what an attacker can do, for the largest share of members that a test finds at 1 % of others."""
    percent = rounded_up(min(100 * share, 100.0), 3)
    unit = unit.partition(" of ")[0]  # "user of at most 3 examples"
    return (
        f"An attacker who wrongly takes 1 % of other {unit}s for training {unit}s finds at most {percent} % of the "
        f"training {unit}s."
    )


def rounded_up(epsilon: float, digits: int = 5) -> str:
    """`epsilon` with this many significant digits, never below its value: a printed ε is a promise too."""
    if epsilon == 0 or math.isinf(epsilon):
        return "0" if epsilon == 0 else "infinity (no privacy)"
    text = f"{epsilon:.{digits}g}"
    if float(text) < epsilon:
        text = f"{epsilon + 10.0 ** (math.floor(math.log10(epsilon)) - digits + 1):.{digits}g}"
    return text


def _row(run: Run) -> str:
    return (
        f"{run.sampling}, batch {run.batch_size} of {run.num_examples}"
        f"{'' if run.truncated_batch_size is None else f' cut to {run.truncated_batch_size}'}"
        f"{'' if run.unit == 'example' else f' {run.unit}s'}, noise multiplier {run.noise_multiplier:g}, "
        f"{run.steps} steps, {run.participations} participations"
    )


def _only(values: set[T]) -> T | None:
    return next(iter(values)) if len(values) == 1 else None


@promises_of.register
def _promises_of_run(run: Run, delta: float) -> list[Promise]:
    promise = report_of([run], run.dp_event, delta, "pld", str(run.adjacency)).promise("run")
    return [dataclasses.replace(promise, warnings=[*promise.warnings, PLANNED])]
