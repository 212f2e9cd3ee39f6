"""Weights that are averaged over the updates."""

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import callbacks

keras = tf.keras
X, Y = c.examples(12)
CLIP = 0.6


class Weights(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.after, self.validated = [], []

    def on_train_batch_end(self, batch, logs=None):
        self.after.append(c.flat(self.model.get_weights()))

    def on_test_begin(self, logs=None):
        self.validated.append(c.flat(self.model.get_weights()))


@pytest.mark.slow
def test_weights_are_averaged_over_updates_and_training_goes_on_from_the_last(recwarn):
    averaged, seen = callbacks.AveragedWeights(decay=0.5), Weights()
    model = c.compiled(tfdpfl.DPSGD(CLIP, 1.0, learning_rate=0.3, gradient_accumulation_steps=2))
    watched = callbacks.PrivacyBudget(delta=1e-3, accountant="rdp")
    model.fit(X, Y, batch_size=3, epochs=2, validation_data=(X, Y), callbacks=[watched, averaged, seen], verbose=0)
    average = seen.after[1]
    for t, after in enumerate(seen.after[1::2], 1):
        stays = min(0.5, (1 + t) / (10 + t))
        average = stays * average + (1 - stays) * after
        if t == 2:
            np.testing.assert_allclose(seen.validated[0], average, atol=1e-6)
            np.testing.assert_array_equal(seen.after[4], seen.after[3])  # a part: from the weights, not the averages
    np.testing.assert_allclose(c.flat(model.get_weights()), average, atol=1e-6)
    model.fit(X, Y, batch_size=3, callbacks=[watched], verbose=0)
    assert not [w for w in recwarn if "not those that private steps left" in str(w.message)]
    with pytest.raises(ValueError, match="decay"):
        callbacks.AveragedWeights(decay=1.5)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["before", "after"])
def test_the_model_that_is_restored_or_saved_is_the_averaged_one_that_was_best(place, tmp_path):
    model = c.compiled(tfdpfl.DPSGD(CLIP, 1.0, learning_rate=0.3, seed=1))
    path = str(tmp_path / "best.weights.h5")
    stop = keras.callbacks.EarlyStopping("val_loss", mode="max", patience=9, restore_best_weights=True)
    best = keras.callbacks.ModelCheckpoint(path, "val_loss", mode="max", save_best_only=True, save_weights_only=True)
    averaged = callbacks.AveragedWeights(decay=0.5)
    others = [averaged, stop, best] if place == "before" else [stop, best, averaged]
    seen = model.fit(X, Y, batch_size=3, epochs=4, validation_data=(X, Y), callbacks=others, verbose=0)
    losses = seen.history["val_loss"]
    assert losses.index(max(losses)) < 3  # the last model is another one
    if c.keras3():  # Keras 2 restores only where it stops
        np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), max(losses), rtol=1e-5)
    model.load_weights(path)
    np.testing.assert_allclose(model.evaluate(X, Y, verbose=0), max(losses), rtol=1e-5)


def test_averages_are_refused_where_updates_are_not_seen():
    model = c.compiled(tfdpfl.DPSGD(CLIP, 1.0), steps_per_execution=4)
    with pytest.raises(ValueError, match=r"steps_per_execution=4.*use_ema=True, ema_momentum=0.5"):
        model.fit(X, Y, batch_size=3, callbacks=[callbacks.AveragedWeights(decay=0.5)], verbose=0)


@pytest.mark.slow
@pytest.mark.parametrize("swaps", [False, True])
def test_averages_of_keras_are_no_weights_from_outside(swaps, recwarn):
    model = c.compiled(tfdpfl.DPSGD(CLIP, 1.0, learning_rate=0.3, use_ema=True, ema_momentum=0.5))
    budget = callbacks.PrivacyBudget(delta=1e-3, accountant="rdp")
    others = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if swaps and c.keras3() else []
    for _ in range(2):
        model.fit(X, Y, batch_size=3, epochs=2, callbacks=[budget, *others], verbose=0)
    said = "not those that private steps left"
    assert not [w for w in recwarn if said in str(w.message)]
    model.set_weights([w + 1 for w in model.get_weights()])
    with pytest.warns(UserWarning, match=said):
        model.fit(X, Y, batch_size=3, callbacks=[budget, *others], verbose=0)
