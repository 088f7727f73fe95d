"""The entry point: the verbs, and the one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from flysurgery import __version__
from flysurgery.cli import autotune, bench, convert, doctor, evaluate, finetune, inspect
from flysurgery.cli.options import Command, Group, option
from flysurgery.errors import FlysurgeryError, shortened

# The parent of BadParameter, whichever click it comes from: typer used to import click and now carries its own.
UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]

CPU_ALLOCATOR = "DefaultCPUAllocator"
"""In the message of the plain RuntimeError that PyTorch raises where a CPU has no memory left."""

app = typer.Typer(
    name="flysurgery",
    help="Replace the linear layers of a Vision Transformer by products of two Kronecker-sparse factors.",
    cls=Group,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (inspect.inspect, convert.convert, evaluate.evaluate, finetune.finetune, convert.densify, doctor.doctor, autotune.autotune):
    app.command(cls=Command)(verb)
app.add_typer(bench.app, name="bench")


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, option("Output", "--version", "Print the version and exit.")] = False,
) -> None:
    """Print help or the version where no verb was given."""
    if version:
        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    0 done; 1 failed, also when the reader of the output went away; 2 usage, a selector that matched nothing
    included; 130 interrupted. Errors raised on purpose, errors of the file system and memory that is full become one line on stderr;
    anything else is a bug and keeps its traceback.
    """
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False, prog_name="flysurgery")
        sys.stdout.flush()
    except UsageError as error:
        return _fail(error.format_message() + _what_came(error), 2)
    except FlysurgeryError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        reason = error.strerror or str(error)
        return _fail(f"{reason}: {error.filename}" if error.filename else reason, 1)
    except RuntimeError as error:
        sentence = sentence_if_full(error)
        if sentence is None:
            raise
        return _fail(sentence, 1)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return code if isinstance(code, int) else 0


def sentence_if_full(error: RuntimeError) -> str | None:
    """What to tell a user whose work did not fit into memory; None for any other error."""
    import torch

    if isinstance(error, torch.OutOfMemoryError):
        return "this does not fit into the memory of the GPU; take fewer images or rows, or a smaller model"
    if CPU_ALLOCATOR in str(error):
        return "this does not fit into this machine's memory; take fewer images or rows, or a smaller model"
    return None


def _fail(message: str, code: int) -> int:
    typer.echo(f"flysurgery: {shortened(message)}", err=True)
    return code


def _what_came(error: typer.BadParameter) -> str:
    """The value that was given, where typer checks by pydantic, whose sentence may leave it out."""
    details: Callable[[], list[dict[str, object]]] = getattr(error.__context__, "errors", list)
    values = [str(detail.get("input")) for detail in details()]
    return "".join(f", got '{value}'" for value in values if f"'{value}'" not in error.message)
