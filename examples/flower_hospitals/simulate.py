"""Simulates the app on one machine with Ray: python examples/flower_hospitals/simulate.py"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # it is 15: on a busy machine clients would hardly run

from flwr.simulation import run_simulation
from hospitals.client import app as client
from hospitals.data import HOSPITALS
from hospitals.server import app as server

if __name__ == "__main__":
    run_simulation(server, client, num_supernodes=len(HOSPITALS))
