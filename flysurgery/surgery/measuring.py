"""Makes a plan by measured times: groups of layers are timed with each of their choices, and whole models beside dense."""

import copy
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from flysurgery.calibration import Data
from flysurgery.errors import FlysurgeryError, InferenceError, OptionError, PlanError, Reason, first_line
from flysurgery.fidelity import Progress
from flysurgery.inference import clock
from flysurgery.inference.find_groups import Findings, find_groups
from flysurgery.inference.optimize import MEASURED_IMAGES, optimize
from flysurgery.inference.replacement import Candidate, find_replacements
from flysurgery.patterns import Architecture
from flysurgery.surgery.allocation import DENSE, Allocation, Picks, check_budget, layer_candidates, prepare
from flysurgery.surgery.apply import install
from flysurgery.surgery.choices import Measurement, TimedChoice, TimedGroup, Tradeoff
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.transaction import draw_anew
from flysurgery.walker import separating, shadow, shape_of

LEAST_NOISE = 0.02
"""The least noise that is assumed for a time; it is larger where dense, timed twice in the same run, differs by more."""


@dataclass(frozen=True)
class Setting:
    """The use for which a model should be fast: ``batch`` samples a forward (None: 64 on CUDA, else one) in ``dtype`` (None: the model's).

    With ``optimized`` it will be optimized, and is also compared with optimized dense.
    """

    batch: int | None = None
    dtype: torch.dtype | None = None
    optimized: bool = False


def choose_measured(
    plan: Plan,
    model: nn.Module,
    setting: Setting,
    *,
    budget: float | None = None,
    calibrate: Data | None = None,
    samples: int | None = None,
    progress: Progress | None = None,
) -> tuple[Plan, Tradeoff, Measurement]:
    """``plan`` with choices among dense, low rank and the named architectures, made by times on the device where ``model`` is.

    Each group of ``measure_groups`` gets the choice of least error among those that are faster than dense by more than the noise. A
    ``budget`` bounds the milliseconds of all groups instead, as in ``allocate``. Then the whole model is timed, dense and converted with
    random weights. While it is slower than dense, the kind of group that gained the least goes back to dense. The model is only read.

    Raises:
        PlanError: nothing is faster than dense.
        OptionError: a model that does not take one tensor, and the cases of ``allocate``.
        InferenceError: the model cannot run in this setting: too little memory, or no operator for its dtype.
    """
    check_budget(budget, measured=True, named=())
    device = next(model.parameters()).device
    dense = copy.deepcopy(model).eval().requires_grad_(False)
    dense = dense if setting.dtype is None else dense.to(setting.dtype)
    example = _example(plan, setting, device, next(p.dtype for p in dense.parameters() if p.is_floating_point()))
    with _in_one_sentence(example):
        with torch.no_grad():
            dense(example)
        groups = measure_groups(plan, dense, example, fused=setting.optimized, progress=progress)
    allocation = prepare(plan, model, budget=budget, times=groups, calibrate=calibrate, samples=samples, progress=progress)
    with _in_one_sentence(example):
        references = [dense]
        if setting.optimized:
            references.append(shadow(dense))
            optimize(references[1], example)
        picks, reasons, dense_ms, converted_ms = _not_slower(allocation, allocation.pick(budget), groups, references, example)
    measurement = Measurement(
        device=str(device) if device.type != "cuda" else torch.cuda.get_device_name(device),
        dtype=_name(example.dtype),
        batch=len(example),
        groups=tuple(groups),
        chosen=tuple(option.name for option in picks),
        dense_ms=dense_ms[0],
        dense_optimized_ms=dense_ms[1] if setting.optimized else None,
        converted_ms=converted_ms,
        returned=tuple(fqn for number in sorted(reasons) for fqn in groups[number].fqns),
    )
    return allocation.plan_of(picks, reasons), allocation.tradeoff(picks, budget), measurement


def _not_slower(
    allocation: Allocation, picks: Picks, groups: Sequence[TimedGroup], references: Sequence[nn.Module], example: Tensor
) -> tuple[Picks, dict[int, Reason], list[float], float]:
    """The picks without the groups that make the whole model slower than dense, why these went back, and the model's times.

    ``references`` are dense, and where converted models are optimized also optimized dense. All are timed in turns, in milliseconds.
    """
    reasons: dict[int, Reason] = {}
    while True:
        model = random_variant(allocation.plan_of(picks, reasons), references[0])
        if len(references) > 1:
            optimize(model, example)
        with torch.no_grad():
            *dense_ms, converted_ms = clock.medians_ms([*references, model], (example,), most_copies=clock.MOST_COPIES)
        del model  # before the next one is made
        fastest = min(dense_ms)
        if converted_ms <= fastest:
            return picks, reasons, dense_ms, converted_ms
        text = f"with it the whole model takes {converted_ms:.3g} ms here, dense {fastest:.3g} ms ({converted_ms / fastest - 1:+.1%})"
        dense = [options[0] for options in allocation.options]
        converted = [number for number, option in enumerate(picks) if option is not dense[number]]
        least = min(converted, key=lambda number: dense[number].cost - picks[number].cost)
        kind = (groups[least].choices, picks[least].name)
        back = [number for number in converted if (groups[number].choices, picks[number].name) == kind]
        if back == converted:
            what = f"{len(example)} samples in {_name(example.dtype)}"
            raise PlanError(f"nothing would be replaced: {text}, at {what}; leave it dense")
        reasons |= dict.fromkeys(back, Reason("slower-model", text))
        picks = tuple(dense[number] if number in back else option for number, option in enumerate(picks))


@contextmanager
def _in_one_sentence(example: Tensor) -> Iterator[None]:
    """Turn PyTorch's errors about memory, dtypes and launches into an ``InferenceError``."""
    try:
        yield
    except FlysurgeryError:
        raise
    except RuntimeError as error:
        what = f"{len(example)} samples in {_name(example.dtype)} on {example.device}"
        raise InferenceError(f"measuring with {what} failed: {first_line(error)}; try another batch, dtype or device") from error


def _example(plan: Plan, setting: Setting, device: torch.device, dtype: torch.dtype) -> Tensor:
    only = plan.only_input
    if only is None or not getattr(torch, only.dtype).is_floating_point:
        raise OptionError("measuring takes a model whose only input is one tensor of images or the like; choose by a budget of weights")
    batch = setting.batch or (MEASURED_IMAGES if device.type == "cuda" else 1)
    generator = torch.Generator(device).manual_seed(0)
    return torch.randn((batch, *only.shape[1:]), generator=generator, device=device, dtype=dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class _Way:
    """One way to run a group with a named choice; equal ones take the same time. ``likeness`` differs where the time does."""

    name: str
    fused: bool
    likeness: object
    run: clock.Way = field(compare=False)


_Problem: TypeAlias = tuple[clock.Shapes, tuple[_Way, ...]]
"""All ways to compute one thing from inputs of these shapes."""

_Options: TypeAlias = Mapping[str, Mapping[str, Architecture]]
"""For each layer its choices by name."""


class _Timed(NamedTuple):
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
    found = find_groups(double, example)
    options = {layer.fqn: layer_candidates(layer) for layer in plan.replaced}
    names = dict.fromkeys(name for each in options.values() for name in each)
    variants = {DENSE: double} | {name: random_variant(_with_choice(plan, options, name), double) for name in names}
    groups = _fused_groups(list(options), found, variants) if fused else {}
    covered = {fqn for fqns in groups for fqn in fqns}
    groups |= {(fqn,): _alone(fqn, found, variants, options) for fqn in options if fqn not in covered}
    distinct = {problem: fqns[0] for fqns, problems in groups.items() for problem in problems}
    timed: dict[_Problem, _Timed] = {}
    for done, (problem, fqn) in enumerate(distinct.items(), start=1):
        timed[problem] = _time(problem, fqn, example)
        if progress is not None:
            progress(done, len(distinct), fqn)
    order = {layer.fqn: index for index, layer in enumerate(plan.layers)}
    found_groups = [_group(fqns, [timed[problem] for problem in problems], options) for fqns, problems in groups.items()]
    return sorted(found_groups, key=lambda group: order[group.fqns[0]])


def random_variant(plan: Plan, model: nn.Module) -> nn.Module:
    """A stand-in of ``model``, converted by ``plan`` with random weights. It shares all other weights with the unchanged model."""
    double = shadow(model)
    if not plan.replaced:
        return double
    install(plan, double)
    with torch.random.fork_rng({parameter.device.index for parameter in model.parameters() if parameter.is_cuda}):
        for layer in plan.replaced:
            draw_anew(double.get_submodule(layer.fqn))
    return double


def _with_choice(plan: Plan, options: _Options, name: str) -> Plan:
    layers = []
    for layer in plan.layers:
        architecture = options[layer.fqn].get(name) if layer.is_replaced else None
        parts = tuple(replace(part, architecture=architecture) for part in layer.parts)
        layers.append(layer if architecture is None else replace(layer, parts=parts))
    reason = Reason("no-choice", f"there is no {name} of its size")
    return replace(plan, layers=tuple(layers)).keeping({fqn: reason for fqn, each in options.items() if name not in each})


def _fused_groups(planned: Sequence[str], found: Findings, variants: Mapping[str, nn.Module]) -> dict[tuple[str, ...], list[_Problem]]:
    """The groups that have planned layers, by the names of these, as one problem each."""
    candidates: dict[str, dict[str, Candidate]] = {}
    for name, variant in variants.items():
        replacements = find_replacements(variant, found).replacements
        candidates[name] = {each.fqn: each for replacement in replacements for each in replacement.candidates}
    groups: dict[tuple[str, ...], list[_Problem]] = {}
    for fqn, dense in candidates[DENSE].items():
        linears = (*found.feed_forwards[fqn].first, fqn) if dense.group == "ffn" else (fqn,)
        members = tuple(linear for linear in linears if linear in planned)
        if members:
            ways = [way for name, each in candidates.items() if fqn in each for way in _ways(name, each[fqn])]
            groups[members] = [(dense.shapes, tuple(ways))]
    return groups


def _ways(name: str, candidate: Candidate) -> list[_Way]:
    step = candidate.step
    parameter = next(step.parameters())
    with torch.no_grad():
        found = step.way(*(torch.empty(shape, dtype=parameter.dtype, device=parameter.device) for shape in candidate.shapes))
    likeness = (candidate.group, *step.likeness())
    plain = _Way(name, False, likeness, step.plain)
    return [plain] if isinstance(found, str) else [plain, _Way(name, True, likeness, step.fused)]


def _alone(fqn: str, found: Findings, variants: Mapping[str, nn.Module], options: _Options) -> list[_Problem]:
    """The layer by itself, one problem for each of its calls in a forward."""
    modules = {name: variant.get_submodule(fqn) for name, variant in variants.items() if name == DENSE or name in options[fqn]}
    shapes = {name: tuple((leaf, each.shape) for leaf, each in module.named_parameters()) for name, module in modules.items()}
    ways = tuple(_Way(name, False, (type(module), shapes[name]), module) for name, module in modules.items())
    return [((shape_of(call.source) or (),), ways) for call in found.seen.calls if call.fqn == fqn]


@torch.no_grad()
def _time(problem: _Problem, fqn: str, example: Tensor) -> _Timed:
    shapes, all_ways = problem
    inputs = clock.random_inputs(shapes, example.dtype, example.device)
    failed: dict[str, str] = {}
    ways: list[_Way] = []
    for way, reason in zip(all_ways, _failures(all_ways, inputs), strict=True):
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


def _group(fqns: tuple[str, ...], timed: Sequence[_Timed], options: _Options) -> TimedGroup:
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
