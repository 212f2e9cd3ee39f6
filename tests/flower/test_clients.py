"""A client that knows nothing but numpy trains under a strategy."""

import numpy as np
import pytest

pytest.importorskip("flwr")
from client_cases import Clients
from flower_fakes import FakeGrid, arrays_in, reply
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower

from tfdpfl.flower import (
    DifferentialPrivacyFixedClipping,
)

# Local noise.


# Example-level DP.


# NbAFL.


# A client of another framework.


class NumpyCNN:
    """A small convolutional network on 8 x 8 digits with the names and counters of a PyTorch state_dict, trained by
    SGD in numpy: the server sees no more of PyTorch than this."""

    def __init__(self, seed=0):
        rng = np.random.default_rng(seed)
        self.state = {
            "conv1.weight": rng.normal(size=(6, 1, 3, 3), scale=0.3).astype(np.float32),
            "conv1.bias": np.zeros(6, np.float32),
            "bn1.num_batches_tracked": np.array(0, np.int64),
            "fc.weight": rng.normal(size=(10, 6 * 36), scale=0.05).astype(np.float32),
            "fc.bias": np.zeros(10, np.float32),
        }

    def forward(self, x):
        windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (1, 2)).reshape(len(x), 36, 9)
        h = windows @ self.state["conv1.weight"].reshape(6, 9).T + self.state["conv1.bias"]
        flat_h = np.maximum(h, 0).reshape(len(x), -1)
        return windows, h, flat_h, flat_h @ self._fc.T + self.state["fc.bias"]

    @property
    def _fc(self):  # channels last, as the windows are
        return self.state["fc.weight"].reshape(10, 6, 36).transpose(0, 2, 1).reshape(10, -1)

    def train(self, x, y, rate=0.1, steps=10):
        for k in range(steps):
            part = slice(32 * k % len(x), 32 * k % len(x) + 32)
            windows, h, flat_h, logits = self.forward(x[part])
            p = np.exp(logits - logits.max(1, keepdims=True))
            d = (p / p.sum(1, keepdims=True) - np.eye(10)[y[part]]) / len(logits)
            dh = (d @ self._fc).reshape(h.shape) * (h > 0)
            fc = (d.T @ flat_h).reshape(10, 36, 6).transpose(0, 2, 1).reshape(10, -1)
            conv = np.einsum("nwc,nwk->ck", dh, windows).reshape(6, 1, 3, 3)
            for name, g in {
                "fc.weight": fc,
                "fc.bias": d.sum(0),
                "conv1.weight": conv,
                "conv1.bias": dh.sum((0, 1)),
            }.items():
                self.state[name] = (self.state[name] - rate * g).astype(np.float32)
            self.state["bn1.num_batches_tracked"] = self.state["bn1.num_batches_tracked"] + 1


def test_a_client_that_knows_only_numpy_trains_a_cnn_on_images():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = (images / 16).reshape(-1, 8, 8).astype(np.float32)
    parts = [slice(i, 1500, 5) for i in range(5)]

    def train(message, context):
        number, net = int(context.node_config["partition-id"]), NumpyCNN()
        net.state = arrays_in(message)
        net.train(images[parts[number]], labels[parts[number]])
        return reply(message, net.state)

    start = NumpyCNN()
    strategy = DifferentialPrivacyFixedClipping(
        flower.FedAvgM(server_momentum=0.9),
        noise_multiplier=0.05,
        l2_norm_clip=0.7,
        clients_per_round=5,
        delta=1e-3,
        seed=0,
    )
    first = ArrayRecord({k: Array(v) for k, v in start.state.items()})
    result = strategy.start(FakeGrid(5, Clients(train)), first, num_rounds=15)
    net = NumpyCNN()
    net.state = {k: v.numpy() for k, v in result.arrays.items()}
    assert net.state["bn1.num_batches_tracked"] == 0 and net.state["bn1.num_batches_tracked"].dtype == np.int64
    assert np.mean(net.forward(images[1500:])[-1].argmax(1) == labels[1500:]) > 0.75
