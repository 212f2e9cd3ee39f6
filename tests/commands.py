"""Runs `tfdpfl ledger` for tests of what it says."""

import json

from click.testing import CliRunner

from tfdpfl.accounting import PrivacyLedger
from tfdpfl.cli import main

DELTA = 1e-5


def run(*args, code=0):
    """What `tfdpfl ledger` prints, given these arguments."""
    done = CliRunner().invoke(main, ["ledger", *map(str, args)])
    assert done.exit_code == code, done.output
    return done.output


def epsilons(path, *more, code=0):
    """({level: ε}, whether all rounds can be read), as `tfdpfl ledger epsilon` says of a file."""
    text = run("epsilon", path, "--delta", DELTA, "--accountant", "rdp", "--json", *more, code=code)
    said, _ = json.JSONDecoder().raw_decode(text)
    return {figure["level"]: figure["epsilon"] for figure in said["figures"]}, said["complete"]


def cost(*events, adjacency="zero_out"):
    """The ε of pairs of an event and how often it happened."""
    ledger = PrivacyLedger()
    for event, count in events:
        ledger.add(event, count, adjacency=adjacency)
    return ledger.epsilon(DELTA, "rdp")
