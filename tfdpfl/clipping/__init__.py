"""Per-example clipped gradients inside any `tf.function`: the engine behind the optimizers."""

from tfdpfl.clipping.engine import ClippedGradients, clipped_gradients, per_example_norms
from tfdpfl.clipping.fixing import fix
from tfdpfl.clipping.models import explain, validate
from tfdpfl.clipping.registry import register_rule

__all__ = [
    "ClippedGradients",
    "clipped_gradients",
    "explain",
    "fix",
    "per_example_norms",
    "register_rule",
    "validate",
]
