"""The options that the verbs of ``flysurgery bench`` share."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Literal

from flysurgery.cli.options import ARCHITECTURES, FAMILIES, MACHINE, MEASUREMENT, OUTPUT, option


class Family(str, Enum):
    """The families of architectures, for an option that takes several: typer knows lists of enums, and none of literals."""

    monarch = "monarch"
    gonon = "gonon"
    lowrank = "lowrank"
    dyadic = "dyadic"
    kaleidoscope = "kaleidoscope"
    block = "block"
    deformable = "deformable"


Families = Annotated[list[Family] | None, option(ARCHITECTURES, "--arch", f"{FAMILIES}; repeatable.", "FAMILY")]
Width = Annotated[int, option(MEASUREMENT, "--width", "Width of the transformer; the FFN is 4 times as wide.", "N", 1)]
MODES_HELP = "Precisions: fp32, tf32 (CUDA), fp16, bf16, or all; separated by commas."
Modes = Annotated[str, option(MEASUREMENT, "--mode", MODES_HELP, "NAMES")]
LAUNCH_HELP = "On CUDA: captured graphs, or calls launched one by one from Python."
Launch = Annotated[Literal["graph", "eager"], option(MEASUREMENT, "--launch", LAUNCH_HELP, "graph|eager")]
Threads = Annotated[int | None, option(MACHINE, "--threads", "CPU threads; by default PyTorch's number.", "N", 1)]
Rounds = Annotated[int | None, option(MEASUREMENT, "--rounds", "Samples of each candidate at most; by default 30, quick 7.", "N", 2)]
Quick = Annotated[bool, option(MEASUREMENT, "--quick", "Fewer sizes and samples: an answer within two minutes.")]
OUT_HELP = "Keep the rows in this CSV file; a run that was interrupted goes on where it stopped."
Out = Annotated[Path | None, option(OUTPUT, "--out", OUT_HELP, "FILE")]
Fresh = Annotated[bool, option(OUTPUT, "--fresh", "Measure all again, and replace the rows that the file holds.")]
Plot = Annotated[Path | None, option(OUTPUT, "--plot", "Draw the rows into this file; needs matplotlib.", "FILE")]

TIMES = ("median_ms", "iqr_ms", "ratio_to_dense", "share_of_bound", "peak_gib", "error", "status")
"""The columns that every measurement ends with."""
