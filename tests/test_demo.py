"""The demo trains one model plainly and one by its plan, and prints both accuracies beside the plan's report."""

import json
import types

import numpy as np
import pytest

import tfdpfl
from tfdpfl import datasets, demo
from tfdpfl.accounting import privacy_report


@pytest.fixture
def trained(monkeypatch):
    """What is trained, and what was planned; CI runs the demo itself."""
    x, y = np.zeros((60, 8, 8, 1), np.float32), np.arange(60) % 10
    data = datasets.ImageData("digits", x, y, x[:20], y[:20], 10)
    report = privacy_report(num_examples=60, batch_size=30, noise_multiplier=2.0, num_steps=4, delta=1e-5)
    made = types.SimpleNamespace(report=report, fits=[])
    callback = types.SimpleNamespace(report=lambda: report)

    def plan(x, y, **how):
        made.planned = how
        return types.SimpleNamespace(
            epochs=how["num_epochs"], noise_multiplier=2.0, batches="batches", callback=callback,
            optimizer=lambda name, **more: ("private", name, more),
        )  # fmt: skip

    def trained(data, optimizer, **fit):
        made.fits.append((optimizer, fit))
        return {"val_accuracy": [0.5, 0.9 / len(made.fits)], "epsilon": [1.0, 2.0]}, 1.0

    monkeypatch.setattr(datasets, "load_digits", lambda: data)
    monkeypatch.setattr(tfdpfl, "plan", plan)
    monkeypatch.setattr(demo, "_trained", trained)
    made.callback = callback
    return made


def test_json_has_both_accuracies_and_the_report_of_the_plan(trained, tmp_path, capsys):
    made = demo.run(epochs=2, output=str(tmp_path / "demo.png"), as_json=True, seed=7)
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(made))
    assert (made["plain_accuracy"], made["private_accuracy"]) == (0.9, 0.45)
    assert made["privacy"] == trained.report.to_dict() and (tmp_path / "demo.png").stat().st_size > 1000
    assert trained.planned == {"target_epsilon": 3.0, "delta": 1e-5, "batch_size": 30, "num_epochs": 2,
                               "l2_norm_clip": 0.5, "seed": 7}  # fmt: skip
    (plain, by_arrays), (private, by_plan) = trained.fits
    assert not isinstance(plain, tuple) and "callbacks" not in by_arrays
    assert private[0] == "private" and private[2]["seed"] == 7
    assert by_plan["x"] == "batches" and by_plan["callbacks"] == [trained.callback] and by_plan["epochs"] == 2


def test_text_has_the_whole_statement(trained, tmp_path, capsys):
    demo.run(output=str(tmp_path / "demo.png"))
    said = capsys.readouterr().out
    assert "without privacy 90.0%   with 45.0%" in said and trained.report.statement() in said
    assert trained.planned["seed"] is None and trained.planned["num_epochs"] == 40
