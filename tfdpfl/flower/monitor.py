"""Shows what an operator may see of a training: files that Prometheus, scripts and a browser read. No Flower here.

Amplification by sampling needs it to be secret who took part in a round, and how many did. So with a sampling rate
these files hold neither sizes of cohorts, nor dropouts, nor times of rounds, because these depend on who was asked. For
the same reason their times of modification are that of the start.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path

from tfdpfl import _formats
from tfdpfl.flower import journal

__all__ = ["Monitor"]

VERSION = 1
# Name, kind and help of what Prometheus reads. A fact that is None is left out.
METRICS = {
    "epsilon": ("gauge", "Upper bound on epsilon of all that was released, at delta."),
    "target_epsilon": ("gauge", "The epsilon that ends the training."),
    "epsilon_left": ("gauge", "What is left of target_epsilon."),
    "delta": ("gauge", "Delta of epsilon."),
    "rounds_charged": ("counter", "Rounds whose result was released, or may have been."),
    "clip": ("gauge", "The clip of the last round."),
    "noise_multiplier": ("gauge", "The noise's standard deviation over the clip."),
    "clients_asked": ("gauge", "Clients that the last round asked, if its size is public."),
    "clients_replied": ("gauge", "Clients that answered, whatever they sent, if that is public."),
    "dropouts": ("gauge", "Clients that were asked and did not answer, if that is public."),
    "clients_too_new": ("gauge", "Asked clients that do not count, as their tfdpfl is newer, if that is public."),
    "round_seconds": ("gauge", "Time from the messages of the last round to its result, if that is public."),
}
PUBLIC_COHORTS_ONLY = ("clients_asked", "clients_replied", "dropouts", "clients_too_new", "round_seconds")


class Monitor:
    """Writes `rounds.jsonl`, `metrics.prom` and `index.html` into a folder.

    Args:
      folder: it is made if it is not there.
      public_cohorts: whether sizes of cohorts and times of rounds may be seen.

    Raises:
      OSError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike, public_cohorts: bool):
        self._folder, self._public = Path(folder), public_cohorts
        self._folder.mkdir(parents=True, exist_ok=True)
        page = importlib.resources.files(journal.__package__).joinpath("dashboard.html").read_text("utf-8")
        (self._folder / "index.html").write_text(page, "utf-8")
        self._began, self._started = time.monotonic(), time.time()

    def begin(self) -> None:
        """A round's messages leave."""
        self._began = time.monotonic()

    def round(self, server_round: int, facts: Mapping[str, float | None]) -> None:
        """Shows a round that was charged. It raises nothing: the training does not depend on what is shown.

        Args:
          server_round: its number.
          facts: numbers by the names of `METRICS`.
        """
        known = {**facts, "round_seconds": time.monotonic() - self._began}
        shown = {
            name: value for name, value in known.items()
            if value is not None and (self._public or name not in PUBLIC_COHORTS_ONLY)
        }  # fmt: skip
        try:
            with open(self._folder / "rounds.jsonl", "a", encoding="utf-8") as file:
                line = {"version": VERSION, "round": server_round, **shown}
                file.write(json.dumps(_formats.strict(line)) + "\n")
            new = self._folder / "metrics.prom.new"
            new.write_text(prometheus(shown), "utf-8")
            os.replace(new, self._folder / "metrics.prom")
            if not self._public:
                for name in ("metrics.prom", "rounds.jsonl", "."):
                    os.utime(self._folder / name, (self._started, self._started))
        except OSError as error:
            from tfdpfl.flower._flwr import log

            log.error("Round %d is not shown in %s (%s)", server_round, self._folder, error)


def prometheus(facts: Mapping[str, float | None]) -> str:
    """Returns facts in the text format of Prometheus."""
    lines = []
    for name, (kind, help_) in METRICS.items():
        value = facts.get(name)
        if value is not None:
            full = f"tfdpfl_{name}" + ("_total" if kind == "counter" else "")
            number = "+Inf" if value == float("inf") else repr(float(value))
            lines += [f"# HELP {full} {help_}", f"# TYPE {full} {kind}", f"{full} {number}"]
    return "\n".join(lines) + "\n"
