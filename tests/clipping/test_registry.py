"""A registered rule is used, and one that says too little of its op is refused."""

import numpy as np
import pytest
import tensorflow as tf
from model_cases import RNG, norms_of
from tensorflow.python.framework import op_def_registry

from tfdpfl.clipping import register_rule
from tfdpfl.clipping.gradients import summed_to
from tfdpfl.clipping.registry import OPS, Move, teach


@pytest.mark.parametrize("op_type", [None, "Nope"])
def test_a_rule_for_no_op_is_refused(op_type):
    with pytest.raises(ValueError, match=f"op_type={op_type!r} is no op"):
        register_rule(op_type, batch_axis=0)


def test_a_registered_rule_is_used_and_exact(rules):
    known = rules["Mul"].moves
    calls = []

    @register_rule("Mul")
    def scale(use, units):
        calls.append(use)
        return summed_to(use.g * use.inputs[1 - use.at], use.out, use.shape, units)

    w = tf.Variable([1.0, 2.0, 3.0])
    x = RNG.normal(size=(5, 3)).astype("float32")
    np.testing.assert_allclose(norms_of(lambda x: tf.reduce_sum(x * w), w)(x), np.linalg.norm(x, axis=1), rtol=1e-6)
    assert calls and rules["Mul"].moves is known


def test_a_move_of_an_op_of_several_inputs_must_say_which_of_them_are_settings(rules):
    del rules["Tile"], rules["Neg"]
    before = dict(rules)
    moves = Move(lambda view, op, states: states[0])
    with pytest.raises(
        TypeError, match=r"'Tile'.*inputs input, multiples: give Move\(\.\.\., data=i\) .* or data=None if"
    ):
        teach("Tile", moves=moves)
    assert before == rules
    teach("Neg", moves=moves)  # has one input
    assert rules["Neg"].moves is moves


def test_an_op_has_one_record():
    before = dict(OPS)
    with pytest.raises(TypeError, match=r"MatMul has a record\. Give all that is known of an op in one call"):
        teach("MatMul", moves=None)
    assert before == OPS


def test_records_fit_the_ops_of_tensorflow():
    """A name with a slip would leave its op unknown, and the number of an input the wrong one without its check."""
    for kind, record in OPS.items():
        op, moves = op_def_registry.get(kind), record.moves
        assert op is not None, kind
        assert set(record.runs) <= {a.name for a in op.attr if a.type == "func"}, kind
        inputs = range(len(op.input_arg))
        if moves is not None and isinstance(moves.data, int):
            assert {moves.data, *moves.sizes} <= set(inputs), kind
        assert not record.reads or op.input_arg[0].type == tf.resource.as_datatype_enum, kind
        assert record.folds is not None or not record.arranges, kind
