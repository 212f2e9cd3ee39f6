"""What tests of strategies share: five clients whose updates are known, what a bad one sends, and prices."""

import math

import numpy as np
import pytest

pytest.importorskip("flwr")
from dp_accounting import dp_event
from flower_fakes import FakeGrid, arrays_in, model, moved, reply
from flwr.app import Array, ArrayRecord, Error, Message, RecordDict
from flwr.serverapp import strategy as flower
from scipy.stats import norm as gauss

import tfdpfl
from tfdpfl.flower import DifferentialPrivacyFixedClipping as Fixed

CLIENTS = 5


def fixed(inner=None, **arguments):
    given = dict(noise_multiplier=0.0, l2_norm_clip=1.0, delta=1e-5)
    if "sampling_rate" not in arguments:
        given["clients_per_round"] = CLIENTS
    return Fixed(inner or flower.FedAvg(), **{**given, **arguments})


def updates(number):
    """Norms from 0.4 to 2, each in another direction."""
    direction = np.random.default_rng(number).normal(size=10)
    return 0.4 * (number + 1) * direction / np.linalg.norm(direction)


def one_round(strategy, answer, initial=None, rounds=1, clients=CLIENTS):
    grid = FakeGrid(clients, answer)
    return strategy.start(grid, initial or model(), num_rounds=rounds), grid


def clipped(update, clip=1.0):
    return update * min(1, clip / np.linalg.norm(update))


def bad(message, number):
    """What client 0 sends, by name; each is bounded by the clip, or counts as nothing."""
    sent = arrays_in(message)
    good = {k: v + 1 for k, v in sent.items()}

    def replaced(**arrays):
        return reply(message, {**good, **arrays})

    nan = good["w"].copy()
    nan[0, 0] = np.nan
    late = Message(message.content, dst_node_id=7, message_type="train", group_id="0-of another round")
    late.metadata.dst_node_id = message.metadata.dst_node_id
    unasked = Message(message.content, dst_node_id=999, message_type="train")
    broken = reply(message, good)
    broken.content["arrays"]["w"] = Array("float32", (3, 2), "numpy.ndarray", b"\x93NUMPY no array at all")
    pickled = reply(message, good)
    pickled.content["arrays"]["w"] = Array(
        "object", (1,), "numpy.ndarray", b"\x93NUMPY\x01\x00\x46\x00"
        + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(69) + b"\n" + b"x" * 8,
    )  # fmt: skip
    two = RecordDict({**reply(message, good).content, "more": ArrayRecord([np.ones(3)])})
    return {
        "error": Message(Error(code=1, reason="no data"), reply_to=message),
        "nan": replaced(w=nan),
        "infinite": replaced(b=np.full(4, -np.inf, np.float32)),
        "square overflows": replaced(b=np.full(4, 1e200)),
        "wrong shape": replaced(w=good["w"].T),
        "would broadcast": replaced(b=np.ones(1, np.float32)),
        "missing": reply(message, {"w": good["w"]}),
        "extra": replaced(more=np.ones(3, np.float32)),
        "complex": replaced(b=np.full(4, 1j)),
        "text": replaced(b=np.array(["a"] * 4)),
        "no array": broken,
        "pickle": pickled,
        "two records": Message(two, reply_to=message),
        "no records": Message(RecordDict(), reply_to=message),
        "another round": reply(late, good),
        "unasked": reply(unasked, good),
    }[number]


LARGE = dict(w=np.zeros((100, 200), np.float32), b=np.zeros(5, np.float64))


def same(message, number):
    return reply(message, arrays_in(message))


def looks_like(sample, stddev):
    """Whether normals have this standard deviation: true for the right one but with probability 1e-9."""
    return abs(np.std(sample) / stddev - 1) < gauss.isf(5e-10) / math.sqrt(2 * len(sample))


def config():
    from flwr.app import ConfigRecord

    return ConfigRecord()


def loud(message, number):
    got = moved(updates)(message, number)
    got.content["metrics"].update({"loss": 0.25 * number, "secret": 42.0, "list": [1.0, 2.0]})
    return got


def limited(path, clients, **how):
    how = dict(clients_per_round=2, max_participations=2) | how
    return Fixed(
        flower.FedAvg(min_available_nodes=1, fraction_evaluate=0.0), noise_multiplier=1.0, l2_norm_clip=1.0, delta=1e-5,
        accountant="rdp", ledger_path=path, clients=clients, **how,
    )  # fmt: skip


E1 = np.eye(10)[0]


def run(strategy, answer, rounds=1, clients=4, **start):
    return strategy.start(FakeGrid(clients, answer), model(), num_rounds=rounds, **start)


def epsilon_of(*events):
    return tfdpfl.accounting.price(dp_event.ComposedDpEvent(list(events)), 1e-5, "pld", "zero_out").epsilon
