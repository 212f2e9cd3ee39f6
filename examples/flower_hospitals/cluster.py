"""Runs an app as it is deployed, on one machine: a SuperLink and a SuperNode for each hospital, as processes.

    python examples/flower_hospitals/cluster.py
    python examples/flower_hospitals/cluster.py --app app --data my-data # the app of flower_csv.py, with your files

The processes talk over loopback with TLS, and each node has a key of its own. Nothing is left behind. On several
machines the same commands run with other addresses: see docs/flower-operations.md.
"""

from __future__ import annotations

import argparse
import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives import serialization as form
from cryptography.hazmat.primitives.asymmetric import ec

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
ADDRESS = "127.0.0.1"
HOSPITALS = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timeout", type=float, default=600, help="seconds after which all is ended")
    parser.add_argument("--keep", type=Path, help="a folder for logs, ledgers and the model, to look at afterwards")
    parser.add_argument("--app", type=Path, default=HERE, help="a folder for `flwr run`")
    parser.add_argument("--data", type=Path, help="a folder of CSV files, each of which a node of its own reads")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that all that it started ends, too
    with tempfile.TemporaryDirectory(prefix="flower-hospitals-") as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        nodes, config = [f"partition-id={number}" for number in range(HOSPITALS)], []
        if arguments.data:
            nodes = [f'csv="{path}"' for path in sorted(arguments.data.resolve().glob("*.csv"))]
            config.append(f"num-hospitals={len(nodes)}")
        if arguments.keep and "\nmodel = " in (arguments.app / "pyproject.toml").read_text():
            config.append(f'model="{folder.resolve() / "model.keras"}"')
        options = ["--run-config", " ".join(config)] if config else []
        certificates(folder, len(nodes))
        with Cluster(folder) as cluster:
            return cluster.run(arguments.app, nodes, options, time.monotonic() + arguments.timeout)


def certificates(folder: Path, hospitals: int = HOSPITALS) -> None:
    """An authority, the server's certificate for loopback, and a key for each hospital."""
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hospitals' authority")])
    now = datetime.datetime.now(datetime.timezone.utc)

    def certificate(name: x509.Name, key: ec.EllipticCurvePrivateKey, is_authority: bool) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False
            )
        )  # fmt: skip
        if is_authority:
            use = dict.fromkeys(
                ["digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
                 "encipher_only", "decipher_only"], False,
            )  # fmt: skip
            builder = builder.add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **use), critical=True)
        else:
            names = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(ADDRESS))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(authority, hashes.SHA384())

    host = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, ADDRESS)])
    write(folder / "ca.crt", certificate(issuer, authority, True).public_bytes(form.Encoding.PEM))
    write(folder / "server.crt", certificate(host, server, False).public_bytes(form.Encoding.PEM))
    pem = form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption()
    write(folder / "server.key", server.private_bytes(*pem))
    for number in range(hospitals):
        make_key(folder / f"hospital-{number}")


def make_key(path: Path) -> None:
    """What `ssh-keygen -t ecdsa -b 384` makes: a private key, and next to it the public one."""
    own = ec.generate_private_key(ec.SECP384R1())
    private = form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption()
    write(path, own.private_bytes(*private))
    public = own.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    write(path.with_name(f"{path.name}.pub"), public)


def write(path: Path, content: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)


def free_port() -> int:
    with socket.socket() as found:
        found.bind((ADDRESS, 0))
        return found.getsockname()[1]


class Cluster:
    """Processes, each in a group of its own, all of them ended on the way out."""

    def __init__(self, folder: Path):
        self.folder, self.port, self.processes = folder.resolve(), free_port(), {}
        self.environment = {
            **os.environ,
            "FLWR_HOME": str(self.folder / "flwr"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONUNBUFFERED": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
        }
        home = self.folder / "flwr"
        home.mkdir(exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "hospitals"\n\n[superlink.hospitals]\naddress = "{ADDRESS}:{self.port}"\n'
            f'root-certificates = "{self.folder / "ca.crt"}"\n'
        )

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *why) -> None:
        end([*self.processes.values()])

    def start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "wb") as log:
            self.processes[name] = subprocess.Popen(
                [BIN / command[0], *command[1:]], env=self.environment, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def flwr(self, *command: str) -> str:
        done = subprocess.run(
            [BIN / "flwr", *command], env=self.environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            raise RuntimeError(f"flwr {' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return done.stdout

    def run(self, app: Path, nodes: list[str], options: list[str], until: float) -> int:
        """Runs an app with a node for each of these configs, to which a ledger is added."""
        self.serve(until)
        for number, config in enumerate(nodes):
            self.register(f"hospital-{number}")
            self.join(f"hospital-{number}", f'{config} ledger="{self.folder / f"ledger-{number}.json"}"')
        self.start("run", "flwr", "run", str(app), "hospitals", "--stream", *options)
        shown = 0
        while self.processes["run"].poll() is None:
            shown = self.show(shown)
            self.check(until)
        self.show(shown)
        return self.processes["run"].returncode

    def serve(self, until: float) -> None:
        """Starts the SuperLink, and waits until it listens."""
        self.start(
            "superlink", "flower-superlink", "--host", ADDRESS, "--port", str(self.port), "--enable-supernode-auth",
            "--database", str(self.folder / "superlink.db"), "--disable-runtime-dependency-installation",
            "--ssl-ca-certfile", str(self.folder / "ca.crt"), "--ssl-certfile", str(self.folder / "server.crt"),
            "--ssl-keyfile", str(self.folder / "server.key"),
        )  # fmt: skip
        while not listening(self.port):
            self.check(until)

    def register(self, key: str) -> None:
        """Makes the public key of a hospital known to the SuperLink."""
        self.flwr("supernode", "register", str(self.folder / f"{key}.pub"), "hospitals")

    def join(self, key: str, config: str) -> None:
        """Starts the SuperNode of a hospital, with its key."""
        self.start(
            f"{key}.node", "flower-supernode", "--superlink", f"{ADDRESS}:{self.port}",
            "--root-certificates", str(self.folder / "ca.crt"),
            "--auth-supernode-private-key", str(self.folder / key),
            "--host", ADDRESS, "--port", str(free_port()), "--node-config", config,
        )  # fmt: skip

    def end(self, name: str) -> None:
        """Ends a process and its children."""
        end([self.processes.pop(name)])

    def show(self, shown: int) -> int:
        text = (self.folder / "run.log").read_text(errors="replace")
        print(text[shown:], end="", flush=True)
        return len(text)

    def check(self, until: float) -> None:
        """Waits a little. Raises where a process has ended that should not, or where time is up."""
        time.sleep(0.3)
        for name, process in self.processes.items():
            if name != "run" and process.poll() is not None:
                raise RuntimeError(f"{name} has ended:\n{(self.folder / f'{name}.log').read_text()[-3000:]}")
        if time.monotonic() > until:
            tails = "\n".join(
                f"{name}:\n{(self.folder / f'{name}.log').read_text()[-1500:]}" for name in self.processes
            )
            raise TimeoutError(f"time is up\n{tails}")


def end(processes: list[subprocess.Popen]) -> None:
    for wanted in (signal.SIGTERM, signal.SIGKILL):
        alive = [process for process in processes if group_alive(process.pid)]
        for process in alive:
            os.killpg(process.pid, wanted)
        until = time.monotonic() + 15
        while any(group_alive(process.pid) for process in alive) and time.monotonic() < until:
            for process in alive:
                process.poll()
            time.sleep(0.1)


def group_alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def listening(port: int) -> bool:
    with socket.socket() as found:
        found.settimeout(1)
        return found.connect_ex((ADDRESS, port)) == 0


if __name__ == "__main__":
    sys.exit(main())
