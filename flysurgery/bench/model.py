"""Says whether conversion is worth it here: each layer of a model and the model as a whole, converted beside dense."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.bench.measuring import MEASURED, Case, Protocol, checked_rows, rows_of_case
from flysurgery.bench.rows import Job, Record
from flysurgery.bench.timing import TIMED_MODES
from flysurgery.bench.variants import OPTIMIZED, chosen_backends, definitions, dense_linear, fused_modules
from flysurgery.errors import OptionError, Reason, first_line
from flysurgery.patterns import Architecture
from flysurgery.surgery import LayerPlan, Plan, install, layer_candidates, sample_shape
from flysurgery.surgery.transaction import build_empty, draw_anew
from flysurgery.tables import grouped

WHOLE = "(model)"  # stands in the column ``layer`` of rows about the whole model
DENSE, PLANNED, WHERE_FASTER = "dense", "converted", "converted where faster"

CHECKED_ROWS = 256

ROW = ("model", "batch", "mode", "device_type", "layer", "role", "layers", "calls", "rows", "out_features", "in_features", "architecture")
MODEL_COLUMNS = (*ROW, "candidate", "backend", "planned", *MEASURED)
"""A row is of one candidate for one kind of layer, or for the model; ``layers`` is how many layers it stands for.

``candidate`` is ``dense``, an architecture that every part of the layer gets, or ``converted``: the ``architecture`` that the plan
gives, of the whole model all of them. Times are of one call; a layer is called ``calls`` times in a forward.
"""


@dataclass(frozen=True)
class Group:
    """Layers that are alike, ``fqns`` by name, and what the plan gives the first of them. ``rows`` is for one call of one sample."""

    name: str
    fqns: tuple[str, ...]
    layer: LayerPlan

    @property
    def rows(self) -> int:
        return max(1, self.layer.rows // max(1, self.layer.calls))


@dataclass(frozen=True)
class ModelSettings:
    """What is measured."""

    name: str  # of the model, in rows; with the arguments of its constructor, so that a run that goes on takes no other for it
    device: torch.device
    batch: int = 1
    mode: str = "fp32"
    search: bool = True  # time more architectures than the plan's own
    optimized: bool = False  # time whole models as ``optimize`` makes them too, converted and dense
    protocol: Protocol = field(default_factory=Protocol)


def groups_of(plan: Plan) -> list[Group]:
    """Group the layers that a plan replaces by all that matters for time."""

    def alike(layer: LayerPlan) -> object:
        return (layer.role, layer.in_features, layer.out_features, layer.bias, layer.calls, layer.rows, layer.parts)

    found = grouped(plan.replaced, lambda layer: layer.fqn, alike)
    return [Group(name, tuple(each.fqn for each in members), members[0]) for name, members in found]


def layer_head(settings: ModelSettings, group: Group) -> Record:
    """Give what tells the rows of one kind of layer from others."""
    layer = group.layer
    sizes = settings.batch * group.rows, layer.out_features, layer.in_features
    return _head(settings, group.name, layer.role, len(group.fqns), layer.calls, *sizes, layer.architecture or "")


def whole_head(settings: ModelSettings, plan: Plan) -> Record:
    """Give what tells the rows of the whole model from others."""
    architectures = dict.fromkeys(layer.architecture or "" for layer in plan.replaced)
    return _head(settings, WHOLE, "", len(plan.replaced), 1, settings.batch, 0, 0, " + ".join(architectures))


def _head(settings: ModelSettings, *columns: object) -> Record:
    values = settings.name, settings.batch, settings.mode, settings.device.type, *columns
    return dict(zip(ROW, values, strict=True))


def layer_jobs(groups: Sequence[Group], settings: ModelSettings) -> Iterator[Job]:
    """List the kinds of layers that a plan replaces: dense, as planned, and further architectures. Random weights.

    A kind of layer is told by its last candidate: after a quick run, which has none of the further ones, all are timed in one run.
    """
    launch = {"launch": settings.protocol.on(settings.device).launch}
    for group in groups:
        head, searched = layer_head(settings, group), list(dict.fromkeys(layer_candidates(group.layer).values())) if settings.search else []
        make = partial(layer_case, group.layer, head["rows"], searched, settings)
        last = str(searched[-1]) if searched else DENSE
        yield head | launch | {"candidate": last}, partial(rows_of_case, head, make, settings.mode, settings.protocol)


def layer_case(layer: LayerPlan, rows: int, searched: Sequence[Architecture], settings: ModelSettings) -> Case:
    """Make one layer ready: dense, as planned, and in further architectures."""
    options = {"device": settings.device, "dtype": TIMED_MODES[settings.mode]}
    dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias, **options).requires_grad_(False).eval()
    layers: dict[str, Any] = {PLANNED: build_empty(layer, dense)}
    for architecture in searched:
        parts = tuple(replace(part, architecture=architecture) for part in layer.parts)
        layers[str(architecture)] = build_empty(replace(layer, parts=parts), dense)
    for module in layers.values():
        draw_anew(module)
    x = torch.randn(rows, layer.in_features, **options)
    modules: dict[str, nn.Module] = {DENSE: dense_linear(layers[PLANNED]), **layers}
    allow_tf32 = settings.mode == "tf32"
    backends = {name: chosen_backends(module, x, allow_tf32=allow_tf32, rows=rows) for name, module in modules.items()}
    return _case(modules, x, CHECKED_ROWS, backend=backends)


def whole_case(plan: Plan, build: Callable[[], nn.Module], settings: ModelSettings, stay_dense: Mapping[str, str]) -> Case:
    """Make the model ready: dense, converted by ``plan``, and converted except for the layers ``stay_dense`` (with reasons).

    The last is left out where all layers stay dense. With ``settings.optimized`` each is also there as ``optimize`` makes it.
    ``build`` makes the dense model, with any weights; ``plan`` must say what a forward takes (``plan.example``).

    Raises ``OptionError`` where a forward takes something else than one tensor.
    """
    device, dtype, shape = settings.device, TIMED_MODES[settings.mode], sample_shape(plan)
    if shape is None:
        raise OptionError("bench model times models that take one tensor; time this one's layers with bench multiply")
    x = torch.randn(settings.batch, *shape, device=device, dtype=dtype)
    models: dict[str, nn.Module] = {DENSE: build().eval()}
    models[PLANNED] = _installed(plan, models[DENSE])
    if stay_dense:
        partly = plan.keeping({fqn: Reason("slower", text) for fqn, text in stay_dense.items()})
        if partly.replaced:
            models[WHERE_FASTER] = _installed(partly, models[DENSE])
    models = {name: model.to(device, dtype).requires_grad_(False) for name, model in models.items()}
    runs: dict[str, nn.Module | str] = dict(models)
    for name, model in models.items() if settings.optimized else ():
        try:
            runs[name + OPTIMIZED] = fused_modules(model, x)
        except Exception as error:  # the other rows stand without it
            runs[name + OPTIMIZED] = f"failed: {first_line(error)}"
    return _case(runs, x, 2)


def _case(runs: Mapping[str, nn.Module | str], x: Tensor, count: int, **notes: Mapping[str, Any]) -> Case:
    """Hold each module against its own definition, or that of the module that was optimized, on ``count`` rows at either end."""
    rows = checked_rows(len(x), count)
    plain = {name: runs[name.removesuffix(OPTIMIZED)] for name in runs}
    truths, works = definitions({name: module for name, module in plain.items() if isinstance(module, nn.Module)}, x, rows)
    return Case(runs, x, truths, rows, works, notes={**notes, "planned": {name: name == PLANNED for name in runs}})


def _installed(plan: Plan, dense: nn.Module) -> nn.Module:
    model = copy.deepcopy(dense)
    install(plan, model)
    draw_anew(model)
    return model


def ratios_of(records: Sequence[Record]) -> dict[tuple[str, str], float]:
    """Find the time over dense of each candidate for each kind of layer, by both names, where it has one."""
    return {(row["layer"], row["candidate"]): float(row["ratio_to_dense"]) for row in records if row["ratio_to_dense"]}


def slower_layers(records: Sequence[Record], groups: Sequence[Group]) -> dict[str, str]:
    """List the layers, by name, that are slower converted than dense or could not be timed, each with the reason."""
    found, ratios = dict[str, str](), ratios_of(records)
    for group in groups:
        ratio = ratios.get((group.name, PLANNED))
        if ratio is None or ratio >= 1:
            reason = "converted it could not be timed" if ratio is None else f"converted it takes {ratio:.2f} of the dense time"
            found |= dict.fromkeys(group.fqns, reason)
    return found


def sentence(records: Sequence[Record], groups: Sequence[Group]) -> str:
    """Say the answer in words, about the optimized model where it was timed, beside optimized dense, which needs no conversion."""
    ratios, stay_dense = ratios_of(records), slower_layers(records, groups)
    shaky = {record["layer"] for record in records if record["status"].startswith("noisy")}
    fused, fused_dense = (ratios.get((WHOLE, name + OPTIMIZED)) for name in (PLANNED, DENSE))
    if fused is not None and fused_dense is not None:
        kind, alone, faster = OPTIMIZED, "by itself ", fused < min(1, fused_dense)
        times = f"converted and optimized the model takes {fused:.2f} of the dense time, optimized without conversion {fused_dense:.2f}"
    elif (WHOLE, PLANNED) in ratios:
        kind, alone, faster = "", "", ratios[WHOLE, PLANNED] < 1
        times = f"the converted model takes {ratios[WHOLE, PLANNED]:.2f} of the dense time"
    else:
        return "the whole model could not be timed converted; its row says why"
    slower = [group.name for group in groups if group.fqns[0] in stay_dense]
    partly = ratios.get((WHOLE, WHERE_FASTER + kind))
    if not slower:
        rest = f"every replaced layer is {alone}faster than dense"
    elif len(slower) == len(groups):
        rest = f"every replaced layer is {alone}faster dense"
    else:
        rest = f"{alone}faster dense: " + ", ".join(name + (" (noisy)" if name in shaky else "") for name in slower)
        rest += "" if partly is None else f", and without converting them the model takes {partly:.2f}"
    start = "this machine is too noisy to say; by these numbers " if WHOLE in shaky else ""
    return f"{start}conversion is {'worth it' if faster else 'not worth it'} here: {times}; {rest}"
