"""A training is priced as it ran, stops in time, and after SIGKILL goes on where it was, with the ledger intact."""

# ruff: noqa: E402
import csv
import errno
import fcntl
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from scipy import stats

tff = pytest.importorskip("tensorflow_federated", reason="needs TensorFlow Federated, which is on the tff stack")

import tensorflow as tf

from tfdpfl.cli import main
from tfdpfl.clips import AdaptiveClip
from tfdpfl.errors import PrivacyError
from tfdpfl.federated import (
    BoundedParticipationSampler,
    FixedSizeClientSampler,
    PoissonClientSampler,
    RoundsRun,
    build_dp_fed_avg,
    build_dp_ftrl,
    build_local_dp_fed_avg,
    local_runtime,
    train,
)
from tfdpfl.federated import data as fd
from tfdpfl.federated.checkpoints import Record
from tfdpfl.federated.guarantees import ClientLevel, DistributedLevel, ExampleLevel, LocalLevel
from tfdpfl.federated.privacy import Participation

DELTA = 1e-4


def loss():
    return tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def make_model():
    return tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(2, kernel_initializer="zeros")])


def make_clients(number=8):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(number * 20, 4))
    return fd.from_partition((x, (x.sum(1) > 0).astype(np.int32)), np.split(np.arange(len(x)), number)).batch(10)


class Counting:
    """A process in Python alone: its state counts rounds and remembers who came, by the sizes of their data."""

    def __init__(self, *privacy, die_in_round=None):
        if privacy:
            self.privacy = privacy
        self.die_in_round = die_in_round
        self.initialize = lambda: {"rounds": np.int64(0), "seen": np.int64(0)}

    def next(self, state, datasets):
        if state["rounds"] == self.die_in_round:
            raise InterruptedError("the power went")
        state = {"rounds": state["rounds"] + 1, "seen": state["seen"] + len(datasets)}
        return types.SimpleNamespace(state=state, metrics={"train": {"loss": 1.0 / state["rounds"]}, "clip": 0.5})

    def get_model_weights(self, state):
        return state["rounds"]


CLIENTS = {f"c{i}": None for i in range(8)}
GAUSSIAN = ClientLevel(noise_multiplier=1.5)


def run(process, sampler, rounds=5, **more):
    return train(process, CLIENTS, num_rounds=rounds, sampler=sampler, **{"delta": DELTA, "progress": False, **more})


# Most tests ask for the quick accountant: a price by PLD takes up to a second.
quick = dict(accountant="rdp")


def poisson(seed=None, rate=1.0):
    return PoissonClientSampler(CLIENTS, rate, seed)


def priced(guarantee, sampler, cohorts):
    run = RoundsRun(rounds=len(cohorts), participation=sampler.participation, cohorts=cohorts)
    return guarantee.price(run, DELTA).epsilon


def told(folder, accountant="pld"):
    """Returns {level: ε} as `tfdpfl ledger` reads it from a checkpoint_dir."""
    command = ["ledger", "epsilon", str(folder), "--delta", str(DELTA), "--accountant", accountant, "--json"]
    done = CliRunner().invoke(main, command)
    assert done.exit_code == 0, done.output
    return {figure["level"]: figure["epsilon"] for figure in json.loads(done.output)["figures"]}


@pytest.mark.slow
def test_every_round_has_the_price_of_what_ran_so_far():
    sampler = poisson(rate=0.5)
    history = run(Counting(GAUSSIAN), sampler)
    assert history.cohorts == [sampler(r) for r in range(5)]
    assert history["client_epsilon"] == [priced(GAUSSIAN, sampler, history.cohorts[: r + 1]) for r in range(5)]
    assert history.epsilon == {"client": history["client_epsilon"][-1]}
    assert history.adjacency == {"client_epsilon": GAUSSIAN.adjacency}
    assert history["loss"] == [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5] and history["clip"] == [0.5] * 5
    assert (
        "client level: epsilon = " in history.statement()
        and "5 rounds, sampling poisson, 4 of 8 clients" in history.statement()
    )
    assert not history.seeded and "come from a seed" not in history.statement()
    known = run(Counting(GAUSSIAN), poisson(3), 1)
    assert known.seeded and "The cohorts come from a seed" in known.statement()


def test_rounds_without_a_price_have_none_and_the_last_always_has_one():
    history = run(Counting(GAUSSIAN), poisson(), 8, rounds_per_price=3, **quick)
    assert [r for r in range(8) if not math.isnan(history["client_epsilon"][r])] == [2, 5, 7]
    full = run(Counting(GAUSSIAN), poisson(), 8, **quick)
    assert history["client_epsilon"][2] == full["client_epsilon"][2] and history.epsilon == full.epsilon


@pytest.mark.slow
def test_levels_are_columns_of_their_own_and_what_is_not_promised_has_none():
    local = LocalLevel(noise_multiplier=4.0)
    sampler = BoundedParticipationSampler(CLIENTS, 3, 4)
    history = run(Counting(GAUSSIAN, local), sampler)
    assert set(history) == {"loss", "clip", "client_epsilon", "local_epsilon"}
    assert history.adjacency == {"client_epsilon": "zero_out", "local_epsilon": "replace_one"}
    assert history["local_epsilon"][-1] == priced(local, sampler, history.cohorts)
    assert history["client_epsilon"][-1] == priced(GAUSSIAN, sampler, history.cohorts)
    plain = run(Counting(), lambda r: ["c1"], delta=None)
    assert set(plain) == {"loss", "clip"} and plain.statement() == "No privacy is promised."


def test_without_noise_epsilon_is_infinite():
    assert run(Counting(ClientLevel(noise_multiplier=0.0)), poisson())["client_epsilon"] == [math.inf] * 5


class Untrained(Counting):
    """Nothing may reach it."""

    def next(self, state, datasets):
        raise AssertionError("this round must not train")


def declared(draw, **participation):
    draw.participation = Participation(**participation)
    return draw


def test_a_cohort_that_is_not_as_declared_is_refused_before_it_trains():
    everyone = declared(lambda r: [*CLIENTS], sampling="poisson", population=10**6, clients_per_round=50)
    with pytest.raises(PrivacyError, match=r"population of 1000000 clients, of which client_data knows 8"):
        run(Untrained(GAUSSIAN), everyone, rounds_per_price=100, **quick)
    many = {f"c{i}": None for i in range(50)}
    begun = []
    always = declared(lambda r: ["c1", "c2"], sampling="fixed_size", population=50, clients_per_round=2)
    process = Counting(GAUSSIAN)
    process.next = lambda state, datasets: begun.append(1) or Counting.next(process, state, datasets)
    with pytest.raises(PrivacyError, match="does not happen"):
        train(process, many, num_rounds=100, sampler=always, delta=DELTA, progress=False, **quick)
    assert len(begun) < 8
    twice = declared(lambda r: ["c1", "c1"] if r else [], sampling="none", population=8, clients_per_round=2)
    with pytest.raises(PrivacyError, match="more than once"):
        run(Counting(GAUSSIAN, die_in_round=1), twice, 100, **quick)


def test_a_cohort_is_checked_after_a_restart_with_those_before_it(tmp_path):
    fixed = dict(sampling="bounded", population=8, clients_per_round=1, max_participations=3)
    run(Counting(GAUSSIAN), declared(lambda r: ["c1"], **fixed), 3, checkpoint_dir=tmp_path, **quick)
    with pytest.raises(PrivacyError, match="max_participations=3"):
        run(
            Untrained(GAUSSIAN), declared(lambda r: ["c1"], **fixed), 9, checkpoint_dir=tmp_path, rounds_per_price=100,
            **quick,
        )  # fmt: skip


# -- what clients' data really hold -----------------------------------------------------------------------------------


EXAMPLES = ExampleLevel(noise_multiplier=1.0, sampling="poisson", batch_size=8, local_steps=5)


def of_one(number=100):
    return fd.from_partition((np.zeros([number, 4], np.float32), np.zeros(number, np.int32)), {"a": range(number)})


def priced_alone(clients, **more):
    sampler = BoundedParticipationSampler(["a"], 1, 10)
    return train(
        Counting(EXAMPLES), clients, num_rounds=2, sampler=sampler, delta=DELTA, progress=False, **quick, **more
    )


def test_examples_are_counted_as_they_come_and_not_as_they_were():
    def truly(number):
        return EXAMPLES._price(2, number, DELTA, "rdp").epsilon

    assert priced_alone(of_one().batch(8)).epsilon["example"] == truly(100)
    few = of_one().preprocess(lambda d: d.take(20).batch(8))
    assert few.num_examples == {"a": 20}
    assert priced_alone(few).epsilon["example"] == truly(20) > 1.5 * truly(100)
    by_dict = {"a": of_one()["a"].take(30).batch(8)}
    assert priced_alone(by_dict, num_examples={"a": 100}).epsilon["example"] == truly(30)
    assert priced_alone(by_dict).epsilon["example"] == truly(30)
    # Of what varies, the fewest count.
    sizes = iter([40, 15])
    varying = fd.ClientDatasets(lambda c: None, {"a": 100})
    varying.__class__ = type("Varying", (fd.ClientDatasets,), {
        "__getitem__": lambda self, c: of_one()["a"].take(next(sizes)).batch(8)
    })  # fmt: skip
    assert priced_alone(varying).epsilon["example"] == truly(15)


@pytest.mark.parametrize(
    "clients, words",
    [
        (lambda: of_one().batch(8, epochs=5), r"each example 5 times"),
        (lambda: of_one().batch(8, epochs=5).preprocess(lambda d: d.take(12)), r"each example 5 times"),
        (lambda: of_one().preprocess(lambda d: d.repeat(3).batch(8)), r"client 'a' is repeated"),
        (
            lambda: {"a": tf.compat.v1.data.Dataset.from_tensor_slices(np.ones([8, 2], "float32")).repeat(2).batch(8)},
            r"client 'a' is repeated",
        ),
        (lambda: {"a": of_one()["a"].take(20).repeat(5).shuffle(9).batch(8).prefetch(1)}, r"client 'a' is repeated"),
        (lambda: {"a": of_one()["a"].batch(8).map(lambda x, y: (tf.tile(x, [2, 1]), tf.tile(y, [2])))}, "yields 200"),
        (lambda: of_one().batch(8).preprocess(lambda d: d.map(lambda x, y: (x - tf.reduce_mean(x, 0), y))), "meet"),
    ],
)
def test_examples_that_come_more_than_once_are_refused(clients, words):
    sampler = BoundedParticipationSampler(["a"], 1, 10)
    with pytest.raises(PrivacyError, match=words):
        train(
            Untrained(EXAMPLES), clients(), num_rounds=2, sampler=sampler, delta=DELTA, progress=False,
            num_examples={"a": 100}, **quick,
        )  # fmt: skip


class Reading(Counting):
    """Reads its clients' data, as a process does, and wants pairs of a float matrix and an int vector."""

    def __init__(self, *privacy):
        super().__init__(*privacy)
        self.read = []

    def next(self, state, datasets):
        self.read.append([sum(len(y) for _, y in dataset) for dataset in datasets])
        return super().next(state, datasets)


def unreadable():
    def rows():
        yield np.zeros([8, 4], np.float32), np.zeros([8], np.int32)
        raise OSError("the disk of b")

    return tf.data.Dataset.from_generator(rows, output_signature=of_one().batch(8).element_spec)


@pytest.mark.parametrize("promise", [GAUSSIAN, EXAMPLES])
def test_a_client_whose_data_cannot_be_read_is_named_and_left_out_if_asked(promise):
    data = {"a": of_one()["a"].batch(8), "b": unreadable(), "c": of_one(30)["a"].batch(8)}
    more = dict(num_rounds=2, sampler=BoundedParticipationSampler([*data], 3, 9), delta=DELTA, progress=False, **quick)
    with pytest.raises(ValueError, match=r"client 'b' cannot be read .*the disk of b.*bad_data='leave_out'"):
        train(Reading(promise), data, **more)
    process = Reading(promise)
    history = train(process, data, **more, bad_data="leave_out")
    assert [sorted(row) for row in process.read if len(row) == 2] == [[30, 100]] * 2
    assert [list(row) for row in history.left_out] == [["b"]] * 2
    assert all(sorted(cohort) == ["a", "b", "c"] for cohort in history.cohorts)
    if promise is EXAMPLES:
        assert history.epsilon["example"] == EXAMPLES._price(2, 30, DELTA, "rdp").epsilon


def test_a_client_leaves_when_its_own_budget_is_spent_and_the_others_go_on(tmp_path):
    data = {"a": of_one(100)["a"].batch(8), "b": of_one(50)["a"].batch(8), "c": of_one(50)["a"].batch(8)}
    three = EXAMPLES._price(3, 50, DELTA, "rdp").epsilon
    more = dict(sampler=BoundedParticipationSampler([*data], 3, 9), delta=DELTA, progress=False,
                client_epsilon={"b": three, "a": 100.0}, checkpoint_dir=tmp_path, **quick)  # fmt: skip
    train(Reading(EXAMPLES), data, num_rounds=4, **more)
    process = Reading(EXAMPLES)
    history = train(process, data, num_rounds=5, **more)
    assert [sorted(cohort) for cohort in history.cohorts] == [["a", "b", "c"]] * 5  # as they were drawn
    assert [list(left) for left in history.left_out] == [[]] * 3 + [["b"]] * 2
    assert process.read == [[100, 50]] or process.read == [[50, 100]]
    assert history.left_at == {"b": 4}  # in this call; in the one before, from round 3
    guarantee, run_ = history.trainings["example"]
    spent = {client: paid.epsilon for client, paid in guarantee.price_by_client(run_, DELTA, "rdp").items()}
    assert spent["b"] == three < spent["c"] and spent["a"] < spent["c"]
    with pytest.raises(PrivacyError, match="client_epsilon is given, but the process protects no examples"):
        run(Counting(GAUSSIAN), poisson(), client_epsilon={"c1": 1.0})
    with pytest.raises(ValueError, match=r"client_epsilon\['b'\]"):
        train(Reading(EXAMPLES), data, num_rounds=5, **{**more, "client_epsilon": {"b": -1.0}})


def test_noise_that_clients_add_is_priced_without_those_left_out():
    skellam = DistributedLevel(l1=1e6, l2=1e5, local_stddev=1e5)
    data = {"a": of_one()["a"].batch(8), "b": unreadable()}
    sampler = BoundedParticipationSampler([*data], 2, 9)
    history = train(
        Reading(skellam), data, num_rounds=1, sampler=sampler, delta=DELTA, progress=False, bad_data="leave_out"
    )
    # The round that failed may have told the clients' sums, and is charged as well.
    both, one = (["a", "b"], ()), (["a", "b"], ["b"])
    rows = RoundsRun(
        rounds=2, participation=Participation(sampling="none", population=2, clients_per_round=2),
        cohorts=[both[0], one[0]], absent=[both[1], one[1]],
    )  # fmt: skip
    assert history.lost_rounds == 1 and history.epsilon["client"] == skellam.price(rows, DELTA).epsilon


@pytest.mark.slow
@pytest.mark.parametrize(("clip", "said"), [(1e-8, "1e-08"), (1e10, r"1e\+10")])
def test_a_clip_that_adapted_to_its_end_is_named_before_the_next_round(clip, said, tmp_path):
    process, sampler = Counting(GAUSSIAN), poisson()
    process.noise_settings = {"clip": AdaptiveClip()}
    measured = process.next

    def at_the_end(state, datasets):
        output = measured(state, datasets)
        output.metrics["clip"] = np.float32(clip)
        return output

    process.next = at_the_end
    with pytest.raises(PrivacyError, match=f"The adaptive clip is {said}: "):
        run(process, sampler, checkpoint_dir=tmp_path, **quick)
    rounds = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["round"] for line in rounds if "round" in line] == [0]


def test_training_stops_before_the_round_that_would_pass_the_target():
    sampler = poisson()
    free = run(Counting(GAUSSIAN), sampler, 8)
    target = (free["client_epsilon"][3] + free["client_epsilon"][4]) / 2
    history = run(Counting(GAUSSIAN), sampler, 8, target_epsilon=target)
    assert len(history.rows) == 4 and history.state["rounds"] == 4
    assert history.stopped_by == "target_epsilon" and free.stopped_by is None
    assert history["client_epsilon"][-1] <= target
    unpriced = run(Counting(GAUSSIAN), sampler, 8, target_epsilon=target, rounds_per_price=8)
    assert len(unpriced.rows) == 4 and unpriced.epsilon == history.epsilon
    exactly = run(Counting(GAUSSIAN), sampler, 8, target_epsilon=free["client_epsilon"][4])
    assert len(exactly.rows) == 5


@pytest.mark.slow
def test_the_target_holds_for_the_level_that_costs_most():
    history = run(Counting(GAUSSIAN, LocalLevel(noise_multiplier=4.0)), poisson(), 50, target_epsilon=6.0)
    assert history.epsilon["local"] < history.epsilon["client"] <= 6.0
    history = run(Counting(GAUSSIAN, LocalLevel(noise_multiplier=2.0)), poisson(), 50, target_epsilon=6.0)
    assert history.epsilon["client"] < history.epsilon["local"] <= 6.0


def test_evaluation_and_logs(tmp_path):
    log, board = tmp_path / "log.csv", tmp_path / "board"
    history = run(
        Counting(GAUSSIAN), poisson(), eval_fn=lambda weights: {"accuracy": weights / 10}, rounds_per_evaluation=2,
        csv_file=log, tensorboard_dir=board,
    )  # fmt: skip
    np.testing.assert_array_equal(history["accuracy"], [np.nan, 0.2, np.nan, 0.4, 0.5])
    rows = list(csv.DictReader(log.open()))
    assert [row["round"] for row in rows] == ["0", "1", "2", "3", "4"]
    assert [float(row["client_epsilon"]) for row in rows] == history["client_epsilon"]
    assert [row["accuracy"] for row in rows] == ["", "0.2", "", "0.4", "0.5"]
    # The number of clients that came is as secret as who they were.
    assert not {"clients", "cohort"} & set(rows[0])
    written = {}
    for event in tf.compat.v1.train.summary_iterator(str(next(board.iterdir()))):
        for value in event.summary.value:
            written.setdefault(value.tag, {})[event.step] = float(tf.make_ndarray(value.tensor))
    assert written["client_epsilon"] == pytest.approx(dict(enumerate(history["client_epsilon"])))
    assert written["accuracy"] == pytest.approx({1: 0.2, 3: 0.4, 4: 0.5})


def test_history_becomes_a_data_frame(monkeypatch):
    history = run(Counting(GAUSSIAN), poisson(), 2)
    frame = history.to_pandas()
    assert frame.index.name == "round" and frame.index.tolist() == [0, 1]
    assert frame["client_epsilon"].tolist() == pytest.approx(history["client_epsilon"], nan_ok=True)
    assert frame.attrs["delta"] == DELTA
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        history.to_pandas()


samplers = {
    "poisson": lambda: poisson(),
    "fixed": lambda: FixedSizeClientSampler(CLIENTS, 8),
    "bounded": lambda: BoundedParticipationSampler(CLIENTS, 2, 2, 3),
}


@pytest.mark.slow
@pytest.mark.parametrize("make", samplers.values(), ids=samplers)
def test_a_training_that_was_broken_off_goes_on_as_if_nothing_had_happened(tmp_path, make):
    with pytest.raises(InterruptedError):
        run(Counting(GAUSSIAN, die_in_round=3), make(), 6, checkpoint_dir=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    cohorts = [line["cohort"] for line in lines if "round" in line]
    assert len(cohorts) == 4  # three that ran, and one that was begun
    assert told(tmp_path) == {"client": priced(GAUSSIAN, make(), cohorts[:3])}

    again = make()  # with another key: the first one's is in the folder
    history = run(Counting(GAUSSIAN), again, 6, checkpoint_dir=tmp_path, eval_fn=lambda weights: {"at": weights})
    assert history.cohorts[:4] == cohorts and history.lost_rounds == 1
    assert history.cohorts == [again(r) for r in range(6)]  # the key in the folder is the one in use
    assert history["loss"] == [1 / (r + 1) for r in range(6)]
    assert history["at"][2:] == [3, 4, 5, 6]  # the last round before the end was not shown yet, perhaps
    assert history.state["rounds"] == 6 and history.state["seen"] == sum(map(len, history.cohorts))
    assert history["client_epsilon"] == [priced(GAUSSIAN, again, history.cohorts[: r + 1]) for r in range(6)]
    seen = [c for cohort in history.cohorts for c in cohort]
    if isinstance(again, BoundedParticipationSampler):
        assert max(map(seen.count, seen)) <= 2

    # Asked for what it has, it gives that; asked for more, it goes on.
    assert run(Counting(GAUSSIAN), make(), 6, checkpoint_dir=tmp_path)["loss"] == history["loss"]
    assert len(run(Counting(GAUSSIAN), make(), 7, checkpoint_dir=tmp_path).rows) == 7


def test_a_lost_round_is_repeated_with_its_own_clients_whatever_the_sampler(tmp_path):
    names = iter(CLIENTS)
    fickle = lambda number: [next(names)]
    with pytest.raises(InterruptedError):
        run(Counting(die_in_round=1), fickle, 3, delta=None, checkpoint_dir=tmp_path)
    history = run(Counting(), fickle, 3, delta=None, checkpoint_dir=tmp_path)
    assert history.cohorts == [["c0"], ["c1"], ["c2"]] and history.lost_rounds == 1


@pytest.mark.slow
def test_where_clients_add_the_noise_a_lost_round_is_charged_beside_its_repetition(tmp_path):
    local = LocalLevel(noise_multiplier=4.0)
    sampler = BoundedParticipationSampler(CLIENTS, 8, 3, 1)
    for _ in range(2):
        with pytest.raises(InterruptedError):
            run(Counting(GAUSSIAN, local, die_in_round=1), sampler, 3, checkpoint_dir=tmp_path)
    history = run(Counting(GAUSSIAN, local), sampler, 3, checkpoint_dir=tmp_path)
    assert history.lost_rounds == 2
    five = RoundsRun(rounds=5, participation=poisson(rate=1.0).participation, cohorts=[list(CLIENTS)] * 5)
    assert history.epsilon["local"] == local.price(five, DELTA).epsilon
    assert history.epsilon["client"] == priced(GAUSSIAN, sampler, history.cohorts)
    assert told(tmp_path) == history.epsilon
    assert history["local_epsilon"][0] < history["local_epsilon"][1] < history["local_epsilon"][2]
    assert "2 more begun and lost" in history.statement()


@pytest.mark.slow
def test_a_line_of_the_ledger_that_was_cut_off_is_no_round(tmp_path):
    with pytest.raises(InterruptedError):
        run(Counting(GAUSSIAN, die_in_round=2), poisson(), checkpoint_dir=tmp_path)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:9])
    history = run(Counting(GAUSSIAN), poisson(), checkpoint_dir=tmp_path)
    assert history.lost_rounds == 0 and len(history.cohorts) == 5
    assert [row.number for row in Record(path.read_bytes(), "it").begun] == [0, 1, 2, 3, 4]


def test_a_folder_of_another_training_is_refused(tmp_path):
    run(Counting(GAUSSIAN), poisson(), 2, checkpoint_dir=tmp_path)
    with pytest.raises(PrivacyError, match="another privacy"):
        run(Counting(ClientLevel(noise_multiplier=3.0)), poisson(), checkpoint_dir=tmp_path)
    with pytest.raises(PrivacyError, match="another participation"):
        run(Counting(GAUSSIAN), poisson(rate=0.25), checkpoint_dir=tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    for damaged in (lines[0][:9] + "\n", lines[0] + '{"round": 0}\n', "[1]\n", lines[0] + "{\n" + lines[1]):
        ledger.write_text(damaged)
        with pytest.raises(ValueError, match=r"ledger\.jsonl is damaged .*Restore it"):
            run(Counting(GAUSSIAN), poisson(), checkpoint_dir=tmp_path)
    ledger.write_text("".join(lines[:2]))
    with pytest.raises(ValueError, match=r"came after 2 rounds, but .* has 1, so rounds are missing"):
        run(Counting(GAUSSIAN), poisson(), checkpoint_dir=tmp_path)
    ledger.write_text("".join(lines))
    os.rename(tmp_path / "state_2", tmp_path.parent / "newest")  # its round was shown: it would run again, uncharged
    with pytest.raises(ValueError, match=r"has 2 rounds .* the newest state came after 1\. .*Restore the newest"):
        run(Counting(GAUSSIAN), poisson(), checkpoint_dir=tmp_path)
    shutil.rmtree(tmp_path / "state_1")
    other = tmp_path / "other"
    run(Counting(GAUSSIAN), poisson(), 2, checkpoint_dir=other)
    shutil.rmtree(other / "state_2")
    os.rename(tmp_path.parent / "newest", other / "state_2")  # of as many rounds, but others
    with pytest.raises(ValueError, match=r"lacks lines that it had when state_2 was saved"):
        run(Counting(GAUSSIAN), poisson(), checkpoint_dir=other)
    verified = CliRunner().invoke(main, ["ledger", "verify", str(other)])
    assert verified.exit_code == 1 and "lacks lines that it had when state_2 was saved" in verified.output
    shutil.copytree(other / "state_2", tmp_path / "state_2")
    ledger.unlink()
    with pytest.raises(ValueError, match="states but no ledger"):
        run(Counting(GAUSSIAN), poisson(), checkpoint_dir=tmp_path)


def of_settings(clip):
    process = Counting(GAUSSIAN)
    process.noise_settings = {"clip": clip}
    return process


@pytest.mark.slow
def test_a_folder_goes_on_with_the_clip_that_its_noise_was_made_for(tmp_path):
    run(of_settings("1.0"), poisson(), 2, checkpoint_dir=tmp_path, **quick)
    with pytest.raises(PrivacyError, match=r"another clip, 1\.0, not 0\.001"):
        run(of_settings("0.001"), poisson(), 3, checkpoint_dir=tmp_path, **quick)
    assert len(run(of_settings("1.0"), poisson(), 3, checkpoint_dir=tmp_path, **quick).rows) == 3
    # A folder from before clips were compared can still be read.
    first, *_ = (Path(__file__).parents[1] / "golden" / "checkpoints.jsonl").read_text().splitlines()
    header = {name: value for name, value in json.loads(first).items() if name not in ("clip", "metrics")}
    (tmp_path / "older").mkdir()
    (tmp_path / "older" / "ledger.jsonl").write_text(json.dumps(header) + "\n")
    assert len(run(of_settings("1.0"), poisson(), 2, checkpoint_dir=tmp_path / "older", **quick).rows) == 2


@pytest.mark.slow
def test_a_private_training_takes_the_model_of_a_state_and_neither_its_noise_nor_its_clip():
    """200 weights without a gradient: from a state without noise they get the noise that is stated."""
    clients = fd.from_arrays((np.zeros([2, 100]), np.zeros(2, np.int32)), range(2)).batch(1)
    first, second = (
        build_dp_fed_avg(
            lambda: tf.keras.Sequential([tf.keras.Input((100,)), tf.keras.layers.Dense(2, use_bias=False)]),
            clients_per_round=2, noise_multiplier=z, l2_norm_clip=clip, client_optimizer_fn="sgd",
            server_optimizer_fn="sgd", loss=loss(), input_spec=clients.element_spec,
        )
        for z, clip in ((0.0, 0.5), (2.0, 1.0))
    )  # fmt: skip
    assert second.noise_settings == {"clip": 1.0, "noise_multiplier": 2.0, "metrics": None}
    sampler = BoundedParticipationSampler(clients.client_ids, 2, max_participations=5)
    with local_runtime():
        start = first.initialize()
        end = train(
            second, clients, num_rounds=1, sampler=sampler, delta=DELTA, progress=False, initial_state=start, **quick
        ).state
        weights = [np.ravel(p.get_model_weights(s).trainable) for p, s in ((first, start), (second, end))]
    squares = np.sum((weights[1] - weights[0]) ** 2)  # noise of 2 clips over two clients
    assert stats.chi2(200).cdf(squares) > 5e-9 and stats.chi2(200).sf(squares) > 5e-9


@pytest.mark.parametrize("number, words", [(errno.ENOLCK, "cannot lock files"), (errno.EWOULDBLOCK, "in use")])
def test_a_file_system_without_locks_is_not_another_training(tmp_path, monkeypatch, number, words):
    def fails(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fails)
    with pytest.raises(ValueError, match=words):
        run(Counting(GAUSSIAN), poisson(), 1, checkpoint_dir=tmp_path)


class Killed(BaseException):
    """As SIGKILL: nothing of this package may catch it."""


@pytest.mark.slow
def test_a_training_that_dies_at_any_sync_goes_on_and_shows_no_round_that_it_could_draw_again(tmp_path, monkeypatch):
    real, left = os.fsync, [0]

    def fsync(descriptor):
        left[0] -= 1
        if not left[0]:
            raise Killed
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    names, stops = iter(range(10**6)), 0
    clients, sampler = {str(i): None for i in range(999)}, lambda number: [str(next(names))]  # never the same
    for stop in range(1, 99):
        folder, shown = tmp_path / str(stop), []

        def go_on(folder=folder, shown=shown):
            return train(
                Counting(), clients, num_rounds=1, sampler=sampler, delta=None, progress=False, checkpoint_dir=folder,
                eval_fn=lambda weights: shown.append(int(weights)) or {},
            )  # fmt: skip

        left[0] = stop
        try:
            go_on()
        except Killed:
            stops += 1
        left[0] = 0
        saved = Record((folder / "ledger.jsonl").read_bytes(), "it").saved
        assert saved >= max(shown, default=0)  # else the shown round would count as lost, and run again for nothing
        history = go_on()
        record = Record((folder / "ledger.jsonl").read_bytes(), "it")
        assert not record.fault and record.saved == 1 and record.chain.hashed == record.lines
        assert [row.cohort for row in record.begun] == [history.cohorts[row.number] for row in record.begun]
        if stop > stops:
            break
    assert stops > 10


@pytest.mark.slow
def test_a_state_is_on_the_disk_before_its_round_is_shown(tmp_path, synced):
    def shown(weights):
        state = tmp_path / f"state_{weights}"
        assert {str(path) for path in (tmp_path, state, *state.rglob("*"))} <= set(synced)
        return {}

    run(Counting(GAUSSIAN), poisson(), 2, checkpoint_dir=tmp_path, eval_fn=shown, **quick)


@pytest.mark.slow
def test_clients_that_are_not_batched_are_told_how():
    raw = of_one()
    with pytest.raises(ValueError, match=r"single examples\. .*clients\.batch\(16\)"):
        build_dp_fed_avg(
            make_model, clients_per_round=1, noise_multiplier=1.0, l2_norm_clip=1.0, client_optimizer_fn="sgd",
            loss=loss(), input_spec=raw.element_spec,
        )  # fmt: skip
    process = build_dp_fed_avg(
        make_model, clients_per_round=1, noise_multiplier=1.0, l2_norm_clip=1.0, client_optimizer_fn="sgd", loss=loss(),
        input_spec=raw.batch(8).element_spec,
    )  # fmt: skip
    sampler = BoundedParticipationSampler(["a"], 1, 10)
    with pytest.raises(ValueError, match=r"client 'a' are single examples of .*client_data\.batch\(16\)"):
        train(process, raw, num_rounds=1, sampler=sampler, delta=DELTA, progress=False)


def test_two_trainings_do_not_share_a_folder(tmp_path):
    def meanwhile(weights):
        with pytest.raises(ValueError, match="in use by another process"):
            run(Counting(GAUSSIAN), poisson(), 2, checkpoint_dir=tmp_path)
        return {}

    run(Counting(GAUSSIAN), poisson(), 2, checkpoint_dir=tmp_path, eval_fn=meanwhile)


def test_the_folder_is_for_its_owner_alone(tmp_path):
    run(Counting(GAUSSIAN), poisson(), 1, checkpoint_dir=tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: run(Counting(GAUSSIAN), poisson(), 0), "num_rounds must"),
        (lambda: run(Counting(GAUSSIAN), poisson(), delta=None), "delta must"),
        (lambda: run(Counting(GAUSSIAN), poisson(), delta=1.0), "delta must"),
        (lambda: run(Counting(GAUSSIAN), poisson(), accountant="moments"), "accountant must"),
        (lambda: run(Counting(GAUSSIAN), poisson(), target_epsilon=-1), "target_epsilon must"),
        (lambda: run(Counting(GAUSSIAN), poisson(), rounds_per_evaluation=0), "rounds_per_evaluation must"),
        (lambda: run(Counting(GAUSSIAN), lambda r: ["c1"]), "declares no participation"),
        (lambda: run(Counting(), poisson(), target_epsilon=1.0), "promises no privacy"),
        (lambda: run(Counting(GAUSSIAN), poisson(), target_epsilon=1e-3), "no room for one round"),
        (lambda: run(Counting(ClientLevel(noise_multiplier=0.0)), poisson(), target_epsilon=9.0), "no room"),
        (lambda: run(Counting(GAUSSIAN, GAUSSIAN), poisson()), "two guarantees of one level"),
        (lambda: run(Counting(GAUSSIAN), PoissonClientSampler(["c1", "x"], 0.5)), "client 'x', of which"),
        (lambda: run(Counting(), lambda r: ["y"], delta=None), "client 'y', of which"),
        (lambda: train(Counting(), [1], num_rounds=1, sampler=poisson(), delta=None), "client_data must be"),
    ],
)
def test_bad_input_is_named_with_its_mend(call, words):
    with pytest.raises(ValueError, match=words):
        call()


# -- with TFF ---------------------------------------------------------------------------------------------------------


def accuracy_of(clients):
    x, y = map(
        np.concatenate, zip(*[[part.numpy() for part in batch] for c in clients for batch in clients[c]], strict=True)
    )

    def evaluate(weights):
        model = make_model()
        weights.assign_weights_to(model)
        return {"accuracy": np.mean(model.predict(x, verbose=0).argmax(1) == y)}

    return evaluate


@pytest.mark.slow
def test_tffs_own_plain_process_trains_and_promises_nothing():
    clients = make_clients()
    process = tff.learning.algorithms.build_unweighted_fed_avg(
        lambda: tff.learning.models.from_keras_model(make_model(), loss=loss(), input_spec=clients.element_spec),
        tff.learning.optimizers.build_sgdm(0.5),
    )
    cohorts = [["client_0", "client_3"], [], ["client_1"], ["client_2", "client_4", "client_5"]]
    with local_runtime():
        history = train(
            process, clients, num_rounds=4, sampler=cohorts.__getitem__, delta=None, progress=False,
            eval_fn=accuracy_of(clients), rounds_per_evaluation=4,
        )  # fmt: skip
    assert history["accuracy"][-1] > 0.85
    assert history["num_examples"][0] == 40 and math.isnan(history["loss"][1]) and history["loss"][0] > 0
    assert history.epsilon == {} and not any("epsilon" in column for column in history)


@pytest.mark.slow
def test_a_private_process_trains_on_tffs_client_data_too_and_goes_on_from_its_checkpoint(tmp_path):
    clients = make_clients()
    theirs = tff.simulation.datasets.TestClientData(
        {c: {"x": np.concatenate([b[0] for b in clients[c]]), "y": np.concatenate([b[1] for b in clients[c]])}
         for c in clients}
    ).preprocess(lambda d: d.map(lambda e: (e["x"], e["y"])).batch(10))  # fmt: skip
    process = build_dp_fed_avg(
        make_model, clients_per_round=4, noise_multiplier=0.5, client_optimizer_fn="sgd", loss=loss(),
        input_spec=clients.element_spec,
    )  # fmt: skip
    how = dict(sampler=PoissonClientSampler(clients.client_ids, 0.5), delta=DELTA, progress=False, **quick)
    with local_runtime():
        first = train(process, theirs, num_rounds=3, checkpoint_dir=tmp_path, **how)
        whole = train(process, clients, num_rounds=6, checkpoint_dir=tmp_path, **how)
    assert whole["clip"][:3] == first["clip"] and len(set(whole["clip"])) >= 5  # noisy float32s, one may come again
    assert np.all(np.diff(whole["client_epsilon"]) > 0)


@pytest.mark.slow
def test_a_tree_goes_on_from_its_checkpoint_with_the_noise_of_its_open_nodes(tmp_path):
    wide = tf.keras.layers.Dense  # 600 weights, so that their spread tells the noise's
    clients = fd.from_arrays((np.zeros([8, 300]), np.zeros(8, np.int32)), range(8)).batch(1)

    process = build_dp_ftrl(
        lambda: tf.keras.Sequential([tf.keras.Input((300,)), wide(2, use_bias=False, kernel_initializer="zeros")]),
        clients_per_round=2, noise_multiplier=3.0, l2_norm_clip=1.0, restart_every=8, client_optimizer_fn="sgd",
        server_optimizer_fn="sgd", loss=loss(), input_spec=clients.element_spec,
    )  # fmt: skip
    assert process.noise_settings["clip"] == 1.0  # of which the noise of its open nodes is

    def moved(rounds):
        sampler = BoundedParticipationSampler(clients.client_ids, 2, max_participations=3)
        how = dict(sampler=sampler, delta=DELTA, checkpoint_dir=tmp_path, progress=False, **quick)
        return np.ravel(process.get_model_weights(train(process, clients, num_rounds=rounds, **how).state).trainable)

    with local_runtime():
        # No client has a gradient, so the weights are the noise of the nodes that make up the rounds so far.
        for rounds, variance in [(3, 2 / 3 + 1), (4, 4 / 7), (10, 8 / 15 + 2 / 3)]:
            stddev = 1.5 * math.sqrt(variance)
            squares = np.sum((moved(rounds) / stddev) ** 2)
            law = stats.chi2(600)
            assert min(law.cdf(squares), law.sf(squares)) > 5e-9
            assert law.sf(squares * 1.5**2) < 5e-9 and law.cdf(squares / 1.5**2) < 5e-9


SCRIPT = """
    import sys, time
    sys.path.insert(0, sys.argv[2])
    import test_training as t
    from tfdpfl.federated import build_local_dp_fed_avg, local_runtime, train, PoissonClientSampler

    clients = t.make_clients()
    process = build_local_dp_fed_avg(
        t.make_model, clients_per_round=4, noise_multiplier=3.0, l2_norm_clip=1.0, client_optimizer_fn="sgd",
        loss=t.loss(), input_spec=clients.element_spec)
    with local_runtime():
        t.train(process, clients, num_rounds=1000, sampler=PoissonClientSampler(clients.client_ids, 0.5),
                delta=t.DELTA, checkpoint_dir=sys.argv[1], progress=False)
"""


@pytest.mark.slow
def test_after_sigkill_the_ledger_has_every_round_and_every_client(tmp_path):
    folder, script = tmp_path / "run", tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    child = subprocess.Popen(
        [sys.executable, script, folder, os.path.dirname(__file__)], stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (folder / "state_4").exists() and child.poll() is None:
        time.sleep(0.01)
    alive = child.poll() is None
    child.send_signal(signal.SIGKILL)
    assert alive, child.communicate()[1][-2000:]
    child.wait()

    lines = [json.loads(line) for line in (folder / "ledger.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "round" in line]
    completed = max(int(p.name.split("_")[1]) for p in folder.glob("state_*") if p.name.count("_") == 1)
    assert len(lines) in (completed, completed + 1) and completed >= 4
    clients, total = make_clients(), completed + 2
    process = build_local_dp_fed_avg(
        make_model, clients_per_round=4, noise_multiplier=3.0, l2_norm_clip=1.0, client_optimizer_fn="sgd", loss=loss(),
        input_spec=clients.element_spec,
    )  # fmt: skip
    sampler = PoissonClientSampler(clients.client_ids, 0.5)
    with local_runtime():
        history = train(
            process, clients, num_rounds=total, sampler=sampler, delta=DELTA, checkpoint_dir=folder, progress=False
        )
    assert history.cohorts[: len(lines)] == [line["cohort"] for line in lines]
    assert history.cohorts == [sampler(r) for r in range(total)]  # with the key that was restored
    assert history.lost_rounds == len(lines) - completed
    charged = history.cohorts + [line["cohort"] for line in lines[completed:]]
    (local,) = process.privacy
    assert history.epsilon["local"] == priced(local, sampler, charged)
    # The last round need not have the client that was in most.
    assert len(history.rows) == total and history["local_epsilon"][-1] >= history["local_epsilon"][-2]


@pytest.mark.slow
@pytest.mark.parametrize("release", ["", "v1"])
def test_a_folder_of_an_earlier_release_goes_on(tmp_path, release):
    golden = Path(__file__).parents[1] / "golden" / release / "checkpoints.jsonl"
    ledger = tmp_path / "ledger.jsonl"
    ledger.write_text("".join(golden.read_text().splitlines(keepends=True)[:2]))  # as if its first round was lost
    go_on = lambda clip, rounds: run(of_settings(clip), poisson(), rounds, checkpoint_dir=tmp_path, **quick)
    for rounds in (2, 3):
        history = go_on(1.0, rounds)
        assert told(tmp_path, "rdp") == history.epsilon
        # An earlier release does not say whether the first round was shown, so it counts twice.
        twice = RoundsRun(rounds=rounds + 1, participation=poisson().participation)
        assert history.epsilon["client"] == pytest.approx(GAUSSIAN.price(twice, DELTA, "rdp").epsilon)
        assert history.cohorts[:2] == [[*CLIENTS]] * 2 and len(history.rows) == rounds
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    assert [line["version"] for line in lines if "version" in line] == ([1, 2] if release else [2])
    with pytest.raises(PrivacyError, match=r"another clip, .*1\.0.*, not 2\.0"):
        go_on(2.0, 3)
    newer = json.dumps({"version": 3, "written_by": "tfdpfl 9.1.0"})
    ledger.write_text(f"{ledger.read_text()}{newer}\n")
    with pytest.raises(PrivacyError, match=r"ledger\.jsonl is of format version 3, written by tfdpfl 9\.1\.0"):
        go_on(1.0, 3)
