"""`tfdpfl ledger` reads the ledger of a checkpoint_dir, without TFF, and never states less than was spent."""

import json
import shutil
from pathlib import Path

import pytest
from commands import DELTA, cost, epsilons, run
from dp_accounting import dp_event

from tfdpfl import _formats
from tfdpfl._chain import Chain
from tfdpfl.federated.checkpoints import VERSION, Record, Round, runs
from tfdpfl.federated.guarantees import ClientLevel, DistributedLevel, ExampleLevel, LocalLevel, TreeLevel
from tfdpfl.federated.privacy import Participation, RoundsRun
from tfdpfl.flower.journal import Journal

GOLDEN = Path(__file__).parents[1] / "golden"
POISSON = Participation(sampling="poisson", population=8, clients_per_round=2.0)
LIMITED = Participation(sampling="bounded", population=8, clients_per_round=2, max_participations=2, min_separation=2)
CLIENT = ClientLevel(noise_multiplier=1.5)
EXAMPLES = ExampleLevel(noise_multiplier=1.5, batch_size=5.0, local_steps=2)
COHORTS = [["a", "b"], ["c"], ["a"], ["b"]]
SKELLAM = DistributedLevel(l1=1e3, l2=1e3, local_stddev=4e3)
SAMPLER = {"kind": "PoissonClientSampler", "key": "0123456789abcdef", "population": 8}


def line_of(number, cohort, absent=(), examples=None):
    return {"round": number, "cohort": cohort, "absent": dict.fromkeys(absent, "gone"), "examples": examples or {}}


def made(folder, privacy=(CLIENT,), participation=POISSON, lines=None, states=(), version=VERSION):
    """A folder as `train` leaves it, with a line for each state of ``states``."""
    folder.mkdir()
    header = {"privacy": list(privacy), "participation": participation, "clip": 1.0, "metrics": None}
    lines = [line_of(*row) for row in enumerate(COHORTS)] if lines is None else lines
    told = [{**_formats.stamp(version), **_formats.describe(header), "sampler": SAMPLER}, *lines]
    for state in states if version > 1 else ():
        ended = [place for place, line in enumerate(told, 1) if line.get("round") == state - 1]
        if ended:
            told.insert(ended[-1], {"saved": state})
    write(folder / "ledger.jsonl", told, version > 1)
    for number in states:
        (folder / f"state_{number}").mkdir()
    return folder


def write(path, lines, sealed=True):
    chain = Chain()
    with path.open("wb") as file:
        for line in lines:
            text = chain.seal(line) if sealed else json.dumps(line).encode() + b"\n"
            chain.add(text)
            file.write(text)


def poisson(rounds, rate=0.25):
    return dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(1.5)), rounds


def gaussian(rounds, noise=1.5):
    return dp_event.GaussianDpEvent(noise), rounds


def test_epsilon_of_a_stopped_training_is_that_of_its_complete_rounds(tmp_path):
    stopped = made(tmp_path / "a", states=[2, 3])  # the fourth round began
    assert epsilons(stopped) == ({"client": pytest.approx(cost(poisson(3)))}, True)
    assert epsilons(stopped / "ledger.jsonl") == epsilons(stopped)
    assert "(client level) at delta 1e-05, adjacency zero_out" in run("epsilon", stopped, "--delta", DELTA)
    assert "ok (checkpoints, 3 rounds, 7 of 7 lines with a hash)" in run("verify", stopped)
    epsilons(stopped, "--target-epsilon", 0.1, code=1)
    alone = shutil.copy(stopped / "ledger.jsonl", tmp_path / "copy")  # nothing shows which rounds are complete
    assert epsilons(alone) == ({"client": pytest.approx(cost(poisson(4)))}, True)


def test_rounds_that_were_lost_count_once_more_where_clients_add_the_noise(tmp_path):
    local = LocalLevel(noise_multiplier=3.0)
    lines = [line_of(0, ["a", "b"]), line_of(1, ["a"]), line_of(1, ["a"]), line_of(2, ["c"])]
    spent, complete = epsilons(made(tmp_path / "a", [CLIENT, local], lines=lines, states=[2, 3]))
    # The client "a" sent three times; where a client is replaced, the noise is half of its distance.
    assert complete and spent["local"] == pytest.approx(cost(gaussian(3, 1.5), adjacency="replace_one"))
    assert spent["client"] == pytest.approx(cost(poisson(3)))
    assert '"repeated": 1' in run("inspect", tmp_path / "a", "--json")


def test_a_round_that_clients_sent_twice_keeps_to_no_limit_of_theirs():
    begun = [Round(number, cohort) for number, cohort in enumerate(COHORTS)]
    local, server = LocalLevel(noise_multiplier=1.5), CLIENT
    once = runs([local], LIMITED, begun, 4)["local"][1]
    assert once.participation == LIMITED and once.cohorts == COHORTS
    found = runs([local, server], LIMITED, [*begun, begun[3]], 4)
    assert found["local"][1].participation == LIMITED.unlimited()
    assert found["local"][1].cohorts == [*COHORTS, COHORTS[3]]
    assert found["client"][1].participation == LIMITED and found["client"][1].cohorts == COHORTS
    to_come = runs([local, server], LIMITED, begun, 4, Round(4, ["d"]))
    assert [run.cohorts for _, run in to_come.values()] == [[*COHORTS, ["d"]]] * 2


def test_the_client_with_the_most_steps_at_the_highest_rate_has_the_epsilon_of_examples(tmp_path):
    rows = [({"a": 50, "b": 20}, ()), ({"c": 50}, ()), ({"a": 50}, ()), ({"b": 20}, ["b"])]
    lines = [line_of(i, [*held], absent, held) for i, (held, absent) in enumerate(rows)]
    spent, _ = epsilons(made(tmp_path / "a", [EXAMPLES], lines=lines, states=[4]))
    both = [cost(poisson(2 * 2, 0.1)), cost(poisson(1 * 2, 0.25))]  # a twice; b came once, and was absent once
    assert spent == {"example": pytest.approx(max(both))}


def test_verify_compares_the_rounds_with_the_states(tmp_path):
    older = made(tmp_path / "a", states=[1, 2])
    assert "3 rounds whose state was saved, but the newest state came after 2." in run("verify", older, code=1)
    assert epsilons(older, code=1) == ({"client": pytest.approx(cost(poisson(4)))}, True)
    last = made(tmp_path / "d", states=[3, 4])
    (last / "state_4").rmdir()  # its round was shown, and would run again
    assert "ledger.jsonl has 4 rounds whose state was saved" in run("verify", last, code=1)
    assert epsilons(last, code=1) == ({"client": pytest.approx(cost(poisson(4)))}, True)
    newer = made(tmp_path / "b", states=[5, 6])
    assert "so rounds are missing from epsilon" in run("verify", newer, code=1)
    assert epsilons(newer, code=1) == ({"client": pytest.approx(cost(poisson(6)))}, False)
    none = made(tmp_path / "c")
    assert "the newest state came after 0." in run("verify", none, code=1)
    assert "ok (checkpoints, 4 rounds, " in run("verify", none / "ledger.jsonl")


def test_verify_compares_the_ledger_with_the_hash_that_its_state_came_with(tmp_path):
    folder = made(tmp_path / "a", states=[3, 4])
    tensors = folder / "state_4" / "variables" / "variables.data-00000-of-00001"
    tensors.parent.mkdir()
    for digest in sorted(Record((folder / "ledger.jsonl").read_bytes(), "it").chain.digests)[:2]:
        tensors.write_bytes(b"\0\1weights" + json.dumps({"rows": [], "ledger": digest}).encode() + b"\2more weights")
        assert "ok (checkpoints, 4 rounds, " in run("verify", folder)
    tensors.write_bytes(json.dumps({"rows": [], "ledger": "0" * 64}).encode())
    assert "lacks lines that it had when state_4 was saved" in run("verify", folder, code=1)
    assert epsilons(folder, code=1) == ({"client": pytest.approx(cost(poisson(4)))}, False)


def test_a_round_that_version_1_cannot_say_was_lost_counts_as_shown_each_time(tmp_path):
    lines = [line_of(0, ["a"]), line_of(1, ["b"]), line_of(1, ["b"]), line_of(1, ["b"]), line_of(2, ["c"])]
    for name, level, participation, wanted in [
        ("a", CLIENT, POISSON, [poisson(1), (dp_event.PoissonSampledDpEvent(
            0.25, dp_event.GaussianDpEvent(1.5 / 3**0.5)), 1), poisson(1)]),
        ("b", CLIENT, LIMITED, [gaussian(2 - 1 + 3)]),
        ("c", TreeLevel(noise_multiplier=8.0), LIMITED, [gaussian(1, 8.0 / (3 * 3) ** 0.5)]),
    ]:  # fmt: skip
        folder = made(tmp_path / name, [level], participation, lines, states=[2], version=1)  # the last may be shown
        assert epsilons(folder) == ({"client": pytest.approx(cost(*wanted))}, True)
        assert "ok (checkpoints, 3 rounds, 0 of 6 lines with a hash)" in run("verify", folder)


def test_a_damaged_ledger_counts_every_round_that_it_can_have_had(tmp_path):
    whole = made(tmp_path / "a", states=[3, 4])
    path = whole / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    changed = lines[1].replace('"a"', '"c"')
    bare = [line[: line.rindex(", ")] + "}\n" for line in lines]
    for broken in ([*lines[:2], "{\n", *lines[3:]], lines[:2] + lines[3:], [*lines[:-1], '{"saved": 3}\n'],
                   [lines[0], changed, *lines[2:]], bare):  # fmt: skip
        path.write_text("".join(broken))
        assert "DAMAGED" in run("verify", whole, code=1)
        spent, complete = epsilons(whole, code=1)
        assert spent == {"client": pytest.approx(cost(poisson(4)))} and not complete
    alone = tmp_path / "copy"
    alone.write_text("".join(lines[:3]) + "{\n{\n")  # nothing else shows how many there were
    assert epsilons(alone, code=1) == ({"client": pytest.approx(cost(poisson(4)))}, False)
    path.write_text("".join(lines) + '{"round": 4')  # a write that was cut off: the round did not run
    assert "11 bytes of a line that was never whole" in run("verify", whole)
    path.write_text("{\n" + "".join(lines[1:]))
    assert "neither a ledger nor" in run("epsilon", whole, "--delta", DELTA, code=2)


def test_rounds_that_ran_again_from_an_older_state_have_no_amplification(tmp_path):
    lines = [line_of(number, ["a"]) for number in (0, 1, 2, 1)]
    rewound = made(tmp_path / "a", lines=lines, states=[1, 2])
    assert "round 1 cannot follow round 2" in run("verify", rewound, code=1)
    assert epsilons(rewound, code=1) == ({"client": pytest.approx(cost(gaussian(4)))}, False)
    tree = made(tmp_path / "b", [TreeLevel(noise_multiplier=8.0)], LIMITED, lines, states=[1, 2])
    assert epsilons(tree, code=1)[0] == {"client": "inf"}


def test_rounds_of_unknown_clients_are_the_worst_that_their_level_allows(tmp_path):
    first = line_of(0, ["a", "b"], ["b"], {"a": 50, "b": 20})
    lines = [first, line_of(2, ["c"], (), {"c": 40})]  # round 1 is lost
    limits = [
        (TreeLevel(noise_multiplier=8.0), LIMITED, lambda level: level.price(
            RoundsRun(rounds=3, participation=LIMITED), DELTA, "rdp").epsilon),
        (LocalLevel(noise_multiplier=3.0), LIMITED, lambda _: cost(gaussian(3, 1.5), adjacency="replace_one")),
        (EXAMPLES, LIMITED, lambda _: cost(poisson(2 * 3, 5 / 20))),
        (SKELLAM, POISSON, lambda level: level.price(RoundsRun(
            rounds=3, participation=Participation(sampling="none", population=8, clients_per_round=2.0),
            cohorts=[["1"], ["2"], ["3"]]), DELTA).epsilon),
    ]  # fmt: skip
    for number, (level, participation, wanted) in enumerate(limits):
        folder = made(tmp_path / str(number), [level], participation, lines, states=[2, 3])
        spent, complete = epsilons(folder, code=1)
        assert spent == {level.level: pytest.approx(wanted(level))} and not complete


def test_inspect_names_no_client_and_no_key(tmp_path):
    text = run("inspect", made(tmp_path / "a", states=[3]), "--json")
    told = json.loads(text)
    assert {name: told[name] for name in ("kind", "version", "rounds", "begun", "clients")} == {
        "kind": "checkpoints", "version": 2, "rounds": 3, "begun": 1, "clients": 3,
    }  # fmt: skip
    assert told["most_rounds_of_a_client"] == 2 and told["written_by"].startswith("tfdpfl")
    assert SAMPLER["key"] not in text and not any(f'"{client}"' in text for client in "abc")


@pytest.mark.parametrize(("release", "hashed"), [("", "0 of 3"), ("v1", "0 of 3"), ("v2", "5 of 5")])
def test_ledgers_of_every_release_are_read(release, hashed):
    path = GOLDEN / release / "checkpoints.jsonl"
    assert f"ok (checkpoints, 2 rounds, {hashed} lines with a hash)" in run("verify", path)
    assert epsilons(path) == ({"client": pytest.approx(cost(gaussian(2)))}, True)
    assert "noise_multiplier" in run("inspect", path)


def test_checkpoints_merge_with_what_protects_the_same_unit(tmp_path):
    first, second = made(tmp_path / "a", states=[4]), made(tmp_path / "b", [CLIENT], LIMITED, states=[4])
    run("merge", first, second, "--output", tmp_path / "both.json")
    assert epsilons(tmp_path / "both.json")[0] == {None: pytest.approx(cost(poisson(4), gaussian(2)))}
    local = made(tmp_path / "c", [LocalLevel(noise_multiplier=3.0)], states=[4])
    assert "FILES protect client and local" in run("merge", first, local, "--output", tmp_path / "d", code=2)
    run("merge", local, "--output", tmp_path / "h.json")
    assert "adjacency replace_one" in run("epsilon", tmp_path / "h.json", "--delta", DELTA)
    examples = made(tmp_path / "e", [EXAMPLES], states=[4])
    assert "total_price" in run("merge", examples, "--output", tmp_path / "f", code=2)
    assert "goes on with the folder as it is" in run("migrate", first, "--output", tmp_path / "g", code=2)


def test_checkpoints_merge_with_the_journal_of_a_server_that_protects_clients(tmp_path):
    sampling = {"sampling_rate": 0.5, "clients_per_round": None, "most": None, "apart": 1, "given": None}
    header = {
        "privacy": [ClientLevel(noise_multiplier=1.0)],
        "noise_multiplier": 1.0,
        "clip": 0.5,
        "sampling": sampling,
    }
    journal = Journal(tmp_path / "journal", header)
    journal.begin(["a"])
    journal.charge(["a"])
    journal.close()
    run("merge", made(tmp_path / "a", states=[4]), tmp_path / "journal", "--output", tmp_path / "both.json")
    one = dp_event.PoissonSampledDpEvent(0.5, dp_event.GaussianDpEvent(1.0)), 1
    assert epsilons(tmp_path / "both.json")[0] == {None: pytest.approx(cost(poisson(4), one))}


def test_what_is_no_checkpoint_dir_exits_with_2_and_names_the_fix(tmp_path):
    assert "Give the folder that train(checkpoint_dir=) wrote" in run("verify", tmp_path, code=2)
    plain = made(tmp_path / "a", [], None, states=[4])
    assert "promises no privacy" in run("epsilon", plain, "--delta", DELTA, code=2)
    newer = made(tmp_path / "b", lines=[{"version": 3, "written_by": "tfdpfl 9.1.0"}])
    assert "upgrade with pip install --upgrade tfdpfl" in run("verify", newer, code=2)
    (tmp_path / "c").mkdir()
    header = {"privacy": [{"type": "Unheard"}], "participation": None, "sampler": None}
    (tmp_path / "c" / "ledger.jsonl").write_text(json.dumps(header) + "\n")
    assert "Unheard is no setting that this release knows" in run("epsilon", tmp_path / "c", "--delta", DELTA, code=2)


def test_a_record_counts_rounds_once_and_sees_what_cannot_follow():
    head = json.dumps({"privacy": [], "participation": None, "sampler": None}) + "\n"
    text = lambda *numbers: (head + "".join(json.dumps(line_of(n, ["a"])) + "\n" for n in numbers)).encode()
    for numbers, rounds, sound in [
        ([], 0, True), ([0, 1, 1, 2], 3, True), ([1], 2, False), ([0, 2], 3, False), ([-1], 1, False),
        ([0, 1, 0], 3, False),
    ]:  # fmt: skip
        record = Record(text(*numbers), "it")
        assert (record.rounds, not record.fault) == (rounds, sound) and record.rewound == (numbers in ([0, 1, 0], [-1]))
