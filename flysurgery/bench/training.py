"""A training step of a whole ViT, converted beside dense: forward, backward, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.bench.compiled import COMPILED, compiled, forget_compiled
from flysurgery.bench.layer import LayerRow, LayerSettings
from flysurgery.bench.measuring import AGAIN, NOISE, Measured, one_line
from flysurgery.bench.timing import Timing, time_interleaved
from flysurgery.bench.units import converted_timm
from flysurgery.bench.variants import VARIANTS

UNIT = "training step"
STEPS_THAT_MUST_LEARN = 8


def bench_training(
    settings: LayerSettings, device: torch.device, *, done: Callable[[Mapping[str, object]], bool] = lambda key: False
) -> Iterator[list[LayerRow]]:
    """Measure a step under autocast to bfloat16 on a fixed batch; a candidate whose loss does not fall gets no time.

    On CUDA launched from Python, as training is; ``max-autotune`` is not measured.
    """
    for launch in settings.launches:
        if launch not in ("eager", "compile"):
            continue
        mark = launch if launch in COMPILED else ""
        head = (settings.model, settings.arch, "today", UNIT, settings.batch, "bf16", device.type, mark)
        names = ("model", "arch", "protocol", "unit", "batch", "mode", "device_type", "compiled")
        if not done(dict(zip(names, head, strict=True))):
            yield [LayerRow(*head, name, None, None, measured) for name, measured in _measure(settings, device, launch).items()]


def _measure(settings: LayerSettings, device: torch.device, launch: str) -> dict[str, Measured]:
    forget_compiled()
    torch.manual_seed(settings.seed)
    layer: Any = converted_timm(settings.model, settings.model_args, settings.arch).to(device)
    images = torch.randn(settings.batch, 3, *layer.patch_embed.img_size, device=device)
    labels = torch.randint(0, layer.num_classes, (settings.batch,), device=device)
    steps: dict[str, Callable[[Tensor], Tensor]] = {}
    statuses: dict[str, str] = {}
    for name, model in (("dense", VARIANTS["dense"](layer)), ("layer", layer)):
        step = _step(model.requires_grad_(True).train(), labels, launch)
        try:
            losses = [float(step(images)) for _ in range(STEPS_THAT_MUST_LEARN)]
        except (RuntimeError, NotImplementedError) as error:
            statuses[name] = f"failed: {one_line(error)}"
            continue
        statuses[name] = "ok" if losses[-1] < losses[0] else f"wrong: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"
        if statuses[name] == "ok":
            steps[name] = step
    if "dense" in steps:
        steps["dense" + AGAIN], statuses["dense" + AGAIN] = steps["dense"], "ok"
    timings = time_interleaved(steps, images, rounds=settings.rounds, seconds=settings.seconds, launch="eager", seed=settings.seed)
    return {name: _measured(statuses[name], timings, name, device) for name in ("dense", "dense" + AGAIN, "layer") if name in statuses}


def _step(model: nn.Module, labels: Tensor, launch: str) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    run = compiled(model, launch) if launch in COMPILED else model

    def step(images: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = nn.functional.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _measured(status: str, timings: Mapping[str, Timing], name: str, device: torch.device) -> Measured:
    if name not in timings or "dense" not in timings:
        return Measured("eager", status)
    dense = timings["dense"].median_ms
    noise = abs(timings["dense" + AGAIN].median_ms / dense - 1)
    if noise > NOISE["cuda" if device.type == "cuda" else "cpu"]:
        status = f"noisy: dense timed twice differs by {noise:.0%}"
    timing = timings[name]
    return Measured("eager", status, None, noise, timing.median_ms, timing.iqr_ms, timing.median_ms / dense)
