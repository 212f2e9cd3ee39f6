"""Per-example clipped gradients inside any `tf.function`: the engine behind the optimizers."""

from tfdpfl.clipping.engine import ClippedGradients, clipped_gradients, per_example_norms

__all__ = ["ClippedGradients", "clipped_gradients", "per_example_norms"]
