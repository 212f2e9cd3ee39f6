"""What is saved of a DP optimizer is enough to go on as if nothing had happened: noise, ledger and all."""

import json
import os
import pickle
import subprocess
import sys
import zipfile

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl.optimizers import _mechanism, make_dp_optimizer_class

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


def test_the_key_of_the_noise_is_not_in_the_config():
    optimizer = tfdpfl.DPSGD(1.0, 1.0)
    text = json.dumps(optimizer.get_config(), default=float)
    assert not any(str(word) in text for word in c.state_of(optimizer, "dp_key"))


# -- whole models ------------------------------------------------------------------------------------------------

# Keras 3 restores no optimizer from .h5, and refuses to train on with what it made instead; plain Adam's neither.
FORMATS = ["model.keras"] + ([] if KERAS3 else [pytest.param("model.h5", marks=pytest.mark.slow)])


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_training_resumed_from_a_saved_model_is_the_uninterrupted_training_bit_for_bit(name, tmp_path):
    whole = trained(4)
    model = trained(2)
    model.save(tmp_path / name)
    loaded = keras.models.load_model(tmp_path / name)
    assert type(loaded.optimizer) is tfdpfl.DPAdam
    assert loaded.optimizer.num_dp_steps == 2 and loaded.optimizer.executed == [(0.9, 2)]
    train(loaded, range(2, 4))
    same(loaded, whole)
    assert loaded.optimizer.executed == whole.optimizer.executed == [(0.9, 4)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.slow
def test_a_saved_model_keeps_a_key_that_came_from_the_system(name, tmp_path):
    model = trained(1, seed=None)
    model.save(tmp_path / name)
    loaded = keras.models.load_model(tmp_path / name)
    np.testing.assert_array_equal(c.state_of(loaded.optimizer, "dp_key"), c.state_of(model.optimizer, "dp_key"))
    train(model, range(1, 3))
    train(loaded, range(1, 3))
    same(loaded, model)


@pytest.mark.skipif(KERAS3, reason="Keras 3 loads no SavedModel as a model")
@pytest.mark.slow
def test_a_savedmodel_holds_the_state_which_keras_2_leaves_for_a_checkpoint_to_restore(tmp_path):
    whole, model = trained(4), trained(2)
    model.save(tmp_path / "saved")
    loaded = keras.models.load_model(tmp_path / "saved")
    assert type(loaded.optimizer) is tfdpfl.DPAdam
    assert loaded.optimizer.get_config() == model.optimizer.get_config()
    loaded.optimizer.build(loaded.trainable_variables)
    tf.train.Checkpoint(optimizer=loaded.optimizer).restore(str(tmp_path / "saved/variables/variables"))
    train(loaded, range(2, 4))
    same(loaded, whole)
    assert loaded.optimizer.executed == [(0.9, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["load", "get"])
def test_a_fresh_process_finds_the_classes_by_name(tmp_path, way):
    model = trained(2)
    model.save(tmp_path / "model.keras")
    config = {"class_name": "tfdpfl>DPAdam", "config": {"l2_norm_clip": 1.0, "noise_multiplier": 0.9}}
    code = {
        "load": f"m = tf.keras.models.load_model({str(tmp_path / 'model.keras')!r}); print(m.optimizer.executed)",
        "get": f"print(type(tf.keras.optimizers.get({config!r})).__name__)",
    }[way]
    run = [sys.executable, "-c", f"import tensorflow as tf, tfdpfl; {code}"]
    said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert said.strip() == {"load": "[(0.9, 2)]", "get": "DPAdam"}[way]


def test_a_model_that_was_never_trained_saves_and_loads(tmp_path):
    model = trained(0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.optimizer.executed == []
    train(loaded, range(1))
    assert loaded.optimizer.executed == [(0.9, 1)]


def holds_the_key(path, model):
    """Whether a file, or any below a directory, has the bytes of the key of the model's noise."""
    key = np.asarray(model.optimizer._dp_state["dp_key"]).tobytes()
    assert len(set(key)) > 4
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    contents = [p.read_bytes() for p in files]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            contents += [archive.read(name) for name in archive.namelist()]
    return any(key in content for content in contents)


@pytest.mark.slow
def test_what_the_readme_publishes_holds_no_key(tmp_path):
    model = trained(1, seed=None)
    copy = keras.models.clone_model(model)  # Keras 3 compiles it, with an optimizer that has a key of its own
    copy.set_weights(model.get_weights())
    copy.save(tmp_path / "public.keras")
    model.export(tmp_path / "exported")
    for name in ("public.keras", "exported"):
        assert not holds_the_key(tmp_path / name, model), name
    same(keras.models.load_model(tmp_path / "public.keras"), model)


@pytest.mark.slow
def test_what_the_readme_warns_of_holds_the_key(tmp_path):
    """So that the warning may go when this does."""
    model, other = trained(1), c.classifier(seed=3)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "some.weights.h5")
    for name in ("model.keras", "some.weights.h5"):
        assert holds_the_key(tmp_path / name, model), name
    if KERAS3:
        model.save(tmp_path / "without.keras", include_optimizer=False)  # Keras 3 does not look at it
        assert holds_the_key(tmp_path / "without.keras", model)
    other.load_weights(tmp_path / "some.weights.h5")
    same(model, other)


@pytest.mark.slow
def test_a_model_loads_in_a_process_that_only_imported_the_package(tmp_path):
    trained(2).save(tmp_path / "model.keras")
    code = (
        "import sys, tfdpfl; tfdpfl.DPAdam\nimport tensorflow as tf\n"
        "optimizer = tf.keras.models.load_model(sys.argv[1]).optimizer\n"
        "print(type(optimizer).__name__, optimizer.executed)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "model.keras")], capture_output=True, text=True, env=os.environ
    )
    assert done.stdout.strip().splitlines()[-1:] == ["DPAdam [(0.9, 2)]"], done.stderr[-2000:]


# -- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_training_resumed_from_a_checkpoint_is_the_uninterrupted_training_bit_for_bit(tmp_path):
    whole = trained(4)
    model = trained(2)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(str(tmp_path / "ckpt"))
    resumed = c.compiled(tfdpfl.DPAdam(0.7, 0.9, learning_rate=0.05, seed=99))
    resumed.optimizer.build(resumed.trainable_variables)
    tf.train.Checkpoint(model=resumed, optimizer=resumed.optimizer).restore(path).assert_existing_objects_matched()
    assert resumed.optimizer.executed == [(0.9, 2)]
    train(resumed, range(2, 4))
    same(resumed, whole)
    assert resumed.optimizer.num_dp_steps == 4


@pytest.mark.slow
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
    assert ledger == alone


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
    np.testing.assert_array_equal(c.state_of(loaded.optimizer, "dp_key"), c.state_of(model.optimizer, "dp_key"))


@pytest.mark.parametrize("same_key", [True, False])
@pytest.mark.parametrize("own, loaded, more, both", [
    ([(1.0, 3)], [(1.0, 5)], [(1.0, 5)], [(1.0, 8)]),
    ([(1.0, 3), (2.0, 4)], [(1.0, 5)], [(1.0, 5), (2.0, 4)], [(1.0, 8), (2.0, 4)]),
    ([(3.0, 9)], [(0.5, 2), (1.0, 1)], [(0.5, 9), (1.0, 1)], [(0.5, 11), (1.0, 1)]),
    ([(2.0, 1)], [(0.0, 1)], [(0.0, 1)], [(0.0, 2)]),
])  # fmt: skip
def test_two_ledgers_become_one_that_costs_no_less_than_what_ran(own, loaded, more, both, same_key):
    """Those of one run: what the longer one says; those of two: the sum."""
    optimizer = tfdpfl.DPSGD(1.0, 1.0)
    rows = lambda pairs: np.array([*pairs, *[(0, 0)] * (_mechanism.LEDGER_ROWS - len(pairs))], float)
    optimizer._dp._ran.assign([1, 2], 3, rows(own), optimizer._dp_state)
    if not same_key:
        optimizer._dp_state["dp_key"].assign([1, 3])
    optimizer._dp_state["dp_ledger"].assign(rows(loaded))
    assert optimizer.executed == (more if same_key else both)
    assert optimizer.num_dp_steps == sum(n for _, n in optimizer.executed)


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


def test_states_of_several_runs_in_turns_draw_no_noise_twice_and_lose_no_step():
    first, second = tfdpfl.DPSGD(1.0, 1.0, learning_rate=1.0), tfdpfl.DPSGD(1.0, 1.0, learning_rate=1.0)
    draw, other = noise_drawn(first), noise_drawn(second)
    state = lambda optimizer: {k: np.asarray(v) for k, v in optimizer._dp_state.items()}

    def load(values):
        for k, v in values.items():
            first._dp_state[k].assign(v)

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
    assert loaded.optimizer.executed == [(0.9, 3)] and c.state_of(loaded.optimizer, "dp_steps") == 3


# -- the ledger --------------------------------------------------------------------------------------------------


class Recorder:
    """The mechanism's book-keeping on steps of any multiplier, without a model."""

    def __init__(self):
        first = _mechanism.Mechanism(1.0, 1.0, None, None, 0).initial_state()
        self.state = {k: tf.Variable(v) for k, v in first.items()}

    def __call__(self, multiplier, microbatches=None, batch=4, nonfinite=0):
        class Clipped:
            batch_size, num_nonfinite = tf.constant(batch), tf.constant(nonfinite)

        mechanism = _mechanism.Mechanism(1.0, multiplier, microbatches, None, 0)
        mechanism._record(self.state, Clipped, *mechanism._ran.carried_on(self.state))

    @property
    def rows(self):
        return [(z, n) for z, n in self.state["dp_ledger"].numpy().tolist() if n]


def test_every_step_is_in_the_ledger_once():
    record = Recorder()
    for z in (1.0, 1.0, 2.0, 1.0, 0.0, 2.0):
        record(z)
    assert sorted(record.rows) == [(0.0, 1), (1.0, 3), (2.0, 2)]
    assert record.state["dp_steps"].numpy() == 6


def test_a_full_ledger_merges_at_the_least_noise_and_loses_no_step():
    record = Recorder()
    multipliers = [1.0 + i / 10 for i in range(_mechanism.LEDGER_ROWS + 4)]
    for z in [*multipliers, 0.5, 3.0]:
        record(z)
    rows = record.rows
    assert sum(n for _, n in rows) == len(multipliers) + 2
    for z in [*multipliers, 0.5, 3.0]:  # at least as many steps at this noise or less as there were
        ran = sum(1 for m in [*multipliers, 0.5, 3.0] if m <= z)
        assert sum(n for m, n in rows if m <= z) >= ran
    assert min(m for m, _ in rows) == 0.5


def test_microbatches_halve_the_multiplier_of_the_ledger_unless_each_is_one_example():
    record = Recorder()
    record(1.0, microbatches=2, batch=4)
    record(1.0, microbatches=4, batch=4)
    assert sorted(record.rows) == [(0.5, 1), (1.0, 1)]


def test_what_was_not_finite_adds_up():
    record = Recorder()
    record(1.0, nonfinite=2), record(1.0, nonfinite=0), record(1.0, nonfinite=3)
    assert record.state["dp_nonfinite"].numpy() == 5


def test_steps_without_noise_have_no_finite_price():
    model = trained(1, multiplier=0.0)
    assert model.optimizer.executed == [(0.0, 1)]
    assert model.optimizer.ledger.epsilon(1e-5) == float("inf")


@pytest.mark.slow
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
    assert np.any(c.state_of(copy, "dp_key") != c.state_of(model.optimizer, "dp_key"))


def test_an_optimizer_made_by_make_dp_optimizer_class_pickles():
    optimizer = make_dp_optimizer_class(keras.optimizers.Adamax)(1.0, 0.5, learning_rate=0.25)
    copy = pickle.loads(pickle.dumps(optimizer))
    assert type(copy) is type(optimizer)
    assert copy.get_config() == optimizer.get_config()


@pytest.mark.slow
def test_a_copy_with_a_seed_never_repeats_noise_that_was_used():
    model = trained(1, seed=5)
    copy = pickle.loads(pickle.dumps(model.optimizer))
    assert c.state_of(copy, "dp_steps") == 1
    np.testing.assert_array_equal(c.state_of(copy, "dp_key"), c.state_of(model.optimizer, "dp_key"))
