"""One case of the ablation of the fused kernel: its tuned configuration, and one change of it at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from kernel_operations import LAYERS, SHARED_LIMIT, Drawn, Operation, Place, linears_of_group
from recipe import NEEDS_CUDA, Run

from flysurgery.bench import TIMED_MODES, Case
from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.fused import FusedLinear, fused_kernel
from flysurgery.gpu.fused_configs import configs, fits
from flysurgery.gpu.single import SingleFactor
from flysurgery.gpu.tiling import FusedConfig, Tiling, tiling
from flysurgery.ops import FusedFactors, ks_linear
from flysurgery.patterns import Architecture


def variants(tile: Tiling, tuned: FusedConfig, limit: int) -> dict[str, FusedConfig]:
    """The tuned configuration, and those with one thing changed that fit."""
    panels = sum(tile.panel_counts(tuned))
    found = {
        "one batch of x ahead": replace(tuned, stages=2),
        "one step a batch": replace(tuned, batch=1),
        "two slots in the ring": replace(tuned, slots=2),
        "weights resident": replace(tuned, slots=panels),
        "weights streamed through four slots": replace(tuned, slots=min(4, panels - 1)),
        "narrow panels": replace(tuned, panel_columns=8 * tuned.run),
        "all classes in a panel": replace(tuned, panel_classes=tile.second.d),
        "one class a panel": replace(tuned, panel_classes=1),
        "vectors of 8 bytes": replace(tuned, run=tile.runs[-1]),
        "intermediate in registers": replace(tuned, u_shared=0),
        "intermediate in shared memory": replace(tuned, u_shared=1),
        "two warpgroups": replace(tuned, warps=8),
        "one warpgroup": replace(tuned, warps=4),
    }
    return {"tuned": tuned} | {key: config for key, config in found.items() if config != tuned and fits(tile, config, limit)}


def changes(architecture: Architecture, mode: str, rows: int) -> dict[str, FusedConfig]:
    """The variants of a layer on this device, or of compute capability 9.0 where there is none; empty where the kernel cannot run."""
    cuda = torch.cuda.is_available()
    tile, limit = tiling(architecture, mode), shared_limit_of(0) if cuda else SHARED_LIMIT
    if not isinstance(tile, Tiling):
        return {}
    tuned = fused_kernel(architecture, mode, 1, rows, device_index=0).config if cuda else configs(tile, limit)[0]
    return variants(tile, tuned, limit)


def ablation(place: Place, mode: str, *, layer: str, rows: int) -> Case:
    """The fused linear kernel in the configuration of the shipped or tuned table, and the same with one thing changed.

    A change that the kernel does not offer there, as it would not fit or is what stands already, is left out.
    """
    (architecture, _), drawn = LAYERS[layer], Drawn(place.device, TIMED_MODES[mode])
    factors, bias = drawn.linear(architecture)
    found = changes(architecture, mode, rows)
    runs: dict[str, Run | str] = dict.fromkeys(("tuned", *found, "two launches"), NEEDS_CUDA)

    def two_launches() -> Run:
        kernels = [SingleFactor(pattern, mode, shared_limit=shared_limit_of(0)) for pattern in architecture]
        images = [kernel.pack(factor) for kernel, factor in zip(kernels, factors, strict=True)]
        return lambda x: kernels[0].run(kernels[1].run(x, images[1]), images[0], bias)

    if place.on_cuda:
        runs["tuned"] = f"no: {tiling(architecture, mode)}"
        for change, config in found.items():
            kernel = FusedLinear(architecture, mode, config=config, device_index=0)
            image = kernel.pack([(factors[0], factors[1])])
            runs[change] = lambda x, kernel=kernel, image=image: kernel.run(x, image, bias)
        runs["two launches"] = two_launches()
    runs["einsum"] = lambda x: ks_linear(x, factors, bias, backend="einsum")
    return Operation(linears_of_group, ([FusedFactors(factors, bias)],)).case(
        drawn.tensor(rows, architecture.in_features),
        runs,
        columns={"architecture": architecture},
        notes={"config": {change: str(config) for change, config in found.items()}},
        baseline="tuned" if place.on_cuda else "einsum",
    )
