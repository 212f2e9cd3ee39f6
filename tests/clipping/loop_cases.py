"""What tests of loops share: a batch of sequences, weights, and loops over time that use them."""

import tensorflow as tf
from helpers import normal

B, T, D, U = 5, 4, 3, 3
X = normal(B, T, D)


def weights(*shapes):
    return [tf.Variable(0.5 * normal(*s, seed=i)) for i, s in enumerate(shapes)]


def over_time(x, turn, state, most=None, **loop):
    """state after turn(t, x[:, t], state) for t = 0, 1, ..."""
    steps = tf.transpose(x, [1, 0, 2])
    return tf.while_loop(
        lambda t, s: t < (tf.shape(steps)[0] if most is None else most),
        lambda t, s: (t + 1, turn(t, tf.gather(steps, t), s)),
        (tf.constant(0), state),
        **loop,
    )[1]


def zeros(x, width=U):
    return tf.zeros([tf.shape(x)[0], width])


A, R, C, S, TABLE = weights((D, U), (U, U), (U,), (U,), (6, U))


def used(f):
    with tf.GradientTape() as tape:
        y = f(tf.constant(X))
    variables = [A, R, C, S, TABLE]
    return [v for v, g in zip(variables, tape.gradient(y, variables), strict=True) if g is not None]
