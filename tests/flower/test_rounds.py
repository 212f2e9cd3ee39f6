"""Which answers count in a round."""

import numpy as np
import pytest

pytest.importorskip("flwr")
from flower_fakes import FakeGrid, flat, model, moved
from flwr.serverapp import strategy as flower
from strategy_cases import CLIENTS, bad, clipped, config, fixed, one_round, updates

from tfdpfl import PrivacyError

NOTHING = ["error", "nan", "infinite", "square overflows", "wrong shape", "would broadcast", "missing", "extra",
           "complex", "text", "no array", "pickle", "two records", "no records", "another round",
           "unasked"]  # fmt: skip


@pytest.mark.parametrize("kind", NOTHING)
def test_a_client_that_sends_no_update_counts_as_one_that_changed_nothing_and_is_logged(kind, caplog):
    def answer(message, number):
        return bad(message, kind) if number == 0 else moved(updates)(message, number)

    strategy = fixed()
    result, _ = one_round(strategy, answer)
    without = sum(clipped(updates(i)) for i in range(1, CLIENTS)) / CLIENTS
    np.testing.assert_allclose(flat(result.arrays), without, rtol=1e-5, atol=1e-7)
    assert f"ode {'999' if kind == 'unasked' else '101'}" in caplog.text
    assert strategy.rounds_charged == 1


def test_a_node_that_a_strategy_asks_twice_is_refused():
    class Twice(flower.FedAvg):
        def configure_train(self, *arguments):
            return [m for m in super().configure_train(*arguments) for _ in range(2)]

    with pytest.raises(PrivacyError, match="twice"):
        one_round(fixed(Twice()), moved(updates))


def test_replies_without_a_round_are_ignored(caplog):
    strategy = fixed(noise_multiplier=1.0)
    grid = FakeGrid(2, moved(updates))
    messages = strategy.configure_train(1, model(), config(), grid)
    replies = grid.send_and_receive(messages)
    assert strategy.aggregate_train(1, replies)[0] is not None
    assert strategy.aggregate_train(1, replies) == (None, None) and "belongs to no round" in caplog.text
    assert strategy.rounds_charged == 1
