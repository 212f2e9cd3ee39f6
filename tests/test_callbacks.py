"""PrivacyBudget prices what ran, and stops in time."""

import math

import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import callbacks
from tfdpfl.data import poisson_batches
from tfdpfl.errors import PrivacyError

N, DELTA = 200, 1e-4
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(N, 4)).astype("float32"), RNG.integers(0, 3, N)


def compiled(z=2.0, steps_per_execution=1, **kwargs):
    model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tfdpfl.DPSGD(1.0, z, learning_rate=0.1, **kwargs)
    model.compile(optimizer=optimizer, loss=loss, steps_per_execution=steps_per_execution)
    return model


def price(**kwargs):
    return tfdpfl.compute_epsilon(**{"num_examples": N, "delta": DELTA, "accountant": "rdp", **kwargs})


def PrivacyBudget(*args, **kwargs):
    return callbacks.PrivacyBudget(*args, **{"accountant": "rdp", **kwargs})  # the quick accountant


@pytest.mark.slow
def test_poisson_batches_are_priced_by_the_steps_that_ran():
    model, budget = compiled(expected_batch_size=20), PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(poisson_batches((X, Y), expected_batch_size=20, steps=7), epochs=2, callbacks=[budget], verbose=0)
    want = [price(batch_size=20, noise_multiplier=2.0, num_steps=k) for k in (7, 14)]
    assert log.history["epsilon"] == pytest.approx(want)
    assert budget.report.sampling == "poisson" and budget.report.steps == 14


def test_shuffled_arrays_are_priced_by_passes_without_amplification():
    model, budget = compiled(), PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(X, Y, batch_size=30, epochs=3, callbacks=[budget], verbose=0)  # 7 steps, the last one partial
    want = [price(batch_size=30, noise_multiplier=2.0, num_epochs=k, sampling="shuffle") for k in (1, 2, 3)]
    assert log.history["epsilon"] == pytest.approx(want)
    assert budget.report.adjacency == "zero_out"
    # An independent truth: k uses of one example at noise σ are one at σ / sqrt(k); its δ(ε) has a closed form.
    from scipy.stats import norm

    epsilon, mu = log.history["epsilon"][-1], math.sqrt(3) / 2.0
    exact = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert exact <= DELTA * 1.001


def test_the_default_accountant_is_the_tight_one():
    model, budget = compiled(), callbacks.PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(X, Y, batch_size=20, callbacks=[budget], verbose=0)
    tight = price(batch_size=20, noise_multiplier=2.0, num_epochs=1, sampling="shuffle", accountant="pld")
    assert log.history["epsilon"] == pytest.approx([tight])
    assert tight < price(batch_size=20, noise_multiplier=2.0, num_epochs=1, sampling="shuffle")


@pytest.mark.slow
@pytest.mark.parametrize("steps_per_execution", [1, 4])
def test_training_stops_before_the_step_that_would_pass_the_target(steps_per_execution):
    target = price(batch_size=20, noise_multiplier=2.0, num_steps=10)
    model = compiled(expected_batch_size=20, steps_per_execution=steps_per_execution)
    budget = PrivacyBudget(num_examples=N, delta=DELTA, target_epsilon=target * 1.0001)
    batches = poisson_batches((X, Y), expected_batch_size=20, steps=8)
    log = model.fit(batches, epochs=5, callbacks=[budget], verbose=0)
    assert model.optimizer.num_dp_steps == 10 // steps_per_execution * steps_per_execution
    assert log.history["epsilon"][-1] <= target * 1.0001
    weights = model.get_weights()
    with pytest.raises(PrivacyError, match=r"target_epsilon=.*no room"):
        model.fit(batches, epochs=1, callbacks=[PrivacyBudget(N, DELTA, target)], verbose=0)
    np.testing.assert_array_equal(model.get_weights()[0], weights[0])


def test_shuffled_training_stops_before_the_epoch_that_would_pass_the_target():
    target = price(batch_size=20, noise_multiplier=2.0, num_epochs=2, sampling="shuffle")
    model = compiled()
    budget = PrivacyBudget(num_examples=N, delta=DELTA, target_epsilon=target * 1.0001)
    log = model.fit(X, Y, batch_size=20, epochs=5, callbacks=[budget], verbose=0)
    assert len(log.history["epsilon"]) == 2
    assert log.history["epsilon"][-1] <= target * 1.0001


@pytest.mark.slow
def test_steps_of_a_training_before_count():
    model = compiled(expected_batch_size=20)
    batches = poisson_batches((X, Y), expected_batch_size=20, steps=5)
    model.fit(batches, callbacks=[PrivacyBudget(delta=DELTA)], verbose=0)
    log = model.fit(batches, callbacks=[PrivacyBudget(delta=DELTA)], verbose=0)
    assert log.history["epsilon"][-1] == pytest.approx(price(batch_size=20, noise_multiplier=2.0, num_steps=10))


def test_microbatches_cost_what_twice_the_sensitivity_costs():
    model, budget = compiled(num_microbatches=5), PrivacyBudget(num_examples=N, delta=DELTA)
    log = model.fit(X, Y, batch_size=20, epochs=1, callbacks=[budget], verbose=0)
    want = price(batch_size=20, noise_multiplier=1.0, num_epochs=1, sampling="shuffle")
    assert log.history["epsilon"][-1] == pytest.approx(want)


@pytest.mark.slow
def test_validation_split_leaves_the_validation_examples_out():
    model, budget = compiled(), PrivacyBudget(num_examples=N, delta=DELTA)
    model.fit(X, Y, batch_size=20, validation_split=0.5, callbacks=[budget], verbose=0)
    assert budget.report.num_examples == N // 2


def test_no_noise_is_an_infinite_epsilon():
    model = compiled(0.0)
    assert model.fit(X, Y, callbacks=[PrivacyBudget(N, DELTA)], verbose=0).history["epsilon"] == [math.inf]


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(N).batch(20)


@pytest.mark.parametrize(
    ("optimizer", "data", "arguments", "message"),
    [
        ({}, dataset, {}, "give PrivacyBudget sampling="),
        ({}, lambda: poisson_batches((X, Y), 0.1, 3), {}, "expected_batch_size"),
        ({"expected_batch_size": 20, "num_microbatches": 5}, lambda: poisson_batches((X, Y), 0.1, 3), {}, "microbatch"),
        ({"expected_batch_size": 20}, lambda: poisson_batches((X, Y), 0.1, 3), {"sampling": "shuffle"}, "Poisson"),
        ({"expected_batch_size": 20}, lambda: poisson_batches((X, Y), 0.1, 3), {"num_examples": 7}, "num_examples=7"),
        ({}, lambda: X, {"sampling": "poisson"}, "shuffles"),
        ({}, lambda: X, {"num_examples": 7}, "num_examples=7"),
    ],
)
def test_what_cannot_be_priced_is_refused_before_the_first_update(optimizer, data, arguments, message):
    model = compiled(**optimizer)
    before = model.get_weights()
    budget = PrivacyBudget(**{"num_examples": N, "delta": DELTA, **arguments})
    x = data()
    with pytest.raises(ValueError, match=message):
        model.fit(x, Y if isinstance(x, np.ndarray) else None, callbacks=[budget], verbose=0)
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


def test_declared_sampling_of_other_data_is_believed():
    model = compiled()
    budget = PrivacyBudget(num_examples=N, delta=DELTA, sampling="shuffle", batch_size=20)
    log = model.fit(dataset(), callbacks=[budget], epochs=2, verbose=0)
    want = price(batch_size=20, noise_multiplier=2.0, num_epochs=2, sampling="shuffle")
    assert log.history["epsilon"][-1] == pytest.approx(want)


def test_an_optimizer_without_privacy_is_refused():
    model = compiled()
    model.compile(optimizer="sgd", loss="mse")
    with pytest.raises(PrivacyError, match=r"SGD.*tfdpfl\.DPAdam"):
        model.fit(X, X[:, :3], callbacks=[PrivacyBudget(N, DELTA)], verbose=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"delta": None}, "delta"),
        ({"delta": 1.5}, "delta"),
        ({"delta": DELTA, "target_epsilon": -1}, "target_epsilon=-1"),
        ({"delta": DELTA, "sampling": "often"}, "sampling='often'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        PrivacyBudget(num_examples=N, **arguments)
