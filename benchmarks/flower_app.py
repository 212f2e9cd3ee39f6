"""Writes a Flower app into a folder, for programs that start real processes with it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

PROJECT = """
[project]
name = "{name}"
version = "{version}"
description = "Runs on one machine"
license = "Apache-2.0"
dependencies = []

[build-system]
requires = ["setuptools>=64"]
build-backend = "setuptools.build_meta"

[tool.flwr.app]
publisher = "tfdpfl"

[tool.flwr.app.components]
serverapp = "{name}.server:app"
clientapp = "{name}.client:app"

[tool.flwr.app.config]
"""


def write_app(
    folder: Path, name: str, server: str, client: str, config: Mapping[str, float | str], version: str = "1.0.0"
) -> None:
    """Writes the modules of an app and its pyproject.toml.

    Args:
      folder: the project, which is made if it is not there.
      name: of its package.
      server, client: the text of the modules, each with an ``app``.
      config: what its run config is, unless ``flwr run`` gives something else.
      version: the app's.
    """
    (folder / name).mkdir(parents=True, exist_ok=True)
    for module, text in ("__init__", ""), ("server", server), ("client", client):
        (folder / name / f"{module}.py").write_text(text)
    given = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())  # which TOML reads, too
    (folder / "pyproject.toml").write_text(PROJECT.format(name=name, version=version) + given)
