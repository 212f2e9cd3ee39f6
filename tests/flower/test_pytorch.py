"""Models in PyTorch's layout: kernels OIHW, linear weights out by in, a BatchNorm's statistics and its counter.

The net is that of PyTorch's tutorial on CIFAR-10, two convolutions and three linear layers, with a BatchNorm. The
server sees numpy arrays alone, so that most of this needs no PyTorch; where it is installed, a net of its own trains
through the page's snippet.
"""

import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
from flower_fakes import FakeGrid, arrays_in, reply
from flwr.app import Array, ArrayRecord
from flwr.serverapp import strategy as flower

from tfdpfl.flower import DifferentialPrivacyFixedClipping

SHAPES = {
    "conv1.weight": (6, 3, 5, 5), "conv1.bias": (6,), "bn1.weight": (6,), "bn1.bias": (6,), "bn1.running_mean": (6,),
    "bn1.running_var": (6,), "bn1.num_batches_tracked": (), "conv2.weight": (16, 6, 5, 5), "conv2.bias": (16,),
    "fc1.weight": (120, 400), "fc1.bias": (120,), "fc2.weight": (84, 120), "fc2.bias": (84,), "fc3.weight": (10, 84),
    "fc3.bias": (10,),
}  # fmt: skip
STATISTICS = [name for name in SHAPES if name.startswith("bn1.running") or name.endswith("tracked")]
CLIP, CLIENTS = 2.0, 5


def state(seed, names=SHAPES, scale=1.0):
    rng = np.random.default_rng(seed)
    made = {name: (scale * rng.normal(size=SHAPES[name])).astype(np.float32) for name in names}
    if "bn1.num_batches_tracked" in made:
        made["bn1.num_batches_tracked"] = np.array(7 * seed, np.int64)
    return made


def mean_of_clipped(base, updates):
    """What a round without noise must give, in float64."""
    total = {name: np.zeros(w.shape) for name, w in base.items() if w.dtype.kind == "f"}
    for update in updates:
        norm = np.sqrt(sum(np.sum(update[name].astype(float) ** 2) for name in total))
        for name in total:
            total[name] += update[name] * min(1.0, CLIP / norm)
    return {name: w + total[name] / CLIENTS if name in total else w for name, w in base.items()}


def trained(base, answer, **arguments):
    strategy = DifferentialPrivacyFixedClipping(
        flower.FedAvg(),
        l2_norm_clip=CLIP,
        delta=1e-5,
        clients_per_round=CLIENTS,
        **{"noise_multiplier": 0.0, **arguments},
    )
    record = ArrayRecord({name: Array(value) for name, value in base.items()})
    return strategy.start(FakeGrid(CLIENTS, answer), record, num_rounds=1)


@pytest.mark.parametrize("parameters_alone", [False, True])
def test_a_round_is_the_mean_of_clipped_updates_in_pytorchs_layout(parameters_alone, caplog):
    names = [name for name in SHAPES if not (parameters_alone and name in STATISTICS)]
    base = state(1, names)
    updates = [state(10 + i, names, scale=0.003 * 3**i) for i in range(CLIENTS)]  # norms from 0.7 to 60

    def answer(message, number):
        sent = arrays_in(message)
        assert [*sent] == names
        new = {name: sent[name] + updates[number][name] for name in names}
        return reply(message, {name: np.array(value, order="F") for name, value in new.items()})  # as if transposed

    result = trained(base, answer)
    got = {name: value.numpy() for name, value in result.arrays.items()}
    assert [*got] == names  # load_state_dict goes by name, a list of arrays by place
    for name, want in mean_of_clipped(base, updates).items():
        assert got[name].dtype == base[name].dtype and got[name].shape == SHAPES[name]
        np.testing.assert_allclose(got[name], want, atol=3e-6)
    if not parameters_alone:
        assert got["bn1.num_batches_tracked"] == 7  # whatever clients counted
    assert ("named_parameters()" in caplog.text and "bn1.running_var" in caplog.text) != parameters_alone


def test_noise_makes_a_variance_negative_and_leaves_the_counter():
    base = state(1)
    base["bn1.running_var"] = np.full(6, 0.1, np.float32)
    result = trained(base, lambda message, number: reply(message, arrays_in(message)), noise_multiplier=3.0)
    assert result.arrays["bn1.running_var"].numpy().min() < 0  # σ is 1.2: 6 chances of 0.47 each, and no other mean
    assert result.arrays["bn1.num_batches_tracked"].numpy() == 7


@pytest.mark.parametrize("kind", ["hwio", "no buffers", "counter of another shape"])
def test_a_client_of_another_layout_counts_as_none_and_is_named(kind, caplog):
    base, updates = state(1), [state(10 + i, scale=0.01) for i in range(CLIENTS)]

    def answer(message, number):
        new = {name: value + updates[number][name] for name, value in arrays_in(message).items()}
        if number == 0 and kind == "hwio":
            new["conv1.weight"] = new["conv1.weight"].transpose(2, 3, 1, 0)
        elif number == 0 and kind == "no buffers":
            new = {name: value for name, value in new.items() if name not in STATISTICS}
        elif number == 0:
            new["bn1.num_batches_tracked"] = np.zeros(1, np.int64)
        return reply(message, new)

    got = trained(base, answer).arrays
    for name, want in mean_of_clipped(base, updates[1:]).items():
        np.testing.assert_allclose(got[name].numpy(), want, atol=3e-6)
    said = {"hwio": "'conv1.weight' has", "no buffers": "running_mean", "counter of another shape": "tracked' has"}
    assert "Node 101" in caplog.text and said[kind] in caplog.text


@pytest.mark.slow
def test_a_net_of_pytorchs_own_trains_through_the_pages_snippet():
    torch = pytest.importorskip("torch", reason="needs PyTorch, which is in no lock beside Flower")
    from sklearn.datasets import load_digits

    page = (Path(__file__).parents[2] / "docs" / "flower-recipes.md").read_text("utf-8")
    [snippet] = [code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "named_parameters" in code]
    shown = {}
    exec(snippet, shown)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv1, self.bn1 = torch.nn.Conv2d(3, 6, 5), torch.nn.BatchNorm2d(6)
            self.conv2, self.pool = torch.nn.Conv2d(6, 16, 5), torch.nn.MaxPool2d(2, 2)
            self.fc1, self.fc2, self.fc3 = (torch.nn.Linear(*size) for size in ((400, 120), (120, 84), (84, 10)))

        def forward(self, x):
            x = self.pool(torch.relu(self.bn1(self.conv1(x))))
            x = torch.flatten(self.pool(torch.relu(self.conv2(x))), 1)
            return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))

    torch.manual_seed(0)
    torch.set_num_threads(1)
    assert [(name, tuple(value.shape)) for name, value in Net().state_dict().items()] == [*SHAPES.items()]
    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 1, 8, 8) / 16, np.ones((1, 3, 4, 4)))  # 32 x 32 in 3 colours, as CIFAR's
    x, y = torch.tensor(images, dtype=torch.float32), torch.tensor(labels)
    nets = [Net() for _ in range(CLIENTS)]  # each keeps its own statistics

    def answer(message, number):
        net = nets[number]
        chosen = [torch.arange(number, 1500, CLIENTS)[32 * step % 300 :][:32] for step in range(10)]
        shown["train_locally"](net, message.content["arrays"], [(x[some], y[some]) for some in chosen])
        return shown["answer"](message, net, 300)

    strategy = DifferentialPrivacyFixedClipping(
        flower.FedAvg(), noise_multiplier=0.02, l2_norm_clip=CLIP, delta=1e-5, clients_per_round=CLIENTS
    )
    result = strategy.start(FakeGrid(CLIENTS, answer), shown["parameters_of"](Net()), num_rounds=8)
    assert [*result.arrays] == [name for name in SHAPES if name not in STATISTICS]
    with torch.no_grad():
        for net in nets:
            shown["load_parameters"](net, result.arrays)
            assert int(net.bn1.num_batches_tracked) == 80  # its own count
        right = (nets[0].eval()(x[1500:]).argmax(1) == y[1500:]).float().mean()
    assert right > 0.8
