"""Says where a name is that `tfdpfl` itself does not have, and what to use in place of other packages' names."""

from __future__ import annotations

import difflib
import functools
import importlib
import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

__all__ = ["accept_old_names", "found_in", "sentence", "unexpected"]

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_EVERY = "it clips every example by itself unless you pass num_microbatches"
_NO_QUERY = "give it a clip as l2_norm_clip= and correlated noise as noise=, in place of a query"
_LEDGER = "use tfdpfl.PrivacyLedger, or tfdpfl.callbacks.PrivacyBudget in fit"

# What to use in place of names of TensorFlow Privacy, Opacus, jax-privacy, optax and diffprivlib.
_IN_PLACE_OF = {
    "use tfdpfl.compute_epsilon(...)": "compute_dp_sgd_privacy get_privacy_spent",
    "use tfdpfl.privacy_statement(...)": "compute_dp_sgd_privacy_statement",
    "use tfdpfl.compute_noise_multiplier(...)": "compute_noise get_noise_multiplier calibrate_noise_multiplier",
    "any Keras model trains privately once you compile it with tfdpfl.DPAdam(l2_norm_clip, noise_multiplier)":
    "make_dp_model_class DPModel DPSequential DPBinaryClassHead DPMultiClassHead DNNClassifier",
    "use tfdpfl.make_dp_optimizer_class(...)":
    "make_keras_optimizer_class make_vectorized_keras_optimizer_class make_optimizer_class "
    "make_gaussian_optimizer_class",
    f"use tfdpfl.DPSGD; {_EVERY}": "VectorizedDPKerasSGDOptimizer VectorizedDPSGD VectorizedDPSGDOptimizer",
    f"use tfdpfl.DPAdam; {_EVERY}": "VectorizedDPKerasAdamOptimizer VectorizedDPAdam VectorizedDPAdamOptimizer",
    f"use tfdpfl.DPAdagrad; {_EVERY}": "VectorizedDPKerasAdagradOptimizer",
    "use tfdpfl.DPSGD": "DPGradientDescentGaussianOptimizer DPGradientDescentOptimizer dpsgd gaussian_privatizer",
    "use tfdpfl.DPAdam": "DPAdamGaussianOptimizer",
    "use tfdpfl.DPAdagrad": "DPAdagradGaussianOptimizer",
    "use tfdpfl.DPSGD(..., sparse=tfdpfl.AdaFEST(...))": "DPSparseKerasSGDOptimizer",
    "use tfdpfl.DPAdam(..., sparse=tfdpfl.AdaFEST(...))": "DPSparseKerasAdamOptimizer",
    "use sparse=tfdpfl.AdaFEST(...) in an optimizer": "make_sparse_keras_optimizer_class",
    f"use tfdpfl.DPSGD; {_NO_QUERY}": "GenericDPSGDOptimizer",
    f"use tfdpfl.DPAdam; {_NO_QUERY}": "GenericDPAdamOptimizer",
    f"use tfdpfl.DPAdagrad; {_NO_QUERY}": "GenericDPAdagradOptimizer",
    f"use tfdpfl.make_dp_optimizer_class(...); {_NO_QUERY}":
    "make_keras_generic_optimizer_class make_gaussian_query_optimizer_class",
    "use tfdpfl.DPFTRL": "DPFTRLM DPFTRLTreeAggregationOptimizer",
    "use tfdpfl.noise.Tree(...) as noise= of an optimizer":
    "TreeAggregation tree_aggregation restart_query TreeCumulativeSumQuery TreeResidualSumQuery RestartQuery",
    _LEDGER: "RdpAccountant PLDAccountant create_accountant DpsgdTrainingAccountant",
    "use tfdpfl.compute_epsilon(..., accountant='rdp')": "compute_rdp",
    "use tfdpfl.compute_epsilon(..., sampling='fixed_size')": "compute_rdp_sample_without_replacement",
    "tfdpfl.callbacks.PrivacyBudget computes ε for tfdpfl.noise.Tree(...) as it ran":
    "compute_rdp_tree_restart compute_rdp_single_tree compute_zcdp_single_tree",
    "a DP optimizer clips, sums and adds noise to gradients; tfdpfl.clipping.clipped_gradients(...) clips in your loop":
    "GaussianSumQuery GaussianAverageQuery NormalizedQuery DPQuery SumAggregationDPQuery",
    "use tfdpfl.PerLayerClip(...) as l2_norm_clip= of an optimizer": "NestedQuery",
    "use tfdpfl.AdaptiveClip(...) as l2_norm_clip= of an optimizer":
    "QuantileAdaptiveClipSumQuery QuantileEstimatorQuery",
    "use tfdpfl.noise.Tree(...) as noise= of an optimizer, with tfdpfl.AdaptiveClip(...)": "QAdaClipTreeResSumQuery",
    "pass secure_noise=True to an optimizer": "DiscreteGaussianSumQuery",
    "use a process of tfdpfl.federated, whose clients add the noise":
    "DistributedDiscreteGaussianSumQuery DistributedSkellamSumQuery",
    "use the optimizer of Keras": "NoPrivacySumQuery NoPrivacyAverageQuery NoPrivacyQuantileEstimatorQuery",
    "use tfdpfl.clipping.clipped_gradients(...)":
    "clip_and_aggregate_gradients compute_gradient_norms clipped_grad clipped_fun",
    "use tfdpfl.clipping.register_rule(...)": "LayerRegistry register_grad_sampler",
    "most layers need no rule; tfdpfl.clipping.register_rule(...) adds one": "make_default_layer_registry",
    "use tfdpfl.convex.DPLogisticRegression(solver='output')": "bolt_on",
    "use tfdpfl.convex.DPLogisticRegression(solver='objective')": "logistic_objective_perturbation",
    "use tfdpfl.convex.DPLogisticRegression(solver='gradient')": "logistic_dpsgd single_layer_softmax_classifier",
    "use sklearn.datasets.make_classification(...)":
    "synthetic_linearly_separable_data linearly_separable_labeled_examples",
    "use tfdpfl.convex.DPLogisticRegression":
    "BoltOn BoltOnModel StrongConvexHuber StrongConvexBinaryCrossentropy LogisticRegression",
    "use tfdpfl.audit.membership_inference(...)":
    "membership_inference_attack run_attacks AttackInputData MembershipInferenceCallback",
    "compile your model with tfdpfl.DPAdam(l2_norm_clip, noise_multiplier), or call tfdpfl.plan(...)":
    "PrivacyEngine make_private",
    "use tfdpfl.plan(x, y, target_epsilon=..., delta=..., batch_size=..., num_epochs=...)": "make_private_with_epsilon",
    "use tfdpfl.clipping.clipped_gradients(...) in a tf.function; models stay as they are": "GradSampleModule",
    "use tfdpfl.make_dp_optimizer_class(your_optimizer_class), or tfdpfl.DPAdam": "DPOptimizer",
    "use tfdpfl.clipping.validate(model, batch) and tfdpfl.clipping.fix(model)": "ModuleValidator",
    "use gradient_accumulation_steps= of an optimizer, or physical_batch_size= of tfdpfl.data.poisson_batches":
    "BatchMemoryManager",
    "use tfdpfl.data.poisson_batches(...)": "DPDataLoader UniformWithReplacementSampler",
    f"{_LEDGER}, with accountant='rdp'": "RDPAccountant",
    f"{_LEDGER}, with accountant='pld'": "PRVAccountant GaussianAccountant",
    "use the layer of Keras: tfdpfl clips its gradients as it is": "DPLSTM DPGRU DPRNN DPMultiheadAttention",
    "use tfdpfl.DPSGD, or tfdpfl.make_dp_optimizer_class(your_optimizer_class)": "differentially_private_aggregate",
    "use noise=tfdpfl.noise.Banded(...) or tfdpfl.noise.BLT(...) in an optimizer": "matrix_factorization_privatizer",
    "use tfdpfl.compute_num_steps(...)": "calibrate_num_updates",
    "use tfdpfl.data.cyclic_poisson(...)": "CyclicPoissonSampling",
    "use tfdpfl.PrivacyLedger": "BudgetAccountant",
    "all names of tensorflow_privacy.privacy are in tfdpfl itself, for example tfdpfl.DPKerasSGDOptimizer": "privacy",
}  # fmt: skip
ELSEWHERE = {name: remedy for remedy, names in _IN_PLACE_OF.items() for name in names.split()}


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


def found_in(package: str, where: Mapping[str, str], name: str) -> Any:
    """Returns a package's attribute that is imported when it is first used.

    Args:
      package: the package's full name.
      where: by the attribute's name, the module below the package that has it; a module has its own name.
      name: the attribute's name.

    Raises:
      AttributeError: there is no such attribute.
    """
    if name not in where:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module = importlib.import_module(f"{package}.{where[name]}")
    return module if name == where[name] else getattr(module, name)


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
_ARGUMENTS = {
    "batch_size": "expected_batch_size", "clip": "l2_norm_clip", "max_grad_norm": "l2_norm_clip", "n": "num_examples",
    "sigma": "noise_multiplier",
}  # fmt: skip


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
