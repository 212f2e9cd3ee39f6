"""Wrappers that make any strategy of Flower's Message API private for its clients.

Whatever a client does, the server clips what it returned, sums without weights, and adds noise for the clip that it
applied. It hands the wrapped strategy one reply with the noisy mean. All that the strategy makes of it (momentum,
Adam) is post-processing.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np

from tfdpfl import _replay_hook
from tfdpfl._formats import NewerFormatError
from tfdpfl._names import accept_old_names
from tfdpfl._types import Json, Promiser
from tfdpfl.accounting import PrivacyLedger, _checks
from tfdpfl.accounting.pricing import check_accountant, check_delta
from tfdpfl.accounting.promises import Promise, of_seed
from tfdpfl.accounting.report import rounded_up
from tfdpfl.clips import check_adapted
from tfdpfl.errors import PrivacyError
from tfdpfl.federated.clip import AdaptiveClip, NoisedMetrics, combined
from tfdpfl.federated.guarantees import ClientLevel, CorrelatedLevel
from tfdpfl.federated.privacy import (
    Participation,
    RoundsRun,
    check_target,
    covered_by,
    no_room,
    notes_on_delta,
    within,
)
from tfdpfl.flower._flwr import (
    COMPARE,
    ArrayRecord,
    ConfigRecord,
    Grid,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
    Result,
    Strategy,
    arrays_of,
    as_before,
    log,
    only,
    packed,
    record_of,
    unpacked,
)
from tfdpfl.flower.cohorts import Cohorts, SteadyNodes
from tfdpfl.flower.correlated import Rows
from tfdpfl.flower.journal import Journal
from tfdpfl.flower.local import Normals
from tfdpfl.flower.metrics import Asked
from tfdpfl.flower.monitor import Monitor
from tfdpfl.flower.register import Register
from tfdpfl.flower.reports import promises_of_clients, report_in
from tfdpfl.flower.rounds import Round, open_round
from tfdpfl.flower.spent import Draw, Settings
from tfdpfl.flower.updates import ClippedSum
from tfdpfl.noise.strategies import Noise, as_noise

__all__ = ["DifferentialPrivacy", "DifferentialPrivacyAdaptiveClipping", "DifferentialPrivacyFixedClipping"]

UNPROTECTED = "unprotected"


@dataclasses.dataclass
class Collected:
    """Holds what the answers of a round add up to: the sum of clipped updates, sums of metrics, half the number of
    norms within the clip less half that of the others, and the clients whose update is in the sum."""

    total: ClippedSum
    metrics: np.ndarray
    count: float = 0.0
    replied: list[str] = dataclasses.field(default_factory=list)


def _checked_strategy(strategy: object) -> Strategy:
    if not isinstance(strategy, Strategy):
        raise ValueError(
            f"strategy must be one of flwr.serverapp.strategy, got {strategy!r}: strategies of flwr.server are "
            "older and have no messages."
        )
    if isinstance(strategy, (*COMPARE, DifferentialPrivacy)):
        raise ValueError(
            f"strategy={type(strategy).__name__} needs the replies of single clients, of which nobody may see more "
            "than a noisy mean. Give FedAvg, FedAvgM, FedProx, FedAdam, FedAdagrad or FedYogi."
        )
    return strategy


class DifferentialPrivacy(Strategy):
    """Holds what the wrappers share: whom they ask, what counts of an answer, noise, ledger. Use one of those below."""

    _limit = "target_epsilon"  # what ends a training

    @accept_old_names(clip="l2_norm_clip")
    def __init__(
        self,
        strategy: Strategy,
        *,
        noise_multiplier: float,
        l2_norm_clip: float | AdaptiveClip | None = None,
        delta: float,
        clients_per_round: int | None = None,
        sampling_rate: float | None = None,
        population: int | None = None,
        max_participations: int | None = None,
        min_separation: int = 1,
        target_epsilon: float | None = None,
        ledger_path: str | os.PathLike | None = None,
        train_metrics: NoisedMetrics | None = None,
        evaluate_metrics: NoisedMetrics | str | None = None,
        accountant: str = "pld",
        noise: Noise | None = None,
        clients: Callable[[int], str | None] | None = None,
        register_path: str | os.PathLike | None = None,
        client_epsilon: float | None = None,
        monitor_folder: str | os.PathLike | None = None,
        seed: int | None = None,
    ):
        clip = self._checked_clip(l2_norm_clip)
        self.strategy = _checked_strategy(strategy)
        z = _checks.real("noise_multiplier", noise_multiplier, "give the noise's std over the clip", at_least=0)
        self.delta = check_delta(delta)
        self.accountant = check_accountant(accountant)
        self.target_epsilon = target_epsilon
        check_target(target_epsilon)
        self._train_metrics, self._evaluate_metrics = train_metrics, evaluate_metrics
        self._unprotected = evaluate_metrics == UNPROTECTED
        self._of_training = Asked("train_metrics", train_metrics)
        self._of_evaluation = Asked("evaluate_metrics", None if self._unprotected else evaluate_metrics)
        self._noise = noise
        if noise is not None:
            max_participations, min_separation = _limits_with(
                noise, clip, sampling_rate, max_participations, min_separation
            )
        self._rows: Rows | None = None
        self._past: list[np.ndarray] | None = None  # what correlated noise keeps of the rounds that were charged
        draw = Draw(sampling_rate, clients_per_round, max_participations, min_separation, population)
        self._cohorts = Cohorts(draw, seed, clients)
        self._clip, self.current_clip = clip, clip.initial if isinstance(clip, AdaptiveClip) else float(clip)
        self._noise_multiplier = z
        self.privacy = self._levels()
        of_training = None if noise is None else train_metrics  # else they are in `privacy`
        self._settings = Settings(self.privacy, draw, of_training, evaluate_metrics)
        if isinstance(clip, AdaptiveClip) and self._cohorts.denominator is not None:
            clip.split(z, self._cohorts.denominator)  # refuses a count that costs too much before anything runs
        self._seed = seed
        self._normals = Normals(seed)
        self._open: Round | None = None
        self._evaluated: Round | None = None
        self._fitting = 0  # so many rounds are known to be within the target
        self._done = 0  # rounds that a training which goes on had before
        self._told = self._told_of_statistics = False
        self.stopped_by: str | None = None
        self.client_reports: dict[int, Json] = {}
        self.newer_clients: dict[int, str] = {}
        self._journal = self._opened(ledger_path)
        self._monitor = None if monitor_folder is None else Monitor(monitor_folder, sampling_rate is None)
        self._register = self._joined(register_path, client_epsilon, ledger_path)

    def _opened(self, path: str | os.PathLike | None) -> Journal:
        """Opens the ledger of the training that begins or goes on, and says where it is."""
        header = {
            "privacy": list(self._settings.privacy),
            "noise_multiplier": self._noise_multiplier,
            "clip": self._clip,
            "sampling": dataclasses.asdict(self._settings.sampling),
            "train_metrics": self._settings.train_metrics,
            "evaluations": self._settings.evaluations,
        }
        journal = Journal(path, header)
        began = bool(journal.charged) or journal.begun is not None
        if self._seed is not None and began:
            journal.close()
            raise PrivacyError(
                f"seed={self._seed!r} with a ledger that has rounds: the noise of the first of them would be drawn "
                "again. seed is for tests; leave it out."
            )
        if path is not None:
            place = os.path.abspath(path)
            log.info("Ledger %s: %d rounds are charged", place, len(journal.charged))
            if not began and not os.path.isabs(path):
                log.warning(
                    "ledger_path=%r is looked for in the folder that this process runs in, and a new ledger begins at "
                    "%s. A server that is started elsewhere would not find it: give the whole path", path, place,
                )  # fmt: skip
        return journal

    def _checked_clip(self, clip: float | AdaptiveClip | None) -> float | AdaptiveClip:
        advice = "give the largest L2 norm of an update, or use the adaptive strategy"
        return _checks.real("l2_norm_clip", clip, advice, above=0)

    def _levels(self) -> tuple[Promiser, ...]:
        z = self._noise_multiplier
        if self._noise is not None:
            return (CorrelatedLevel(noise=self._noise, noise_multiplier=z),)
        return (ClientLevel(noise_multiplier=combined(z, self._train_metrics.noise_multiplier)
                            if self._train_metrics else z),)  # fmt: skip

    def _joined(
        self, path: str | os.PathLike | None, client_epsilon: float | None, ledger_path: str | os.PathLike | None
    ) -> Register | None:
        self._client_epsilon = client_epsilon
        _checks.optional(
            _checks.real, "client_epsilon", client_epsilon, "give the ε that a client may spend, or None", above=0
        )
        if path is None and client_epsilon is None:
            return None
        try:
            later = "noise" if self._noise is not None else "evaluate_metrics"
            if client_epsilon is not None and (later == "noise" or self._of_evaluation.size):
                raise ValueError(
                    f"client_epsilon={client_epsilon!r} does not go with {later}, by which later rounds cost all "
                    "clients. A client that is not asked any more would then pass client_epsilon. Leave "
                    f"client_epsilon or {later} out."
                )
            if path is None or ledger_path is None:
                raise ValueError(
                    f"register_path={path!r}, client_epsilon={client_epsilon!r}, ledger_path={ledger_path!r}: what "
                    "clients spend outlives a process only in files. Give register_path and ledger_path."
                )
            register, j = Register(path), self._journal
            if register.join(j.run, os.path.abspath(ledger_path), j.header, j.charged, j.begun, j.evaluations):
                log.warning(
                    "The ledger has rounds that register_path=%r lacks. They count for each client that this training "
                    "ever asked; clients that were connected and never asked are not known", str(path),
                )  # fmt: skip
        except BaseException:
            self._journal.close()
            raise
        return register

    # What it promises.

    @property
    def participation(self) -> Participation:
        """States what may be relied on about who is in a round."""
        return self._cohorts.participation

    @property
    def ledger(self) -> PrivacyLedger:
        """All that was released so far, as events; lost rounds that nobody saw are not among them."""
        cohorts = self._cohorts.to_check(self._journal.charged)
        return self._ledger_of(self.rounds_charged, self._journal.evaluations, cohorts)

    @property
    def epsilon(self) -> float:
        """An upper bound on ε, at ``delta``, of all that was released so far: adjacency zero_out, one client."""
        return self.ledger.epsilon(self.delta, self.accountant)

    @property
    def rounds_charged(self) -> int:
        """Rounds that count: those whose result was released, or may have been."""
        return len(self._journal.charged)

    @property
    def cohorts(self) -> list[list[str]]:
        """The clients that each of these rounds asked: names, or node ids. As secret as the sampling is to be."""
        return [*self._journal.charged]

    @property
    def contributors(self) -> list[list[str]]:
        """Those of each cohort whose update is in the sum."""
        return [*self._journal.replied]

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed, and what clients reported of their own; see `tfdpfl.accounting.promises`."""
        return [*self._own_promises(delta), *promises_of_clients(self.client_reports.values())]

    def _own_promises(self, delta: float) -> list[Promise]:
        ledger = self.ledger
        promise = ledger.report(delta).promise("federation", ledger)
        warnings = [*promise.warnings, *(line.strip() for line in self.statement().splitlines()[2:])]
        return [dataclasses.replace(
            promise, unit="client", sampling=self.participation.text(), warnings=warnings,
            notes=covered_by("client"), num_units=self.participation.population,
        )]  # fmt: skip

    def statement(self) -> str:
        """States what was promised, in English."""
        z = self.privacy[0].noise_multiplier
        p = self.participation
        lines = [
            f"{self.rounds_charged} rounds, sampling {p.sampling}, {p.clients_per_round:g} clients a round in the mean",
            f"  client level: epsilon = {rounded_up(self.epsilon)} at delta = {self.delta:g} "
            f"(adjacency zero_out, noise multiplier {z:g}, accountant {self.accountant})",
        ]
        if self._unprotected:
            lines.append("  evaluation metrics are exact, and what they give away is in no epsilon")
        lines += [f"  {note}" for note in (*notes_on_delta(self.delta, p.population), *self._of_seed())]
        return "\n".join(lines)

    def _of_seed(self) -> list[str]:
        return of_seed(self._seed is not None)

    def _ledger_of(self, rounds: int, evaluations: int = 0, cohorts: Sequence[Sequence[str]] = ()) -> PrivacyLedger:
        run = RoundsRun(rounds=rounds, participation=self.participation, cohorts=cohorts)
        return self._settings.ledger(run, evaluations)

    def _fits(self, rounds: int) -> bool:
        """Whether ε stays within the target with so many rounds in all."""
        if self.target_epsilon is None or rounds <= self._fitting:
            return True
        evaluations = rounds if self._of_evaluation.size else 0
        ledger = self._ledger_of(rounds, max(evaluations, self._journal.evaluations))
        fits = within(self.target_epsilon, lambda name: ledger.epsilon(self.delta, name), self.accountant)
        if fits:
            self._fitting = rounds
        return fits

    def _room(self, wanted: int) -> int:
        """How many of ``wanted`` more rounds are within the target."""
        charged = self.rounds_charged
        if self._fits(charged + wanted):
            return wanted
        return bisect.bisect(range(1, wanted), False, key=lambda more: not self._fits(charged + more))

    # A training from its first round to its last.

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """As Flower's: ``num_rounds`` rounds in all, of which a ledger that goes on may have had some.

        It ends early, with the `Result` of the rounds that ran, where one more would pass ``target_epsilon``;
        ``stopped_by`` then says so.

        Raises:
          PrivacyError: ``target_epsilon`` leaves no room for one round, the model is not finite, or the ledger lacks
            rounds of the saved model.
          ValueError: the saved model has other arrays than ``initial_arrays``, or the strategy's
            ``train_metrics_aggr_fn`` needs metrics of single clients.
        """
        self._try_metrics_function(initial_arrays)
        arrays = self._resume(initial_arrays)
        wanted = max(0, num_rounds - self._done)
        if self.target_epsilon is not None:
            self._cohorts.know(grid, self._cohorts.population or 0)
        rounds = self._room(wanted)
        if rounds == 0 and wanted and not self.rounds_charged:
            raise no_room(self.target_epsilon, self.delta, self._ledger_of(1).epsilon(self.delta, self.accountant))
        self.stopped_by = self._limit if rounds < wanted else None
        if self.stopped_by:
            log.info("%s ends the training after round %d", self.stopped_by, self._done + rounds)
        done = self._done
        shifted = None if evaluate_fn is None else lambda number, arrays: evaluate_fn(done + number, arrays)
        result = super().start(
            grid, arrays, rounds, timeout=timeout, train_config=train_config, evaluate_config=evaluate_config,
            evaluate_fn=shifted,
        )  # fmt: skip
        if not result.arrays:
            result.arrays = arrays
        for name in ("train_metrics_clientapp", "evaluate_metrics_clientapp", "evaluate_metrics_serverapp"):
            setattr(result, name, {done + number: metrics for number, metrics in getattr(result, name).items()})
        log.info("%s", self.statement())
        return result

    def summary(self) -> None:
        log.info("\t├──> Differential privacy, %s:", type(self).__name__)
        log.info("\t│\t├── noise multiplier %g, clip %g", self.privacy[0].noise_multiplier, self.current_clip)
        log.info("\t│\t└── delta %g, target epsilon %s", self.delta, self.target_epsilon)
        self.strategy.summary()

    def _resume(self, initial: ArrayRecord) -> ArrayRecord:
        saved = self._journal.load()
        self._done = 0
        if saved is None:
            return initial
        arrays, about = saved

        def below(folder: str) -> dict[str, np.ndarray]:
            return {name.removeprefix(folder): value for name, value in arrays.items() if name.startswith(folder)}

        found = below("model/")
        now = {name: (tuple(a.shape), a.dtype) for name, a in initial.items()}
        then = {name: (value.shape, str(value.dtype)) for name, value in found.items()}
        if now != then:
            raise ValueError(
                f"initial_arrays hold {now}, but the saved model {then}. Continue with the model that the training "
                "began with, or take another ledger_path."
            )
        for attribute, kind in about["strategy"].items():
            setattr(self.strategy, attribute, unpacked(kind, below(f"strategy/{attribute}/")))
        self._done, self.current_clip = about["rounds"], about["clip"]
        self._cohorts.population = about["population"]
        log.info("Goes on after round %d, of %d that were charged", self._done, self.rounds_charged)
        return record_of(found)

    def _save(self, rounds: int, arrays: ArrayRecord) -> None:
        held = {f"model/{name}": value for name, value in arrays_of(arrays).items()}
        kinds = {}
        for attribute, value in vars(self.strategy).items():
            kind, parts = packed(value)
            if kind:
                kinds[attribute] = kind
                held.update({f"strategy/{attribute}/{name}": part for name, part in parts.items()})
        about = {
            "rounds": rounds,
            "charged": self.rounds_charged,
            "clip": self.current_clip,
            "population": self._cohorts.population,
            "strategy": kinds,
        }
        try:
            self._journal.save(held, about)
        except OSError as error:
            log.error("Round %d is charged, but its model could not be saved (%s)", rounds, error)

    # Training.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Messages to the clients of a round; none where the budget is spent or the ledger cannot be written."""
        self._open = None
        chosen = self.strategy.configure_train(self._done + server_round, arrays, config, cast(Grid, SteadyNodes(grid)))
        messages = [*chosen]
        if not messages:
            return []
        base = arrays_of(arrays)
        try:
            ClippedSum(base, 1.0)
        except ValueError as error:
            raise PrivacyError(str(error)) from None
        if isinstance(self._clip, AdaptiveClip):
            check_adapted(self.current_clip)
        self._tell_of_statistics(base)
        self._cohorts.know(grid, len(messages))
        if not self._fits(self.rounds_charged + 1):
            log.info("The next round would pass %s: no messages are sent", self._limit)
            self.stopped_by = self._limit
            return []
        self._know_past()
        try:
            allow = None if self._register is None else self._allow
            messages = self._cohorts.messages(messages, grid, self._journal.charged, self._journal.begun, allow)
            opened = open_round(base, messages, server_round, self._cohorts.name_of)
            if self._register is not None:
                only_asked = self._cohorts.draw.sampling_rate is None
                self._register.settle(self._journal.run, self.rounds_charged, opened.clients.values(), only_asked)
            self._journal.begin([*opened.clients.values()])
        except (OSError, sqlite3.Error) as error:
            log.error("The ledger cannot be written (%s): no messages are sent", error)
            return []
        self._open = opened
        if self._monitor is not None:
            self._monitor.begin()
        return messages

    def _allow(self, clients: Iterable[str]) -> list[str]:
        """Those that may spend one more round; it is written down for them."""
        assert self._register is not None
        clients = [*clients]
        allowed = self._register.reserve(
            self._journal.run, self.rounds_charged, clients, self.delta, self._client_epsilon
        )
        if len(allowed) < len(clients):
            log.info(
                "%d of %d clients have spent client_epsilon and are not asked",
                len(clients) - len(allowed),
                len(clients),
            )
        return allowed

    def _tell_of_statistics(self, base: Mapping[str, np.ndarray]) -> None:
        found = [name for name in base if name.rpartition(".")[2] in ("running_mean", "running_var")]
        if found and not self._told_of_statistics:
            log.warning(
                "The model holds statistics of batches (%s). They share the clip with the weights and get noise as "
                "these do, and a variance may come out negative: let clients send net.named_parameters() in place of "
                "net.state_dict(), or take GroupNorm", ", ".join(found[:3]),
            )  # fmt: skip
        self._told_of_statistics = True

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """The wrapped strategy's result for the noisy mean; nothing where no round began or it cannot be charged."""
        opened, self._open = self._open, None
        if opened is None:
            for reply in replies:
                log.error("A reply of node %d belongs to no round: ignored", reply.metadata.src_node_id)
            return None, None
        clients, clip = self._cohorts.denominator, self.current_clip
        assert clients is not None
        found = self._collected(opened, replies)
        noisy, past = self._noisy(opened, found, clients)
        try:
            if past is not None:
                self._journal.keep(self.rounds_charged + 1, past)
            self._journal.charge(found.replied)
        except OSError as error:
            log.error("Round %d is not released: the ledger cannot be written (%s)", server_round, error)
            return None, None
        self._past = past  # now, and not before, the noise was used
        if self._register is not None:
            try:
                self._register.charged(self._journal.run, self.rounds_charged)
            except (OSError, sqlite3.Error) as error:  # it has the round's clients, and learns the number when it joins
                log.error("The register does not know that round %d is charged (%s)", server_round, error)
        if isinstance(self._clip, AdaptiveClip):
            self.current_clip = self._clip.after(clip, found.count, clients)
        result, about = self._released(self._done + server_round, opened, noisy)
        told = MetricRecord({**(about or {}), "clip": clip, "epsilon": self.epsilon})
        if self._monitor is not None:
            self._show(self._done + server_round, told, opened)
        if self._of_training.size:
            told.update(self._of_training.means(found.metrics, clients))
        return result, told

    def _collected(self, opened: Round, replies: Iterable[Message]) -> Collected:
        """What the answers add up to."""
        asked, clip = self._of_training, self.current_clip
        found = Collected(ClippedSum(opened.base, clip), np.zeros(asked.size))
        for node, reply in opened.valid(replies):
            try:
                self._keep_report(node, reply)
                norm = found.total.add(arrays_of(only(reply.content.array_records, "ArrayRecord")))
            except Exception as error:  # whatever a client sends, the round goes on without it
                log.warning("Node %d counts as if it had not changed the model: %s", node, error)
                norm = math.inf
            found.count += 0.5 if norm <= clip else -0.5
            if math.isfinite(norm):
                found.replied.append(opened.clients[node])
                if asked.size:
                    found.metrics += asked.fractions(node, reply)
        log.info("aggregate_train: %d of %d clients' updates are in the sum", len(found.replied), len(opened.groups))
        return found

    def _noisy(
        self, opened: Round, found: Collected, clients: float
    ) -> tuple[dict[str, np.ndarray], list[np.ndarray] | None]:
        """The model with the noisy mean, and what correlated noise is to keep. The count and the metrics of ``found``
        get their noise, too."""
        parts, clip = found.total.total, self.current_clip
        of_updates, of_count = self._stddevs(clip, clients)
        shapes = [*(part.shape for part in parts.values()), (), found.metrics.shape]
        normals, past = self._drawn(shapes, bool(of_updates), bool(of_count or found.metrics.size))
        counted = [np.array([found.count])] if of_count else []
        stddevs = [of_updates] * len(parts) + [of_count] * len(counted)
        noise = (normal * stddev for normal, stddev in zip(normals, stddevs, strict=False))
        with np.errstate(over="ignore"):
            if of_updates or of_count:
                # Correlated noise has no independent part: each round moves its sum by the clip.
                correlated, z = self._noise is not None, self._noise_multiplier
                _replay_hook.add(
                    [*parts.values(), *counted], noise, [clip] * len(parts) if correlated else stddevs,
                    1.0 if correlated else 1 / z if z else math.inf, moments=not correlated,
                )  # fmt: skip
            noisy = {name: (opened.base[name] + part / clients).astype(opened.base[name].dtype)
                     for name, part in parts.items()}  # fmt: skip
        if counted:
            found.count = float(counted[0][0])
        if self._of_training.size:
            self._of_training.add_noise(found.metrics, normals[-1])
        return noisy, past

    def _released(
        self, server_round: int, opened: Round, noisy: Mapping[str, np.ndarray]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """What the wrapped strategy makes of the noisy mean, once that is charged; it is saved."""
        released = record_of({name: noisy.get(name, w) for name, w in opened.base.items()})
        reply = Message(self._content(released), dst_node_id=0, message_type=MessageType.TRAIN)
        try:
            result, about = self.strategy.aggregate_train(server_round, [reply])
        except Exception:
            # The round is charged. Its mean is kept as the model, so that a server that starts again has it.
            self._save(server_round, released)
            raise
        if result is not None:
            result = record_of(
                {name: as_before(value, opened.base.get(name)) for name, value in arrays_of(result).items()}
            )
            self._save(server_round, result)
        return result, about

    def _show(self, server_round: int, told: Mapping[str, Any], opened: Round) -> None:
        """Shows the round to operators, but not whether an answer could be summed, because that depends on data. The
        monitor leaves out what depends on secret cohorts."""
        assert self._monitor is not None
        target, epsilon = self.target_epsilon, told["epsilon"]
        asked, answered = len(opened.groups), len(opened.answered)
        self._monitor.round(server_round, {
            "epsilon": epsilon, "target_epsilon": target, "delta": self.delta, "clip": told["clip"],
            "epsilon_left": None if target is None else max(0.0, target - epsilon),
            "rounds_charged": self.rounds_charged, "noise_multiplier": self.privacy[0].noise_multiplier,
            "clients_asked": asked, "clients_replied": answered, "dropouts": asked - answered,
            "clients_too_new": sum(node in self.newer_clients for node in opened.groups),
        })  # fmt: skip

    def _content(self, arrays: ArrayRecord) -> RecordDict:
        """The one reply that the wrapped strategy sees of a round."""
        weight = getattr(self.strategy, "weighted_by_key", "num-examples")
        key = getattr(self.strategy, "arrayrecord_key", "arrays")
        return RecordDict({key: arrays, "metrics": MetricRecord({weight: 1.0})})

    def _try_metrics_function(self, arrays: ArrayRecord) -> None:
        """Calls the strategy's function of training metrics once, before a round is charged for its error."""
        aggregate = getattr(self.strategy, "train_metrics_aggr_fn", None)
        if aggregate is None:
            return
        weight = getattr(self.strategy, "weighted_by_key", "num-examples")
        try:
            aggregate([self._content(arrays)], weight)
        except Exception as error:
            raise ValueError(
                f"The strategy's train_metrics_aggr_fn raises {type(error).__name__}: {error}. It gets one reply with "
                f"{weight!r} alone, because metrics of single clients are not private. Leave the function out, and ask "
                "for noisy means with train_metrics=NoisedMetrics(...)."
            ) from error

    # Evaluation by clients.

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The wrapped strategy's messages, if ``evaluate_metrics`` says what may be released of the answers."""
        self._evaluated = None
        if self._evaluate_metrics is None:
            if not self._told:
                log.info("Clients are not asked to evaluate: evaluate_metrics says what may be shown, and it is None")
            self._told = True
            return []
        if not self._unprotected and self._journal.evaluations >= self.rounds_charged:
            return []  # one a round is what the target has room for
        chosen = self.strategy.configure_evaluate(
            self._done + server_round, arrays, config, cast(Grid, SteadyNodes(grid))
        )
        messages = self._cohorts.of_strategy([*chosen])  # a client with two nodes would count twice
        if messages and not self._unprotected:
            self._evaluated = open_round({}, messages, server_round, self._cohorts.name_of)
        return messages

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        if self._unprotected:
            return self.strategy.aggregate_evaluate(self._done + server_round, replies)
        opened, self._evaluated = self._evaluated, None
        if opened is None:
            return None
        asked = self._of_evaluation
        total = np.zeros(asked.size)
        for node, reply in opened.valid(replies):
            total += asked.fractions(node, reply)
        asked.add_noise(total, self._normals([total.shape])[0])
        try:
            if self._register is not None:
                evaluations = self._journal.evaluations + 1
                self._register.evaluated(self._journal.run, evaluations, opened.clients.values())
            self._journal.charge_evaluation()
        except (OSError, sqlite3.Error) as error:
            log.error("The evaluation is not released: the ledger cannot be written (%s)", error)
            return None
        return MetricRecord(dict(asked.means(total, len(opened.groups))))

    # What a round's sum gets.

    def _stddevs(self, clip: float, clients: float) -> tuple[float, float]:
        """Of the noise on the sum of updates, and of that on the count of those within the clip."""
        if isinstance(self._clip, AdaptiveClip):
            of_updates, of_count = self._clip.split(self._noise_multiplier, clients)
            return of_updates * clip, of_count
        return self._noise_multiplier * clip * (1.0 if self._noise is None else self._noise.unit), 0.0

    def _know_past(self) -> None:
        """Reads what correlated noise needs of earlier rounds, where this object did not draw it."""
        if self._noise is not None and self._noise_multiplier and self.rounds_charged and self._past is None:
            self._past = self._journal.kept(self.rounds_charged)

    def _drawn(
        self, shapes: list[tuple[int, ...]], of_updates: bool, of_others: bool
    ) -> tuple[list[np.ndarray], list[np.ndarray] | None]:
        """A round's normals, the last two those of the count and the metrics; and what correlated noise is to keep."""
        if self._noise is None or not of_updates:
            return self._normals(shapes) if of_updates or of_others else [np.zeros(shape) for shape in shapes], None
        self._know_past()
        others = self._normals(shapes[-2:])
        if self._rows is None or self._rows.shapes != shapes[:-2]:
            self._rows = Rows(self._noise, shapes[:-2])
        rows, past = self._rows.row(self._normals.source, self.rounds_charged, self._past)
        return [*rows, *others], past

    def _keep_report(self, node: int, reply: Message) -> None:
        """Keeps what a client said of its own privacy.

        Raises:
          NewerFormatError: the client's tfdpfl is newer than this one, so what it spent would be in no figure.
        """
        try:
            report = report_in(reply)
        except NewerFormatError as error:
            self.newer_clients[node] = str(error)
            raise
        except Exception as error:
            log.warning("Node %d's report on its own privacy is left out: %s", node, error)
            return
        self.newer_clients.pop(node, None)
        if report is not None:
            self.client_reports[node] = report


class DifferentialPrivacyFixedClipping(DifferentialPrivacy):
    """Client-level differential privacy with a clip that stays, around any strategy.

        strategy = DifferentialPrivacyFixedClipping(
            FedAdam(), noise_multiplier=1.0, l2_norm_clip=0.5, sampling_rate=0.1, delta=1e-5, target_epsilon=2.0,
            ledger_path="ledger.jsonl",
        )
        result = strategy.start(grid, ArrayRecord(model.get_weights()), num_rounds=100)
        print(strategy.statement())

    The sum of clipped updates changes by at most the clip in L2 norm when one client contributes nothing in place of
    what it did, whatever clients send. Its noise has a standard deviation of noise_multiplier * clip, drawn as
    `tfdpfl.noise` draws. The mean is over a fixed number of clients, and the wrapped strategy sees nothing else of the
    round. Metrics of clients are released only with noise that is charged. Arrays that are not floating-point stay as
    the server has them.

    A client that sends other arrays, numbers that are not finite, an error, a second answer or nothing counts as one
    that did not change the model, and is logged. Rounds without any client are released, too: their noise is paid.

    Args:
      strategy: one of ``flwr.serverapp.strategy`` that takes a mean, as FedAvg, FedAvgM, FedProx or FedAdam.
      noise_multiplier: the noise's standard deviation over the clip; 0 promises nothing.
      l2_norm_clip: the largest L2 norm of a client's update, over all arrays together.
      delta: δ of every ε.
      clients_per_round: the number that the mean is over. The wrapped strategy chooses whom it asks, and no privacy
        is claimed for the choice.
      sampling_rate: in its place: each connected client is asked in each round by a coin of this probability, and ε
        is amplified by it. The mean is over sampling_rate * population.
      population: the number of clients, which counts as public; None for those connected as the first round begins.
      max_participations: with clients_per_round, the most rounds that a client is asked in. A client is known by its
        node's id unless ``clients`` names it, so give nodes keys: without, a restarted node is a new client.
      min_separation: with clients_per_round, the fewest rounds from a client's participation to its next.
      target_epsilon: ends the training, with its `Result`, before ε passes it.
      ledger_path: a file to which every round is written before it is released, with the last model beside it. A
        server that was killed goes on from there: no release is forgotten, and no noise is used twice.
      train_metrics: None releases no training metric. `NoisedMetrics` with a bound for each name releases noisy means
        over clients.
      evaluate_metrics: the same for what clients find when they evaluate, each evaluation being charged. Or
        "unprotected", which passes on exact values, for data whose privacy is nobody's concern.
      accountant: "pld" or "rdp".
      noise: `tfdpfl.noise.Tree`, `Banded`, `BandedInverse` or `BLT` takes back in later rounds a part of the noise of
        earlier ones, so that the model has less of it. None draws each round's by itself. With clients_per_round: the
        strategy keeps each client to ``max_participations`` and ``min_separation``, or, where they are not given, to
        those that the noise was made for, and ε is that of the rounds that ran within them. The part of the noise that
        later rounds need is next to the ledger, and is a secret. Anyone who has it can take off some of the noise.
      clients: takes a node's id and returns the name of its client, as `Roster` does. A client then goes on under its
        name when its node gets another id. One that has several nodes is asked through one of them. A node for
        which it returns None is not asked. None takes each node for a client.
      register_path: a SQLite database, which several runs may share, of the rounds that each client could have been in.
        It needs ``ledger_path``. `tfdpfl ledger clients` prints what each client has spent over all runs.
      client_epsilon: with register_path, the ε at ``delta`` that no client passes over all runs. A client that has
        spent it is not asked any more, and the training continues with the others. Not with ``noise`` or noisy
        ``evaluate_metrics``, because then later rounds also cost the clients that are not asked.
      monitor_folder: a folder for what an operator may see of each round: ``metrics.prom`` for Prometheus,
        ``rounds.jsonl``, and a page, ``index.html``, that reads the latter. With sampling_rate it holds no sizes of
        cohorts and no times, which would reveal who took part.
      seed: for tests only. None takes the operating system's entropy, for noise and cohorts.

    Attributes:
      privacy: the guarantees, one `ClientLevel`, or with ``noise`` a `CorrelatedLevel`.
      epsilon, ledger: of what was released so far.
      current_clip: the clip of the next round.
      stopped_by: "target_epsilon" if that ended the training, else None.
      client_reports: by node, what clients said of their own privacy (see `example_dp`).
      newer_clients: by node, why an answer does not count: the client's tfdpfl is newer, in a way that the server does
        not know. As secret as the cohorts.

    Raises:
      ValueError: an argument is out of its range or does not go with another; or the strategy compares clients.
      PrivacyError: ``ledger_path`` is of another training.

    Source: McMahan et al. 2018, arXiv:1710.06963, algorithm 1.
    """


class DifferentialPrivacyAdaptiveClipping(DifferentialPrivacy):
    """`DifferentialPrivacyFixedClipping` whose clip follows a quantile of the updates' norms.

    The clip moves after a round's noise was drawn for it, by a count of unclipped clients that has noise as well. Both
    together cost what ``noise_multiplier`` says.

    Args:
      l2_norm_clip: a `tfdpfl.AdaptiveClip`; None takes one with its defaults.
      The others: as for `DifferentialPrivacyFixedClipping`.

    Source: Andrew et al. 2021, arXiv:1905.03871.
    """

    def _checked_clip(self, clip: float | AdaptiveClip | None) -> AdaptiveClip:
        if clip is not None and not isinstance(clip, AdaptiveClip):
            raise ValueError(
                f"l2_norm_clip={clip!r} is no tfdpfl.AdaptiveClip, so this strategy could not move it. Pass "
                f"AdaptiveClip(initial={clip!r}), or use DifferentialPrivacyFixedClipping."
            )
        return AdaptiveClip() if clip is None else clip


def _limits_with(
    noise: Noise, clip: object, sampling_rate: object, max_participations: int | None, min_separation: int
) -> tuple[int | None, int]:
    """The limits on a client's rounds: those given, or else those that the noise was made for."""
    noise = as_noise(noise)
    if isinstance(clip, AdaptiveClip):
        raise ValueError(
            "noise goes with a fixed clip: where the clip moves, rounds take back noise of another size than was "
            "added. Take DifferentialPrivacyFixedClipping."
        )
    if sampling_rate is not None:
        raise ValueError(
            f"noise goes with clients_per_round: correlated noise has no price for a coin in every round "
            f"(sampling_rate={sampling_rate!r})."
        )
    most = noise.max_participations if max_participations is None else max_participations
    return most, noise.min_separation if min_separation == 1 else min_separation
