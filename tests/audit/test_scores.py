"""`tfdpfl audit`: what a file of scores shows is what the functions say of them, and a claim falls where it must."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

from tfdpfl.accounting import PrivacyLedger
from tfdpfl.audit import audit_epsilon, membership_inference, one_run_bounds
from tfdpfl.cli import main

rng = np.random.default_rng(0)
INSERTED = rng.random(1000) < 0.5
SCORES = rng.normal(size=1000) + 3 * INSERTED
OUTER, INNER = np.sort(SCORES[~INSERTED]), np.sort(SCORES[INSERTED])  # the order must not matter
DELTA = ("--delta", "1e-5")


def audit(*args):
    return CliRunner().invoke(main, ["audit", *map(str, args)])


@pytest.fixture
def files(tmp_path):
    np.savez(tmp_path / "coins.npz", scores=SCORES, inserted=INSERTED)
    np.savez(tmp_path / "groups.npz", members=INNER, non_members=OUTER)
    for name, which in (("coins.csv", "inserted"), ("groups.csv", "member")):
        rows = [f"{score!r},{int(inside)}" for score, inside in zip(SCORES.tolist(), INSERTED, strict=True)]
        (tmp_path / name).write_text("\n".join([f"score,{which}", *rows]), "utf-8")
    ledger = PrivacyLedger().record(1.1, epochs=1, num_examples=1000, batch_size=10)
    (tmp_path / "ledger.json").write_text(json.dumps(ledger.to_dict()), "utf-8")
    return tmp_path


@pytest.mark.parametrize("name", ["coins.npz", "coins.csv"])
def test_canaries_give_the_bounds_of_one_run(files, name):
    printed = json.loads(audit(files / name, *DELTA, "--json").output)
    bounds = one_run_bounds(SCORES, INSERTED, delta=1e-5)
    assert (printed["epsilon"], printed["epsilon_gaussian"]) == (bounds.epsilon, bounds.epsilon_gaussian)
    attack = membership_inference(None, -SCORES[INSERTED], -SCORES[~INSERTED])
    assert printed["membership"]["auc"] == attack.auc > 0.9
    assert printed["membership"]["tpr_at_low_fpr"] == attack.tpr_at_low_fpr
    text = audit(files / name, *DELTA).output
    assert text.startswith(f"epsilon ≥ {bounds.epsilon:.3f} at delta 1e-05 (95% confidence)")
    assert "TPR at FPR 1%" in text


@pytest.mark.parametrize("name", ["groups.npz", "groups.csv"])
def test_members_of_one_training_bound_nothing_and_of_many_do(files, name):
    done = audit(files / name)
    assert done.exit_code == 0 and "no bound" in done.output and "AUC" in done.output
    assert json.loads(audit(files / name, "--json").output)["epsilon"] is None
    refused = audit(files / name, "--epsilon", 1)
    assert (
        refused.exit_code == 2
        and "(AUC 0.983) give no bound on epsilon" in refused.output
        and "--one-training-each" in refused.output
    )
    found = json.loads(audit(files / name, "--one-training-each", *DELTA, "--json").output)
    # Two normals 3 apart, seen about 490 times each; sorted files would show one half of each alone.
    draw = lambda far, n: far + np.random.default_rng().normal(size=n)
    alike = audit_epsilon(draw, 3, 0, 490, 0.95, delta=1e-5, vectorized=True)
    assert found["epsilon"] == pytest.approx(alike, abs=1.2) and found["epsilon"] > 2


def test_a_claim_stands_or_falls_and_the_exit_code_says_so(files):
    bound = one_run_bounds(SCORES, INSERTED, delta=1e-5)
    between = (bound.epsilon + bound.epsilon_gaussian) / 2
    stands = audit(files / "coins.npz", *DELTA, "--epsilon", between)
    assert stands.exit_code == 0 and "stands" in stands.output and "proves nothing" in stands.output
    falls = audit(files / "coins.npz", *DELTA, "--epsilon", between, "--gaussian")
    assert falls.exit_code == 1 and "is refuted" in falls.output
    done = audit(files / "coins.npz", *DELTA, "--ledger", files / "ledger.json", "--json")
    ledger = PrivacyLedger.from_dict(json.loads((files / "ledger.json").read_text()))
    printed = json.loads(done.output)
    assert printed["claim"] == ledger.epsilon(1e-5) < bound.epsilon
    assert done.exit_code == 1 and printed["claim_stands"] is False


BAD = {
    "score,member\n1.0,2\n0.5,0\n": "must be one of each",
    "score,member\n1.0,\n": "holds no scores",
    "score,member\nnan,1\n1.0,0\n": "scores are not finite",
    "value,member\n1.0,1\n": "holds no scores",
    "": "holds no scores",
    "score,member\n1.0,1\n2.0,0\n": "at least two examples",
    "score,inserted\n1.0,1\n2.0,0\n3.0,1\n4.0,0\n": "at least 20 canaries",
}


@pytest.mark.parametrize("text", BAD)
def test_a_file_that_holds_no_scores_is_refused_in_one_line(tmp_path, text):
    (tmp_path / "bad.csv").write_text(text, "utf-8")
    done = audit(tmp_path / "bad.csv", *DELTA)
    assert done.exit_code == 2 and BAD[text] in done.output and len(done.output.splitlines()) == 1


@pytest.mark.parametrize(
    "args, words",
    [
        (("coins.npz",), "delta is missing"),
        (("coins.npz", "--delta", 2), "delta must be"),
        (("coins.npz", *DELTA, "--confidence", 1), "confidence must be"),
        (("coins.npz", *DELTA, "--epsilon", -1), "epsilon must be"),
        (("coins.npz", "--ledger", "ledger.json"), "--delta is missing. Give it."),
        (
            ("coins.npz", *DELTA, "--ledger", "ledger.json", "--epsilon", 1),
            "ledger.json and --epsilon 1 are two claims",
        ),
        (("coins.npz", *DELTA, "--ledger", "coins.csv"), "holds no ledger"),
        (("ledger.json", *DELTA), "holds no scores"),
        (("pickle.npz", *DELTA), "holds no scores"),
        (("flat.npz", *DELTA), "holds no scores"),
    ],
)
def test_bad_arguments_are_one_line(files, monkeypatch, args, words):
    monkeypatch.chdir(files)
    np.savez("pickle.npz", scores=np.array([{}, 1], object), inserted=np.array([True, False]))
    np.savez("flat.npz", scores=SCORES)
    done = audit(*args)
    assert done.exit_code == 2 and words in done.output and len(done.output.splitlines()) == 1, done.output


def test_a_membership_may_be_a_word(files):
    for true, false in (("True", "False"), ("true", "FALSE"), ("1.0", "0.0")):
        rows = [f"{s!r},{true if inside else false}" for s, inside in zip(SCORES.tolist(), INSERTED, strict=True)]
        (files / "words.csv").write_text("\n".join(["score,inserted", *rows]), "utf-8")
        assert audit(files / "words.csv", *DELTA).output == audit(files / "coins.csv", *DELTA).output
    (files / "words.csv").write_text("score,inserted\n1.0,perhaps", "utf-8")
    assert "could not convert string to float: 'perhaps'" in audit(files / "words.csv", *DELTA).output
