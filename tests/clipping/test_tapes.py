"""A watched tape gives out what it always did, and its loss is found by the very tensors that it gave out."""

import tensorflow as tf

from tfdpfl.clipping import tapes


def test_a_tape_gives_out_what_it_always_did():
    """Eager, by tensors, with output gradients, of what is not connected."""
    tapes.watch()
    v, w = tf.Variable(3.0), tf.Variable(2.0)
    with tf.GradientTape(persistent=True) as tape:
        t = v * v
    assert tape.gradient(t, {"v": v, "w": w}) == {"v": 6.0, "w": None}
    assert tape.gradient(t, [w], unconnected_gradients="zero") == [0.0]
    assert tape.gradient(t, v, 2.0) == 12.0
    once = tf.function(lambda: (lambda tape: (tape.gradient(tape.t, v), tape._recording))(_taped(v)))
    assert once() == (6.0, False)


def _taped(v):
    with tf.GradientTape() as tape:
        tape.t = v * v
    return tape


def test_only_the_very_tensors_that_a_tape_gave_out_lead_to_its_loss():
    tapes.watch()
    v, w = tf.Variable(3.0), tf.Variable(2.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = (v * x + w) ** 2
        of_v, of_w = tape.gradient(loss, [v, w])
        for known in ([of_v, of_w], [of_v, None]):
            assert tapes.loss_of(known, [v, w]) is loss
        for other in ([2 * of_v, of_w], [of_w, of_v], [tf.identity(of_v), of_w], [None, None]):
            assert tapes.loss_of(other, [v, w]) is None
        return loss

    assert step(tf.constant(1.0)) == 25.0
