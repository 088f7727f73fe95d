"""Times the parts of a ViT and its training step, each variant beside dense: Tables 3, 5 and 6 of Gonon et al. 2024."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import timm
import torch
from torch import Tensor, nn

from flysurgery.bench.ceilings import Ceilings, measure_ceilings, work_of_step
from flysurgery.bench.measuring import Measured, Protocol, checked_rows, measure, one_line, rows_of
from flysurgery.bench.timing import TIMED_MODES, in_mode
from flysurgery.bench.units import PROTOCOLS, Unit, converted_timm, layer_sizes, model_name, units, vit_sizes
from flysurgery.bench.variants import (
    COMPILED,
    INT8,
    INT8_ERROR,
    VARIANTS,
    by_definition,
    chosen_backends,
    compiled,
    definitions,
    forget_compiled,
    fused_modules,
    obstacle,
)
from flysurgery.errors import OptionError
from flysurgery.patterns import named

FUSED = "fused modules"
"""The variant in which whole modules are replaced for inference, not only their linears."""

SLOW_ON_CPU = "bsr"

CANDIDATES = ("dense", "layer", "two launches", FUSED, "bmm", "einsum", SLOW_ON_CPU)
LAUNCHES = ("graph", "eager", *COMPILED)

STEP, STEP_MODE = "training step", "bf16"
STEPS_THAT_MUST_LEARN = 8

COMPLETE, LINEARS = "dense", "linears of FFNs"

Done = Callable[[Mapping[str, object]], bool]


def nothing_done(key: Mapping[str, object]) -> bool:
    """Say that no rows are there yet."""
    return False


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

    def head(self, protocol: str, unit: str, mode: str, launch: str, device: torch.device) -> dict[str, Any]:
        """Give the columns that tell the rows of one part from the others."""
        name = model_name(self.model, self.model_args)
        compiled = launch if launch in COMPILED else ""
        columns = {"model": name, "arch": self.arch, "protocol": protocol, "unit": unit, "batch": self.batch, "mode": mode}
        return columns | {"device_type": device.type, "compiled": compiled}

    def protocol(self, launch: str) -> Protocol:
        """Give the protocol of a launch; compiled modules are launched from Python."""
        return Protocol("eager" if launch in COMPILED else launch, self.rounds, self.seconds, self.seed)


def bench_layers(
    settings: LayerSettings,
    device: torch.device,
    *,
    paper: Mapping[tuple[str, str], float] | None = None,
    done: Done = nothing_done,
) -> Iterator[list[LayerRow]]:
    """Measure part by part; each list holds the rows of one part, protocol, mode and launch.

    Args:
        paper: ratios to dense that the paper reports, by part and candidate.
        done: gets what identifies a group of rows; True leaves the group out.

    Raises:
        PatternError: the architecture does not exist at the model's width.
        OptionError: a name that is not known.
    """
    parts = _wanted_parts(settings, device)
    for mode in settings.modes:
        for protocol in settings.protocols:
            for unit in parts[protocol]:
                for launch in _launches(settings.launches, protocol, device):
                    head = settings.head(protocol, unit.name, mode, launch, device)
                    # the first candidate stands for all: others may have been launched otherwise, where they cannot be captured
                    if not done(head | {"launch": settings.protocol(launch).launch, "candidate": settings.candidates[0]}):
                        yield _rows(settings, head, unit, launch, device, paper or {})


def _wanted_parts(settings: LayerSettings, device: torch.device) -> dict[str, list[Unit]]:
    """Give the parts to measure by protocol, after all names have been checked."""
    for kind, wanted, known in (("candidate", settings.candidates, (*CANDIDATES, INT8)), ("launch", settings.launches, LAUNCHES)):
        for name in wanted:
            if name not in known:
                raise OptionError(f"there is no {kind} '{name}'; choose from {', '.join(known)}")
    sizes, _ = vit_sizes(settings.model, settings.model_args)
    for out_features, in_features in layer_sizes(sizes.width).values():
        named(settings.arch, out_features, in_features)  # raises where the architecture does not exist
    protocols = dict.fromkeys((*PROTOCOLS, *settings.protocols))
    parts = {each: units(each, settings.model, settings.model_args, settings.arch, settings.seed) for each in protocols}
    known = sorted({part.name for each in parts.values() for part in each})
    for name in settings.names or ():
        if not any(fnmatchcase(each, name) for each in known):
            raise OptionError(f"no part of {settings.model} is called {name}; the parts are {', '.join(known)}")
    if not any(_launches(settings.launches, protocol, device) for protocol in settings.protocols):
        wanted = f"launches {', '.join(settings.launches)} and protocols {', '.join(settings.protocols)}"
        raise OptionError(f"nothing to measure by {wanted}: there are graphs on CUDA alone, the compiler in protocol today alone")
    names = settings.names or ("*",)
    return {protocol: [part for part in each if any(fnmatchcase(part.name, name) for name in names)] for protocol, each in parts.items()}


def _launches(wanted: Sequence[str], protocol: str, device: torch.device) -> list[str]:
    """The paper's protocol knows no compiler; without CUDA there are no graphs."""
    known = [each for each in wanted if device.type == "cuda" or each != "graph"]
    return [each for each in known if protocol == "today" or each not in COMPILED]


def _rows(
    settings: LayerSettings,
    head: dict[str, Any],
    unit: Unit,
    launch: str,
    device: torch.device,
    paper: Mapping[tuple[str, str], float],
) -> list[LayerRow]:
    module = unit.make().to(device, TIMED_MODES[head["mode"]])
    with in_mode(head["mode"]) as dtype, torch.no_grad():  # inference mode would not do for the compiler's and the sparse layouts' tensors
        generator = torch.Generator(device=device).manual_seed(settings.seed)
        x = torch.randn(settings.batch, *unit.shape, generator=generator, device=device, dtype=dtype)
        if launch in COMPILED:
            forget_compiled()
        made, refused = _candidates(settings, module, x, head["mode"], launch)
        rows, dense = checked_rows(settings.batch, 2), VARIANTS["dense"](module)
        defined = {name: dense if name in ("dense", INT8) else module for name in settings.candidates}
        truths, works = definitions(defined, x, rows)
        measured = measure(
            made,
            x,
            truths,
            rows=rows,
            refused=refused,
            allowed={INT8: INT8_ERROR},
            works=works,
            ceilings=measure_ceilings(head["mode"], device, quick=settings.quick),
            protocol=settings.protocol(launch),
        )
        backend = chosen_backends(module, x, allow_tf32=head["mode"] == "tf32", rows=settings.batch * unit.rows)
    ratios = {name: ratio for (part, name), ratio in paper.items() if part == unit.name}
    return rows_of(LayerRow, head, measured, settings.candidates, backend={"layer": backend}, paper_ratio=ratios)


def _candidates(
    settings: LayerSettings, module: nn.Module, x: Tensor, mode: str, launch: str
) -> tuple[dict[str, Callable[[Tensor], Tensor]], dict[str, str]]:
    """Make the variants that can run, and say why the others cannot."""
    made: dict[str, Callable[[Tensor], Tensor]] = {}
    refused: dict[str, str] = {}
    for name in settings.candidates:
        reason = obstacle(name, module, x, allow_tf32=mode == "tf32")
        if settings.quick and name == SLOW_ON_CPU and not x.is_cuda:
            reason = "left out by --quick: on a CPU it takes tens of times as long as the others"
        if reason is not None:
            refused[name] = reason
            continue
        try:
            variant = fused_modules(module, x) if name == FUSED else VARIANTS[name](module)
        except Exception as error:  # the failure of one variant is its row
            refused[name] = f"failed: {one_line(error)}"
            continue
        made[name] = compiled(variant, launch) if launch in COMPILED else variant
    return made, refused


def bench_training(settings: LayerSettings, device: torch.device, *, done: Done = nothing_done) -> Iterator[list[LayerRow]]:
    """Measure a step under autocast to bfloat16 on a fixed batch; a candidate whose loss does not fall gets no time.

    On CUDA steps are launched from Python, as training launches them; ``max-autotune`` is not measured.
    """
    for launch in settings.launches:
        head = settings.head("today", STEP, STEP_MODE, launch, device)
        if launch in ("eager", "compile") and not done(head):
            found = _measure_steps(settings, device, launch)
            yield rows_of(LayerRow, head, found, ("dense", "layer"), backend={}, paper_ratio={})


def _measure_steps(settings: LayerSettings, device: torch.device, launch: str) -> dict[str, Measured]:
    forget_compiled()
    torch.manual_seed(settings.seed)
    layer: Any = converted_timm(settings.model, settings.model_args, settings.arch).to(device)
    images = torch.randn(settings.batch, 3, *layer.patch_embed.img_size, device=device)
    labels = torch.randint(0, layer.num_classes, (settings.batch,), device=device)
    models = {"dense": VARIANTS["dense"](layer), "layer": layer}
    works = {name: work_of_step(by_definition(model), images, labels) for name, model in models.items()}
    steps = {name: _step(model.requires_grad_(True).train(), labels, launch) for name, model in models.items()}
    wrong = {name: status for name, step in steps.items() if (status := _what_is_wrong(step, images)) is not None}
    right = {name: step for name, step in steps.items() if name not in wrong}
    ceilings = measure_ceilings(STEP_MODE, device, quick=settings.quick)
    return measure(right, images, None, refused=wrong, works=works, ceilings=ceilings, protocol=settings.protocol("eager"))


def _what_is_wrong(step: Callable[[Tensor], Tensor], images: Tensor) -> str | None:
    """Say why a step gets no time; None where its loss falls."""
    try:
        losses = [float(step(images)) for _ in range(STEPS_THAT_MUST_LEARN)]
    except (RuntimeError, NotImplementedError) as error:
        return f"failed: {one_line(error)}"
    return None if losses[-1] < losses[0] else f"wrong: the loss went from {losses[0]:.3f} to {losses[-1]:.3f}"


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


def share_head(model: str, model_args: Mapping[str, Any], batch: int, mode: str, device: torch.device) -> dict[str, Any]:
    """Give what identifies the rows of one model."""
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
    """Measure a dense timm ViT and the linears of its feed-forward networks in one run, with random weights.

    The linears have biases, as those of the model; the paper leaves them out.

    Raises:
        OptionError: timm does not know the model, or it is no ViT that can be taken apart.
    """
    sizes, prefix_tokens = vit_sizes(model, model_args)
    torch.manual_seed(protocol.seed)
    rows = checked_rows(batch, 1)
    shapes = {COMPLETE: (batch, 3, sizes.image, sizes.image), LINEARS: (batch, sizes.tokens + prefix_tokens, sizes.width)}
    with in_mode(mode) as dtype, torch.inference_mode():
        with device:  # where drawing weights takes least time
            whole = timm.create_model(model, pretrained=False, **model_args)
            linears = linears_of_ffns(sizes.width, sizes.depth)
        parts: dict[str, nn.Module] = {COMPLETE: whole.eval().to(dtype), LINEARS: linears.eval().to(dtype)}
        inputs = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
        truths, works = {}, {}
        for name, part in parts.items():
            own_truths, own_works = definitions({name: part}, inputs[name], rows)
            truths, works = truths | own_truths, works | own_works
        found = measure(parts, inputs, truths, rows=rows, works=works, ceilings=ceilings, protocol=protocol)
    head = share_head(model, model_args, batch, mode, device)
    return rows_of(ShareRow, head, found, (COMPLETE, LINEARS), paper_ratio={LINEARS: paper})


def linears_of_ffns(width: int, depth: int) -> nn.Sequential:
    """Make the linears of all feed-forward networks of a ViT, nothing between them, with weights that keep the size of what passes."""
    linears = [nn.Linear(*sizes) for _ in range(depth) for sizes in ((width, 4 * width), (4 * width, width))]
    for linear in linears:
        nn.init.normal_(linear.weight, std=linear.in_features**-0.5)
    return nn.Sequential(*linears)
