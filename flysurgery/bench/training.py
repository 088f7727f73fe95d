"""A training step of a whole ViT, converted beside dense: forward, backward, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from flysurgery.bench.ceilings import Ceilings, Work, measure_ceilings
from flysurgery.bench.compiled import COMPILED, compiled, forget_compiled
from flysurgery.bench.layer import LayerRow, LayerSettings
from flysurgery.bench.measuring import AGAIN, Measured, noise_of, one_line, status_of
from flysurgery.bench.timing import Timing, time_interleaved
from flysurgery.bench.units import converted_timm, model_name
from flysurgery.bench.variants import VARIANTS, by_definition

UNIT = "training step"
MODE = "bf16"
STEPS_THAT_MUST_LEARN = 8


def bench_training(
    settings: LayerSettings, device: torch.device, *, done: Callable[[Mapping[str, object]], bool] = lambda key: False
) -> Iterator[list[LayerRow]]:
    """Measure a step under autocast to bfloat16 on a fixed batch; a candidate whose loss does not fall gets no time.

    On CUDA launched from Python, as training is; ``max-autotune`` is not measured.
    """
    ceilings: Ceilings | None = None
    for launch in settings.launches:
        if launch not in ("eager", "compile"):
            continue
        mark = launch if launch in COMPILED else ""
        head = (model_name(settings.model, settings.model_args), settings.arch, "today", UNIT, settings.batch, MODE, device.type, mark)
        names = ("model", "arch", "protocol", "unit", "batch", "mode", "device_type", "compiled")
        if not done(dict(zip(names, head, strict=True))):
            ceilings = ceilings or measure_ceilings(MODE, device, quick=settings.quick)
            found = _measure(settings, device, launch, ceilings)
            yield [LayerRow(*head, name, None, None, measured) for name, measured in found.items()]


def _measure(settings: LayerSettings, device: torch.device, launch: str, ceilings: Ceilings) -> dict[str, Measured]:
    forget_compiled()
    torch.manual_seed(settings.seed)
    layer: Any = converted_timm(settings.model, settings.model_args, settings.arch).to(device)
    images = torch.randn(settings.batch, 3, *layer.patch_embed.img_size, device=device)
    labels = torch.randint(0, layer.num_classes, (settings.batch,), device=device)
    steps: dict[str, Callable[[Tensor], Tensor]] = {}
    statuses: dict[str, str] = {}
    dense = VARIANTS["dense"](layer)
    works = {"dense": work_of_step(dense, images, labels), "layer": work_of_step(by_definition(layer), images, labels)}
    for name, model in (("dense", dense), ("layer", layer)):
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
    names = [name for name in ("dense", "dense" + AGAIN, "layer") if name in statuses]
    return {name: _measured(statuses[name], timings, name, works[name.removesuffix(AGAIN)], ceilings, device) for name in names}


def work_of_step(model: nn.Module, images: Tensor, labels: Tensor) -> Work:
    """What a training step must spend: operations of all matrix products there and back, counted on one image; bytes of the images, and
    of each weight and its two moments, read and written by the optimizer.
    """
    model.requires_grad_(True)
    with FlopCounterMode(display=False) as counter:
        nn.functional.cross_entropy(model(images[:1]), labels[:1]).backward()
    model.zero_grad(set_to_none=True)
    return Work(images.nbytes + 6 * sum(each.nbytes for each in model.parameters()), len(images) * counter.get_total_flops())


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


def _measured(status: str, timings: Mapping[str, Timing], name: str, work: Work, ceilings: Ceilings, device: torch.device) -> Measured:
    if name not in timings or "dense" not in timings:
        return Measured("eager", status)
    noise = noise_of(timings)
    timing, bound = timings[name], ceilings.bound_ms(work)
    times = timing.median_ms, timing.iqr_ms, timing.median_ms / timings["dense"].median_ms
    spent = work.bytes_moved, work.flops, bound, bound / timing.median_ms
    return Measured("eager", status_of(noise, device.type), None, noise, *times, *spent)
