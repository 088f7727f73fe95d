"""Times of the parts of a ViT, each variant against dense in one run: Tables 3 and 6 of Gonon et al., and what users run today."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.bench.ceilings import Ceilings, measure_ceilings
from flysurgery.bench.compiled import COMPILED, compiled, forget_compiled
from flysurgery.bench.fused import fused_modules
from flysurgery.bench.measuring import AGAIN, Measured, Protocol, checked_rows, measure, one_line
from flysurgery.bench.modes import in_mode
from flysurgery.bench.units import PROTOCOLS, Unit, fits, model_name, units, vit_sizes
from flysurgery.bench.variants import INT8, INT8_ERROR, VARIANTS, by_definition, chosen_backends, obstacle
from flysurgery.bench.work import work_of
from flysurgery.errors import OptionError, PatternError

FUSED = "fused modules"
"""The variant in which whole modules are replaced for inference, not only their linears."""

SLOW_ON_CPU = "bsr"

CANDIDATES = ("dense", "layer", "two launches", FUSED, "bmm", "einsum", SLOW_ON_CPU)
LAUNCHES = ("graph", "eager", *COMPILED)


@dataclass(frozen=True)
class LayerRow:
    """One candidate for one part of a model, whose name has its arguments.

    ``paper_ratio`` is what Gonon et al. report for it on an A100, where they do.
    """

    model: str
    arch: str
    protocol: str
    unit: str
    batch: int
    mode: str
    device_type: str
    compiled: str
    candidate: str
    backend: str | None
    paper_ratio: float | None
    measured: Measured


@dataclass(frozen=True)
class LayerSettings:
    """What is measured. ``names`` picks parts (``linear*``), ``launches`` is out of ``LAUNCHES``, ``candidates`` out of ``CANDIDATES``."""

    model: str = "vit_small_patch16_224"
    model_args: Mapping[str, Any] = field(default_factory=dict)
    arch: str = "gonon"
    protocols: Sequence[str] = ("paper", "today")
    modes: Sequence[str] = ("fp32",)
    launches: Sequence[str] = ("graph", "eager")
    candidates: Sequence[str] = CANDIDATES
    names: Sequence[str] | None = None
    batch: int = 128
    rounds: int = 30
    seconds: float | None = 0.5
    seed: int = 0
    quick: bool = False


def bench_layers(
    settings: LayerSettings,
    device: torch.device,
    *,
    paper: Mapping[tuple[str, str], float] | None = None,
    done: Callable[[Mapping[str, object]], bool] = lambda key: False,
) -> Iterator[list[LayerRow]]:
    """Measure part by part; each list holds the rows of one part, protocol, mode and launch.

    Args:
        paper: ratios to dense that the paper reports, by part and candidate.
        done: told what identifies a group of rows; True leaves the group out.

    Raises:
        PatternError: the architecture does not exist at the model's width.
        OptionError: a name that is not known.
    """
    for kind, wanted, known in (("candidate", settings.candidates, (*CANDIDATES, INT8)), ("launch", settings.launches, LAUNCHES)):
        for name in wanted:
            if name not in known:
                raise OptionError(f"there is no {kind} '{name}'; choose from {', '.join(known)}")
    width = vit_sizes(settings.model, settings.model_args).width
    reason = fits(settings.arch, width)
    if reason is not None:
        raise PatternError(reason)
    known = {
        each.name for protocol in PROTOCOLS for each in units(protocol, settings.model, settings.model_args, settings.arch, settings.seed)
    }
    for name in settings.names or ():
        if not any(fnmatchcase(each, name) for each in known):
            raise OptionError(f"no part of {settings.model} is called {name}; the parts are {', '.join(sorted(known))}")
    if not any(_launches(settings.launches, protocol, device) for protocol in settings.protocols):
        wanted = f"launches {', '.join(settings.launches)} and protocols {', '.join(settings.protocols)}"
        raise OptionError(f"nothing to measure by {wanted}: there are graphs on CUDA alone, the compiler in protocol today alone")
    for mode in settings.modes:
        ceilings: Ceilings | None = None
        for protocol in settings.protocols:
            for unit in units(protocol, settings.model, settings.model_args, settings.arch, settings.seed):
                if settings.names is not None and not any(fnmatchcase(unit.name, name) for name in settings.names):
                    continue
                for launch in _launches(settings.launches, protocol, device):
                    if done(_key(settings, protocol, unit, mode, launch, device)):
                        continue
                    ceilings = ceilings or measure_ceilings(mode, device, quick=settings.quick)
                    yield _rows(settings, protocol, unit, mode, launch, device, ceilings, paper or {})


def _launches(wanted: Sequence[str], protocol: str, device: torch.device) -> list[str]:
    """The paper's protocol knows no compiler; without CUDA there are no graphs."""
    known = [each for each in wanted if device.type == "cuda" or each != "graph"]
    return [each for each in known if protocol == "today" or each not in COMPILED]


def _key(settings: LayerSettings, protocol: str, unit: Unit, mode: str, launch: str, device: torch.device) -> dict[str, object]:
    return {
        "model": model_name(settings.model, settings.model_args),
        "arch": settings.arch,
        "protocol": protocol,
        "unit": unit.name,
        "batch": settings.batch,
        "mode": mode,
        "device_type": device.type,
        "compiled": launch if launch in COMPILED else "",
        "launch": "eager" if launch in COMPILED else launch,
        "candidate": settings.candidates[0],  # others may have been launched otherwise, where they cannot be captured
    }


def _rows(
    settings: LayerSettings,
    protocol: str,
    unit: Unit,
    mode: str,
    launch: str,
    device: torch.device,
    ceilings: Ceilings,
    paper: Mapping[tuple[str, str], float],
) -> list[LayerRow]:
    with in_mode(mode) as dtype:
        module = unit.make().to(device, dtype)
        generator = torch.Generator(device=device).manual_seed(settings.seed)
        x = torch.randn(settings.batch, *unit.shape, generator=generator, device=device, dtype=dtype)
        if launch in COMPILED:
            forget_compiled()
        made, refused = _candidates(settings, unit, module, x, mode, launch)
        rows = checked_rows(settings.batch, 2)
        dense_work, own_work = work_of(VARIANTS["dense"](module), x), work_of(by_definition(module), x)
        plain = "eager" if launch in COMPILED else launch
        with torch.no_grad():  # not inference mode, which the compiler's and the sparse layouts' tensors do not stand
            truth = by_definition(module).double()(x[rows].double())
            measured = measure(
                made,
                x,
                truth,
                rows=rows,
                refused=refused,
                allowed={INT8: INT8_ERROR},
                works={name: dense_work if name in ("dense", INT8) else own_work for name in settings.candidates},
                ceilings=ceilings,
                protocol=Protocol(plain, settings.rounds, settings.seconds, settings.seed),
            )
        backend = chosen_backends(module, x, allow_tf32=mode == "tf32", rows=settings.batch * unit.rows)
    order = [name for each in settings.candidates for name in (each, each + AGAIN) if name in measured]
    mark = launch if launch in COMPILED else ""
    head = (model_name(settings.model, settings.model_args), settings.arch, protocol, unit.name, settings.batch, mode, device.type, mark)
    return [LayerRow(*head, name, backend if name == "layer" else None, paper.get((unit.name, name)), measured[name]) for name in order]


def _candidates(
    settings: LayerSettings, unit: Unit, module: nn.Module, x: Tensor, mode: str, launch: str
) -> tuple[dict[str, Callable[[Tensor], Tensor]], dict[str, str]]:
    made: dict[str, Callable[[Tensor], Tensor]] = {}
    refused: dict[str, str] = {}
    for name in settings.candidates:
        reason = obstacle(name, module, x, allow_tf32=mode == "tf32")
        if settings.quick and name == SLOW_ON_CPU and not x.is_cuda:
            reason = "left out by --quick: on a CPU it takes tens of times as long as the others"
        if reason is None:
            try:
                variant = fused_modules(module, x) if name == FUSED else VARIANTS[name](module)
            except Exception as error:  # one variant's failure is its row
                variant = f"failed: {one_line(error)}"
            if isinstance(variant, nn.Module):
                made[name] = compiled(variant, launch) if launch in COMPILED else variant
                continue
            reason = variant
        refused[name] = reason
    return made, refused
