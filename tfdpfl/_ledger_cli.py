"""The commands of `tfdpfl ledger`: what ledgers hold, whether they are whole, and what they cost together.

A FILE is a ledger, as `PrivacyLedger.to_dict` or a federation's client writes it, the journal of a Flower server, or
the checkpoint_dir of `tfdpfl.federated.train`, whose ledger may also stand alone.
"""

from __future__ import annotations

import functools
import io
import json
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from tfdpfl import _formats
from tfdpfl._cli_parts import DELTA, JSON, TARGET, BadArgument, NewFile, clean_errors
from tfdpfl._files import replace, whole_lines
from tfdpfl._types import Json

if TYPE_CHECKING:
    from tfdpfl.accounting import PrivacyLedger
    from tfdpfl.federated.checkpoints import Record
    from tfdpfl.flower.journal import Record as JournalRecord

__all__ = ["ledger"]

_PATH = click.Path(exists=True, path_type=Path)
_FILE = click.argument("file", type=_PATH)
_FILES = click.argument("files", nargs=-1, required=True, type=_PATH)
_ACCOUNTANT = click.option("--accountant", type=click.Choice(["pld", "rdp"]), default="pld", show_default=True)
_BROKEN = "Not all rounds can be read. The figure counts every line that is left, so it holds unless lines are missing."


@click.group()
def ledger() -> None:
    """Inspect, verify, merge and migrate ledgers, and compute the epsilon of a run that stopped or broke.

    The exit code is 0 if all is well, 1 if a file is damaged or a target is passed, and 2 if a command cannot run.
    """


class Opened:
    """A file of privacy, read without locking or changing it, so that a training that runs is not disturbed.

    Attributes:
      faults: what is wrong, a sentence each; empty for a whole file.
      complete: whether all rounds can be read.
      counts: figures for `verify`.
    """

    kind = "ledger"
    unit: str | None = None  # what one entry protects, where the file states it

    def __init__(self, path: Path):
        self.path, self.faults, self.complete = path, list[str](), True
        self.counts: dict[str, int] = {}

    def prices(self, delta: float, accountant: str) -> dict[str, tuple[str, float]]:
        """Returns {part: (adjacency, ε)}."""
        raise NotImplementedError

    def as_ledger(self) -> PrivacyLedger:
        """Returns what the file holds as a ledger; of rounds, for one client that was there in every round."""
        raise NotImplementedError

    def facts(self) -> Json:
        """Returns what the file holds. Names of clients stay out: who took part in which round is a secret."""
        raise NotImplementedError

    def newest(self) -> dict[str, bytes]:
        """Returns the content in the newest format: the file's own at "", after that of the files beside it, by what
        their names have more."""
        raise NotImplementedError


class OpenedLedger(Opened):
    """What `PrivacyLedger.to_dict` gave."""

    def __init__(self, path: Path, saved: Json, held: PrivacyLedger):
        super().__init__(path)
        self._saved, self._ledger = saved, held

    def prices(self, delta: float, accountant: str) -> dict[str, tuple[str, float]]:
        return {"": (self._ledger.adjacency, self._ledger.epsilon(delta, accountant))}

    def as_ledger(self) -> PrivacyLedger:
        return self._ledger

    def facts(self) -> Json:
        return {
            "kind": self.kind, **_writer(self._saved), "records": len(self._ledger), "steps": self._ledger.steps,
            "adjacency": self._ledger.adjacency,
        }  # fmt: skip

    def newest(self) -> dict[str, bytes]:
        return {"": json.dumps(self._ledger.to_dict()).encode()}


class OpenedJournal(Opened):
    """What the server of a Flower strategy wrote, compared with the model next to it."""

    kind, unit = "journal", "client"

    def __init__(self, path: Path, data: bytes, model: Json):
        from tfdpfl.flower.journal import DamagedError, Record

        super().__init__(path)
        whole = whole_lines(data)
        self._unread = 0  # rounds that a damaged journal may have charged beyond those that can be read
        try:
            self._journal = Record().read(whole, str(path))
        except DamagedError as error:
            if not error.record.lines:
                raise BadArgument(
                    f"{path} is neither a ledger nor a journal of a server nor one of checkpoints. Give a file that "
                    "PrivacyLedger.to_dict or ledger_path= wrote, or a checkpoint_dir, or restore it from a backup."
                ) from error
            self._journal = error.record
            self.faults.append(str(error))
            self._unread = len(whole.splitlines()) - self._journal.lines
        j = self._journal
        self._compare(model, len(j.charged) + self._unread)
        self.complete = not self._unread
        self.counts = _counts(len(j.charged), j, data)

    def _compare(self, model: Json, rounds: int) -> None:
        from tfdpfl.flower.journal import rounds_of_model

        if "error" in model:
            self.faults.append(
                f"The saved model {_model_of(self.path)} cannot be read ({model['error']}). Restore it from a backup."
            )
        missing = rounds_of_model(model) - rounds
        if missing > 0 or not self.faults:
            fault = self._journal.fault_of_model(str(self.path), model, self._unread)
            self.faults += [fault] if fault else []
        self._unread += max(0, missing)

    def prices(self, delta: float, accountant: str) -> dict[str, tuple[str, float]]:
        from tfdpfl.flower.spent import Settings

        return Settings.of(self._journal.header).prices(self._journal, delta, accountant, self._unread)

    def as_ledger(self) -> PrivacyLedger:
        from tfdpfl.flower.spent import Settings

        j, settings = self._journal, Settings.of(self._journal.header)
        if len(settings.privacy) > 1:
            raise BadArgument(f"{self.path} is of NbAFL, which has no event of its own. See `tfdpfl ledger epsilon`.")
        return settings.ledger(settings.run(j.charged), j.evaluations)

    def facts(self) -> Json:
        j = self._journal
        return {
            "kind": self.kind, **_writer(j.versions[-1] if j.versions else {}), "rounds": len(j.charged),
            "begun": int(j.begun is not None), "evaluations": j.evaluations, **_clients(j.charged),
            "settings": j.header,
        }  # fmt: skip

    def newest(self) -> dict[str, bytes]:
        from tfdpfl.flower.journal import VERSION, Record

        old, new, text = self._journal, Record(), b""
        lines: list[Json] = [{**_formats.stamp(VERSION), "run": old.run, "header": old.header}]
        for number, (cohort, replied) in enumerate(zip(old.charged, old.replied, strict=True)):
            lines += {"begin": number, "cohort": cohort}, {"charge": number, "replied": replied}
        lines += ({"evaluation": number} for number in range(old.evaluations))
        if old.begun is not None:
            lines.append({"begin": len(old.charged), "cohort": old.begun})
        for line in lines:
            whole = new.chain.seal(line)
            new.read(whole, "the new file")
            text += whole
        beside = {path.name.removeprefix(self.path.name): path for path in self.path.parent.glob(self.path.name + ".*")}
        found = {more: path.read_bytes() for more, path in beside.items() if more.startswith(".noise-")}
        if _model_of(self.path).exists():
            found[".npz"] = _model_with_ledger(_model_of(self.path), new.chain.digest)
        return {**found, "": text}


class OpenedCheckpoints(Opened):
    """The ledger of a folder that `tfdpfl.federated.train` wrote, compared with the states next to it.

    Args:
      states: the number of the newest state before the ledger was read, the one after, and the hash of the ledger that
        the former came with; None if only the ledger is there.
    """

    kind = "checkpoints"

    def __init__(self, path: Path, data: bytes, record: Record, states: tuple[int, int, str | None] | None):
        super().__init__(path)
        self._record = record
        self._rounds = rounds = record.rounds
        if record.fault:
            self.complete = False
            self.faults.append(
                f"{path} is damaged ({record.fault}), so rounds that were released may be missing from epsilon. "
                "Restore it from a backup."
            )
        if states is not None:
            before, after, _ = states
            fault = record.fault_of_state(*states)
            if fault:
                self.faults.append(fault)
                self.complete = self.complete and after < record.shown
                self._rounds = max(before, rounds)
            elif not record.fault and (not record.begun or record.begun[-1].followed):
                self._rounds = min(after, rounds)  # a round that began and was lost has released nothing
        self.counts = _counts(self._rounds, record, data)

    def prices(self, delta: float, accountant: str) -> dict[str, tuple[str, float]]:
        return self._record.prices(self._rounds, delta, accountant)

    @property
    def unit(self) -> str | None:  # type: ignore[override]
        return "+".join(guarantee.level for guarantee in self._record.settings()[0])

    def as_ledger(self) -> PrivacyLedger:
        from tfdpfl.accounting import PrivacyLedger
        from tfdpfl.federated.checkpoints import runs

        guarantees, participation = self._record.settings()
        event = getattr(guarantees[0], "event", None) if len(guarantees) == 1 else None
        if event is None:
            raise BadArgument(
                f"{self.path} promises {self.unit or 'nothing'}, which one ledger does not hold. Use `tfdpfl ledger "
                "epsilon`, or tfdpfl.federated.total_price with the History of each training."
            )
        found = runs(guarantees, participation, self._record.begun, self._rounds)
        ((guarantee, run),) = found.values()
        return PrivacyLedger().add(event(run), adjacency=guarantee.adjacency)

    def facts(self) -> Json:
        r = self._record
        hidden = {"sampler", "version", "written_by"}  # the sampler's state tells who will be drawn
        cohorts = [row.cohort for row in r.begun]
        return {
            "kind": self.kind, **_writer(r.stamps[-1] if r.stamps else {}), "rounds": self._rounds,
            "begun": max(0, r.rounds - self._rounds), "repeated": len(r.begun) - len({row.number for row in r.begun}),
            **_clients(cohorts), "settings": {name: value for name, value in r.header.items() if name not in hidden},
        }  # fmt: skip

    def newest(self) -> dict[str, bytes]:
        raise BadArgument(
            f"{self.path} is of checkpoints. `train` goes on with the folder as it is, in the newest format."
        )


def open_file(path: Path) -> Opened:
    """Returns what a path holds.

    Raises:
      BadArgument: it is no file of privacy.
      NewerFormatError: it is of a newer release.
    """
    from tfdpfl.accounting import PrivacyLedger
    from tfdpfl.federated import checkpoints

    folder = path.is_dir()
    if folder:
        path = path / checkpoints.LEDGER
        if not path.exists():
            raise BadArgument(
                f"{path.parent} is a folder without {checkpoints.LEDGER}, so no checkpoint_dir of tfdpfl.federated. "
                "Give the folder that train(checkpoint_dir=) wrote, or the file of a ledger or journal."
            )
    # Models before ledgers: a training that runs charges a round before its model is there.
    before, model = checkpoints.newest_state(path.parent), _about_model(path)
    came_with = checkpoints.ledger_of(path.parent / f"{checkpoints.STATE}{before}")
    data = path.read_bytes()
    try:
        saved = json.loads(data)
        return OpenedLedger(path, saved, PrivacyLedger.from_dict(saved))
    except _formats.NewerFormatError as error:
        raise BadArgument(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    whole = whole_lines(data)
    if not whole:
        raise BadArgument(f"{path} holds no whole line, so no epsilon. Restore it from a backup.")
    if b'"sampler": ' not in whole[: whole.index(b"\n")]:
        return OpenedJournal(path, data, model)
    record = checkpoints.Record(whole, str(path))
    after = checkpoints.newest_state(path.parent)
    return OpenedCheckpoints(path, data, record, (before, after, came_with) if folder or after else None)


def _counts(rounds: int, record: Record | JournalRecord, data: bytes) -> dict[str, int]:
    torn = len(data) - len(whole_lines(data))
    return {"rounds": rounds, "hashed_lines": record.chain.hashed, "lines": record.lines, "torn_bytes": torn}


def _writer(stamp: Json) -> Json:
    return {"version": stamp.get("version", 0), "written_by": stamp.get("written_by")}


def _clients(cohorts: list[list[str]]) -> dict[str, int]:
    counts = Counter(client for cohort in cohorts for client in cohort)
    return {"clients": len(counts), "most_rounds_of_a_client": max(counts.values(), default=0)}


def _model_of(path: Path) -> Path:
    return path.with_name(path.name + ".npz")


def _about_model(path: Path) -> Json:
    """Returns what the model next to a journal says of itself, or the "error" with which it cannot be read."""
    import numpy as np

    if not _model_of(path).exists():
        return {}
    try:
        with np.load(_model_of(path), allow_pickle=False) as saved:
            return dict(json.loads(str(saved["about"])))
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
        return {"error": str(error)}


def _model_with_ledger(path: Path, digest: str) -> bytes:
    """Returns a saved model that names another ledger as the one that it belongs to."""
    import numpy as np

    with np.load(path, allow_pickle=False) as saved:
        held, made = dict(saved), io.BytesIO()
    about = {**json.loads(str(held.pop("about"))), "ledger": digest}
    np.savez(made, about=np.array(json.dumps(about)), **held)
    return made.getvalue()


@ledger.command()
@_FILE
@JSON
def inspect(file: Path, as_json: bool) -> None:
    """Show the format, rounds and settings of FILE. No client is named."""
    with clean_errors():
        opened = open_file(file)
        _show(opened.facts(), as_json)
    _end(opened)


@ledger.command()
@_FILES
@JSON
def verify(files: tuple[Path, ...], as_json: bool) -> None:
    """Check that FILES are whole: their hashes, gaps, and rounds against the model that is saved next to a journal.

    A hash covers all lines before it. So a line that was changed, lost or put in is found. But lines that were cut off
    at the end are found only by a saved model that came after them.
    """
    told, sound = [], True
    for file in files:
        with clean_errors():
            opened = open_file(file)
        found = {"file": str(file), "kind": opened.kind, "sound": not opened.faults, "faults": opened.faults}
        told.append({**found, **opened.counts})
        sound = sound and not opened.faults
        if not as_json:
            counted = "".join(f", {words}" for words in _in_words(opened.counts))
            click.echo(f"{file}: {'DAMAGED' if opened.faults else 'ok'} ({opened.kind}{counted})")
            for fault in opened.faults:
                click.echo(f"  {fault}")
    if as_json:
        _print_json(told)
    raise SystemExit(0 if sound else 1)


def _in_words(counts: dict[str, int]) -> Iterator[str]:
    if "rounds" in counts:
        yield f"{counts['rounds']} rounds"
    if "hashed_lines" in counts:
        yield f"{counts['hashed_lines']} of {counts['lines']} lines with a hash"
    if counts.get("torn_bytes"):
        yield f"{counts['torn_bytes']} bytes of a line that was never whole"


@ledger.command()
@_FILE
@DELTA
@_ACCOUNTANT
@click.option("--target-epsilon", type=TARGET, help="Exit with 1 if epsilon passes it.")
@JSON
def epsilon(file: Path, delta: float, accountant: str, target_epsilon: float | None, as_json: bool) -> None:
    """Compute the epsilon of FILE, also of a run that was stopped or whose journal broke."""
    with clean_errors():
        from tfdpfl.accounting.pricing import check_delta
        from tfdpfl.accounting.report import rounded_up

        opened = open_file(file)
        prices = opened.prices(check_delta(delta), accountant)
    if as_json:
        figures = [
            {"level": level or None, "epsilon": spent, "delta": delta, "adjacency": adjacency, "accountant": accountant}
            for level, (adjacency, spent) in prices.items()
        ]
        _print_json({"complete": opened.complete, "figures": figures})
    for level, (adjacency, spent) in [] if as_json else prices.items():
        of = f" ({level} level)" if level else ""
        click.echo(
            f"epsilon = {rounded_up(spent)}{of} at delta {delta:g}, adjacency {adjacency}, accountant {accountant}"
        )
    if not (as_json or opened.complete):
        click.echo(_BROKEN)
    if target_epsilon is not None and max(spent for _, spent in prices.values()) > target_epsilon:
        raise SystemExit(1)
    _end(opened)


@ledger.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@DELTA
@_ACCOUNTANT
@click.option("--target-epsilon", type=TARGET, help="What each client may spend. Exit with 1 if one has spent more.")
@JSON
def clients(file: Path, delta: float, accountant: str, target_epsilon: float | None, as_json: bool) -> None:
    """Show what each client has spent over all runs, from the database FILE that a server's register_path= names."""
    with clean_errors():
        from tfdpfl.accounting.pricing import check_delta
        from tfdpfl.accounting.report import rounded_up
        from tfdpfl.flower.register import Register

        rows = [{**vars(spent)} for spent in Register(file, new=False).spent(check_delta(delta), accountant)]
    if target_epsilon is not None:
        rows = [{**row, "left": max(0.0, target_epsilon - row["epsilon"])} for row in rows]
    if as_json:
        _print_json(rows)
    for row in [] if as_json else rows:
        left = f", {row['left']:.3g} left" if "left" in row else ""
        click.echo(
            f"{row['client']}: epsilon = {rounded_up(row['epsilon'])}{left}; {row['rounds']} rounds of {row['runs']} "
            f"runs, asked in {row['asked']}"
        )
    if target_epsilon is not None and any(row["epsilon"] > target_epsilon for row in rows):
        raise SystemExit(1)


@ledger.command()
@_FILES
@click.option("--output", type=NewFile(), required=True, help="The ledger to write.")
def merge(files: tuple[Path, ...], output: str) -> None:
    """Add FILES about the same people into one ledger. A client's part in several journals adds up, too."""
    with clean_errors():
        from tfdpfl.accounting import PrivacyLedger

        opened = [open_file(file) for file in files]
        for one in opened:
            if one.faults:
                raise BadArgument(f"{one.faults[0]} A merged ledger would lack what is missing.")
        units = sorted({one.unit or "a unit that is not stated" for one in opened})
        if len(units) > 1:
            raise BadArgument(
                f"FILES protect {' and '.join(units)}, so their epsilons do not add up. Merge the files of each unit "
                "by themselves."
            )
        made = PrivacyLedger()
        for one in opened:
            made.merge(one.as_ledger())
        made.adjacency  # noqa: B018  # raises where they do not add up
        _write({output: json.dumps(made.to_dict()).encode()})
    click.echo(f"{output}: {made.steps} releases of {len(files)} files")


@ledger.command()
@_FILE
@click.option("--output", type=NewFile(), required=True, help="The file to write; FILE stays as it is.")
def migrate(file: Path, output: str) -> None:
    """Write FILE in the newest format. A journal then has a hash on each line, and a model beside it that names it."""
    with clean_errors():
        opened = open_file(file)
        if opened.faults:
            raise BadArgument(f"{opened.faults[0]} The new file would lack what is missing.")
        _write({output + more: content for more, content in opened.newest().items()})
    click.echo(f"{output}: {opened.facts()['kind']} of {file}, in the newest format")


def _write(contents: dict[str, bytes]) -> None:
    for output in contents:
        if Path(output).exists():
            raise BadArgument(f"{output} exists, and could hold what was spent. Give the name of a new file.")
    for output, content in contents.items():
        replace(Path(output), functools.partial(_put, content))


def _put(content: bytes, file: IO[bytes]) -> None:
    file.write(content)


def _print_json(value: object) -> None:
    click.echo(json.dumps(_formats.strict(value), indent=2))


def _show(facts: Json, as_json: bool) -> None:
    if as_json:
        _print_json(facts)
        return
    for name, value in facts.items():
        told = json.dumps(value) if isinstance(value, dict | list) else value
        click.echo(f"{name.replace('_', ' ')}: {told}")


def _end(opened: Opened) -> None:
    """Ends with 1 and the reasons if the file is damaged."""
    for fault in opened.faults:
        click.echo(fault, err=True)
    if opened.faults:
        raise SystemExit(1)
