"""`tfdpfl ledger` reads what servers and clients left, whole or broken, and never states less than was spent."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import DELTA, cost, epsilons, run
from dp_accounting import dp_event

from tfdpfl.accounting import PrivacyLedger
from tfdpfl.federated.clip import NoisedMetrics
from tfdpfl.federated.guarantees import ClientLevel, CorrelatedLevel, LocalLevel
from tfdpfl.federated.nbafl import NbAFLLevel
from tfdpfl.federated.privacy import Participation, RoundsRun
from tfdpfl.flower.journal import DamagedError, Journal, Record
from tfdpfl.noise import Banded

GOLDEN = Path(__file__).parent / "golden"
POISSON = {"sampling_rate": 0.25, "clients_per_round": None, "most": None, "apart": 1, "given": None}
BOUNDED = {"sampling_rate": None, "clients_per_round": 2, "most": 2, "apart": 2, "given": None}
FREE = {**BOUNDED, "most": None, "apart": 1}


def header(sampling=POISSON, privacy=None, **more):
    privacy = [ClientLevel(noise_multiplier=1.0)] if privacy is None else privacy
    return {"privacy": privacy, "noise_multiplier": 1.0, "clip": 0.5, "sampling": sampling, **more}


def journal(path, rounds=3, released=0, begun=False, **settings):
    made = Journal(path, header(**settings))
    for number in range(rounds):
        made.begin([str(number), "7"])
        made.charge(["7"])
    for _ in range(released):
        made.charge_evaluation()
    if begun:
        made.begin(["8"])
    made.close()
    return path


def epsilon_of(path, *more, code=0):
    found, complete = epsilons(path, *more, code=code)
    return next(iter(found.values())), complete


def poisson(rounds):
    return dp_event.PoissonSampledDpEvent(0.25, dp_event.GaussianDpEvent(1.0)), rounds


def test_epsilon_of_a_stopped_run_is_that_of_its_settings_and_rounds(tmp_path):
    assert epsilon_of(journal(tmp_path / "a", begun=True)) == (cost(poisson(3)), True)
    metrics = NoisedMetrics(noise_multiplier=4.0, bound={"loss": 1.0})
    path = tmp_path / "b"
    made = Journal(path, header(evaluations=metrics))
    made.begin(["1"])
    made.charge([])
    made.charge_evaluation()
    made.close()
    assert epsilon_of(path) == (cost(poisson(1), (dp_event.GaussianDpEvent(4.0), 1)), True)
    assert epsilon_of(journal(tmp_path / "c", sampling=FREE)) == (cost((dp_event.GaussianDpEvent(1.0), 3)), True)
    assert "adjacency zero_out" in run("epsilon", path, "--delta", DELTA, "--target-epsilon", 0.1, code=1)
    assert "'--target-epsilon'" in run("epsilon", path, "--delta", DELTA, "--target-epsilon", 0, code=2)
    assert "--delta must be strictly between 0 and 1, got 7.0" in run("epsilon", path, "--delta", 7, code=2)


def test_epsilon_of_limits_correlated_noise_and_nbafl(tmp_path):
    made = Journal(tmp_path / "a", header(BOUNDED))
    for cohort in (["1", "2"], ["3"], ["1"]):
        made.begin(cohort)
        made.charge(cohort)
    made.close()
    assert epsilon_of(tmp_path / "a") == (cost((dp_event.GaussianDpEvent(1.0), 2)), True)
    made = Journal(tmp_path / "over", header(BOUNDED))
    for _ in range(2):  # as no server does: the limits are those of the first line
        made.begin(["1"])
        made.charge(["1"])
    made.close()
    assert "min_separation" in run("epsilon", tmp_path / "over", "--delta", DELTA, code=2)
    noise = Banded(bands=2, coefficients=(1.0, 0.5), min_separation=2, max_participations=2)
    own = CorrelatedLevel(noise=noise, noise_multiplier=1.0)
    made = Journal(tmp_path / "b", header(BOUNDED, [own]))
    made.begin(["1"])
    made.charge([])
    made.close()
    p = Participation(
        sampling="bounded", population=2, clients_per_round=2, max_participations=2, min_separation=2
    )  # fmt: skip
    one = own.price(RoundsRun(rounds=1, participation=p, cohorts=[["1"]]), DELTA, "rdp").epsilon
    assert epsilon_of(tmp_path / "b") == (one, True)
    levels = [LocalLevel(noise_multiplier=2.0), NbAFLLevel(clip=1.0, sigma_u=2.0, sigma_d=0.0, clients_per_round=2)]
    journal(tmp_path / "c", sampling=FREE, privacy=levels)
    text = run("epsilon", tmp_path / "c", "--delta", DELTA)
    assert "(local level)" in text and "(client level)" in text and "replace_one" in text
    assert "NbAFL, which has no event" in run("merge", tmp_path / "c", "--output", tmp_path / "d", code=2)


def test_a_journal_of_a_run_without_a_round_is_no_ledger(tmp_path):
    path = journal(tmp_path / "new.jsonl", rounds=0)
    assert "ok (journal, 0 rounds, 1 of 1 lines with a hash)" in run("verify", path)
    assert epsilon_of(path) == (0, True)
    with pytest.raises(ValueError, match="saved must be what"):
        PrivacyLedger.from_dict(json.loads(path.read_text()))


def test_verify_sees_a_line_that_was_changed_lost_or_put_in(tmp_path):
    path = journal(tmp_path / "journal", rounds=4)
    assert "ok (journal, 4 rounds, 9 of 9 lines with a hash)" in run("verify", path)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = [*lines[:2], lines[2].replace(b'"7"', b'"6"'), *lines[3:]]
    without_hash = b'{"begin": 1, "cohort": ["9"]}\n'
    put_in = [[*lines[:3], more, *lines[3:]] for more in (lines[2], b"{}\n", without_hash)]
    for broken in (changed, lines[:3] + lines[5:], [*lines, without_hash.replace(b"1", b"4")], *put_in):
        path.write_bytes(b"".join(broken))
        assert "DAMAGED" in run("verify", path, code=1)
        with pytest.raises(DamagedError, match="Restore it"):
            Journal(path, header())
        spent, complete = epsilon_of(path, code=1)
        assert spent >= cost(poisson(4)) and not complete
        assert "would lack what is missing" in run("migrate", path, "--output", tmp_path / "new", code=2)
    last = lines[-1][:-2] + b', "replied": []}\n'  # behind its hash, in place of what the hash is of
    path.write_bytes(b"".join([*lines[:-1], last]))
    assert "its hash is not that of the lines" in run("verify", path, code=1)
    path.write_bytes(b"".join(lines) + b'{"begin": 4')  # a write that was cut off: nothing had happened yet
    assert "11 bytes of a line that was never whole" in run("verify", path)
    assert epsilon_of(path) == (cost(poisson(4)), True)


def test_a_line_that_cannot_be_read_counts_as_a_round_and_as_an_evaluation(tmp_path):
    metrics = NoisedMetrics(noise_multiplier=4.0, bound={"loss": 1.0})
    path = journal(tmp_path / "a", evaluations=metrics)
    path.write_bytes(path.read_bytes() + b"?\n?\n")
    assert epsilon_of(path, code=1) == (cost(poisson(5), (dp_event.GaussianDpEvent(4.0), 2)), False)


def test_verify_refuses_a_journal_whose_hashes_were_all_taken_off(tmp_path):
    path = journal(tmp_path / "journal", rounds=4)
    held = [json.loads(line) for line in path.read_text().splitlines()]
    bare = [json.dumps({name: value for name, value in line.items() if name != "sha256"}) for line in held]
    path.write_text("\n".join([*bare[:3], *bare[-2:]]).replace('"begin": 3', '"begin": 1').replace(
        '"charge": 3', '"charge": 1') + "\n")  # fmt: skip
    for command in (["verify"], ["epsilon", "--delta", DELTA]):
        assert "restore it from a backup" in run(*command, path, code=2)
    with pytest.raises(DamagedError, match="has no hash"):
        Journal(path, header())


def test_a_journal_before_its_first_round_is_a_journal(tmp_path):
    path = journal(tmp_path / "journal", rounds=0)
    assert "ok (journal, 0 rounds, 1 of 1 lines with a hash)" in run("verify", path)
    assert epsilon_of(path) == (0.0, True)
    run("migrate", path, "--output", tmp_path / "new")


def test_a_journal_older_than_its_model_counts_the_models_rounds(tmp_path):
    path = journal(tmp_path / "journal")
    np.savez(tmp_path / "journal.npz", about=np.array(json.dumps({"rounds": 5, "charged": 6})))
    assert "came after 6 charged rounds, but" in run("verify", path, code=1)
    assert epsilon_of(path, code=1) == (cost(poisson(6)), False)
    (tmp_path / "journal.npz").write_bytes(b"PK")
    assert json.loads(run("verify", path, "--json", code=1))[0]["faults"][0].endswith("Restore it from a backup.")


def test_files_of_every_format_are_inspected_verified_and_migrated(tmp_path):
    for folder in (GOLDEN, GOLDEN / "v1", GOLDEN / "v2"):
        for name in ("journal.jsonl", "ledger.json"):
            if not (folder / name).exists():
                continue
            old, new = tmp_path / name, tmp_path / f"{folder.name}-{name}"
            shutil.copy(folder / name, old)
            before = json.loads(run("inspect", old, "--json"))
            run("verify", old)
            run("migrate", old, "--output", new)
            after = json.loads(run("inspect", new, "--json"))
            assert after["version"] >= before["version"] and "written by: tfdpfl" in run("inspect", new)
            for what in ("rounds", "begun", "evaluations", "clients", "records", "steps"):
                assert after.get(what) == before.get(what)
            assert "exists, and could hold what was spent" in run("migrate", old, "--output", new, code=2)


def test_a_migrated_journal_and_the_model_beside_it_go_on(tmp_path):
    path, new = tmp_path / "journal", tmp_path / "new"
    shutil.copy(GOLDEN / "v1" / "journal.jsonl", path)
    old = Record().read(path.read_bytes(), "it")
    about = {"rounds": 1, "charged": len(old.charged), "ledger": old.chain.digest}
    np.savez(tmp_path / "journal.npz", about=np.array(json.dumps(about)), **{"array/w": np.arange(3)})
    (tmp_path / "journal.noise-1.npz").write_bytes(b"kept")
    run("migrate", path, "--output", new)
    assert "ok (journal" in run("verify", new)
    journal = Journal(new, old.header)
    assert journal.run == old.run  # so that a register knows it
    arrays, told = journal.load()
    assert arrays["w"].tolist() == [0, 1, 2] and told == {**about, "ledger": journal.chain.digest}
    assert (tmp_path / "new.noise-1.npz").read_bytes() == b"kept"
    journal.close()
    new.unlink()
    assert ".npz exists, and could hold" in run("migrate", path, "--output", new, code=2)


def test_merged_files_cost_their_sum(tmp_path):
    first, second = journal(tmp_path / "a"), journal(tmp_path / "b", rounds=2)
    run("merge", first, second, "--output", tmp_path / "both.json")
    assert epsilon_of(tmp_path / "both.json") == (cost(poisson(5)), True)
    assert "FILES protect a unit that is not stated and client, so" in run(
        "merge", first, tmp_path / "both.json", "--output", tmp_path / "all.json", code=2
    )


def test_what_cannot_be_read_exits_with_2_and_names_the_fix(tmp_path):
    path = tmp_path / "file"
    path.write_text("no ledger\n")
    assert "neither a ledger nor a journal of a server nor one of checkpoints. Give a file" in run(
        "inspect", path, code=2
    )
    path.write_text("")
    assert "Restore it from a backup" in run("verify", path, code=2)
    path.write_text(json.dumps({"version": 3, "written_by": "tfdpfl 9.1.0", "header": {}}) + "\n")
    assert "upgrade with pip install --upgrade tfdpfl" in run("verify", path, code=2)
    path.write_text(json.dumps({"header": {"privacy": ["Unheard(of=1)"], "sampling": POISSON}}) + "\n")
    assert "Unheard is no setting that this release knows" in run("epsilon", path, "--delta", DELTA, code=2)
