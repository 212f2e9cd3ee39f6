"""The noise's key is in the process's memory alone: no file holds it, no copy, load or restart draws the same noise."""

import copy
import itertools
import pathlib
import pickle
import secrets
import subprocess
import sys
import zipfile

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.optimizers import make_dp_optimizer_class

keras = tf.keras
KERAS3 = c.keras3()
WIDTH = 100_000


def template(jit=False, width=WIDTH, **kwargs):
    """A model whose gradient is zero on zeros: what moves is the noise."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(width, use_bias=False)])
    optimizer = tfdpfl.DPSGD(1.0, 1.0, learning_rate=1.0, **kwargs)
    model.compile(optimizer, loss="mse", jit_compile=jit)
    return model


def update(model):
    """The noise of one step."""
    width = model.get_weights()[0].size
    return c.flat(c.update_of(model, lambda: model.train_on_batch(np.zeros((2, 1)), np.zeros((2, width)))))


def assert_independent(*draws):
    for a, b in itertools.combinations(draws, 2):
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    for d in draws:
        assert abs(d.std() * 2 - 1) < 0.03  # and it is all there


def reloaded(model, path):
    model.save(path / "model.keras")
    return keras.models.load_model(path / "model.keras")


def with_optimizer(model, optimizer):
    other = keras.models.clone_model(model)
    other.compile(optimizer, loss="mse", jit_compile=bool(getattr(model, "jit_compile", False)))
    return other


def with_weights(model, path):
    model.save_weights(path / "some.weights.h5")
    other = with_optimizer(model, type(model.optimizer).from_config(model.optimizer.get_config()))
    other.build((None, 1))
    other.optimizer.build(other.trainable_variables)
    other.load_weights(path / "some.weights.h5")
    return other


def from_checkpoint(model, path):
    saved = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(path / "checkpoint"))
    other = with_optimizer(model, type(model.optimizer).from_config(model.optimizer.get_config()))
    other.optimizer.build(other.trainable_variables)
    tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(saved).expect_partial()
    return other


COPIES = {
    "saved and loaded": reloaded,
    "cloned, optimizer from its config": lambda model, _: with_optimizer(
        model, type(model.optimizer).from_config(model.optimizer.get_config())
    ),
    "pickled optimizer": lambda model, _: with_optimizer(model, pickle.loads(pickle.dumps(model.optimizer))),
    "deepcopy of the model": lambda model, _: copy.deepcopy(model),
    "weights loaded": with_weights,
    "checkpoint restored": from_checkpoint,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.slow
def test_copies_of_a_model_draw_independent_noise(way, tmp_path):
    """K-fold, or one template for three hospitals: the difference of two copies must hold the noise of both, whether
    they are of a new model or of one that has trained."""
    model = template()
    first = COPIES[way](model, tmp_path)
    draws = [update(model)]
    second = COPIES[way](model, tmp_path)
    assert_independent(*draws, *map(update, (model, first, first, second)))


def set_to_zero(optimizer):
    """The usual recipe to reset an optimizer."""
    variables = optimizer.variables
    for v in variables if KERAS3 else variables():
        if "learning_rate" not in v.name:
            v.assign(tf.zeros_like(v))


@pytest.mark.slow
def test_an_optimizer_whose_variables_are_set_to_zero_before_its_first_step_keeps_its_secret():
    draws = []
    for _ in range(2):
        model = template()
        model.optimizer.build(model.trainable_variables)
        set_to_zero(model.optimizer)
        draws.append(update(model))
    assert_independent(*draws)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.slow
def test_a_model_that_is_reset_compiled_anew_or_loaded_back_does_not_repeat_noise(jit, tmp_path):
    model = template(jit)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.write(str(tmp_path / "state"))
    draws = [update(model), update(model)]
    for _ in range(2):
        checkpoint.read(path)
        draws.append(update(model))
        set_to_zero(model.optimizer)
        draws.append(update(model))
    model.compile(tfdpfl.DPSGD(1.0, 1.0, learning_rate=1.0), loss="mse", jit_compile=jit)
    draws.append(update(model))
    assert_independent(*draws)


# Keras is imported before the package, and finds its classes all the same (test_keras_files.py has another order).
RESUMED = """
import keras, tfdpfl
import sys, numpy as np, tensorflow as tf
model = tf.keras.models.load_model(sys.argv[1])
sys.path.insert(0, sys.argv[3])
from test_keys import update
assert model.optimizer.executed == [(1.0, 1)]
np.save(sys.argv[2], update(model))
"""


@pytest.mark.slow
def test_processes_that_go_on_from_one_file_draw_independent_noise(tmp_path):
    model = template()
    draws = [update(model)]
    model.save(tmp_path / "model.keras")
    draws.append(update(model))
    here = pathlib.Path(__file__).parent
    out = str(tmp_path / "drawn.npy")
    program = [sys.executable, "-c", RESUMED, str(tmp_path / "model.keras"), out, here]
    subprocess.run(program, check=True, cwd=here.parent)
    draws += [np.load(out), update(keras.models.load_model(tmp_path / "model.keras"))]
    assert_independent(*draws)


# -- no file holds it ----------------------------------------------------------------------------------------------


@pytest.fixture
def drawn(monkeypatch):
    """All that was taken from the operating system's entropy."""
    taken, real = [], secrets.token_bytes

    def token_bytes(n):
        taken.append(real(n))
        return taken[-1]

    monkeypatch.setattr(secrets, "token_bytes", token_bytes)
    return taken


def holds(path, keys):
    """The files at or below a path, archives unpacked, that have any 8 bytes of the keys."""
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    contents = {str(p): p.read_bytes() for p in files}
    for p in files:
        if zipfile.is_zipfile(p):
            with zipfile.ZipFile(p) as archive:
                contents |= {f"{p}/{name}": archive.read(name) for name in archive.namelist()}
    parts = [key[i : i + 8] for key in keys for i in range(0, len(key) - 7, 8)]
    return [name for name, content in contents.items() if any(part in content for part in parts)]


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_nothing_that_can_be_saved_holds_the_key(jit, drawn, tmp_path):
    model = template(jit, width=50)
    for _ in range(2):
        update(model)
    keys = [key for key in drawn if len(key) >= 16]
    assert keys
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "some.weights.h5")
    model.export(tmp_path / "exported")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    checkpoint.write(str(tmp_path / "written")), checkpoint.save(str(tmp_path / "saved"))
    (tmp_path / "pickled").write_bytes(pickle.dumps(model.optimizer))
    (tmp_path / "config").write_bytes(repr(model.optimizer.get_config()).encode())
    (tmp_path / "ledger").write_bytes(repr(model.optimizer.ledger.to_dict()).encode())
    if KERAS3:
        model.save(tmp_path / "without.keras", include_optimizer=False)
    else:
        model.save(tmp_path / "model.h5")
        model.save(tmp_path / "savedmodel")
        model.save_weights(tmp_path / "tf_weights")
    values = model.optimizer.variables if KERAS3 else model.optimizer.variables()
    (tmp_path / "variables").write_bytes(b"".join(np.asarray(v).tobytes() for v in values))
    graphs = [f.graph.as_graph_def().SerializeToString() for f in steps_of(model)]
    (tmp_path / "graph").write_bytes(b"".join(graphs))
    assert holds(tmp_path, keys) == []
    (tmp_path / "control").write_bytes(b"before" + keys[0])
    assert len(holds(tmp_path, keys)) == 1  # the search finds what is there


def steps_of(model):
    optimizer = model.optimizer

    @tf.function
    def step(x):
        optimizer.minimize(lambda: tf.reduce_mean(model(x)), model.trainable_variables)

    return [step.get_concrete_function(tf.TensorSpec([None, 1]))]


@pytest.mark.slow
def test_a_module_that_holds_a_step_is_saved_without_its_key_or_not_at_all(drawn, tmp_path):
    for jit in (False, True):
        model = template(width=50)
        optimizer = model.optimizer
        optimizer.build(model.trainable_variables)
        module = tf.Module()
        module.model = model

        @tf.function(input_signature=[tf.TensorSpec([None, 1])], jit_compile=jit)
        def step(x, model=model, optimizer=optimizer):
            optimizer.minimize(lambda: tf.reduce_mean(model(x)), model.trainable_variables)

        step(tf.zeros([2, 1]))
        module.step = step
        path = tmp_path / f"module{jit}"
        try:
            tf.saved_model.save(module, str(path))
        except (AssertionError, KeyError, ValueError):  # it captures what is not tracked: loud enough
            continue
        assert holds(path, [key for key in drawn if len(key) >= 16]) == []


@pytest.mark.slow
def test_any_optimizers_class_has_its_own_key():
    made = make_dp_optimizer_class(keras.optimizers.Adamax)
    draws = []
    for _ in range(2):
        model = template(width=WIDTH)
        model.compile(made(1.0, 1.0, learning_rate=1.0), loss="mse")
        draws.append(c.flat(c.update_of(model, lambda: model.train_on_batch(np.zeros((2, 1)), np.zeros((2, WIDTH))))))  # noqa: B023
    assert abs(np.corrcoef(*draws)[0, 1]) < 0.05
