"""Measures the rows of docs/self_audit.md anew: `python tests/audit/self_audit.py`, on the keras3 and on the tff stack,
two or three minutes of CPU time each. With names (optimizers, preprocessing, labels, votes, others, Flower, TFF,
faults) it measures those alone.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import audit_cases
import audit_faults

PAGE = Path(__file__).parents[2] / "docs" / "self_audit.md"
TITLES = {
    "optimizers": "Optimizers",
    "preprocessing": "Preprocessing",
    "labels": "Labels",
    "votes": "Votes of teachers",
    "others": "Convex losses and tuning",
    "Flower": "Flower",
    "TFF": "TensorFlow Federated",
}


def measured(case: audit_cases.Case) -> list[str]:
    """The cells of a case's row."""
    moved, said = "–", ["–", "–"]
    if case.replay is not None:
        report = case.replay()
        assert report.ok, report
        moved = f"{report.moved:.2f}"
    if case.bound is not None:
        claim, found = case.bound()
        assert found <= claim, (case.name, found, claim)
        said = [f"{claim:.2f}", f"{found:.2f}"]
    return [case.name, moved, *said]


def caught(fault: audit_faults.Fault) -> list[str]:
    """The cells of a fault's row."""
    assert fault.found(False) == "", fault.name
    said = fault.found(True)
    assert fault.says in said, (fault.name, said)
    line = next(line for line in said.splitlines() if fault.says in line)
    line = re.sub(r"\.py:\d+", ".py", line)  # lines move
    at = max(0, line.find(fault.says) - 60) if len(line) > 150 else 0
    short = ("… " if at else "") + line[at : at + 150].strip() + (" …" if len(line) > at + 150 else "")
    return [fault.name, fault.instrument, short.replace("|", "\\|").replace("<", "&lt;")]


def with_row(text: str, heading: str, cells: list[str]) -> str:
    """The page with a row in the place of the one of this name, or as a new one at the end of the heading's table."""
    lines, row = text.splitlines(), "| " + " | ".join(cells) + " |"
    for i, line in enumerate(lines):
        if line.startswith(f"| {cells[0]} | "):
            lines[i] = row
            break
    else:
        end = lines.index(heading) + 2
        while end < len(lines) and lines[end].startswith("|"):
            end += 1
        lines.insert(end, row)
    return "\n".join(lines) + "\n"


def main(groups: list[str]) -> None:
    every = [(group, case, measured) for group in audit_cases.here() for case in audit_cases.GROUPS[group]()]
    every += [("faults", fault, caught) for fault in audit_faults.here()]
    for group, one, row in every:
        if not groups or group in groups:
            cells = row(one)
            heading = "## Planted faults" if group == "faults" else f"### {TITLES[group]}"
            PAGE.write_text(with_row(PAGE.read_text("utf-8"), heading, cells), "utf-8")
            print(*cells, sep=" | ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
