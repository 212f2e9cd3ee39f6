"""One database says what each client has spent over all runs, whatever runs at once and wherever a server stops."""

import concurrent.futures
import json
import math
import shutil
import sqlite3
import threading

import pytest

pytest.importorskip("flwr")
from click.testing import CliRunner
from dp_accounting import dp_event
from flower_fakes import FakeGrid, arrays_in, model, reply
from flwr.serverapp import strategy as flower

from tfdpfl import PrivacyError
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.cli import main
from tfdpfl.federated import NoisedMetrics
from tfdpfl.flower import DifferentialPrivacyFixedClipping
from tfdpfl.flower.register import Register
from tfdpfl.noise import Tree

DELTA = 1e-5


def server(folder, name, **how):
    how = {"sampling_rate": None if "clients_per_round" in how else 0.5, "noise_multiplier": 1.0, **how}
    return DifferentialPrivacyFixedClipping(
        flower.FedAvg(min_available_nodes=1, min_train_nodes=1, fraction_evaluate=0.0), l2_norm_clip=1.0, delta=DELTA,
        accountant="rdp", ledger_path=folder / name, register_path=folder / "register.db", **how,
    )  # fmt: skip


def grid(*nodes):
    made = FakeGrid(0, lambda message, number: reply(message, arrays_in(message)))
    made.nodes = [*nodes]
    return made


def cost(*parts):
    made = PrivacyLedger()
    for rate, z, rounds in parts:
        event = dp_event.GaussianDpEvent(z)
        made.add(event if rate == 1 else dp_event.PoissonSampledDpEvent(rate, event), rounds, adjacency="zero_out")
    return made.epsilon(DELTA, "rdp")


def spent(folder):
    return {one.client: one for one in Register(folder / "register.db").spent(DELTA, "rdp")}


def test_a_client_pays_for_the_rounds_of_all_runs_in_which_it_could_be(tmp_path):
    first = server(tmp_path, "first")
    first.start(grid(101, 102), model(), num_rounds=3)
    second = server(tmp_path, "second", clients_per_round=1, noise_multiplier=2.0)
    second.start(grid(102), model(), num_rounds=2)  # at once with the first, which goes on
    first.start(grid(101, 103), model(), num_rounds=4)
    found = spent(tmp_path)
    assert [found[c].rounds for c in ("101", "102", "103")] == [4, 5, 1]
    assert found["101"].epsilon == cost((0.5, 1.0, 4)) and found["103"].epsilon == cost((0.5, 1.0, 1))
    assert found["102"].epsilon == cost((0.5, 1.0, 3), (1, 2.0, 2))
    assert found["102"].asked == sum("102" in cohort for cohort in [*first.cohorts, *second.cohorts])
    command = ["ledger", "clients", str(tmp_path / "register.db"), "--delta", "1e-5", "--accountant", "rdp"]
    rows = json.loads(CliRunner().invoke(main, [*command, "--json"]).output)
    assert {row["client"]: row["epsilon"] for row in rows} == {c: one.epsilon for c, one in found.items()}
    done = CliRunner().invoke(main, [*command, "--target-epsilon", "5"])
    assert done.exit_code == 1 and "102: epsilon = " in done.output and ", 0 left; 5 rounds of 2 runs" in done.output


def test_a_client_that_has_spent_its_epsilon_is_not_asked_in_any_run(tmp_path):
    budget = cost((0.5, 1.0, 3)) + 1e-9
    first = server(tmp_path, "first", client_epsilon=budget)
    first.start(grid(101, 102), model(), num_rounds=2)
    second = server(tmp_path, "second", client_epsilon=budget)
    second.start(grid(101, 102, 103), model(), num_rounds=4)
    assert {c: one.rounds for c, one in spent(tmp_path).items()} == {"101": 3, "102": 3, "103": 3}
    assert max(one.epsilon for one in spent(tmp_path).values()) <= budget
    assert second.rounds_charged == 4 and second.cohorts[3] == [] and second.stopped_by is None
    assert all({*cohort} <= {"103"} for cohort in second.cohorts[1:])
    more = cost((0.5, 1.0, 3), (1, 1.0, 1)) + 1e-9
    server(tmp_path, "third", clients_per_round=2, client_epsilon=more).start(grid(101, 104), model(), num_rounds=3)
    assert spent(tmp_path)["101"].rounds == 4 and max(one.epsilon for one in spent(tmp_path).values()) <= more


@pytest.mark.parametrize("where", ["reserve", "settle", "begin", "charge"])
def test_a_server_that_stops_at_any_write_leaves_no_round_out(tmp_path, monkeypatch, where):
    class Killed(BaseException):
        pass

    strategy = server(tmp_path, "ledger", clients_per_round=2)
    strategy.start(grid(101, 102), model(), num_rounds=1)
    owner = strategy._register if hasattr(strategy._register, where) else strategy._journal
    real = getattr(owner, where)

    def killed(*args, **more):
        real(*args, **more)
        raise Killed

    monkeypatch.setattr(owner, where, killed)
    with pytest.raises(Killed):
        strategy.start(grid(101, 102), model(), num_rounds=2)
    strategy._journal.close()
    again = server(tmp_path, "ledger", clients_per_round=2)
    assert all(one.rounds >= again.rounds_charged for one in spent(tmp_path).values())
    again.start(grid(101, 102), model(), num_rounds=3)
    rounds = {c: one.rounds for c, one in spent(tmp_path).items()}
    assert rounds == {"101": again.rounds_charged, "102": again.rounds_charged}  # none left out, none twice


def test_two_servers_at_once_do_not_spend_more_than_one_budget(tmp_path):
    header = {"privacy": [{"type": "ClientLevel", "noise_multiplier": 1.0}], "sampling": {
        "sampling_rate": None, "clients_per_round": 1, "most": None, "apart": 1, "given": None}}  # fmt: skip
    budget, allowed = cost((1, 1.0, 9)) + 1e-9, []

    def serve(name):
        register = Register(tmp_path / "register.db")
        register.join(name, name, header, [])
        for number in range(12):
            allowed.extend(register.reserve(name, number, ["a"], DELTA, budget))
        register.close()

    servers = [threading.Thread(target=serve, args=(name,)) for name in ("first", "second")]
    for one in servers:
        one.start()
    for one in servers:
        one.join()
    assert len(allowed) == 9 and spent(tmp_path)["a"].epsilon == cost((1, 1.0, 9))


def test_servers_that_begin_a_register_at_once_wait_for_each_other(tmp_path):
    at_once = threading.Barrier(8)

    def begin(number):
        at_once.wait()
        Register(tmp_path / f"{number}.db").close()

    with concurrent.futures.ThreadPoolExecutor(8) as servers:
        for number in range(60):
            list(servers.map(begin, [number] * 8))


def test_correlated_noise_costs_a_client_what_its_own_rounds_cost(tmp_path):
    noise = Tree(min_separation=1, max_participations=3)
    strategy = server(tmp_path, "ledger", clients_per_round=2, noise=noise)
    strategy.start(grid(101, 102), model(), num_rounds=1)
    strategy.start(grid(101, 103), model(), num_rounds=3)
    found = spent(tmp_path)
    assert found["101"].rounds == 3 and found["101"].epsilon == pytest.approx(strategy.epsilon)
    assert found["102"].epsilon < found["103"].epsilon < found["101"].epsilon


def test_a_register_that_is_put_beside_an_old_ledger_counts_its_rounds(tmp_path, caplog):
    strategy = server(tmp_path, "ledger", clients_per_round=2)
    strategy.start(grid(101, 102), model(), num_rounds=2)
    strategy._journal.close()
    for more in ("", ".made", "-wal", "-shm"):
        (tmp_path / f"register.db{more}").unlink(missing_ok=True)
    server(tmp_path, "ledger", clients_per_round=2)
    assert "has rounds that register_path=" in caplog.text
    assert {c: one.rounds for c, one in spent(tmp_path).items()} == {"101": 2, "102": 2}


def test_correlated_noise_without_limits_costs_a_client_what_all_rounds_reveal_of_its_own(tmp_path):
    strategy = server(tmp_path, "ledger", clients_per_round=2, noise=Tree())
    strategy.start(grid(101, 102), model(), num_rounds=1)
    once = spent(tmp_path)["101"]
    strategy.start(grid(103, 104), model(), num_rounds=4)
    later = spent(tmp_path)["101"]
    assert once.epsilon == pytest.approx(cost((1, 1.0, 1))) and later.rounds == 1
    assert later.epsilon == pytest.approx(cost((1, 1 / math.sqrt(3), 1)))  # three sums of the tree hold round 1


def test_evaluations_ask_a_client_once_and_count_for_each_client_of_the_run(tmp_path):
    def answer(message, number):
        return reply(message, arrays_in(message), {"accuracy": 1.0})

    metrics = NoisedMetrics(noise_multiplier=1.0, bound={"accuracy": 1.0})
    names = {101: "a", 102: "a", 103: "b", 104: None}.get
    how = dict(clients_per_round=2, evaluate_metrics=metrics, clients=names)
    strategy = server(tmp_path, "ledger", **how)
    strategy.strategy.fraction_evaluate = 1.0
    asked = FakeGrid(4, answer)
    result = strategy.start(asked, model(), num_rounds=1)
    assert len(asked.sent[-1]) == 2 and {*asked.sent[-1]} == {101, 103}  # a client once, and no stranger
    assert result.evaluate_metrics_clientapp[1]["accuracy"] is not None
    assert spent(tmp_path).keys() == {"a", "b"}
    assert {one.epsilon for one in spent(tmp_path).values()} == {cost((1, 1.0, 2))}
    strategy._journal.close()
    for file in tmp_path.glob("register.db*"):
        file.unlink()
    again = server(tmp_path, "ledger", **how)
    assert {one.epsilon for one in spent(tmp_path).values()} == {cost((1, 1.0, 2))}
    again._register.evaluated(again._journal.run, 2, ["a", "c"])  # c was in no round
    assert {c: one.rounds for c, one in spent(tmp_path).items()} == {"a": 1, "b": 1, "c": 1}
    assert {one.epsilon for one in spent(tmp_path).values()} == {cost((1, 1.0, 3))}


@pytest.mark.parametrize("how", [
    dict(evaluate_metrics=NoisedMetrics(noise_multiplier=1.0, bound={"accuracy": 1.0})),
    dict(clients_per_round=1, noise=Tree(max_participations=2)),
])  # fmt: skip
def test_a_budget_of_clients_is_refused_where_later_rounds_cost_those_that_are_not_asked(tmp_path, how):
    with pytest.raises(ValueError, match=r"does not go with (evaluate_metrics|noise)"):
        server(tmp_path, "ledger", client_epsilon=1.0, **how)


def test_a_copy_of_a_ledger_and_an_older_one_are_refused_and_a_moved_one_goes_on(tmp_path):
    strategy = server(tmp_path, "ledger", clients_per_round=2)
    strategy.start(grid(101, 102), model(), num_rounds=1)
    for end in ("", ".npz"):
        shutil.copy(tmp_path / f"ledger{end}", tmp_path / f"older{end}")
    strategy.start(grid(101, 102), model(), num_rounds=2)
    strategy._journal.close()
    with pytest.raises(PrivacyError, match="is a copy of"):
        server(tmp_path, "older", clients_per_round=2)
    for end in ("", ".npz"):
        (tmp_path / f"ledger{end}").rename(tmp_path / f"moved{end}")
    with pytest.raises(PrivacyError, match="has 1 charged rounds, but register_path knows of 2"):
        server(tmp_path, "older", clients_per_round=2)
    server(tmp_path, "moved", clients_per_round=2).start(grid(101, 102), model(), num_rounds=3)
    assert {c: one.rounds for c, one in spent(tmp_path).items()} == {"101": 3, "102": 3}


def test_nobody_is_asked_once_the_register_was_replaced_under_a_server(tmp_path, caplog):
    strategy = server(tmp_path, "ledger", clients_per_round=2)
    strategy.start(grid(101, 102), model(), num_rounds=1)
    (tmp_path / "register.db").rename(tmp_path / "away.db")
    (tmp_path / "register.db.made").unlink()
    Register(tmp_path / "register.db").close()
    asked = grid(101, 102)
    strategy.start(asked, model(), num_rounds=2)
    assert "no messages are sent" in caplog.text and strategy.rounds_charged == 1
    assert not any(asked.sent)


def test_a_register_that_was_deleted_is_not_made_anew(tmp_path):
    first = server(tmp_path, "first")
    first.start(grid(101), model(), num_rounds=1)
    first._register.close()
    saved = tmp_path / "register.db"
    shutil.copy(saved, tmp_path / "backup")
    for file in tmp_path.glob("register.db*"):
        if file.suffix != ".made":
            file.unlink()
    for _ in range(2):
        with pytest.raises(PrivacyError, match=r"gone or empty, but register\.db\.made shows that it was there"):
            server(tmp_path, "second")
    shutil.copy(tmp_path / "backup", saved)
    server(tmp_path, "second")._journal.close()
    saved.unlink()
    (tmp_path / "register.db.made").unlink()
    Register(saved).close()


def test_a_register_put_beside_a_ledger_counts_rounds_in_which_coins_asked_nobody(tmp_path):
    header = {"privacy": [{"type": "ClientLevel", "noise_multiplier": 1.0}], "sampling": {
        "sampling_rate": 0.5, "clients_per_round": None, "most": None, "apart": 1, "given": None}}  # fmt: skip
    register = Register(tmp_path / "register.db")
    assert register.join("run", "ledger", header, [["a"], [], ["b"]], begun=[])
    assert {c: one.rounds for c, one in spent(tmp_path).items()} == {"a": 4, "b": 4}


def test_what_is_no_register_is_refused_with_the_fix(tmp_path):
    for how in (dict(register_path=None, client_epsilon=1.0), dict(ledger_path=None)):
        given = dict(ledger_path=tmp_path / "a", register_path=tmp_path / "register.db") | how
        with pytest.raises(ValueError, match="Give register_path and ledger_path"):
            DifferentialPrivacyFixedClipping(
                flower.FedAvg(), noise_multiplier=1.0, l2_norm_clip=1.0, sampling_rate=0.5, delta=DELTA, **given
            )
    (tmp_path / "register.db").write_text("no database, but text that is long enough to be taken for one" * 9)
    with pytest.raises(ValueError, match="Restore it from a backup"):
        server(tmp_path, "ledger")
    server_free = tmp_path / "other"
    server_free.mkdir()
    server(server_free, "ledger")._journal.close()  # the ledger above was closed
    with sqlite3.connect(server_free / "register.db") as db:
        db.execute("PRAGMA user_version=2")
    with pytest.raises(PrivacyError, match="of format version 2, but tfdpfl"):
        server(server_free, "ledger")
