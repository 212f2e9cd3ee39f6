"""`tfdpfl doctor` states what is there, and what to do about what is not."""

import os
import secrets
import sys

import tensorflow as tf
from click.testing import CliRunner

from tfdpfl import doctor, native
from tfdpfl._version import __version__
from tfdpfl.cli import main


def test_the_report_has_ten_lines_at_most_and_the_facts_of_this_machine(monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    result = CliRunner().invoke(main, ["doctor"])
    assert result.exit_code == 0, result.output
    lines = {line.split()[0]: line for line in result.output.splitlines()}
    assert len(lines) == len(result.output.splitlines()) <= 10
    assert __version__ in lines["tfdpfl"] and tf.__version__ in lines["TensorFlow"]
    assert "none: TFDPFL_NATIVE=0 is set" in lines["kernels"] and "unset TFDPFL_NATIVE." in lines["kernels"]
    assert "by aes-128-ctr" in lines["noise"]
    assert f"{len(os.sched_getaffinity(0))} cores, no accelerator" in lines["devices"]


def test_the_kernels_line_names_the_instructions_or_the_reason(monkeypatch):
    monkeypatch.delenv(native.SWITCH, raising=False)
    found, line = native.kernels(), doctor.examine()[2]
    assert line.name == "kernels"
    assert (found.instructions if found.library else found.missing) in line.fact
    assert bool(line.cost) == (found.library is None)


def test_without_tensorflow_and_entropy_the_report_says_what_is_left(monkeypatch):
    def none(_):
        raise NotImplementedError("no device")

    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setattr(secrets, "token_bytes", none)
    lines = {finding.name: str(finding) for finding in doctor.examine()}
    assert "not installed. Only the accounting works without it" in lines["TensorFlow"]
    assert "none: no device. No private noise can be drawn" in lines["entropy"]


def test_oneDNN_switched_off_is_stated(monkeypatch):
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    assert "unset TF_ENABLE_ONEDNN_OPTS" in doctor.examine()[1].cost
