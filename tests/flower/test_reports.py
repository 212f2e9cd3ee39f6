"""What a client keeps and reports of its own privacy outlives its process, and is read or refused by the server."""

import json
import logging

import numpy as np
import pytest

pytest.importorskip("flwr")
from client_cases import Clients, message, plain, replace_one, shifted
from dp_accounting import dp_event
from flower_fakes import FakeGrid, arrays_in, flat, model, reply
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import strategy as flower
from strategy_cases import epsilon_of

import tfdpfl
from tfdpfl import PrivacyError, PrivacyLedger
from tfdpfl.flower import (
    DifferentialPrivacyFixedClipping,
    client_reports,
    local_dp_mod,
)
from tfdpfl.flower.reports import ClientLedger, as_template
from tfdpfl.flower.spent import ledger_of_uploads


def test_a_projects_report_has_the_strategy_and_what_its_clients_said():
    from tfdpfl.audit import report

    mods = [local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5)]
    strategy = DifferentialPrivacyFixedClipping(
        flower.FedAvg(), noise_multiplier=3.0, l2_norm_clip=1.0, clients_per_round=3, delta=1e-5
    )
    strategy.start(FakeGrid(3, Clients(shifted(1.0), mods)), model(), num_rounds=2)
    server, told = report({"fed": strategy}, delta=1e-5).parts
    assert (server.unit, told.name, told.unit) == ("client", "fed, told by clients (local)", "client's update")
    assert told.figures.epsilon == pytest.approx(replace_one(2.0, 2), rel=1e-6)  # moves two clips; noise of four
    # All three take part in both rounds.
    twice = dp_event.SelfComposedDpEvent(dp_event.GaussianDpEvent(3.0), 2)
    least = tfdpfl.accounting.price(twice, 1e-5, "pld", "add_or_remove_one").epsilon
    assert server.figures.epsilon >= least * 0.999
    assert server.figures.epsilon == pytest.approx(strategy.ledger.epsilon(1e-5))


def test_clients_of_other_releases_are_read_or_refused_in_a_sentence(caplog, tmp_path):
    """0: as this release; 1: as 0.1, without versions; 2: a newer report; 3: a newer ledger in it; 4: no report."""
    logger = logging.getLogger("flwr")
    logger.setLevel(logging.WARNING)
    logger.propagate = True  # so that caplog sees it
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=1e-12, delta=1e-5)
    of = Clients(shifted(1.0), [mod])

    def answer(message, number):
        reply = of(message, number)
        record = reply.content["tfdpfl.privacy"]
        told = json.loads(record["report"])
        assert told["version"] == 1 and told["written_by"].startswith("tfdpfl 0.")
        newer = {"version": 99, "written_by": "tfdpfl 9.1.0"}
        if number == 1:
            told = {name: value for name, value in told.items() if name not in newer}
        elif number == 2:
            told |= newer
        elif number == 3:
            told["ledger"] |= newer
        elif number == 4:
            told["level"] = "unheard"
        record["report"] = json.dumps(told)
        return reply

    strategy = plain(5, monitor_folder=tmp_path)
    result = strategy.start(FakeGrid(5, answer), model(), num_rounds=1)
    assert {*strategy.contributors[0]} == {"101", "102", "105"} and {*strategy.client_reports} == {101, 102}
    assert np.linalg.norm(flat(result.arrays)) == pytest.approx(3 / 5, rel=1e-5)  # three updates of norm 1, of five
    for node in (103, 104):
        assert f"Node {node} counts as if it had not changed the model: The report of node {node}" in caplog.text
    assert caplog.text.count("written by tfdpfl 9.1.0, but tfdpfl 0.") == 2 and "upgrade with pip" in caplog.text
    assert {*strategy.newer_clients} == {103, 104} and "upgrade with pip" in strategy.newer_clients[103]
    assert json.loads((tmp_path / "rounds.jsonl").read_text())["clients_too_new"] == 2
    assert "Node 105's report on its own privacy is left out: 'unheard'" in caplog.text
    assert len(strategy.promises(1e-5)) == 2  # what is kept can be stated
    with pytest.raises(PrivacyError, match="The report of node 103 is of format version 99"):
        client_reports([answer(Message(RecordDict({"arrays": model()}), 103, "train"), 2)])


def test_a_clients_ledger_outlives_its_process(tmp_path):
    path = tmp_path / "of-{partition-id}-{node_id}.json"
    for life in range(2):
        mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5, ledger_path=path)
        answer = Clients(shifted(1.0), [mod])(message(), 0)  # another context: what Flower kept is gone
        assert client_reports([answer])[101]["steps"] == life + 1
    file = tmp_path / "of-0-101.json"
    assert file.stat().st_mode & 0o777 == 0o600
    client, older = Clients(shifted(1.0), [mod]), file.read_text()
    client(message(), 0)
    newest = file.read_text()
    file.write_text(older)  # of two steps, but what Flower keeps has three
    with pytest.raises(PrivacyError, match=r"has 2 steps, but this client has spent 3 in this run"):
        client(message(), 0)
    file.write_text(newest)
    assert client_reports([client(message(), 0)])[101]["steps"] == 4
    for damaged in ("{}", "", "{", "[1]"):
        file.write_text(damaged)
        with pytest.raises(ValueError, match=r"of-.*\.json' holds no whole ledger .*Restore the file"):
            Clients(shifted(1.0), [mod])(message(), 0)
    file.unlink()  # neither what Flower keeps of this run nor a restart may stand in for what other runs spent
    for again in (client, Clients(shifted(1.0), [mod])):
        with pytest.raises(PrivacyError, match=r"is gone or empty, but of-0-101\.json\.made shows that it was there"):
            again(message(), 0)
    (tmp_path / "of-0-101.json.made").unlink()
    assert client_reports([Clients(shifted(1.0), [mod])(message(), 0)])[101]["steps"] == 1
    with pytest.raises(ValueError, match=r"names 'hospital', but a node has"):
        Clients(shifted(1.0), [local_dp_mod(l2_norm_clip=1, noise_multiplier=1, delta=1e-5, ledger_path="{hospital}")])(
            message(), 0
        )


def test_a_ledger_of_examples_is_none_of_updates(tmp_path):
    """Updates of which examples alone were protected were in an epsilon of whole updates."""

    def opened(level, path="one.json"):
        return ClientLedger(Context(1, 101, {}, RecordDict(), {}), level, tmp_path / path)

    steps = PrivacyLedger().record(1.1, 2, num_examples=40, batch_size=8, adjacency="zero_out")
    opened("example").spend(steps)
    assert opened("example").ledger.steps == 2
    with pytest.raises(
        PrivacyError, match=r"one\.json' has entries that protect something else than one client's update"
    ):
        opened("local")
    opened("local", "two.json").spend(ledger_of_uploads(4.0))
    with pytest.raises(PrivacyError, match="something else than one example, so their ε would be of neither"):
        opened("example", "two.json")
    mixed = PrivacyLedger().merge(steps).merge(ledger_of_uploads(4.0))
    (tmp_path / "two.json").write_text(json.dumps(mixed.to_dict()))
    for level in ("example", "local"):
        with pytest.raises(PrivacyError, match="Give example_dp a ledger_path of its own"):
            opened(level, "two.json")


def test_a_path_with_braces_is_kept_as_it_is(tmp_path):
    path = tmp_path / "{node_id} {0}.json"
    context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})
    ClientLedger(context, "example", as_template(path)).spend(PrivacyLedger().add(dp_event.GaussianDpEvent(3.0)))
    assert path.exists()


def test_nothing_leaves_that_could_not_be_written(tmp_path):
    (tmp_path / "full").write_text("a file where a folder must be")
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5, ledger_path=tmp_path / "full" / "ledger")
    with pytest.raises(OSError):
        Clients(shifted(1.0), [mod])(message(), 0)


def test_a_clients_ledger_is_on_the_disk_before_its_reply_leaves(tmp_path, synced):
    mod = local_dp_mod(l2_norm_clip=1.0, noise_multiplier=4.0, delta=1e-5, ledger_path=tmp_path / "ledger")
    Clients(shifted(1.0), [mod])(message(), 0)
    assert synced == [str(tmp_path / "ledger.new"), str(tmp_path)]  # the file, then its name in the folder


def test_what_two_processes_of_a_client_spend_adds_up_and_stays_within_its_budget(tmp_path):
    """Two servers may ask one hospital at the same time."""

    def opened():
        return ClientLedger(Context(1, 101, {}, RecordDict(), {}), "local", tmp_path / "ledger.json")

    cost = PrivacyLedger().add(dp_event.GaussianDpEvent(2.0), adjacency="replace_one")
    first, second = opened(), opened()
    assert first.spend(cost) is second.spend(cost) is None
    assert second.ledger.steps == opened().ledger.steps == 2
    third, fourth = opened(), opened()
    target = epsilon_of(*[dp_event.GaussianDpEvent(2.0)] * 3) + 1e-3
    assert third.spend(cost, 1e-5, target) is None
    assert "over this client's target_epsilon" in fourth.spend(cost, 1e-5, target)
    assert opened().ledger.steps == 3

    mod = local_dp_mod(
        l2_norm_clip=1.0,
        noise_multiplier=4.0,
        delta=1e-5,
        target_epsilon=epsilon_of(dp_event.GaussianDpEvent(2.0)) + 1e-3,
        ledger_path=tmp_path / "b.json",
    )

    def asked(train):
        message = Message(RecordDict({"arrays": model()}), 101, "train")
        return mod(message, Context(1, 101, {}, RecordDict(), {}), train)

    def same(message, context):
        return reply(message, arrays_in(message))

    def slow(message, context):  # while it trains for one server, another gets the update that its budget has room for
        assert not asked(same).has_error()
        return same(message, context)

    assert "over this client's target_epsilon" in asked(slow).error.reason


def test_a_clients_ledger_that_is_named_after_a_passing_id_is_told(tmp_path, caplog):
    for path, warned in ((tmp_path / "of-{node_id}", True), (tmp_path / "of-{partition-id}", False)):
        caplog.clear()
        ClientLedger(Context(1, 101, {"partition-id": 0}, RecordDict(), {}), "local", path)
        assert ("named after this node's id" in caplog.text) == warned
