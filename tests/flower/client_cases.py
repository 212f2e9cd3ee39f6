"""What tests of clients share: clients with contexts of their own, and a server that does nothing."""

import pytest

pytest.importorskip("flwr")
from dp_accounting import dp_event
from flower_fakes import arrays_in, model, reply
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import strategy as flower

import tfdpfl
from tfdpfl.flower import (
    DifferentialPrivacyFixedClipping,
)


class Clients:
    """Each with a context of its own, as Flower keeps it."""

    def __init__(self, train, mods=(), run_config=None):
        self.train, self.mods, self.run_config = train, mods, run_config or {}
        self.contexts = {}

    def __call__(self, message, number):
        config = {"partition-id": number}
        context = self.contexts.setdefault(number, Context(1, number + 101, config, RecordDict(), self.run_config))
        app = self.train
        for mod in reversed(self.mods):
            app = lambda m, c, mod=mod, inner=app: mod(m, c, inner)
        return app(message, context)


def shifted(by):
    return lambda message, context: reply(message, {k: v + by for k, v in arrays_in(message).items()}, {"loss": 1.0})


def plain(clients=3, **how):
    """A server that does nothing, so that what clients do is seen."""
    return DifferentialPrivacyFixedClipping(
        flower.FedAvg(), noise_multiplier=0.0, l2_norm_clip=1e9, clients_per_round=clients, delta=1e-5, **how
    )


def message(arrays=None):
    return Message(RecordDict({"arrays": arrays or model()}), 101, "train")


def replace_one(sigma, count):
    event = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(sigma), count)
    return tfdpfl.accounting.price(event, 1e-5, "pld", "replace_one").epsilon


SECRET = "could not convert string to float: 'HIV positive'"


PLAN = dict(epsilon=8.0, delta=1e-5, l2_norm_clip=2.0, num_rounds=3, num_clients=3, min_dataset_size=100)
