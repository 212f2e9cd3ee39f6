"""Files that an earlier release wrote are read by this one, and state the ε that they stated then.

`tests/golden/` holds one file of each format from before formats had versions, written at commit 2ced573, and
`tests/golden/v1/` those of version 1. Never write them anew: a new version of a format adds a folder next to them.
"""

import json
import shutil
from pathlib import Path

import conftest
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.accounting import PrivacyLedger, privacy_report
from tfdpfl.federated.guarantees import ClientLevel
from tfdpfl.flower.journal import Journal
from tfdpfl.reports import read, report

KERAS3 = conftest.keras3()
GOLDEN = Path(__file__).parent / "golden"
OWN = GOLDEN / ("keras3" if KERAS3 else "keras2")
EPSILONS = json.loads((OWN / "epsilons.json").read_text())
NEWER = json.loads((GOLDEN / "v1" / OWN.name / "epsilons.json").read_text())
VERSIONS = pytest.mark.parametrize("folder", [GOLDEN, GOLDEN / "v1"], ids=["no version", "version 1"])
DELTA = 1e-4


@pytest.mark.parametrize("name", ["fresh", "correlated"])
def test_a_saved_model_still_has_its_ledger(name):
    optimizer = tf.keras.models.load_model(OWN / f"{name}.keras").optimizer
    assert optimizer.ledger.epsilon(DELTA) == pytest.approx(EPSILONS[name], rel=1e-9)
    assert optimizer.num_dp_steps == {"fresh": 12, "correlated": 6}[name]


def test_a_saved_model_of_version_1_still_has_its_ledger():
    optimizer = tf.keras.models.load_model(GOLDEN / "v1" / OWN.name / "fresh.keras").optimizer
    assert optimizer.ledger.epsilon(DELTA) == pytest.approx(NEWER["fresh"], rel=1e-9)
    assert optimizer.num_dp_steps == NEWER["fresh_steps"] == 11


@pytest.mark.skipif(not KERAS3, reason="Keras 2 keeps the optimizer out of .weights.h5")
@VERSIONS
def test_saved_weights_still_have_their_ledger(folder):
    model = tf.keras.Sequential([tf.keras.Input((2,)), tf.keras.layers.Dense(1)])
    model.compile(tfdpfl.DPSGD(1.0, 2.0, learning_rate=0.1, expected_batch_size=12.0), loss="mse")
    model.load_weights(folder / OWN.name / "fresh.weights.h5")
    epsilon = (EPSILONS if folder == GOLDEN else NEWER)["fresh"]
    assert model.optimizer.ledger.epsilon(DELTA) == pytest.approx(epsilon, rel=1e-9)


@VERSIONS
def test_a_saved_config_still_makes_the_optimizer(folder):
    saved = json.loads((folder / OWN.name / "config.json").read_text())
    optimizer = tfdpfl.DPSGD.from_config(saved)
    settings = (optimizer.l2_norm_clip, optimizer.noise_multiplier, optimizer.expected_batch_size)
    assert settings == (1.0, 2.0, 12.0) and not optimizer.secure_noise and optimizer.noise is None
    assert saved.items() <= {**optimizer.get_config(), "saved_by": saved.get("saved_by")}.items()


@VERSIONS
@pytest.mark.one_stack
def test_a_saved_ledger_still_costs_the_same(folder):
    ledger = PrivacyLedger.from_dict(json.loads((folder / "ledger.json").read_text()))
    assert len(ledger) == EPSILONS["ledger_rows"]
    assert ledger.epsilon(DELTA, "rdp") == pytest.approx(EPSILONS["ledger"]["rdp"], rel=1e-9)
    assert read([folder / "ledger.json"]) == {"ledger": ledger}


@VERSIONS
@pytest.mark.one_stack
def test_a_saved_report_still_has_its_fields(folder):
    """Scripts read them: fields may be added, and none may go or change its meaning."""
    single = PrivacyLedger().record(1.5, steps=7, num_examples=60, batch_size=20)
    saved, now = (json.loads(text) for text in (
        (folder / "report.json").read_text(), report({"training": single}, delta=DELTA, title="Golden").to_json()
    ))  # fmt: skip
    assert saved.keys() <= now.keys() and saved["parts"][0].keys() <= now["parts"][0].keys()
    assert now["parts"][0]["figures"]["epsilon"] == pytest.approx(saved["parts"][0]["figures"]["epsilon"])
    run = dict(num_examples=60, batch_size=20, noise_multiplier=1.5, num_steps=7, delta=DELTA)
    saved, now = json.loads((folder / "privacy_report.json").read_text()), privacy_report(**run).to_dict()
    assert saved.keys() <= now.keys() and now["epsilon"] == pytest.approx(saved["epsilon"])


JOURNAL = {"privacy": [ClientLevel(noise_multiplier=1.0)], "noise_multiplier": 1.0, "clip": 0.5}


@VERSIONS
@pytest.mark.one_stack
def test_a_servers_journal_still_resumes(tmp_path, folder):
    path = tmp_path / "ledger.jsonl"
    shutil.copy(folder / "journal.jsonl", path)
    for _ in range(2):
        journal = Journal(path, JOURNAL)
        assert (journal.charged, journal.replied) == ([["1", "2"], ["2", "3"]], [["1", "2"], ["2", "3"]])
        assert (journal.evaluations, journal.begun) == (1, ["1", "3"])
        journal.close()
    stamps = [line for line in map(json.loads, path.read_text().splitlines()) if "version" in line]
    assert stamps[-1]["version"] == 2 and len(stamps) <= 2  # so that an older release sees what it cannot read
