"""Whether conversion is worth it here: each layer of a model and the model as a whole, converted beside dense."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from flysurgery.bench.candidates import architectures_for
from flysurgery.bench.ceilings import Ceilings, measure_ceilings
from flysurgery.bench.fused import fused_modules
from flysurgery.bench.measuring import AGAIN, Measured, Protocol, checked_rows, measure, one_line
from flysurgery.bench.modes import in_mode
from flysurgery.bench.units import reset
from flysurgery.bench.variants import by_definition, chosen_backends, dense_linear
from flysurgery.bench.work import work_of
from flysurgery.errors import OptionError
from flysurgery.layers import ButterflyLinear, SplitLinear
from flysurgery.patterns import Architecture
from flysurgery.surgery import ExampleInput, LayerPlan, Plan, Reason, grouped, install

WHOLE = "(model)"
"""Stands in the column ``layer`` of rows about the whole model."""

DENSE, PLANNED, WHERE_FASTER = "dense", "converted", "converted where faster"
OPTIMIZED = ", optimized"
"""What the names of whole models end with for those that ``optimize`` makes of them."""

CHECKED_ROWS = 256


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

    With ``optimized`` whole models are timed as ``optimize`` makes them too, converted and dense.
    """

    name: str
    batch: int = 1
    mode: str = "fp32"
    search: bool = True
    optimized: bool = False
    quick: bool = False
    protocol: Protocol = field(default_factory=Protocol)


def groups_of(plan: Plan) -> list[Group]:
    """The layers that a plan replaces, those together that are alike in all that matters for time."""

    def alike(layer: LayerPlan) -> object:
        return (layer.role, layer.in_features, layer.out_features, layer.bias, layer.calls, layer.rows, layer.parts)

    found = grouped(plan.replaced, lambda layer: layer.fqn, alike)
    return [Group(name, tuple(each.fqn for each in members), members[0]) for name, members in found]


def bench_model_layers(
    plan: Plan,
    settings: ModelSettings,
    device: torch.device,
    *,
    done: Callable[[Mapping[str, object]], bool] = lambda key: False,
) -> Iterator[list[ModelRow]]:
    """Measure each kind of layer that the plan replaces: dense, as planned, and further architectures. Random weights.

    Left out is what ``done`` knows all candidates of: after a quick run, which has none of the further ones, all are timed in one run.
    """
    ceilings: Ceilings | None = None
    for group in groups_of(plan):
        head, searched = layer_head(settings, device, group), architectures_for(group.layer) if settings.search else ()
        if all(done(head | {"candidate": name}) for name in (DENSE, *searched)):
            continue
        ceilings = ceilings or measure_ceilings(settings.mode, device, quick=settings.quick)
        yield _layer_rows(group, settings, device, ceilings)


def layer_head(settings: ModelSettings, device: torch.device, group: Group) -> dict[str, object]:
    """What identifies the rows of one kind of layer."""
    layer = group.layer
    return {
        **_run_head(settings, device),
        "layer": group.name,
        "role": layer.role,
        "layers": len(group.fqns),
        "calls": layer.calls,
        "rows": settings.batch * group.rows,
        "out_features": layer.out_features,
        "in_features": layer.in_features,
        "architecture": layer.architecture or "",
    }


def whole_head(settings: ModelSettings, device: torch.device, plan: Plan) -> dict[str, object]:
    """What identifies the rows of the whole model."""
    return {
        **_run_head(settings, device),
        "layer": WHOLE,
        "role": "",
        "layers": len(plan.replaced),
        "calls": 1,
        "rows": settings.batch,
        "out_features": 0,
        "in_features": 0,
        "architecture": " + ".join(dict.fromkeys(layer.architecture or "" for layer in plan.replaced)),
    }


def _run_head(settings: ModelSettings, device: torch.device) -> dict[str, object]:
    return {"model": settings.name, "batch": settings.batch, "mode": settings.mode, "device_type": device.type}


def _layer_rows(group: Group, settings: ModelSettings, device: torch.device, ceilings: Ceilings) -> list[ModelRow]:
    layer, head = group.layer, layer_head(settings, device, group)
    rows = settings.batch * group.rows
    with in_mode(settings.mode) as dtype:
        torch.manual_seed(settings.protocol.seed)
        layers = {PLANNED: _converted(layer, [part.architecture for part in layer.parts])}
        if settings.search:
            names = [part.name for part in layer.parts]
            for architecture in architectures_for(layer):
                layers[str(architecture)] = _converted(layer, [architecture] * len(names))
        layers = {name: module.to(device, dtype).requires_grad_(False).eval() for name, module in layers.items()}
        modules: dict[str, nn.Module] = {DENSE: dense_linear(layers[PLANNED]), **layers}
        x = torch.randn(rows, layer.in_features, device=device, dtype=dtype)
        checked = checked_rows(rows, CHECKED_ROWS)
        with torch.inference_mode():
            wide = x[checked].double()
            found = measure(
                modules,
                x,
                {name: by_definition(module if name != DENSE else modules[PLANNED]).double()(wide) for name, module in modules.items()},
                rows=checked,
                works={name: work_of(module if name == DENSE else by_definition(module), x) for name, module in modules.items()},
                ceilings=ceilings,
                protocol=settings.protocol,
            )
    backends = {name: chosen_backends(module, x, allow_tf32=settings.mode == "tf32", rows=rows) for name, module in modules.items()}
    return [_row(head, name, backends.get(name), found[name]) for name in _ordered(found)]


def _row(head: Mapping[str, object], name: str, backend: str | None, measured: Measured) -> ModelRow:
    return ModelRow(**head, candidate=name, backend=backend, planned=name == PLANNED, measured=measured)  # pyright: ignore[reportArgumentType]


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


def bench_whole_model(
    plan: Plan, build: Callable[[], nn.Module], settings: ModelSettings, device: torch.device, stay_dense: Mapping[str, str]
) -> list[ModelRow]:
    """Measure one forward of the model: dense, converted by ``plan``, and converted but for the layers ``stay_dense`` (with reasons), if
    those are not all.

    With ``settings.optimized`` each of them as ``optimize`` makes it as well.

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
        checked = checked_rows(settings.batch, 2)
        with torch.inference_mode():
            wide = x[checked].double()
            plain = {name: by_definition(models[name.removesuffix(OPTIMIZED)]) for name in models}
            works = {name: work_of(model, x) for name, model in plain.items()}
            truths = {name: model.double()(wide) for name, model in plain.items()}
            ceilings = measure_ceilings(settings.mode, device, quick=settings.quick)
            found = measure(models, x, truths, rows=checked, refused=refused, works=works, ceilings=ceilings, protocol=settings.protocol)
    head = whole_head(settings, device, plan)
    return [_row(head, name, None, found[name]) for name in _ordered(found)]


def _ordered(found: Mapping[str, Measured]) -> list[str]:
    """Dense and its twin first, then what the plan gives, then the others as they come."""
    first = [name for name in (DENSE, DENSE + AGAIN, PLANNED) if name in found]
    return first + [name for name in found if name not in first]


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
