"""The command line says what the functions say, in text and in JSON, and refuses in one line."""

import importlib
import json
import subprocess
import sys
import types

import pytest
from click.testing import CliRunner

from tfdpfl._version import __version__
from tfdpfl.accounting import (
    PrivacyLedger,
    compute_epsilon,
    compute_noise_multiplier,
    compute_num_steps,
    privacy_statement,
)
from tfdpfl.cli import main

DATA = ["--num-examples", "6000", "--batch-size", "60", "--delta", "1e-5"]
RUN = [*DATA, "--noise-multiplier", "2.0"]
KEYWORDS = dict(num_examples=6000, batch_size=60, delta=1e-5)
RDP = ["--accountant", "RDP"]


def invoke(*args):
    return CliRunner().invoke(main, list(args))


def ok(*args):
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.slow
def test_epsilon_is_the_functions():
    printed = json.loads(ok("epsilon", *RUN, "--num-epochs", "2", "--json"))
    assert printed["epsilon"] == compute_epsilon(**KEYWORDS, noise_multiplier=2.0, num_epochs=2)
    assert printed["accountant"] == "pld" and printed["delta"] == 1e-5 and printed["steps"] == 200


def test_text_carries_delta_adjacency_sampling_and_accountant():
    text = ok("epsilon", *RUN, *RDP, "--num-steps", "3", "--sampling", "shuffle")
    for part in ("epsilon = ", "delta 1e-05", "zero_out", "shuffle", "rdp", "3 steps"):
        assert part in text


def test_text_says_what_a_large_delta_and_shuffled_batches_change():
    text = ok("epsilon", *RUN, *RDP, "--num-steps", "3", "--delta", "1e-3")
    assert "Note: delta = 0.001 is not below 1 / num_examples" in text
    shuffled = compute_epsilon(
        **{**KEYWORDS, "delta": 1e-3}, noise_multiplier=2.0, num_steps=3, sampling="shuffle", accountant="rdp"
    )
    assert f"Note: fit shuffles its batches, at epsilon {shuffled:.3f}"[:45] in text and "poisson_batches" in text
    assert "Note" not in ok("epsilon", *RUN, *RDP, "--num-steps", "3", "--sampling", "shuffle")
    uneven = ok("epsilon", *RUN, *RDP, "--num-steps", "172", "--sampling", "shuffle", "--batch-size", "70")
    assert "Note: The 172 steps count as 2 passes over the data, each with its last, smaller batch" in uneven
    assert uneven.count("Note") == 1


def test_a_users_examples_are_an_option():
    args = ("epsilon", *RUN, "--num-steps", "300", "--sampling", "shuffle", "--max-examples-per-user", "3")
    printed = json.loads(ok(*args, "--json"))
    how = dict(noise_multiplier=2.0, num_steps=300, sampling="shuffle", max_examples_per_user=3)
    assert printed["epsilon"] == compute_epsilon(**KEYWORDS, **how) and printed["max_examples_per_user"] == 3
    assert "for a user of at most 3 examples" in ok(*args)


@pytest.mark.slow
def test_noise_is_the_functions():
    args = ("noise", *DATA, *RDP, "--num-epochs", "2", "--target-epsilon", "1")
    sigma = compute_noise_multiplier(**KEYWORDS, num_epochs=2, target_epsilon=1, accountant="rdp")
    printed = json.loads(ok(*args, "--json"))
    assert printed["noise_multiplier"] == sigma and printed["epsilon"] <= 1
    assert float(ok(*args).split("noise multiplier = ")[1].split()[0]) == pytest.approx(sigma, rel=1e-4)


@pytest.mark.slow
def test_steps_are_the_functions():
    args = ("steps", *RUN, *RDP, "--target-epsilon", "1")
    steps = compute_num_steps(**KEYWORDS, noise_multiplier=2.0, target_epsilon=1, accountant="rdp")
    assert json.loads(ok(*args, "--json"))["steps"] == steps
    assert f"steps = {steps}\n" in ok(*args)


def test_statement_is_the_functions():
    args = ("statement", *RUN, *RDP, "--num-epochs", "2", "--num-microbatches", "10", "--sampling", "shuffle")
    how = dict(num_epochs=2, num_microbatches=10, accountant="rdp", sampling="shuffle")
    assert ok(*args) == privacy_statement(**KEYWORDS, noise_multiplier=2.0, **how) + "\n"
    assert json.loads(ok(*args, "--json"))["num_microbatches"] == 10


def test_an_infinite_epsilon_is_strict_json():
    printed = ok("epsilon", *DATA, "--noise-multiplier", "0", "--num-steps", "1", "--json")
    assert json.loads(printed, parse_constant=pytest.fail)["epsilon"] == "inf"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["epsilon", *RUN, "--num-steps", "1", "--delta", "1"],
            "Error: --delta must be strictly between 0 and 1",
        ),
        (["epsilon", *RUN], "exactly one of --num-epochs and --num-steps, got --num-epochs=None"),
        (
            ["epsilon", *RUN, "--num-steps", "1", "--batch-size", "7000"],
            "--batch-size must be at most --num-examples=6000, got 7000",
        ),
        (
            ["epsilon", *RUN, "--num-steps", "1", "--sampling", "shuffle", "--adjacency", "add_or_remove_one"],
            "no known ε for --adjacency=",
        ),
        (["epsilon", *RUN, "--num-steps", "1", "--max-examples-per-user", "0"], "--max-examples-per-user must be"),
        (["noise", *DATA, "--num-steps", "1", "--target-epsilon", "0"], "--target-epsilon must be"),
        (["steps", *RUN, *RDP, "--target-epsilon", "0.001"], "less than one use"),
        (["statement", *DATA, "--num-steps", "1", "--noise-multiplier", "-1"], "--noise-multiplier must be"),
    ],
)
def test_a_bad_value_is_one_line_and_no_traceback(args, message):
    result = invoke(*args)
    assert result.exit_code == 2 and result.output.startswith("Error: ") and message in result.output
    assert len(result.output.splitlines()) == 1 and isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    "args", [["epsilon"], ["epsilon", *RUN, "--sampling", "bernoulli"], ["judge"], ["epsilon", "--noise"]]
)
def test_a_bad_call_is_a_usage_error(args):
    result = invoke(*args)
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_help_lists_the_commands_and_version_the_version():
    text = ok("--help")
    assert all(command in text for command in ("audit", "demo", "epsilon", "noise", "steps", "statement"))
    assert __version__ in ok("--version")
    for command in ("audit", "demo", "epsilon", "noise", "steps", "statement"):
        assert "--json" in ok(command, "--help")


def test_demo_hands_its_options_on(monkeypatch):
    calls = []
    demo = types.ModuleType("tfdpfl.demo")
    demo.run = lambda **options: calls.append(options)
    monkeypatch.setitem(sys.modules, "tfdpfl.demo", demo)
    monkeypatch.delenv("TFDPFL_DATA_DIR", raising=False)
    ok("demo")
    monkeypatch.setenv("TFDPFL_DATA_DIR", "mnist")
    ok("demo", "--epochs", "3", "--output", "a.png", "--json", "--seed", "7")
    assert calls == [
        dict(data_dir=None, epochs=None, output="tfdpfl-demo.png", as_json=False, seed=None),
        dict(data_dir="mnist", epochs=3, output="a.png", as_json=True, seed=7),
    ]


@pytest.mark.slow
def test_no_command_but_demo_loads_tensorflow_and_refusals_load_nothing_slow():
    code = (
        "import sys; from click.testing import CliRunner; from tfdpfl.cli import main;"
        "slow = {'tensorflow', 'keras', 'numpy', 'scipy', 'dp_accounting'};"
        f"run = lambda *args: CliRunner().invoke(main, ['epsilon', *{RUN!r}, *args]);"
        "assert run('--help').exit_code == 0 and run().exit_code == 2 and not slow & set(sys.modules);"
        "assert run('--num-steps', '5').output.startswith('epsilon = ');"
        "assert not {'tensorflow', 'keras'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_secure_noise_is_an_option_of_every_figure():
    args = (*DATA, "--num-steps", "100", "--secure-noise", "--json")
    found = json.loads(ok("noise", *args, "--target-epsilon", "2.0"))
    sigma = compute_noise_multiplier(**KEYWORDS, num_steps=100, target_epsilon=2.0, secure_noise=True)
    assert found["noise_multiplier"] == sigma and found["accountant"] == "rdp"
    priced = json.loads(ok("epsilon", *args, "--noise-multiplier", str(sigma)))
    assert priced["epsilon"] == compute_epsilon(**KEYWORDS, num_steps=100, noise_multiplier=sigma, secure_noise=True)


@pytest.fixture
def ledger(tmp_path):
    file = tmp_path / "training.json"
    file.write_text(json.dumps(PrivacyLedger().record(2.0, 10, num_examples=6000, batch_size=60).to_dict()), "utf-8")
    return str(file)


def test_a_page_is_written_next_to_the_report_and_its_folder_is_checked_before(ledger, tmp_path, monkeypatch):
    args = ("report", ledger, "--delta", "1e-5", "--html")
    assert "training" in ok(*args, str(tmp_path / "page.html")) and (tmp_path / "page.html").exists()
    monkeypatch.setattr("tfdpfl.reports.report", lambda *args, **kwargs: pytest.fail("the work began"))
    refused = invoke(*args, str(tmp_path / "no" / "page.html"))
    assert refused.exit_code == 2 and "no writable folder" in refused.output and "Make it first" in refused.output
    refused = invoke("demo", "--output", str(tmp_path / "no" / "demo.png"))
    assert refused.exit_code == 2 and "no writable folder" in refused.output


def test_a_page_that_cannot_be_written_costs_no_report(ledger, tmp_path, monkeypatch):
    def fail(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tfdpfl.reports.ProjectReport.to_html", fail)
    done = invoke("report", ledger, "--delta", "1e-5", "--html", str(tmp_path / "page.html"))
    assert done.exit_code == 2 and "training" in done.output and "No space left" in done.output


@pytest.mark.parametrize("said", ["cow", "=cow", "training="])
def test_a_unit_without_a_file_is_refused(ledger, said):
    refused = invoke("report", ledger, "--delta", "1e-5", "--unit", said)
    assert refused.exit_code == 2 and "Write FILE=UNIT" in refused.output and len(refused.output.splitlines()) == 1


def test_a_unit_of_a_file_that_is_not_there_names_the_option(ledger):
    refused = invoke("report", ledger, "--delta", "1e-5", "--unit", "other=example")
    assert refused.exit_code == 2 and refused.output.startswith("Error: --unit names 'other', which is no part")


def test_the_worker_command_hands_its_options_on_and_says_what_is_missing(monkeypatch):
    calls = []
    runtime = types.ModuleType("tfdpfl.federated.runtime")
    runtime.worker = lambda *options: calls.append(options)
    monkeypatch.setitem(sys.modules, "tfdpfl.federated.runtime", runtime)
    federated = importlib.import_module("tfdpfl.federated")
    monkeypatch.setattr(federated, "runtime", runtime, raising=False)
    for arguments in (["--port", "8001"], ["--port", "8001", "--max-concurrent-clients", "3"]):
        assert CliRunner().invoke(main, ["worker", *arguments]).exit_code == 0
    assert calls == [(8001, None), (8001, 3)]
    assert CliRunner().invoke(main, ["worker", "--port", "0"]).exit_code == 2

    def missing(*options):
        raise ImportError("pip install 'tfdpfl[federated]'")

    runtime.worker = missing
    refused = CliRunner().invoke(main, ["worker", "--port", "8001"])
    assert refused.exit_code == 2
    assert "tfdpfl[federated]" in refused.output
