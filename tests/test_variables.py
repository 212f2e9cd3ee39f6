"""A process's own variables are one for all replicas, outside of every function, and in no model."""

import numpy as np
import tensorflow as tf

from tfdpfl._variables import in_memory, value_of


def test_a_variable_in_memory_is_made_outside_of_the_function_that_asks():
    made = []

    @tf.function
    def step(x):
        if not made:
            made.append(in_memory(np.float32(3.0)))
        return x + made[0]

    assert step(tf.constant(1.0)) == 4.0
    made[0].assign(5.0)
    assert step(tf.constant(1.0)) == 6.0 and not made[0].trainable


def test_no_strategy_mirrors_it_and_no_module_holds_it():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    module = tf.Module()
    with strategy.scope():
        mine, mirrored = in_memory(np.zeros(2)), tf.Variable([0.0, 0.0])
        module.mirrored = mirrored
    assert hasattr(mirrored, "values") and not hasattr(mine, "values")
    assert mine.numpy().tolist() == [0, 0] and len(module.variables) == 1


def test_a_value_is_that_of_the_variable_now_and_stays_what_it_was():
    variable, weights = tf.Variable([1.0, 2.0]), tf.keras.layers.Dense(2)
    weights.build((None, 3))
    before = value_of(variable)
    variable.assign_add([1.0, 1.0])
    assert before.tolist() == [1, 2] and value_of(variable).tolist() == [2, 3]
    assert (value_of(weights.kernel) == weights.get_weights()[0]).all()
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        assert value_of(tf.Variable([3, 4])).tolist() == [3, 4]
