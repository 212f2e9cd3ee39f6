"""A `fit` without `PrivacyBudget` says itself how its batches are drawn."""

import contextlib

import pytest
import tensorflow as tf
from step_cases import DELTA, Also, N, X, Y, Z, budget, compiled, everyone, fit, slices, uses

import tfdpfl

keras = tf.keras


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_fit_of_arrays_says_itself_how_they_are_drawn(tmp_path):
    """Without the callback, saved and gone on with in another object: each pass is one use of each example."""
    model, watched = compiled(), budget(N)
    fit(model, epochs=2)
    assert model.optimizer.ledger.unknown_steps == 0
    model.save(tmp_path / "model.keras")
    model = keras.models.load_model(tmp_path / "model.keras")
    fit(model, watched)
    assert watched.report().epsilon == pytest.approx(uses(3)) and watched.report().steps == 30
    model.train_on_batch(X, Y)
    assert model.optimizer.ledger.epsilon(DELTA, "rdp") == pytest.approx(uses(4))


@pytest.mark.slow
def test_batches_that_say_themselves_how_they_are_drawn_need_no_callback():
    model = compiled(expected_batch_size=20.0)
    model.fit(tfdpfl.data.poisson_batches((X, Y), expected_batch_size=20, steps=5), epochs=2, verbose=0)
    ledger = model.optimizer.ledger
    run = dict(num_examples=N, batch_size=20, noise_multiplier=Z, num_steps=10, delta=DELTA, accountant="rdp")
    assert ledger.epsilon(DELTA, "rdp") == pytest.approx(tfdpfl.compute_epsilon(**run)) and ledger.unknown_steps == 0
    unsized = compiled()  # it divides by the size of a Poisson sample, which has no price
    unsized.fit(tfdpfl.data.poisson_batches((X, Y), expected_batch_size=20, steps=5), verbose=0)
    assert unsized.optimizer.ledger.unknown_steps == 5


@pytest.mark.slow
def test_the_sampling_of_ones_own_data_is_not_known_without_the_callback():
    model, watched = compiled(), budget(N)
    model.fit(slices(20), verbose=0)
    with pytest.warns(UserWarning, match="10 steps"):
        fit(model, watched)
    assert watched.report().epsilon == pytest.approx(uses(11))


@pytest.mark.slow
@pytest.mark.both_stacks
@pytest.mark.parametrize("again", [False, True])
def test_a_step_after_a_fit_without_the_callback_that_was_interrupted_is_one_of_every_example(again):
    def stop(_):
        raise KeyboardInterrupt

    model = compiled()
    fit(model, batch_size=N)
    step, model.train_function = model.train_function, stop
    with contextlib.suppress(KeyboardInterrupt):
        fit(model, batch_size=N)  # its batch was announced, and its step was not taken
    model.train_function = step
    everyone(model, 1)
    if again:  # before anyone looked at what ran
        fit(model, batch_size=N)
    assert model.optimizer.ledger.unknown_steps == 1
    assert model.optimizer.ledger.epsilon(DELTA, "rdp") >= uses(3 if again else 2)


def test_a_fit_in_a_fit_that_is_interrupted_later_leaves_it_watched():
    model = compiled()
    fit(model, batch_size=N)
    step, calls = model.train_function, []

    def stop_at_the_third(iterator):
        calls.append(0)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step(iterator)

    model.train_function = stop_at_the_third
    with contextlib.suppress(KeyboardInterrupt):
        fit(model, Also(on_epoch_end=lambda: len(calls) == 1 and fit(model, batch_size=N)), batch_size=N, epochs=2)
    model.train_function = step
    everyone(model, 1)
    assert model.optimizer.ledger.unknown_steps == 1


@pytest.mark.slow
def test_several_updates_on_one_batch_are_not_taken_for_one_without_the_callback():
    model, other = compiled(), Also(on_train_batch_end=lambda: everyone(model, 1))
    fit(model, other)
    assert model.optimizer.ledger.unknown_steps == 10


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.slow
def test_a_fit_without_the_callback_after_recompiling_is_not_forgotten(again):
    model, watched = compiled(), budget(N)
    fit(model, watched)
    model.compile(tfdpfl.DPSGD(1.0, Z), loss=model.loss)
    fit(model)
    if again:
        model.compile(tfdpfl.DPSGD(1.0, Z), loss=model.loss)
        fit(model, watched)
    assert watched.report().epsilon == pytest.approx(uses(3 if again else 2))
