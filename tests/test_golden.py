"""Files that an earlier release wrote are read by this one, and state the ε that they stated then.

`tests/golden/` holds one file of each format, written at commit 2ced573. Never write them anew: a change of a format
adds files next to them.
"""

import json
import shutil
from pathlib import Path

import conftest
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.accounting import PrivacyLedger, privacy_report
from tfdpfl.reports import read, report

KERAS3 = conftest.keras3()
GOLDEN = Path(__file__).parent / "golden"
OWN = GOLDEN / ("keras3" if KERAS3 else "keras2")
EPSILONS = json.loads((OWN / "epsilons.json").read_text())
DELTA = 1e-4


@pytest.mark.parametrize("name", ["fresh", "correlated"])
def test_a_saved_model_still_has_its_ledger(name):
    optimizer = tf.keras.models.load_model(OWN / f"{name}.keras").optimizer
    assert optimizer.ledger.epsilon(DELTA) == pytest.approx(EPSILONS[name], rel=1e-9)
    assert optimizer.num_dp_steps == {"fresh": 12, "correlated": 6}[name]


@pytest.mark.skipif(not KERAS3, reason="Keras 2 keeps the optimizer out of .weights.h5")
def test_saved_weights_still_have_their_ledger():
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(tfdpfl.DPSGD(1.0, 2.0, learning_rate=0.1, expected_batch_size=12.0), loss="mse")
    model.load_weights(OWN / "fresh.weights.h5")
    assert model.optimizer.ledger.epsilon(DELTA) == pytest.approx(EPSILONS["fresh"], rel=1e-9)


def test_a_saved_config_still_makes_the_optimizer():
    saved = json.loads((OWN / "config.json").read_text())
    optimizer = tfdpfl.DPSGD.from_config(saved)
    settings = (optimizer.l2_norm_clip, optimizer.noise_multiplier, optimizer.expected_batch_size)
    assert settings == (1.0, 2.0, 12.0) and not optimizer.secure_noise and optimizer.noise is None
    assert saved.items() <= optimizer.get_config().items()


@pytest.mark.one_stack
def test_a_saved_ledger_still_costs_the_same():
    ledger = PrivacyLedger.from_dict(json.loads((GOLDEN / "ledger.json").read_text()))
    assert len(ledger) == EPSILONS["ledger_rows"]
    assert ledger.epsilon(DELTA, "rdp") == pytest.approx(EPSILONS["ledger"]["rdp"], rel=1e-9)
    assert read([GOLDEN / "ledger.json"]) == {"ledger": ledger}


@pytest.mark.one_stack
def test_a_saved_report_still_has_its_fields():
    """Scripts read them: fields may be added, and none may go or change its meaning."""
    single = PrivacyLedger().record(1.5, steps=7, num_examples=60, batch_size=20)
    saved, now = (json.loads(text) for text in (
        (GOLDEN / "report.json").read_text(), report({"training": single}, delta=DELTA, title="Golden").to_json()
    ))  # fmt: skip
    assert saved.keys() <= now.keys() and saved["parts"][0].keys() <= now["parts"][0].keys()
    assert now["parts"][0]["figures"]["epsilon"] == pytest.approx(saved["parts"][0]["figures"]["epsilon"])
    run = dict(num_examples=60, batch_size=20, noise_multiplier=1.5, num_steps=7, delta=DELTA)
    saved, now = json.loads((GOLDEN / "privacy_report.json").read_text()), privacy_report(**run).to_dict()
    assert saved.keys() <= now.keys() and now["epsilon"] == pytest.approx(saved["epsilon"])


@pytest.mark.one_stack
def test_a_servers_journal_still_resumes(tmp_path):
    from tfdpfl.flower.journal import Journal

    path = tmp_path / "ledger.jsonl"
    shutil.copy(GOLDEN / "journal.jsonl", path)
    header = json.loads(path.read_text().splitlines()[0])["header"]
    journal = Journal(path, header)
    assert (journal.charged, journal.replied) == ([["1", "2"], ["2", "3"]], [["1", "2"], ["2", "3"]])
    assert (journal.evaluations, journal.begun) == (1, ["1", "3"])
    journal.close()
