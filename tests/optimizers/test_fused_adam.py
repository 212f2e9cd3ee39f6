"""Adam's update in one op is Keras's own, wherever it is taken."""

import conftest as c
import pytest
import tensorflow as tf
from optimizer_cases import CLIP, assert_same, loss_of

from tfdpfl.optimizers import _fused_adam, make_dp_optimizer_class

keras = tf.keras
X, Y = c.examples(8)
ADAM = {"learning_rate": 0.05, "beta_1": 0.8, "beta_2": 0.95, "epsilon": 1e-4}


def steps_of_keras(base, number, **kwargs):
    """Weights after a Keras optimizer's own updates by means of clipped gradients."""
    model, optimizer = c.classifier(), base(**kwargs)
    for _ in range(number):
        mean = [tf.constant(g / len(X), tf.float32) for g in c.clipped_sum(model.get_weights(), X, Y, CLIP)]
        optimizer.apply_gradients(zip(mean, model.trainable_variables, strict=True))
    return model.get_weights()


def traced(optimizer, number, **kwargs):
    """Weights after so many private steps in one traced function, and how many updates in one op are in it."""
    model = c.classifier()

    @tf.function(**kwargs)
    def steps(x, y):
        for _ in range(number):
            optimizer.minimize(lambda: loss_of(model, x, y), model.trainable_variables)

    steps(X, Y)
    graph = steps.get_concrete_function(X, Y).graph.as_graph_def()
    inner = [node.op for function in graph.library.function for node in function.node_def]
    return model.get_weights(), [*(node.op for node in graph.node), *inner].count("ResourceApplyAdam")


@pytest.mark.parametrize("name, more", [("Adam", {}), ("AdamW", {"weight_decay": 0.1}), ("Adam", {"amsgrad": True})])
def test_updates_in_one_op_are_those_of_keras(name, more):
    """Both of one function: the second has a count of its own."""
    base = getattr(keras.optimizers, name)
    found, ops = traced(make_dp_optimizer_class(base)(CLIP, 0.0, **ADAM, **more), 2)
    assert_same(found, steps_of_keras(base, 2, **ADAM, **more))
    assert ops == (0 if more.get("amsgrad") else 2 * len(found))


@pytest.mark.slow
def test_a_compiled_step_has_keras_own_update():
    found, ops = traced(make_dp_optimizer_class(keras.optimizers.Adam)(CLIP, 0.0, **ADAM), 1, jit_compile=True)
    assert_same(found, steps_of_keras(keras.optimizers.Adam, 1, **ADAM))
    assert ops == 0


def test_an_update_of_ones_own_is_not_replaced():
    class Own(keras.optimizers.Adam):
        def update_step(self, gradient, variable, learning_rate=None):
            raise NotImplementedError

    own = make_dp_optimizer_class(keras.optimizers.SGD), make_dp_optimizer_class(Own)
    assert not any(issubclass(made, _fused_adam.FusedAdam) for made in own)
