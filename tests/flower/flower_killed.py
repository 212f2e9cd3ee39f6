"""A server that is killed by SIGKILL and started again until it ends: python flower_killed.py FOLDER

It trains with independent and with banded noise, in folders of these names. Each life is a fork of this process, which
has imported all and drawn nothing. A released model is on disk, as its audience has it, when the strategy has returned
it.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import flwr.serverapp.strategy as flower
import numpy as np
from flower_fakes import FakeGrid, arrays_in, flat, model, reply

import tfdpfl.noise.correlated  # noqa: F401
from tfdpfl.flower import DifferentialPrivacyFixedClipping
from tfdpfl.noise import Banded

ROUNDS, CLIENTS = 10, 3


def live(folder, kind, life):
    noise = Banded(bands=2, coefficients=(1.0, 0.6), min_separation=2, max_participations=12)
    strategy = DifferentialPrivacyFixedClipping(
        flower.FedAvg(min_available_nodes=1), noise_multiplier=1.0, l2_norm_clip=1.0, delta=1e-5, clients_per_round=1,
        noise=noise if kind == "banded" else None, ledger_path=folder / "ledger", accountant="rdp",
    )  # fmt: skip

    def show(number, arrays):
        new = folder / "new.npy"
        np.save(new, flat(arrays))
        os.replace(new, folder / f"shown-{life:03}-{number:03}.npy")
        time.sleep(0.05)  # else the last rounds are over before they are seen, and nothing is killed in them

    grid = FakeGrid(CLIENTS, lambda message, number: reply(message, arrays_in(message)))
    strategy.start(grid, model(w=np.zeros((100, 20), np.float32)), num_rounds=ROUNDS, evaluate_fn=show)


def charged(folder):
    path = folder / "ledger"
    return path.read_bytes().count(b'{"charge"') if path.exists() else 0


def released(folder):
    """Rounds whose model was shown; the first of a life is that of the life before."""
    names = [path.stem.split("-")[1:] for path in folder.glob("shown-*")]
    first = {life: min(int(n) for of, n in names if of == life) for life, _ in names}
    return sum(int(number) > first[life] for life, number in names)


def main(folder, kind):
    chance, kills, life = random.Random(0), 0, 0
    while True:
        begun, pid = charged(folder), os.fork()
        if pid == 0:
            live(folder, kind, life)
            os._exit(0)
        until = begun + chance.randrange(0, 5)
        while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and charged(folder) < until:
            time.sleep(0.001)
        if ended[0] == 0:
            time.sleep(chance.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
            ended = os.waitpid(pid, 0)
        if ended[1] == 0:
            break
        assert os.WIFSIGNALED(ended[1]), "it failed by itself"
        kills, life = kills + 1, life + 1
        assert charged(folder) >= released(folder), "a model was shown that is not charged"
    return {"kills": kills, "charged": charged(folder), "released": released(folder)}


if __name__ == "__main__":
    results = {}
    for kind in ("independent", "banded"):
        folder = Path(sys.argv[1]) / kind
        folder.mkdir()
        results[kind] = main(folder, kind)
    print("RESULT", json.dumps(results))
