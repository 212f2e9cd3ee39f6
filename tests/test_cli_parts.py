"""Refusals of the commands name the options that a user typed, and files are refused before the work begins."""

import click
import pytest
from click.testing import CliRunner

from tfdpfl import _cli_parts


def refused(text, *args, error=ValueError):
    """What a command with some options says of an error of the package."""

    @click.command()
    @click.option("--num-steps", type=int)
    @click.option("--delta", type=float)
    @click.option("--output", type=_cli_parts.NewFile())
    def command(**_):
        with _cli_parts.clean_errors():
            raise error(text)

    done = CliRunner().invoke(command, args)
    assert done.exit_code == 2 and "Traceback" not in done.output
    return done.output


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("num_steps must be at least 1, got 0", "--num-steps must be at least 1, got 0"),
        ("delta must be below 1", "--delta must be below 1"),
        ("delta=2 is no probability", "--delta=2 is no probability"),
        # Words of the sentence, names with a prefix and quoted values stay as they are.
        ("of every delta below 1", "of every delta below 1"),
        ("the key 'num_steps' and max_num_steps", "the key 'num_steps' and max_num_steps"),
        ("already --num-steps=3", "already --num-steps=3"),
    ],
)
def test_a_refusal_is_one_line_that_names_options_and_not_arguments(text, shown):
    assert refused(text) == f"Error: {shown}\n"


def test_errors_of_files_are_refusals_and_faults_of_the_code_are_not():
    assert refused("disk full", error=OSError) == "Error: disk full\n"
    with pytest.raises(KeyError), _cli_parts.clean_errors():
        raise KeyError("num_steps")


def test_a_file_whose_folder_is_not_there_is_refused_before_the_work(tmp_path):
    assert "no writable folder" in refused("the work began", "--output", str(tmp_path / "no" / "file"))
    assert refused("the work began", "--output", str(tmp_path / "file")) == "Error: the work began\n"
