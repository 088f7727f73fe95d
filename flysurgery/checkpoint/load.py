"""Read a converted model back from its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.checkpoint.base import first_line
from flysurgery.checkpoint.config import check_description, describe_data, read_config
from flysurgery.checkpoint.reader import Opened, check_hashes, check_tensors, limits_of, open_checkpoint
from flysurgery.checkpoint.sentence import in_one_sentence
from flysurgery.checkpoint.shell import build_shell, build_skeleton
from flysurgery.checkpoint.tensors import read_dtype, set_buffer, single_float_dtype, unstored_buffers
from flysurgery.errors import CheckpointError, ModelError, OptionError, PlanError
from flysurgery.inference import optimize as make_faster


def load(
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    optimize: bool | None = None,
    verify: bool = True,
) -> nn.Module:
    """Read a converted model, in eval mode, on ``device`` (default CPU).

    Outputs are bit-equal to those of the model that was saved. ``dtype`` turns the floating-point tensors into another
    dtype; by default they stay as they are stored. Neither the network nor a pickle nor the original weights are used, and
    no code is named by the files but models of timm and vit-pytorch. Names, shapes and dtypes are checked before
    memory is taken, which peaks at about twice the model's size. What the files make the base's constructor build is bounded by the
    size of the stored tensors. ``verify`` holds the data of each tensor against the SHA-256 that was saved with it; folders of the first
    versions have none. For a ViT-L this about doubles the time of loading; ``docs/python.md`` has the command that measures it.
    ``optimize`` calls ``flysurgery.optimize`` on the model, whose outputs
    are then equal within rounding; None does so on CUDA where the folder was saved with that wish.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, contradicts itself, or is of another schema; one sentence.
        OptionError: a dtype or device that there is not.
    """
    model = read_model(Path(folder), {}, device=device, dtype=dtype, verify=verify).eval()
    if optimize is None:
        on_cuda = next(model.parameters()).is_cuda
        optimize = on_cuda and read_config(Path(folder)).get("optimize") is True
    if optimize:
        make_faster(model)
    return model


@in_one_sentence()
def read_model(
    folder: Path,
    overrides: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    verify: bool = True,
) -> nn.Module:
    """``load`` with arguments that go over those of the base and may not change any tensor's shape. The mode is as constructed.

    Raises:
        CheckpointError, OptionError: as ``load``; also where ``overrides`` change the base so that the tensors do not fit.
    """
    place, wanted = _read_device(device), read_dtype(dtype)
    with open_checkpoint(folder) as opened:
        plan, limits = opened.header.plan, limits_of(opened)
        try:
            adapted = replace(plan, base_args={**plan.base_args, **overrides})
            skeleton = build_skeleton(adapted, limits)
            check_tensors(opened, skeleton)
            check_description(opened.config, skeleton, plan, folder)
            if verify:
                check_hashes(opened)
            model = build_shell(adapted, limits)
        except (CheckpointError, ModelError, PlanError) as error:
            if isinstance(error, CheckpointError) and not overrides:
                raise
            changed = f" with {dict(overrides)}" if overrides else ""
            raise CheckpointError(f"{folder} cannot be loaded{changed}: {error}") from error
        _fill(model, opened, place, wanted)
    describe_data(model, opened.config["pretrained_cfg"])
    return model


def _fill(model: nn.Module, opened: Opened, device: torch.device, dtype: torch.dtype | None) -> None:
    """Give every parameter and buffer its tensor; parameters on meta are replaced, not copied into."""
    file = opened.tensors
    uniform = dtype or single_float_dtype(file.dtypes)
    read = {name: file.tensor(name, device, dtype) for name in file.shapes}
    names = {name: name for name in read} | dict(opened.header.aliases)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    state: dict[str, Tensor] = {}
    made: dict[str, nn.Parameter] = {}  # one object a stored tensor, so that what was tied stays tied
    for name in model.state_dict():
        stored = names[name]
        if name in parameters:
            made.setdefault(stored, nn.Parameter(read[stored], requires_grad=parameters[name].requires_grad))
        state[name] = made[stored] if name in parameters else read[stored]
    model.load_state_dict(state, strict=True, assign=True)
    for name, buffer in unstored_buffers(model).items():
        wanted = uniform if uniform is not None and buffer.is_floating_point() else buffer.dtype
        set_buffer(model, name, read[names[name]] if name in names else buffer.to(device, wanted))
    model.to(device)


def _read_device(device: torch.device | str | None) -> torch.device:
    try:
        place = torch.device("cpu" if device is None else device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise OptionError(f"device {device} cannot be used on this machine: {first_line(error)}") from error
    return place
