"""The examples run to their end, as they do without data and without a network."""

import re
import runpy
import sys
from pathlib import Path

import pytest

import tfdpfl.datasets

EXAMPLES = Path(__file__).parents[1] / "examples"
# What a program is given, and what it says. tests/federated and tests/flower run the others.
RUNS = {
    "lora_decoder": (
        ["--quick"],
        r"192 of 5,776 weights are trained(.*\n)*.*epsilon = (8|7\.9)(.*\n)*.*with private LoRA\ntokens a second",
    ),
    "label_dp_census": (
        ["--quick"],
        r"debiased +\d+\n(.*\n)*.*label_dp_census\.png",
    ),
    "label_dp_mnist": (
        ["--quick", "--epsilons", "1", "--epochs", "1", "--methods", "forward", "alibi", "prior", "stages", "dpsgd"],
        r"digits, total ε = 2\.05: \d+\.\d+% of the labels are flipped",
    ),
    "label_dp_regression": (["--quick"], r"Laplace noise +1 +\d+\.\d +\d+\.\d+ ± 0\.00"),
    "mnist_banded": (
        ["--quick"],
        r"noise of 2 bands: test accuracy [\d.]+%(.*\n)*.*epsilon = [78]\.",
    ),
    "mnist_dp_sgd": (
        ["--quick", "--verbose", "0"],
        r"mean of 1: [\d.]+%, \d+ s a run\n(.*\n)*.*epsilon = (1\.0|0\.9)",
    ),
    "scattering": (["--quick"], r"ε 1\.000: [789]\d\.\d+% in \d+ s"),
    "pate_hospitals": (["--quick"], r"10 by the teachers\n(.*\n)*.*student right: [\d.]+%"),
    "pate_mnist": (
        ["--quick"],
        r"4 teachers of 360 examples(.*\n)*.*one teacher alone right: [\d.]+%",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("program", RUNS)
def test_an_example_runs_to_its_end(program, tmp_path, monkeypatch, capsys):
    arguments, says = RUNS[program]
    if program == "lora_decoder":
        pytest.importorskip("keras_hub", reason="the example needs KerasHub, which nothing else does")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TFDPFL_DATA_DIR", raising=False)
    digits = tfdpfl.datasets.load_digits()
    monkeypatch.setattr(tfdpfl.datasets, "load_image_data", lambda data_dir=None: digits)
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    try:
        runpy.run_path(str(EXAMPLES / f"{program}.py"), run_name="__main__")
    except SystemExit as end:  # click's
        assert not end.code
    assert re.search(says, capsys.readouterr().out)


def test_the_decoder_says_that_it_needs_keras_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(SystemExit, match=r"needs KerasHub.*pip install keras-hub"):
        runpy.run_path(str(EXAMPLES / "lora_decoder.py"))


@pytest.mark.parametrize("program", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_every_example_has_a_quick_run(program):
    assert '"--quick"' in program.read_text("utf-8")
