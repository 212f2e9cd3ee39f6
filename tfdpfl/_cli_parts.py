"""Holds what the commands of `tfdpfl` share: options, and refusals of one line."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import click

__all__ = ["DELTA", "JSON", "BadArgument", "NewFile", "clean_errors"]

DELTA = click.option("--delta", type=float, required=True, help="Delta, below 1 / num-examples.")
JSON = click.option("--json", "as_json", is_flag=True, help="Print a JSON object.")


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
        raise BadArgument(str(error)) from error
