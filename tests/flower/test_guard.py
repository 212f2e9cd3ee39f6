"""Whatever the server's code does on a node, only what the owner's policy allows leaves it."""

import contextlib
import json
import logging

import numpy as np
import pytest

pytest.importorskip("flwr")
from dp_accounting import dp_event
from flower_fakes import arrays_in, flat, model, reply
from flwr.app import Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable import inflatable_object, inflatable_utils
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import start_client_internal as supernode
from flwr.supernode.nodestate import NodeStateFactory

from tfdpfl import PrivacyError
from tfdpfl.accounting import PrivacyLedger
from tfdpfl.flower import local
from tfdpfl.flower.guard import Guard, Policy, _price, check_flower, install, main

SECRET = "HIV positive: patient 4711"
CLIP = 0.5


def policy(tmp_path, **how):
    given = dict(l2_norm_clip=CLIP, noise_multiplier=2.0, delta=1e-5, target_epsilon=1e3)
    return Policy(**{**given, "ledger_path": str(tmp_path / "ledger.json"), **how})


class Node:
    """Flower's own state of a SuperNode, a server that hands out messages, and a log of all that reaches it."""

    def __init__(self, made):
        self.guard = Guard(made)
        store = ObjectStoreFactory()
        self.state, self.store = NodeStateFactory(objectstore_factory=store).state(), store.store()
        self.waiting, self.objects, self.sent, self.count = [], {}, [], 0
        self.arrived = {}

    def connect(self):
        @contextlib.contextmanager
        def real():
            yield 101, self.receive, self.send, None, None, lambda run, i: self.objects[i], self.push, None

        return self.guard.connection(real())

    def ask(self, kind="train", content=None):
        content = RecordDict({"arrays": model(w=np.ones((3, 2), np.float32))}) if content is None else content
        message = Message(content, dst_node_id=101, message_type=kind)
        self.count += 1
        message.metadata.__dict__["_group_id"] = str(self.count)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.objects.update({i: o.deflate() for i, o in inflatable_object.get_all_nested_objects(message).items()})
        self.waiting.append(message)
        return message

    def receive(self):
        message = self.waiting.pop()
        return message, inflatable_object.get_object_tree(message)

    def send(self, message, tree, runtime):
        self.sent.append((message.metadata, runtime))
        return {part.object_id for part in inflatable_object.iterate_object_tree(tree)}, "session"

    def push(self, run_id, session_id, object_id, contents):
        self.arrived[object_id] = contents

    def answer(self, message, *replies):
        """What the server gets when the app replies so."""
        with self.connect() as (_, receive, send, _, _, pull, push, _):
            for part in inflatable_object.iterate_object_tree(receive()[1]):
                pull(message.metadata.run_id, part.object_id)
            for one in replies:
                supernode._insert_message(one, self.state, self.store)
            self.guard.push(self.state, self.store, send, push)
        head, _ = self.sent[-1]
        return inflatable_utils.inflate_object_from_contents(head.message_id, dict(self.arrived))

    def everything(self):
        return b"".join([*self.arrived.values(), *(repr(vars(head)).encode() for head, _ in self.sent)])


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """Noise of zeros, so that all else is seen exactly."""
    logging.getLogger("flwr").setLevel(logging.CRITICAL)
    monkeypatch.setattr(local.Normals, "__call__", lambda self, shapes: [np.zeros(shape) for shape in shapes])


@pytest.fixture
def logged():
    """What the guard writes to the log of the node."""
    logger, lines = logging.getLogger("flwr"), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {handler.format(record)}")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def test_each_number_that_leaves_has_noise(tmp_path, monkeypatch):
    monkeypatch.undo()
    node = Node(policy(tmp_path))
    message = node.ask()
    sent = flat(node.answer(message, trained(message, 9.0)).content["arrays"]) - np.array([1.0] * 6 + [0.0] * 4)
    assert (np.abs(sent - CLIP / np.sqrt(10)) > 1e-9).all() and 0.2 < np.std(sent) < 5  # 2 clips = 1


def trained(message, by, metrics=None, **records):
    return reply(message, {name: v + by for name, v in arrays_in(message).items()}, metrics, **records)


def test_an_update_leaves_clipped_and_paid_and_nothing_else_does(tmp_path):
    node = Node(policy(tmp_path))
    message = node.ask()
    leak = trained(message, 9.0, {"accuracy": 0.123456789}, more=MetricRecord({SECRET: 1.0}))
    leak.metadata.__dict__["_group_id"] = SECRET  # the app's own metadata, too
    answer = node.answer(message, leak)
    update = flat(answer.content["arrays"]) - np.array([1.0] * 6 + [0.0] * 4)
    np.testing.assert_allclose(update, CLIP / np.sqrt(10), rtol=1e-5)
    assert dict(answer.content["metrics"]) == {"num-examples": 1.0} and {*answer.content} == {
        "arrays", "metrics", "tfdpfl.privacy"
    }  # fmt: skip
    assert SECRET.encode() not in node.everything() and node.sent[0][1] == 0.0
    kept = PrivacyLedger.from_dict(json.loads((tmp_path / "ledger.json").read_text()))
    assert kept == PrivacyLedger().add(dp_event.GaussianDpEvent(1.0), adjacency="replace_one")


@pytest.mark.parametrize(
    "bad",
    [
        lambda m: Message(Error(code=1, reason=SECRET), reply_to=m),
        lambda m: reply(m, {SECRET: np.zeros(3)}),
        lambda m: trained(m, np.nan),
        lambda m: Message(RecordDict({}), reply_to=m),
    ],
    ids=["error", "other arrays", "nan", "nothing"],
)
def test_whatever_goes_wrong_in_the_app_the_server_gets_noise_alone(tmp_path, bad):
    node = Node(policy(tmp_path))
    message = node.ask()
    answer = node.answer(message, bad(message))
    assert not answer.has_error() and np.allclose(flat(answer.content["arrays"]), [1.0] * 6 + [0.0] * 4, atol=1e-6)
    assert SECRET.encode() not in node.everything() and (tmp_path / "ledger.json").exists()


def test_other_messages_a_spent_budget_and_a_broken_model_get_a_sentence_that_the_app_does_not_choose(tmp_path):
    node = Node(policy(tmp_path))
    for kind in ("evaluate", "query", "train.another"):
        message = node.ask(kind)
        answer = node.answer(message, trained(message, 0.0, {"accuracy": 0.5}))
        said = answer.error.reason if answer.has_error() else ""
        assert said == ("" if kind.startswith("train") else "this node does not answer such messages")
    message = node.ask(content=RecordDict({"arrays": model(w=np.full((3, 2), np.nan, np.float32))}))
    assert node.answer(message, trained(message, 1.0)).error.reason == "this node does not answer such messages"
    one = PrivacyLedger().add(dp_event.GaussianDpEvent(2.0), adjacency="replace_one").epsilon(1e-5)
    node = Node(policy(tmp_path, noise_multiplier=4.0, target_epsilon=one + 0.1, ledger_path=str(tmp_path / "other")))
    message = node.ask()
    assert not node.answer(message, trained(message, 0.1)).has_error()
    again = Node(policy(tmp_path, noise_multiplier=4.0, target_epsilon=one + 0.1, ledger_path=str(tmp_path / "other")))
    message = again.ask()  # another run of another server, after a restart
    assert "over this client's target_epsilon" in again.answer(message, trained(message, 0.1)).error.reason
    (tmp_path / "other").write_text("{")
    message = again.ask()
    assert again.answer(message, trained(message, 0.1)).error.reason == "this node does not answer such messages"
    with pytest.raises(ValueError, match="holds no whole ledger"):  # nor does it start
        Guard(again.guard._policy)
    (tmp_path / "other").unlink()
    message = again.ask()
    assert again.answer(message, trained(message, 0.1)).error.reason == "this node does not answer such messages"
    with pytest.raises(PrivacyError, match=r"is gone or empty, but other\.made shows that it was there"):
        Guard(again.guard._policy)


def test_an_answer_leaves_at_its_time_whether_the_app_is_done_or_not(tmp_path):
    node = Node(policy(tmp_path, answer_after=0.3))
    message = node.ask()
    answer = node.answer(message)  # the app never replies
    assert np.allclose(flat(answer.content["arrays"]), [1.0] * 6 + [0.0] * 4, atol=1e-6)
    late = trained(message, 9.0)
    second = node.ask()
    answer = node.answer(second, late, trained(second, -0.1))
    assert len(node.sent) == 2 and node.sent[1][0].reply_to_message_id == second.metadata.message_id
    assert np.allclose(flat(answer.content["arrays"]), [0.9] * 6 + [-0.1] * 4, atol=1e-6)


def test_the_log_of_the_node_states_what_left_and_why_something_did_not(tmp_path, logged):
    node = Node(policy(tmp_path))
    message = node.ask()
    node.answer(message, trained(message, 9.0))
    assert logged == ["INFO Sent an answer of this node's guard"]
    logged.clear()
    node.answer(message := node.ask("query"), trained(message, 0.0))
    why = "a message of type 'query' is not for training"
    assert logged[0] == f"WARNING The server gets no update to message {message.metadata.message_id}: {why}"
    logged.clear()
    message = node.ask()
    with node.connect() as (_, receive, send, _, _, _, push, _):
        receive()  # and the app answers before the node has pulled the objects of the question
        supernode._insert_message(trained(message, 9.0), node.state, node.store)
        node.guard.push(node.state, node.store, send, push)
    why = "the question had not come whole when it was answered"
    assert logged[0] == f"WARNING The server gets no update to message {message.metadata.message_id}: {why}"
    logged.clear()

    def cut(*_):
        raise ConnectionError("the line is cut")

    message = node.ask()
    with node.connect() as (_, receive, _, _, _, pull, push, _):
        for part in inflatable_object.iterate_object_tree(receive()[1]):
            pull(message.metadata.run_id, part.object_id)
        supernode._insert_message(trained(message, 9.0), node.state, node.store)
        node.guard.push(node.state, node.store, cut, push)
    assert logged == [f"ERROR Failed to send the answer to message {message.metadata.message_id}: the line is cut"]


def test_an_answer_to_what_nobody_asked_sends_nothing(tmp_path, logged):
    node = Node(policy(tmp_path))
    message, other = node.ask(), node.ask()
    node.waiting.pop()
    with pytest.raises(IndexError):
        node.answer(message, trained(other, 9.0))  # looks for the last answer, and there is none
    assert not node.sent and not node.arrived and not (tmp_path / "ledger.json").exists()
    assert logged == ["WARNING The app answers what nobody asked, or too late: ignored"]


def test_what_the_guard_did_not_make_is_not_sent(tmp_path):
    node = Node(policy(tmp_path))
    message = node.ask()
    own = trained(message, 9.0)
    with node.connect() as (_, _, send, _, _, _, push, _):
        with pytest.raises(PrivacyError, match="Nothing was sent"):
            send(own, inflatable_object.get_object_tree(own), 1.0)
        with pytest.raises(PrivacyError, match="Nothing was sent"):
            push(1, "session", own.object_id, own.deflate())
    assert not node.sent and not node.arrived


def test_a_flower_that_works_in_another_way_is_refused(tmp_path):
    check_flower()

    class Other:
        _init_connection = staticmethod(supernode._init_connection)
        start_client_internal = staticmethod(supernode.start_client_internal)

        @staticmethod
        def _push_messages(state, object_store, send):
            pass

    with pytest.raises(PrivacyError, match="This Flower has no flwr"):
        install(policy(tmp_path), Other)
    Other._push_messages = staticmethod(supernode._push_messages)
    Other.start_client_internal = staticmethod(policy)
    with pytest.raises(PrivacyError, match="opens other connections"):
        install(policy(tmp_path), Other)


def test_a_node_starts_only_with_a_policy_and_an_app_of_another_user(tmp_path, monkeypatch, capsys, logged):
    monkeypatch.setattr(supernode, "_init_connection", supernode._init_connection)
    monkeypatch.setattr(supernode, "_push_messages", supernode._push_messages)
    path, started = tmp_path / "policy.toml", []
    text = "l2_norm_clip = 1.0\nnoise_multiplier = 4.0\ndelta = 1e-5\ntarget_epsilon = 8.0\n"
    for content, args, said in (
        ("", [path], "cannot be read"),
        (text, [], "No policy is given"),
        (text + 'ledger_path = "ledger.json"\n', [path], "no absolute path"),
        (text + 'ledger_path = "/l"\nprotect = "no"\n', [path], "neither true nor false"),
        (text + 'ledger_path = "/l"\n', [path, "--superlink", "a:1"], "Add --isolation process"),
    ):
        path.write_text(content)
        with pytest.raises(SystemExit, match=said):
            main([str(arg) for arg in args], lambda: started.append(1))
    main(["--help"], lambda: started.append(1))
    assert "python -m tfdpfl.flower.guard policy.toml --isolation process" in capsys.readouterr().out
    main([str(path), "--isolation", "process"], lambda: started.append(2))
    assert started == [2] and supernode._push_messages.__func__ is Guard.push
    assert (
        logged == [f"INFO {path} protects each update: {_price(Policy.read(path))}"] and "in all keep to" in logged[0]
    )


@pytest.mark.parametrize("target", [1.9, 8.0])
def test_the_log_counts_the_answers_that_a_policy_allows(tmp_path, target):
    one = dp_event.GaussianDpEvent(2.0)
    spent = [PrivacyLedger().add(one, n, adjacency="replace_one").epsilon(1e-5) for n in range(1, 20)]
    most = sum(epsilon <= target for epsilon in spent)
    said = f"{most} in all keep to" if most else "none fits the target"
    assert said in _price(policy(tmp_path, noise_multiplier=4.0, target_epsilon=target))


def test_a_node_that_lost_its_connection_ends_although_a_thread_of_flowers_runs(tmp_path, monkeypatch, logged):
    def lose():
        raise ConnectionError("EOF occurred in violation of protocol")

    path, codes = tmp_path / "policy.toml", []
    text = "l2_norm_clip = 1\nnoise_multiplier = 4\ndelta = 1e-5\ntarget_epsilon = 8\nledger_path = '/l'\n"
    path.write_text(text + "protect = false\n")
    monkeypatch.setattr("os._exit", codes.append)
    main([str(path)], lose)
    assert codes == [1]
    open_, ended = logged
    assert open_ == f"WARNING protect = false in {path}: EVERYTHING the app sends leaves this node as it is"
    assert ended.startswith("ERROR The SuperNode has ended") and "EOF occurred in violation of protocol" in ended
