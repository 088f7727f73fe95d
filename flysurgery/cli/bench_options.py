"""Options that the verbs of ``flysurgery bench`` share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer

from flysurgery.cli import options


class LaunchName(str, Enum):
    """How calls are launched on CUDA."""

    graph = "graph"
    eager = "eager"


Families = Annotated[list[options.Family] | None, typer.Option("--arch", help="A family of architectures; repeatable.")]
Width = Annotated[int, typer.Option("--width", min=1, help="Width of the transformer; the FFN is 4 times as wide.")]
Rows = Annotated[int | None, typer.Option("--rows", min=1, help="Rows of x, that is tokens of all images; by default 3152.")]
MODES_HELP = "Precisions: fp32, tf32 (CUDA), fp16, bf16, or all; separated by commas."
Modes = Annotated[str, typer.Option("--mode", help=MODES_HELP, metavar="NAMES")]
LAUNCH_HELP = "On CUDA: captured graphs, or calls launched one by one from Python."
Launch = Annotated[LaunchName, typer.Option("--launch", help=LAUNCH_HELP)]
Threads = Annotated[int | None, typer.Option("--threads", min=1, help="CPU threads; by default PyTorch's number.")]
Rounds = Annotated[int | None, typer.Option("--rounds", min=2, help="Samples of each candidate at most; by default 30, quick 7.")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer sizes and samples: an answer within two minutes.")]
OUT_HELP = "Keep the rows in this CSV file; a run that was interrupted goes on where it stopped."
Out = Annotated[Path | None, typer.Option("--out", help=OUT_HELP, metavar="FILE")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Measure all again, and replace the rows that the file holds.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Draw the rows into this file; needs matplotlib.", metavar="FILE")]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Images a forward.")]


def prepare(device: str | None, threads: int | None) -> torch.device:
    """The device that is meant, after the number of threads has been set."""
    target = options.device_of(device)
    if threads is not None:
        torch.set_num_threads(threads)
    return target


def families(arch: list[options.Family] | None) -> list[str]:
    """The names of the families, by default those with two butterfly factors."""
    return [each.value for each in arch or (options.Family.gonon, options.Family.monarch)]


def modes(text: str, device: torch.device) -> tuple[str, ...]:
    """Read ``--mode``.

    Raises:
        OptionError: a mode that the device does not know.
    """
    from flysurgery.bench import modes_of

    return modes_of(text, device)
