"""The example app, run as its user would run it: by Flower's own command, from another folder than its own."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tensorflow as tf

pytest.importorskip("flwr")
from flower_fakes import FakeGrid
from flwr.app import Context, RecordDict

import tfdpfl

APP = Path(__file__).parents[2] / "examples" / "flower_hospitals"
ROW = r"^{} +{} +60 +(\d\.\d{{3}}) +(\d\.\d{{3}}) +(\d\d\.\d)% +(0\.\d{{3}})$"


def free_ports(count):
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [str(one.getsockname()[1]) for one in held]
    for one in held:
        one.close()
    return ports


def listening(port):
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


def running(folder):
    """Processes that name the folder in their command or their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            told = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in told and int(process.name) != os.getpid():
            found.append(int(process.name))
    return found


@pytest.mark.slow
def test_flwr_run_simulates_three_hospitals_and_prints_their_table(tmp_path):
    pytest.importorskip("ray")
    home, elsewhere, ports = tmp_path / "home", tmp_path / "elsewhere", free_ports(2)
    shutil.copytree(APP, tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    elsewhere.mkdir()
    bin_of_python = Path(sys.executable).parent
    environment = {
        **os.environ, "FLWR_HOME": str(home), "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": ports[0],
        "FLWR_LOCAL_CONTROL_API_PORT": ports[1], "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0", "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": str(Path(tfdpfl.__file__).parents[1]), "UV_OFFLINE": "1",
        "PATH": f"{bin_of_python}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    # As `flwr run` would start it if there was none, but in 15 s, which a busy machine does not always give.
    superlink = subprocess.Popen(
        [bin_of_python / "flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", ports[0],
         "--control-api-address", f"127.0.0.1:{ports[1]}", "--database", tmp_path / "state.db"],
        env=environment, cwd=elsewhere, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        while not listening(int(ports[0])):
            assert superlink.poll() is None
            time.sleep(0.2)
        done = subprocess.run(
            [bin_of_python / "flwr", "run", tmp_path / "app", "--stream", "--federation-config", "num-supernodes=3",
             "--run-config", f'model="{tmp_path / "model.keras"}"'],
            cwd=elsewhere, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    finally:
        for kind in (signal.SIGTERM, signal.SIGKILL):
            for process in running(tmp_path):
                os.kill(process, kind)
            until = time.monotonic() + 200
            while (superlink.poll() is None or running(tmp_path)) and time.monotonic() < until:
                time.sleep(0.2)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name, beds in ("Edinburgh Hospital", 700), ("Clydebank Infirmary", 800), ("Orkney Hospital", 900):
        row = re.search(ROW.format(name, beds), done.stdout, re.M)
        assert row, done.stdout[-3000:]
        spent, left, accuracy, auc = map(float, row.groups())
        assert spent + left == pytest.approx(4.0, abs=0.002) and 1.5 < spent < 4
        assert accuracy > 75 and 0.4 < auc < 0.6
    assert "3 of 3 hospitals answered" in done.stdout
    assert tf.keras.models.load_model(tmp_path / "model.keras").input_shape == (None, 4)
    statement = (tmp_path / "model.privacy.txt").read_text("utf-8")
    assert len(re.findall(r"Hospital|Infirmary", statement)) == 9 and statement.count(" 20 steps") == 9
    assert not [*elsewhere.iterdir()]


def test_the_app_says_which_hospitals_it_waits_for(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(APP))
    from hospitals.server import wait_for_all

    with pytest.raises(RuntimeError, match=r"2 of 3 .*num-supernodes=3"):
        wait_for_all(FakeGrid(2, None), seconds=0)
    wait_for_all(FakeGrid(3, None), seconds=0)
    assert capsys.readouterr().out in ("", "Waiting: 2 of 3 hospitals are connected.\n")


def test_a_model_that_could_not_be_saved_is_refused_before_the_training(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(APP))
    from hospitals.server import app

    for path in tmp_path / "model.h5", tmp_path / "absent" / "model.keras":
        with pytest.raises(ValueError, match=r"must be a file that ends in \.keras, in a folder that is there"):
            app(FakeGrid(3, None), Context(1, 0, {}, RecordDict(), {"model": str(path)}))
