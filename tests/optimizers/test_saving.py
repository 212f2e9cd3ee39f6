"""What is saved of a DP optimizer is enough to go on with its ledger and state, and with fresh noise."""

import json
import pickle
import subprocess
import sys

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.callbacks import PrivacyBudget
from tfdpfl.optimizers import make_dp_optimizer_class

keras = tf.keras
KERAS3 = c.keras3()
KERAS3S_FILES = pytest.mark.skipif(not KERAS3, reason="Keras 2 keeps the optimizer out of .weights.h5")
SETTINGS = {
    "l2_norm_clip": 0.7, "noise_multiplier": 0.9, "num_microbatches": 2, "expected_batch_size": 12.0, "seed": 11,
}  # fmt: skip
CLASSES = ["DPSGD", "DPAdam", "DPAdamW", "DPAdagrad", "DPRMSprop"]
DATA = c.examples(24)


def trained(steps, seed=11, multiplier=0.9, **kwargs):
    model = c.compiled(tfdpfl.DPAdam(0.7, multiplier, learning_rate=0.05, seed=seed, **kwargs))
    train(model, range(steps))
    return model


def train(model, steps):
    x, y = DATA
    for i in steps:
        rows = slice(4 * i, 4 * i + 4)
        model.train_on_batch(x[rows], y[rows])


def same(a, b):
    for v, w in zip(a.get_weights(), b.get_weights(), strict=True):
        np.testing.assert_array_equal(v, w)


# -- configuration -----------------------------------------------------------------------------------------------


def through_json(config):
    return json.loads(json.dumps(config, default=float))  # Keras 2 leaves numpy's float32 in its own entries


@pytest.mark.parametrize("name", CLASSES)
def test_from_config_is_the_inverse_of_get_config_through_json(name):
    cls = getattr(tfdpfl, name)
    optimizer = cls(**SETTINGS, learning_rate=0.125, weight_decay=0.01, clipnorm=2.0)
    config = optimizer.get_config()
    assert {k: config[k] for k in SETTINGS} == SETTINGS
    again = cls.from_config(through_json(config))
    assert type(again) is cls
    assert through_json(again.get_config()) == through_json(config)
    for k, v in SETTINGS.items():
        if k != "seed":
            assert getattr(again, k) == v


@pytest.mark.parametrize("name", CLASSES)
def test_keras_finds_the_class_by_its_registered_name(name):
    cls = getattr(tfdpfl, name)
    found = keras.optimizers.get({"class_name": f"tfdpfl>{name}", "config": cls(**SETTINGS).get_config()})
    assert type(found) is cls
    assert found.noise_multiplier == 0.9


def test_serialize_and_deserialize_are_inverses():
    optimizer = tfdpfl.DPAdam(**SETTINGS, learning_rate=0.25)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is tfdpfl.DPAdam
    assert again.get_config() == optimizer.get_config()


def test_a_schedule_survives_the_config():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    again = tfdpfl.DPSGD.from_config(tfdpfl.DPSGD(1.0, 1.0, learning_rate=schedule).get_config())
    config = again.get_config()["learning_rate"]
    assert config["class_name"] == "ExponentialDecay" and config["config"]["decay_rate"] == 0.9


def test_unset_arguments_stay_unset():
    config = tfdpfl.DPSGD(1.0, 0.0).get_config()
    for name in ("num_microbatches", "expected_batch_size", "seed"):
        assert config[name] is None


# -- whole models ------------------------------------------------------------------------------------------------

# Keras 3 restores no optimizer from .h5, and refuses to train on with what it made instead; plain Adam's neither.
FORMATS = ["model.keras"] + ([] if KERAS3 else [pytest.param("model.h5", marks=pytest.mark.slow)])


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_training_resumed_from_a_saved_model_is_the_uninterrupted_training_but_for_the_noise(name, tmp_path):
    whole, model = trained(4, multiplier=0.0), trained(2, multiplier=0.0)
    model.save(tmp_path / name)
    loaded = keras.models.load_model(tmp_path / name)
    assert type(loaded.optimizer) is tfdpfl.DPAdam
    assert loaded.optimizer.num_dp_steps == 2 and loaded.optimizer.executed == [(0.0, 2)]
    train(loaded, range(2, 4))
    same(loaded, whole)
    assert loaded.optimizer.executed == whole.optimizer.executed == [(0.0, 4)]


@pytest.mark.skipif(KERAS3, reason="Keras 3 loads no SavedModel as a model")
@pytest.mark.slow
def test_a_savedmodel_holds_the_state_which_keras_2_leaves_for_a_checkpoint_to_restore(tmp_path):
    whole, model = trained(4, multiplier=0.0), trained(2, multiplier=0.0)
    model.save(tmp_path / "saved")
    loaded = keras.models.load_model(tmp_path / "saved")
    assert type(loaded.optimizer) is tfdpfl.DPAdam
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    loaded.optimizer.build(loaded.trainable_variables)
    tf.train.Checkpoint(optimizer=loaded.optimizer).restore(str(tmp_path / "saved/variables/variables"))
    train(loaded, range(2, 4))
    same(loaded, whole)
    assert loaded.optimizer.executed == [(0.0, 4)]


@pytest.mark.skipif(KERAS3, reason="test_keras_files.py and test_keys.py have it for Keras 3")
@pytest.mark.slow
def test_a_fresh_process_finds_the_classes_by_name(tmp_path):
    trained(2).save(tmp_path / "model.keras")
    config = {"class_name": "tfdpfl>DPAdam", "config": {"l2_norm_clip": 1.0, "noise_multiplier": 0.9}}
    code = (
        f"import tensorflow as tf, tfdpfl\nprint(type(tf.keras.optimizers.get({config!r})).__name__)\n"
        f"print(tf.keras.models.load_model({str(tmp_path / 'model.keras')!r}).optimizer.executed)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == ["DPAdam", "[(0.9, 2)]"]


@pytest.mark.slow
def test_a_model_that_was_never_trained_saves_and_loads(tmp_path):
    model = trained(0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.executed == []
    train(loaded, range(1))
    assert loaded.optimizer.executed == [(0.9, 1)]


# -- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_resumed_from_a_checkpoint_is_the_uninterrupted_training_but_for_the_noise(tmp_path):
    whole, model = trained(4, multiplier=0.0), trained(2, multiplier=0.0)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "ckpt"))
    resumed = c.compiled(tfdpfl.DPAdam(0.7, 0.0, learning_rate=0.05))
    resumed.optimizer.build(resumed.trainable_variables)
    tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(path).assert_existing_objects_matched()
    assert resumed.optimizer.executed == [(0.0, 2)]
    train(resumed, range(2, 4))
    same(resumed, whole)
    assert resumed.optimizer.num_dp_steps == 4


@pytest.mark.slow
@pytest.mark.one_stack
def test_a_restart_with_other_noise_makes_a_row_of_its_own(tmp_path):
    model = trained(1)
    path = tf.train.Checkpoint(optimizer=model.optimizer).save(str(tmp_path / "ckpt"))
    resumed = c.compiled(tfdpfl.DPAdam(0.7, 2.5, learning_rate=0.05))
    resumed.optimizer.build(resumed.trainable_variables)
    tf.train.Checkpoint(optimizer=resumed.optimizer).restore(path)
    train(resumed, range(1, 3))
    assert resumed.optimizer.executed == [(0.9, 1), (2.5, 2)]
    ledger = resumed.optimizer.ledger
    assert len(ledger) == 2 and ledger.steps == 3
    alone = tfdpfl.PrivacyLedger()
    from dp_accounting import dp_event

    alone.add(dp_event.GaussianDpEvent(0.9), 1, adjacency="zero_out")
    alone.add(dp_event.GaussianDpEvent(2.5), 2, adjacency="zero_out")
    assert ledger.adjacency == "zero_out" and ledger.epsilon(1e-5) == pytest.approx(alone.epsilon(1e-5))


def checkpoint(model):
    return tf.train.Checkpoint(model=model, optimizer=model.optimizer)


@pytest.mark.parametrize("file", ["checkpoint", pytest.param("weights", marks=KERAS3S_FILES)])
def test_state_that_is_loaded_mid_run_takes_back_neither_noise_nor_steps(file, tmp_path):
    """What ran, ran: the steps after the file was written are counted, and none of their noise is drawn again."""
    model = trained(1, seed=None)
    path = str(tmp_path / "some.weights.h5")
    model.save_weights(path) if file == "weights" else checkpoint(model).write(path)
    first = c.update_of(model, lambda: train(model, [1]))
    train(model, [2])
    assert model.optimizer.executed == [(0.9, 3)]
    model.load_weights(path) if file == "weights" else checkpoint(model).read(path).assert_existing_objects_matched()
    assert model.optimizer.executed == [(0.9, 3)] and model.optimizer.num_dp_steps == 3
    again = c.update_of(model, lambda: train(model, [1]))  # the same weights, data and state but for the noise
    assert not np.allclose(c.flat(first), c.flat(again), atol=1e-3)
    assert model.optimizer.executed == [(0.9, 4)] and model.optimizer.num_dp_steps == 4
    assert pickle.loads(pickle.dumps(model.optimizer)).executed == [(0.9, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["model.keras", pytest.param("some.weights.h5", marks=KERAS3S_FILES)])
def test_a_ledger_survives_layers_that_were_frozen_before_saving(name, tmp_path):
    """Keras leaves out the whole state of an optimizer with another number of variables."""
    model = trained(3, seed=None)
    model.layers[-1].trainable = False
    model.save(tmp_path / name) if name.endswith("keras") else model.save_weights(tmp_path / name)
    if name.endswith("keras"):
        loaded = keras.models.load_model(tmp_path / name)
    else:
        loaded = trained(1, seed=None)
        loaded.layers[-1].trainable = False
        loaded.compile(tfdpfl.DPAdam(0.7, 0.9), loss=c.cross_entropy())
        loaded.load_weights(tmp_path / name)
    assert loaded.optimizer.executed == [(0.9, 3)] and loaded.optimizer.num_dp_steps == 3


def noise_drawn(optimizer):
    """The noise of one step and nothing else, by a step whose gradient is 0."""
    v = tf.Variable(np.zeros(16, "float32"))
    optimizer.build([v])

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def step(x):
        optimizer.minimize(lambda: 0.0 * tf.reduce_mean(tf.reduce_sum(x, 1) * tf.reduce_sum(v)), [v])

    def draw():
        v.assign(tf.zeros_like(v))
        step(tf.ones([2, 4]))
        return v.numpy()

    return draw


@pytest.mark.slow
def test_steps_that_were_loaded_count_though_the_model_is_compiled_anew(tmp_path):
    x, y = c.examples(8)
    first = c.compiled(tfdpfl.DPSGD(1.0, 1.1, learning_rate=0.1))
    first.fit(x, y, batch_size=4, epochs=2, verbose=0)
    path = str(tmp_path / "model.keras")
    first.save(path)
    for loaded, steps in ((tf.keras.models.load_model(path), 6), (tf.keras.models.load_model(path, compile=False), 2)):
        loaded.compile(tfdpfl.DPSGD(1.0, 1.3, learning_rate=0.1), c.cross_entropy())
        budget = PrivacyBudget(delta=1e-5)
        loaded.fit(x, y, batch_size=4, callbacks=[budget], verbose=0)
        assert budget.ledger.steps == steps


def test_states_of_several_runs_in_turns_draw_no_noise_twice_and_lose_no_step():
    first, second = tfdpfl.DPSGD(1.0, 1.0, learning_rate=1.0), tfdpfl.DPSGD(1.0, 1.0, learning_rate=1.0)
    draw, other = noise_drawn(first), noise_drawn(second)
    state = lambda optimizer: np.asarray(optimizer._dp_ledger)
    load = first._dp_ledger.assign
    drawn = [draw() for _ in range(3)]
    early = state(first)
    drawn += [draw() for _ in range(3)]
    drawn += [other() for _ in range(4)]
    load(state(second))
    drawn.append(draw())
    assert first.executed == [(1.0, 6 + 4 + 1)]
    load(early)
    drawn += [draw() for _ in range(6)]
    assert first.executed == [(1.0, 6 + 4 + 1 + 6)]
    assert len({tuple(d.tolist()) for d in drawn}) == len(drawn) == 17


@pytest.mark.slow
@KERAS3S_FILES
def test_a_state_that_is_loaded_and_saved_before_the_next_step_keeps_what_ran(tmp_path):
    model, path = trained(1, seed=None), str(tmp_path / "early.weights.h5")
    model.save_weights(path)
    train(model, [1, 2])
    model.load_weights(path)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.executed == [(0.9, 3)] and loaded.optimizer.num_dp_steps == 3


# -- the ledger --------------------------------------------------------------------------------------------------


def test_steps_without_noise_have_no_finite_price():
    model = trained(1, multiplier=0.0)
    assert model.optimizer.executed == [(0.0, 1)]
    assert model.optimizer.ledger.epsilon(1e-5) == float("inf")


@pytest.mark.slow
@pytest.mark.one_stack
def test_the_ledger_prices_what_ran():
    model = trained(1, multiplier=4.0)
    one = tfdpfl.compute_epsilon(
        num_examples=24, batch_size=24, noise_multiplier=4.0, delta=1e-5, num_steps=1, sampling="none"
    )
    assert model.optimizer.ledger.epsilon(1e-5) == pytest.approx(one, rel=0.01)


# -- pickles -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CLASSES, "DPKerasAdamOptimizer"])
def test_classes_pickle_by_name(name):
    cls = getattr(tfdpfl, name)
    assert pickle.loads(pickle.dumps(cls)) is cls


def test_an_optimizer_pickles_with_its_settings_and_ledger_and_a_key_of_its_own():
    model = trained(1, seed=None)
    copy = pickle.loads(pickle.dumps(model.optimizer))
    assert type(copy) is tfdpfl.DPAdam
    assert copy.get_config() == model.optimizer.get_config()
    assert copy.executed == [(0.9, 1)] and copy.num_dp_steps == 1
    assert copy.ledger == model.optimizer.ledger


def test_an_optimizer_made_by_make_dp_optimizer_class_pickles():
    optimizer = make_dp_optimizer_class(keras.optimizers.Adamax)(1.0, 0.5, learning_rate=0.25)
    copy = pickle.loads(pickle.dumps(optimizer))
    assert type(copy) is type(optimizer)
    assert copy.get_config() == optimizer.get_config()
