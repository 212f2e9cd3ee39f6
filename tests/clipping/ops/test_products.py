"""Matrix products and einsum: clipped sums are those of the examples one by one."""

import pytest
import tensorflow as tf
from helpers import check, example_losses, normal
from hypothesis import assume, given
from hypothesis import strategies as st
from layer_cases import PRODUCTS, check_layers, few, layers_of, of_weights, sequence

CUSTOM = {
    "batch matrix product": (sequence, lambda x, w: tf.matmul(w, x), [(3, 5)]),
}  # fmt: skip


@pytest.mark.parametrize("cases", layers_of(PRODUCTS, of_weights(CUSTOM)))
def test_layers_agree_with_examples_one_by_one(cases):
    check_layers(cases)


@pytest.mark.slow
@pytest.mark.one_stack
@few
@given(sizes=st.fixed_dictionaries({c: st.integers(1, 4) for c in "tudpq"}),
       x=st.sampled_from(["btd", "bdt", "bd", "btud", "tbd"]), w=st.sampled_from(["dp", "pd", "dpq", "tdp"]),
       keep=st.booleans())  # fmt: skip
def test_any_einsum_agrees(sizes, x, w, keep):
    axes = [c for c in dict.fromkeys(x + w) if c != "d" and (keep or c not in "tu" or c in w)]
    assume("t" in x or "t" not in w)
    out = "b" + "".join(c for c in axes if c != "b")
    sizes = {**sizes, "b": 3}
    a = normal(*[sizes[c] for c in x.replace("tb", "bt")])
    v = tf.Variable(normal(*[sizes[c] for c in w], seed=1))

    def losses(a):
        a = tf.transpose(a, [1, 0, 2]) if x == "tbd" else a
        return example_losses(tf.einsum(f"{x},{w}->{out}", a, v))

    check(losses, a, [v])
