"""What an operator sees of a training is what it spent, and nothing that tells who took part."""

import json
import logging
import re
import time

import numpy as np
import pytest

pytest.importorskip("flwr")
from flower_fakes import FakeGrid, arrays_in, model, reply
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode
from flwr.serverapp import strategy as flower

from tfdpfl.flower import DifferentialPrivacyFixedClipping
from tfdpfl.flower.monitor import METRICS, prometheus

SAMPLE = re.compile(r"tfdpfl_(\w+) (\S+)$", re.M)


def one_drops_out(message, n):
    return reply(message, arrays_in(message)) if n else None


def watched(folder, nodes=4, answer=one_drops_out, **how):
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    strategy = DifferentialPrivacyFixedClipping(
        flower.FedAvg(fraction_evaluate=0.0), noise_multiplier=1.0, l2_norm_clip=0.5, delta=1e-5, accountant="rdp",
        target_epsilon=50.0, monitor_folder=folder, **how,
    )  # fmt: skip
    strategy.start(FakeGrid(nodes, answer), model(), num_rounds=3)
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return strategy, lines, dict(SAMPLE.findall((folder / "metrics.prom").read_text()))


def test_each_round_is_shown_with_what_it_spent(tmp_path):
    strategy, lines, now = watched(tmp_path, clients_per_round=4)
    assert [line["round"] for line in lines] == [1, 2, 3] and lines[-1]["epsilon"] == strategy.epsilon
    last = lines[-1]
    assert (last["clip"], last["rounds_charged"], last["delta"], last["target_epsilon"]) == (0.5, 3, 1e-5, 50.0)
    assert last["epsilon_left"] == 50.0 - strategy.epsilon
    assert (last["clients_asked"], last["clients_replied"], last["dropouts"]) == (4, 3, 1) and last["round_seconds"] > 0
    assert float(now["epsilon"]) == strategy.epsilon and float(now["rounds_charged_total"]) == 3
    assert {name.removesuffix("_total") for name in now} == METRICS.keys()
    page = (tmp_path / "index.html").read_text("utf-8")
    assert "rounds.jsonl" in page and "http://" not in page and "https://" not in page
    read = re.findall(r"^  (\w+): \"|, (\w+): \"", page.split("const SHOWN")[1].split("};")[0], re.M)
    assert {"".join(name) for name in read} <= last.keys()


def test_with_sampling_nothing_that_depends_on_the_cohort_is_shown(tmp_path):
    _, few, _ = watched(tmp_path / "few", nodes=4, sampling_rate=1.0)
    _, many, now = watched(tmp_path / "many", nodes=9, sampling_rate=1.0)
    told = {"epsilon", "target_epsilon", "epsilon_left", "delta", "clip", "noise_multiplier", "rounds_charged"}
    assert few == many and {*few[0]} == {*told, "version", "round"}
    assert {name.removesuffix("_total") for name in now} == told


def test_what_an_answer_holds_is_not_shown(tmp_path):
    def nan(message):
        return reply(message, {"w": np.full((3, 2), np.nan, np.float32), "b": np.zeros(4, np.float32)})

    def error(code):
        return lambda message: Message(Error(code, "why"), reply_to=message)

    answers = {
        "nan": nan,
        "error": error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION),
        "away": error(ErrorCode.NODE_UNAVAILABLE),
    }
    shown = {}
    for name, of_one in answers.items():
        answer = lambda message, n, of_one=of_one: reply(message, arrays_in(message)) if n else of_one(message)
        strategy, lines, _ = watched(tmp_path / name, answer=answer, clients_per_round=4)
        shown[name] = [(line["clients_asked"], line["clients_replied"], line["dropouts"]) for line in lines]
        assert all(len(replied) == 3 for replied in strategy.contributors)
    assert shown == {"nan": [(4, 4, 0)] * 3, "error": [(4, 4, 0)] * 3, "away": [(4, 3, 1)] * 3}


def test_with_sampling_no_file_tells_by_its_time_how_long_a_round_took(tmp_path, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    watched(tmp_path / "secret", sampling_rate=1.0)
    watched(tmp_path / "public", clients_per_round=4)
    for name in (".", "metrics.prom", "rounds.jsonl"):
        assert (tmp_path / "secret" / name).stat().st_mtime == 1000 < (tmp_path / "public" / name).stat().st_mtime


def test_a_folder_that_is_lost_stops_no_training(tmp_path):
    _, lines, _ = watched(tmp_path / "a", clients_per_round=4)
    folder = tmp_path / "b"
    folder.mkdir()
    (folder / "rounds.jsonl").mkdir()  # cannot be opened
    with pytest.raises(IsADirectoryError):
        watched(folder, clients_per_round=4)  # raised by this test, after the training has ended
    assert len(lines) == 3 and not (folder / "metrics.prom").exists()


def test_the_text_of_prometheus_has_a_help_and_a_type_for_each_sample():
    text = prometheus({"epsilon": float("inf"), "dropouts": None, "rounds_charged": 2})
    assert text == (
        "# HELP tfdpfl_epsilon Upper bound on epsilon of all that was released, at delta.\n"
        "# TYPE tfdpfl_epsilon gauge\ntfdpfl_epsilon +Inf\n"
        "# HELP tfdpfl_rounds_charged_total Rounds whose result was released, or may have been.\n"
        "# TYPE tfdpfl_rounds_charged_total counter\ntfdpfl_rounds_charged_total 2.0\n"
    )
