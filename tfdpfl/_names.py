"""Says where a name is that `tfdpfl` itself does not have, and what to use in place of other packages' names."""

from __future__ import annotations

import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import ParamSpec, TypeVar

__all__ = ["accept_old_names", "sentence", "unexpected"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_ANY_MODEL = "any Keras model trains privately once you compile it with tfdpfl.DPAdam(l2_norm_clip, noise_multiplier)"
_ONE_LINE = "compile your model with tfdpfl.DPAdam(l2_norm_clip, noise_multiplier), or call tfdpfl.plan(...)"
_EVERY = "it clips every example by itself unless you pass num_microbatches"
_LEDGER = "use tfdpfl.PrivacyLedger, or tfdpfl.callbacks.PrivacyBudget in fit"
_SUMS = (
    "a DP optimizer clips, sums and adds noise to gradients; tfdpfl.clipping.clipped_gradients(...) clips in your loop"
)
_CLIENTS = "use a process of tfdpfl.federated, whose clients add the noise"
_CONVEX = "use tfdpfl.convex.DPLogisticRegression"
_NO_QUERY = "give it a clip as l2_norm_clip= and correlated noise as noise=, in place of a query"
_TREE = "use tfdpfl.noise.Tree(...) as noise= of an optimizer"
_TREE_COST = "tfdpfl.callbacks.PrivacyBudget computes ε for tfdpfl.noise.Tree(...) as it ran"
_SYNTHETIC = "use sklearn.datasets.make_classification(...)"
_KERAS_LAYER = "use the layer of Keras: tfdpfl clips its gradients as it is"

# Names of other packages, and what to use in their place.
ELSEWHERE: dict[str, str] = {
    # TensorFlow Privacy
    "compute_dp_sgd_privacy": "use tfdpfl.compute_epsilon(...)",
    "compute_dp_sgd_privacy_statement": "use tfdpfl.privacy_statement(...)",
    "compute_noise": "use tfdpfl.compute_noise_multiplier(...)",
    "make_dp_model_class": _ANY_MODEL,
    "DPModel": _ANY_MODEL,
    "DPSequential": _ANY_MODEL,
    "make_keras_optimizer_class": "use tfdpfl.make_dp_optimizer_class(...)",
    "make_vectorized_keras_optimizer_class": "use tfdpfl.make_dp_optimizer_class(...)",
    "make_optimizer_class": "use tfdpfl.make_dp_optimizer_class(...)",
    "make_gaussian_optimizer_class": "use tfdpfl.make_dp_optimizer_class(...)",
    "VectorizedDPKerasSGDOptimizer": f"use tfdpfl.DPSGD; {_EVERY}",
    "VectorizedDPKerasAdamOptimizer": f"use tfdpfl.DPAdam; {_EVERY}",
    "VectorizedDPKerasAdagradOptimizer": f"use tfdpfl.DPAdagrad; {_EVERY}",
    "VectorizedDPSGD": f"use tfdpfl.DPSGD; {_EVERY}",
    "VectorizedDPSGDOptimizer": f"use tfdpfl.DPSGD; {_EVERY}",
    "VectorizedDPAdam": f"use tfdpfl.DPAdam; {_EVERY}",
    "VectorizedDPAdamOptimizer": f"use tfdpfl.DPAdam; {_EVERY}",
    "DPGradientDescentGaussianOptimizer": "use tfdpfl.DPSGD",
    "DPGradientDescentOptimizer": "use tfdpfl.DPSGD",
    "DPAdamGaussianOptimizer": "use tfdpfl.DPAdam",
    "DPAdagradGaussianOptimizer": "use tfdpfl.DPAdagrad",
    "DPSparseKerasSGDOptimizer": "use tfdpfl.DPSGD(..., sparse=tfdpfl.AdaFEST(...))",
    "DPSparseKerasAdamOptimizer": "use tfdpfl.DPAdam(..., sparse=tfdpfl.AdaFEST(...))",
    "make_sparse_keras_optimizer_class": "use sparse=tfdpfl.AdaFEST(...) in an optimizer",
    "GenericDPSGDOptimizer": f"use tfdpfl.DPSGD; {_NO_QUERY}",
    "GenericDPAdamOptimizer": f"use tfdpfl.DPAdam; {_NO_QUERY}",
    "GenericDPAdagradOptimizer": f"use tfdpfl.DPAdagrad; {_NO_QUERY}",
    "make_keras_generic_optimizer_class": f"use tfdpfl.make_dp_optimizer_class(...); {_NO_QUERY}",
    "make_gaussian_query_optimizer_class": f"use tfdpfl.make_dp_optimizer_class(...); {_NO_QUERY}",
    "DPFTRLM": "use tfdpfl.DPFTRL",
    "DPFTRLTreeAggregationOptimizer": "use tfdpfl.DPFTRL",
    "TreeAggregation": _TREE,
    "tree_aggregation": _TREE,
    "restart_query": _TREE,
    "RdpAccountant": _LEDGER,
    "PLDAccountant": _LEDGER,
    "compute_rdp": "use tfdpfl.compute_epsilon(..., accountant='rdp')",
    "compute_rdp_sample_without_replacement": "use tfdpfl.compute_epsilon(..., sampling='fixed_size')",
    "compute_rdp_tree_restart": _TREE_COST,
    "compute_rdp_single_tree": _TREE_COST,
    "compute_zcdp_single_tree": _TREE_COST,
    "get_privacy_spent": "use tfdpfl.compute_epsilon(...)",
    "GaussianSumQuery": _SUMS,
    "GaussianAverageQuery": _SUMS,
    "NormalizedQuery": _SUMS,
    "NestedQuery": "use tfdpfl.PerLayerClip(...) as l2_norm_clip= of an optimizer",
    "QuantileAdaptiveClipSumQuery": "use tfdpfl.AdaptiveClip(...) as l2_norm_clip= of an optimizer",
    "QuantileEstimatorQuery": "use tfdpfl.AdaptiveClip(...) as l2_norm_clip= of an optimizer",
    "TreeCumulativeSumQuery": _TREE,
    "TreeResidualSumQuery": _TREE,
    "QAdaClipTreeResSumQuery": f"{_TREE}, with tfdpfl.AdaptiveClip(...)",
    "RestartQuery": _TREE,
    "DiscreteGaussianSumQuery": "pass secure_noise=True to an optimizer",
    "DistributedDiscreteGaussianSumQuery": _CLIENTS,
    "DistributedSkellamSumQuery": _CLIENTS,
    "NoPrivacySumQuery": "use the optimizer of Keras",
    "NoPrivacyAverageQuery": "use the optimizer of Keras",
    "NoPrivacyQuantileEstimatorQuery": "use the optimizer of Keras",
    "DPQuery": _SUMS,
    "SumAggregationDPQuery": _SUMS,
    "clip_and_aggregate_gradients": "use tfdpfl.clipping.clipped_gradients(...)",
    "compute_gradient_norms": "use tfdpfl.clipping.clipped_gradients(...)",
    "LayerRegistry": "use tfdpfl.clipping.register_rule(...)",
    "make_default_layer_registry": "most layers need no rule; tfdpfl.clipping.register_rule(...) adds one",
    "bolt_on": f"{_CONVEX}(solver='output')",
    "logistic_objective_perturbation": f"{_CONVEX}(solver='objective')",
    "logistic_dpsgd": f"{_CONVEX}(solver='gradient')",
    "single_layer_softmax_classifier": f"{_CONVEX}(solver='gradient')",
    "synthetic_linearly_separable_data": _SYNTHETIC,
    "linearly_separable_labeled_examples": _SYNTHETIC,
    "BoltOn": _CONVEX,
    "BoltOnModel": _CONVEX,
    "StrongConvexHuber": _CONVEX,
    "StrongConvexBinaryCrossentropy": _CONVEX,
    "DPBinaryClassHead": _ANY_MODEL,
    "DPMultiClassHead": _ANY_MODEL,
    "DNNClassifier": _ANY_MODEL,
    "membership_inference_attack": "use tfdpfl.audit.membership_inference(...)",
    "run_attacks": "use tfdpfl.audit.membership_inference(...)",
    "AttackInputData": "use tfdpfl.audit.membership_inference(...)",
    "MembershipInferenceCallback": "use tfdpfl.audit.membership_inference(...)",
    # Opacus
    "PrivacyEngine": _ONE_LINE,
    "make_private": _ONE_LINE,
    "make_private_with_epsilon": "use tfdpfl.plan(x, y, target_epsilon=..., delta=..., batch_size=..., num_epochs=...)",
    "GradSampleModule": "use tfdpfl.clipping.clipped_gradients(...) in a tf.function; models stay as they are",
    "DPOptimizer": "use tfdpfl.make_dp_optimizer_class(your_optimizer_class), or tfdpfl.DPAdam",
    "ModuleValidator": "use tfdpfl.clipping.validate(model, batch) and tfdpfl.clipping.fix(model)",
    "BatchMemoryManager": "use gradient_accumulation_steps= of an optimizer, or physical_batch_size= of "
    "tfdpfl.data.poisson_batches",
    "DPDataLoader": "use tfdpfl.data.poisson_batches(...)",
    "UniformWithReplacementSampler": "use tfdpfl.data.poisson_batches(...)",
    "get_noise_multiplier": "use tfdpfl.compute_noise_multiplier(...)",
    "register_grad_sampler": "use tfdpfl.clipping.register_rule(...)",
    "RDPAccountant": f"{_LEDGER}, with accountant='rdp'",
    "PRVAccountant": f"{_LEDGER}, with accountant='pld'",
    "GaussianAccountant": f"{_LEDGER}, with accountant='pld'",
    "create_accountant": _LEDGER,
    "DPLSTM": _KERAS_LAYER,
    "DPGRU": _KERAS_LAYER,
    "DPRNN": _KERAS_LAYER,
    "DPMultiheadAttention": _KERAS_LAYER,
    # jax-privacy and optax
    "clipped_grad": "use tfdpfl.clipping.clipped_gradients(...)",
    "clipped_fun": "use tfdpfl.clipping.clipped_gradients(...)",
    "differentially_private_aggregate": "use tfdpfl.DPSGD, or tfdpfl.make_dp_optimizer_class(your_optimizer_class)",
    "dpsgd": "use tfdpfl.DPSGD",
    "gaussian_privatizer": "use tfdpfl.DPSGD",
    "matrix_factorization_privatizer": "use noise=tfdpfl.noise.Banded(...) or tfdpfl.noise.BLT(...) in an optimizer",
    "DpsgdTrainingAccountant": _LEDGER,
    "calibrate_noise_multiplier": "use tfdpfl.compute_noise_multiplier(...)",
    "calibrate_num_updates": "use tfdpfl.compute_num_steps(...)",
    "CyclicPoissonSampling": "use tfdpfl.data.cyclic_poisson(...)",
    # diffprivlib
    "LogisticRegression": "use tfdpfl.convex.DPLogisticRegression",
    "BudgetAccountant": "use tfdpfl.PrivacyLedger",
}


def sentence(name: str, modules: Iterable[str], names: Iterable[str]) -> str:
    """Says where a name is that `tfdpfl` itself does not have, or what to use in its place."""
    fact = f"module 'tfdpfl' has no attribute {name!r}"
    if name in ELSEWHERE:
        return f"{fact}: {ELSEWHERE[name]}."
    places = _places(tuple(modules))
    if name in places:
        return f"{fact}: it is tfdpfl.{places[name]}.{name}."
    known = {**{n: f"tfdpfl.{place}.{n}" for n, place in places.items()}, **{n: f"tfdpfl.{n}" for n in names}}
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f"{fact}: did you mean {known[close[0]]}?" if close else f"{fact}."


@functools.cache
def _places(modules: tuple[str, ...]) -> dict[str, str]:
    """The module of each public name, as the source files list them: to import all modules takes seconds."""
    found: dict[str, str] = {}
    folder = Path(__file__).parent
    for module in modules:
        for path in (folder / module / "__init__.py", folder / f"{module}.py"):
            source = path.read_text("utf-8") if path.exists() else ""
            for below in re.findall(r"^from tfdpfl\.(\S+) import \*", source, re.M):
                source += folder.joinpath(*below.split(".")).with_suffix(".py").read_text("utf-8")
            lists = re.findall(r"^(?:__all__|_WHERE)\b[^=\n]*= [\[{](.*?)[\]}]$", source, re.M | re.S)
            names = re.findall(r"\"(\w+)\"", "".join(lists)) or re.findall(
                r"^(?:def|class) ([a-zA-Z]\w*)", source, re.M
            )
            for name in names:
                found.setdefault(name, module)
    return found


# What others call an argument, where it is not like its name here.
_ARGUMENTS = {"clip": "l2_norm_clip", "max_grad_norm": "l2_norm_clip", "n": "num_examples", "sigma": "noise_multiplier"}


def unexpected(function: str, name: str, known: Iterable[str]) -> str:
    """Returns what a TypeError says of an argument that a function does not have."""
    known = list(known)
    close = [_ARGUMENTS[name]] if _ARGUMENTS.get(name) in known else difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"help({function}) lists those that it has."
    return f"{function}() got an unexpected keyword argument {name!r}: {hint}"


def accept_old_names(**new_of_old: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Returns a decorator whose functions also accept arguments by the names that they had before, with a warning."""

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def renamed(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for old, new in new_of_old.items():
                if old in kwargs and new not in kwargs:
                    warnings.warn(f"{old}= has a new name: write {new}=.", DeprecationWarning, stacklevel=2)
                    kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return renamed

    return decorate
