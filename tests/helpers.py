"""The oracle for the engine's tests: every example's gradient by itself, clipped and summed in float64 by NumPy."""

import numpy as np
import tensorflow as tf

from tfdpfl.clipping import clipped_gradients

K = tf.keras
L = K.layers
KERAS_3 = not hasattr(K, "__internal__")
TOLERANCE = 1e-5


def raw(variables):
    """tf.Variables, of Keras 2 or Keras 3."""
    return [getattr(v, "_value", v) for v in variables]


def rng(seed=0):
    return np.random.default_rng(seed)


def normal(*shape, seed=0):
    return rng(seed).normal(size=shape).astype("float32")


def example_losses(outputs):
    """One loss an example, [batch], of every output together; all entries count, each differently."""
    losses = []
    for o in tf.nest.flatten(outputs):
        o = tf.cast(o, tf.float64 if o.dtype == tf.float64 else tf.float32)
        inner = o.shape[1:].num_elements()
        if inner is None:
            o = tf.reshape(o, [tf.shape(o)[0], -1])
            target = 2.0 * tf.cos(tf.range(tf.cast(tf.shape(o)[1], o.dtype), dtype=o.dtype))
            losses.append(tf.reduce_mean((o - target) ** 2, 1))
        else:  # the same, in a third of the ops
            target = tf.constant(2.0 * np.cos(np.arange(inner)), o.dtype)
            squares = tf.square(tf.nn.bias_add(tf.reshape(o, [-1, inner]), -target))
            losses.append(tf.linalg.matvec(squares, tf.fill([inner], tf.constant(1 / max(inner, 1), o.dtype))))
    return losses[0] if len(losses) == 1 else tf.add_n(losses)


def one(x, i):
    """Example i twice: at batch size 1 TensorFlow's gradient of a 1x1 convolution with strides is not safe."""
    return tf.nest.map_structure(lambda a: tf.constant(np.stack([a[i], a[i]])), x)


def per_example_gradients(losses, x, variables):
    """[batch, *shape] for each variable; ``losses(x)`` gives the losses [batch] of a batch x."""
    watched = raw(variables)
    rows = []
    for i in range(len(tf.nest.flatten(x)[0])):
        with tf.GradientTape() as tape:
            tape.watch(watched)
            loss = losses(one(x, i))[0]
        gs = tape.gradient(loss, watched, unconnected_gradients="zero")
        rows.append([np.asarray(tf.convert_to_tensor(g), np.float64) for g in gs])
    return [np.stack(column) for column in zip(*rows, strict=True)]


def norms_of(gradients):
    return np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))


def clipped_sums(gradients, clip):
    norms = norms_of(gradients)
    c = np.minimum(1.0, clip / np.maximum(norms, 1e-300))
    return [np.tensordot(c, g, 1) for g in gradients]


def grouped(gradients, m):
    """Mean gradients of m groups of consecutive examples."""
    return [g.reshape(m, len(g) // m, *g.shape[1:]).mean(1) for g in gradients]


def signature(x, batch=None, free=False, shape=None):
    """TensorSpecs for a batch of any size; with ``free``, of any lengths."""
    if shape is not None:
        return tf.TensorSpec(shape, x.dtype)
    return tf.nest.map_structure(
        lambda a: tf.TensorSpec([batch, *([None] * (a.ndim - 1) if free else a.shape[1:])], a.dtype), x
    )


def engine(losses, x, variables, clip, *, batch=None, free=False, signature_shape=None,
           reduce=tf.reduce_mean, m=None, jit=False):  # fmt: skip
    """What `clipped_gradients` gives: (sums, norms, number of units that were not finite)."""

    @tf.function(input_signature=[signature(x, batch, free, signature_shape)], jit_compile=jit, autograph=False)
    def step(x):
        r = clipped_gradients(reduce(losses(x)), variables, clip, m)
        return [tf.zeros(v.shape) if s is None else s for s, v in zip(r.sum, raw(variables), strict=True)], (
            r.norms, r.num_nonfinite)  # fmt: skip

    sums, (norms, bad) = step(tf.nest.map_structure(tf.constant, x))
    return [s.numpy() for s in sums], norms.numpy(), int(bad)


def assert_close(got, want, tolerance=TOLERANCE):
    """Relative to the largest entry of all."""
    scale = max(np.abs(w).max() for w in want if w.size)
    assert scale > 0
    for g, w in zip(got, want, strict=True):
        assert g.shape == w.shape
        if w.size:
            assert np.abs(g - w).max() <= tolerance * scale, (np.abs(g - w).max() / scale, g.shape)


def check(losses, x, variables, tolerance=TOLERANCE, **how):
    """The engine's norms and clipped sums against the oracle's, with a clip that about half the examples exceed."""
    gradients = per_example_gradients(losses, x, variables)
    m = how.get("m")
    if m is not None:
        gradients = grouped(gradients, m)
    norms = norms_of(gradients)
    clip = float(np.median(norms))
    sums, got, bad = engine(losses, x, variables, clip, **how)
    assert bad == 0
    assert_close([got], [norms], tolerance)
    assert_close(sums, clipped_sums(gradients, clip), tolerance)


def check_models(pairs, tolerance=TOLERANCE, **how):
    """Models side by side, each on inputs of its own, of which there are as many: a trace of each takes longer."""
    models, xs = zip(*pairs, strict=True)
    losses = lambda xs: example_losses([model(x, training=False) for model, x in zip(models, xs, strict=True)])
    losses(tf.nest.map_structure(tf.constant, xs))
    check(losses, xs, [v for model in models for v in model.trainable_variables], tolerance, **how)


def check_model(model, x, *, variables=None, training=False, **how):
    losses = lambda x: example_losses(model(x, training=training))
    losses(tf.nest.map_structure(tf.constant, x))
    check(losses, x, variables or model.trainable_variables, **how)
