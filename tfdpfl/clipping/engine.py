"""Clipped sums of per-example gradients, from one forward and one backward pass: the public functions. Nothing here
draws noise or knows of Keras."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfdpfl.accounting import _checks
from tfdpfl.clipping.pipeline import ClippedGradients, ClippingPipeline

__all__ = ["LEAST_CLIP", "ClippedGradients", "check_clip", "clipped_gradients", "per_example_norms"]

# Of 1e11 entries whose squares are below float32's least normal number the norm is 3e-14.
LEAST_CLIP = 1e-10


def check_clip(l2_norm_clip: float) -> None:
    _checks.real("l2_norm_clip", l2_norm_clip, "give the largest L2 norm that one example's gradient may have", above=0)
    if l2_norm_clip < LEAST_CLIP:
        raise ValueError(
            f"l2_norm_clip={l2_norm_clip!r} is so small that float32 loses longer gradients when it squares them. "
            f"Scale the loss up, and l2_norm_clip with it, to {LEAST_CLIP:g} or more."
        )


@tf.autograph.experimental.do_not_convert
def clipped_gradients(
    loss: tf.Tensor,
    variables: Sequence,
    l2_norm_clip: float | tf.Tensor,
    num_microbatches: int | None = None,
) -> ClippedGradients:
    """Clips every example's gradient to an L2 norm of ``l2_norm_clip`` and sums, inside any `tf.function`.

    ``loss`` may be reduced (sum, mean, weighted sum of several losses) or not. An example's loss is what the same
    expression gives on a batch of one. Terms that do not depend on data come back apart, unclipped.

    Args:
      loss: a scalar, or a tensor with the examples along its first axis, in a graph (not eager).
      variables: Keras or TensorFlow variables, or plain tensors of the graph that hold the weights. Compute
        such a tensor from public values alone, also if another function hands it in. The arguments of the outermost
        function are taken to be public.
      l2_norm_clip: C, at least 1e-10.
      num_microbatches: None to clip every example; or M, to clip the mean gradient of M groups of consecutive
        examples, as TensorFlow Privacy does. The batch must be divisible by M.

    Returns:
      `ClippedGradients`. Formally: adding or removing one unit changes ``sum`` by at most ``l2_norm_clip`` in L2 norm.

    Raises:
      PrivacyError: where examples influence one another on the way to the loss, or there is no graph. Nothing is
        silently left unclipped.
      ValueError: an ``l2_norm_clip`` that is too small for float32.
    """
    if not tf.is_tensor(l2_norm_clip):
        check_clip(l2_norm_clip)
    pipeline = ClippingPipeline(loss, variables, num_microbatches)
    norms2 = pipeline.squared_norms()
    return pipeline.finish(norms2, l2_norm_clip)


@tf.autograph.experimental.do_not_convert
def per_example_norms(loss: tf.Tensor, variables: Sequence) -> tf.Tensor:
    """The L2 norm of every example's gradient over all variables, [batch].

    Args:
      loss: As all that follow, see `clipped_gradients`.
    """
    return tf.sqrt(ClippingPipeline(loss, variables, None).squared_norms())
