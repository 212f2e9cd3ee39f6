"""A logical batch of k parts is one batch k times as large: its update, noise, moments, schedule, ledger and price."""

import warnings

import conftest as c
import numpy as np
import pytest
import tensorflow as tf

import tfdpfl
from tfdpfl import PrivacyError, callbacks
from tfdpfl.data import SamplingDeclaration
from tfdpfl.optimizers import _accumulator, _step_table

keras = tf.keras
CLIP, N = 0.6, 24
X, Y = c.examples(N)


def model_of(k, z=0.0, kind=tfdpfl.DPSGD, compiled=None, **kwargs):
    optimizer = kind(CLIP, z, gradient_accumulation_steps=k, **{"learning_rate": 0.3, **kwargs})
    return c.compiled(optimizer, **(compiled or {}))


def fit(model, *watching, x=X, y=Y, batch_size=4, **kwargs):
    model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, callbacks=list(watching), **kwargs)
    return model


def assert_same(a, b, tolerance=1e-5):
    np.testing.assert_allclose(c.flat(a), c.flat(b), atol=tolerance)


def oracle(batches, denominator=None, rate=0.3):
    """SGD's weights after one update for each of these batches (rows of the data)."""
    values = c.weights()
    for rows in batches:
        sums = c.clipped_sum(values, X[rows], Y[rows], CLIP)
        values = [v - rate * g / (denominator or len(rows)) for v, g in zip(values, sums, strict=True)]
    return values


def parts_of(model):
    return int(model.optimizer._dp.pending)


@pytest.mark.parametrize("denominator", [None, 9])
@pytest.mark.slow
@pytest.mark.both_stacks
def test_updates_are_those_of_numpy_on_the_logical_batches_across_epochs_and_fits(denominator):
    """22 examples in batches of 4 are 6 parts an epoch, the last of 2; k = 4 ends in the middle of each."""
    model = model_of(4, expected_batch_size=denominator)
    for _ in range(2):
        fit(model, x=X[:22], y=Y[:22])
    parts = [np.arange(at, min(at + 4, 22)) for at in range(0, 22, 4)] * 2
    batches = [np.concatenate(parts[at : at + 4]) for at in (0, 4, 8)]
    assert_same(model.get_weights(), oracle(batches, denominator))
    assert model.optimizer.executed == [(0.0, 3)] and int(np.asarray(model.optimizer.iterations)) == 3


@pytest.mark.parametrize(
    "compiled", [{}, *(pytest.param({name: value}, marks=[pytest.mark.slow, pytest.mark.one_stack]) for name, value in (
        ("steps_per_execution", 2), ("jit_compile", True)))], ids=lambda d: next(iter(d), "plain"),
)  # fmt: skip
@pytest.mark.slow
@pytest.mark.both_stacks
def test_moments_schedule_average_and_noise_are_those_of_one_large_batch(compiled):
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1], [0.1, 0.02])
    given = {"kind": tfdpfl.DPAdamW, "learning_rate": schedule, "use_ema": True, "ema_overwrite_frequency": 2}
    given |= {"z": 0.0 if "jit_compile" in compiled else 0.7, "seed": 3}  # XLA draws others
    small, large = (
        fit(model_of(k, **given, compiled=how), callbacks.PrivacyBudget(N, 1e-3), batch_size=12 // k, epochs=2)
        for k, how in ((3, compiled), (1, {}))
    )
    assert_same(small.get_weights(), large.get_weights())
    for a, b in zip(small.optimizer.variables, large.optimizer.variables, strict=True):
        if a.shape.rank if hasattr(a.shape, "rank") else len(a.shape):
            np.testing.assert_allclose(np.asarray(a)[..., 1:], np.asarray(b)[..., 1:], atol=1e-5)  # but origins
    assert small.optimizer.num_dp_steps == large.optimizer.num_dp_steps == 4


@pytest.mark.slow
def test_noise_is_drawn_once_a_logical_batch_at_the_size_that_it_is_priced_at():
    width, z = 100_000, 1.5
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(width, use_bias=False)])
    model.compile(tfdpfl.DPSGD(1.0, z, gradient_accumulation_steps=3, learning_rate=1.0), loss="mse")
    take = lambda n: c.flat(c.update_of(model, lambda: model.train_on_batch(np.zeros((n, 1)), np.zeros((n, width)))))
    assert np.all(take(2) == 0) and np.all(take(4) == 0)
    noise = take(2) * 8 / z  # the denominator is the number of all parts' examples
    assert 0.98 < noise.std() < 1.02  # and so neither 2/3 nor 3/2
    assert model.optimizer.executed == [(z / 3, 1)]  # nobody said that the parts hold different examples
    assert np.all(take(2) == 0)


@pytest.mark.slow
def test_one_example_moves_the_update_by_no_more_than_the_clip():
    x, y = X.copy(), Y
    x[5] *= 1e4
    updates = []
    for rows in (np.arange(12), np.delete(np.arange(12), 5)):
        model = model_of(3, expected_batch_size=1, learning_rate=1.0)
        updates.append(c.flat(c.update_of(model, lambda m=model, r=rows: [
            m.train_on_batch(x[r[i : i + 4]], y[r[i : i + 4]]) for i in (0, 4, 8)])))  # fmt: skip
    assert 0.99 * CLIP < np.linalg.norm(updates[0] - updates[1]) <= CLIP * (1 + 1e-4)


@pytest.mark.slow
def test_no_file_holds_a_sum_without_noise(tmp_path):
    """What is saved after a part is, in every variable and byte of the config, what was saved before it."""
    model = model_of(3, 1.0, kind=tfdpfl.DPAdam)
    for i in (0, 4, 8):
        model.train_on_batch(X[i : i + 4], Y[i : i + 4])
    state = lambda: [np.asarray(v) for v in [*model.weights, *model.optimizer.variables]]
    before, config = state(), model.optimizer.get_config()
    files = len(tf.train.load_checkpoint(tf.train.Checkpoint(model).save(tmp_path / "a")).get_variable_to_shape_map())
    model.train_on_batch(X[12:16], Y[12:16])
    assert parts_of(model) == 1
    for a, b in zip(before, state(), strict=True):
        np.testing.assert_array_equal(a, b)
    assert repr(model.optimizer.get_config()) == repr(config)
    saved = tf.train.load_checkpoint(tf.train.Checkpoint(model).save(tmp_path / "b"))
    assert len(saved.get_variable_to_shape_map()) == files
    (partial,) = model.optimizer._dp._accumulators.values()
    kept = {v.numpy().tobytes() for v in partial.sums}
    names = [n for n in saved.get_variable_to_shape_map() if "OBJECT_GRAPH" not in n]
    assert not kept & {np.asarray(saved.get_tensor(n)).tobytes() for n in names}


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_restart_begins_the_logical_batch_anew(tmp_path):
    model = model_of(3)
    for i in (0, 4, 8, 12):
        model.train_on_batch(X[i : i + 4], Y[i : i + 4])
    model.save(tmp_path / "m.keras")
    other = keras.models.load_model(tmp_path / "m.keras")
    assert other.optimizer.get_config()["gradient_accumulation_steps"] == 3
    for i in (4, 8, 12):
        assert parts_of(other) == i // 4 - 1
        other.train_on_batch(X[i : i + 4], Y[i : i + 4])
    assert_same(other.get_weights(), oracle([np.arange(12), np.arange(4, 16)]))
    model.optimizer._dp.drop_partial()
    for i in (4, 8, 12):
        model.train_on_batch(X[i : i + 4], Y[i : i + 4])
    assert_same(model.get_weights(), other.get_weights())


@pytest.mark.slow
def test_steps_on_other_variables_are_of_another_logical_batch():
    """Else what one left would be released by the other, a step later."""
    model, optimizer = c.classifier(), tfdpfl.DPSGD(CLIP, 0.0, gradient_accumulation_steps=2, learning_rate=0.3)
    optimizer.build(model.trainable_variables)
    upper = model.layers[1].trainable_variables

    def step(variables):
        loss = lambda x, y: tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True))

        @tf.function
        def run(x, y):
            optimizer.minimize(lambda: loss(x, y), variables)

        return lambda rows: run(tf.constant(X[rows]), tf.constant(Y[rows]))

    whole, some = step(model.trainable_variables), step(upper)
    whole(slice(0, 4)), some(slice(4, 8))
    assert_same(model.get_weights(), c.weights(), 0)
    whole(slice(8, 12))
    assert_same(model.get_weights(), oracle([np.r_[0:4, 8:12]]))
    assert optimizer.executed == [(0.0, 1)]


# -- prices ------------------------------------------------------------------------------------------------------


def budget(**kwargs):
    return callbacks.PrivacyBudget(**{"delta": 1e-3, "accountant": "rdp", **kwargs})


def cost(passes, z=2.0):
    of = {"num_examples": N, "batch_size": N, "sampling": "none", "delta": 1e-3, "accountant": "rdp"}
    return tfdpfl.compute_epsilon(num_steps=passes, noise_multiplier=z, **of)


@pytest.mark.slow
def test_a_shuffled_pass_of_whole_logical_batches_costs_what_it_costs_in_one():
    watched = budget()
    model = fit(model_of(3, 2.0), watched, epochs=2)
    assert watched.report().epsilon == pytest.approx(cost(2))
    (row,) = watched.ledger.to_dict()["rows"]
    assert (row["run"]["batch_size"], row["run"]["num_steps"], row["run"]["num_epochs"]) == (12, 4, 2)
    assert watched.ledger.unknown_steps == 0 and model.optimizer.num_dp_steps == 4


@pytest.mark.slow
def test_logical_batches_that_reach_into_the_next_pass_may_hold_an_example_twice():
    """6 parts a pass, k = 4: 4 of one, then 2 and 2. An example twice in a batch costs as four uses, and not two."""
    watched, model = budget(), model_of(4, 2.0)
    for _ in range(2):
        with pytest.warns(UserWarning, match="hold an example 2 times"):
            fit(model, watched)
            watched = watched if watched.ledger.steps > 1 else budget(ledger=watched.ledger)
    assert model.optimizer.num_dp_steps == 3
    assert watched.report().epsilon == pytest.approx(cost(4))  # and so the two passes are
    assert watched.ledger.unknown_steps == 0


@pytest.mark.slow
def test_parts_of_which_one_is_not_known_are_priced_as_if_each_held_every_example():
    model, watched = model_of(3, 3.0), budget()
    fit(model, watched)
    model.train_on_batch(X[:4], Y[:4])
    fit(model, watched)  # begins anew: what is half unknown would have no price
    assert watched.ledger.unknown_steps == 0 and watched.report().epsilon == pytest.approx(cost(2, 3.0))
    model.optimizer._dp.counter.announce((0.0, 2, N, 12, 0), 1)
    for _ in range(3):
        model.train_on_batch(X[:4], Y[:4])
    assert sorted(model.optimizer.executed) == [(1.0, 1), (3.0, 4)]


@pytest.mark.slow
def test_a_step_by_another_in_the_middle_does_not_shift_what_is_known():
    """Else the last part of one pass and the first of the next would make a batch that is priced as one of a pass."""

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.train_on_batch(X[:4], Y[:4])

    watched, model = budget(), model_of(2, 2.0)
    fit(model, watched, Steps(), epochs=2)
    rows = [row["run"] for row in watched.ledger.to_dict()["rows"]]
    unknown = [r for r in rows if r["noise_multiplier"] == 1.0 or r["sampling"] == "none"]
    assert unknown == []  # it began a batch, which the next part of the plan began anew
    (row,) = rows
    assert row["num_epochs"] == 2


@pytest.mark.one_stack
def test_a_part_out_of_place_makes_its_batch_unknown():
    counter = _step_table.Counter()
    part_of = lambda value: _accumulator.Part(
        [value * tf.ones([2])], [], tf.ones([]), counter.drawn(tf.zeros([])), tf.constant(6.0, tf.float64), tf.ones([])
    )
    partial, found = _accumulator.GradientAccumulator(3, part_of(0.0)), []

    def done(whole):
        found.append((whole.drawn.known.numpy().tolist(), float(whole.multiplier), whole.sums[0].numpy().tolist()))
        return whole.sums

    def add(value):
        return partial.add(part_of(value), done, list)

    said = (0.0, 1, 100, 12, 0)
    counter.announce(said, 3, 0, 3)
    for value in (1.0, 2.0, 4.0):
        add(value)
    assert found.pop() == ([*said, 0], 6.0, [7.0, 7.0])
    counter.announce(said, 2, 1, 3)  # the first part never came
    for value in (1.0, 2.0, 4.0):
        add(value)
    assert found.pop() == ([0.0] * 6, 2.0, [7.0, 7.0])
    add(8.0)
    counter.announce(said, 3, 0, 3)  # a new one begins
    for value in (1.0, 2.0, 4.0):
        add(value)
    assert found == [([*said, 0], 6.0, [7.0, 7.0])]


@pytest.mark.slow
def test_a_target_stops_at_a_logical_batch():
    watched, model = budget(target_epsilon=cost(1)), model_of(3, 2.0)
    fit(model, watched, epochs=3)
    assert model.optimizer.num_dp_steps == 2 and watched.report().epsilon <= cost(1) * (1 + 1e-9)


# -- Poisson samples in parts ------------------------------------------------------------------------------------


def sample(parts, epochs_of=4):
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(3)
    data = data.take(epochs_of)
    data.tfdpfl_sampling = SamplingDeclaration("poisson", 0.25, N, epochs_of // parts, None, parts)
    return data


@pytest.mark.slow
def test_a_poisson_sample_in_parts_is_priced_as_the_sample_that_it_is():
    watched, model = budget(), model_of(2, 2.0, expected_batch_size=6)
    model.train_on_batch(X[:4], Y[:4])  # a part that does not belong to it
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model.fit(sample(2), epochs=2, shuffle=False, callbacks=[watched], verbose=0)
    want = tfdpfl.compute_epsilon(
        num_examples=N, batch_size=6, num_steps=4, noise_multiplier=2.0, delta=1e-3, accountant="rdp")  # fmt: skip
    assert watched.report().epsilon == pytest.approx(want)
    assert model.optimizer.executed == [(2.0, 4)] and parts_of(model) == 0
    stops = budget(target_epsilon=want * 1.0001)
    again = model_of(2, 2.0, expected_batch_size=6)
    again.fit(sample(2), epochs=9, callbacks=[stops], verbose=0)
    assert again.optimizer.num_dp_steps == 4 and parts_of(again) == 0


@pytest.mark.parametrize(
    "k, data, said, message",
    [
        (1, sample(2), {}, "give it gradient_accumulation_steps=2"),
        (2, sample(1), {}, "1 batches of the data make one sample"),
        (3, sample(3, 4), {}, "ends in the middle of a Poisson sample"),
        (
            2,
            sample(1).map(lambda *xy: xy),
            {"sampling": "poisson", "batch_size": 6, "num_examples": N},
            "no ε is known",
        ),
    ],
)
def test_parts_that_make_no_sample_are_refused(k, data, said, message):
    model = model_of(k, 2.0, expected_batch_size=6)
    with pytest.raises(PrivacyError, match=message):
        model.fit(data, callbacks=[budget(**said)], verbose=0)
    assert_same(model.get_weights(), c.weights(), 0)
    assert model.optimizer.executed == []


def test_samples_that_come_as_one_stream_are_refused():
    model = model_of(2, 2.0, expected_batch_size=6)
    with pytest.raises(PrivacyError, match="as one stream"):
        model.fit(sample(2), steps_per_epoch=2, callbacks=[budget()], verbose=0)
    assert model.optimizer.executed == []


@pytest.mark.slow
def test_batches_of_which_nobody_said_how_they_were_drawn_may_all_hold_one_example():
    """The same rows three times in a logical batch move its sum by three clips: a third of the noise each."""
    model = model_of(3, 3.0)
    for _ in range(3):
        model.train_on_batch(X[:4], Y[:4])
    assert model.optimizer.executed == [(1.0, 1)]
    once = tfdpfl.compute_epsilon(
        num_examples=N, batch_size=N, num_steps=1, noise_multiplier=1.0, sampling="none", delta=1e-3)  # fmt: skip
    assert model.optimizer.ledger.epsilon(1e-3) == pytest.approx(once)


@pytest.mark.slow
def test_a_pass_that_is_shorter_than_the_data_brings_more_uses_into_a_logical_batch():
    """2 batches a pass, k = 4: three passes may meet in a batch, whatever num_examples says."""
    data = tf.data.Dataset.from_tensor_slices((X[:8], Y[:8])).batch(4)
    watched = budget(sampling="shuffle", num_examples=N, batch_size=4)
    with pytest.warns(UserWarning, match="hold an example 3 times"):
        model_of(4, 2.0).fit(data, epochs=2, verbose=0, callbacks=[watched])
    assert watched.report().epsilon == pytest.approx(cost(6))


@pytest.mark.slow
def test_passes_that_were_cut_do_not_meet_in_a_logical_batch():
    """Else four beginnings of passes would be in one, with the same examples, and priced as two."""

    class Stops(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.stop_training = batch == 1

    model = model_of(5, 2.0)
    for _ in range(3):
        fit(model, budget(), Stops())
        assert parts_of(model) == 2
    assert model.optimizer.executed == []


@pytest.mark.slow
def test_a_pass_that_ends_before_its_data_says_so():
    def some():
        yield from ((X[i : i + 4], Y[i : i + 4]) for i in (0, 4))

    spec = (tf.TensorSpec([None, *X.shape[1:]], tf.float32), tf.TensorSpec([None, *Y.shape[1:]], Y.dtype))
    data = tf.data.Dataset.from_generator(some, output_signature=spec)
    watched, model = budget(sampling="shuffle", num_examples=N, batch_size=4), model_of(4, 2.0)
    with pytest.raises(PrivacyError, match="ended after 2 batches"):
        model.fit(data, epochs=4, verbose=0, callbacks=[watched])
    assert model.optimizer.executed == [] and parts_of(model) == 0


@pytest.mark.slow
def test_a_clip_that_shrinks_within_a_logical_batch_is_in_the_price():
    """Noise is of the last clip, and earlier parts were clipped to a larger one: a state may be loaded in between."""
    adaptive = tfdpfl.DPSGD(tfdpfl.AdaptiveClip(initial=4.0), 2.0, gradient_accumulation_steps=2, learning_rate=0.3)
    model = c.compiled(adaptive)
    model.train_on_batch(X[:4], Y[:4])
    adaptive._dp.clipping.variable.assign(np.float32(1.0))
    model.train_on_batch(X[4:8], Y[4:8])
    assert adaptive.executed == [(2.0 / 2 / 4, 1)]  # nobody said that the parts have no example in common
    adaptive._dp.clipping.variable.assign(np.float32(1.0))
    for _ in range(2):
        model.train_on_batch(X[:4], Y[:4])
    assert adaptive.executed == [(0.25, 1), (1.0, 1)]


class Interrupted(keras.callbacks.Callback):
    def __init__(self, after):
        super().__init__()
        self.after = after

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if not self.after:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.both_stacks
def test_a_backup_within_a_sample_goes_on_with_whole_samples(tmp_path):
    """Keras 2 goes on with batch number 3, and with the data from their beginning: 5 batches are two samples."""
    backup = keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=3)
    data = tfdpfl.data.poisson_batches((X, Y), expected_batch_size=6, steps=4, physical_batch_size=3)
    with pytest.raises(KeyboardInterrupt):
        model_of(2, 2.0, expected_batch_size=6).fit(data, verbose=0, callbacks=[backup, budget(), Interrupted(5)])
    model, places = model_of(2, 2.0, expected_batch_size=6), []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            places.append(int(self.model.optimizer._dp.counter.batches.numpy()[-3]))

    model.fit(data, verbose=0, callbacks=[
        keras.callbacks.BackupAndRestore(str(tmp_path), save_freq=3), budget(), Watch()])  # fmt: skip
    assert places == [i % 2 for i in range(8 if c.keras3() else 5)]
