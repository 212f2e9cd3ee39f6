"""The kernels inside the engine: where they are used, and that they change no more than rounding."""

import functools
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from helpers import K, L, check, clipped_sums, engine, example_losses, normal, norms_of
from helpers import per_example_gradients as one_by_one

from tfdpfl import native
from tfdpfl.clipping import clipped_gradients
from tfdpfl.clipping.gradients import Costs
from tfdpfl.clipping.kernel_ops import FILTERS, ROWS
from tfdpfl.noise import source

OPS = (*FILTERS, ROWS)


@pytest.fixture(autouse=True)
def switched_on(monkeypatch):
    monkeypatch.delenv(native.SWITCH, raising=False)


@pytest.fixture
def stored(request, monkeypatch):
    """Has gradients stored, or computed twice, whatever costs less."""
    monkeypatch.setattr(Costs, "stores", property(lambda self: request.param))
    return request.param


twice = pytest.mark.parametrize("stored", [True, False], indirect=True, ids=["stored", "twice"])


def ops_of(function, *specs, jit=None):
    graph = tf.function(function, input_signature=specs, jit_compile=jit).get_concrete_function().graph
    return [op.type for op in graph.get_operations() if op.type in OPS]


def sum_of(layers, x, dtype="float32"):
    """A function that gives the clipped sum of a convolution's weights."""
    w = tf.Variable(tf.cast(normal(3, 3, x[-1], 8), dtype))
    return lambda images: clipped_gradients(example_losses(layers(images, w)), [w], 1.0).sum[0]


conv = functools.partial(tf.nn.conv2d, strides=1, padding="SAME")
SPEC = tf.TensorSpec([None, 8, 8, 4])


@pytest.mark.slow
@twice
def test_a_model_agrees_with_examples_one_by_one(stored):
    """Strides, explicit zeros, dilation, one axis, one tap, a transposed convolution."""
    wide = tf.Variable(normal(3, 2, 5, 3, seed=7))
    layers = [
        L.Conv2D(5, 3, strides=2, padding="same", activation="tanh"),
        L.Lambda(lambda x: tf.nn.conv2d(x, wide, 1, [[0, 0], [2, 1], [0, 1], [0, 0]])),
        L.Conv2D(9, (2, 3), dilation_rate=(1, 2), activation="tanh"),
        L.Conv2DTranspose(6, 3, activation="tanh"),
        L.Conv2D(4, 1, strides=2),
        L.Reshape((-1, 4)),
        L.Conv1D(17, 3, padding="causal"),
    ]
    model = K.Sequential([K.Input((13, 11, 2)), *layers])
    variables = [*(getattr(v, "_value", v) for v in model.trainable_variables), wide]
    check(lambda x: example_losses(model(x)), normal(5, 13, 11, 2), variables)


@pytest.mark.slow
@twice
def test_free_image_sizes_and_a_shared_kernel_agree(stored):
    w = tf.Variable(normal(3, 3, 2, 2, seed=1))
    losses = lambda x: example_losses(tf.reduce_sum(conv(tf.tanh(conv(x, w)), w), [1, 2]))
    check(losses, normal(4, 7, 6, 2), [w], free=True)


@twice
def test_an_example_that_is_not_finite_counts_for_nothing(stored):
    w = tf.Variable(normal(3, 3, 2, 9, seed=1))
    losses = lambda x: example_losses(conv(x, w))
    x = normal(4, 6, 6, 2)
    gradients = one_by_one(losses, x, [w])
    x[1, 2, 3, 0] = np.inf
    gradients[0][1] = 0
    sums, norms, bad = engine(losses, x, [w], 1.0)
    assert bad == 1 and not np.isfinite(norms[1])
    np.testing.assert_allclose(np.delete(norms, 1), np.delete(norms_of(gradients), 1), rtol=1e-5)
    np.testing.assert_allclose(sums[0], clipped_sums(gradients, 1.0)[0], atol=1e-5)


@pytest.mark.slow
def test_kernels_are_used_for_images_and_volumes_in_float32_alone():
    assert ops_of(sum_of(conv, [4]), SPEC) == [FILTERS[0]]
    assert not ops_of(sum_of(conv, [4], "float64"), tf.TensorSpec([None, 8, 8, 4], tf.float64))
    assert ops_of(sum_of(lambda x, w: tf.nn.conv3d(x, w[None], [1] * 5, "SAME"), [4]),
                  tf.TensorSpec([None, 2, 8, 8, 4])) == [FILTERS[0]]  # fmt: skip
    assert ops_of(sum_of(lambda x, w: tf.nn.depthwise_conv2d(x, w[..., :1], [1] * 4, "SAME"), [4]),
                  tf.TensorSpec([None, 8, 8, 4])) == [FILTERS[0]]  # fmt: skip


def over_frames(op, x, w):
    """A convolution of each frame of a video, [batch, frames, height, width, channels]."""
    frames = op(tf.reshape(x, [-1, *x.shape[2:]]), w)
    return tf.reshape(frames, [-1, x.shape[1], *frames.shape[1:]])


@pytest.mark.slow
@twice
@pytest.mark.parametrize("op, shape", [
    (functools.partial(tf.nn.conv2d, strides=2, padding="VALID"), [3, 3, 4, 8]),
    (lambda x, w: tf.nn.depthwise_conv2d(x, w, [1] * 4, "SAME"), [3, 3, 4, 1]),
    (lambda x, w: tf.nn.conv2d_transpose(x, w, [tf.shape(x)[0], 17, 15, 8], 2, "VALID"), [3, 3, 8, 4]),
], ids=["conv", "depthwise", "transposed"])  # fmt: skip
def test_the_frames_of_one_example_are_one_row_of_a_kernel(op, shape, stored):
    """TimeDistributed and the steps of a loop give an example several rows: the gradient is the sum over them."""
    w = tf.Variable(normal(*shape))
    losses = lambda x: example_losses(tf.tanh(over_frames(op, x, w)))
    check(losses, normal(3, 5, 8, 7, 4), [w])
    ops = ops_of(lambda x: clipped_gradients(losses(x), [w], 1.0).sum[0], tf.TensorSpec([None, 5, 8, 7, 4]))
    assert ops == ([FILTERS[0]] if stored else [*FILTERS[1:]])


@pytest.mark.slow
def test_a_loops_convolutions_use_a_kernel():
    model = K.Sequential([K.Input((4, 8, 8, 3)), L.ConvLSTM2D(8, 3, padding="same")])
    weights = [getattr(v, "_value", v) for v in model.trainable_variables]
    losses = lambda x: example_losses(model(x))
    check(losses, normal(3, 4, 8, 8, 3), weights)
    step = lambda x: clipped_gradients(losses(x), weights, 1.0).sum[0]
    assert ops_of(step, tf.TensorSpec([None, 4, 8, 8, 3])) == [FILTERS[0]] * 8  # four gates, of inputs and of states


def test_kernels_are_not_used_where_they_are_switched_off(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    assert not ops_of(sum_of(conv, [4]), SPEC)


@pytest.mark.slow
def test_kernels_are_not_used_under_xla():
    step = sum_of(conv, [4])
    assert not ops_of(step, SPEC, jit=True)
    inner = tf.function(step)
    outer = tf.function(lambda x: inner(x), jit_compile=True, input_signature=[SPEC])
    x = tf.constant(normal(3, 8, 8, 4))
    np.testing.assert_allclose(outer(x), inner(x), rtol=1e-4, atol=1e-5)


def test_kernels_are_not_used_in_a_graph_that_another_process_may_run():
    with tf.Graph().as_default() as graph:
        sum_of(conv, [4])(tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 4]))
    assert not any(op.type in OPS for op in graph.get_operations())


def test_clipped_gradients_of_kernels_are_not_differentiated_in_silence():
    def slope(x):
        return tf.gradients(sum_of(conv, [4])(x), x)

    with pytest.raises(Exception, match=r"cannot differentiate through clipped gradients\. Set TFDPFL_NATIVE=0"):
        ops_of(slope, SPEC)


@pytest.mark.parametrize("images, gradients, settings", [
    ([2, 8, 8, 4], [3, 8, 8, 4], [3, 3, 1, 1, 1, 1, -1, -1, 1, 0]),
    ([2, 8, 8], [2, 8, 8, 4], [3, 3, 1, 1, 1, 1, -1, -1, 1, 0]),
    ([2, 8, 8, 4], [2, 8, 8, 4], [3, 3, 0, 1, 1, 1, -1, -1, 1, 0]),
    ([2, 8, 8, 4], [2, 8, 8, 4], [3, 3, 1, 1, 1, 1, -1]),
    ([2, 8, 8, 4], [2, 8, 8, 4], [3, 3, 1, 1, 1, 1, -1, -1, 1, 9]),
])  # fmt: skip
def test_an_op_refuses_shapes_and_settings_that_do_not_fit(images, gradients, settings):
    """Whatever a graph that was edited by hand, or read from a file, asks of it."""
    from tensorflow.python.framework import op_def_library

    assert not native.register_ops()

    @tf.function
    def made():
        x, g = tf.random.normal(images), tf.random.normal(gradients)
        return op_def_library.apply_op(FILTERS[0], images=x, gradients=g, settings=settings)

    with pytest.raises(tf.errors.OpError, match="tfdpfl"):
        made()


draws = pytest.mark.skipif(not native.kernels().draws, reason="this processor has no instructions for AES")


def op_of(key, stddev, count, settings):
    """A function that runs the op that draws."""
    from tensorflow.python.framework import op_def_library

    assert not native.register_ops()
    inputs = {"key": key, "stddev": stddev, "N": count, "settings": settings}
    return tf.function(lambda: op_def_library.apply_op(native.DRAW, **inputs))


@draws
def test_a_key_gives_the_normals_that_python_makes_of_it():
    shapes, key = [(1000, 1000), (), (3, 0), (17,), (2, 64)], source.new_key(3)
    drawn = tf.function(lambda: source.Source().gaussian(shapes, 0.5, tf.constant(key)))
    (op,) = (op for op in drawn.get_concrete_function().graph.get_operations() if op.type == native.DRAW)
    assert op.op_def.is_stateful  # else TensorFlow may take two draws for one, or a draw for a constant
    sizes = [int(np.prod(shape)) for shape in shapes]
    starts = np.cumsum([0] + [-(-size // 16) * 16 for size in sizes])
    whole = source.KeyStream(key).normals(int(starts[-1]), np.float32(0.5))
    for normals, shape, size, start in zip(drawn(), shapes, sizes, starts, strict=False):
        assert normals.shape == shape
        np.testing.assert_allclose(np.ravel(normals), whole[start : start + size], rtol=1e-5, atol=1e-7)


@draws
@pytest.mark.parametrize("key, stddev, count, settings", [
    ([1], 1.0, 1, [0, 5]), ([[1, 2]], 1.0, 1, [0, 5]), ([1, 2, 3], 1.0, 1, [0, 5]), ([], [1.0], 1, [0, 5]),
    ([], 1.0, 2, [0, 5]), ([], 1.0, 1, [0]), ([], 1.0, 1, []), ([], 1.0, 1, [0, -1]), ([], 1.0, 1, [0, 1 << 40]),
    ([], 1.0, 1, [9, 5]), ([], 1.0, 1, [-1, 5]),
])  # fmt: skip
def test_a_draw_refuses_what_does_not_fit(key, stddev, count, settings):
    with pytest.raises(tf.errors.OpError, match="tfdpfl"):
        op_of(tf.constant(key, tf.int64), tf.constant(stddev, tf.float32), count, settings)()


WITHOUT_ENTROPY = """
import tensorflow as tf
from tfdpfl import noise

source = noise.Source()  # Python asks the system by another call
step = tf.function(lambda: source.gaussian([[1000]], 1.0)[0])
try:
    print(step())
except tf.errors.InternalError as error:
    print("refused:", "no random bytes" in error.message)
"""


@draws
@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
def test_a_system_without_entropy_fails_the_step(tmp_path):
    (tmp_path / "none.c").write_text("int getentropy(void *b, unsigned long n) { (void)b, (void)n; return -1; }")
    library = str(tmp_path / "none.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, str(tmp_path / "none.c")], check=True)
    environment = {**os.environ, "LD_PRELOAD": library, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop(native.SWITCH, None)
    run = subprocess.run([sys.executable, "-c", WITHOUT_ENTROPY], env=environment, capture_output=True, text=True)
    assert run.stdout == "refused: True\n", run.stderr
