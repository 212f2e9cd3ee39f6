"""A grid in memory: clients are functions, and a test decides what reaches the server."""

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1  # as in a ServerApp's process

MODEL = {"w": np.zeros((3, 2), np.float32), "b": np.zeros(4, np.float32)}
SIZE = 10


class FakeGrid(Grid):
    """``answer(message, number)`` returns a client's reply, or several, or None for none."""

    def __init__(self, clients, answer):
        self.nodes = [101 + i for i in range(clients)]
        self.answer = answer
        self.sent = []  # the nodes that were asked, call by call

    run = property(lambda self: None)

    def set_run(self, run):
        pass

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        raise NotImplementedError

    def pull_messages(self, message_ids):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        messages = list(messages)
        self.sent.append([message.metadata.dst_node_id for message in messages])
        found = []
        for message in messages:
            got = self.answer(message, message.metadata.dst_node_id - 101)
            found += got if isinstance(got, list) else [got] if got is not None else []
        return found


def model(**arrays):
    return ArrayRecord({**{k: _array(v) for k, v in MODEL.items()}, **{k: _array(v) for k, v in arrays.items()}})


def _array(value):
    from flwr.app import Array

    return Array(np.asarray(value))


def arrays_in(message):
    return {k: v.numpy() for k, v in next(iter(message.content.array_records.values())).items()}


def reply(message, arrays, metrics=None, **records):
    """A well-behaved client's."""
    content = RecordDict(
        {
            "arrays": ArrayRecord({k: _array(v) for k, v in arrays.items()}),
            "metrics": MetricRecord({"num-examples": 10, **(metrics or {})}),
            **records,
        }
    )
    return Message(content, reply_to=message)


def moved(update_of):
    """Clients that add ``update_of(number)``, a flat update of 10 numbers, to what they are sent."""

    def answer(message, number):
        sent, update = arrays_in(message), np.asarray(update_of(number), np.float64)
        parts = {"w": update[:6].reshape(3, 2), "b": update[6:]}
        return reply(message, {k: (v + parts[k]).astype(v.dtype) if k in parts else v for k, v in sent.items()})

    return answer


def flat(record):
    return np.concatenate([np.ravel(record[k].numpy()) for k in ("w", "b")]).astype(np.float64)
