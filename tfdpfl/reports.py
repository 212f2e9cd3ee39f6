"""One report for a whole project, on one page: its parts, each with its price, what adds up and what does not.

Here nothing is priced in a new way. A part brings its ledger, its event or a price of its own. Those that are
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

from tfdpfl import _formats, _report_html
from tfdpfl._formats import NewerFormatError
from tfdpfl._lazy import dp_event
from tfdpfl._types import DpEvent, Json, Promiser
from tfdpfl._version import __version__
from tfdpfl.accounting import ACCOUNTANTS, Price, PrivacyLedger, _checks
from tfdpfl.accounting.pricing import check_accountant, check_delta, delta_warning
from tfdpfl.accounting.promises import NoPromisesError, Promise, promises_of
from tfdpfl.accounting.zcdp_and_gdp import Measures, zcdp_and_gdp
from tfdpfl.errors import PrivacyError

__all__ = ["Figures", "Measured", "Part", "ProjectReport", "Total", "read", "report"]

_VERSION = 1  # of `ProjectReport.to_dict`; fields may be added to it, and none may go
_PACKAGES = ("dp-accounting", "numpy", "scipy", "tensorflow", "keras", "tensorflow-federated", "flwr")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figures:
    """Holds an upper bound on the cost of one part, or of several together.

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
    """Holds the total cost of parts that protect the same unit of the same data under the same neighbouring relation.

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
    """Holds the result of an audit.

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
    """Holds the result of `report`. `str` gives it in English.

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
    utility: Mapping[str, float | str]
    warnings: tuple[str, ...]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{self.title}: differential privacy at delta = {self.delta:g}"]
        lines += [f"  WARNING: {warning}" for warning in self.warnings]
        for total in self.totals:
            if len(total.parts) > 1:
                names = " + ".join(total.parts)
                lines.append(
                    f"  {names}: epsilon = {_report_html.upper(total.figures)} for {_report_html.whose(total)}"
                )
        lines += [f"  {sentence}" for sentence in self.not_added]
        for part in self.parts:
            upper, whose = _report_html.upper(part.figures), _report_html.whose(part)
            lines.append(f"  {part.name} ({part.kind}): epsilon = {upper} for {whose}")
            lines += [f"    {line}" for line in part.mechanisms]
            if part.sampling:
                lines.append(f"    sampling: {part.sampling}")
            lines += [f"    {line}" for line in _report_html.other_terms(part.figures)]
            lines += [f"    - {note}" for note in part.notes]
        lines += [f"  measured, {found.name}: {found.text}" for found in self.measured]
        lines += [f"  {name}: {value}" for name, value in self.utility.items()]
        return "\n".join([*lines, "  " + ", ".join(f"{name} {version}" for name, version in self.versions.items())])

    def to_dict(self) -> Json:
        """The report as values that strict JSON can hold. An infinite ε is the string "inf", and what is not known or
        may not be published is None."""
        return _formats.strict({**_formats.stamp(_VERSION), **dataclasses.asdict(self)})

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
        return _written(_report_html.html(self), path)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Source:
    """A promise with the name and the data set that the report has for it."""

    name: str
    data: str | None
    unit: str | None
    promise: Promise


@dataclasses.dataclass(frozen=True)
class _Question:
    """What a report asks of each cost: ε at δ, at several other δ, and by an accountant."""

    delta: float
    deltas: Sequence[float]
    accountant: str

    def figures(self, of: Promise) -> Figures:
        """Returns what a promise costs, or why it has no figures."""
        if of.withheld is not None:
            return Figures(epsilon=None, missing=of.withheld)
        try:
            paid = of.cost(self.delta, self.accountant)
        except PrivacyError as error:
            return Figures(epsilon=None, missing=str(error))
        known = {which: _try(of.cost, self.delta, which) for which in ACCOUNTANTS}
        return Figures(
            epsilon=paid.epsilon,
            accountant=paid.accountant,
            epsilons=tuple((at, None if (p := _try(of.cost, at, self.accountant)) is None else p.epsilon)
                           for at in self.deltas),
            accountants={
                which: p.epsilon if p is not None and p.accountant == which else None for which, p in known.items()
            },
            **({} if of.event is None else self.measures(of)._asdict()),
        )  # fmt: skip

    def measures(self, of: Promise) -> Measures:
        return zcdp_and_gdp(of.event, self.accountant, of.priced_adjacency)


def report(
    parts: Mapping[str, Promiser],
    *,
    delta: float,
    title: str = "Privacy report",
    data: Mapping[str, str] | None = None,
    units: Mapping[str, str] | None = None,
    deltas: Sequence[float] | None = None,
    accountant: str = "pld",
    audits: Mapping[str, object] | None = None,
    utility: Mapping[str, float | str] | None = None,
) -> ProjectReport:
    """Returns what a whole project promises: each part's price, what they cost together, and what does not add up.

        page = report({"labels": randomizer, "training": budget}, delta=1e-5, audits={"training": one_run.report})
        page.to_html("privacy.html")

    Parts that protect the same unit of the same data under the same neighbouring relation are composed. Ledgers are
    merged, so that steps that two of them saw count once. Events are priced together. Parts that have a price and no
    event share δ. All others are not added up, and the report says so. No part is left out of a total in silence.

    Args:
        parts: {name: part}. A part is a `PrivacyBudget`, a `PrivacyLedger`, a `PrivacyReport`, a `PrivacyPlan` or a
            `Run`; a private optimizer; a label mechanism or a `LabelPrivacy` layer; a `DPLogisticRegression`; PATE's
            `Answers`, a fitted `PATE`, a `PATEReport` or a `SanitizedEpsilon`; a federated `History`, or a pair of what
            a process promises and the `RoundsRun`; a Flower strategy or a `LedgerAccountant`; a `RandomSearch`. An
            object of your own is a part if it has a method ``promises(delta)``: see `tfdpfl.accounting.promises`.
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
    delta, accountant = check_delta(delta), check_accountant(accountant)
    every = sorted({delta, *(_around(delta) if deltas is None else map(check_delta, deltas))}, reverse=True)
    question = _Question(delta, every, accountant)
    _check_names(parts, data, units)
    found: list[_Source] = []
    for name, what in parts.items():
        found += _sources(str(name), what, (units or {}).get(name), None if data is None else data[name], delta)
    made = [_part(source, question) for source in found]
    totals = [
        Total(
            parts=tuple(made[i].name for i in members), unit=unit, adjacency=adjacency, data=about,
            figures=_together([found[i] for i in members], question) if members[1:]
            else made[members[0]].figures,
        )
        for (about, unit, adjacency, _), members in _groups(made).items()
    ]  # fmt: skip
    measured = [_measured(str(name), what, found, question) for name, what in (audits or {}).items()]
    return ProjectReport(
        title=title,
        delta=delta,
        parts=tuple(made),
        totals=tuple(totals),
        not_added=tuple(_not_added(totals)),
        measured=tuple(measured),
        utility={str(k): _formats.number_or_text(v) for k, v in (utility or {}).items()},
        warnings=tuple(_warnings(found, made, measured, delta)),
        versions=_versions(),
    )


def _check_names(
    parts: Mapping[str, Promiser], data: Mapping[str, str] | None, units: Mapping[str, str] | None
) -> None:
    if not hasattr(parts, "items") or not parts:
        raise ValueError(f"parts must be a dict of names and what each part is, got {parts!r:.99}")
    names = [str(name) for name in parts]
    for argument, given in (("data", data), ("units", units)):
        if given is not None and (strange := sorted(set(given) - set(names))):
            raise ValueError(f"{argument} names {strange[0]!r}, which is no part: take one of {names}")
    if data is not None and (left := [name for name in names if name not in data]):
        raise ValueError(f"data does not say which data {left[0]!r} is about: name it for every part, or for none")


def _groups(parts: Sequence[Part]) -> dict[tuple[str | None, str | None, str, str], list[int]]:
    """Returns the numbers of the parts that add up, by what they protect. A part of no recorded unit is alone."""
    groups: dict[tuple[str | None, str | None, str, str], list[int]] = {}
    for i, part in enumerate(parts):
        alone = part.name if part.unit is None else ""
        groups.setdefault((part.data, part.unit, part.adjacency, alone), []).append(i)
    return groups


def _warnings(
    sources: Sequence[_Source], parts: Sequence[Part], measured: Sequence[Measured], delta: float
) -> Iterator[str]:
    yield from (f"{source.name}: {warning}" for source in sources for warning in source.promise.warnings)
    for part, source in zip(parts, sources, strict=True):
        if part.figures.epsilon == math.inf:
            yield f"{part.name}: epsilon is infinite, which is no privacy at all"
        too_large = delta_warning(delta, source.promise.num_units)
        if too_large:
            yield f"{part.name}: {too_large}"
    for found in measured:
        if found.refuted:
            yield f"{found.name}: the audit found more than is promised, which is therefore wrong"


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
            raise ValueError(
                f"{path} holds no ledger ({error}). Give a file of JSON with what PrivacyLedger.to_dict returned."
            ) from error
        found[path.stem if stems.count(path.stem) == 1 else str(path)] = ledger
    return found


# -- what a part is ------------------------------------------------------------------------------------------


def _promises(name: str, what: Promiser, delta: float) -> list[Promise]:
    try:
        return promises_of(what, delta)
    except PrivacyError:
        raise
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    except NoPromisesError as error:
        raise ValueError(
            f"{name}: {what!r:.99} cannot be part of a report: give a ledger, a PrivacyBudget, a PrivacyReport, a "
            "label mechanism, a DPLogisticRegression, PATE's answers, a History, a Flower strategy or a RandomSearch, "
            "or give your own class a method promises(delta). An event goes into a ledger first: "
            "PrivacyLedger().add(event, adjacency=...)"
        ) from error


def _sources(name: str, what: Promiser, unit: str | None, data: str | None, delta: float) -> Iterator[_Source]:
    for promise in _promises(name, what, delta):
        recorded = promise.unit
        if recorded is not None and unit is not None and unit != recorded:
            raise ValueError(f"units says {unit!r} of {name!r}, which is recorded for one {recorded}: leave it out")
        whole = ", ".join(filter(None, (name, promise.part)))
        yield _Source(name=whole, data=data, unit=recorded or unit, promise=promise)


# -- what it costs -------------------------------------------------------------------------------------------


def _part(source: _Source, question: _Question) -> Part:
    promise = source.promise
    return Part(
        name=source.name, kind=promise.kind, unit=source.unit, adjacency=promise.adjacency, data=source.data,
        sampling=promise.sampling, mechanisms=tuple(promise.mechanisms), figures=question.figures(promise),
        notes=tuple(promise.notes),
    )  # fmt: skip


def _try(cost: Callable[[float, str], Price], delta: float, accountant: str) -> Price | None:
    try:
        return cost(delta, accountant)
    except PrivacyError:
        return None


def _together(members: Sequence[_Source], question: _Question) -> Figures:
    """What parts of the same unit and neighbours cost: their events as one, and what has none with a share of δ."""
    held = [source for source in members if source.promise.withheld is not None]
    if held:
        names = ", ".join(source.name for source in held)
        return Figures(epsilon=None, missing=f"{names}: {held[0].promise.withheld}")
    promises = [source.promise for source in members]
    try:
        terms = [*(p for p in promises if p.ledger is None and p.event is None), *_composed(promises)]
    except PrivacyError as error:
        return Figures(epsilon=None, missing=str(error))
    if len(terms) == 1:
        return question.figures(terms[0])

    def added(at: float, which: str) -> Price:
        paid = [term.cost(at / len(terms), which) for term in terms]
        proven = {p.accountant for p in paid}
        return Price(sum(p.epsilon for p in paid), proven.pop() if len(proven) == 1 else "sum")

    return question.figures(Promise(kind="", unit=None, adjacency=promises[0].adjacency, price=added))


def _composed(promises: Sequence[Promise]) -> list[Promise]:
    """Returns the promises that have events as one for each relation. Ledgers that saw the same steps count them once.

    Raises:
        PrivacyError: The ledgers do not add up.
    """
    merged = PrivacyLedger()
    events: dict[str, list[DpEvent]] = {}
    for promise in promises:
        if promise.ledger is not None:
            merged.merge(promise.ledger)
        elif promise.event is not None:
            events.setdefault(promise.priced_adjacency, []).append(promise.event)
    if len(merged):
        events.setdefault(merged.adjacency, []).append(merged.dp_event)
    return [
        Promise(kind="", unit=None, adjacency=relation, event=dp_event.ComposedDpEvent(parts))
        for relation, parts in events.items()
    ]


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


def _measured(name: str, what: Promiser, sources: Sequence[_Source], question: _Question) -> Measured:
    source, what = _audited(name, sources), getattr(what, "report", what)
    if hasattr(what, "tpr_interval"):
        most = None if source is None else _most_members(source, what.fpr, question)
        return Measured(name=name, text=str(what), refuted=most is not None and what.tpr_interval[0] > most)
    if hasattr(what, "epsilon") and hasattr(what, "delta"):
        bound, at, text = float(what.epsilon), float(what.delta), str(what)
    else:
        remedy = "give a bound on ε, or an audit's report"
        bound, at = _checks.real(f"audits[{name!r}]", what, remedy, at_least=0), question.delta
        text = f"epsilon is at least {_report_html.rounded_down(bound)} at delta = {at:g}"
    paid = None if source is None or not 0 < at < 1 else _try(source.promise.cost, at, question.accountant)
    claimed = None if paid is None else paid.epsilon
    refuted = claimed is not None and bound > claimed
    return Measured(name=name, text=text, lower_bound=bound, delta=at, claimed=claimed, refuted=refuted)


def _audited(name: str, sources: Sequence[_Source]) -> _Source | None:
    """Returns the part that a finding is about; None if it is several, or a figure of it may not be published."""
    found = [source for source in sources if source.name == name or source.name.startswith(f"{name}, ")]
    if not found:
        raise ValueError(
            f"audits has {name!r}, which is no part: put each finding under the name of the part that was audited, one "
            f"of {[source.name for source in sources]}"
        )
    return found[0] if len(found) == 1 and found[0].promise.withheld is None else None


def _most_members(source: _Source, fpr: float, question: _Question) -> float | None:
    """Returns the largest share of members that a test finds at this share of others, if it is known."""
    if source.promise.event is None or source.unit != "example" or fpr != 0.01:
        return None
    return question.measures(source.promise).tpr_at_1_percent_fpr


def _versions() -> dict[str, str]:
    found = {"tfdpfl": __version__, "Python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _written(text: str, path: str | os.PathLike | None) -> str:
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text
