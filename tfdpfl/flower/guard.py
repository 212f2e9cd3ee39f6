"""A SuperNode whose owner decides what leaves it: every reply is clipped, noised and paid for, whatever the app does.

    python -m tfdpfl.flower.guard policy.toml --isolation process --superlink ... (as for flower-supernode)

Flower loads the client's code from the server, so a mod in that code protects nobody from the server. This process
stands between: it takes the app's reply apart and sends a reply of its own. It works inside Flower's SuperNode, on
functions that are not public, so it starts only with a Flower whose functions are those that it knows.

The guard cannot keep the app from reaching the network by itself, so run the app as another user, without a network.
See docs/flower-clients.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.supercore.inflatable import inflatable_object, inflatable_utils
from flwr.supernode import start_client_internal as supernode
from flwr.supernode.cli.flower_supernode import flower_supernode

from tfdpfl.accounting import _checks
from tfdpfl.errors import PrivacyError
from tfdpfl.flower._flwr import Context, Error, Message, MessageType, RecordDict, log
from tfdpfl.flower.local import local_dp_mod
from tfdpfl.flower.reports import ClientLedger, as_template
from tfdpfl.flower.spent import ledger_of_uploads

if TYPE_CHECKING:
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.supercore.object_store import ObjectStore
    from flwr.supernode.nodestate import NodeState

__all__ = ["Guard", "Policy", "install", "main"]

_NOTHING = "this node does not answer such messages"
_CODE = 201
# The functions of Flower that this module replaces or wraps, and their arguments.
_KNOWN = {
    "_init_connection": [
        "server_address", "insecure", "root_certificates", "authentication_keys", "max_retries", "max_wait_time"
    ],
    "_push_messages": ["state", "object_store", "send", "push_object"],
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """Limits what leaves a node, as its owner wants.

    Attributes:
      l2_norm_clip, noise_multiplier, delta, target_epsilon: as for `local_dp_mod`; the target is required.
      ledger_path: the node's own ledger, which outlives runs and servers.
      weighted_by_key: as for `local_dp_mod`.
      answer_after: every answer leaves so many seconds after its message came, so that its time tells nothing. An app
        that is not done by then is answered for with noise alone. None answers when the app is done: how long it took
        is then in no ε.
      protect: False lets everything pass as it is.

    Raises:
      ValueError: a value is out of its range.
    """

    l2_norm_clip: float
    noise_multiplier: float
    delta: float
    target_epsilon: float
    ledger_path: str
    weighted_by_key: str = "num-examples"
    answer_after: float | None = None
    protect: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.protect, bool):
            raise ValueError(f"protect={self.protect!r} is neither true nor false. Write one of them.")
        if not isinstance(self.ledger_path, str) or not os.path.isabs(self.ledger_path):
            raise ValueError(
                f"ledger_path={self.ledger_path!r} is no absolute path, so a node that is started elsewhere would "
                "begin at epsilon 0. Give the whole path."
            )
        _checks.optional(_checks.real, "answer_after", self.answer_after, "give seconds, or leave it out", above=0)
        for name in ("l2_norm_clip", "noise_multiplier", "target_epsilon"):
            _checks.real(name, getattr(self, name), "give a number above 0", above=0)

    @classmethod
    def read(cls, path: str | os.PathLike) -> Policy:
        """Returns the policy that a TOML file holds.

        Raises:
          ValueError: it cannot be read, or holds something else.
        """
        import tomllib

        try:
            return cls(**tomllib.loads(Path(path).read_text("utf-8")))
        except (OSError, TypeError, tomllib.TOMLDecodeError) as error:
            names = ", ".join(field.name for field in dataclasses.fields(cls))
            raise ValueError(
                f"The policy {os.fspath(path)!r} cannot be read ({error}), so nothing would be protected. Write a TOML "
                f"file with {names}"
            ) from error


class Guard:
    """Between a SuperNode and its server: what it did not make itself does not leave.

    Args:
      policy: the owner's.

    Raises:
      ValueError: the ledger is damaged.
      PrivacyError: the ledger was made once and is gone, or a newer release wrote it.
    """

    def __init__(self, policy: Policy):
        self._policy = policy
        ledger_path = as_template(policy.ledger_path)
        ClientLedger(Context(0, 0, {}, RecordDict(), {}), "local", ledger_path)  # which cannot be told to a server
        self._mod = local_dp_mod(
            l2_norm_clip=policy.l2_norm_clip, noise_multiplier=policy.noise_multiplier, delta=policy.delta,
            target_epsilon=policy.target_epsilon, ledger_path=ledger_path, weighted_by_key=policy.weighted_by_key,
        )  # fmt: skip
        self._contents: dict[str, bytes] = {}  # what came from the server, by object
        self._asked: dict[
            str, tuple[Message, ObjectTree, float]
        ] = {}  # messages, their objects' tree, and when they came
        self._early: dict[str, Message] = {}  # replies that wait for the time of their answer
        self._made: set[str] = set()  # the objects of the answer that is leaving

    @contextmanager
    def connection(self, real: AbstractContextManager[tuple]) -> Iterator[tuple]:
        """Wraps Flower's connection to the server: it remembers what comes, and lets only this object's answers out."""
        with real as (node_id, receive, send, get_run, get_fab, pull_object, push_object, confirm):

            def remember_message() -> tuple[Message, ObjectTree] | None:
                received = receive()
                if received is not None:
                    message, tree = received
                    self._asked[message.metadata.message_id] = (message, tree, time.monotonic())
                return received

            def remember_object(run_id: int, object_id: str) -> bytes:
                self._contents[object_id] = contents = pull_object(run_id, object_id)
                return contents

            def send_own(message: Message, tree: ObjectTree, runtime: float) -> tuple[set[str], str]:
                self._only_own(tree.object_id)
                return send(message, tree, 0.0)  # how long the app ran is nobody's business

            def push_own(run_id: int, session_id: str, object_id: str, contents: bytes) -> None:
                self._only_own(object_id)
                push_object(run_id, session_id, object_id, contents)

            yield (node_id, remember_message, send_own, get_run, get_fab, remember_object, push_own, confirm)

    def _only_own(self, object_id: str) -> None:
        if object_id not in self._made:
            raise PrivacyError(
                "The SuperNode was about to send what this guard did not make. Nothing was sent. Use a release of "
                "Flower that tfdpfl was tested with."
            )

    def push(self, state: NodeState, object_store: ObjectStore, send: Callable, push_object: Callable) -> None:
        """Waits for the app and answers in its place, as Flower's `_push_messages` does for it."""
        for message_id, reply in self._replies(state):
            answer = self.answer(message_id, reply, object_store)
            try:
                if answer is not None:
                    self._send(answer, send, push_object)
            except Exception as error:
                log.error("Failed to send the answer to message %s: %s", message_id, error)
            finally:
                self._made = set()
                self._asked.pop(message_id, None)
                kept = {i for _, tree, _ in self._asked.values() for i in _ids(tree)}
                self._contents = {i: held for i, held in self._contents.items() if i in kept}
                replied = [] if reply is None else [reply.metadata.message_id]
                state.delete_messages(message_ids=[*replied, message_id])
                for done in replied:
                    object_store.delete(done)

    def _replies(self, state: NodeState) -> list[tuple[str, Message | None]]:
        """The app's replies by the messages that they answer; None for one that did not come in time."""
        wait = self._policy.answer_after
        while True:
            found = {r.metadata.reply_to_message_id: r for r in state.get_messages_legacy(is_reply=True)}
            self._early.update(found)
            if wait is None:
                due = [*self._early]
            else:
                due = [message_id for message_id, (_, _, at) in self._asked.items() if time.monotonic() >= at + wait]
            if due:
                early, self._early = self._early, {}
                return [(message_id, early.get(message_id)) for message_id in due]
            time.sleep(min(0.5, wait or 0.5))

    def answer(self, message_id: str, reply: Message | None, object_store: ObjectStore) -> Message | None:
        """Returns what leaves in place of the app's reply; None where nothing was asked."""
        asked = self._asked.get(message_id)
        if asked is None:
            log.warning("The app answers what nobody asked, or too late: ignored")
            return None
        message = asked[0]
        try:
            full = inflatable_utils.inflate_object_from_contents(
                message_id, dict(self._contents), keep_object_contents=True
            )
            assert isinstance(full, Message)
            full.metadata.__dict__["_message_id"] = message_id
            if str(message.metadata.message_type).split(".")[0] != MessageType.TRAIN:
                raise ValueError(f"a message of type {message.metadata.message_type!r} is not for training")
            context = Context(message.metadata.run_id, message.metadata.dst_node_id, {}, RecordDict(), {})
            return self._mod(full, context, lambda *_: self._reply_of_app(reply, object_store))
        except Exception as error:  # nothing of it depends on the app, and the server does not learn of it
            why = "the question had not come whole when it was answered" if isinstance(error, KeyError) else error
            log.warning("The server gets no update to message %s: %s", message_id, why)
            return Message(Error(code=_CODE, reason=_NOTHING), reply_to=message)

    def _reply_of_app(self, reply: Message | None, object_store: ObjectStore) -> Message:
        """The app's reply with its arrays. Raises where there is none, for which the mod sends noise alone."""
        if reply is None:
            raise ValueError(
                f"the app was not done {self._policy.answer_after:g} s after the question came: raise answer_after in "
                "the policy, and the time that the server waits"
            )
        ids = _ids(object_store.get_object_tree(reply.metadata.message_id))
        until = time.monotonic() + (60 if self._policy.answer_after is None else 1)
        while True:
            contents = {i: found for i in ids if (found := object_store.get(i))}
            if contents.keys() == {*ids}:
                break
            if time.monotonic() > until:
                raise ValueError("the app did not send its whole reply")
            time.sleep(0.1)
        full = inflatable_utils.inflate_object_from_contents(reply.metadata.message_id, contents)
        assert isinstance(full, Message)
        return full

    def _send(self, answer: Message, send: Callable, push_object: Callable) -> None:
        with inflatable_object.no_object_id_recompute():
            answer.metadata.__dict__["_message_id"] = answer.object_id
            tree = inflatable_object.get_object_tree(answer)
            objects = {i: made.deflate() for i, made in inflatable_object.get_all_nested_objects(answer).items()}
        self._made = {*objects}
        wanted, session_id = send(answer, tree, 0.0)
        for object_id in _ids(tree):
            if object_id in wanted:
                push_object(answer.metadata.run_id, session_id, object_id, objects[object_id])
        log.info("Sent an answer of this node's guard")


def _ids(tree: ObjectTree) -> list[str]:
    return [part.object_id for part in inflatable_object.iterate_object_tree(tree)]


def check_flower(module: Any = supernode) -> None:
    """Refuses a Flower whose SuperNode works in another way than this module knows.

    Raises:
      PrivacyError: it does.
    """
    for name, arguments in _KNOWN.items():
        found = getattr(module, name, None)
        if found is None or [*inspect.signature(found).parameters] != arguments:
            raise PrivacyError(
                f"This Flower has no flwr.supernode.start_client_internal.{name}({', '.join(arguments)}), so replies "
                "could leave by another way. Install a release that tfdpfl was tested with: flwr 1.41 or 1.42."
            )
    used = inspect.getsource(module.start_client_internal)
    if used.count("_init_connection(") != 1 or used.count("_push_messages(") != 1:
        raise PrivacyError(
            "This Flower's SuperNode opens other connections than this guard knows, so replies could leave by another "
            "way. Install a release that tfdpfl was tested with: flwr 1.41 or 1.42."
        )


def install(policy: Policy, module: Any = supernode) -> Guard:
    """Makes the SuperNode of this process keep to a policy. Returns the guard.

    Raises:
      ValueError: the policy's ledger cannot be gone on with.
      PrivacyError: Flower works in another way than this module knows.
    """
    check_flower(module)
    guard, connect = Guard(policy), module._init_connection
    module._init_connection = lambda *args, **kwargs: guard.connection(connect(*args, **kwargs))
    module._push_messages = guard.push
    return guard


def main(arguments: list[str], run: Callable[[], None] | None = None) -> None:
    """Starts a SuperNode under the policy of the file that the first argument names.

    Raises:
      SystemExit: the policy or the other arguments do not do.
    """
    try:
        if not arguments:
            raise ValueError(
                "No policy is given. Write python -m tfdpfl.flower.guard policy.toml, then the node's arguments."
            )
        path, *others = arguments
        if path in ("-h", "--help"):
            return print(__doc__)
        policy = Policy.read(path)
        if not policy.protect:
            log.warning("protect = false in %s: EVERYTHING the app sends leaves this node as it is", path)
        else:
            if "process" not in others and "--isolation=process" not in others:
                raise ValueError(
                    "The app would be a process of this one's user, which can read the keys and reach the network by "
                    "itself. Add --isolation process, and start flower-superexec as a user without a network."
                )
            install(policy)
            importlib.import_module("tensorflow")  # its seconds would come before the first answer
            log.info("%s protects each update: %s", path, _price(policy))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from error
    sys.argv = ["flower-supernode", *others]
    try:
        (run or flower_supernode)()
    except Exception:
        log.exception("The SuperNode has ended")
        os._exit(1)  # a thread of Flower's would keep this process, so nothing would start the node again


def _price(policy: Policy) -> str:
    from tfdpfl.accounting import compute_num_steps

    epsilon = ledger_of_uploads(policy.noise_multiplier).epsilon(policy.delta)
    most = "none fits the target"
    if epsilon <= policy.target_epsilon:
        count = compute_num_steps(
            target_epsilon=policy.target_epsilon, delta=policy.delta, noise_multiplier=policy.noise_multiplier / 2,
            sampling="none", num_examples=1, batch_size=1,
        )  # fmt: skip
        most = f"{count} in all keep to target_epsilon = {policy.target_epsilon:g}"
    return f"epsilon = {math.ceil(epsilon * 1000) / 1000:g} for one, at delta = {policy.delta:g}; {most}"


if __name__ == "__main__":
    main(sys.argv[1:])
