"""Holds what the commands of `tfdpfl` share: options, and refusals of one line."""

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

__all__ = ["DELTA", "JSON", "TARGET", "BadArgument", "NewFile", "clean_errors"]

DELTA = click.option("--delta", type=float, required=True, help="Delta, below 1 / num-examples.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")

TARGET = click.FloatRange(min=0, min_open=True)  # of an epsilon


class BadArgument(click.ClickException):
    """A refusal that is one line and the exit code of click's own usage errors."""

    exit_code = 2


class NewFile(click.Path):
    """A file to be written when the work is done: its folder must be there before, or the work would be lost."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        folder = os.path.dirname(os.path.abspath(value))
        if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
            self.fail(
                f"{value!r} cannot be written: there is no writable folder {folder!r}. Make it first.", param, ctx
            )
        return super().convert(value, param, ctx)


@contextmanager
def clean_errors() -> Iterator[None]:
    """A refused argument names its remedy; a traceback would say no more."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the report says it
            yield
    except (OSError, ValueError) as error:
        raise BadArgument(_with_options(str(error))) from error


def _with_options(text: str) -> str:
    """Returns a message of the package with the options of the running command, in place of Python's arguments."""
    context = click.get_current_context(silent=True)
    for option in context.command.params if context is not None else []:
        name, shown = option.name or "", max(option.opts, key=len)
        if not isinstance(option, click.Option):
            continue
        # A name of one word can be a word of the sentence, unless it has a value or is what the sentence is about.
        named = rf"\b{name}\b" if "_" in name else rf"\b{name}(?==)|^{name}(?= (?:must|names)\b)"
        text = re.sub(rf"(?<![-.'\w]){named}", shown, text)
    return text
