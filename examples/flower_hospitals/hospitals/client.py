"""Runs at a hospital. The records stay here, and every message that leaves protects each patient."""

from __future__ import annotations

import functools

import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from hospitals.data import patients_of
from hospitals.model import DELTA, HOW, TARGET_EPSILON, make_loss, make_model
from tfdpfl.audit import membership_inference
from tfdpfl.flower import example_dp

app = ClientApp()


@functools.cache
def trainer(keeps_a_file: bool):
    return example_dp(
        make_model,
        lambda context: patients_of(number(context))[0],
        loss=make_loss(),
        delta=DELTA,
        target_epsilon=TARGET_EPSILON,
        ledger_path="{ledger}" if keeps_a_file else None,  # an entry of the node's config
        **HOW,
    )


def number(context: Context) -> int:
    return int(context.node_config["partition-id"])


@app.train()
def train(message: Message, context: Context) -> Message:
    return trainer("ledger" in context.node_config)(message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """On patients that were not trained on. Exact figures, which are in no ε: here a hospital agrees to show them."""
    own, strangers = patients_of(number(context))
    model = make_model()
    model.compile(loss=make_loss())
    model.set_weights(message.content["arrays"].to_numpy_ndarrays())
    accuracy = float(np.mean(model.predict(strangers[0], verbose=0).argmax(1) == strangers[1]))
    attack = membership_inference(model, own, strangers)
    found = {"partition-id": number(context), "num-examples": len(strangers[1]), "accuracy": accuracy,
             "membership-auc": float(attack.auc)}  # fmt: skip
    return Message(RecordDict({"metrics": MetricRecord(found)}), reply_to=message)
