"""Times groups of layers with each of their choices, and whole models, on the device and in the dtype of the model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.errors import InferenceError, first_line
from flysurgery.fidelity import Progress
from flysurgery.inference import clock
from flysurgery.inference.find_groups import Findings, find_groups
from flysurgery.inference.optimize import optimize
from flysurgery.inference.replacement import Candidate, find_replacements
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import Architecture
from flysurgery.reason import Reason
from flysurgery.surgery.allocation import named_candidates
from flysurgery.surgery.apply import install
from flysurgery.surgery.choices import TimedChoice, TimedGroup
from flysurgery.surgery.plan import LayerPlan, Plan
from flysurgery.walker import separating, shadow, shape_of

DENSE = "dense"

LEAST_NOISE = 0.02
"""The least noise that is assumed for a time; it is larger where dense, timed twice in the same run, differs by more."""


@dataclass(frozen=True)
class _Way:
    """One way to run a group with a named choice; ``likeness`` differs for ways that take different times."""

    name: str
    fused: bool
    run: clock.Way
    likeness: object


@dataclass(frozen=True)
class _TimingProblem:
    """All ways to compute one thing from inputs of the same shapes."""

    shapes: clock.Shapes
    ways: tuple[_Way, ...]

    @property
    def key(self) -> object:
        """Equal for problems that take the same times."""
        return (self.shapes, tuple((way.name, way.fused, way.likeness) for way in self.ways))


@dataclass(frozen=True)
class _Timed:
    """The fastest way of each choice, by name: milliseconds and whether it is fused; the choices that failed, and why; the noise."""

    fastest: Mapping[str, tuple[float, bool]]
    failed: Mapping[str, str]
    noise: float


def measure_groups(plan: Plan, model: nn.Module, example: Tensor, *, fused: bool, progress: Progress | None = None) -> list[TimedGroup]:
    """The times of the layers that ``plan`` replaces, dense and with each of ``named_candidates``, for inputs like ``example``.

    With ``fused``, the layers of a group that ``optimize`` fuses ([LN -> q, k, v], [LN -> FFN -> residual], ...) are timed together,
    with their norm and residual, by their kernel where there is one, and get one choice. Other layers are timed one by one. Problems with
    equal shapes and choices are timed once, dense and all choices in turns. The dense model is only read.

    Raises:
        InferenceError: a dense layer cannot be run on this device or in this dtype.
        WalkError: the model cannot be traced.
    """
    double = shadow(model)
    separating(model)(double)
    model = double
    found = find_groups(model, example)
    options = {layer.fqn: _options(layer) for layer in plan.replaced}
    names = dict.fromkeys(name for each in options.values() for name in each)
    variants = {DENSE: model} | {name: random_variant(_with_choice(plan, options, name), model) for name in names}
    planned = [layer.fqn for layer in plan.replaced]
    groups = _fused_groups(planned, found, variants) if fused else {}
    covered = {fqn for fqns in groups for fqn in fqns}
    groups |= {(fqn,): _alone(fqn, found, variants, options) for fqn in planned if fqn not in covered}
    distinct = {problem.key: (problem, fqns[0]) for fqns, problems in groups.items() for problem in problems}
    timed: dict[object, _Timed] = {}
    for done, (key, (problem, fqn)) in enumerate(distinct.items(), start=1):
        timed[key] = _time(problem, fqn, example)
        if progress is not None:
            progress(done, len(distinct), fqn)
    order = {layer.fqn: index for index, layer in enumerate(plan.layers)}
    found_groups = [_group(fqns, [timed[problem.key] for problem in problems], options) for fqns, problems in groups.items()]
    return sorted(found_groups, key=lambda group: order[group.fqns[0]])


def random_variant(plan: Plan, model: nn.Module) -> nn.Module:
    """A stand-in of ``model``, converted by ``plan`` with random weights. It shares all other weights with the unchanged model."""
    double = shadow(model)
    if not plan.replaced:
        return double
    install(plan, double)
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices):
        for layer in plan.replaced:
            for part in double.get_submodule(layer.fqn).modules():
                if isinstance(part, ButterflyLinear | nn.Linear):
                    part.reset_parameters()
    return double


def _options(layer: LayerPlan) -> dict[str, Architecture]:
    """The choices of the parts of a layer, by name; none where the parts differ in size."""
    sizes = {part.stop - part.start for part in layer.parts}
    return named_candidates(sizes.pop(), layer.in_features) if len(sizes) == 1 else {}


def _with_choice(plan: Plan, options: Mapping[str, Mapping[str, Architecture]], name: str) -> Plan:
    layers = []
    for layer in plan.layers:
        architecture = options[layer.fqn].get(name) if layer.is_replaced else None
        parts = tuple(replace(part, architecture=architecture) for part in layer.parts)
        layers.append(layer if architecture is None else replace(layer, parts=parts))
    reason = Reason("no-choice", f"there is no {name} of its size")
    return replace(plan, layers=tuple(layers)).keeping({fqn: reason for fqn, each in options.items() if name not in each})


def _fused_groups(
    planned: Sequence[str], found: Findings, variants: Mapping[str, nn.Module]
) -> dict[tuple[str, ...], list[_TimingProblem]]:
    """The groups that have planned layers, by the names of these, as one problem each."""
    candidates: dict[str, dict[str, Candidate]] = {}
    for name, variant in variants.items():
        replacements = find_replacements(variant, found).replacements
        candidates[name] = {each.fqn: each for replacement in replacements for each in replacement.candidates}
    groups: dict[tuple[str, ...], list[_TimingProblem]] = {}
    for fqn, dense in candidates[DENSE].items():
        linears = (*found.feed_forwards[fqn].first, fqn) if dense.group == "ffn" else (fqn,)
        members = tuple(linear for linear in linears if linear in planned)
        if members:
            ways = [way for name, each in candidates.items() if fqn in each for way in _ways(name, each[fqn])]
            groups[members] = [_TimingProblem(dense.shapes, tuple(ways))]
    return groups


def _ways(name: str, candidate: Candidate) -> list[_Way]:
    step = candidate.step
    parameter = next(step.parameters())
    with torch.no_grad():
        found = step.way(*(torch.empty(shape, dtype=parameter.dtype, device=parameter.device) for shape in candidate.shapes))
    likeness = (candidate.group, *step.likeness())
    plain = _Way(name, False, step.plain, likeness)
    return [plain] if isinstance(found, str) else [plain, _Way(name, True, step.fused, likeness)]


def _alone(
    fqn: str, found: Findings, variants: Mapping[str, nn.Module], options: Mapping[str, Mapping[str, Architecture]]
) -> list[_TimingProblem]:
    """The layer by itself, one problem for each of its calls in a forward."""
    modules = {name: variant.get_submodule(fqn) for name, variant in variants.items() if name == DENSE or name in options[fqn]}
    shapes = {name: tuple((leaf, each.shape) for leaf, each in module.named_parameters()) for name, module in modules.items()}
    ways = tuple(_Way(name, False, module, (type(module), shapes[name])) for name, module in modules.items())
    return [_TimingProblem((shape_of(call.source) or (),), ways) for call in found.seen.calls if call.fqn == fqn]


@torch.no_grad()
def _time(problem: _TimingProblem, fqn: str, example: Tensor) -> _Timed:
    inputs = clock.random_inputs(problem.shapes, example.dtype, example.device)
    failed: dict[str, str] = {}
    ways: list[_Way] = []
    for way, reason in zip(problem.ways, _failures(problem.ways, inputs), strict=True):
        if reason is None:
            ways.append(way)
        elif way.name == DENSE and not way.fused:
            raise InferenceError(f"{fqn} cannot be timed dense on {example.device} in {example.dtype}: {reason}")
        else:
            failed[way.name] = reason
    again, *all_ms = clock.medians_ms([ways[0].run, *(way.run for way in ways)], inputs)
    fastest: dict[str, tuple[float, bool]] = {}
    for way, ms in zip(ways, all_ms, strict=True):
        fastest[way.name] = min(fastest.get(way.name, (ms, way.fused)), (ms, way.fused))
    return _Timed(fastest, failed, max(LEAST_NOISE, abs(again / all_ms[0] - 1)))


def _failures(ways: Sequence[_Way], inputs: Sequence[Tensor]) -> list[str | None]:
    """Why the first call of each way fails; None where it does not. On CUDA the first calls run in parallel, as they compile kernels."""
    if not inputs[0].is_cuda:
        return [_failure(way, inputs) for way in ways]
    with ThreadPoolExecutor(os.cpu_count()) as pool, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about slow kernels, whose times will show it
        return list(pool.map(lambda way: _failure(way, inputs), ways))


def _failure(way: _Way, inputs: Sequence[Tensor]) -> str | None:
    device = inputs[0].device
    try:
        with torch.no_grad(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():  # which threads have of their own
            way.run(*inputs)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
    except Exception as error:  # a failure of any library excludes this choice only
        return first_line(error)
    return None


def _group(fqns: tuple[str, ...], timed: Sequence[_Timed], options: Mapping[str, Mapping[str, Architecture]]) -> TimedGroup:
    """The times of all calls together, of the choices that every layer has and every call could be timed with."""
    names = [name for name in options[fqns[0]] if all(name in options[fqn] for fqn in fqns)]
    architectures: dict[str, tuple[Any, ...]] = {DENSE: (None,) * len(fqns)}
    architectures |= {name: tuple(options[fqn][name] for fqn in fqns) for name in names}
    choices = []
    for name, each in architectures.items():
        times = [found.fastest[name] for found in timed if name in found.fastest]
        if times and len(times) == len(timed):
            choices.append(TimedChoice(name, each, sum(ms for ms, _ in times), all(fused for _, fused in times)))
    failed = {name: reason for found in timed for name, reason in found.failed.items()}
    return TimedGroup(fqns, tuple(choices), max(found.noise for found in timed), failed)


@dataclass(frozen=True)
class WholeTimes:
    """Milliseconds of one forward of the whole model; ``dense_optimized_ms`` is None where dense was not optimized."""

    dense_ms: float
    dense_optimized_ms: float | None
    converted_ms: float

    @property
    def reference_ms(self) -> float:
        """The fastest time of dense."""
        return self.dense_ms if self.dense_optimized_ms is None else min(self.dense_ms, self.dense_optimized_ms)


class WholeTimer:
    """Times the models that plans make of ``dense``, with random weights, beside dense."""

    def __init__(self, dense: nn.Module, example: Tensor, *, optimized: bool) -> None:
        self.example = example
        self._dense, self._optimized = dense, optimized
        self._references = [dense]
        if optimized:
            self._references.append(shadow(dense))
            optimize(self._references[1], example)

    def times(self, plan: Plan) -> WholeTimes:
        """The times of dense, of optimized dense and of the plan's model, taken in turns."""
        converted = random_variant(plan, self._dense)
        if self._optimized:
            optimize(converted, self.example)
        with torch.no_grad():
            *dense_ms, converted_ms = clock.medians_ms([*self._references, converted], (self.example,), most_copies=clock.MOST_COPIES)
        return WholeTimes(dense_ms[0], dense_ms[1] if self._optimized else None, converted_ms)
