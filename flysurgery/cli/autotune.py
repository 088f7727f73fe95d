"""``flysurgery autotune``: time the kernels' configurations for a model on this device, and remember the fastest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flysurgery.cli import options
from flysurgery.cli.options import MEASUREMENT, option
from flysurgery.errors import BackendError, OptionError
from flysurgery.tables import text_table

if TYPE_CHECKING:
    from torch import nn

ARITHMETICS = ("float16", "bfloat16", "tf32", "float32")
ARITHMETICS_HELP = f"Arithmetics to tune for, out of {', '.join(ARITHMETICS)}."


def autotune(
    context: typer.Context,
    model: options.Model,
    batch: Annotated[int, option(MEASUREMENT, "--batch", "Images a call.", "N", 1)] = 128,
    dtype: Annotated[str, option(MEASUREMENT, "--dtype", ARITHMETICS_HELP, "NAMES")] = ",".join(ARITHMETICS),
    train: Annotated[bool, option(MEASUREMENT, "--train/--no-train", "Tune the backward pass as well.")] = False,
    arch: options.Arch = "monarch",
    nblocks: options.Nblocks = 4,
    rank: options.Rank = None,
    patterns: options.Patterns = None,
    roles: options.Roles = None,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Time the kernels' configurations for a model on this device, and use the fastest from now on.

    A dense MODEL is converted in memory first, with arbitrary weights; nothing is saved but the choices.
    """
    from flysurgery import surgery
    from flysurgery.cli.source import ConvertedFolder, find
    from flysurgery.cli.tables import progress, show
    from flysurgery.gpu.autotune import autotune as tune
    from flysurgery.gpu.tuned_table import user_table

    arithmetics = options.names(dtype, "--dtype")
    unknown = [name for name in arithmetics if name not in ARITHMETICS]
    if unknown:
        raise OptionError(f"--dtype takes names out of {', '.join(ARITHMETICS)}, got '{unknown[0]}'")
    target = options.device_of(device)
    if target.type != "cuda":
        raise BackendError(f"only CUDA kernels are autotuned, and the device is {target}")
    source = find(model, base=base, model_args=model_args)
    if isinstance(source, ConvertedFolder):
        network = source.build(pretrained=False, seed=0, device=target)
    else:
        network = source.skeleton()
        surgery.install(source.plan(network, arch, context.params), network)
        network = network.to_empty(device=target).eval()
    with progress("autotuning") as step:
        tunings = tune(lambda: [_step(network, batch, name, train) for name in arithmetics], progress=step)
    columns = ("kernel", "architecture", "mode", "linears", "rows", "default us", "fastest us")
    cases, lines = [], []
    for each in tunings:
        case = each.entry.case
        default = "" if each.default_us is None else f"{each.default_us:.1f}"
        numbers = str(case.linears), str(case.rows), default, f"{each.entry.median_us:.1f}"
        lines.append((case.kernel, str(case.architecture), case.mode, *numbers))
        more = {"default_us": each.default_us, "candidates": each.tried, "failed": list(each.failures)}
        cases.append(each.entry.to_json() | more)
    text = f"{text_table(columns, lines, right=columns[3:])}\nkept in {user_table()}"
    show({"table": str(user_table()), "cases": cases}, text, as_json=as_json)


def _step(network: nn.Module, batch: int, arithmetic: str, train: bool) -> None:
    """One forward, and backward if asked for, in an arithmetic."""
    import torch

    from flysurgery.bench import in_mode
    from flysurgery.walker import example_input

    example = example_input(network)
    if not isinstance(example, torch.Tensor):
        raise OptionError("expected a model of images in one tensor, got one that takes a list of images, which has no batch size")
    images = example[:1].expand(batch, *example.shape[1:]).contiguous()
    half = getattr(torch, arithmetic) if arithmetic in ("float16", "bfloat16") else None
    with in_mode("tf32" if arithmetic == "tf32" else "fp32"), torch.set_grad_enabled(train):
        with torch.autocast("cuda", dtype=half, enabled=half is not None):
            output = network(images)
        if train:
            output.float().sum().backward()
