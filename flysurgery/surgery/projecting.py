"""Project all planned layers into new modules, aside from the model: by their weights, or stage by stage by what they are given."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from time import perf_counter

import torch
from torch import Tensor, nn

from flysurgery.calibration import Inputs, Samples, inputs_of
from flysurgery.errors import ProjectionError
from flysurgery.fidelity import Progress
from flysurgery.projection import (
    FitProblem,
    Fitted,
    OutputError,
    Projection,
    calibrated_projection,
    fit_side_by_side,
    metric_of,
    output_error,
    product_of,
    project,
    random_start,
    workers,
)
from flysurgery.surgery.permuting import permute as permute_features
from flysurgery.surgery.permuting import shared_features
from flysurgery.surgery.plan import LayerPlan, Part, Plan
from flysurgery.surgery.report import Permutation, ReportCalibration, Row, RowCalibration
from flysurgery.surgery.transaction import Dense, build, changing, matrix_of, prepare, swap

NO_ERROR = OutputError(0.0, 0.0)


@dataclass(frozen=True)
class PartFit:
    """One part of a layer: its factors (None where it stays dense), and ``shift``, which is added to the bias.

    On held-out samples, the output has ``error``, and that of the plain projection ``plain``.
    """

    projection: Projection | None = None
    seconds: float = 0.0
    shift: Tensor | None = None
    error: OutputError = NO_ERROR
    plain: OutputError = NO_ERROR
    note: str | None = None


def project_layers(
    layers: Sequence[LayerPlan],
    dense: Mapping[str, Dense],
    progress: Progress | None,
    inputs: Mapping[str, Inputs] | None = None,
    seed: int | None = None,
) -> tuple[dict[str, nn.Module], dict[str, Row]]:
    """Make the new modules and the report's rows of ``layers``, by name. The model is only read.

    Without ``inputs`` the factors are those nearest to the weights, or random ones where there is a ``seed``. With ``inputs`` they are
    fitted to these, and the biases correct the mean of the output. Layers are projected side by side.

    Raises:
        ProjectionError: a weight that cannot be projected; the message names the layer.
    """
    parts = [(layer, part) for layer in layers for part in layer.parts]
    found: dict[str, dict[str | None, PartFit]] = {layer.fqn: {} for layer in layers}
    modules: dict[str, nn.Module] = {}
    rows: dict[str, Row] = {}
    for number, fit in _projected(parts, dense, seed) if inputs is None else _fitted(parts, dense, inputs):
        layer, part = parts[number]
        fits = found[layer.fqn]
        fits[part.name] = fit
        if len(fits) < len(layer.parts):
            continue
        in_order = [fits[each.name] for each in layer.parts]
        modules[layer.fqn] = _module(layer, dense[layer.fqn], in_order)
        rows[layer.fqn] = _row(layer, dense[layer.fqn], in_order, calibrated=inputs is not None)
        if progress is not None:
            progress(len(modules), len(layers), layer.fqn)
    return modules, rows


def project_calibrated_layers(
    plan: Plan,
    model: nn.Module,
    dense: Mapping[str, Dense],
    samples: Samples,
    *,
    sequential: bool,
    permute: bool,
    progress: Progress | None,
) -> tuple[dict[str, nn.Module], dict[str, Row], ReportCalibration, tuple[Permutation, ...]]:
    """Make the new modules, their rows, a summary of the calibration, and the outcomes of ``permute``. The model is as before afterwards.

    One pass over the samples collects the inputs of all layers. If ``sequential``, each block has a pass of its own: the blocks before it
    are converted already, and the pass ends with the block, so that only its matrices are held. With ``permute`` dense layers that share
    an order are among the new modules.
    """
    shared = shared_features(plan, model, samples) if permute else ()
    names = {layer.fqn: layer.names for layer in plan.layers}
    stages = _blocks(plan.replaced) if sequential else [plan.replaced]
    modules: dict[str, nn.Module] = {}
    rows: dict[str, Row] = {}
    permutations: list[Permutation] = []
    seconds = 0.0

    def count_on(done: int, _: int, name: str) -> None:
        if progress is not None:
            progress(len(rows) + done, len(plan.replaced), name)

    with changing(model, keep=False):
        prepare(model, plan)
        for stage in stages:
            started = perf_counter()
            inputs = inputs_of(model, {layer.fqn: layer.calls for layer in stage}, samples)
            seconds += perf_counter() - started
            permuted = permute_features(shared, plan, model, stage, inputs)
            permutations += [permuted.outcomes[number] for number in sorted(permuted.outcomes)]
            projected, new_rows = project_layers(stage, {**dense, **permuted.linears}, count_on, permuted.inputs)
            changed = permuted.linears | projected
            modules |= changed
            rows |= new_rows
            if stage is not stages[-1]:
                for fqn, module in changed.items():
                    swap(model, names[fqn], module)
    summary = ReportCalibration(samples.name, len(samples), samples.held_out_count, sequential, seconds, samples.skipped)
    return modules, rows, summary, tuple(permutations)


def _blocks(layers: tuple[LayerPlan, ...]) -> list[tuple[LayerPlan, ...]]:
    """Group the layers by block, in the order of execution. The name of a block ends with the last number in a layer's name."""
    blocks: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        numbered = re.match(r".*\.\d+(?=\.|$)", f".{layer.fqn}")
        blocks.setdefault(numbered[0] if numbered else layer.fqn, []).append(layer)
    return [tuple(block) for block in blocks.values()]


@contextmanager
def naming(fqn: str) -> Iterator[None]:
    """Let a ``ProjectionError`` name the layer."""
    try:
        yield
    except ProjectionError as error:
        raise ProjectionError(f"layer {fqn}: {error}") from error


def _projected(parts: Sequence[tuple[LayerPlan, Part]], dense: Mapping[str, Dense], seed: int | None) -> Iterator[tuple[int, PartFit]]:
    def found(job: tuple[LayerPlan, Part], own_seed: int) -> PartFit:
        layer, part = job
        if part.architecture is None:
            return PartFit()
        weight = matrix_of(dense[layer.fqn], part)
        with naming(layer.fqn):
            projection = project(weight, part.architecture) if seed is None else random_start(weight, part.architecture, own_seed)
        return PartFit(projection, projection.seconds)

    seeds = torch.randint(1 << 62, (len(parts),), generator=torch.Generator().manual_seed(seed or 0)).tolist()
    with workers() as pool:
        yield from enumerate(pool.map(found, parts, seeds))


def _fitted(
    parts: Sequence[tuple[LayerPlan, Part]], dense: Mapping[str, Dense], inputs: Mapping[str, Inputs]
) -> Iterator[tuple[int, PartFit]]:
    fqns = dict.fromkeys(layer.fqn for layer, _ in parts)
    metrics = {fqn: metric_of(inputs[fqn].fit, bias=dense[fqn].bias is not None) for fqn in fqns}
    numbers, problems = [], []
    for number, (layer, part) in enumerate(parts):
        weight = matrix_of(dense[layer.fqn], part)
        if part.architecture is not None:
            numbers.append(number)
            problems.append(FitProblem(weight, part.architecture, metrics[layer.fqn].gram))
        else:
            error = output_error(weight, weight, None, inputs[layer.fqn].held_out)
            yield number, PartFit(error=error, plain=error)

    @torch.no_grad()
    def finish(position: int, fitted: Fitted | None) -> PartFit:
        fqn, weight, architecture = parts[numbers[position]][0].fqn, problems[position].weight, problems[position].architecture
        started, held_out = perf_counter(), inputs[fqn].held_out
        with naming(fqn):
            found = calibrated_projection(weight, architecture, metrics[fqn], fitted)
        error = plain = output_error(weight, product_of(found.projection), found.shift, held_out)
        if found.reason is None:
            plain = output_error(weight, product_of(project(weight, architecture)), None, held_out, error.reference)
        seconds = perf_counter() - started + (fitted.seconds if fitted is not None else 0.0)
        return PartFit(found.projection, seconds, found.shift, error, plain, found.reason)

    for position, fit in fit_side_by_side(problems, finish):
        yield numbers[position], fit


@torch.no_grad()
def _module(layer: LayerPlan, dense: Dense, fits: Sequence[PartFit]) -> nn.Module:
    """The new module; its biases correct the mean of the output."""
    found = list(zip(layer.parts, fits, strict=True))
    weights = [(matrix_of(dense, part).clone(),) if fit.projection is None else fit.projection.factors for part, fit in found]
    module = build(layer, dense, weights)
    for part, fit in found:
        if fit.shift is not None:
            bias = module.get_parameter("bias" if part.name is None else f"{part.name}.bias")
            bias.copy_(bias.cpu().to(torch.float64) + fit.shift)
    return module


def _row(layer: LayerPlan, dense: Dense, fits: Sequence[PartFit], *, calibrated: bool) -> Row:
    found = [(fit.projection, part) for fit, part in zip(fits, layer.parts, strict=True)]
    lost = sum((each.relative_error * _norm(matrix_of(dense, part))) ** 2 for each, part in found if each is not None)
    norm = _norm(dense.weight.detach())
    error = sqrt(lost) / norm if norm else 0.0
    calibration = None
    if calibrated:
        notes = dict.fromkeys(fit.note for fit in fits if fit.note is not None)
        given, plain = (sum((getattr(fit, name) for fit in fits), NO_ERROR).relative for name in ("error", "plain"))
        calibration = RowCalibration(given, plain, "; ".join(notes) or None)
    return Row.of(layer, relative_error=error, seconds=sum(fit.seconds for fit in fits), calibration=calibration)


def _norm(weight: Tensor) -> float:
    return float(torch.linalg.vector_norm(weight.cpu(), dtype=torch.float64))
