"""Why no ε can be stated for the sums of Flower's SecAgg+: what docs/flower-clients.md says of Flower's own code."""

import numpy as np
import pytest

pytest.importorskip("flwr")

import flower_fakes  # noqa: F401 - it names a run
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.quantization import quantize
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key

NODES, EXAMPLES, RANGE, CLIP, MODULUS = (11, 12, 13), 100, 2**22, 8.0, 2**32
SECRETS = {node: np.full(4, float(node - 12)) for node in NODES}


class Clients:
    """Three clients that run Flower's mod, and what the server sees of them."""

    def __init__(self):
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in NODES}

    def ask(self, node, stage, **config):
        def train(message, context):
            parameters = ndarrays_to_parameters([SECRETS[node]])
            result = FitRes(Status(Code.OK, ""), parameters, EXAMPLES, {"loss": 0.25})
            return Message(fitres_to_recorddict(result, keep_input=True), reply_to=message)

        content = RecordDict({RECORD_KEY_CONFIGS: ConfigRecord({Key.STAGE: stage, **config})})
        question = Message(content, dst_node_id=node, message_type="train")
        return secaggplus_mod(question, self.contexts[node], train).content

    def masked(self, **changed):
        """Runs the protocol as far as the masked vectors. Returns the public keys and the replies."""
        settings = {
            Key.SAMPLE_NUMBER: 3,
            Key.SHARE_NUMBER: 3,
            Key.THRESHOLD: 2,
            Key.CLIPPING_RANGE: CLIP,
            Key.TARGET_RANGE: RANGE,
            Key.MOD_RANGE: MODULUS,
            Key.MAX_WEIGHT: float(EXAMPLES),
        }
        settings |= changed
        public = {}
        for node in NODES:
            reply = self.ask(node, Stage.SETUP, **settings)[RECORD_KEY_CONFIGS]
            public[node] = [reply[Key.PUBLIC_KEY_1], reply[Key.PUBLIC_KEY_2]]
        boxes = {node: ([], []) for node in NODES}
        for node in NODES:
            reply = self.ask(node, Stage.SHARE_KEYS, **{str(n): keys for n, keys in public.items()})
            record = reply[RECORD_KEY_CONFIGS]
            for to, box in zip(record[Key.DESTINATION_LIST], record[Key.CIPHERTEXT_LIST], strict=True):
                boxes[to][0].append(node)
                boxes[to][1].append(box)
        return public, {
            node: self.ask(node, Stage.COLLECT_MASKED_VECTORS, **{Key.SOURCE_LIST: src, Key.CIPHERTEXT_LIST: box})
            for node, (src, box) in boxes.items()
        }


def test_a_mask_has_32_bits_so_that_its_seed_can_be_searched():
    seed = bytes(range(32))
    folded = np.bitwise_xor.reduce(np.frombuffer(seed, "<u4"))
    shapes = [(), (6,)]
    mask = pseudo_rand_gen(seed, MODULUS, shapes)
    for other in (int(folded).to_bytes(4, "little"), seed[16:] + seed[:16]):
        assert all(np.array_equal(*pair) for pair in zip(mask, pseudo_rand_gen(other, MODULUS, shapes), strict=True))
    hidden = pseudo_rand_gen((1234).to_bytes(4, "little"), MODULUS, [(3,)])[0]
    found = [n for n in range(2048) if np.array_equal(np.random.RandomState(n).randint(0, MODULUS - 1, 3), hidden)]
    assert found == [1234]


def test_a_server_that_calls_a_client_active_and_dead_reads_its_update():
    """The protocol forbids to ask for both secrets of a client; Flower's clients answer."""
    clients, victim = Clients(), NODES[0]
    public, replies = clients.masked()
    shares = {"seed": [], "key": []}
    for node in NODES[1:]:
        asked = {Key.ACTIVE_NODE_ID_LIST: list(NODES), Key.DEAD_NODE_ID_LIST: [victim]}
        record = clients.ask(node, Stage.UNMASK, **asked)[RECORD_KEY_CONFIGS]
        assert list(record[Key.NODE_ID_LIST]) == [*NODES, victim]
        shares["seed"].append(record[Key.SHARE_LIST][0])
        shares["key"].append(record[Key.SHARE_LIST][-1])
    vector = bytes_to_ndarray(replies[victim][RECORD_KEY_CONFIGS][Key.MASKED_PARAMETERS][1])
    shapes = [(1,), vector.shape]
    vector = vector - pseudo_rand_gen(combine_shares(shares["seed"]), MODULUS, shapes)[1]
    key = bytes_to_private_key(combine_shares(shares["key"]))
    for other in NODES[1:]:
        pair = generate_shared_key(key, bytes_to_public_key(public[other][0]))
        vector = vector - np.sign(victim - other) * pseudo_rand_gen(pair, MODULUS, shapes)[1]
    assert np.allclose((vector % MODULUS) * 2 * CLIP / RANGE - CLIP, SECRETS[victim], atol=2 * CLIP / RANGE)


def test_the_size_and_metrics_of_a_client_are_not_masked():
    _, replies = Clients().masked()
    said = replies[NODES[0]]
    assert EXAMPLES in [n for record in said.metric_records.values() for n in record.values()]
    assert 0.25 in [value for record in said.config_records.values() for value in record.values()]


def test_a_clip_to_the_range_of_secagg_is_one_of_each_weight():
    """A vector of d weights may have a norm of CLIP * sqrt(d), and rounding adds up to a step of the grid to each."""
    step = 2 * CLIP / RANGE
    rounded = quantize([np.full(10_000, 1e3), np.full(10_000, 0.1 * step)], CLIP, RANGE)
    long, short = (array * step - CLIP for array in rounded)
    assert np.linalg.norm(long) == pytest.approx(CLIP * 100)
    assert np.linalg.norm(short) > 2 * 0.1 * step * 100


def test_a_client_accepts_any_threshold_and_sends_more_than_the_largest_weight(caplog):
    clients = Clients()
    clients.masked(**{Key.THRESHOLD: 1, Key.MAX_WEIGHT: EXAMPLES / 10})
    assert "Potential overflow" in caplog.text
    asked = {Key.ACTIVE_NODE_ID_LIST: list(NODES), Key.DEAD_NODE_ID_LIST: []}
    shares = [clients.ask(n, Stage.UNMASK, **asked)[RECORD_KEY_CONFIGS][Key.SHARE_LIST][0] for n in NODES]
    assert len({combine_shares([share]) for share in shares}) == 1, "one share is the secret"


def test_the_workflow_needs_the_legacy_context():
    with pytest.raises(TypeError, match="LegacyContext"):
        SecAggPlusWorkflow(3, 2)(None, Context(1, 0, {}, RecordDict(), {}))
