"""The steps that a file records are counted or stated, whatever of it was loaded."""

import contextlib
import re

import conftest as c
import h5py
import numpy as np
import pytest
import tensorflow as tf
from step_cases import N, X, Z, budget, fit, uses

import tfdpfl
from tfdpfl.optimizers import _step_table

keras = tf.keras
KERAS3 = c.keras3()
pytestmark = [pytest.mark.slow, pytest.mark.both_stacks]


def made():
    return keras.Sequential(
        [keras.Input((X.shape[1],)), keras.layers.Dense(4), keras.layers.Dense(3, activation="softmax")])  # fmt: skip


def compiled(model, optimizer=None):
    model.compile(
        optimizer or tfdpfl.DPSGD(1.0, Z, learning_rate=0.1), loss="sparse_categorical_crossentropy")  # fmt: skip
    return model


@pytest.fixture
def trained():
    model = compiled(made())
    fit(model, budget(N), batch_size=N, epochs=5)
    return model


def file_of(model, path, ending):
    file = str(path / (f"model.{ending}" if ending != "folder" else "model"))
    if ending == "weights.h5":
        model.save_weights(file)
    else:
        model.save(file, **({"save_format": "tf"} if ending == "folder" else {}))
    return file


def with_weights_of(file, model):
    model.load_weights(file)
    return model


def loaded_alone(file):
    return keras.models.load_model(file, compile=False)


def weights_before_compile(file):
    return with_weights_of(file, made())


def weights_after_compile(file):
    return with_weights_of(file, compiled(made()))


def layers_of_another_model(file):
    inputs = keras.Input((X.shape[1],))
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(loaded_alone(file)(inputs)))


def fitted(model, **said):
    """Whether it is compiled already or not."""
    watched = budget(N, **said)
    fit(model if hasattr(getattr(model, "optimizer", None), "_dp") else compiled(model), watched, batch_size=N)
    return watched


def is_said(warned):
    return [str(w.message) for w in warned if "which records" in str(w.message)]


WAYS = [
    ("keras", loaded_alone),
    ("h5", loaded_alone),
    ("keras", layers_of_another_model),
    ("keras", weights_before_compile),
    ("weights.h5", weights_before_compile),
    ("weights.h5", weights_after_compile),
    ("h5", weights_before_compile),
    ("h5", weights_after_compile),
    *([] if KERAS3 else [("folder", loaded_alone)]),
]


@pytest.mark.parametrize(("ending", "load"), WAYS)
def test_the_steps_in_a_file_of_which_only_weights_are_loaded_are_stated(ending, load, trained, tmp_path):
    file = file_of(trained, tmp_path, ending)
    model = load(file)
    if (ending, load) == ("weights.h5", weights_after_compile):  # which loads the ledger
        assert fitted(model).epsilon() == pytest.approx(uses(6))
        return
    with pytest.warns(UserWarning, match=rf"come from .*{re.escape(file)}, which records 5 private steps"):
        watched = fitted(model)
    assert watched.epsilon() == pytest.approx(uses(1))
    assert any(f"come from {file}" in note for note in watched.report().notes)


def test_a_ledger_that_is_given_counts_the_steps_of_the_file(trained, tmp_path, recwarn):
    watched = fitted(loaded_alone(file_of(trained, tmp_path, "keras")), ledger=trained.optimizer.ledger)
    assert watched.epsilon() == pytest.approx(uses(6)) and not is_said(recwarn)


def test_a_file_that_is_loaded_with_its_optimizer_says_nothing(trained, tmp_path, recwarn):
    assert fitted(keras.models.load_model(file_of(trained, tmp_path, "keras"))).epsilon() == pytest.approx(uses(6))
    assert not is_said(recwarn)


def test_a_file_that_was_saved_after_an_h5_file_states_its_steps(trained, tmp_path):
    """Keras 3 saves no optimizer's config after that, and loads none."""
    file_of(trained, tmp_path, "h5")
    model = keras.models.load_model(file_of(trained, tmp_path, "keras"))
    with contextlib.nullcontext() if model.optimizer else pytest.warns(UserWarning, match="which records 5"):
        fitted(model)


def test_files_without_private_steps_load_as_before(tmp_path, recwarn):
    plain = made()
    plain.compile("sgd", loss="sparse_categorical_crossentropy")
    for ending in ("keras", "h5"):
        np.testing.assert_array_equal(
            loaded_alone(file_of(plain, tmp_path, ending)).get_weights()[0], plain.get_weights()[0])  # fmt: skip
    assert fitted(loaded_alone(file_of(plain, tmp_path, "keras"))).epsilon() == pytest.approx(uses(1))
    assert not is_said(recwarn)


def test_a_table_of_a_newer_release_is_refused_though_only_weights_are_loaded(trained, tmp_path):
    file = file_of(trained, tmp_path, "h5")
    with h5py.File(file, "r+") as tree:
        parts = tree["optimizer_weights"].values()
        table = next(each for each in parts if getattr(each, "shape", ()) == (_step_table.ROWS, 9))
        table[-1, 0] = table[-1, 0] - 1
    with pytest.raises(tfdpfl.PrivacyError, match="is of format version 2"):
        loaded_alone(file)
