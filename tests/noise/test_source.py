"""The noise has the size, shape and independence that the accountant assumes."""

import contextlib
import copy
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
from unittest import mock

import conftest as c
import numpy as np
import pytest
import scipy.stats
import tensorflow as tf

import tfdpfl
from tfdpfl import native
from tfdpfl.errors import PrivacyError
from tfdpfl.noise import source as noise

KEY = noise.new_key(20)
MILLION = 1_000_000
both_generators = pytest.mark.parametrize("generator", [noise.AES, noise.PHILOX])
IN_C = "in C"  # of AES's words
built = pytest.mark.skipif(native.kernels().library is None, reason=native.kernels().missing)
each_transform = pytest.mark.parametrize("generator", [noise.AES, noise.PHILOX, pytest.param(IN_C, marks=built)])


def draw(shapes, step=0, stddev=1.0, key=KEY):
    return [t.numpy() for t in noise.gaussian(shapes, stddev, tf.constant(key), tf.constant(step, tf.int64))]


@contextlib.contextmanager
def drawn_by(generator):
    """What is traced here draws by ``generator``, as it would where there is an accelerator or none."""
    with mock.patch.object(noise, "_on_host", lambda: generator == noise.AES):
        yield


def stream(generator, seed=20):
    """A function that draws a step's noise, each call the next step's."""
    source = noise.Source(seed)

    def step(shapes, stddev=1.0):
        with drawn_by(generator):
            drawn = source.gaussian(shapes, stddev)
        assert source.generator == generator
        return [t.numpy() for t in drawn]

    return step


def correlation(a, b):
    return abs(np.corrcoef(np.ravel(a), np.ravel(b))[0, 1])


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


@both_generators
def test_the_check_tells_noise_of_two_thirds_and_three_halves(generator):
    step = stream(generator)
    for stddev in (2 / 3, 3 / 2):
        assert not accepts(step([[MILLION]], stddev)[0], 1.0)
    assert accepts(step([[MILLION]])[0], 1.0)
    assert not accepts(step([[MILLION]], 1.02)[0], 1.0)


@both_generators
def test_normals_outside_of_a_graph_have_no_gaps_of_float32(generator):
    with drawn_by(generator):
        drawn = noise.Source(20).normals((1000, 1000))
        again = noise.Source(20).normals((1000, 1000))
        nothing = noise.Source().normals([0, 3])
    assert drawn.dtype == np.float64 and drawn.shape == (1000, 1000) and nothing.shape == (0, 3)
    assert accepts(drawn, 1.0) and not accepts(drawn, 2 / 3) and not accepts(drawn, 3 / 2)
    assert scipy.stats.kstest(drawn.ravel(), "norm").pvalue > 1e-8
    assert correlation(drawn[1:], drawn[:-1]) < 0.006 and (drawn == again).all()
    gap = drawn - drawn.astype(np.float32)  # of numbers about 1 the gaps are 2^-23
    assert (gap != 0).mean() > 0.999 and 2**-26 < np.std(gap[np.abs(drawn) > 1]) < 2**-23
    with drawn_by(generator):
        source = noise.Source()
        assert correlation(source.normals([100_000]), source.normals([100_000])) < 0.02


@pytest.mark.slow
def test_the_noise_is_divided_by_the_expected_batch_size_whatever_the_batch_is():
    steps = Noise(expected_batch_size=10)
    for batch in (4, 0, 25):
        assert accepts(steps(batch=batch)[0], 1.3 * 0.5 / 10)


def test_the_noise_does_not_shrink_with_microbatches():
    update = Noise(num_microbatches=2)(batch=8)[0]
    assert accepts(update, 1.3 * 0.5 / 2)


@pytest.mark.slow
def test_every_variable_gets_its_own_noise_of_the_same_size():
    shapes = [(500, 400), (200_000,), (20, 100, 100), (200_000,)]
    update = Noise(shapes)()
    for u in update:
        assert accepts(u, 1.3 * 0.5 / 4)
    assert np.abs(np.corrcoef([u.ravel() for u in update]) - np.eye(4)).max() < 0.015


@both_generators
@pytest.mark.parametrize("shapes", [[[200_001]], [[200_001], [3], [2, 2]], [[1]], [[3], []], [[0], [5, 0], [2]], []])
def test_draws_of_odd_length_are_as_long_as_asked(shapes, generator):
    drawn = stream(generator)(shapes)
    assert [list(d.shape) for d in drawn] == shapes
    together = np.concatenate([d.ravel() for d in drawn] + [np.empty(0)])
    assert np.unique(together).size >= 0.98 * together.size
    assert together.size < MILLION // 10 or accepts(together, 1.0)


@both_generators
def test_noise_is_normal_with_mean_zero(generator):
    sample = stream(generator)([[MILLION]])[0]
    assert abs(sample.mean()) < 5 / np.sqrt(sample.size)
    assert scipy.stats.kstest(sample, "norm").pvalue > 1e-4
    assert abs(scipy.stats.kurtosis(sample)) < 5 * np.sqrt(24 / sample.size)
    assert np.isfinite(sample).all() and 4.2 < np.abs(sample).max() < 6.5


@both_generators
def test_coordinates_are_independent(generator):
    sample = stream(generator)([[MILLION]])[0].astype(np.float64)
    for lag in (1, 2, 3, 4, 5, 8, 16, 64, 256, 1000):
        assert abs(np.mean(sample[lag:] * sample[:-lag])) < 5 / 1000, lag
        assert abs(np.mean(sample[lag:] ** 2 * sample[:-lag] ** 2) - 1) < 0.02, lag


@both_generators
def test_steps_are_independent(generator):
    step = stream(generator)
    samples = np.stack([step([[50_000]])[0] for _ in range(8)])
    assert np.abs(np.corrcoef(samples) - np.eye(8)).max() < 5 / np.sqrt(50_000)


@both_generators
def test_no_value_repeats_across_steps_and_variables(generator):
    step = stream(generator)
    drawn = np.concatenate([t.ravel() for _ in range(20) for t in step([[50, 40], [7], [2000]])])
    # float32 normals of equal value are rare; a repeated block would make thousands.
    assert drawn.size - np.unique(drawn).size < 200


@both_generators
def test_no_noise_repeats_when_the_number_of_variables_changes_between_steps(generator):
    step = stream(generator)
    drawn = [t for i in range(12) for t in step([[64]] * (1 + i * 5 % 7))]
    similar = np.abs(np.corrcoef(drawn)) - np.eye(len(drawn))
    assert similar.max() < 0.8


@pytest.mark.slow
def test_an_optimizer_that_trains_fewer_variables_later_draws_fresh_noise():
    steps = Noise([(64,)] * 4)
    drawn = [*steps(), *steps(n=4), *steps(n=2)[:2], *steps(n=1)[:1], *steps(n=2)[:2]]
    similar = np.abs(np.corrcoef([d.ravel() for d in drawn])) - np.eye(len(drawn))
    assert similar.max() < 0.8


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def normals_of(generator, high, fine, angle):
    """The transform alone, of words for the radius, 64 bits below each (of which Philox takes 32), and words for the
    angle."""
    if generator == noise.PHILOX:
        low = (fine >> np.uint64(32)).astype(np.uint32)
        return noise._normals_in_graph(*map(tf.constant, (high, low, angle)), tf.constant(1.0)).numpy()
    near = high + np.uint32(1 << 20) < 2 << 20
    inputs = np.concatenate([high, angle]), lambda count: fine[near], np.float32(1), np.empty(2 * high.size, np.float32)
    if generator == IN_C:
        noise._normals_in_c(native.kernels(), *inputs, np.empty(high.size, np.uint32))
    else:
        noise._normals_in_numpy(*inputs, np.empty((2, high.size), np.float32))
    return inputs[-1]


def words(n, seed=0):
    rng = np.random.default_rng(seed)
    full = lambda dtype: rng.integers(0, np.iinfo(dtype).max, n, dtype, endpoint=True)
    return full(np.uint32), full(np.uint64), full(np.uint32)


@each_transform
def test_the_transform_is_that_of_box_and_muller(generator):
    high, fine, angle = words(100_000)
    # A third each near 0, near 1 and anywhere.
    high[:33_333] >>= 14
    high[33_333:66_666] = ~(high[33_333:66_666] >> 14)
    a, b = normals_of(generator, high, fine, angle).astype(np.float64).reshape(2, -1)
    low = high < 2**31
    distance = (np.where(low, high, ~high) + fine * 2.0**-64) * 2.0**-32
    if generator == noise.PHILOX:  # its words count from the nearer end
        distance = (np.where(low, high, ~high) + (fine >> np.uint64(32)) * 2.0**-32) * 2.0**-32
    radius = np.sqrt(-2 * np.where(low, np.log(distance), np.log1p(-distance)))
    turns = angle.view(np.int32) * 2.0**-32
    np.testing.assert_allclose(np.hypot(a, b), radius, rtol=3e-4)
    np.testing.assert_allclose(np.hypot(a, b)[low], radius[low], rtol=2e-6)
    np.testing.assert_allclose(a, radius * np.cos(2 * np.pi * turns), atol=5e-6)
    np.testing.assert_allclose(b, radius * np.sin(2 * np.pi * turns), atol=5e-6)


@each_transform
def test_words_of_zeros_and_ones_give_finite_noise_and_the_support_is_wide(generator):
    ends = np.array([0, 2**64 - 1], np.uint64)
    high, fine, angle = (np.ravel(x) for x in np.meshgrid(ends, ends, ends))
    drawn = normals_of(generator, high.astype(np.uint32), fine, angle.astype(np.uint32))
    assert np.isfinite(drawn).all()
    radius = np.hypot(*drawn.reshape(2, -1))
    assert 9.4 <= radius.max() < 12  # the accountant charges what lies beyond 9.4
    assert 0 < radius.min() < 1e-4


def test_philox_gives_the_two_words_of_a_radius_and_the_angle_apart():
    with mock.patch.object(noise, "_normals_in_graph", lambda *words: tf.concat(words[:3], 0)):
        drawn = noise._pairs.python_function(
            tf.constant(1000, tf.int64), 1.0, tf.ones([1], tf.uint64), tf.zeros([2], tf.uint64)
        )
    assert drawn.shape == [3000] and np.unique(drawn).size > 2990


@each_transform
@pytest.mark.parametrize("sigmas", [3, 4, 5, 6, 7, 8])
def test_the_tails_are_normal(generator, sigmas):
    """By importance sampling: of radii whose u is below 2^-zeros, where all those beyond ``sigmas`` are."""
    n, zeros = 400_000, int(sigmas**2 / 2 / np.log(2))
    high, fine, angle = words(n, seed=sigmas)
    if zeros < 32:
        high >>= np.uint32(zeros)
    else:
        high[:] = 0
        fine >>= np.uint64(zeros - 32)
    beyond = np.sum(np.abs(normals_of(generator, high, fine, angle)) > sigmas)
    expected = 2 * n * 2.0**zeros * 2 * scipy.stats.norm.sf(sigmas)
    assert abs(beyond - expected) < 5 * np.sqrt(expected)
    assert expected > 10_000


@both_generators
def test_the_tails_of_plain_draws_are_normal(generator):
    step, rounds = stream(generator), 8
    sample = np.abs(np.concatenate([step([[MILLION]])[0] for _ in range(rounds)]))
    for sigmas in (3, 4, 5):
        expected = rounds * MILLION * 2 * scipy.stats.norm.sf(sigmas)
        assert abs(np.sum(sample > sigmas) - expected) < 5 * np.sqrt(expected) + 1, sigmas


def steps_of(source, kind, shape=(100_000,), stddev=1.0):
    """A traced step that draws, in the midst of what Keras and users trace; it gives [2, ...], two draws at once."""
    one = lambda: source.gaussian([shape], stddev)[0]
    inner = tf.function(one)

    def loop():
        drawn = tf.TensorArray(tf.float32, 2, element_shape=shape)
        for i in tf.range(2):
            drawn = drawn.write(i, one())
        return drawn.stack()

    branch = lambda: tf.cond(tf.random.uniform([]) < 2, one, lambda: tf.zeros(shape))
    bodies = {
        "straight": lambda: tf.stack([one(), one()]),
        "nested": lambda: tf.stack([inner(), inner()]),
        "branch": lambda: tf.stack([branch(), branch()]),
        "loop": loop,
    }
    return bodies[kind]


KINDS = ["straight", "nested", "branch", "loop"]


@each_transform
@pytest.mark.parametrize("kind", KINDS)
def test_every_run_of_a_traced_step_draws_afresh(generator, kind):
    source = noise.Source(None if generator == IN_C else 7)  # the kernels' op knows no seed
    step = tf.function(steps_of(source, kind))
    assert source.generator is None
    kernel_draws = generator == IN_C and native.kernels().draws
    with drawn_by(noise.AES if generator == IN_C else generator):
        first = step().numpy()
        ops = {
            node.op for f in step.get_concrete_function().graph.as_graph_def().library.function for node in f.node_def
        }
        ops |= {op.type for op in step.get_concrete_function().graph.get_operations()}
    assert (native.DRAW in ops) == kernel_draws
    assert source.generator == (noise.AES if generator == IN_C else generator)
    drawn = [*first, *step().numpy(), *step().numpy()]
    assert all(accepts(d, 1.0) and not accepts(d, 2 / 3) and not accepts(d, 3 / 2) for d in drawn)
    assert np.abs(np.corrcoef(drawn) - np.eye(6)).max() < 0.02


@pytest.mark.parametrize("kind, jit, generator", [
    ("straight", None, noise.AES), ("straight", True, noise.PHILOX),
    *[pytest.param(kind, True, noise.PHILOX, marks=pytest.mark.slow) for kind in KINDS[1:]]])  # fmt: skip
def test_what_runs_uncompiled_on_the_cpu_draws_by_aes_and_what_xla_compiles_by_philox(kind, jit, generator):
    source = noise.Source(7)
    step = tf.function(steps_of(source, kind), jit_compile=jit)
    drawn = [*step().numpy(), *step().numpy()]
    assert source.generator == generator
    assert accepts(drawn[0], 1.0) and np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.02


def test_where_there_is_an_accelerator_a_step_draws_by_philox():
    source = noise.Source()
    with mock.patch.object(tf.config, "list_logical_devices", lambda: [mock.Mock(device_type="GPU")]):
        source.gaussian([[2]], 1.0)
    assert source.generator == noise.PHILOX


@pytest.mark.slow
def test_a_function_that_was_traced_in_one_way_and_runs_in_another_draws_afresh_or_not_at_all():
    def made():
        source = noise.Source()
        inner = tf.function(lambda: source.gaussian([[1000]], 1.0)[0])
        return inner, tf.function(lambda: inner(), jit_compile=True)

    inner, compiled = made()
    assert np.abs(np.corrcoef([compiled(), inner(), inner(), compiled()]) - np.eye(4)).max() < 0.2
    inner, compiled = made()
    inner()
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"PyFunc|TfdpflNormals"):
        compiled()


@pytest.mark.slow
@pytest.mark.parametrize("jit", [False, True])
def test_fit_draws_afresh_in_every_step_of_an_execution(jit):
    class Model(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.drawn = tf.Variable(tf.zeros([6, 1000]), trainable=False)
            self.at = tf.Variable(0, trainable=False, dtype=tf.int64)
            self.source = source

        def call(self, x):
            return x

        def train_step(self, data):
            normals = self.source.gaussian([[1000]], 1.0)[0]
            place = tf.one_hot(self.at, 6)[:, None]
            self.drawn.assign_add(place * normals)
            self.at.assign_add(1)
            return {"loss": tf.reduce_mean(normals)}

    source = noise.Source()
    model = Model()
    with contextlib.suppress(AttributeError):  # Keras 3 wants it said
        model.built = True
    model.compile(jit_compile=jit, steps_per_execution=3)
    model.fit(np.zeros([6, 1], np.float32), np.zeros(6), batch_size=1, epochs=1, verbose=0)
    assert source.generator == (noise.PHILOX if jit else noise.AES)
    assert np.abs(np.corrcoef(model.drawn.numpy()) - np.eye(6)).max() < 0.2


@both_generators
def test_variables_of_one_step_have_noise_of_their_own(generator):
    shapes = [(300, 200), (60_000,), (3,), (30_000,), (2, 30_000), (7,)]
    drawn = stream(generator)(shapes)
    assert [d.shape for d in drawn] == shapes
    large = [d.ravel()[:30_000] for d in drawn if d.size > 1000]
    assert np.abs(np.corrcoef(large) - np.eye(4)).max() < 0.03
    together = np.concatenate([d.ravel() for d in drawn])
    assert accepts(together, 1.0) and np.unique(together).size > 0.99 * together.size


@both_generators
def test_the_standard_deviation_may_be_a_tensor_and_shapes_are_static(generator):
    source = noise.Source(7)

    @tf.function
    def step(batch):
        drawn = source.gaussian([[100_000], [], [2, 0], tf.TensorShape([3])], 2.0 / tf.cast(batch, tf.float32))
        assert [d.shape.as_list() for d in drawn] == [[100_000], [], [2, 0], [3]]
        return drawn

    with drawn_by(generator):
        drawn = step(tf.constant(4))[0]
    assert drawn.dtype == tf.float32 and accepts(drawn, 0.5) and accepts(step(tf.constant(8))[0], 0.25)
    assert np.all(stream(generator)([[1000], []], 0.0)[0] == 0)


@both_generators
def test_with_a_seed_a_draw_is_the_same_in_each_process_and_other_seeds_give_others(generator):
    first, again, other = (stream(generator, seed) for seed in (5, 5, 6))
    for _ in range(3):
        drawn = first([[1001], [3]])
        for a, b in zip(drawn, again([[1001], [3]]), strict=True):
            np.testing.assert_array_equal(a, b)
        assert correlation(drawn[0], other([[1001], [3]])[0]) < 0.2


@both_generators
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))])
def test_a_copy_draws_noise_of_its_own(generator, duplicate):
    source = noise.Source()
    shape = [[100_000]]
    with drawn_by(generator):
        before = source.gaussian(shape, 1.0)[0]
        other = duplicate({"source": source})["source"]
        other = duplicate(source) if other is source else other
        drawn = [before, *source.gaussian(shape, 1.0), *other.gaussian(shape, 1.0), *other.gaussian(shape, 1.0)]
        seeded = noise.Source(4)
        first = seeded.gaussian(shape, 1.0)[0]
        np.testing.assert_array_equal(first, duplicate(seeded).gaussian(shape, 1.0)[0])
    assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.05


def in_a_fork(body):
    """What ``body`` gives, as bytes, in a process that was forked from this one; it fails after 20 s."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(20)
        with contextlib.suppress(BaseException), os.fdopen(write, "wb") as out:
            out.write(body())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        given = answer.read()
    os.waitpid(pid, 0)
    return given


needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork on this system")


@needs_fork
@pytest.mark.slow
def test_a_forked_process_draws_noise_of_its_own():
    source, idle = noise.Source(), noise.Source()
    source.gaussian([[1000]], 1.0)
    draw_one = lambda s: s._from_host([tf.TensorShape([100_000])], tf.constant(1.0))[0].numpy()
    for s in (source, idle):
        forks = [np.frombuffer(in_a_fork(lambda s=s: draw_one(s).tobytes()), np.float32) for _ in range(2)]
        drawn = [*forks, draw_one(s), draw_one(s)]
        assert all(d.size == 100_000 for d in drawn)
        assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.05


@needs_fork
def test_a_forked_process_has_another_state_for_philox():
    source = noise.Source()
    with drawn_by(noise.PHILOX):
        source.gaussian([[3]], 1.0)
    states = [np.frombuffer(in_a_fork(lambda: source._philox.numpy().tobytes()), np.int64) for _ in range(2)]
    states.append(source._philox.numpy())
    assert all(len(s) == 3 for s in states)
    assert np.unique(np.stack(states)).size == 9
    source._philox = mock.Mock(device="/job:localhost/replica:0/task:0/device:GPU:0")
    assert in_a_fork(lambda: repr(source._philox).encode()) == b"None"  # no work for an accelerator in a fork


FORKED_BEFORE_TENSORFLOW_RAN = """
import os, sys
import numpy as np
import tensorflow as tf
from tfdpfl import _process, native
from tfdpfl.errors import PrivacyError
from tfdpfl.noise import source as noise

source = noise.Source()
step = tf.function(lambda: source.gaussian([[100_000]], 1.0)[0])
pid = os.fork()
drawn = np.stack([step().numpy() for _ in range(2)])
if pid == 0:
    np.save(sys.argv[1], drawn)
    os._exit(0)
os.waitpid(pid, 0)
drawn = np.concatenate([drawn, np.load(sys.argv[1])])
assert np.abs(np.corrcoef(drawn) - np.eye(4)).max() < 0.05
"""


@needs_fork
@pytest.mark.slow
def test_a_traced_step_in_a_forked_process_draws_noise_of_its_own(tmp_path):
    """Forked before TensorFlow has threads: later, no graph runs in a fork."""
    run = [sys.executable, "-c", FORKED_BEFORE_TENSORFLOW_RAN, str(tmp_path / "drawn.npy")]
    subprocess.run(run, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})


@both_generators
def test_threads_draw_each_their_own_noise(generator):
    source = noise.Source()
    step = tf.function(lambda: source.gaussian([[64]], 1.0)[0])
    with drawn_by(generator):
        drawn = [step().numpy()]

    def run():
        drawn.extend([step().numpy() for _ in range(100)])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(drawn) == 401 and np.unique(np.stack(drawn)[:, :8], axis=0).shape[0] == 401


@both_generators
def test_processes_that_share_a_key_draw_the_same_and_each_call_draws_afresh(generator):
    def drawn(key):
        with drawn_by(generator):
            shared = noise.Source().shared(key)
            return [t.numpy() for t in (*(shared.gaussian([[40_000]], 1.0)[0] for _ in range(2)),
                                        shared.fresh_key(), shared.unique())]  # fmt: skip

    with drawn_by(generator):
        key = noise.Source(20).fresh_key()
        by_the_key_itself = noise.Source().gaussian([[40_000]], 1.0, key)[0]
    one, two, *others = (
        drawn(tf.bitwise.bitwise_xor(key, tf.constant(change, tf.int64))) for change in ([0, 0], [0, 0], [0, 1], [1, 0])
    )  # either half matters
    assert all((a == b).all() and (a != c).any() for other in others for a, b, c in zip(one, two, other, strict=True))
    for sample in one[:2]:
        assert accepts(sample, 1.0) and not accepts(sample, 2 / 3) and not accepts(sample, 3 / 2)
    samples = [*one[:2], *others[0][:2], *others[1][:2], by_the_key_itself.numpy()]
    assert np.abs(np.corrcoef(samples) - np.eye(7)).max() < 0.035  # seven deviations
    assert len({*key.numpy(), *one[2], one[3]}) == 5


@contextlib.contextmanager
def known_keys():
    """The keys that are drawn meanwhile, as bytes."""
    keys, genuine = [], secrets.token_bytes
    with mock.patch.object(secrets, "token_bytes", lambda n: keys.append(genuine(n)) or keys[-1]):
        yield keys


def holds_a_key(data, keys):
    """Whether any 8 bytes of a key stand in ``data``, as they are or as a protocol buffer's varint."""
    return any(form in data for key in keys for at in range(0, len(key), 8) for form in forms(key[at : at + 8]))


def forms(half):
    number, varint = int.from_bytes(half, "little"), bytearray()
    while number:
        varint.append(number & 127 | (128 if number > 127 else 0))
        number >>= 7
    return half, half[::-1], bytes(varint)


@both_generators
@pytest.mark.parametrize("jit", [None, True])
def test_no_key_is_in_a_graph_a_pickle_or_a_file(generator, jit, tmp_path):
    if jit and generator == noise.AES:
        pytest.skip("XLA has no AES")
    with known_keys() as keys, drawn_by(generator):
        source = noise.Source()

        class Holder(tf.Module):
            def __init__(self):
                super().__init__()
                self.source, self.weights = source, tf.Variable(tf.zeros([3]))

            @tf.function(input_signature=[], jit_compile=jit)
            def step(self):
                self.weights.assign_add(self.source.gaussian([[3]], 1.0)[0])
                return self.weights + 0.0

        holder = Holder()
        holder.step()
        saved = [holder.step.get_concrete_function().graph.as_graph_def().SerializeToString(), pickle.dumps(source)]
        assert len(holder.variables) == 1
        tf.train.Checkpoint(holder=holder).save(str(tmp_path / "checkpoint"))
        if generator == noise.AES:
            tf.saved_model.save(holder, str(tmp_path / "model"))
        else:
            with pytest.raises(AssertionError, match="untracked"):
                tf.saved_model.save(holder, str(tmp_path / "model"))
    assert len(keys) == (1 if generator == noise.AES else 2)
    saved += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(saved) > 4 and not any(holds_a_key(data, keys) for data in saved)


def test_the_search_for_a_key_finds_one():
    key = secrets.token_bytes(16)
    with tf.Graph().as_default() as graph:
        tf.constant(np.frombuffer(key, np.int64)[:1])
        single = graph.as_graph_def().SerializeToString()
        tf.constant(np.frombuffer(key, np.int64))
    assert holds_a_key(single, [key]) and holds_a_key(graph.as_graph_def().SerializeToString(), [key])
    assert not holds_a_key(single, [secrets.token_bytes(16)])


def test_a_checkpoint_takes_no_stream_back(tmp_path):
    for generator in (noise.AES, noise.PHILOX):
        holder = tf.Module()
        holder.source, holder.weights = noise.Source(), tf.Variable(0.0)
        step = tf.function(lambda holder=holder: holder.source.gaussian([[1000]], 1.0)[0])
        path = tf.train.Checkpoint(holder=holder).save(str(tmp_path / generator))
        with drawn_by(generator):
            before = [step() for _ in range(2)]
        tf.train.Checkpoint(holder=holder).restore(path)
        assert np.abs(np.corrcoef([*before, step(), step()]) - np.eye(4)).max() < 0.2


@pytest.mark.parametrize("error", [NotImplementedError, OSError])
def test_a_system_without_entropy_is_told_in_one_sentence(error):
    with mock.patch.object(secrets, "token_bytes", side_effect=error), pytest.raises(PrivacyError, match="random"):
        noise.Source()
