"""Energy of one factor by every implementation, and of whole models: Figure 7 of Gonon et al. 2024."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.bench.ceilings import Ceilings, Work
from flysurgery.bench.energy import Energy, Meter
from flysurgery.bench.fused import fused_modules
from flysurgery.bench.layouts import FIRST, LAST, factor_runs, problem_of_factor, rows_first
from flysurgery.bench.measuring import AGAIN, MOST_ERROR, relative_error, status_of
from flysurgery.bench.modes import in_mode
from flysurgery.bench.rows import Record
from flysurgery.bench.samplers import Run
from flysurgery.bench.units import converted_timm
from flysurgery.bench.variants import VARIANTS, by_definition
from flysurgery.bench.work import work_of, work_of_factor
from flysurgery.factors import ks_einsum
from flysurgery.patterns import Pattern

OPTIMIZED = ", optimized"


@dataclass(frozen=True)
class EnergyRow:
    """One candidate. ``what`` is a pattern "(a,b,c,d)" or a model's name; ``rewriting`` is d(b+c)/(bc), or None.

    ``bytes_moved`` and ``flops`` are what the computation must spend, ``bound_ms`` the time that the ceilings of this run allow for it,
    and ``share_of_bound`` the part of ``call_ms`` that it is.
    """

    what: str
    rewriting: float | None
    rows: int
    mode: str
    layout: str
    candidate: str
    energy: Energy
    bytes_moved: int
    flops: int
    bound_ms: float
    share_of_bound: float | None


def energy_of_factor(
    meter: Meter,
    pattern: Pattern,
    rows: int,
    mode: str,
    device: torch.device,
    ceilings: Ceilings,
    *,
    idle_watts: float,
    seconds: float,
    windows: int,
) -> list[EnergyRow]:
    """Measure cuda, bmm, einsum and bsr, the last three in both memory layouts; bmm twice in each."""
    how = {"idle_watts": idle_watts, "seconds": seconds, "windows": windows}
    found: list[EnergyRow] = []
    with in_mode(mode) as dtype, torch.no_grad():
        x = torch.randn(rows, pattern.in_features, device=device, dtype=dtype)
        factor = torch.randn(pattern.factor_shape, device=device, dtype=dtype)
        truth = ks_einsum(x[:64].double(), factor.double())
        rewriting = pattern.d * (pattern.b + pattern.c) / (pattern.b * pattern.c)
        work = work_of_factor(pattern, rows, x.element_size())
        for layout in (FIRST, LAST):
            arranged = x if layout == FIRST else x.T.contiguous()
            problem = problem_of_factor(pattern, rows, x, allow_tf32=mode == "tf32")
            runs, refused = factor_runs(factor, layout, problem, names=("cuda", "bmm", "einsum", "bsr"))
            runs = runs if layout == FIRST else {name: rows_first(run) for name, run in runs.items()}
            energies = _measured(meter, runs, arranged, truth, "bmm", how)
            for name, energy in (energies | {name: Energy(reason) for name, reason in refused.items()}).items():
                bounds = _bounds(energy, work, ceilings)
                found.append(EnergyRow(str(pattern), rewriting, rows, mode, layout, name, energy, *bounds))
            torch.cuda.empty_cache()
    return found


def energy_of_model(
    meter: Meter,
    model: str,
    arguments: Mapping[str, Any],
    arch: str,
    batch: int,
    mode: str,
    device: torch.device,
    ceilings: Ceilings,
    *,
    idle_watts: float,
    seconds: float,
    windows: int,
    candidates: Sequence[str] = ("dense", "layer", "bmm"),
) -> list[EnergyRow]:
    """Measure one forward of a timm ViT, converted beside dense, which is measured twice; joules are for the whole batch.

    ``candidates`` are names of ``VARIANTS``, with ``OPTIMIZED`` behind them as ``optimize`` makes them.
    """
    found: list[EnergyRow] = []
    torch.manual_seed(0)
    with in_mode(mode) as dtype, torch.no_grad():
        module = converted_timm(model, arguments, arch).to(device, dtype).requires_grad_(False)
        size = module.patch_embed.img_size  # pyright: ignore[reportAttributeAccessIssue]
        x = torch.randn(batch, 3, *size, device=device, dtype=dtype)  # pyright: ignore[reportGeneralTypeIssues]
        truth = by_definition(module).double()(x[:2].double())
        dense_work, own_work = work_of(VARIANTS["dense"](module), x), work_of(by_definition(module), x)
        runs = {name: _variant(name, module, x) for name in candidates}
        energies = _measured(meter, runs, x, truth, "dense", {"idle_watts": idle_watts, "seconds": seconds, "windows": windows})
        for name, energy in energies.items():
            bounds = _bounds(energy, dense_work if name.startswith("dense") else own_work, ceilings)
            found.append(EnergyRow(model, None, batch, mode, FIRST, name, energy, *bounds))
    return found


def _variant(name: str, module: nn.Module, x: Tensor) -> nn.Module:
    """The candidate of this name."""
    variant = VARIANTS[name.removesuffix(OPTIMIZED)](module)
    return fused_modules(variant, x) if name.endswith(OPTIMIZED) else variant


def _bounds(energy: Energy, work: Work, ceilings: Ceilings) -> tuple[int, int, float, float | None]:
    """The last columns of a row."""
    bound = ceilings.bound_ms(work)
    return work.bytes_moved, work.flops, bound, bound / energy.call_ms if energy.call_ms else None


def _measured(meter: Meter, runs: Mapping[str, Run], x: Tensor, truth: Tensor, baseline: str, how: Mapping[str, Any]) -> dict[str, Energy]:
    """Hold each candidate's first rows against the truth, and measure the right ones in shuffled order, the baseline among them twice."""
    energies: dict[str, Energy] = {}
    for name, run in runs.items():
        error = relative_error(run(x)[: len(truth)], truth)
        energies[name] = Energy("ok" if error <= MOST_ERROR else f"wrong: relative error {error:.2g}")
    right = [name for name, energy in energies.items() if energy.status == "ok"]
    twins = (baseline, baseline + AGAIN) if baseline in right else ()
    right += twins[1:]
    for name in random.Random(0).sample(right, len(right)):
        energies[name] = meter.measure(runs[name.removesuffix(AGAIN)], x, **how)
    joules = [each for name in twins if (each := energies[name].joules)]
    if len(joules) == 2:
        noise = abs(joules[1] / joules[0] - 1)
        status = status_of(noise, x.device.type, baseline, "metered")
        energies |= {name: replace(energies[name], status=status, noise=noise) for name in right}
    return energies


def energy_boxes(records: Sequence[Record]) -> tuple[dict[str, list[float]], list[float]]:
    """Energy of cuda over the least of bmm, einsum and bsr in either layout, by d(b+c)/(bc), and all of these ratios."""
    ours: dict[tuple[str, str], float] = {}
    theirs: dict[tuple[str, str], float] = {}
    label: dict[tuple[str, str], str] = {}
    for record in records:
        if not record["rewriting"] or not record["joules"]:
            continue
        key, joules = (record["what"], record["mode"]), float(record["joules"])
        label[key] = f"{float(record['rewriting']):.2g}"
        side = ours if record["candidate"] == "cuda" else theirs
        side[key] = min(joules, side.get(key, joules))
    boxes: dict[str, list[float]] = {}
    for key in sorted(ours.keys() & theirs.keys(), key=lambda key: float(label[key])):
        boxes.setdefault(label[key], []).append(ours[key] / theirs[key])
    return boxes, [ratio for ratios in boxes.values() for ratio in ratios]
