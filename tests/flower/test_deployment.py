"""The files of a deployment say what Flower and the guard understand, and keep an app from the network and the keys."""

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("flwr")
import yaml
from flwr.supercore.cli.flower_superexec import _parse_args
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from tfdpfl.flower.guard import Policy

FOLDER = Path(__file__).parents[2] / "examples" / "flower_hospitals" / "deployment"
PARSERS = {
    "flower-superlink": _parse_args_run_superlink,
    "flower-superexec": _parse_args,
    "tfdpfl.flower.guard": _parse_args_run_supernode,
}


def unit(name):
    text = (FOLDER / f"{name}.service").read_text().replace("\\\n", " ")
    return re.findall(r"^(\w+)=(.*)$", text, re.M)


def parsed(command):
    """The options of a command, as Flower's own parser reads them."""
    words = shlex.split(command)
    program = next(word.rsplit("/", 1)[-1] for word in words if word.rsplit("/", 1)[-1] in PARSERS)
    at = next(i for i, word in enumerate(words) if word.endswith(program)) + 1
    return PARSERS[program]().parse_args(words[at + 1 if "guard" in program else at :])


def test_the_options_of_units_and_containers_are_flowers():
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    units = {name: dict(unit(f"flower-{name}")) for name in ("superlink", "supernode", "app")}
    for commands in (
        {name: made["ExecStart"] for name, made in units.items()},
        {name: re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", made["command"]) for name, made in services.items()},
    ):
        server, node, app = (parsed(commands[name]) for name in ("superlink", "supernode", "app"))
        assert server.enable_supernode_auth and server.database and not server.insecure
        assert node.isolation == "process" and node.auth_supernode_private_key and not node.insecure
        assert (
            node.superlink == "server.example:8000" and app.runtime_api_address.endswith(":9094") and node.port == 9094
        )
    assert {"FLWR_TELEMETRY_ENABLED", "FLWR_DISABLE_UPDATE_CHECK", "FLWR_HOME"} <= {*services["app"]["environment"]}


def test_the_app_has_neither_network_nor_keys_nor_policy():
    app = unit("flower-app")
    node = dict(unit("flower-supernode"))
    assert ("IPAddressDeny", "any") in app and ("IPAddressAllow", "127.0.0.1") in app
    assert ("RestrictAddressFamilies", "AF_INET") in app and dict(app)["User"] != node["User"]
    assert {"/etc/flower", "/var/lib/flower-node"} == {*dict(app)["InaccessiblePaths"].split()}
    made = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    service, other = made["services"]["app"], made["services"]["supernode"]
    assert service["networks"] == ["inside"] and made["networks"]["inside"]["internal"] is True
    assert service["user"] != other["user"] and not any("keys" in v or "policy" in v for v in service["volumes"])
    assert not {v.split(":")[0] for v in service["volumes"]} & {v.split(":")[0] for v in other["volumes"]}


def test_each_unit_finds_the_commands_that_flower_starts():
    for name in ("superlink", "supernode", "app"):
        made = unit(f"flower-{name}")
        program = Path(shlex.split(dict(made)["ExecStart"])[0])
        assert ("Environment", f"PATH={program.parent}:/usr/bin:/bin") in made, name


def test_the_image_lets_each_user_write_into_the_volumes_that_the_user_has():
    image = (FOLDER.parents[2] / "Dockerfile").read_text()
    owners = re.findall(r"install -d -m 700 -o (\d+) -g (\d+) (\S+)", image)
    for service in yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"].values():
        for volume in service["volumes"]:
            source, folder = volume.split(":")[:2]
            assert source.startswith("./") or (*service["user"].split(":"), folder) in owners, volume


def test_the_policy_is_one_that_the_guard_reads_and_its_answer_is_in_time():
    policy = Policy.read(FOLDER / "policy.toml")
    assert policy.protect and policy.ledger_path.startswith("/var/lib/flower-node/")
    timeouts = re.findall(r"timeout=(\d+)", (FOLDER.parent / "hospitals" / "server.py").read_text())
    assert timeouts and policy.answer_after < min(map(int, timeouts))
