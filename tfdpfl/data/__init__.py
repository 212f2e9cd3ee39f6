"""Batches drawn the way the accountant assumes: every example on its own, with the same probability.

`poisson_batches` makes the `tf.data.Dataset` that `fit` takes, from data in memory or on disk; `random_allocation`,
`cyclic_poisson`, `b_min_sep`, `fixed_order` and `shuffled_batches` draw otherwise. `declared_sampling` tells what may
be claimed about one.
"""

from tfdpfl.data.batches import (
    b_min_sep,
    cyclic_poisson,
    fixed_order,
    poisson_batches,
    random_allocation,
    shuffled_batches,
)
from tfdpfl.data.declared import SamplingDeclaration, declared_sampling, made_from, passed_through, source_of
from tfdpfl.data.sources import Examples, examples_of
from tfdpfl.data.users import Users, bound_owners, select_examples, users_of

__all__ = [
    "SamplingDeclaration",
    "b_min_sep",
    "bound_owners",
    "cyclic_poisson",
    "declared_sampling",
    "fixed_order",
    "poisson_batches",
    "random_allocation",
    "select_examples",
    "shuffled_batches",
]
