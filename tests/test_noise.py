"""The noise has the size, shape and independence that the accountant assumes."""

import conftest as c
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdpfl
from tfdpfl import noise

KEY = noise.new_key(20)
MILLION = 1_000_000


def draw(shapes, step=0, stddev=1.0, key=KEY):
    return [t.numpy() for t in noise.gaussian(shapes, stddev, tf.constant(key), tf.constant(step, tf.int64))]


def accepts(sample, stddev):
    """Whether ``stddev`` is the sample's standard deviation: within 1 %, and within 5 of its own standard errors."""
    sample = np.ravel(sample).astype(np.float64)
    off = np.sqrt(np.mean(sample**2)) / stddev - 1
    return abs(off) < min(0.01, 5 / np.sqrt(2 * sample.size))


class Noise:
    """One DP optimizer and a model whose gradient is zero everywhere: what moves is the noise."""

    def __init__(self, shapes=((1000, 1000),), clip=0.5, multiplier=1.3, cls=None, dtype=None, unused=(), **kwargs):
        cls = cls or tfdpfl.DPSGD
        self.optimizer = cls(clip, multiplier, learning_rate=1.0, **{"seed": 3, **kwargs})
        self.layer = tf.keras.layers.Layer(dtype=dtype)
        add = self.layer.add_weight
        self.variables = [add(shape=s, initializer="zeros", name=f"w{i}") for i, s in enumerate(shapes)]
        self.unused = [add(shape=s, initializer="zeros", name=f"u{i}") for i, s in enumerate(unused)]
        self.optimizer.build(self.variables + self.unused)
        self.step = tf.function(self._step, reduce_retracing=True)

    def _step(self, x, n=None):
        losses = tf.zeros_like(x[:, 0])
        for v in self.variables[:n]:
            value = tf.reshape(tf.convert_to_tensor(v), [1, -1])
            losses += tf.matmul(0 * x[:, :1], tf.cast(value[:, :1], x.dtype))[:, 0]
        self.optimizer.minimize(tf.reduce_mean(losses), (self.variables + self.unused)[:n])

    def __call__(self, n=None, batch=4):
        before = [np.array(v) for v in self.variables]
        self.step(tf.ones([batch, 1]), n)
        return [b - np.array(v) for b, v in zip(before, self.variables, strict=True)]


def test_the_update_has_the_noise_that_was_asked_and_no_other():
    clip, multiplier, batch = 0.5, 1.3, 4
    update = Noise(clip=clip, multiplier=multiplier)(batch=batch)[0]
    asked = multiplier * clip / batch
    assert accepts(update, asked)
    assert not accepts(update, asked * 2 / 3)
    assert not accepts(update, asked * 3 / 2)


def test_the_check_tells_noise_of_two_thirds_and_three_halves():
    for stddev in (2 / 3, 3 / 2):
        assert not accepts(draw([[MILLION]], stddev=stddev)[0], 1.0)
    assert accepts(draw([[MILLION]])[0], 1.0)
    assert not accepts(draw([[MILLION]], stddev=1.02)[0], 1.0)


@pytest.mark.slow
def test_the_noise_is_divided_by_the_expected_batch_size_whatever_the_batch_is():
    steps = Noise(expected_batch_size=10)
    for batch in (4, 0, 25):
        assert accepts(steps(batch=batch)[0], 1.3 * 0.5 / 10)


def test_the_noise_does_not_shrink_with_microbatches():
    update = Noise(num_microbatches=2)(batch=8)[0]
    assert accepts(update, 1.3 * 0.5 / 2)


def test_every_variable_gets_its_own_noise_of_the_same_size():
    shapes = [(500, 400), (200_000,), (20, 100, 100), (200_000,)]
    update = Noise(shapes)()
    for u in update:
        assert accepts(u, 1.3 * 0.5 / 4)
    assert np.abs(np.corrcoef([u.ravel() for u in update]) - np.eye(4)).max() < 0.015


@pytest.mark.parametrize("shapes", [[[200_001]], [[200_001], [3], [2, 2]], [[1]], [[3], []]])
def test_draws_of_odd_length_are_as_long_as_asked(shapes):
    drawn = draw(shapes)
    assert [list(d.shape) for d in drawn] == shapes
    together = np.concatenate([d.ravel() for d in drawn])
    assert np.unique(together).size > 0.98 * together.size
    assert together.size < MILLION // 10 or accepts(together, 1.0)


def test_noise_is_normal_with_mean_zero():
    sample = draw([[MILLION]])[0]
    assert abs(sample.mean()) < 5 / np.sqrt(sample.size)
    assert scipy.stats.kstest(sample, "norm").pvalue > 1e-4
    assert abs(scipy.stats.kurtosis(sample)) < 5 * np.sqrt(24 / sample.size)
    assert np.isfinite(sample).all() and 4.2 < np.abs(sample).max() < 6.5


def test_coordinates_are_independent():
    sample = draw([[MILLION]])[0].astype(np.float64)
    for lag in (1, 2, 3, 4, 5, 8, 16, 64, 256, 1000):
        assert abs(np.mean(sample[lag:] * sample[:-lag])) < 5 / 1000, lag
        assert abs(np.mean(sample[lag:] ** 2 * sample[:-lag] ** 2) - 1) < 0.02, lag


def test_steps_are_independent():
    samples = np.stack([draw([[50_000]], step)[0] for step in range(8)])
    assert np.abs(np.corrcoef(samples) - np.eye(8)).max() < 5 / np.sqrt(50_000)


def test_no_value_repeats_across_steps_and_variables():
    drawn = np.concatenate([t.ravel() for step in range(20) for t in draw([[50, 40], [7], [2000]], step)])
    # float32 normals of equal value are rare; a repeated block would make thousands.
    assert drawn.size - np.unique(drawn).size < 200


def test_no_noise_repeats_when_the_number_of_variables_changes_between_steps():
    drawn = [t for step in range(12) for t in draw([[64]] * (1 + step * 5 % 7), step)]
    similar = np.abs(np.corrcoef(drawn)) - np.eye(len(drawn))
    assert similar.max() < 0.8


@pytest.mark.slow
def test_an_optimizer_that_trains_fewer_variables_later_draws_fresh_noise():
    steps = Noise([(64,)] * 4)
    drawn = [*steps(), *steps(n=4), *steps(n=2)[:2], *steps(n=1)[:1], *steps(n=2)[:2]]
    similar = np.abs(np.corrcoef([d.ravel() for d in drawn])) - np.eye(len(drawn))
    assert similar.max() < 0.8


def test_equal_seeds_give_equal_noise_and_other_seeds_other_noise():
    a, b, other = (Noise([(50,)], seed=s)()[0] for s in (5, 5, 6))
    np.testing.assert_array_equal(a, b)
    assert np.abs(np.corrcoef(a, other)[0, 1]) < 0.8


def test_without_a_seed_every_instance_draws_its_own():
    drawn = [Noise([(50,)], seed=None)()[0] for _ in range(2)]
    assert np.abs(np.corrcoef(drawn)[0, 1]) < 0.8
    keys = [tuple(noise.new_key()) for _ in range(100)]
    assert len(set(keys)) == 100
    assert all(noise.new_key(seed).tolist() != noise.new_key(seed + 1).tolist() for seed in range(50))


def test_both_halves_of_the_key_matter():
    base = draw([[1000]])[0]
    for half in (0, 1):
        key = KEY.copy()
        key[half] ^= 1 << 40
        assert np.abs(np.corrcoef(base, draw([[1000]], key=key)[0])[0, 1]) < 0.2


def test_the_step_counter_is_used_to_its_full_width():
    drawn = [draw([[1000]], step)[0] for step in (0, 1, 2**31, 2**32, 2**40)]
    assert np.abs(np.corrcoef(drawn) - np.eye(5)).max() < 0.2


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float32"])
def test_the_noise_is_float32_whatever_the_policy(policy):
    update = Noise([(1000, 100)], dtype=policy)()[0]
    assert accepts(update, 1.3 * 0.5 / 4)
    # bfloat16 has 8 bits of mantissa, float16 has 11: a hundred thousand normals would meet often.
    assert np.unique(update).size > 0.95 * update.size


def test_the_noise_of_bfloat16_weights_has_the_right_size():
    assert accepts(np.asarray(Noise([(1000, 100)], dtype="bfloat16")()[0], np.float32), 1.3 * 0.5 / 4)


def test_an_unused_variable_gets_no_noise_and_the_others_all_of_it():
    steps = Noise([(1000, 100)], unused=[(30,)])
    assert accepts(steps()[0], 1.3 * 0.5 / 4)
    assert np.all(np.array(steps.unused[0]) == 0)


def test_no_noise_is_drawn_when_none_is_asked():
    assert np.all(Noise([(30,)], multiplier=0.0)()[0] == 0)


def test_noise_goes_on_through_retraces_and_other_batch_sizes():
    steps = Noise([(1000,)])
    drawn = [steps(batch=b)[0] * b for b in (4, 7, 4, 1, 7)]
    assert np.abs(np.corrcoef(drawn) - np.eye(5)).max() < 0.2
    fresh = Noise([(1000,)])
    again = [fresh(batch=4)[0] * 4 for _ in range(5)]
    np.testing.assert_allclose(drawn, again, atol=1e-6)  # the counter is the step, not the trace


@pytest.mark.slow
def test_steps_inside_one_execution_draw_each_their_own_noise():
    x, y = np.zeros((12, c.WIDTH), np.float32), np.zeros(12, np.int32)
    ends = []
    for per_execution in (1, 3):
        model = c.compiled(tfdpfl.DPSGD(0.5, 1.0, seed=8, learning_rate=1e-3), steps_per_execution=per_execution)
        model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
        assert model.optimizer.num_dp_steps == 3
        ends.append(c.flat(model.get_weights()))
    np.testing.assert_allclose(*ends, atol=1e-6)


@pytest.mark.slow
def test_noise_under_xla_has_the_right_size_and_is_fresh():
    steps = Noise([(1000, 100)])
    steps.step = tf.function(steps._step, jit_compile=True)
    a, b = steps()[0], steps()[0]
    assert accepts(a, 1.3 * 0.5 / 4) and accepts(b, 1.3 * 0.5 / 4)
    assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02


def test_a_loop_in_one_graph_draws_fresh_noise_each_turn():
    steps = Noise([(1000,)])

    @tf.function
    def loop(x):
        for _ in tf.range(3):
            steps._step(x)

    loop(tf.ones([4, 1]))
    assert steps.optimizer.num_dp_steps == 3
    three = np.array(steps.variables[0])
    apart = Noise([(1000,)])
    np.testing.assert_allclose(-three, sum(apart()[0] for _ in range(3)), atol=1e-6)
