"""Trainings leave nothing behind: the graphs that the engine keeps records of end with their models."""

import gc
import weakref

import numpy as np
import pytest
import tensorflow as tf
from conftest import classifier, cross_entropy, keras3
from tensorflow.python.framework import ops
from tensorflow.python.framework.func_graph import FuncGraph

import tfdpfl


def train(model=None):
    model = model or classifier()
    model.compile(optimizer=tfdpfl.DPSGD(l2_norm_clip=1.0, noise_multiplier=1.0), loss=cross_entropy())
    x = np.ones((16, *model.input_shape[1:]), "float32")
    model.fit(x, np.zeros(16, "int32"), batch_size=8, verbose=0)


def count_graphs():
    tf.keras.backend.clear_session()
    gc.collect()
    return sum(isinstance(found, FuncGraph) for found in gc.get_objects())


@pytest.mark.slow
@pytest.mark.both_stacks
def test_graphs_of_a_training_end_with_its_model():
    train()
    before = count_graphs()
    for _ in range(2):
        train()
    of_a_plain_one = 1 if keras3() else 2  # Keras keeps as many of each training
    assert count_graphs() - before <= 2 * of_a_plain_one


@pytest.mark.slow
def test_nothing_of_a_loop_is_kept():
    """TensorFlow keeps what tf.custom_gradient registers, with its graph, to the end of the process."""
    keras, gradients = tf.keras, ops.gradient_registry._registry
    before = set(gradients)
    train(keras.Sequential([keras.Input((4, 2)), keras.layers.LSTM(3), keras.layers.Dense(3)]))
    assert set(gradients) <= before


@pytest.mark.slow
@pytest.mark.both_stacks
def test_the_data_of_a_training_end_with_it():
    """Without waiting for Python to look for cycles, which it seldom does."""

    def train_on_batches():
        model = classifier()
        x, y = np.ones((64, *model.input_shape[1:]), "float32"), np.zeros(64, "int32")
        batches, budget = tfdpfl.data.poisson_batches((x, y), 0.25, 4), tfdpfl.callbacks.PrivacyBudget(delta=1e-4)
        optimizer = tfdpfl.DPSGD(l2_norm_clip=1.0, noise_multiplier=1.0, expected_batch_size=16)
        model.compile(optimizer=optimizer, loss=cross_entropy())
        model.fit(batches, callbacks=[budget], verbose=0)
        return [weakref.ref(batches), weakref.ref(budget)]

    gc.disable()
    try:
        assert [each() for each in train_on_batches()] == [None] * 2
    finally:
        gc.enable()
