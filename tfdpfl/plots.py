"""Pictures of privacy: utility against ε, attack AUCs, ε over a training. They need matplotlib, loaded when used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from tfdpfl.accounting.correlated import Compared
    from tfdpfl.audit.membership import MembershipReport

__all__ = [
    "auc_bars",
    "epsilon_by_delta",
    "epsilon_over_time",
    "membership",
    "noise_errors",
    "panels",
    "privacy_utility",
]

_EPSILON = "_epsilon"  # the end of the names of History's columns


def privacy_utility(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    baseline: float | None = None,
    utility: str = "accuracy",
    ax: Axes | None = None,
) -> Axes:
    """Draws utility against ε, a line for each curve, on a logarithmic axis.

    Args:
      curves: for each name, pairs of (ε, utility), in any order. An infinite ε is left out: it is the baseline.
      baseline: the utility without privacy, a dotted line.
      utility: what the vertical axis is called.
      ax: where to draw; None makes a new figure, which is ``.figure`` of the result.

    Raises:
      ImportError: matplotlib is missing; the message has the command that installs it.
      ValueError: a curve has no finite, positive ε.
    """
    ax = ax or _axes()
    for name, points in curves.items():
        shown = sorted((e, u) for e, u in points if 0 < e < np.inf)
        if not shown:
            raise ValueError(f"curves[{name!r}] has no ε between 0 and infinity, got {list(points)}: leave it out")
        ax.plot(*zip(*shown, strict=True), marker="o", label=name)
    if baseline is not None:
        ax.axhline(baseline, color="0.5", linestyle=":", label="without privacy")
    ax.set(xlabel="ε", ylabel=utility, xscale="log")
    _write_numbers(ax.xaxis)
    ax.legend()
    return ax


def auc_bars(reports: Mapping[str, Mapping[str, MembershipReport | float]], *, ax: Axes | None = None) -> Axes:
    """Draws the AUC of membership inference as bars in groups, with a line at 0.5, where an attack only guesses.

    Args:
      reports: for each series (a colour), for each group (a place), a `tfdpfl.audit.MembershipReport`, whose interval
        is drawn, or a number. All series have the same groups.
      ax: as in `privacy_utility`.

    Raises:
      ImportError: as `privacy_utility`.
      ValueError: there is nothing to draw, or the groups differ.
    """
    groups = list(next(iter(reports.values()), {}))
    if not groups or any(list(series) != groups for series in reports.values()):
        raise ValueError("reports must have the same groups, at least one, in every series: fill in what is missing")
    ax = ax or _axes()
    width = 0.8 / len(reports)
    for i, (name, series) in enumerate(reports.items()):
        values = np.array([float(getattr(report, "auc", report)) for report in series.values()])  # type: ignore[arg-type]
        intervals = [getattr(report, "auc_interval", (v, v)) for report, v in zip(series.values(), values, strict=True)]
        errors = np.abs(np.array(intervals).T - values)
        places = np.arange(len(groups)) + (i - (len(reports) - 1) / 2) * width
        ax.bar(places, values, width, yerr=errors if errors.any() else None, capsize=3, label=name)
    ax.axhline(0.5, color="0.5", linestyle=":")
    ax.set_xticks(np.arange(len(groups)), [group.replace(" ", "\n") for group in groups])
    ax.set(ylabel="membership inference AUC", ylim=(0, 1))
    ax.legend()
    return ax


def membership(report: MembershipReport, *, most: int = 20) -> list[Axes]:
    """Draws what a membership attack reaches at every threshold, on logarithmic axes, and where there are slices their
    AUC with its interval.

    Args:
      report: a `tfdpfl.audit.MembershipReport`.
      most: how many slices are shown, those of the highest AUC.

    Returns:
      One axes or two, of one figure.

    Raises:
      ImportError: as `privacy_utility`.
      ValueError: ``report`` has no curve.
    """
    fpr, tpr = getattr(report, "roc", ((), ()))
    if not len(fpr):
        raise ValueError("report has no curve to draw: give what tfdpfl.audit.membership_inference returned")
    axes = panels(2 if report.slices else 1)
    least = 1 / max(report.num_members, report.num_non_members)
    axes[0].step(np.maximum(fpr, least), np.maximum(tpr, least), where="post", label=report.attack)
    axes[0].plot([least, 1], [least, 1], ":", color="0.5", label="guessing")
    axes[0].plot(report.fpr, report.tpr_at_low_fpr, "o", color="C0")
    axes[0].set(xscale="log", yscale="log", xlabel="share of non-members accused", ylabel="share of members found")
    for axis in (axes[0].xaxis, axes[0].yaxis):
        _write_numbers(axis)
    axes[0].legend(loc="lower right")
    for ax in axes[1:]:
        _draw_slices(report, most, ax)
    return axes


def _draw_slices(report: MembershipReport, most: int, ax: Axes) -> None:
    shown = sorted(report.slices.items(), key=lambda item: -item[1].auc)[:most]
    places, values = np.arange(len(shown))[::-1], np.array([part.auc for _, part in shown])
    errors = np.abs(np.array([part.auc_interval for _, part in shown]).T - values)
    ax.errorbar(values, places, xerr=errors, fmt="o", capsize=3)
    ax.axvline(0.5, color="0.5", linestyle=":")
    ax.axvline(report.auc, color="C0", alpha=0.4, label="all")
    ax.set_yticks(places, [_plain(name) for name, _ in shown])
    ax.set(xlabel="AUC")
    ax.legend()


def epsilon_over_time(history: Any, *, target: float | None = None, ax: Axes | None = None) -> Axes:
    """Draws ε over the rounds of a federated training, or the epochs of `fit`.

    Args:
      history: a `tfdpfl.federated.History`; what Keras's `fit` returns with `tfdpfl.callbacks.PrivacyBudget`; or a
        mapping from column names to values. Drawn are ``epsilon`` and every column whose name ends in ``_epsilon``, but
        for NaN.
      target: a budget, drawn as a line.
      ax: as in `privacy_utility`.

    Raises:
      ImportError: as `privacy_utility`.
      ValueError: there is no such column.
    """
    columns = getattr(history, "history", history)
    shown = {name: columns[name] for name in columns if name == "epsilon" or name.endswith(_EPSILON)}
    if not shown:
        raise ValueError(f"history has no column of ε, but {list(columns)}: was the training private?")
    ax = ax or _axes()
    for name, values in shown.items():
        level = name.removesuffix(_EPSILON)
        known = [(i, value) for i, value in enumerate(values, start=1) if not np.isnan(value)]
        ax.plot(*zip(*known, strict=True), marker=".", label="ε" if level == "epsilon" else f"ε, {level} level")
    if target is not None:
        ax.axhline(target, color="0.5", linestyle=":", label="budget")
    ax.autoscale(axis="y")  # for what was there before, too
    ax.set(xlabel="epoch" if "epsilon" in shown else "round", ylabel="ε", ylim=(0, None))
    if ax.get_xscale() == "linear":
        ax.locator_params(axis="x", integer=True)
    ax.legend()
    return ax


def epsilon_by_delta(
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    measured: Mapping[str, tuple[float, float]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """Draws ε against δ on a logarithmic axis, a line for each part of a project.

    Args:
      curves: for each name, pairs of (δ, ε), in any order; an infinite ε is left out.
      measured: for each name, a pair of (δ, lower bound on ε) that an audit found, drawn as a triangle.
      ax: as in `privacy_utility`.

    Raises:
      ImportError: as `privacy_utility`.
      ValueError: no curve has a finite ε.
    """
    shown = {name: sorted((d, e) for d, e in points if e < np.inf) for name, points in curves.items()}
    if not any(shown.values()):
        raise ValueError("curves has no finite ε to draw: leave it out")
    ax = ax or _axes()
    colors = {}
    for name, points in shown.items():
        if points:
            (line,) = ax.plot(*zip(*points, strict=True), marker="o", label=_plain(name))
            colors[name] = line.get_color()
    for name, (delta, bound) in (measured or {}).items():
        color, label = colors.get(name, "0.3"), f"found by an audit: {_plain(name)}"
        ax.plot(delta, bound, "^", markersize=10, markeredgecolor="k", color=color, label=label)
    ax.set(xlabel="δ", ylabel="ε", xscale="log", ylim=(0, None))
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)  # over no curve
    return ax


def noise_errors(lines: Sequence[Compared], *, most: int = 12, ax: Axes | None = None) -> Axes:
    """Draws which pair of noise and sampling disturbs a training least, a bar for each pair and a color for each
    sampling.

        tfdpfl.plots.noise_errors(tfdpfl.noise.compare(640, 64, 10))

    Args:
      lines: what `tfdpfl.noise.compare` returned.
      most: how many pairs are shown, those of the least error.
      ax: as in `privacy_utility`.

    Raises:
      ImportError: as `privacy_utility`.
      ValueError: there is nothing to draw.
    """
    shown = sorted(lines, key=lambda line: line.error)[:most]
    if not shown:
        raise ValueError("lines is empty: pass what tfdpfl.noise.compare returned, and most of at least 1")
    ax = ax or _axes()
    colors: dict[str, str] = {}
    for place, line in enumerate(shown):
        label = None if line.sampling in colors else line.sampling
        color = colors.setdefault(line.sampling, f"C{len(colors)}")
        bar = ax.barh(place, line.error, color=color, label=label)
        ax.bar_label(bar, fmt="{:.3g}", padding=2)
    ax.set_yticks(range(len(shown)), [line.noise.text() for line in shown])
    ax.invert_yaxis()
    ax.set(xlabel="error of the running sums, in clips")
    ax.margins(x=0.12)
    ax.legend(loc="upper center", bbox_to_anchor=(0.25, -0.2), ncols=2, columnspacing=1)  # over no bar
    return ax


def panels(count: int) -> list[Axes]:
    """So many axes (`count`) side by side in a new figure, which is ``.figure`` of each.

    Raises:
      ImportError: as `privacy_utility`.
    """
    try:
        # Not pyplot: no global state, no window, and a figure is gone with its last reference.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"tfdpfl.plots draws with matplotlib, which cannot be imported ({error}): pip install 'tfdpfl[plots]'"
        ) from error
    return list(Figure(figsize=(7 * count, 4.2), layout="constrained").subplots(1, count, squeeze=False)[0])


def _write_numbers(axis: Axis) -> None:
    """Labels a logarithmic axis with 0.5 rather than 5 × 10⁻¹."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _axes() -> Axes:
    return panels(1)[0]


def _plain(name: str) -> str:
    """A name as it is: a dollar begins no formula, and one that begins with an underscore is in the legend."""
    text = name.replace("$", r"\$")
    text = text if len(text) <= 40 else f"{text[:39]}…"
    return f" {text}" if text.startswith("_") else text
