"""examples/flower_csv.py reads one file a hospital, and each hospital ends within its target, small ones included."""

import importlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

pytest.importorskip("flwr")
from flower_fakes import FakeGrid
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from tfdpfl.accounting import compute_epsilon
from tfdpfl.accounting.report import rounded_up

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_file_of_words_and_empty_cells_is_read_and_a_wrong_one_is_named(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    program = importlib.import_module("flower_csv")
    monkeypatch.setattr(program, "COLUMNS", {"Age": (60, 10), "smoker": {"no": 0, "yes": 1}})
    monkeypatch.setattr(program, "LABEL", "readmitted")
    monkeypatch.setattr(program, "CLASSES", ["no", "yes"])
    path = tmp_path / "clinic.csv"

    def read(*rows):
        path.write_text("\n".join(["\ufeffname,Age,smoker,readmitted", *rows]) + "\n", "utf-8")
        return program.read(path)

    x, y = read("P1,70,yes,no", "P2,,no,no", "P3,50,no,yes")  # Excel begins a file with a mark of its encoding
    assert x.tolist() == [[1, 1], [-1, 0]] and y.tolist() == [0, 1]
    for row, words in [
        ("P1,70,maybe,no", r"line 2, column smoker: 'maybe' is none of \['no', 'yes'\]"),
        ("P1,old,yes,no", "line 2, column Age: 'old' is no number"),
        ("P1,nan,yes,no", "column Age: 'nan' is no number"),
        ("P1,70,yes,1", "column readmitted: '1' is none of"),
        ("P1,,yes,no", "no row without an empty cell"),
    ]:
        with pytest.raises(ValueError, match=words):
            read(row)
    program.COLUMNS |= {"Age": (60, 10, 50), "smoker": {"no": 0, "yes": 1, "": 0.5}}
    x, y = read("P1,70,yes,no", "P2,,no,no", "P3,50,,yes", "P4,50,no,")
    assert x.tolist() == [[1, 0, 1, 0], [-1, 1, 0, 0], [-1, 0, 0.5, 1]] and y.tolist() == [0, 0, 1]
    assert program.make_net().input_shape == (None, 4)
    path.write_text("Age;smoker;readmitted\n70;yes;no\n")
    with pytest.raises(ValueError, match="has no column 'Age', but"):
        program.read(path)


def test_the_app_says_nothing_of_a_cell_that_it_cannot_read_and_wants_a_ledger(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(EXAMPLES)
    program = importlib.import_module("flower_csv")
    path = tmp_path / "clinic.csv"
    path.write_text("age,pressure,exercise,ill\nMrs Smith,155,2,1\n")
    ledger = str(tmp_path / "ledger.json")
    content = RecordDict({"arrays": ArrayRecord([np.zeros(3)]), "config": ConfigRecord({"num-rounds": 3})})
    for config, words in ({"csv": str(path), "ledger": ledger}, "Mrs Smith"), ({"csv": str(path)}, "KeyError.*ledger"):
        reply = program.client(Message(content, 101, "train"), Context(1, 101, config, RecordDict(), {}))
        assert reply.error.reason == "this client did not take part; its own log says why"
        assert re.search(words, capfd.readouterr().err)
    assert [*tmp_path.iterdir()] == [path]
    program.make_app(tmp_path / "app")
    parts = pytest.importorskip("tomllib").loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"][
        "app"
    ]["components"]
    for kind, app in ("clientapp", program.client), ("serverapp", program.server):
        module, _, name = parts[kind].partition(":")
        assert (tmp_path / "app" / f"{module}.py").exists() and getattr(program, name) is app


def nodes_of(files, folder):
    """A context for each file, as its node has it, with a ledger of its own."""
    return [
        Context(1, 101 + number, {"csv": str(path), "ledger": str(folder / f"{number}.json")}, RecordDict(), {})
        for number, path in enumerate(files)
    ]


def test_the_server_waits_for_a_time_and_names_what_is_missing(monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    program = importlib.import_module("flower_csv")
    grid = FakeGrid(2, None)
    waiting = r"2 of 4 hospitals are not connected after 0 s. .*supernode list.* .*num-hospitals=2"
    with pytest.raises(TimeoutError, match=waiting):
        program.serve(grid, 3, 4, wait_seconds=0)
    assert not grid.sent
    assert "0 of 4 hospitals trained" in capsys.readouterr().out
    seen = iter([1, 1, 2, 2])
    monkeypatch.setattr(grid, "get_node_ids", lambda: range(next(seen)))
    monkeypatch.setattr(program.time, "sleep", lambda seconds: None)
    program.wait_for_all(grid, 2, 60)
    assert capsys.readouterr().out == "Waiting for 1 of 2 hospitals, 60 s at most.\n"


@pytest.mark.slow
def test_two_files_of_one_name_have_a_row_each_and_the_model_is_kept_with_its_privacy(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(EXAMPLES)
    program = importlib.import_module("flower_csv")
    files = [tmp_path / place / "patients.csv" for place in ("north", "south")] + [tmp_path / "east.csv"]
    for path, patients in zip(files, (40, 60, 80), strict=True):
        path.parent.mkdir(exist_ok=True)
        path.write_text("age,pressure,exercise,ill\n" + "70,155,2,1\n40,115,8,0\n" * (patients // 2))
    nodes, model = nodes_of(files, tmp_path), tmp_path / "kept.keras"
    strategies = []
    monkeypatch.setattr(program.Averaging, "summary", lambda self: strategies.append(self))
    program.serve(FakeGrid(3, lambda message, number: program.client(message, nodes[number])), 1, 3, model)
    lines = capsys.readouterr().out.splitlines()
    rows = [line.rsplit(maxsplit=3)[0] for line in lines if " 4.0" in line or " 3.9" in line]
    assert rows == ["east", "patients (101)", "patients (102)"]
    assert "3 of 3 hospitals trained" in lines and f"The model is in {model}" in lines[-1]
    kept = tf.keras.models.load_model(model)
    x, _ = program.read(files[2])
    [strategy] = strategies
    np.testing.assert_array_equal(kept.get_weights()[0], strategy.trained.to_numpy_ndarrays()[0])
    assert kept.predict(x, verbose=0).shape == (80, 2)
    statement = (tmp_path / "kept.privacy.txt").read_text("utf-8")
    for name, patients in ("east", 80), ("patients (101)", 40), ("patients (102)", 60):
        spent = strategy.reports[name]["epsilon"]
        assert f"{name} (ledger): epsilon = {rounded_up(spent)} for one example of {name}" in statement
        assert f"of {patients}, noise multiplier" in statement


@pytest.mark.slow
def test_what_was_trained_until_a_hospital_was_gone_is_kept(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    program = importlib.import_module("flower_csv")
    program.make_files(tmp_path, 3)
    nodes, model = nodes_of(sorted(tmp_path.glob("*.csv")), tmp_path), tmp_path / "kept.keras"

    def answer(message, number):
        grid.nodes = grid.nodes[:2]
        return program.client(message, nodes[number])

    grid = FakeGrid(3, answer)
    with pytest.raises(TimeoutError, match="1 of 3 hospitals are not connected"):
        program.serve(grid, 2, 3, model, wait_seconds=0)
    assert tf.keras.models.load_model(model).count_params() == 8
    assert (tmp_path / "kept.privacy.txt").read_text("utf-8").count("20 steps") == 3


def test_a_model_that_could_not_be_saved_is_refused_before_the_training(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    program = importlib.import_module("flower_csv")
    for path in tmp_path / "model.h5", tmp_path / "absent" / "model.keras":
        with pytest.raises(ValueError, match="The model cannot be saved as"):
            program.check_model(path)
        monkeypatch.setattr("sys.argv", ["flower_csv.py", "--quick", "--model", str(path)])
        with pytest.raises(SystemExit, match="The model cannot be saved as"):
            program.main()
        config = {"model": str(path), "num-rounds": 1, "num-hospitals": 2, "wait-seconds": 0}
        with pytest.raises(ValueError, match="The model cannot be saved as"):
            program.server(FakeGrid(2, None), Context(1, 0, {}, RecordDict(), config))
    program.check_model(tmp_path / "model.keras")


@pytest.mark.slow
def test_each_hospital_of_a_folder_trains_in_every_round_within_the_target(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    program = importlib.import_module("flower_csv")
    program.make_files(tmp_path, 2)
    (tmp_path / "small.csv").write_text("age,pressure,exercise,ill\n" + "70,155,2,1\n40,115,8,0\n" * 20)
    files = sorted(tmp_path.glob("*.csv"))
    x, y = program.read(files[2])
    np.testing.assert_allclose(x[:2], [[1, 1, -1], [-1, -1, 1]])
    assert y[:2].tolist() == [1, 0] and len(y) == 40

    ledgers = [tmp_path / f"{number}.json" for number in range(3)]
    nodes = nodes_of(files, tmp_path)
    strategy = program.Averaging(3)
    start = ArrayRecord(program.make_net().get_weights())
    grid = FakeGrid(3, lambda message, number: program.client(message, nodes[number]))
    strategy.start(grid, start, num_rounds=2, train_config=ConfigRecord({"num-rounds": 2}))
    assert {name: report["steps"] for name, report in strategy.reports.items()} == {
        "hospital-00": 40, "hospital-01": 40, "small": 40,
    }  # fmt: skip
    for path, ledger in zip(files, ledgers, strict=True):
        assert json.loads(ledger.read_text()) == strategy.reports[path.stem]["ledger"]
        run, again = [row["run"] for row in strategy.reports[path.stem]["ledger"]["rows"]]  # of each round
        patients = len(program.read(path)[1])
        spent = compute_epsilon(
            num_examples=patients, batch_size=min(60, patients), noise_multiplier=run["noise_multiplier"], num_steps=40,
            delta=1e-4, adjacency="zero_out",
        )  # fmt: skip
        assert run == again and run["num_examples"] == patients
        assert strategy.reports[path.stem]["epsilon"] == pytest.approx(spent) and 3.9 < spent <= 4
    lines = program.table([path.stem for path in files] + ["absent"], strategy.reports, 4).splitlines()
    assert lines[-1] == "3 of 4 hospitals trained" and lines[-2].split() == ["absent", "no", "report"]
