"""The arguments that describe a run, stated once for every function that accepts them.

A function declares `**run: Unpack[RunArguments]`, so that a type checker knows each argument, and `shows_arguments`
shows them to `help` and to editors that look at the signature. `build_run` turns them into a `Run`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ParamSpec, TypedDict, TypeVar, get_type_hints

from tfdpfl._names import unexpected
from tfdpfl.accounting.run import NoiseArguments, Run

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "EndlessRunArguments",
    "LedgerArguments",
    "NoiselessRunArguments",
    "RunArguments",
    "SizelessRunArguments",
    "StepArguments",
    "build_run",
    "shows_arguments",
]

P = ParamSpec("P")
R = TypeVar("R")


class _Examples(TypedDict):
    num_examples: int


class SamplingArguments(_Examples, total=False):
    """Holds what is drawn, how, and for which neighbours it is priced; see `Run`."""

    sampling: str
    adjacency: str | None
    max_examples_per_user: int
    truncated_batch_size: int | None
    unit: str


class _Options(SamplingArguments, NoiseArguments, total=False):
    pass


class StepArguments(NoiseArguments, total=False):
    """Holds what an optimizer knows of its own steps next to their noise and number."""

    adjacency: str | None
    truncated_batch_size: int | None
    unit: str


class _Length(TypedDict, total=False):
    num_epochs: float | None
    num_steps: int | None


class _Noise(TypedDict):
    noise_multiplier: float


class _BatchSize(TypedDict):
    batch_size: int


class _Batches(_BatchSize, total=False):
    num_microbatches: int | None


class LedgerArguments(_Options, _Batches):
    """Holds what a ledger needs to know of steps next to their noise and number."""


class RunArguments(_Options, _Batches, _Noise, _Length):
    """A whole run."""


class NoiselessRunArguments(_Options, _Batches, _Length):
    """A run whose noise multiplier is searched for."""


class EndlessRunArguments(_Options, _Batches, _Noise):
    """A run whose number of steps is searched for."""


class SizelessRunArguments(_Options, _Noise, _Length):
    """A run whose batch size is searched for."""


def build_run(**arguments: Unpack[RunArguments]) -> Run:
    """Returns the run that the arguments describe."""
    return Run(**arguments)


def shows_arguments(shared: type, like: Callable = Run) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Makes a function that ends in `**run` refuse all arguments but those of `shared`, and show them.

    Args:
        shared: A `TypedDict`.
        like: Has its keys as arguments. Their order and their defaults are those, and None where it has none.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = _with(shared, inspect.signature(like).parameters, function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs.keys() - signature.parameters.keys():
                raise TypeError(unexpected(function.__name__, name, signature.parameters))
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() {error}") from None
            return function(*args, **kwargs)

        checked.__signature__ = signature  # type: ignore[attr-defined]
        checked.__annotations__ = {p.name: p.annotation for p in signature.parameters.values() if p.name != "self"} | {
            "return": signature.return_annotation
        }
        return checked

    return decorate


def _with(shared: type, like: Mapping[str, inspect.Parameter], function: Callable) -> inspect.Signature:
    """Returns the signature of a function with the keys of `shared` in place of its `**run`: required ones first."""
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    order = ["target_epsilon", *like, "delta"]
    ahead, named = ([p for p in own if (p.kind is p.KEYWORD_ONLY) == keyword] for keyword in (False, True))
    for name, kind in get_type_hints(shared).items():
        required = name in shared.__required_keys__  # type: ignore[attr-defined]
        default = inspect.Parameter.empty if required else like[name].default if name in like else None
        named.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind))
    named.sort(key=lambda p: (p.default is not p.empty, order.index(p.name) if p.name in order else len(order)))
    return signature.replace(parameters=[*ahead, *named])
