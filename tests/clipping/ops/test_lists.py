"""Lists that loops fill by place or by example are refused where they let examples meet."""

import pytest
import tensorflow as tf
from mixing_cases import B, check_refused_or_apart, check_static, d, total


def positions(x):
    p = tf.map_fn(lambda i: tf.cast(i, tf.float32), tf.range(B), fn_output_signature=tf.float32)
    return total(d(x) * p[:, None])


MIXING = {
    "scan": lambda x: total(tf.scan(lambda a, b: a + b, d(x))),
    "list of places": positions,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.one_stack
@pytest.mark.parametrize("losses", MIXING.values(), ids=MIXING)
def test_what_lets_examples_meet_is_refused_or_keeps_them_apart(losses):
    check_refused_or_apart(losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["list of places"])
def test_a_static_batch_size_is_no_excuse_to_tell_examples_by_their_place(name):
    check_static(MIXING[name])
