"""A federated training from the first round to the last: its bar, its log, its checkpoints, and what it costs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import csv
import dataclasses
import functools
import json
import math
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tqdm.auto import tqdm

from tfdpfl import _files, _formats
from tfdpfl._types import Computation, Dataset, Json, Keywords, Nest, State
from tfdpfl.accounting import _checks
from tfdpfl.accounting.pricing import Price, check_accountant, check_delta, price
from tfdpfl.accounting.promises import Promise
from tfdpfl.accounting.report import rounded_up
from tfdpfl.clips import AdaptiveClip, check_adapted
from tfdpfl.errors import PrivacyError
from tfdpfl.federated import data, runtime
from tfdpfl.federated._tff import client_element, tff
from tfdpfl.federated.checkpoints import LEDGER, STATE, VERSION, Record, Round, completed, runs
from tfdpfl.federated.guarantees import CohortCheck, ExampleLevel
from tfdpfl.federated.privacy import (
    KNOWN_COHORTS,
    Guarantee,
    Participation,
    RoundsRun,
    check_target,
    no_room,
    notes_on_delta,
    promises_of_levels,
    within,
)

if TYPE_CHECKING:
    import pandas

__all__ = ["History", "clients_of", "train"]


class History(Mapping):
    """Holds the course of a training, a mapping from column names to one value a round (NaN where a round has none).

    The columns are the figures of the process (``loss``, ``clip``, …; a private process reports only public ones), the
    results of ``eval_fn``, and the ε so far of each guaranteed level: ``client_epsilon``, ``example_epsilon``,
    ``local_epsilon``. A level without a guarantee has no column. If ε was not computed in a round, it has NaN.

    Attributes:
      rows: the same, a dict for each round.
      delta: δ of every ε.
      adjacency: for each column of ε, the neighbouring relation that it is stated for.
      accountant: for each column of ε, the accountant that proved it.
      participation: what the sampler declared.
      cohorts: the clients of each round, as they were drawn. Secret under Poisson sampling, as is their number.
      left_out: of each round, the clients that it went on without, and why; as secret.
      lost_rounds: rounds that were begun and whose result was lost by a crash; see `train`.
      stopped_by: ``"target_epsilon"`` if the next round would have passed it, else None.
      left_at: the clients whose own budget did not last, and the first round that each was left out of.
      trainings: for each level, what was promised and what ran, for `tfdpfl.federated.total_price`.
      seeded: whether the cohorts come from a seed that someone knows.
      state: the process's last state. May hold the noise's seed: publish the model's weights, not this.
    """

    def __init__(self, delta: float | None, participation: Participation | None):
        self.rows: list[dict[str, float]] = []
        self.delta = delta
        self.adjacency: dict[str, str] = {}
        self.accountant: dict[str, str] = {}
        self.participation = participation
        self.cohorts: list[list[str]] = []
        self.left_out: list[dict[str, str]] = []
        self.lost_rounds = 0
        self.stopped_by: str | None = None
        self.left_at: dict[str, int] = {}
        self.trainings: dict[str, tuple[Guarantee, RoundsRun]] = {}
        self.state: State = None
        self.seeded = False

    def __getitem__(self, column: str) -> list[float]:
        if column not in self._columns():
            raise KeyError(f"no column {column!r} among {self._columns()}")
        return [row.get(column, math.nan) for row in self.rows]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns())

    def __len__(self) -> int:
        return len(self._columns())

    def _columns(self) -> list[str]:
        return list(dict.fromkeys(name for row in self.rows for name in row))

    @property
    def epsilon(self) -> dict[str, float]:
        """For each level that is promised, ε of all that ran; nothing before the first round."""
        last = self.rows[-1] if self.rows else {}  # a training's last row is always priced
        return {column.removesuffix("_epsilon"): last[column] for column in self.adjacency if column in last}

    def promises(self, delta: float) -> list[Promise]:
        """Returns what is guaranteed; see `tfdpfl.accounting.promises`."""
        return promises_of_levels(self.trainings, self.lost_rounds, self.seeded)

    def statement(self) -> str:
        """Returns the guarantee in English: the ε of each level, rounded up, with its conditions."""
        if not self.epsilon or self.participation is None:
            return "No privacy is promised."
        p = self.participation
        lines = [f"{len(self.rows)} rounds, sampling {p.sampling}, {p.clients_per_round:g} of {p.population} clients"]
        for level, epsilon in self.epsilon.items():
            column = f"{level}_epsilon"
            lines.append(
                f"  {level} level: epsilon = {rounded_up(epsilon)} at delta = {self.delta:g} "
                f"(adjacency {self.adjacency[column]}, accountant {self.accountant[column]})"
            )
        if self.seeded:
            lines.append(f"  {KNOWN_COHORTS}")
        if self.lost_rounds:
            lines.append(f"  {self.lost_rounds} more begun and lost: charged where they may have been seen")
        if "client" in self.epsilon:
            lines += [f"  {note}" for note in notes_on_delta(self.delta, p.population)]
        return "\n".join(lines)

    def to_pandas(self) -> pandas.DataFrame:
        """A `pandas.DataFrame` with a row for each round; δ and adjacencies are in its ``attrs``.

        Raises:
          ImportError: pandas is missing.
        """
        try:
            import pandas
        except ImportError as error:
            raise ImportError(f"History.to_pandas needs pandas ({error}): pip install pandas") from error
        frame = pandas.DataFrame(dict(self), index=pandas.RangeIndex(len(self.rows), name="round"))
        frame.attrs = {"delta": self.delta, "adjacency": dict(self.adjacency)}
        return frame


def train(
    process: Computation,
    client_data: Dataset,
    *,
    num_rounds: int,
    sampler: Callable[[int], Sequence[str]],
    delta: float | None,
    target_epsilon: float | None = None,
    client_epsilon: Mapping[str, float] | None = None,
    eval_fn: Callable[[State], Mapping[str, float]] | None = None,
    rounds_per_evaluation: int = 1,
    checkpoint_dir: str | os.PathLike | None = None,
    csv_file: str | os.PathLike | None = None,
    tensorboard_dir: str | os.PathLike | None = None,
    initial_state: State = None,
    num_examples: Mapping[str, int] | None = None,
    bad_data: str = "raise",
    accountant: str = "pld",
    rounds_per_price: int | None = None,
    progress: bool = True,
) -> History:
    """Runs a learning process over rounds of sampled clients.

        history = train(process, clients, num_rounds=100, sampler=PoissonClientSampler(clients.client_ids, 0.05),
                        delta=1e-5, target_epsilon=3.0, eval_fn=evaluate, checkpoint_dir="run1")

    ε is computed from ``process.privacy`` and from ``sampler.participation``. Each cohort is compared with the
    declaration of the sampler before it trains (`tfdpfl.federated.guarantees.CohortCheck`). If a round would raise the
    ε of any level above ``target_epsilon``, training ends before it. If examples are protected, the examples of each
    client are counted in every round.

    With a ``checkpoint_dir`` you can continue a training that ended, even by SIGKILL: call `train` again with the same
    arguments. The clients of a round are written to disk before it runs, and its state before any of it is shown,
    logged or evaluated. If the server adds the noise, a lost round has revealed nothing, so it runs again with the same
    clients and counts once. If the clients add the noise (local and example level, secure aggregation), they may have
    sent the lost round. It then counts in addition to its repetition, without use of the sampler's limits. The folder
    holds cohorts and perhaps the seed of the noise, so keep it as secret as the data.

    Args:
      process: a `tff.learning.templates.LearningProcess`, of this package or of TFF. Without ``process.privacy`` there
        is no guarantee, and no column of ε.
      client_data: `tfdpfl.federated.data.ClientDatasets`; or a `tff.simulation.datasets.ClientData`; or a dict of
        `tf.data.Dataset` by client. The batches must suit the process.
      num_rounds: rounds in all, those of an earlier call included.
      sampler: a function from the number of a round, from 0, to the ids of its clients. A private process needs one
        that declares ``participation``.
      delta: δ of every ε. Keep it below 1 over the number of clients (or examples). It may be None if there is no
        guarantee.
      target_epsilon: the largest ε of any level, or None.
      client_epsilon: budgets of single clients for their examples: {client: largest ε of the example level}. A client
        is left out from the round on that would pass its budget, and the others continue. ``History.left_at`` has the
        round.
      eval_fn: a function from the weights of the model to numbers by name. The weights have ``assign_weights_to``,
        which accepts a Keras model. Make that model inside of ``eval_fn``, because TFF builds processes in graphs,
        which makes earlier Keras models unusable. The evaluation data are not protected.
      rounds_per_evaluation: rounds from one evaluation to the next; the last round is always evaluated.
      checkpoint_dir: a folder for this one training, which is created if it does not exist.
      csv_file: a file for the log as comma-separated values, which is overwritten.
      tensorboard_dir: a folder for TensorBoard.
      initial_state: a state whose model training starts from, in place of ``process.initialize()``. A private process
        uses only the model: noise, clip and optimizer begin as the process was built. The earlier ε of the model is
        not counted.
      num_examples: the largest number of examples of each client, if ``client_data`` does not state it.
      bad_data: the treatment of a client whose data do not suit the process, or cannot be read. ``"raise"`` names the
        client and ends the training, before the round if possible. ``"leave_out"`` continues without the client, as if
        it had sent zeros, and notes it in ``History.left_out``.
      accountant: "pld" or "rdp".
      rounds_per_price: rounds from one computation of ε to the next, because one can take a second. The last round
        always has one. None computes ε about 20 times in the training.
      progress: whether to show a bar with loss, clip and ε.

    Raises:
      ValueError: an argument is out of its range, a sampled client holds no data or bad ones, or ``checkpoint_dir`` is
        in use.
      PrivacyError: no ε is known for this training, not even one round fits the target, a cohort contradicts the
        declaration of the sampler, a client's examples come more than once, an adaptive clip fell to 1e-8 or rose to
        1e10, or ``checkpoint_dir`` belongs to a training with another process or sampler.
    """
    num_rounds = _checks.whole("num_rounds", num_rounds, 1, "count the rounds")
    every = _checks.whole("rounds_per_evaluation", rounds_per_evaluation, 1, "count the rounds between evaluations")
    if rounds_per_price is None:
        rounds_per_price = max(1, num_rounds // 20)
    priced = _checks.whole("rounds_per_price", rounds_per_price, 1, "count the rounds between prices, or leave it out")
    ledger = _Ledger(process, sampler, delta, target_epsilon, client_epsilon, accountant)
    clients = _Clients(client_data, num_examples, process, ledger.guarantees, bad_data)
    ledger.check_population(len(clients.dataset_of))
    clients.check_known(map(str, getattr(sampler, "client_ids", ())))
    history = History(ledger.delta, ledger.participation)
    history.adjacency = {f"{g.level}_epsilon": g.adjacency for g in ledger.guarantees}
    runtime.ensure_default()

    with contextlib.ExitStack() as stack:
        start = _initial(process, initial_state, private=bool(ledger.guarantees))
        checkpoints = _Checkpoints(checkpoint_dir, ledger, stack) if checkpoint_dir is not None else None
        history.state = checkpoints.restore(start, history.rows) if checkpoints else start
        logs = _Logs(csv_file, tensorboard_dir, stack)
        bar = stack.enter_context(
            tqdm(total=num_rounds, initial=len(history.rows), disable=not progress, desc="rounds", unit="round")
        )

        def release() -> None:
            """Shows the last round, once its state is safe."""
            row, number = history.rows[-1], len(history.rows)
            if eval_fn is not None and (number % every == 0 or number >= num_rounds or history.stopped_by):
                row.update({str(k): float(v) for k, v in eval_fn(process.get_model_weights(history.state)).items()})
            logs.write(history.rows)
            shown = {name: row[name] for name in ("loss", "clip", *history.adjacency) if name in row}
            bar.set_postfix({name: f"{value:.4g}" for name, value in shown.items()})

        if history.rows:  # it may have died between its checkpoint and this
            release()
        rounds = _Rounds(process, ledger, clients, history, target_epsilon, num_rounds, priced)
        while len(history.rows) < num_rounds and rounds.run_next():
            if checkpoints:
                checkpoints.save(history.state, history.rows)
            bar.update()
            release()

        prices = ledger.prices(len(history.rows))
        history.accountant = {column: paid.accountant for column, paid in prices.items()}
        if history.stopped_by or not prices.keys() <= history.rows[-1].keys():
            history.rows[-1].update({column: paid.epsilon for column, paid in prices.items()})
            release()

    done = completed(ledger.begun, len(history.rows))
    history.left_at = ledger.left_at
    history.trainings = ledger.runs(len(history.rows))
    history.cohorts = [round_.cohort for round_ in done]
    history.left_out = [round_.absent for round_ in done]
    history.lost_rounds = len(ledger.begun) - len(done)
    history.seeded = bool(getattr(sampler, "seeded", False)) and bool(ledger.sampled)
    return history


@dataclasses.dataclass
class _Rounds:
    """The rounds of one call of `train`."""

    process: tff.learning.templates.LearningProcess
    ledger: _Ledger
    clients: _Clients
    history: History
    target_epsilon: float | None
    num_rounds: int
    rounds_per_price: int

    def run_next(self) -> bool:
        """Runs the next round and returns True, or returns False where the target allows no other."""
        done = len(self.history.rows)
        if done and self.ledger.adapts:
            check_adapted(self.history.rows[-1]["clip"])  # a round's figure is the next one's clip
        round_ = self.ledger.next_round(done)
        self.clients.check_known(round_.cohort)
        self.ledger.check(round_.cohort)
        datasets = self.ledger.without_spent(round_, self.clients.of(round_))
        if not self._fits(round_):
            if not done:
                raise no_room(self.target_epsilon, self.ledger.delta, _highest(self.ledger.prices(0, round_)))
            return False
        wanted = (done + 1) % self.rounds_per_price == 0 or done + 1 == self.num_rounds
        prices = self.ledger.prices(done, round_) if wanted else {}
        self.ledger.begin(round_)
        try:
            result = self.process.next(self.history.state, datasets)
        except runtime.WorkerLost:
            raise
        except Exception as error:
            datasets = self.clients.without_unreadable(round_, datasets, error)
            # Where clients add the noise, the round that failed is charged beside its repetition.
            if not self._fits(round_):
                if not done:
                    raise
                return False
            self.ledger.begin(round_)
            result = self.process.next(self.history.state, datasets)
            prices = self.ledger.prices(done + 1) if wanted else {}
        self.history.state = result.state
        # A plain process without clients reports zeros, which are no losses.
        row = _scalars(result.metrics) if datasets or self.ledger.guarantees else {}
        self.history.rows.append({**row, **{column: paid.epsilon for column, paid in prices.items()}})
        return True

    def _fits(self, round_: Round) -> bool:
        """Whether the target allows this round, after those that are done."""
        if self.target_epsilon is None or self.ledger.fits(self.target_epsilon, len(self.history.rows), round_):
            return True
        if self.history.rows:
            self.history.stopped_by = "target_epsilon"
        return False


def _initial(process: Computation, given: object, private: bool) -> State:
    """The state that a training starts from. A state of another process may hold another clip and other noise than
    ``process.privacy`` is stated for, and noise of a tree that is open: only the model of it may be taken."""
    if given is None or not private:
        return process.initialize() if given is None else given
    return process.set_model_weights(process.initialize(), process.get_model_weights(given))


class _Ledger:
    """Who was in which round, begun or completed, and what that costs."""

    def __init__(self, process, sampler, delta, target_epsilon, client_epsilon, accountant):
        self.guarantees: tuple[Guarantee, ...] = tuple(getattr(process, "privacy", ()))
        self._settings: Keywords = getattr(process, "noise_settings", {})
        self.adapts = isinstance(self._settings.get("clip"), AdaptiveClip)
        self.sampler = sampler
        self.participation: Participation | None = getattr(sampler, "participation", None)
        self.accountant = check_accountant(accountant)
        self.delta = None if delta is None and not self.guarantees else check_delta(delta)
        check_target(target_epsilon)
        self.budgets = {str(c): _checks.real(f"client_epsilon[{c!r}]", e, "give the ε to stay within", above=0)
                        for c, e in (client_epsilon or {}).items()}  # fmt: skip
        self._check_levels(target_epsilon is not None)
        self.left_at: dict[str, int] = {}
        self._check = CohortCheck(self.participation) if self.guarantees and self.participation else None
        self.begun: list[Round] = []
        self.write: Callable[[dict], None] = lambda line: None

    def _check_levels(self, has_target: bool) -> None:
        """Refuses a process whose guarantees cannot be priced, or are not those that targets are for."""
        if self.guarantees and self.participation is None:
            raise PrivacyError(
                "The sampler declares no participation, so nothing can be priced. Use one of "
                "tfdpfl.federated.samplers, or give yours an attribute `participation`."
            )
        if has_target and not self.guarantees:
            raise PrivacyError(
                "target_epsilon is given, but the process promises no privacy. Take one of tfdpfl.federated, or "
                "leave the target out."
            )
        if self.budgets and not any(isinstance(guarantee, ExampleLevel) for guarantee in self.guarantees):
            raise PrivacyError(
                "client_epsilon is given, but the process protects no examples, so that no client pays for itself. "
                "Take build_example_dp_fed_avg, or target_epsilon for all."
            )
        levels = [guarantee.level for guarantee in self.guarantees]
        if len(set(levels)) < len(levels):
            raise PrivacyError(f"process.privacy has two guarantees of one level, {levels}: combine them into one.")

    @property
    def sampled(self) -> bool:
        """Whether ε depends on that the cohorts are drawn anew."""
        return bool(self.guarantees and self.participation and self.participation.scheme.sampled_anew)

    def check_population(self, known: int) -> None:
        p = self.participation
        if self.guarantees and p and p.scheme.sampled_anew and p.population > known:
            raise PrivacyError(
                f"The sampler declares a population of {p.population} clients, of which client_data knows {known}: a "
                "client that can never be drawn hides nobody. Declare those that can be drawn."
            )

    def next_round(self, number: int) -> Round:
        """The next round; of one that was begun and lost, with the same clients as then."""
        lost = [round_.cohort for round_ in self.begun if round_.number == number]
        return Round(number, lost[-1] if lost else [str(client) for client in self.sampler(number)])

    def begin(self, round_: Round) -> None:
        self.write({
            "round": round_.number, "cohort": round_.cohort, "absent": round_.absent, "examples": round_.examples,
        })  # fmt: skip
        self.begun.append(dataclasses.replace(round_, absent=dict(round_.absent), examples=dict(round_.examples)))

    def resume(self, begun: list[Round], rounds: int) -> None:
        """Takes what an earlier call began, of which so many rounds are complete."""
        self.begun = begun
        for round_ in completed(begun, rounds):
            self.check(round_.cohort, test=False)

    def check(self, cohort: list[str], test: bool = True) -> None:
        """Raises a `PrivacyError` where these are not the next clients of what the sampler declares."""
        if self._check is not None:
            self._check.add(cohort, test)

    def without_spent(self, round_: Round, datasets: list[Dataset]) -> list[Dataset]:
        """The data sets of a round without those clients that have no budget left for it."""
        if not self.budgets:
            return datasets
        guarantee, run = self.runs(round_.number, round_)["example"]
        assert isinstance(guarantee, ExampleLevel)
        events = guarantee.events_by_client(run)
        there, kept = [client for client in round_.cohort if client not in round_.absent], []
        for client, dataset in zip(there, datasets, strict=True):
            if client in self.budgets and not self._affords(events[client], guarantee, self.budgets[client]):
                self.left_at.setdefault(client, round_.number)
                round_.absent[client] = "its budget is spent"
                round_.examples.pop(client, None)
            else:
                kept.append(dataset)
        return kept

    def _affords(self, event: object, guarantee: ExampleLevel, budget: float) -> bool:
        assert self.delta is not None
        paid = functools.partial(price, event, self.delta, adjacency=guarantee.adjacency)
        return within(budget, lambda name: paid(name).epsilon, self.accountant)

    def fits(self, target: float, rounds: int, next_: Round) -> bool:
        """Whether no level's ε passes the target with one more round."""
        return within(target, lambda name: _highest(self.prices(rounds, next_, name)), self.accountant)

    def prices(self, rounds: int, next_: Round | None = None, accountant: str | None = None) -> dict[str, Price]:
        """ε of each level after these rounds, and one more, if given."""
        assert self.delta is not None or not self.guarantees
        return {
            f"{level}_epsilon": guarantee.price(run, self.delta, accountant or self.accountant)
            for level, (guarantee, run) in self.runs(rounds, next_).items()
        }

    def runs(self, rounds: int, next_: Round | None = None) -> dict[str, tuple[Guarantee, RoundsRun]]:
        """States what is promised of each level, and what ran."""
        return runs(self.guarantees, self.participation, self.begun, rounds, next_)

    def header(self) -> Json:
        """Holds what may not change from one call of `train` to the next."""
        return {"privacy": list(self.guarantees), "participation": self.participation, **self._settings}


class _Checkpoints:
    """States in TFF's program state manager, and beside them the ledger: a line for every round, before it runs."""

    def __init__(self, folder: str | os.PathLike, ledger: _Ledger, stack: contextlib.ExitStack):
        self._folder, self._ledger = Path(folder), ledger
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file = _files.Lines(self._folder / LEDGER, "checkpoint_dir", folder)
        stack.callback(self._file.close)
        self._states = tff.program.FileProgramStateManager(
            os.fspath(self._folder), prefix=STATE, keep_total=2, keep_first=False
        )
        ledger.write = self._append

    def restore(self, start: State, rows: list[dict[str, float]]) -> State:
        """The last state, with the rows up to it; ``start`` for a new training."""
        kept = Record(_files.whole_lines(self._file.held), str(self._folder / LEDGER))
        self._chain, self._saved = kept.chain, kept.saved
        if kept.fault:
            raise ValueError(
                f"{self._folder / LEDGER} is damaged ({kept.fault}). Rounds that it lacks would be in no epsilon. "
                "Restore it from a backup, or take another folder. `tfdpfl ledger verify` shows what is left."
            )
        versions = _wait(self._states.get_versions()) or []
        done = versions[-1] if versions else 0
        if kept.header:
            self._continue(kept, done)
        elif versions:
            raise ValueError(f"{self._folder} has states but no {LEDGER}. Restore it, or take another folder.")
        else:
            self._begin()
        saved = _wait(self._states.load(done, {"state": start, "rows": ""})) if versions else {}
        told = json.loads(bytes(saved["rows"]).decode()) if saved else []
        told = {"rows": told, "ledger": None} if isinstance(told, list) else told  # as it was before version 2
        fault = kept.fault_of_state(done, done, told["ledger"])
        if fault:
            raise ValueError(fault)
        if not saved:
            self.save(start, rows)
            return start
        rows += told["rows"]
        self._note(done)
        return saved["state"]

    def _begin(self) -> None:
        sampler = self._ledger.sampler
        drawn = sampler.get_state() if hasattr(sampler, "get_state") else None
        header = _formats.describe(self._ledger.header())
        self._append({**_formats.stamp(VERSION), **header, "sampler": drawn})
        _files.sync(self._folder)

    def _continue(self, kept: Record, done: int) -> None:
        """Takes up a training of which so many rounds are complete."""
        self._check_header(kept.header)
        if not kept.stamps or kept.stamps[-1]["version"] < VERSION:
            self._append(_formats.stamp(VERSION))  # the lines that follow are of this version
        self._ledger.resume(kept.begun, done)
        sampler, drawn = self._ledger.sampler, kept.header["sampler"]
        if drawn is not None and hasattr(sampler, "set_state"):
            sampler.set_state(drawn)
            sampler.remember({round_.number: round_.cohort for round_ in kept.begun})

    def _check_header(self, saved: Json) -> None:
        """Refuses a folder of a training with other settings."""
        now, hidden = self._ledger.header(), {"sampler", *_formats.stamp(VERSION)}
        if "version" not in saved:  # the folder may be of before settings were compared
            now = {name: now[name] for name in now if name in saved or name in ("privacy", "participation")}
        _formats.refuse_others(
            str(self._folder), {name: value for name, value in saved.items() if name not in hidden}, now,
            "its noise would not be what its rounds are priced by. Continue with the same, or take another folder.",
        )  # fmt: skip

    def save(self, state: State, rows: list[dict[str, float]]) -> None:
        """Saves a state, and waits until it is on the disk: the round is shown afterwards."""
        told = json.dumps({"rows": rows, "ledger": self._chain.digest})
        _wait(self._states.save({"state": state, "rows": told}, len(rows)))
        _files.sync_tree(self._folder)
        self._note(len(rows))

    def _note(self, state: int) -> None:
        """Notes a state that is on the disk: from here on its round may be seen."""
        if state > self._saved:
            self._append({"saved": state})
            self._saved = state

    def _append(self, line: Json) -> None:
        self._file.append(line, self._chain)


class _Logs:
    def __init__(self, csv_file, tensorboard_dir, stack):
        self._columns: list[str] = []
        self._written = 0
        self._csv = None
        if csv_file:
            self._csv = stack.enter_context(open(csv_file, "w", newline="", encoding="utf-8"))  # noqa: SIM115
        self._board = tf.summary.create_file_writer(os.fspath(tensorboard_dir)) if tensorboard_dir else None
        if self._board:
            stack.callback(self._board.close)

    def write(self, rows: list[dict[str, float]]) -> None:
        """Adds the last row; where it was there before, or has a new column, the file is written anew."""
        if self._csv:
            columns = list(dict.fromkeys(name for row in rows for name in row))
            if columns != self._columns or len(rows) == self._written:
                self._columns = columns
                self._csv.seek(0)
                self._csv.truncate()
                csv.writer(self._csv).writerow(["round", *columns])
                new = range(len(rows))
            else:
                new = range(len(rows) - 1, len(rows))
            csv.writer(self._csv).writerows([[i, *(rows[i].get(c, "") for c in columns)] for i in new])
            self._csv.flush()
            self._written = len(rows)
        if self._board:
            with self._board.as_default(step=len(rows) - 1):
                for name, value in rows[-1].items():
                    tf.summary.scalar(name, value)
            self._board.flush()


class _Clients:
    """What makes each client's data set, and what a round takes of it."""

    def __init__(self, client_data, num_examples, process, guarantees, bad_data):
        self.dataset_of, self._held = clients_of(client_data)
        if num_examples is not None:
            self._held = {str(client): n for client, n in num_examples.items()}
        self._leaves_out = _checks.choice("bad_data", bad_data, ("raise", "leave_out")) == "leave_out"
        self._counted = any(isinstance(guarantee, ExampleLevel) for guarantee in guarantees)
        if self._counted and getattr(client_data, "epochs", 1) > 1:
            raise PrivacyError(
                f"client_data holds each example {client_data.epochs} times, by batch(epochs={client_data.epochs}), "
                "and the process makes passes of its own. Take epochs=1, and local_steps or local_epochs for more."
            )
        self._wanted = client_element(process)

    def check_known(self, cohort: Iterable[str]) -> None:
        unknown = [client for client in cohort if client not in self.dataset_of]
        if unknown:
            raise ValueError(
                f"The sampler draws client {unknown[0]!r}, of which client_data has nothing. Give both the same."
            )

    def of(self, round_: Round) -> list[Dataset]:
        """The data sets of a round's clients, less those that are left out. Notes in the round what it finds."""
        found = []
        for client in round_.cohort:
            cause = None
            try:
                dataset = self.dataset_of[client]()
                fault = None if self._wanted is None else _fault(dataset, self._wanted)
                if fault is None and self._counted:
                    dataset, round_.examples[client] = data.once(client, dataset, self._held.get(client))
            except PrivacyError:
                raise
            except Exception as error:  # whatever reads the data may raise
                cause, fault = error, _unreadable(error)
            if fault is None:
                found.append(dataset)
            else:
                self._leave_out(round_, client, fault, cause)
        return found

    def _leave_out(self, round_: Round, client: str, fault: str, cause: Exception | None) -> None:
        if not self._leaves_out:
            raise ValueError(
                f"The data of client {client!r} {fault}. Correct them, or leave the client out by bad_data='leave_out'."
            ) from cause
        round_.absent[client] = fault
        round_.examples.pop(client, None)

    def without_unreadable(self, round_: Round, datasets: list[Dataset], error: Exception) -> list[Dataset]:
        """The data sets that can be read to their end, where a round failed; its error, if that is all of them."""
        there, readable = [client for client in round_.cohort if client not in round_.absent], []
        for client, dataset in zip(there, datasets, strict=True):
            try:
                for _ in dataset or ():
                    pass
                readable.append(dataset)
            except Exception as unreadable:  # whatever it may be
                self._leave_out(round_, client, _unreadable(unreadable), error)
        if len(readable) == len(datasets):
            raise error
        return readable


def clients_of(
    client_data: Dataset, name: str = "client_data"
) -> tuple[dict[str, Callable[[], Dataset]], Mapping[str, int]]:
    """For each client, what makes its data set; and how many examples each is known to hold."""
    if hasattr(client_data, "create_tf_dataset_for_client"):
        make, ids = client_data.create_tf_dataset_for_client, client_data.client_ids
    elif isinstance(client_data, Mapping):
        make, ids = client_data.__getitem__, list(client_data)
    else:
        raise ValueError(
            f"{name} must be ClientDatasets (tfdpfl.federated.data.from_arrays makes one), a dict of "
            f"tf.data.Dataset by client, or a tff ClientData, got {type(client_data).__name__}"
        )
    known = client_data._num_examples or {} if isinstance(client_data, data.ClientDatasets) else {}
    return {str(c): functools.partial(make, c) for c in ids}, known


def _fault(dataset: Dataset, wanted: object) -> str | None:
    """What is wrong with the data set's batches for a process that wants these specs."""
    given = getattr(dataset, "element_spec", None)
    if given is None:
        return None
    want, have = tf.nest.flatten(wanted), tf.nest.flatten(given)

    def fits(axes: int) -> bool:
        """Whether the specs agree but for so many first axes."""
        return len(want) == len(have) and all(
            w.dtype == h.dtype and w.shape[axes:].is_compatible_with(h.shape)
            for w, h in zip(want, have, strict=True)
            if isinstance(w, tf.TensorSpec) and isinstance(h, tf.TensorSpec)
        )

    if fits(0):
        return None
    if fits(1):
        return (
            f"are single examples of {_spec(given)}, where the process takes batches of {_spec(wanted)}. Batch all "
            "clients' data, for example with client_data.batch(16)"
        )
    return f"are batches of {_spec(given)}, where the process takes {_spec(wanted)}"


def _spec(spec: Nest) -> str:
    return ", ".join(f"{leaf.dtype.name}{leaf.shape}" for leaf in tf.nest.flatten(spec))


def _unreadable(error: Exception) -> str:
    first_line = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return f"cannot be read ({first_line})"


def _highest(prices: Mapping[str, Price]) -> float:
    return max((paid.epsilon for paid in prices.values()), default=0.0)


def _scalars(metrics: Nest) -> dict[str, float]:
    """A process's nested metrics, each number by the last of its names, or by all of them where that is taken."""
    found: dict[str, float] = {}

    def visit(path: tuple[str, ...], value: Nest) -> None:
        if isinstance(value, Mapping):
            for name, inner in value.items():
                visit((*path, str(name)), inner)
        elif np.ndim(value) == 0 and np.asarray(value).dtype.kind in "biuf":
            found["/".join(path) if path[-1] in found else path[-1]] = float(value)

    visit((), metrics)
    return found


def _wait(call: Coroutine) -> Any:
    """The result of a coroutine, also inside a notebook, whose own loop is running."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, call).result()
