"""A `tfdpfl.reports.ProjectReport` for readers: its sentences, and the HTML page. It prices nothing."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import TypeAlias

from tfdpfl._types import Axes, Report
from tfdpfl.accounting.report import ADJACENCY_TEXT, plain_words, rounded_up

__all__ = ["html", "other_terms", "rounded_down", "upper", "whose"]

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 62rem; margin: 0 auto;
  padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { font-size: 1.25rem; margin-top: 2rem; } h3 { font-size: 1.05rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide td, .wide th { overflow-wrap: normal; }
th, td { text-align: left; vertical-align: top; padding: .35rem .8rem .35rem 0; border-bottom: 1px solid #d5d5d5; }
td.n, th.n { text-align: right; white-space: nowrap; } img { max-width: 100%; height: auto; }
.warn { border-left: 4px solid #b3261e; background: #fbeceb; padding: .4rem .9rem; }
.quiet { color: #555; }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
_NONE = "–"
Rows: TypeAlias = Sequence[tuple[str, Report]]  # the names of parts and totals, and these


def upper(figures: Report) -> str:
    """ε for a reader, rounded up, or why there is none."""
    return f"none ({figures.missing})" if figures.epsilon is None else rounded_up(figures.epsilon)


def rounded_down(bound: float) -> str:
    """A lower bound with four decimals, never above its value."""
    return f"{math.floor(bound * 1e4) / 1e4:.4f}" if math.isfinite(bound) else "infinity"


def neighbours(adjacency: str, unit: str | None) -> str:
    """The neighbouring relation in English."""
    return ADJACENCY_TEXT[adjacency].replace("one example", f"one {unit or 'unit'}")


def whose(what: Report) -> str:
    """Names what a part, or a total, is a figure of."""
    return f"one {what.unit or 'unit (not recorded what)'}{_about(what)}, adjacency {what.adjacency}"


def _about(what: Report) -> str:
    """Names the data, or says that a total takes them to be the same in all parts."""
    if what.data is None:
        return " that is in all of them" if len(getattr(what, "parts", ())) > 1 else ""
    return f" of {what.data}"


def other_terms(figures: Report) -> list[str]:
    """The figure in other terms, and by other accountants, a line for each."""
    lines = []
    if figures.zcdp_rho is not None and 0 < figures.zcdp_rho < math.inf:
        lines.append(f"zCDP rho = {rounded_up(figures.zcdp_rho)}, GDP mu = {rounded_up(figures.gdp_mu)}")
    known = {name: value for name, value in figures.accountants.items() if value is not None}
    if len(known) > 1:
        lines.append("accountants: " + ", ".join(f"{name} {rounded_up(value)}" for name, value in known.items()))
    return lines


def html(report: Report) -> str:
    """Returns the page."""
    priced = [(" + ".join(t.parts), t) for t in report.totals if len(t.parts) > 1]
    rows = [*priced, *((part.name, part) for part in report.parts)]
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f"<p>Upper bounds on ε, rounded up, at δ = {report.delta:g} where no other is named.</p>",
        *_in_plain_words([(" + ".join(t.parts), t) for t in report.totals]),
        *(f'<p class="warn"><strong>Warning.</strong> {escape(warning)}</p>' for warning in report.warnings),
        *_promised(report, rows),
        *_by_delta(report, rows),
        *_other_accountants(rows),
        *_audits(report),
        *_utility(report),
        *_mechanisms(report),
        *_conditions(report),
    ]
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    body.append(f'<h2>Made with</h2><p class="quiet">{escape(versions)}</p>')
    return "\n".join(
        ["<!DOCTYPE html>", '<html lang="en">', "<head>", '<meta charset="utf-8">',
         f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
         '<meta name="viewport" content="width=device-width, initial-scale=1">',
         f"<title>{escape(report.title)}</title>", f"<style>{_STYLE}</style>", "</head>", "<body>", *body, "</body>",
         "</html>", ""]
    )  # fmt: skip


def _in_plain_words(rows: Rows) -> Iterable[str]:
    for name, what in rows:
        if what.unit is not None and what.figures.tpr_at_1_percent_fpr is not None:
            sentence = plain_words(what.unit, what.figures.tpr_at_1_percent_fpr)
            yield f"<p>{escape(name)}: {escape(sentence)}</p>"


def _promised(report: Report, rows: Rows) -> list[str]:
    table = _table(
        ["part", "ε", "protected", "neighbours", "what it is", "accountant"],
        (
            [name, upper(what.figures), _protected(what), neighbours(what.adjacency, what.unit),
             getattr(what, "kind", "together"), what.figures.accountant or _NONE]
            for name, what in rows
        ),
    )  # fmt: skip
    return ["<h2>What is promised</h2>", table, *(f"<p>{escape(sentence)}</p>" for sentence in report.not_added)]


def _by_delta(report: Report, rows: Rows) -> list[str]:
    section = ["<h2>ε at several δ</h2>", *_picture(report, rows)]
    priced = [(name, what.figures.epsilons) for name, what in rows if what.figures.epsilons]
    if not priced:
        return section
    head = ["part", *(f"δ = {delta:g}" for delta, _ in priced[0][1])]
    figures = ([name, *(_figure(epsilon) for _, epsilon in epsilons)] for name, epsilons in priced)
    return [*section, _table(head, figures, numbers=range(1, len(head)))]


def _other_accountants(rows: Rows) -> list[str]:
    names = list(dict.fromkeys(name for _, what in rows for name in what.figures.accountants))
    figures = (
        [name, *(_figure(what.figures.accountants.get(n)) for n in names), _figure(what.figures.zcdp_rho),
         _figure(what.figures.gdp_mu), _percent(what.figures.tpr_at_1_percent_fpr)]
        for name, what in rows
    )  # fmt: skip
    return [
        "<h2>Other accountants, other terms</h2>",
        "<p>Every one of these is a bound. An accountant without a figure does not know the mechanism, or proves no "
        "less than the other. ρ of zCDP and μ of Gaussian DP are of Gaussian noise without sampling alone. The last "
        "column is the largest share of members that a membership test can find if it takes 1 % of the non-members for "
        "members.</p>",
        _table(
            ["part", *names, "ρ (zCDP)", "μ (GDP)", "members found, at most"], figures, numbers=range(1, len(names) + 4)
        ),
    ]


def _audits(report: Report) -> list[str]:
    if not report.measured:
        return []
    found = (
        [m.name, m.text, _NONE if m.delta is None else f"{m.delta:g}",
         _NONE if m.lower_bound is None else rounded_down(m.lower_bound), _figure(m.claimed),
         "promise refuted" if m.refuted else "no contradiction"]
        for m in report.measured
    )  # fmt: skip
    return [
        "<h2>What audits found</h2>",
        "<p>Lower bounds, rounded down: no proof that the part is private, but one that it is not where they pass "
        "its promise.</p>",
        _table(["part", "found", "δ", "ε at least", "promised", "verdict"], found, numbers={2, 3, 4}),
    ]


def _utility(report: Report) -> list[str]:
    if not report.utility:
        return []
    shown = ([name, value if isinstance(value, str) else f"{value:.4g}"] for name, value in report.utility.items())
    return ["<h2>What it is good for</h2>", _table(["measure", "figure"], shown, numbers={1})]


def _mechanisms(report: Report) -> list[str]:
    section = ["<h2>Mechanism by mechanism</h2>"]
    for part in report.parts:
        lines = [*part.mechanisms, *([f"sampling: {part.sampling}"] if part.sampling else [])]
        section += [f"<h3>{escape(part.name)}</h3>", _list(lines)]
    return section


def _conditions(report: Report) -> list[str]:
    parts_of: dict[str, list[str]] = {}
    for part in report.parts:
        for note in part.notes:
            parts_of.setdefault(note, []).append(part.name)
    everyone = len(report.parts)
    lines = (note if len(of) == everyone else f"{', '.join(of)}: {note}" for note, of in parts_of.items())
    return ["<h2>What is protected, what is not, and what is taken for granted</h2>", _list(lines)]


def _protected(what: Report) -> str:
    return (what.unit or "not recorded") + _about(what)


def _figure(value: float | None) -> str:
    return _NONE if value is None else rounded_up(value)


def _percent(value: float | None) -> str:
    return _NONE if value is None else f"{rounded_up(min(100 * value, 100.0), 3)} %"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    right = set(numbers)

    def line(cells: Sequence[str], tag: str) -> str:
        made = (f"<{tag}{' class=n' if i in right else ''}>{escape(cell)}</{tag}>" for i, cell in enumerate(cells))
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join(line(row, "td") for row in rows)
    return f'<div class="wide"><table>\n<thead>{line(head, "th")}</thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _list(lines: Iterable[str]) -> str:
    made = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>\n{made}\n</ul>" if made else ""


def _picture(report: Report, rows: Rows) -> list[str]:
    curves = {name: [(d, e) for d, e in what.figures.epsilons if e is not None] for name, what in rows}
    curves = {name: points for name, points in curves.items() if any(e < math.inf for _, e in points)}
    if not curves:
        return ["<p>There is no finite ε to draw.</p>"]
    from tfdpfl import plots

    found = {m.name: (m.delta, m.lower_bound) for m in report.measured if m.lower_bound is not None and m.delta}
    try:
        axes = plots.epsilon_by_delta(curves, measured=found)
    except ImportError:
        return ['<p class="quiet">There is no picture: matplotlib is not installed.</p>']
    file = io.BytesIO()
    figure: Axes = axes.figure
    figure.savefig(file, format="png", dpi=150)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return [f'<p><img alt="ε against δ; the figures are in the table below" src="data:image/png;base64,{data}"></p>']
