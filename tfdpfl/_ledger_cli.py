"""The commands of `tfdpfl ledger`: what ledgers hold, whether they are whole, and what they cost together.

A FILE is a ledger, as `PrivacyLedger.to_dict` or a federation's client writes it, or the journal of a Flower server.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tfdpfl._cli_parts import DELTA, JSON, BadArgument, NewFile, clean_errors
from tfdpfl._types import Json

if TYPE_CHECKING:
    from tfdpfl.accounting import PrivacyLedger
    from tfdpfl.flower.journal import Record

__all__ = ["ledger"]

_FILE = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
_FILES = click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
_ACCOUNTANT = click.option("--accountant", type=click.Choice(["pld", "rdp"]), default="pld", show_default=True)
_BROKEN = "Not all rounds can be read. The figure counts every line that is left, so it holds unless lines are missing."


@click.group()
def ledger() -> None:
    """Inspect, verify, merge and migrate ledgers, and compute the epsilon of a run that stopped or broke.

    The exit code is 0 if all is well, 1 if a file is damaged or a target is passed, and 2 if a command cannot run.
    """


class Opened:
    """A file of privacy, read without locking or changing it, so that a running server is not disturbed."""

    def __init__(self, path: Path):
        from tfdpfl._formats import NewerFormatError
        from tfdpfl.accounting import PrivacyLedger
        from tfdpfl.flower.journal import DamagedError, Record

        self.path, self.faults = path, list[str]()
        self.ledger: PrivacyLedger | None = None
        self.journal: Record | None = None
        self.unread = 0  # rounds that a damaged journal may have charged beyond those that can be read
        data = path.read_bytes()
        try:
            self.ledger = PrivacyLedger.from_dict(json.loads(data))
            return
        except NewerFormatError as error:
            raise BadArgument(f"{path}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
        whole = data[: data.rfind(b"\n") + 1]
        try:
            self.journal = Record().read(whole, str(path))
        except NewerFormatError as error:
            raise BadArgument(str(error)) from error
        except DamagedError as error:
            if not error.record.lines:
                raise BadArgument(
                    f"{path} is neither a ledger nor a journal of a server. Give a file that PrivacyLedger.to_dict or "
                    "ledger_path= wrote, or restore it from a backup."
                ) from error
            self.journal = error.record
            self.faults.append(str(error))
            self.unread = len(whole.splitlines()) - self.journal.lines
        if not self.journal.lines:
            raise BadArgument(f"{path} holds no whole line, so no epsilon. Restore it from a backup.")
        self._compare_with_model(len(self.journal.charged) + self.unread)
        if len(data) > len(whole):
            # Nothing was done before a line was whole, so this is no damage.
            self.torn = len(data) - len(whole)

    torn = 0

    def _compare_with_model(self, rounds: int) -> None:
        import zipfile

        import numpy as np

        path = self.path.with_name(self.path.name + ".npz")
        if not path.exists():
            return
        try:
            with np.load(path, allow_pickle=False) as saved:
                about = json.loads(str(saved["about"]))
        except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile) as error:
            self.faults.append(f"The saved model {path} cannot be read ({error}). Restore it from a backup.")
            return
        known = about.get("charged", about["rounds"])
        if known > rounds:
            self.unread += known - rounds
            self.faults.append(
                f"The saved model came after {known} charged rounds, but {self.path} has {rounds}, so rounds are "
                "missing from epsilon. Restore the newest ledger."
            )

    @property
    def kind(self) -> str:
        return "ledger" if self.ledger is not None else "journal"

    def prices(self, delta: float, accountant: str) -> dict[str, tuple[str, float]]:
        """Returns {part: (adjacency, ε)}."""
        if self.ledger is not None:
            return {"": (self.ledger.adjacency, self.ledger.epsilon(delta, accountant))}
        from tfdpfl.flower.spent import Settings

        j = self._journal
        settings = Settings.of(j.header)
        return settings.prices(j.charged, j.replied, j.evaluations + self.unread, delta, accountant, self.unread)

    @property
    def _journal(self) -> Record:
        assert self.journal is not None
        return self.journal

    def as_ledger(self) -> PrivacyLedger:
        """Returns what the file holds as a ledger; of a journal, for one client that was there in every round."""
        if self.ledger is not None:
            return self.ledger
        from tfdpfl.federated.privacy import RoundsRun
        from tfdpfl.flower.spent import Settings

        j, settings = self._journal, Settings.of(self._journal.header)
        if len(settings.privacy) > 1:
            raise BadArgument(f"{self.path} is of NbAFL, which has no event of its own. See `tfdpfl ledger epsilon`.")
        p = settings.participation
        return settings.ledger(
            RoundsRun(rounds=len(j.charged), participation=p, cohorts=j.charged if p.sampling == "bounded" else []),
            j.evaluations,
        )

    def facts(self) -> Json:
        """Returns what the file holds. Names of clients stay out: who took part in which round is a secret."""
        if self.ledger is not None:
            saved = json.loads(self.path.read_text())
            return {
                "kind": "ledger", "version": saved.get("version", 0), "written_by": saved.get("written_by"),
                "records": len(self.ledger), "steps": self.ledger.steps, "adjacency": self.ledger.adjacency,
            }  # fmt: skip
        j = self._journal
        newest = j.versions[-1] if j.versions else {}
        counts = Counter(client for cohort in j.charged for client in cohort)
        return {
            "kind": "journal", "version": newest.get("version", 0), "written_by": newest.get("written_by"),
            "rounds": len(j.charged), "begun": int(j.begun is not None), "evaluations": j.evaluations,
            "clients": len(counts), "most_rounds_of_a_client": max(counts.values(), default=0),
            "settings": j.header,
        }  # fmt: skip


@ledger.command()
@_FILE
@JSON
def inspect(file: Path, as_json: bool) -> None:
    """Show the format, rounds and settings of FILE. No client is named."""
    with clean_errors():
        opened = Opened(file)
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
            opened = Opened(file)
        found = {"file": str(file), "kind": opened.kind, "sound": not opened.faults, "faults": opened.faults}
        if opened.journal is not None:
            found["rounds"] = len(opened.journal.charged)
            found["hashed_lines"], found["lines"] = opened.journal.hashed, opened.journal.lines
            found["torn_bytes"] = opened.torn
        told.append(found)
        sound = sound and not opened.faults
        if not as_json:
            more = "" if opened.journal is None else (
                f", {found['rounds']} rounds, {found['hashed_lines']} of {found['lines']} lines with a hash"
                + (f", {opened.torn} bytes of a line that was never whole" if opened.torn else "")
            )  # fmt: skip
            click.echo(f"{file}: {'DAMAGED' if opened.faults else 'ok'} ({opened.kind}{more})")
            for fault in opened.faults:
                click.echo(f"  {fault}")
    if as_json:
        click.echo(json.dumps(told, indent=2))
    raise SystemExit(0 if sound else 1)


@ledger.command()
@_FILE
@DELTA
@_ACCOUNTANT
@click.option("--target-epsilon", type=float, help="Exit with 1 if epsilon passes it.")
@JSON
def epsilon(file: Path, delta: float, accountant: str, target_epsilon: float | None, as_json: bool) -> None:
    """Compute the epsilon of FILE, also of a run that was stopped or whose journal broke."""
    with clean_errors():
        from tfdpfl.accounting.pricing import check_delta

        opened = Opened(file)
        prices = opened.prices(check_delta(delta), accountant)
        _show_prices(opened, prices, delta, accountant, as_json)
    if target_epsilon is not None and max(spent for _, spent in prices.values()) > target_epsilon:
        raise SystemExit(1)
    _end(opened)


def _show_prices(
    opened: Opened, prices: dict[str, tuple[str, float]], delta: float, accountant: str, as_json: bool
) -> None:
    from tfdpfl._formats import strict
    from tfdpfl.accounting.report import rounded_up

    if as_json:
        figures = [
            {"level": level or None, "epsilon": spent, "delta": delta, "adjacency": adjacency, "accountant": accountant}
            for level, (adjacency, spent) in prices.items()
        ]
        click.echo(json.dumps(strict({"complete": not opened.unread, "figures": figures}), indent=2))
        return
    for level, (adjacency, spent) in prices.items():
        of = f" ({level} level)" if level else ""
        click.echo(
            f"epsilon = {rounded_up(spent)}{of} at delta {delta:g}, adjacency {adjacency}, accountant {accountant}"
        )
    if opened.unread:
        click.echo(_BROKEN)


@ledger.command()
@_FILE
@DELTA
@_ACCOUNTANT
@click.option("--target-epsilon", type=float, help="What each client may spend. Exit with 1 if one has spent more.")
@JSON
def clients(file: Path, delta: float, accountant: str, target_epsilon: float | None, as_json: bool) -> None:
    """Show what each client has spent over all runs, from the database FILE that a server's register_path= names."""
    with clean_errors():
        from tfdpfl._formats import strict
        from tfdpfl.accounting.pricing import check_delta
        from tfdpfl.accounting.report import rounded_up
        from tfdpfl.flower.register import Register

        found = Register(file, new=False).spent(check_delta(delta), accountant)
    rows = [{**vars(spent)} for spent in found]
    if target_epsilon is not None:
        rows = [{**row, "left": max(0.0, target_epsilon - row["epsilon"])} for row in rows]
    if as_json:
        click.echo(json.dumps(strict(rows), indent=2))
    for spent in [] if as_json else found:
        left = "" if target_epsilon is None else f", {max(0.0, target_epsilon - spent.epsilon):.3g} left"
        click.echo(
            f"{spent.client}: epsilon = {rounded_up(spent.epsilon)}{left}; {spent.rounds} rounds of {spent.runs} runs, "
            f"asked in {spent.asked}"
        )
    if target_epsilon is not None and any(spent.epsilon > target_epsilon for spent in found):
        raise SystemExit(1)


@ledger.command()
@_FILES
@click.option("--output", type=NewFile(), required=True, help="The ledger to write.")
def merge(files: tuple[Path, ...], output: str) -> None:
    """Add FILES about the same people into one ledger. A client's part in several journals adds up, too."""
    with clean_errors():
        from tfdpfl.accounting import PrivacyLedger

        opened = [Opened(file) for file in files]
        for one in opened:
            if one.faults:
                raise BadArgument(f"{one.faults[0]} A merged ledger would lack what is missing.")
        if len({one.kind for one in opened}) > 1:
            raise BadArgument(
                "FILES hold journals, which protect clients, and ledgers, whose unit they do not state. Their epsilons "
                "do not add up. Merge each kind by itself."
            )
        made = PrivacyLedger()
        for one in opened:
            made.merge(one.as_ledger())
        made.adjacency  # noqa: B018  # raises where they do not add up
        _write(output, json.dumps(made.to_dict()).encode())
    click.echo(f"{output}: {made.steps} releases of {len(files)} files")


@ledger.command()
@_FILE
@click.option("--output", type=NewFile(), required=True, help="The file to write; FILE stays as it is.")
def migrate(file: Path, output: str) -> None:
    """Write FILE in the newest format. A journal then has a hash on each line."""
    with clean_errors():
        opened = Opened(file)
        if opened.faults:
            raise BadArgument(f"{opened.faults[0]} The new file would lack what is missing.")
        if opened.ledger is not None:
            _write(output, json.dumps(opened.ledger.to_dict()).encode())
        else:
            _write(output, _journal_of_today(opened))
    click.echo(f"{output}: {opened.facts()['kind']} of {file}, in the newest format")


def _journal_of_today(opened: Opened) -> bytes:
    from tfdpfl import _formats
    from tfdpfl.flower.journal import VERSION, Record

    old, new, text = opened._journal, Record(), b""
    lines: list[Json] = [{**_formats.stamp(VERSION), "header": old.header}]
    for number, (cohort, replied) in enumerate(zip(old.charged, old.replied, strict=True)):
        lines += {"begin": number, "cohort": cohort}, {"charge": number, "replied": replied}
    lines += ({"evaluation": number} for number in range(old.evaluations))
    if old.begun is not None:
        lines.append({"begin": len(old.charged), "cohort": old.begun})
    for line in lines:
        whole = new.whole(line)
        new.read(whole, "the new file")
        text += whole
    return text


def _write(output: str, text: bytes) -> None:
    from tfdpfl.federated import files

    if Path(output).exists():
        raise BadArgument(f"{output} exists, and could hold what was spent. Give the name of a new file.")
    files.replace(Path(output), lambda file: file.write(text))


def _show(facts: Json, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(facts, indent=2))
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
