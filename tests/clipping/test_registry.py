"""A registered rule is used, and one that says too little of its op is refused."""

import numpy as np
import pytest
import tensorflow as tf
from model_cases import RNG, norms_of

from tfdpfl.clipping import register_rule
from tfdpfl.clipping.gradients import summed_to
from tfdpfl.clipping.registry import BATCHING_RULES, batching_rule


@pytest.mark.parametrize("op_type", [None, "Nope"])
def test_a_rule_for_no_op_is_refused(op_type):
    with pytest.raises(ValueError, match=f"op_type={op_type!r} is no op"):
        register_rule(op_type, batch_axis=0)


def test_a_registered_rule_is_used_and_exact(rules):
    known = rules.BATCHING_RULES["Mul"]
    calls = []

    @register_rule("Mul")
    def scale(use, units):
        calls.append(use)
        return summed_to(use.g * use.inputs[1 - use.at], use.out, use.shape, units)

    w = tf.Variable([1.0, 2.0, 3.0])
    x = RNG.normal(size=(5, 3)).astype("float32")
    np.testing.assert_allclose(norms_of(lambda x: tf.reduce_sum(x * w), w)(x), np.linalg.norm(x, axis=1), rtol=1e-6)
    assert calls and rules.BATCHING_RULES["Mul"] is known


def test_a_rule_for_an_op_of_several_inputs_must_say_which_of_them_are_settings():
    before = dict(BATCHING_RULES)
    with pytest.raises(TypeError, match=r"'Tile'.*inputs input, multiples: give data=i .* or data=None if"):
        batching_rule("Tile")(lambda view, op, states: states[0])
    assert before == BATCHING_RULES
    batching_rule("Neg")(BATCHING_RULES["Neg"].transfer)  # has one input
    BATCHING_RULES.update(before)
