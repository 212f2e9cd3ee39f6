"""What each state says of a tensor: whether it weighs, holds nothing of a batch, and which variables it is made of."""

import pytest
import tensorflow as tf

from tfdpfl.clipping import states
from tfdpfl.clipping.states import Batch, Entries, Handle, Items, Mixed, Public, Size

SIZE, LENGTH = Size(((1, 1),)), Size(((7, 0),))
OF_TWO = Public(frozenset({1, 2}))
CHOSEN = Entries("Where", "a", "depends on data", 3, True)


@pytest.mark.parametrize(("state", "weighs", "free"), [
    (Public(), False, True), (OF_TWO, True, True), (Handle(0), True, False), (Handle(None), False, False),
    (SIZE, False, False), (LENGTH, False, True), (Batch(0), False, False), (Items(Public()), False, False),
    (CHOSEN, False, False),
])  # fmt: skip
def test_states_tell_weights_from_data_and_lengths_from_sizes(state, weighs, free):
    assert states.weighs(state) == weighs and states.is_batch_free(state) == free


def test_variables_are_those_of_all_public_states():
    assert states.deps([OF_TWO, Public(frozenset({5})), Batch(0), SIZE]) == {1, 2, 5} and states.deps([]) == frozenset()


def test_numbers_made_of_sizes_are_unknown_and_of_lengths_are_free_of_the_batch():
    assert SIZE.blurred(2) == Size((states.UNKNOWN,) * 2) and not SIZE.blurred(None).batch_free
    assert LENGTH.blurred(3).batch_free and len(LENGTH.blurred(None).entries) == 1
    assert not Size(((7, 0), (1, 1))).batch_free


def test_entries_that_were_chosen_are_mixed_to_ops_that_do_not_know_of_them():
    assert type(states.plain(CHOSEN)) is Mixed and states.plain(CHOSEN).describe() == CHOSEN.describe()
    assert states.plain(OF_TWO) is OF_TWO


def test_a_mixed_tensor_names_its_op_and_its_layer():
    with tf.Graph().as_default(), tf.name_scope("model"), tf.name_scope("dense"):
        op = tf.reduce_sum(tf.compat.v1.placeholder(tf.float32, [None, 2]), 0, name="mean").op
    assert states.mixed(op, "reduces over the batch").describe() == "Sum (in 'model/dense') reduces over the batch"
    assert Mixed("Sum", "alone", "sums").describe() == "Sum (in 'alone') sums"
