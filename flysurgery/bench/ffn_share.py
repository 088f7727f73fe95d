"""What part of a dense ViT's time the linear layers of its feed-forward networks take: Table 5 of Gonon et al. 2024."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import timm
import torch
from torch import Tensor, nn

from flysurgery.bench.ceilings import Ceilings
from flysurgery.bench.measuring import AGAIN, MOST_ERROR, Measured, Protocol, judged, launch_on, noise_of, relative_error, status_of
from flysurgery.bench.modes import in_mode
from flysurgery.bench.timing import time_interleaved
from flysurgery.bench.units import model_name, vit_sizes
from flysurgery.bench.work import work_of

COMPLETE, LINEARS = "dense", "linears of FFNs"
CHECKED_IMAGES = 2


@dataclass(frozen=True)
class ShareRow:
    """A whole model, ``dense``, or the linears of its feed-forward networks one after the other; ``ratio_to_dense`` is their share.

    ``paper_ratio`` is the share that Gonon et al. report, where they do.
    """

    model: str
    batch: int
    mode: str
    device_type: str
    candidate: str
    paper_ratio: float | None
    measured: Measured


def share_head(model: str, model_args: Mapping[str, Any], batch: int, mode: str, device: torch.device) -> dict[str, object]:
    """What identifies the rows of one model."""
    return {"model": model_name(model, model_args), "batch": batch, "mode": mode, "device_type": device.type}


def bench_ffn_share(
    model: str,
    model_args: Mapping[str, Any],
    batch: int,
    mode: str,
    device: torch.device,
    ceilings: Ceilings,
    protocol: Protocol,
    *,
    paper: float | None = None,
) -> list[ShareRow]:
    """Measure a timm ViT and the linears of its feed-forward networks in one run, with random weights.

    The linears have biases, as those of the model; the paper leaves them out.

    Raises:
        OptionError: timm does not know the model, or it is no ViT that can be taken apart.
    """
    sizes, protocol = vit_sizes(model, model_args), replace(protocol, launch=launch_on(device, protocol))
    torch.manual_seed(protocol.seed)
    with in_mode(mode) as dtype, torch.inference_mode():
        with device:  # where drawing weights takes least
            whole: Any = timm.create_model(model, pretrained=False, **model_args)
            linears = linears_of_ffns(sizes.width, sizes.depth)
        tokens = sizes.tokens + int(whole.num_prefix_tokens)
        shapes = {COMPLETE: (batch, 3, sizes.image, sizes.image), LINEARS: (batch, tokens, sizes.width)}
        parts: dict[str, nn.Module] = {COMPLETE: whole.eval().to(dtype), LINEARS: linears.eval().to(dtype)}
        inputs = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
        errors = {name: _error(part, inputs[name]) for name, part in parts.items()}
        works = {name: work_of(part, inputs[name]) for name, part in parts.items()}
        right = {name: part for name, part in parts.items() if errors[name] <= MOST_ERROR}
        if COMPLETE in right:
            right[COMPLETE + AGAIN], inputs[COMPLETE + AGAIN] = whole, inputs[COMPLETE]
        timings = time_interleaved(
            right, inputs, rounds=protocol.rounds, seconds=protocol.seconds, launch=protocol.launch, seed=protocol.seed
        )
    noise = noise_of(timings, COMPLETE)
    rows = []
    for name in (COMPLETE, COMPLETE + AGAIN, LINEARS):
        kind, timing = name.removesuffix(AGAIN), timings.get(name)
        status = f"wrong: relative error {errors[kind]:.2g}" if timing is None else status_of(noise, device.type)
        measured = judged(status, errors[kind], timing, timings.get(COMPLETE), noise, works[kind], ceilings, protocol)
        rows.append(ShareRow(model_name(model, model_args), batch, mode, device.type, name, paper if kind == LINEARS else None, measured))
    return rows


def linears_of_ffns(width: int, depth: int) -> nn.Sequential:
    """The linears of all feed-forward networks of a ViT, nothing between them; weights that keep the size of what passes."""
    linears = [nn.Linear(*sizes) for _ in range(depth) for sizes in ((width, 4 * width), (4 * width, width))]
    for linear in linears:
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    return nn.Sequential(*linears)


def _error(part: nn.Module, x: Tensor) -> float:
    few = x[:CHECKED_IMAGES]
    return relative_error(part(few), copy.deepcopy(part).double()(few.double()))
