"""Says whether conversion is worth it here: each layer of a model and the model as a whole, converted beside dense."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.bench.ceilings import measure_ceilings
from flysurgery.bench.measuring import AGAIN, Measured, Protocol, checked_rows, measure, one_line, rows_of
from flysurgery.bench.rows import Record
from flysurgery.bench.timing import in_mode
from flysurgery.bench.units import reset
from flysurgery.bench.variants import OPTIMIZED, chosen_backends, definitions, dense_linear, fused_modules
from flysurgery.errors import OptionError, PatternError
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.patterns import Architecture, gonon, low_rank, monarch
from flysurgery.surgery import ExampleInput, LayerPlan, Plan, Reason, grouped, install

WHOLE = "(model)"
"""Stands in the column ``layer`` of rows about the whole model."""

DENSE, PLANNED, WHERE_FASTER = "dense", "converted", "converted where faster"

CHECKED_ROWS = 256

NBLOCKS = (2, 4, 8, 16)
"""The numbers of Monarch blocks that are searched."""

LatencyRow = dict[str, str | float]


@dataclass(frozen=True)
class ModelRow:
    """One candidate for one layer of a model, or for the model. ``layers`` is how many layers the row stands for.

    ``candidate`` is ``dense``, an architecture that every part of the layer gets, or ``converted``: the ``architecture`` that the plan
    gives, of the whole model all of them. Times are of one call; a layer is called ``calls`` times in a forward.
    """

    model: str
    batch: int
    mode: str
    device_type: str
    layer: str
    role: str
    layers: int
    calls: int
    rows: int
    out_features: int
    in_features: int
    architecture: str
    candidate: str
    backend: str | None
    planned: bool
    measured: Measured


@dataclass(frozen=True)
class Group:
    """Layers that are alike, ``fqns`` by name, and what the plan gives the first of them. ``rows`` is for one call at batch 1."""

    name: str
    fqns: tuple[str, ...]
    layer: LayerPlan

    @property
    def rows(self) -> int:
        """Rows of one call for one sample."""
        return max(1, self.layer.rows // max(1, self.layer.calls))


@dataclass(frozen=True)
class ModelSettings:
    """What is measured. ``search`` times more architectures than the plan's own; ``name`` stands in the rows.

    With ``optimized`` whole models are also timed as ``optimize`` makes them, converted and dense.
    """

    name: str
    batch: int = 1
    mode: str = "fp32"
    search: bool = True
    optimized: bool = False
    quick: bool = False
    protocol: Protocol = field(default_factory=Protocol)

    def head(self, device: torch.device) -> dict[str, Any]:
        """Give the columns that all rows of a run share."""
        return {"model": self.name, "batch": self.batch, "mode": self.mode, "device_type": device.type}


def groups_of(plan: Plan) -> list[Group]:
    """Group the layers that a plan replaces by all that matters for time."""

    def alike(layer: LayerPlan) -> object:
        return (layer.role, layer.in_features, layer.out_features, layer.bias, layer.calls, layer.rows, layer.parts)

    found = grouped(plan.replaced, lambda layer: layer.fqn, alike)
    return [Group(name, tuple(each.fqn for each in members), members[0]) for name, members in found]


def architectures_for(layer: LayerPlan) -> tuple[Architecture, ...]:
    """List the architectures worth timing for a layer, which ``convert --latency`` may then choose from.

    These are Monarch with 2, 4, 8 and 16 blocks and gonon where they fit, and low rank with as many weights, all with fewer weights than
    dense. A layer in parts gets architectures that every part can take; there are none where its parts differ in size.
    """
    sizes = {part.stop - part.start for part in layer.parts if part.architecture is not None}
    if len(sizes) != 1 or any(part.architecture is None for part in layer.parts):
        return ()
    out_features, in_features = sizes.pop(), layer.in_features
    found: list[Architecture] = []
    for make, arguments in (*((monarch, (nblocks,)) for nblocks in NBLOCKS), (gonon, ())):
        try:
            found.append(make(out_features, in_features, *arguments))
        except PatternError:  # it does not fit these sizes
            continue
    ranks = [each.num_parameters // (out_features + in_features) for each in found]
    found += [low_rank(out_features, in_features, rank) for rank in ranks if 0 < rank <= min(out_features, in_features)]
    return tuple(dict.fromkeys(each for each in found if each.num_parameters < out_features * in_features))


def layer_head(settings: ModelSettings, device: torch.device, group: Group) -> dict[str, Any]:
    """Give what identifies the rows of one kind of layer."""
    layer = group.layer
    return {
        **settings.head(device),
        "layer": group.name,
        "role": layer.role,
        "layers": len(group.fqns),
        "calls": layer.calls,
        "rows": settings.batch * group.rows,
        "out_features": layer.out_features,
        "in_features": layer.in_features,
        "architecture": layer.architecture or "",
    }


def whole_head(settings: ModelSettings, device: torch.device, plan: Plan) -> dict[str, Any]:
    """Give what identifies the rows of the whole model."""
    return {
        **settings.head(device),
        "layer": WHOLE,
        "role": "",
        "layers": len(plan.replaced),
        "calls": 1,
        "rows": settings.batch,
        "out_features": 0,
        "in_features": 0,
        "architecture": " + ".join(dict.fromkeys(layer.architecture or "" for layer in plan.replaced)),
    }


def bench_model_layers(
    plan: Plan,
    settings: ModelSettings,
    device: torch.device,
    *,
    done: Callable[[Mapping[str, object]], bool] = lambda key: False,
) -> Iterator[list[ModelRow]]:
    """Measure each kind of layer that the plan replaces: dense, as planned, and further architectures. Random weights.

    A kind of layer is left out where ``done`` knows all its candidates. After a quick run, which has none of the further ones, all are
    timed in one run.
    """
    for group in groups_of(plan):
        head, searched = layer_head(settings, device, group), architectures_for(group.layer) if settings.search else ()
        if not all(done(head | {"candidate": name}) for name in (DENSE, *searched)):
            yield _layer_rows(head, group.layer, searched, settings, device)


def _layer_rows(
    head: dict[str, Any],
    layer: LayerPlan,
    searched: Sequence[Architecture],
    settings: ModelSettings,
    device: torch.device,
) -> list[ModelRow]:
    with in_mode(settings.mode) as dtype:
        torch.manual_seed(settings.protocol.seed)
        layers = {PLANNED: _converted(layer, [part.architecture for part in layer.parts])}
        layers |= {str(architecture): _converted(layer, [architecture] * len(layer.parts)) for architecture in searched}
        layers = {name: module.to(device, dtype).requires_grad_(False).eval() for name, module in layers.items()}
        modules: dict[str, nn.Module] = {DENSE: dense_linear(layers[PLANNED]), **layers}
        x = torch.randn(head["rows"], layer.in_features, device=device, dtype=dtype)
        found = _measured(modules, x, CHECKED_ROWS, settings)
    backends = {name: chosen_backends(module, x, allow_tf32=settings.mode == "tf32", rows=len(x)) for name, module in modules.items()}
    return _rows(head, found, backends)


def bench_whole_model(
    plan: Plan, build: Callable[[], nn.Module], settings: ModelSettings, device: torch.device, stay_dense: Mapping[str, str]
) -> list[ModelRow]:
    """Measure one forward of the model: dense, converted by ``plan``, and converted except for the layers ``stay_dense`` (with reasons).

    The last is left out where all layers stay dense. With ``settings.optimized`` each is also measured as ``optimize`` makes it.
    ``build`` makes the dense model, with any weights; ``plan`` must say what a forward takes (``plan.example``).
    """
    with in_mode(settings.mode) as dtype:
        torch.manual_seed(settings.protocol.seed)
        models: dict[str, nn.Module] = {DENSE: build().eval()}
        models[PLANNED] = _installed(plan, models[DENSE])
        if stay_dense:
            partly = plan.keeping({fqn: Reason("slower", text) for fqn, text in stay_dense.items()})
            if partly.replaced:
                models[WHERE_FASTER] = _installed(partly, models[DENSE])
        models = {name: model.to(device, dtype).requires_grad_(False) for name, model in models.items()}
        refused: dict[str, str] = {}
        x = _example(plan, settings, device, dtype)
        for name in list(models) if settings.optimized else ():
            try:
                models[name + OPTIMIZED] = fused_modules(models[name], x)
            except Exception as error:  # the other rows stand without it
                refused[name + OPTIMIZED] = f"failed: {one_line(error)}"
        found = _measured(models, x, 2, settings, refused)
    return _rows(whole_head(settings, device, plan), found, {})


def _measured(
    modules: Mapping[str, nn.Module],
    x: Tensor,
    count: int,
    settings: ModelSettings,
    refused: Mapping[str, str] | None = None,
) -> dict[str, Measured]:
    """Time the modules, each held against its own definition, or that of the module that was optimized, on ``count`` rows at either end."""
    checked = checked_rows(len(x), count)
    with torch.inference_mode():
        ceilings = measure_ceilings(settings.mode, x.device, quick=settings.quick)
        truths, works = definitions({name: modules[name.removesuffix(OPTIMIZED)] for name in modules}, x, checked)
        return measure(modules, x, truths, rows=checked, refused=refused, works=works, ceilings=ceilings, protocol=settings.protocol)


def _rows(head: Mapping[str, Any], found: Mapping[str, Measured], backends: Mapping[str, str | None]) -> list[ModelRow]:
    """Make the rows: dense first, then what the plan gives, then the others as they come."""
    order = [name for name in dict.fromkeys((DENSE, PLANNED, *found)) if not name.endswith(AGAIN)]
    return rows_of(ModelRow, head, found, order, backend=backends, planned={name: name == PLANNED for name in found})


def _converted(layer: LayerPlan, architectures: list[Architecture | None]) -> ButterflyLinear | SplitLinear:
    parts: list[ButterflyLinear | nn.Linear] = []
    for part, architecture in zip(layer.parts, architectures, strict=True):
        if architecture is None:
            parts.append(nn.Linear(layer.in_features, part.stop - part.start, bias=layer.bias))
        else:
            parts.append(ButterflyLinear(architecture, bias=layer.bias))
    if len(parts) == 1 and isinstance(parts[0], ButterflyLinear):
        return parts[0]
    return SplitLinear({part.name or str(index): module for index, (part, module) in enumerate(zip(layer.parts, parts, strict=True))})


def _example(plan: Plan, settings: ModelSettings, device: torch.device, dtype: torch.dtype) -> Tensor:
    first = plan.example[0] if plan.example is not None and len(plan.example) == 1 else None
    if not isinstance(first, ExampleInput):
        raise OptionError("bench model times models that take one tensor; time this one's layers with bench multiply")
    return torch.randn(settings.batch, *first.shape[1:], device=device, dtype=dtype)


def _installed(plan: Plan, dense: nn.Module) -> nn.Module:
    model = copy.deepcopy(dense)
    install(plan, model)
    reset(model)
    return model


def ratio_of(records: Sequence[Record], layer: str, candidate: str) -> float | None:
    """Find the time over dense of one candidate for one kind of layer; None where it has no time."""
    for record in records:
        if record["layer"] == layer and record["candidate"] == candidate and record["ratio_to_dense"]:
            return float(record["ratio_to_dense"])
    return None


def slower_layers(records: Sequence[Record], groups: Sequence[Group]) -> dict[str, str]:
    """List the layers, by name, that are slower converted than dense or could not be timed, each with the reason."""
    found: dict[str, str] = {}
    for group in groups:
        ratio = ratio_of(records, group.name, PLANNED)
        if ratio is None or ratio >= 1:
            reason = "converted it could not be timed" if ratio is None else f"converted it takes {ratio:.2f} of the dense time"
            found |= dict.fromkeys(group.fqns, reason)
    return found


def latency_table(records: Sequence[Record], groups: Sequence[Group]) -> list[LatencyRow]:
    """Make the table that ``convert --latency`` reads: milliseconds of each layer and architecture in one forward, all calls and parts."""
    rows: list[LatencyRow] = []
    for group in groups:
        planned = _own_architecture(group)
        times: dict[str, float] = {}
        for record in records:
            if record["layer"] != group.name or not record["median_ms"]:
                continue
            name = planned if record["candidate"] == PLANNED else record["candidate"]
            if name is not None and (name == DENSE or name.startswith("(")):
                times.setdefault(name, float(record["median_ms"]) * group.layer.calls)
        rows += [{"fqn": fqn, "architecture": name, "ms": ms} for fqn in group.fqns for name, ms in times.items()]
    return rows


def _own_architecture(group: Group) -> str | None:
    """Give the planned architecture, where every part has the same."""
    found = {str(part.architecture) for part in group.layer.parts}
    return found.pop() if len(found) == 1 else None


def sentence(records: Sequence[Record], groups: Sequence[Group]) -> str:
    """Say the answer in words, about the optimized model where it was timed, beside optimized dense, which needs no conversion."""
    noisy = any(record["layer"] == WHOLE and record["status"].startswith("noisy") for record in records)
    start = "this machine is too noisy to say; by these numbers " if noisy else ""
    whole, fused, fused_dense = (ratio_of(records, WHOLE, name) for name in (PLANNED, PLANNED + OPTIMIZED, DENSE + OPTIMIZED))
    if fused is not None and fused_dense is not None:
        kind, verdict = OPTIMIZED, _verdict(fused < min(1, fused_dense))
        times = f"converted and optimized the model takes {fused:.2f} of the dense time, optimized without conversion {fused_dense:.2f}"
    elif whole is not None:
        kind, verdict, times = "", _verdict(whole < 1), f"the converted model takes {whole:.2f} of the dense time"
    else:
        return "the whole model could not be timed converted; its row says why"
    words = f"{start}conversion is {verdict}: {times}"
    slower = [group.name for group in groups if (ratio := ratio_of(records, group.name, PLANNED)) is None or ratio >= 1]
    shaky = {record["layer"] for record in records if record["status"].startswith("noisy")}
    alone = "by itself " if kind else ""
    if not slower:
        return f"{words}; every replaced layer is {alone}faster than dense"
    if len(slower) == len(groups):
        return f"{words}; every replaced layer is {alone}faster dense"
    partly = ratio_of(records, WHOLE, WHERE_FASTER + kind)
    rest = "" if partly is None else f", and without converting them the model takes {partly:.2f}"
    named = ", ".join(name + (" (noisy)" if name in shaky else "") for name in slower)
    return f"{words}; {alone}faster dense: {named}{rest}"


def _verdict(faster: bool) -> str:
    return "worth it here" if faster else "not worth it here"
