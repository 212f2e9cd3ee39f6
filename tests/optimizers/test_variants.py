"""Frozen backbones and LoRA: what is not trained."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl

keras = tf.keras
KERAS3 = c.keras3()
CLIP = 0.6
X, Y = c.examples(12)


def adapted(rank=2):
    backbone = keras.layers.Dense(64, activation="tanh", name="backbone")
    head = keras.layers.Dense(c.CLASSES, name="head")
    model = keras.Sequential([keras.Input((c.WIDTH,)), backbone, head])
    if rank and KERAS3:
        backbone.enable_lora(rank)
        head.enable_lora(rank)
    elif not rank:
        backbone.trainable = False
    model.compile(tfdpfl.DPAdam(CLIP, 1.0, learning_rate=0.1), loss=c.cross_entropy())
    return model


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.skipif(not KERAS3, reason="Keras 3 has LoRA"))])
@pytest.mark.slow
def test_what_is_frozen_stays_to_the_bit_through_training_and_files(rank, tmp_path):
    model = adapted(rank)
    frozen = lambda m: [np.asarray(v).tobytes() for v in (m.non_trainable_weights)]
    before = frozen(model)
    assert before
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert frozen(model) == before
    model.save(tmp_path / "m.keras")
    again = keras.models.load_model(tmp_path / "m.keras")
    if rank:  # Keras saves what LoRA adds as a part of the kernel
        np.testing.assert_allclose(again.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-5)
    else:
        assert frozen(again) == before
    assert again.optimizer.executed == [(1.0, 3)]


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.skipif(not KERAS3, reason="Keras 3 has LoRA"))])
def test_what_is_frozen_costs_no_work_for_each_example(rank):
    """No norm and no sum is made for it: the engine looks at the trained weights alone."""
    model = adapted(rank)
    table = str(tfdpfl.clipping.explain(model, (X, Y)))
    for v in model.non_trainable_weights:
        assert f"{getattr(v, 'path', v.name)} " not in table
    gradients, trained = [], [getattr(v, "_value", v) for v in model.trainable_weights]
    x, y = tf.constant(X), tf.constant(Y)

    @tf.function
    def sums(x, y):
        loss = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True), from_logits=True)
        r = tfdpfl.clipping.clipped_gradients(loss, model.trainable_weights, CLIP)
        return r.sum, r.norms

    got, norms = sums(x, y)
    for i in range(len(X)):
        with tf.GradientTape() as tape:
            out = model(x[i : i + 1], training=True)
            loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y[i : i + 1], out, from_logits=True))
        gradients.append([np.asarray(g) for g in tape.gradient(loss, trained)])
    columns = [np.stack(g) for g in zip(*gradients, strict=True)]
    np.testing.assert_allclose(norms, c.norms_of(columns), rtol=1e-4)
    factors = np.minimum(1, CLIP / np.maximum(c.norms_of(columns), 1e-30))
    want = [np.tensordot(factors, g, 1) for g in columns]
    np.testing.assert_allclose(c.flat([g.numpy() for g in got]), c.flat(want), atol=1e-4)
