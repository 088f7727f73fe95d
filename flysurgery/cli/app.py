"""The entry point: the verbs, and the one place where an error becomes a sentence and an exit code."""

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

    0 done; 1 failed, also when the reader of the output went away; 2 usage, a selector that matched nothing included; 130 interrupted.
    What ``sentence_of`` knows becomes one line on stderr; any other error is a bug and keeps its traceback.
    """
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False, prog_name="flysurgery")
        sys.stdout.flush()
    except UsageError as error:
        return _fail(error.format_message() + _what_came(error), 2)
    except BrokenPipeError:
        # Python flushes stdout once more at exit: give it somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        return _fail(sentence, getattr(error, "exit_code", 1))
    return code if isinstance(code, int) else 0


def sentence_of(error: Exception) -> str | None:
    """What to tell a user of an error that was raised on purpose, by the file system or for want of memory; None for any other error."""
    if isinstance(error, FlysurgeryError):
        return str(error)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return f"{reason}: {error.filename}" if error.filename else reason
    is_gpu = type(error).__name__ == "OutOfMemoryError"
    if is_gpu or "DefaultCPUAllocator" in str(error):  # the CPU's is a plain RuntimeError
        where = "the memory of the GPU" if is_gpu else "this machine's memory"
        return f"this does not fit into {where}; take fewer images or rows, or a smaller model"
    return None


def _fail(message: str, code: int) -> int:
    typer.echo(f"flysurgery: {shortened(message)}", err=True)
    return code


def _what_came(error: typer.BadParameter) -> str:
    """The value that was given, where typer checks by pydantic, whose sentence may leave it out."""
    details: Callable[[], list[dict[str, object]]] = getattr(error.__context__, "errors", list)
    values = [str(detail.get("input")) for detail in details()]
    return "".join(f", got '{value}'" for value in values if f"'{value}'" not in error.message)
