"""The steps of every optimizer that a model ever had are in the file of the last one."""

import subprocess
import sys

import conftest as c
import numpy as np
import pytest
import tensorflow as tf
from step_cases import DELTA, N, X, Y, Z, budget, fit, uses

import tfdpfl
from tfdpfl.optimizers import _past, _step_table

keras = tf.keras
KERAS3 = c.keras3()
pytestmark = [pytest.mark.slow, pytest.mark.both_stacks]


def optimizer(**kwargs):
    return tfdpfl.DPSGD(1.0, Z, learning_rate=0.1, **kwargs)


def anew(model, given=None):
    model.compile(optimizer() if given is None else given, loss="sparse_categorical_crossentropy")
    return model


def made(**layer):
    return keras.Sequential(
        [keras.Input((X.shape[1],)), keras.layers.Dense(4, **layer), keras.layers.Dense(3, "softmax", **layer)]
    )


def trained(passes=5, **layer):
    model = made(**layer)
    fit(anew(model), budget(N), batch_size=N, epochs=passes)
    return model


def saved(model, path, ending="keras"):
    file = str(path / f"model.{ending}" if ending != "folder" else path / "model")
    model.save(file, **({"save_format": "tf"} if ending == "folder" else {}))
    return keras.models.load_model(file)


def cost_after_one_more(model):
    watched = budget(N)
    fit(model, watched, batch_size=N)
    return watched.epsilon()


def second_stage_with_a_budget(model):
    fit(anew(model), budget(N), batch_size=N)


def second_stage_without_one(model):
    fit(anew(model), batch_size=N)


def second_stage_with_a_frozen_layer(model):
    model.layers[0].trainable = False
    fit(anew(model), budget(N), batch_size=N)


def second_stage_in_a_loop(model):
    anew(model).train_on_batch(X, Y)


STAGES = [
    second_stage_with_a_budget, second_stage_without_one, second_stage_with_a_frozen_layer, second_stage_in_a_loop,
]  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_file_of_the_second_stage_has_the_steps_of_the_first(stage, tmp_path):
    model = trained()
    stage(model)
    assert cost_after_one_more(saved(model, tmp_path)) == pytest.approx(uses(7))


def test_a_file_of_a_model_that_was_only_compiled_anew_has_the_steps_before(tmp_path):
    assert cost_after_one_more(saved(anew(trained()), tmp_path)) == pytest.approx(uses(6))


def test_a_file_of_a_model_on_the_layers_of_another_has_the_steps_on_them(tmp_path):
    model = keras.Sequential([trained().layers[0], keras.layers.Dense(3, "softmax")])
    model.build((None, X.shape[1]))
    second_stage_with_a_budget(model)
    assert cost_after_one_more(saved(model, tmp_path)) == pytest.approx(uses(7))


def restored(model, path):
    """A model whose state came out of a TensorFlow checkpoint, which Keras does not prepare."""
    point = tf.train.Checkpoint(model=model).save(str(path / "point"))
    other = anew(keras.models.clone_model(model))
    tf.train.Checkpoint(model=other).restore(point).expect_partial()
    return other


def test_a_checkpoint_in_a_loop_has_the_steps_of_the_first_stage(tmp_path):
    model = trained()
    second_stage_in_a_loop(model)
    assert cost_after_one_more(restored(model, tmp_path)) == pytest.approx(uses(7))


def test_a_checkpoint_has_the_steps_of_another_model_since_its_own_were_traced(tmp_path):
    first = trained(1)
    second = keras.Sequential([keras.Input((X.shape[1],)), first.layers[0], keras.layers.Dense(3, "softmax")])
    for model in (anew(second), first, second):
        fit(model, batch_size=N)
    assert cost_after_one_more(restored(second, tmp_path)) == pytest.approx(uses(5))


@pytest.mark.parametrize("ending", ["keras", "h5", *([] if KERAS3 else ["folder"])])
@pytest.mark.parametrize("again", [False, True])
def test_a_loaded_model_counts_what_its_file_holds_also_when_compiled_anew(again, ending, tmp_path):
    model = saved(trained(), tmp_path, ending)
    assert cost_after_one_more(anew(model) if again else model) == pytest.approx(uses(6))


def test_steps_count_once_however_often_they_are_saved_loaded_and_compiled_anew(tmp_path):
    model = trained()
    for _ in range(3):
        second_stage_with_a_budget(model)
        model = saved(model, tmp_path)
        second_stage_without_one(model)
    assert cost_after_one_more(model) == pytest.approx(uses(12))


def test_two_optimizers_in_turns_are_both_counted_once():
    model, watched = trained(1), budget(N)
    first, second = model.optimizer, optimizer()
    for each in (second, first, second):
        fit(anew(model, each), watched, batch_size=N)
    assert watched.epsilon() == pytest.approx(uses(4))
    for each in (first, second):
        assert each.ledger.epsilon(DELTA, "rdp") == pytest.approx(uses(4))


def test_more_optimizers_than_a_table_has_rows_count_once_each():
    counter, saved = _step_table.Counter(), tf.Variable(_step_table.empty_table())
    others = [np.array([[origin, 0, 1, 100, 10, 0, 2.0, 1, 1]]) for origin in range(1, _step_table.ROWS + 6)]
    for _ in range(2):
        for last in range(len(others)):
            for row in others[: last + 1]:
                counter.take_in(row, saved)
        assert np.asarray(saved)[:, _step_table.STEPS].sum() == len(others)
        assert len(counter.own_rows(saved)) == 0
    assert _step_table.ledger_of(_step_table.merge_tables(np.asarray(saved))).steps == len(others)


@pytest.mark.skipif(not KERAS3, reason="quantize and LoRA are of Keras 3")
@pytest.mark.parametrize("load", [False, True])
def test_a_layer_that_replaced_its_weights_keeps_their_steps(load, tmp_path):
    model = trained(use_bias=False)
    model = saved(model, tmp_path) if load else model
    model.quantize("int8")
    for layer in model.layers:
        layer.enable_lora(2)
    assert cost_after_one_more(anew(model)) == pytest.approx(uses(6))


def test_a_head_that_was_thrown_away_does_not_count():
    model = made()
    model.layers[0].trainable = False
    second_stage_with_a_budget(model)
    other = keras.Sequential([model.layers[0], keras.layers.Dense(3, "softmax")])
    other.build((None, X.shape[1]))
    assert cost_after_one_more(anew(other)) == pytest.approx(uses(1))


CORRELATED = {"noise": tfdpfl.noise.Tree()}


@pytest.mark.parametrize("first, second", [(CORRELATED, {}), ({}, CORRELATED), (CORRELATED, CORRELATED)])
def test_correlated_noise_before_or_after_costs_no_less_in_the_file(first, second, tmp_path):
    model, watched = made(), budget(N)
    fit(anew(model, optimizer(**first)), watched, batch_size=N, epochs=3)
    alone = watched.epsilon()
    fit(anew(model, optimizer(**second)), watched, batch_size=N)
    both = watched.epsilon()
    loaded = saved(model, tmp_path)
    of_file = loaded.optimizer.ledger.epsilon(DELTA, "rdp")
    assert alone < both <= of_file * (1 + 1e-6) < 5 * both


def test_another_process_reads_the_steps_of_all_stages(tmp_path):
    model = trained()
    second_stage_with_a_frozen_layer(model)
    file = str(tmp_path / "model.keras")
    model.save(file)
    read = f"import tensorflow as tf, tfdpfl; print(tf.keras.models.load_model({file!r}).optimizer.num_dp_steps)"
    found = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True, timeout=600)
    assert found.stdout.split()[-1:] == ["6"], found.stderr


def test_what_steps_on_a_weight_is_forgotten_with_it():
    variable = tf.Variable(1.0)
    _past.stepped_on(variable)[0] = None
    number = id(variable)
    del variable
    assert number not in _past._STEPPED_ON
