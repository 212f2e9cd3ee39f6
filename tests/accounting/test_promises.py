"""A promise's cost is the price of its event, for the neighbours that the event is stated for."""

import pytest
from report_cases import DELTA, gaussian

from tfdpfl import accounting
from tfdpfl.accounting.promises import Promise, fixed
from tfdpfl.audit import report


class Coin:
    """A mechanism of another package, which `tfdpfl.reports` has never heard of."""

    def __init__(self, sigma):
        self.sigma = sigma

    def promises(self, delta):
        event = gaussian(self.sigma).dp_event
        one = Promise(kind="coin", unit="example", adjacency="add_or_remove_one", event=event, mechanisms=["a throw"],
                      notes=["Covered: the throw."], warnings=["it is made up"], part="heads")  # fmt: skip
        two = Promise(kind="coin", unit="client", adjacency="zero_out", price=fixed(0.5, delta, "rdp"), part="tails")
        return [one, two]


def test_a_mechanism_of_your_own_is_a_part():
    made = report({"mine": Coin(3.0), "b": gaussian(4.0)}, delta=DELTA, audits={"b": 0.1})
    total = next(total for total in made.totals if total.parts == ("mine, heads", "b")).figures
    assert total.epsilon == pytest.approx(gaussian(2.4).epsilon(DELTA), rel=1e-3)
    heads, tails, _ = made.parts
    assert (heads.kind, heads.unit, heads.mechanisms, heads.notes) == (
        "coin", "example", ("a throw",), ("Covered: the throw.",)
    )  # fmt: skip
    assert heads.figures.epsilon == gaussian(3.0).epsilon(DELTA)
    assert (tails.unit, tails.figures.epsilon, tails.figures.accountant) == ("client", 0.5, "rdp")
    assert "mine, heads: it is made up" in made.warnings and len(made.not_added) == 1
    assert dict(tails.figures.epsilons)[1e-6] is None


def test_an_event_is_priced_for_the_neighbours_that_it_is_stated_for():
    event = gaussian(3.0, sampling="poisson", batch_size=100).dp_event
    promise = Promise(kind="", unit=None, adjacency="replace_one", event=event, event_adjacency="add_or_remove_one")
    assert promise.priced_adjacency == "add_or_remove_one"
    assert promise.cost(DELTA, "pld") == accounting.price(event, DELTA, "pld", "add_or_remove_one")
