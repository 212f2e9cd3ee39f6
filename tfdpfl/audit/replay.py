"""Record and replay: two runs on neighbouring data that get the same noise, and what differs between them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from tfdpfl import _replay_hook
from tfdpfl._types import Arrays, Json, Keywords, Nest
from tfdpfl.accounting import ADJACENCIES, _checks

__all__ = ["Finding", "ReplayReport", "replay"]

_ROOT = Path(_replay_hook.__file__).resolve().parents[1]

_ROUNDING = 1e-4  # float32's sums of a batch
_DEVIATIONS = 7.0  # by which the size of noise is found wrong
_ENOUGH = 64.0  # numbers of noise, below which its size is not judged
_START = 8  # by as many first numbers noise is known again


@dataclasses.dataclass(frozen=True)
class Finding:
    """Describes a difference that must not be there.

    Attributes:
      kind: ``"sensitivity"``: a release moves by more than it is charged for; ``"noise"``: its noise is not of the size
        that is charged, is not in what is let out, or was there before; ``"public"``: shapes, noise, denominators or
        charges hang on the data; ``"order"``: which releases there are hangs on them; ``"result"``: what is returned
        differs although all noisy values are the same, so something goes round the noise; ``"epsilon"``: the losses
        add up to more than the claim.
      where: file and line of the release; of a result, its name in what is returned.
      message: what was seen.
    """

    kind: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.where}: {self.message}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayReport:
    """Holds the result of `replay`.

    Attributes:
      findings: of each kind the first one, at each place; none where all is as it is charged.
      releases: how many there were.
      places: files and lines of them.
      moved: the most that a release with added noise moved, over what it is charged for: at most 1 where all is well.
        Well below 1 the neighbours show little: take an example whose gradient is clipped.
      epsilon: ε of these two inputs by the mechanisms that are pure, from what moved; a lower bound of the claim.
      mu: the same by those with Gaussian noise, in Gaussian DP's μ.
      adjacency: of the charges that were compared.
    """

    findings: tuple[Finding, ...]
    releases: int
    places: tuple[str, ...]
    moved: float
    epsilon: float
    mu: float
    adjacency: str

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def to_dict(self) -> Json:
        """The fields, JSON-ready."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        head = (
            f"replay of {self.releases} releases at {len(self.places)} places ({self.adjacency}): moved by at most "
            f"{self.moved:.3f} of the charge, epsilon ≥ {self.epsilon:.3f}, mu ≥ {self.mu:.3f}"
        )
        return "\n".join([head, *map(str, self.findings or ["nothing found"])])


class _Tape:
    def __init__(self, first: _Tape | None = None):
        self.seen: list[_replay_hook.Release] = []
        self._first = first

    def take(self, release: _replay_hook.Release) -> list[np.ndarray]:
        at = len(self.seen)
        self.seen.append(release)
        recorded = self._first.seen[at] if self._first is not None and at < len(self._first.seen) else release
        if release.where != recorded.where or _shapes(release) != _shapes(recorded):
            recorded = release  # cannot be handed over; told by the comparison
        return [out.copy() for out in recorded.out]


def replay(
    mechanism: Callable[[Arrays], Arrays],
    data: Arrays,
    neighbour: Arrays,
    *,
    adjacency: str = "replace_one",
    epsilon: float | None = None,
) -> ReplayReport:
    """Runs a mechanism on two neighbouring inputs with the same noisy values, and tells what else differs.

        def train(data):
            tf.keras.utils.set_random_seed(0)
            model = make_model()
            model.compile(DPSGD(...), loss)
            model.fit(*data, shuffle=False)
            return model

        print(replay(train, (x, y), (x, y_with_another_label)))

    The first run records what enters each noise, and what comes out. In the second one the same comes out, whatever
    enters. So both have the same weights after each step. What enters can differ only by what the step in hand
    makes of the data: by no more than the step is charged for. All else must be equal: which releases there are, their
    shapes, noise and denominators, and what is returned. It is deterministic, but for the size of the noise. This is
    tested at seven standard deviations where there are at least 64 numbers of it.

    Seen is noise of the optimizers (not on several replicas, and not in a step that XLA compiles), of the label
    mechanisms, of PATE's aggregators, of `tfdpfl.convex` but for objective perturbation, and of the Flower strategies
    and mods in one process. Not seen are TFF's aggregators, which are serialised, PATE's smooth sensitivity,
    `tfdpfl.AdaFEST`'s rows and counts (which then show as what goes round the noise), and noise of your own. It shows
    nothing of other data than these: take neighbours that are far apart, and a clip that clips.

    Args:
      mechanism: takes the data, builds all that it needs, and returns what it releases: arrays, numbers, strings, Keras
        models (all their weights), in any nest of lists, tuples and mappings. But for the package's noise it must do
        the same each time: set the seeds in it. Metrics of the training data are no release: leave them out, or find
        them.
      data: whatever it takes.
      neighbour: the same, with one unit more, less, or another. Under ``"zero_out"`` one that does nothing takes its
        place, for instance an example with weight 0.
      adjacency: ``"replace_one"``, ``"zero_out"`` or ``"add_or_remove_one"``: how the two differ.
      epsilon: what the pure mechanisms in it claim together; None compares each with its own charge alone.

    Raises:
      ValueError: an argument is out of its range; nothing was released where it can be seen; the mechanism does not do
        the same twice on the same data. Or a replay is running already.

    Source: arXiv:2602.17454.
    """
    adjacency = _checks.choice("adjacency", adjacency, ADJACENCIES)
    _checks.optional(_checks.real, "epsilon", epsilon, "what the mechanism claims", at_least=0)
    first = _Tape()
    one = _run(mechanism, data, first)
    if not first.seen:
        raise ValueError(
            "the replay saw no release of mechanism: build and compile the model in it, on one device and with "
            "jit_compile=False; noise of TFF's aggregators, and of your own, cannot be seen"
        )
    second = _Tape(first)
    other = _run(mechanism, neighbour, second)
    report = _compared(first, one, second, other, adjacency, epsilon)
    if report.ok:
        return report
    again = _Tape(first)
    same = _compared(first, one, again, _run(mechanism, data, again), adjacency, None)
    by_itself = [f for f in same.findings if f.kind != "noise"]
    if by_itself:
        raise ValueError(
            f"mechanism does two different things on the same data ({by_itself[0]}): set all seeds inside of it, also "
            "that of shuffle, and build everything anew in each call"
        )
    return report


def _run(mechanism: Callable[[Arrays], Arrays], data: Arrays, tape: _Tape) -> dict[str, np.ndarray]:
    if _replay_hook.tape is not None:
        raise ValueError("a replay is running already: one at a time in a process")
    _replay_hook.tape = tape
    try:
        return dict(_flat(mechanism(data), "result"))
    finally:
        _replay_hook.tape = None


def _flat(result: Nest, name: str) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of all that is returned."""
    if hasattr(result, "get_weights") and hasattr(result, "weights"):
        for i, (weight, value) in enumerate(zip(result.weights, result.get_weights(), strict=True)):
            # Before the last part are numbers that the process counts up.
            last = getattr(weight, "path", weight.name).split("/")[-1].split(":")[0]
            yield f"{name}.weights[{i}] ({last})", np.asarray(value)
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _flat(value, f"{name}[{key!r}]")
    elif isinstance(result, list | tuple):
        yield f"len({name})", np.asarray(len(result))
        for i, value in enumerate(result):
            yield from _flat(value, f"{name}[{i}]")
    elif result is not None:
        value = np.asarray(result)
        if value.dtype == object and not all(isinstance(v, str | int | float | None) for v in value.ravel()):
            raise ValueError(f"mechanism must return arrays, models, or nests of them, got {type(result).__name__}")
        yield name, value


def _shapes(release: _replay_hook.Release) -> list[tuple]:
    return [(v.shape, v.dtype.str) for v in release.values]


def _public(release: _replay_hook.Release) -> Keywords:
    return {
        "shapes": _shapes(release),
        "noise or denominator": release.scales,
        "charge": [release.bound, release.replaced],
        "norm": release.norm,
    }


def _place(where: str) -> str:
    """Returns ``tfdpfl/...`` for a line of this package, and the last two parts of any other path."""
    path = Path(where)
    return (path.relative_to(_ROOT) if path.is_relative_to(_ROOT / "tfdpfl") else Path(*path.parts[-2:])).as_posix()


def _compared(
    first: _Tape, one: dict, second: _Tape, other: dict, adjacency: str, epsilon: float | None
) -> ReplayReport:
    compared = _Comparison(adjacency)
    compared.add_releases(first.seen, second.seen)
    for where, message in _misused(first.seen, second.seen):
        compared.tell("noise", where, message)
    for where, size in _sizes([*first.seen, *second.seen]).items():
        compared.tell("noise", where, f"the noise is {size:.3g} times what is charged, in {_measure(where, first)}")
    if not any(kind in ("order", "public") for kind, _ in compared.findings):
        for name in {**one, **other}:
            if name not in one or name not in other or not _equal(one[name], other[name]):
                compared.tell(
                    "result", name, "differs, although all noisy values are the same: it goes round the noise"
                )
    if epsilon is not None and compared.loss > epsilon * (1 + _ROUNDING):
        where = ", ".join(dict.fromkeys(_place(r.where) for r in first.seen if r.loss is not None or r.norm == 1))
        compared.tell("epsilon", where, f"the losses add up to {compared.loss:.4g}, and the claim is {epsilon:.4g}")
    return ReplayReport(
        findings=tuple(compared.findings.values()),
        releases=len(first.seen),
        places=tuple(dict.fromkeys(_place(r.where) for r in first.seen)),
        moved=compared.most,
        epsilon=compared.loss,
        mu=math.sqrt(compared.mu2),
        adjacency=adjacency,
    )


class _Comparison:
    """What the releases of two runs show, next to each other.

    Attributes:
      findings: by kind and place, the first of each.
      most: the largest movement of a release, over what it is charged.
      loss: the sum of the losses of releases with pure noise.
      mu2: the sum of the squares of the movements of releases with Gaussian noise.
    """

    def __init__(self, adjacency: str):
        self._adjacency = adjacency
        self.findings: dict[tuple[str, str], Finding] = {}
        self.most = self.loss = self.mu2 = 0.0

    def tell(self, kind: str, where: str, message: str) -> None:
        self.findings.setdefault((kind, where), Finding(kind, where, message))

    def add_releases(self, first: list[_replay_hook.Release], second: list[_replay_hook.Release]) -> None:
        for number, (a, b) in enumerate(zip(first, second, strict=False)):
            if a.where != b.where:
                other = _place(b.where)
                self.tell("order", _place(a.where), f"release {number} of the neighbour is another one, at {other}")
                return
            if not self._same_shapes(number, a, b):
                return
            self._add_movement(number, a, b)
        if len(first) != len(second):
            at = min(len(first), len(second))
            where = _place(max(first, second, key=len)[at].where)
            self.tell("order", where, f"{len(first)} and {len(second)} releases")

    def _same_shapes(self, number: int, a: _replay_hook.Release, b: _replay_hook.Release) -> bool:
        public, others = _public(a), _public(b)
        differs = [name for name in public if public[name] != others[name]]
        for name in differs:
            message = f"{name} of release {number} depend on the data: {public[name]} and {others[name]}"
            self.tell("public", _place(a.where), message)
        return "shapes" not in differs

    def _add_movement(self, number: int, a: _replay_hook.Release, b: _replay_hook.Release) -> None:
        charge = a.replaced if self._adjacency == "replace_one" else a.bound
        if a.loss is not None:
            moved = a.loss(a.values[0], b.values[0], a.out[0])
            self.loss += moved
        else:
            rows = _distances(a, b)
            moved = float(rows.max(initial=0.0))
            if a.norm == 1:
                self.loss += float(rows.sum())
            else:
                self.mu2 += float((rows**2).sum())
        if charge > 0:
            self.most = max(self.most, moved / charge)
        if not moved <= charge * (1 + _ROUNDING) + 1e-12:
            message = f"release {number} moves by {moved:.4g} of its noise, and is charged {charge:.4g}"
            self.tell("sensitivity", _place(a.where), message)


def _equal(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))


def _distances(a: _replay_hook.Release, b: _replay_hook.Release) -> np.ndarray:
    """How far the values are apart, in scales of the noise: one number, or one for each row."""
    rows = [
        (np.asarray(x, np.float64) - np.asarray(y, np.float64)).reshape(len(x) if a.by_row else 1, -1) / scale
        for x, y, scale in zip(a.values, b.values, a.scales, strict=True)
    ]
    return np.linalg.norm(np.concatenate(rows, axis=1), ord=a.norm, axis=1)


def _misused(*runs: list[_replay_hook.Release]) -> Iterator[tuple[str, str]]:
    """(place, what is wrong): noise that is not in what is let out, and noise that was there before."""
    known: dict[bytes, tuple[int, int]] = {}
    for run, releases in enumerate(runs):
        for number, release in enumerate(releases):
            where = _place(release.where)
            parts = list(zip(release.values, release.noise or [], release.scales, release.out, strict=False))
            if not all(_is_sum(*part) for part in parts):
                yield where, f"what release {number} lets out is not the values with their noise"
            for _, noise, scale, _ in parts:
                # Eight normals, to four digits, are not the same twice; a few whole numbers may be.
                start = np.asarray(noise, np.float64).ravel()[:_START]
                if start.size < _START or (scale < 1000 and np.array_equal(start, np.round(start))):
                    continue
                key = np.round(start / scale, 4).tobytes()
                if key not in known:
                    known[key] = run, number
                elif known[key][0] == run:
                    yield where, f"the noise of release {number} is that of release {known[key][1]}"
                else:
                    yield where, f"the noise of release {number} is the same in both runs: its seed is no secret"


def _is_sum(value: np.ndarray, noise: np.ndarray, scale: float, out: np.ndarray) -> bool:
    digits = {2: 1e-2, 4: 1e-5}.get(out.dtype.itemsize, 1e-9)
    value, noise, out = (np.asarray(part, np.float64) for part in (value, noise, out))
    with np.errstate(all="ignore"):
        return np.allclose(out, value + noise, rtol=digits, atol=1e-3 * scale, equal_nan=True)


def _sizes(releases: list[_replay_hook.Release]) -> dict[str, float]:
    """Of the places whose noise is not of its size: the noise's standard deviation over the declared one."""
    drawn: dict[str, list[tuple[float, float, float]]] = {}
    for release in releases:
        for noise, scale in zip(release.noise or [] if release.moments else [], release.scales, strict=False):
            drawn.setdefault(_place(release.where), []).append(_moments(np.asarray(noise, np.float64), scale, release))
    wrong = {}
    for where, parts in drawn.items():
        total, mean, variance = np.sum(parts, axis=0)
        # Of fewer than some 70 normals nothing is said: their sum of squares is no normal number yet.
        if mean >= _ENOUGH and not abs(total - mean) <= _DEVIATIONS * math.sqrt(variance):
            wrong[where] = float(total / mean)
    return wrong


def _measure(where: str, tape: _Tape) -> str:
    laplace = any(release.norm == 1 for release in tape.seen if _place(release.where) == where)
    return "mean size" if laplace else "mean square"


def _moments(noise: np.ndarray, scale: float, release: _replay_hook.Release) -> tuple[float, float, float]:
    """The sum of squares, or of Laplace noise the sum of sizes, in scales; its mean and its variance."""
    if release.norm == 2:
        return float(np.sum((noise / scale) ** 2)), noise.size, 2 * noise.size
    mean, square = 1.0, 2.0
    if np.array_equal(noise, np.round(noise)):  # discrete Laplace: closed forms of its geometric series
        a = 1 / scale
        mean, square = a / math.sinh(a), a * a / (2 * math.sinh(a / 2) ** 2)
    return float(np.abs(noise).sum() / scale), noise.size * mean, noise.size * (square - mean**2)
