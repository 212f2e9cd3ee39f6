"""Writes docs/self_audit.md: `python tests/audit/self_audit.py`, on the tff stack and then on the keras3 stack, two or
three minutes of CPU time each. With names (optimizers, preprocessing, labels, votes, Flower, TFF,
faults) it measures those alone.

What was measured, on whichever stack, is kept in docs/self_audit.json.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import audit_cases
import audit_faults

DOCS = Path(__file__).parents[2] / "docs"
INTRO = """# Self-audit

The tools of [Auditing](auditing.md) test this package itself.

- **Mechanisms.** Each mechanism runs on two neighbours. `replay` compares the values that enter the noise.
  `audit_epsilon` then tries to tell the two runs apart. Its lower bound must stay below the ε of the ledger (99.9 %
  confidence).
- **Faults.** Faults are planted, as other libraries had them or as a user could make them. Each fault must be found by
  the expected message. The same check must find nothing in the package without the fault.

A low bound proves nothing. There are few runs, and the attacker does not see everything, so the bound is often far
below the claim.

`tests/audit/test_self_audit.py` checks all of this. This command writes the page, on the tff stack and then on the
keras3 stack:

    $ python tests/audit/self_audit.py

`tests/audit/audit_cases.py` lists the mechanisms, and `audit_faults.py` the faults.
"""
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


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def page(known: dict[str, list[str]]) -> str:
    """The page of all that was measured, rows by their names."""
    moved = (
        "`moved` is the largest change of a value before its noise, divided by the sensitivity that ε was computed for."
    )
    parts = [INTRO, "## Mechanisms", "", moved, ""]
    for group, title in TITLES.items():
        head = ["case", "moved", "ε claimed", "ε found"]
        rows = [known[case.name] for case in audit_cases.GROUPS[group]() if case.name in known]
        parts += [f"### {title}", "", table(head, rows), ""]
    faults = [known[fault.name] for fault in audit_faults.FAULTS if fault.name in known]
    return "\n".join([*parts, "## Planted faults", "", table(["fault", "found by", "what it says"], faults), ""])


def main(groups: list[str]) -> None:
    store = DOCS / "self_audit.json"
    every = [(group, case, measured) for group in audit_cases.here() for case in audit_cases.GROUPS[group]()]
    every += [("faults", fault, caught) for fault in audit_faults.here()]
    for group, one, row in every:
        if not groups or group in groups:
            made = row(one)
            known = json.loads(store.read_text("utf-8")) if store.exists() else {}
            known[one.name] = made
            store.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", "utf-8")
            print(*made, sep=" | ", flush=True)
    if "Flower" in audit_cases.here():  # else its names are not known
        (DOCS / "self_audit.md").write_text(page(json.loads(store.read_text("utf-8"))), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
