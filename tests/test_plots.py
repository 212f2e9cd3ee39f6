"""Pictures show the numbers they are given, and say what is missing."""

import builtins
import math
import types

import pytest

from tfdpfl import plots
from tfdpfl.audit import membership_inference


def line(ax, label):
    (found,) = [artist for artist in ax.get_lines() if artist.get_label() == label]
    return list(found.get_xdata()), list(found.get_ydata())


def test_privacy_utility_sorts_by_epsilon_and_leaves_out_what_is_infinite(tmp_path):
    ax = plots.privacy_utility({"σ": [(4.0, 0.9), (1.0, 0.7), (math.inf, 0.95)]}, baseline=0.96, utility="AUC")
    assert line(ax, "σ") == ([1.0, 4.0], [0.7, 0.9])
    assert line(ax, "without privacy")[1] == [0.96, 0.96]
    assert ax.get_ylabel() == "AUC" and ax.get_xscale() == "log"
    ax.figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 1000


def test_auc_bars_draw_each_report_with_its_interval(tmp_path):
    report = membership_inference(None, [0.1, 0.5, 0.2, 0.9], [0.4, 1.0, 2.0])
    ax = plots.auc_bars({"plain": {"North Ward": report, "South": 0.75}, "private": {"North Ward": 0.5, "South": 0.6}})
    assert [bar.get_height() for bars in ax.containers if hasattr(bars, "patches") for bar in bars] == [
        report.auc, 0.75, 0.5, 0.6,
    ]  # fmt: skip
    (errors,) = [c for c in ax.containers if not hasattr(c, "patches")]
    (segments,) = errors.lines[2]
    assert segments.get_segments()[0][:, 1] == pytest.approx(report.auc_interval)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["North\nWard", "South"]
    ax.figure.savefig(tmp_path / "a.png")


def test_noise_errors_draws_the_pairs_of_least_error_with_a_color_for_each_sampling():
    of = lambda text: types.SimpleNamespace(text=lambda: text)
    pairs = [("B", 4.0, "poisson"), ("A", 2.0, "fixed_order"), ("C", 9.0, "poisson"), ("D", 3.0, "poisson")]
    ax = plots.noise_errors([types.SimpleNamespace(noise=of(n), error=e, sampling=s) for n, e, s in pairs], most=3)
    bars = [bar for bars in ax.containers for bar in bars]
    assert [bar.get_width() for bar in bars] == [2.0, 3.0, 4.0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["A", "D", "B"] and ax.yaxis_inverted()
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["fixed_order", "poisson"]
    assert bars[1].get_facecolor() == bars[2].get_facecolor() != bars[0].get_facecolor()


def test_epsilon_over_time_draws_every_level_and_the_budget():
    ax = plots.epsilon_over_time(
        {"loss": [3, 2], "client_epsilon": [0.5, 0.7], "example_epsilon": [math.nan, 2.0]}, target=3.0
    )
    assert line(ax, "ε, client level") == ([1, 2], [0.5, 0.7])
    assert line(ax, "ε, example level") == ([2], [2.0])
    assert line(ax, "budget")[1] == [3.0, 3.0]
    assert ax.get_xlabel() == "round"


def test_what_keras_fit_returns_is_drawn_too():
    fit = types.SimpleNamespace(history={"loss": [1.0], "epsilon": [0.3]})
    assert line(plots.epsilon_over_time(fit), "ε") == ([1], [0.3])


def test_a_second_history_in_the_same_axes_is_seen_whole():
    ax = plots.epsilon_over_time({"client_epsilon": [0.5, 0.7]})
    plots.epsilon_over_time({"client_epsilon": [1.0, 4.0]}, ax=ax)
    low, high = ax.get_ylim()
    assert low == 0 and 4.0 <= high < 5.0


def test_panels_share_a_figure():
    first, second = plots.panels(2)
    assert first.figure is second.figure


def test_a_given_axes_is_used():
    ax = plots.privacy_utility({"a": [(1, 1)]})
    assert plots.epsilon_over_time({"epsilon": [1]}, ax=ax) is ax


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: plots.privacy_utility({"a": [(math.inf, 1), (0, 1)]}), "no ε between 0 and infinity"),
        (lambda: plots.auc_bars({}), "at least one"),
        (lambda: plots.auc_bars({"a": {"x": 1}, "b": {"y": 1}}), "same groups"),
        (lambda: plots.noise_errors([]), "lines is empty"),
        (lambda: plots.epsilon_over_time({"loss": [1]}), r"no column of ε, but \['loss'\]"),
    ],
)
def test_bad_input_is_named_with_its_mend(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_without_matplotlib_the_message_has_the_command_that_installs_it(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"pip install 'tfdpfl\[plots\]'"):
        plots.privacy_utility({"a": [(1, 1)]})
