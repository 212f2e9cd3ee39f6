"""What a whole project promises, on one page: its parts, each with its price, what adds up and what does not.

Here nothing is priced in a new way: a part brings its ledger, its event or a price of its own, and those that are
stated for the same neighbours are composed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from tfdpfl import _formats, _page
from tfdpfl._formats import NewerFormatError
from tfdpfl._version import __version__
from tfdpfl.accounting import ACCOUNTANTS, Price, PrivacyLedger, PrivacyReport, Run, _checks, price
from tfdpfl.accounting.others import others
from tfdpfl.accounting.pricing import check_delta, large
from tfdpfl.accounting.report import SAMPLING_TEXT, report_of
from tfdpfl.errors import PrivacyError

_VERSION = 1  # of `ProjectReport.to_dict`; fields may be added to it, and none may go
_PACKAGES = ("dp-accounting", "numpy", "scipy", "tensorflow", "keras", "tensorflow-federated", "flwr")
_PRIVATE = "drawn from private votes, not to be published"
_PLANNED = "planned: nothing of it has run"
_LABELS = (
    "Covered: the released labels, and what is computed from them and from public data.",
    "Not covered: the features, which are used as they are, and scores that were measured on the true labels.",
)
_WEIGHTS = (
    "Covered: the weights, and what is computed from them.",
    "Not covered: the number of rows, the classes, fits of clones (as in a grid search), and statistics that the "
    "features were scaled by.",
)
_SEEDED = "its {0} is fixed, and whoever knows it can take the noise away: {0}=None draws a secret one"
_VOTES = (
    "Covered: the answers to the student's queries, the student, and what is computed from them.",
    "Not covered: the teachers and their votes, any figure that was computed from the votes, and the student's "
    "examples, which are taken for public.",
)
_LEVELS = {  # of a federated guarantee: (unit, what is covered and what is not)
    "client": ("client", "Covered: the released models. The server and who sees single updates are trusted."),
    "local": ("client's update", "Covered: each update as it leaves its client, against the server too."),
    "example": ("example", "Covered: each example of a client in all that this client sends."),
}
_COHORTS = "Not covered: who took part in which round, and metrics or evaluations that were released as they are."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """What a part, or several together, cost at most.

    Attributes:
        epsilon: ε at the report's δ; None where there is no figure, or none that may be published.
        accountant: What proved it; "sum" where several were added up, each at its share of δ.
        epsilons: (δ, ε) at several δ; None where there is none.
        accountants: ε at the report's δ by each accountant; None where it has none, or none that is better.
        zcdp_rho: ρ of zero-concentrated DP, where there is one; see `tfdpfl.accounting.PrivacyReport.others`.
        gdp_mu: μ of Gaussian DP, where there is one.
        tpr_at_1_percent_fpr: The most members that a membership test can find that takes 1 % of others for members.
        missing: Why there is no figure; None where there is one.
    """

    epsilon: float | None
    accountant: str | None = None
    epsilons: tuple[tuple[float, float | None], ...] = ()
    accountants: Mapping[str, float | None] = dataclasses.field(default_factory=dict)
    zcdp_rho: float | None = None
    gdp_mu: float | None = None
    tpr_at_1_percent_fpr: float | None = None
    missing: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """One part of a project.

    Attributes:
        name: As it was given; of a federation that makes several promises, with the level.
        kind: What it is.
        unit: What is protected: "example", "user", "label", "client", "client's update"; None if that is not recorded.
        adjacency: The neighbouring relation.
        data: The data set that it is about; None where all parts are about one.
        sampling: How what is protected came into a step, in English; None if that is not recorded.
        mechanisms: What ran, a line for each mechanism.
        figures: What it costs.
        notes: What the figures take for granted.
    """

    name: str
    kind: str
    unit: str | None
    adjacency: str
    data: str | None
    sampling: str | None
    mechanisms: tuple[str, ...]
    figures: Figures
    notes: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Total:
    """What parts cost together that protect the same unit of the same data under the same neighbouring relation.

    Attributes:
        parts: Their names.
        unit: As those that follow, see `Part`.
        figures: What they cost together.
    """

    parts: tuple[str, ...]
    unit: str | None
    adjacency: str
    data: str | None
    figures: Figures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What an audit found.

    Attributes:
        name: As it was given.
        text: The finding in English.
        lower_bound: A bound on ε from below; None if it is no such bound.
        delta: δ of the bound.
        claimed: The part's ε at that δ; None where there is none to compare with.
        refuted: Whether the audit found more than the part promises.
    """

    name: str
    text: str
    lower_bound: float | None = None
    delta: float | None = None
    claimed: float | None = None
    refuted: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProjectReport:
    """What `report` found. `str` gives it in English.

    Attributes:
        title: The project's name.
        delta: δ of every ε that has no other beside it.
        parts: The parts.
        totals: What adds up.
        not_added: Sentences on what does not.
        measured: What audits found.
        utility: What the project is good for: {name: figure}.
        warnings: What must be read first.
        versions: Of Python and the packages in use.
    """

    title: str
    delta: float
    parts: tuple[Part, ...]
    totals: tuple[Total, ...]
    not_added: tuple[str, ...]
    measured: tuple[Measured, ...]
    utility: Mapping[str, Any]
    warnings: tuple[str, ...]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.title}: differential privacy at delta = {self.delta:g}"]
        lines += [f"  WARNING: {warning}" for warning in self.warnings]
        for total in self.totals:
            if len(total.parts) > 1:
                names = " + ".join(total.parts)
                lines.append(f"  {names}: epsilon = {_page.upper(total.figures)} for {_page.whose(total)}")
        lines += [f"  {sentence}" for sentence in self.not_added]
        for part in self.parts:
            lines.append(f"  {part.name} ({part.kind}): epsilon = {_page.upper(part.figures)} for {_page.whose(part)}")
            lines += [f"    {line}" for line in part.mechanisms]
            if part.sampling:
                lines.append(f"    sampling: {part.sampling}")
            lines += [f"    {line}" for line in _page.other_terms(part.figures)]
            lines += [f"    - {note}" for note in part.notes]
        lines += [f"  measured, {found.name}: {found.text}" for found in self.measured]
        lines += [f"  {name}: {value}" for name, value in self.utility.items()]
        return "\n".join([*lines, "  " + ", ".join(f"{name} {version}" for name, version in self.versions.items())])

    def to_dict(self) -> dict[str, Any]:
        """The report as values that strict JSON can hold: an infinite ε is the string "inf", and what is not known or
        may not be published is None."""
        return _strict({**_formats.stamp(_VERSION), **dataclasses.asdict(self)})

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """Returns `to_dict` as strict JSON.

        Args:
            path: Where to write it as well.
        """
        return _written(json.dumps(self.to_dict(), indent=2, allow_nan=False, ensure_ascii=False), path)

    def to_html(self, path: str | os.PathLike | None = None) -> str:
        """Returns the report as one HTML page, which needs no other file, no network and no script.

        Its picture is drawn by matplotlib; without it the page says that there is none.

        Args:
            path: Where to write it as well.
        """
        return _written(_page.html(self), path)


@dataclasses.dataclass(kw_only=True)
class _Source:
    """A part before it is priced."""

    name: str
    kind: str
    adjacency: str
    unit: str | None
    price: Callable[[float, str], Price] | None = None  # None: `event` is priced
    event: Any = None
    priced_as: str | None = None  # the adjacency that the event is handed to accountants with, where that is another
    ledger: PrivacyLedger | None = None
    sampling: str | None = None
    mechanisms: Sequence[str] = ()
    notes: Sequence[str] = ()
    warnings: Sequence[str] = ()
    withheld: str | None = None
    data: str | None = None
    num_units: int | None = None

    def cost(self, delta: float, accountant: str) -> Price:
        if self.price is not None:
            return self.price(delta, accountant)
        return price(self.event, delta, accountant, self.priced_as or self.adjacency)


def report(
    parts: Mapping[str, Any],
    *,
    delta: float,
    title: str = "Privacy report",
    data: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    deltas: Sequence[float] | None = None,
    accountant: str = "pld",
    audits: Mapping[str, Any] | None = None,
    utility: Mapping[str, Any] | None = None,
) -> ProjectReport:
    """Returns what a whole project promises: each part's price, what they cost together, and what does not add up.

        page = report({"labels": randomizer, "training": budget}, delta=1e-5, audits={"training": one_run.report})
        page.to_html("privacy.html")

    Parts that protect the same unit of the same data under the same neighbouring relation are composed: ledgers are
    merged, so that steps that two of them saw count once; events are priced together; parts that have a price and no
    event share δ. All others are not added up, and the report says so. No part is left out of a total in silence.

    Args:
        parts: {name: part}. A part is a `PrivacyBudget`, a `PrivacyLedger`, a `PrivacyReport`, a `PrivacyPlan` or a
            `Run`; a private optimizer; a label mechanism or a `LabelPrivacy` layer; a `DPLogisticRegression`; PATE's
            `Answers`, a fitted `PATE`, a `PATEReport` or a `SanitizedEpsilon`; a federated `History`, or a pair of what
            a process promises and the `RoundsRun`; a Flower strategy or a `LedgerAccountant`; a `RandomSearch`.
        delta: δ, in (0, 1).
        title: The page's.
        data: {name: data set}, for all parts: which data each is about. None: all are about the same, which is the
            cautious view.
        units: {name: unit} for ledgers of events, which do not say what they protect: "example", "client", …
        deltas: More δ to give ε at; None: from δ/100 to 100 δ.
        accountant: "pld" or "rdp".
        audits: {name: finding}, each under the name of the part that was audited: a `MembershipReport`, a
            `OneRunAudit`, or its report; or a number, which is a lower bound on ε at `delta`, as of `audit_epsilon`.
        utility: {name: figure}, what the project is good for. They are shown as they are: give no private ones.

    Raises:
        ValueError: An argument is out of its range, or a part is none of these.
        PrivacyError: A part has no price: its own sentence says why.
    """
    delta, accountant = check_delta(delta), _checks.choice("accountant", accountant, ACCOUNTANTS)
    every = sorted({delta, *(_around(delta) if deltas is None else map(check_delta, deltas))}, reverse=True)
    if not isinstance(parts, Mapping) or not parts:
        raise ValueError(f"parts must be a dict of names and what each part is, got {parts!r:.99}")
    names = [str(name) for name in parts]
    for argument, given in (("data", data), ("units", units)):
        if given is not None and (strange := sorted(set(given) - set(names))):
            raise ValueError(f"{argument} names {strange[0]!r}, which is no part: take one of {names}")
    if data is not None and (left := [name for name in names if name not in data]):
        raise ValueError(f"data does not say which data {left[0]!r} is about: name it for every part, or for none")
    found: list[_Source] = []
    for name, what in parts.items():
        for source in _sources(str(name), what, (units or {}).get(name), delta):
            found.append(dataclasses.replace(source, data=None if data is None else data[name]))
    warnings = [f"{source.name}: {warning}" for source in found for warning in source.warnings]
    made = [_part(source, delta, every, accountant) for source in found]
    for part, source in zip(made, found, strict=True):
        if part.figures.epsilon == math.inf:
            warnings.append(f"{part.name}: epsilon is infinite, which is no privacy at all")
        too_large = large(delta, source.num_units)
        if too_large:
            warnings.append(f"{part.name}: {too_large}")
    groups: dict[tuple[str | None, str | None, str, str], list[int]] = {}
    for i, part in enumerate(made):
        alone = part.name if part.unit is None else ""
        groups.setdefault((part.data, part.unit, part.adjacency, alone), []).append(i)
    totals = []
    for (about, unit, adjacency, _), members in groups.items():
        whole = made[members[0]].figures
        if members[1:]:
            whole = _together([found[i] for i in members], delta, every, accountant)
        whose = tuple(made[i].name for i in members)
        totals.append(Total(parts=whose, unit=unit, adjacency=adjacency, data=about, figures=whole))
    measured = [_measured(str(name), what, found, delta, accountant) for name, what in (audits or {}).items()]
    warnings += [
        f"{m.name}: the audit found more than is promised, which is therefore wrong" for m in measured if m.refuted
    ]
    return ProjectReport(
        title=title,
        delta=delta,
        parts=tuple(made),
        totals=tuple(totals),
        not_added=tuple(_not_added(totals)),
        measured=tuple(measured),
        utility={str(k): v if isinstance(v, str) else float(v) for k, v in (utility or {}).items()},
        warnings=tuple(warnings),
        versions=_versions(),
    )


def _around(delta: float) -> Iterator[float]:
    return (each for power in (2, 1, -1, -2) if (each := float(f"{delta * 10.0**power:.12g}")) < 0.5)


def read(files: Iterable[str | os.PathLike]) -> dict[str, PrivacyLedger]:
    """Returns {name: ledger} of JSON files that hold what `PrivacyLedger.to_dict` gave.

    Args:
        files: Their paths. A name is the file's without the ending, or the path where that would name two.

    Raises:
        ValueError: A file holds no ledger.
        PrivacyError: A newer release saved one, in a way that this one does not know.
    """
    paths = [Path(file) for file in files]
    stems = [path.stem for path in paths]
    found = {}
    for path in paths:
        try:
            ledger = PrivacyLedger.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except NewerFormatError as error:
            raise NewerFormatError(f"{path}: {error}") from error
        except ValueError as error:
            raise ValueError(f"{path} holds no ledger: {error}") from error
        found[path.stem if stems.count(path.stem) == 1 else str(path)] = ledger
    return found


# -- what a part is ------------------------------------------------------------------------------------------


def _sources(name: str, what: Any, unit: str | None, delta: float) -> Iterator[_Source]:
    """The promises that a part makes."""
    family = {cls.__module__ for cls in type(what).__mro__}
    of = lambda package: any(module.startswith(f"tfdpfl.{package}") for module in family)  # noqa: E731
    if isinstance(what, PrivacyLedger):
        yield _of_report(name, "ledger", what.report(delta), unit, what)
    elif isinstance(what, PrivacyReport):
        yield _of_report(name, "training", what, unit)
    elif isinstance(what, Run):
        assert what.adjacency is not None
        yield _planned(_of_report(name, "run", report_of([what], what.dp_event, delta, "pld", what.adjacency), unit))
    elif of("label_dp") and hasattr(what, "ledger"):
        yield _of_labels(name, what)
    elif of("convex"):
        yield _of_regression(name, what)
    elif of("pate"):
        yield _of_votes(name, what)
    elif hasattr(what, "trainings") and hasattr(what, "adjacency"):  # a federated History
        if not what.trainings:
            raise ValueError(f"{name}: this History promises no privacy, or no round has run: leave it out")
        for level, (guarantee, run) in what.trainings.items():
            lost = [f"{what.lost_rounds} more rounds were begun and lost"] if what.lost_rounds else []
            several = f"{name}, {level} level" if len(what.trainings) > 1 else name
            yield _of_rounds(several, guarantee, run, lost)
    elif isinstance(what, tuple) and len(what) == 2 and hasattr(what[0], "price"):
        yield _of_rounds(name, *what)
    elif of("flower") and hasattr(what, "privacy"):
        yield from _of_strategy(name, what, delta)
    elif isinstance(getattr(what, "ledger", None), PrivacyLedger):
        yield _of_budget(name, what, unit, delta)
    elif hasattr(what, "noise_multiplier") and isinstance(getattr(what, "report", None), PrivacyReport):
        yield _planned(_of_report(name, "plan", what.report, unit))
    else:
        raise ValueError(
            f"{name}: {what!r:.99} is no part of a report: give a ledger, a PrivacyBudget, a PrivacyReport, a label "
            "mechanism, a DPLogisticRegression, PATE's answers, a History, a Flower strategy or a RandomSearch. An "
            "event goes into a ledger "
            "first: PrivacyLedger().add(event, adjacency=...)"
        )


def _fixed(epsilon: float, delta: float, accountant: str) -> Callable[[float, str], Price]:
    """The price of what has one (ε, δ) alone: it holds at every greater δ too."""

    def cost(at: float, _: str) -> Price:
        if at < delta:
            raise PrivacyError(f"known at delta = {delta:g} and above alone, so there is no figure at {at:g}")
        return Price(float(epsilon), accountant)

    return cost


def _of_report(
    name: str, kind: str, what: PrivacyReport, unit: str | None, ledger: PrivacyLedger | None = None
) -> _Source:
    recorded = what.unit if ledger is None else ledger.unit
    if recorded is not None and what.max_examples_per_user > 1:
        recorded = f"user of at most {what.max_examples_per_user} examples"
    if recorded is not None and unit is not None and unit != recorded:
        raise ValueError(f"units says {unit!r} of {name!r}, which is recorded for one {recorded}: leave it out")
    sampling = None if what.sampling is None else SAMPLING_TEXT[what.sampling]
    if sampling is not None and what.truncated_batch_size is not None:
        sampling += f"; of more than {what.truncated_batch_size} a random subset of so many stays"
    unknown = 0 if ledger is None else ledger.unknown_steps
    warnings = [f"of {unknown} steps nothing is known but their noise"] if unknown else []
    if ledger is not None and not len(ledger):
        warnings.append("its ledger is empty: nothing of it has run, or nothing was recorded")
    return _Source(
        name=name, kind=kind, adjacency=what.adjacency, unit=recorded or unit, ledger=ledger, event=what.event,
        sampling=sampling, mechanisms=what.rows, notes=what.notes, warnings=warnings, num_units=what.num_examples,
        price=None if what.event is not None else _fixed(what.epsilon, what.delta, what.accountant),
    )  # fmt: skip


def _planned(source: _Source) -> _Source:
    return dataclasses.replace(source, warnings=[*source.warnings, _PLANNED])


def _of_budget(name: str, what: Any, unit: str | None, delta: float) -> _Source:
    """Anything that keeps a ledger; its own report has notes that a ledger does not know."""
    ledger, known = what.ledger, getattr(what, "report", None)
    known = known(delta) if callable(known) else known or ledger.report(delta)
    kind = "search" if hasattr(what, "mean_runs") else "training"
    return _of_report(name, kind, known, unit, ledger)


def _of_labels(name: str, what: Any) -> _Source:
    # What clones of it released is of the same labels, as far as anyone knows.
    spent = getattr(what, "family_ledger", what.ledger)
    times = getattr(what, "releases_", None)
    # Not its repr, which may hold a seed.
    text = f"{type(what).__name__}, epsilon {float(what.epsilon):g} a release"
    more = "; what its clones released is in the price" if len(spent) and spent != what.ledger else ""
    warnings = [] if len(spent) else [_PLANNED]
    if getattr(what, "seed", None) is not None:
        warnings.append(_SEEDED.format("seed"))
    return _Source(
        name=name, kind="label mechanism", adjacency="replace_one", unit="label",
        event=spent.dp_event if len(spent) else what.dp_event, ledger=spent if len(spent) else None,
        mechanisms=[text + ("" if times is None else f", {times} releases") + more], notes=_LABELS, warnings=warnings,
    )  # fmt: skip


def _of_regression(name: str, what: Any) -> _Source:
    times, event = what.releases_, what.dp_event
    warnings = [] if times else [_PLANNED]
    if what.random_state is not None:
        warnings.append(_SEEDED.format("random_state"))
    text = (
        f"{getattr(what, 'solver_', what.solver)}, epsilon {float(what.epsilon):g} at delta {float(what.delta):g} a fit"
    )
    return _Source(
        name=name, kind="logistic regression", adjacency=what.adjacency, unit="example", event=event,
        price=what.price if event is None else None, mechanisms=[f"{text}, {times} fits"], notes=_WEIGHTS,
        warnings=warnings,
    )  # fmt: skip


def _of_votes(name: str, what: Any) -> _Source:
    source = _Source(name=name, kind="PATE", adjacency="replace_one", unit="example", notes=_VOTES)
    private = getattr(what, "budget_data_dependent", False) or getattr(what, "data_dependent", False)
    failure = getattr(what, "failure", None)
    what = getattr(what, "answers_", what)
    if hasattr(what, "by_teachers"):
        source.event, source.priced_as = what.dp_event, "add_or_remove_one"  # the event has the replacement in it
        source.mechanisms = [
            f"{what.mechanism}: {len(what)} queries, {int(what.answered.sum())} answered, "
            f"{int(what.by_teachers.sum())} by the teachers"
        ]
    else:
        epsilon = getattr(what, "epsilon", what)
        if not hasattr(epsilon, "data_dependent"):
            raise ValueError(f"{name}: {what!r:.99} has no ε: fit it, or give its answers")
        private = private or epsilon.data_dependent
        source.price = _fixed(epsilon, epsilon.delta, "pld" if epsilon.order is None else "rdp")
        if hasattr(what, "num_teachers"):
            source.mechanisms = [
                f"{what.mechanism}: {what.queries} queries to {what.num_teachers} teachers, {what.answered} answered, "
                f"{what.answered_by_teachers} by the teachers"
            ]
            source.notes = [*_VOTES, "The sanitised figure, once it is published, costs more than is said here."]
    if failure is not None:
        source.notes = [*_VOTES, f"The figure was computed from the votes with noise: it holds but for a chance of "
                        f"{failure:g}."]  # fmt: skip
    if private:
        source.withheld, source.mechanisms = _PRIVATE, []  # the number of queries tells about votes too
    return source


def _cohorts(p: Any) -> str:
    return f"{p.sampling}: {p.clients_per_round:g} of {p.population} clients in a round"


def _of_rounds(name: str, guarantee: Any, run: Any, warnings: Sequence[str] = ()) -> _Source:
    p = run.participation
    source = _of_level(name, guarantee, lambda delta, accountant: guarantee.price(run, delta, accountant))
    source.event = guarantee.event(run) if hasattr(guarantee, "event") else None
    source.sampling = _cohorts(p)
    source.mechanisms = [f"{run.rounds} rounds of {guarantee!r}"]
    source.warnings = warnings
    if guarantee.level == "client":
        source.num_units = p.population
    return source


def _of_level(name: str, guarantee: Any, cost: Callable[[float, str], Price]) -> _Source:
    unit, covered = _LEVELS[guarantee.level]
    return _Source(
        name=name, kind="federation", adjacency=guarantee.adjacency, unit=unit, price=cost, notes=[covered, _COHORTS]
    )


def _of_strategy(name: str, what: Any, delta: float) -> Iterator[_Source]:
    """A Flower strategy's promises, and what clients said of their own."""
    p = what.participation
    sampling = _cohorts(p)
    if hasattr(what, "local_epsilon"):  # NbAFL, whose two levels have prices alone
        for guarantee, epsilon in zip(what.privacy, (what.local_epsilon, what.epsilon), strict=True):
            source = _of_level(f"{name}, {guarantee.level} level", guarantee, _fixed(epsilon, what.delta, "pld"))
            yield dataclasses.replace(source, sampling=sampling, mechanisms=[f"{what.rounds_charged} rounds, NbAFL"])
    else:
        source = _of_report(name, "federation", what.ledger.report(delta), "client", what.ledger)
        warnings = [*source.warnings, *(line.strip() for line in what.statement().splitlines()[2:])]
        notes = [_LEVELS["client"][1], _COHORTS]
        yield dataclasses.replace(source, sampling=sampling, warnings=warnings, notes=notes, num_units=p.population)
    told: dict[tuple[str, str], list[PrivacyLedger]] = {}
    for said in what.client_reports.values():
        told.setdefault((said["level"], said["adjacency"]), []).append(PrivacyLedger.from_dict(said["ledger"]))
    for (level, adjacency), ledgers in told.items():

        def worst(at: float, accountant: str, ledgers: list[PrivacyLedger] = ledgers) -> Price:
            prices = [price(ledger.dp_event, at, accountant, ledger.adjacency) for ledger in ledgers]
            return max(prices, key=lambda paid: paid.epsilon)

        unit, covered = _LEVELS[level]
        yield _Source(
            name=f"{name}, told by clients ({level})", kind="federation", adjacency=adjacency, unit=unit, price=worst,
            mechanisms=[f"{len(ledgers)} clients; the figure is of the one that spent most"],
            notes=[covered, "It is the clients' word."],
        )  # fmt: skip


# -- what it costs -------------------------------------------------------------------------------------------


def _part(source: _Source, delta: float, deltas: Sequence[float], accountant: str) -> Part:
    if source.withheld is not None:
        figures = Figures(epsilon=None, missing=source.withheld)
    else:
        relation = source.priced_as or source.adjacency
        figures = _figures(source.cost, source.event, relation, delta, deltas, accountant)
    return Part(
        name=source.name, kind=source.kind, unit=source.unit, adjacency=source.adjacency, data=source.data,
        sampling=source.sampling, mechanisms=tuple(source.mechanisms), figures=figures, notes=tuple(source.notes),
    )  # fmt: skip


def _figures(
    cost: Callable[[float, str], Price],
    event: Any,
    relation: str,
    delta: float,
    deltas: Sequence[float],
    accountant: str,
) -> Figures:
    try:
        paid = cost(delta, accountant)
    except PrivacyError as error:
        return Figures(epsilon=None, missing=str(error))
    known = {which: _try(cost, delta, which) for which in ACCOUNTANTS}
    rho, mu, tpr = (None, None, None) if event is None else others(event, accountant, relation)
    return Figures(
        epsilon=paid.epsilon,
        accountant=paid.accountant,
        epsilons=tuple((at, None if (p := _try(cost, at, accountant)) is None else p.epsilon) for at in deltas),
        accountants={
            which: p.epsilon if p is not None and p.accountant == which else None for which, p in known.items()
        },
        zcdp_rho=rho,
        gdp_mu=mu,
        tpr_at_1_percent_fpr=tpr,
    )


def _try(cost: Callable[[float, str], Price], delta: float, accountant: str) -> Price | None:
    try:
        return cost(delta, accountant)
    except PrivacyError:
        return None


def _together(members: Sequence[_Source], delta: float, deltas: Sequence[float], accountant: str) -> Figures:
    """What parts of the same unit and neighbours cost: their events as one, and what has none with a share of δ."""
    from dp_accounting import dp_event

    held = [source.name for source in members if source.withheld is not None]
    if held:
        return Figures(epsilon=None, missing=f"{', '.join(held)}: {_PRIVATE}")
    merged = PrivacyLedger()
    events: dict[str, list[Any]] = {}
    terms: list[Callable[[float, str], Price]] = []
    for source in members:
        if source.ledger is not None:
            merged.merge(source.ledger)
        elif source.event is not None:
            events.setdefault(source.priced_as or source.adjacency, []).append(source.event)
        else:
            terms.append(source.cost)
    try:
        if len(merged):
            events.setdefault(merged.adjacency, []).append(merged.dp_event)
    except PrivacyError as error:
        return Figures(epsilon=None, missing=str(error))
    one: Any = None
    for relation, parts in events.items():
        one = dp_event.ComposedDpEvent(parts)
        terms.append(_Source(name="", kind="", unit=None, adjacency=relation, event=one).cost)
    if len(terms) == 1:
        return _figures(terms[0], one, next(iter(events), members[0].adjacency), delta, deltas, accountant)

    def added(at: float, which: str) -> Price:
        paid = [term(at / len(terms), which) for term in terms]
        proven = {p.accountant for p in paid}
        return Price(sum(p.epsilon for p in paid), proven.pop() if len(proven) == 1 else "sum")

    return _figures(added, None, members[0].adjacency, delta, deltas, accountant)


def _not_added(totals: Sequence[Total]) -> Iterator[str]:
    about: dict[str | None, list[Total]] = {}
    for total in totals:
        about.setdefault(total.data, []).append(total)
    for data, several in about.items():
        if several[1:]:
            each = "; ".join(f"{' + '.join(t.parts)} (one {t.unit or 'unit'}, {t.adjacency})" for t in several)
            of = "" if data is None else f" for {data}"
            yield (
                f"Not added up{of}: {each}. They protect different units, or are stated for different neighbours, so "
                "that their sum is no promise. Each holds by itself, and whoever is in all of them pays for each."
            )
        for total in several:
            if total.unit is None:
                yield (
                    f"What {total.parts[0]} protects is not recorded, so it is added to nothing: say it by "
                    "units={name: unit}."
                )
    if len(about) > 1:
        names = ", ".join(map(str, about))
        yield f"Each data set ({names}) has figures of its own. Who is in several of them pays for each."


def _measured(name: str, what: Any, sources: Sequence[_Source], delta: float, accountant: str) -> Measured:
    audited = [source for source in sources if source.name == name or source.name.startswith(f"{name}, ")]
    if not audited:
        raise ValueError(
            f"audits has {name!r}, which is no part: put each finding under the name of the part that was audited, one "
            f"of {[source.name for source in sources]}"
        )
    source = audited[0] if len(audited) == 1 and audited[0].withheld is None else None
    what = getattr(what, "report", what)
    if hasattr(what, "tpr_interval"):
        most = None
        if source is not None and source.event is not None and source.unit == "example" and what.fpr == 0.01:
            most = others(source.event, accountant, source.priced_as or source.adjacency).tpr_at_1_percent_fpr
        return Measured(name=name, text=str(what), refuted=most is not None and what.tpr_interval[0] > most)
    if hasattr(what, "epsilon") and hasattr(what, "delta"):
        bound, at, text = float(what.epsilon), float(what.delta), str(what)
    else:
        mend = "give a bound on ε, or an audit's report"
        bound, at = _checks.real(f"audits[{name!r}]", what, mend, at_least=0), delta
        text = f"epsilon is at least {_page.rounded_down(bound)} at delta = {delta:g}"
    paid = None if source is None or not 0 < at < 1 else _try(source.cost, at, accountant)
    claimed = None if paid is None else paid.epsilon
    refuted = claimed is not None and bound > claimed
    return Measured(name=name, text=text, lower_bound=bound, delta=at, claimed=claimed, refuted=refuted)


def _versions() -> dict[str, str]:
    found = {"tfdpfl": __version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _strict(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _written(text: str, path: str | os.PathLike | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
