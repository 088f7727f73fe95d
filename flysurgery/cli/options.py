"""The options of the verbs, the text forms that they accept, and which of them go together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperCommand, TyperGroup

from flysurgery.errors import OptionError

if TYPE_CHECKING:
    import torch

Family = Literal["monarch", "gonon", "lowrank", "dyadic", "kaleidoscope", "block", "deformable"]
StorageType = Literal["float16", "bfloat16", "float32"]  # the dtypes in which weights can be saved
MODEL, LAYERS, ARCHITECTURES, CHOICE, FIT, MEASUREMENT, TRAINING, OUTPUT, MACHINE = (
    "The model",
    "Which layers",
    "By what",
    "A choice for each layer",
    "Closer to the dense model",
    "Measurement",
    "Training",
    "Output",
    "Machine",
)
"""The groups in which help lists the options."""


def option(panel: str, name: str, text: str, metavar: str | None = None, minimum: float | None = None, maximum: float | None = None) -> Any:
    """An option in a group of the help. ``metavar`` stands for its value; a switch has none."""
    return typer.Option(
        name, help=text, metavar=metavar or "", min=minimum, max=maximum, rich_help_panel=panel, show_default=metavar is not None
    )


class _WithoutType:
    """Lists ``--help`` as what it is, a switch, in the last group."""

    def get_help_option(self, ctx: Any) -> Any:
        found: Any = super().get_help_option(ctx)  # pyright: ignore[reportAttributeAccessIssue] - the command's own
        found.metavar, found.rich_help_panel = "", OUTPUT
        return found


class Command(_WithoutType, TyperCommand):
    """A verb."""


class Group(_WithoutType, TyperGroup):
    """Verbs under one name."""


# The model, and where its weights come from.
MODEL_HELP = "A timm name, a dense {}folder, a checkpoint file with --base, vit_pytorch:CLASS with --model-args, or transformers:NAME."
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP.format("or converted "))]
DenseModel = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP.format(""))]
ModelArgs = Annotated[
    list[str] | None, option(MODEL, "--model-args", "Its constructor's arguments, JSON or KEY=VALUE; repeatable.", "ARGS")
]
Base = Annotated[str | None, option(MODEL, "--base", "The model that a checkpoint file given as MODEL belongs to.", "NAME")]
Checkpoint = Annotated[Path | None, option(MODEL, "--checkpoint", "Take the weights from this safetensors or torch file.", "FILE")]
Pretrained = Annotated[bool, option(MODEL, "--pretrained/--no-pretrained", "Published weights, the default, or random ones.")]
Seed = Annotated[int, option(MODEL, "--seed", "Seed of random weights, factors and views.", "N", 0, (1 << 32) - 1)]

# Which layers are replaced.
ROLES_HELP = "Roles to replace, out of qkv, attn_out, ffn, ffn_in, ffn_out, head, other; by default ffn and qkv, as far as there are any."
Roles = Annotated[str | None, option(LAYERS, "--roles", ROLES_HELP, "NAMES")]
Include = Annotated[list[str] | None, option(LAYERS, "--include", "Only layers whose name matches; repeatable.", "REGEX")]
Exclude = Annotated[list[str] | None, option(LAYERS, "--exclude", "No layer whose name matches; repeatable.", "REGEX")]
Blocks = Annotated[str | None, option(LAYERS, "--blocks", "Only layers within the blocks of these numbers, as in 0-5,8.", "NUMBERS")]
MinSize = Annotated[int | None, option(LAYERS, "--min-size", "Only layers with both sides at least so long.", "N", 1)]
Convs = Annotated[bool, option(LAYERS, "--convs", "Replace 1x1 convolutions of the selected roles too.")]

# By what.
FAMILIES = "monarch, gonon, lowrank, dyadic, kaleidoscope, block or deformable"
Arch = Annotated[Family, option(ARCHITECTURES, "--arch", f"{FAMILIES}.", "FAMILY")]
CHOOSABLE_HELP = f"{FAMILIES}; by default monarch, or a choice for each layer by --budget, --fidelity or --measure."
ChoosableArch = Annotated[Family | None, option(ARCHITECTURES, "--arch", CHOOSABLE_HELP, "FAMILY")]
Nblocks = Annotated[int, option(ARCHITECTURES, "--nblocks", "Blocks of a factor, for monarch, block and deformable.", "N", 1)]
Rank = Annotated[int | None, option(ARCHITECTURES, "--rank", "Rank of low-rank architectures.", "N", 1)]
PATTERNS_HELP = "An architecture, '(1,192,48,2),(2,48,192,1)'; one a layer size."
Patterns = Annotated[list[str] | None, option(ARCHITECTURES, "--patterns", PATTERNS_HELP, "TEXT")]
PER_LAYER_HELP = "Other choices by name: dense, or a family as in monarch:8, also for parts of qkv: 'qkv.v$=dense'; repeatable."
PerLayer = Annotated[list[str] | None, option(ARCHITECTURES, "--per-layer", PER_LAYER_HELP, "REGEX=CHOICE")]
INIT_HELP = "What the factors start from: the projection of the weights, or random numbers of --seed, to train from."
Init = Annotated[Literal["projection", "random"], option(ARCHITECTURES, "--init", INIT_HELP, "projection|random")]

# A choice for each layer.
BUDGET_HELP = "Share of the selected layers' weights to keep (with --measure: of their time); each layer gets what suits all of them best."
Budget = Annotated[float | None, option(CHOICE, "--budget", BUDGET_HELP, "SHARE")]
FIDELITY_HELP = "Keep as few weights as reach this cosine with the dense model, of five copies that are converted; needs --calibrate."
Fidelity = Annotated[float | None, option(CHOICE, "--fidelity", FIDELITY_HELP, "COSINE")]
MEASURE_HELP = "Time the layers here, in --dtype; each gets the most accurate of what is faster than dense."
Measure = Annotated[bool, option(CHOICE, "--measure", MEASURE_HELP)]
MEASURED_BATCH_HELP = "With --measure: images a forward; by default 64 on CUDA, else 1."
MeasuredBatch = Annotated[int | None, option(CHOICE, "--batch", MEASURED_BATCH_HELP, "N", 1)]
Plot = Annotated[Path | None, option(CHOICE, "--plot", "Draw the trade-off into this picture file.", "FILE")]

# Closer to the dense model.
DATA = "DATA"
CALIBRATE_HELP = "Fit the factors to what the layers do to these images: digits, fractals or a folder, which need not have classes."
Calibrate = Annotated[str | None, option(FIT, "--calibrate", CALIBRATE_HELP, DATA)]
SAMPLES_HELP = "How many images to calibrate with; by default 512, or as many as there are."
CalibrationSamples = Annotated[int | None, option(FIT, "--samples", SAMPLES_HELP, "N", 2)]
Sequential = Annotated[bool, option(FIT, "--sequential", "Calibrate block by block, each after the ones before it are converted.")]
PERMUTE_HELP = "With --calibrate: reorder FFNs' hidden units, heads and their entries where that lowers the errors and is exact."
Permute = Annotated[bool, option(FIT, "--permute", PERMUTE_HELP)]
RECONSTRUCT_HELP = "With --calibrate: fit the converted blocks to the dense ones, on views of these images; torchrun shares it out to GPUs."
Reconstruct = Annotated[bool, option(FIT, "--reconstruct", RECONSTRUCT_HELP)]
MINUTES_HELP = "With --reconstruct: how long it may take; by default 1 on CUDA, 20 on a CPU."
Minutes = Annotated[float | None, option(FIT, "--minutes", MINUTES_HELP, "M")]

# Measuring.
EVALUATE_HELP = "Measure the accuracy before and after: on digits, fractals or a folder with one folder of images a class."
Evaluate = Annotated[str | None, option(MEASUREMENT, "--evaluate", EVALUATE_HELP, DATA)]
BatchSize = Annotated[int, option(MEASUREMENT, "--batch-size", "Images a step of the evaluation.", "N", 1)]

# What is written, how results are shown, and where the work is done.
Out = Annotated[Path | None, option(OUTPUT, "--out", "Output folder; by default checkpoints/<model>.<arch>.", "DIR")]
Force = Annotated[bool, option(OUTPUT, "--force", "Replace the output folder where it exists.")]
StorageDtype = Annotated[StorageType | None, option(OUTPUT, "--dtype", "Save the weights in float16, bfloat16 or float32.", "DTYPE")]
OPTIMIZE_HELP = "Fuse groups of layers for inference where kernels are faster; convert does so to take the times of --measure."
Optimize = Annotated[bool, option(OUTPUT, "--optimize", OPTIMIZE_HELP)]
DryRun = Annotated[bool, option(OUTPUT, "--dry-run", "Print the plan and change nothing; needs no weights, unless there is a budget.")]
Json = Annotated[bool, option(OUTPUT, "--json", "Print one JSON document on stdout, and nothing else.")]
Device = Annotated[str | None, option(MACHINE, "--device", "cpu, cuda, cuda:1, ...; by default cuda where there is one.", "DEVICE")]


def model_arguments(texts: list[str] | None) -> dict[str, Any]:
    """Read ``--model-args``: JSON objects and ``key=value`` pairs, the last one wins; values are JSON where they parse as such."""
    from flysurgery.checkpoint import parse_json

    arguments: dict[str, Any] = {}
    for text in texts or []:
        key, equals, value = text.partition("=")
        if text.lstrip().startswith("{"):
            try:
                arguments.update(parse_json(text))
            except ValueError as error:
                raise OptionError(f"--model-args is no valid JSON ({error}): '{text}'") from error
        elif equals and key.isidentifier():
            try:
                arguments[key] = parse_json(value)
            except json.JSONDecodeError:  # a text without quotes
                arguments[key] = value
            except ValueError as error:
                raise OptionError(f"--model-args: the value of {key} cannot be used ({error}); give a flatter one") from error
        else:
            raise OptionError(f"--model-args takes a JSON object or key=value, got '{text}'")
    return arguments


def names(text: str, option: str) -> tuple[str, ...]:
    """Split ``ffn,qkv`` at its commas; there must be a name in it."""
    found = tuple(part.strip() for part in text.split(",") if part.strip())
    if not found:
        raise OptionError(f"{option} takes names separated by commas, got '{text}'")
    return found


def choices_of(texts: list[str] | None) -> dict[str, str]:
    """Read ``--per-layer``: expressions and what the layers that they find get."""
    found: dict[str, str] = {}
    for text in texts or ():
        expression, equals, choice = text.rpartition("=")
        if not (equals and expression):
            raise OptionError(f"--per-layer takes REGEX=CHOICE, as in 'qkv.v$=dense', got {text!r}")
        found.pop(expression, None)  # the last one counts, so it stands last
        found[expression] = choice
    return found


def device_of(text: str | None) -> torch.device:
    """The device that the user named, or the fastest one there is."""
    import torch

    from flysurgery.checkpoint import read_device

    return read_device(("cuda" if torch.cuda.is_available() else "cpu") if text is None else text)
