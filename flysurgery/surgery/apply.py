"""Carry a plan out: check all, project all, swap all, verify; or leave the model as it was."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from flysurgery.calibration import Data, samples_of
from flysurgery.errors import OptionError
from flysurgery.surgery.allocating import PLACEHOLDER, allocate
from flysurgery.surgery.calibrating import project_calibrated_layers
from flysurgery.surgery.change import Change
from flysurgery.surgery.check import check_plan, check_weights
from flysurgery.surgery.comparing import DenseReference, settings_of
from flysurgery.surgery.plan import ExampleInput, Plan
from flysurgery.surgery.planning import plan as make_plan
from flysurgery.surgery.projecting import Progress, project_layers
from flysurgery.surgery.report import Report, row_of
from flysurgery.surgery.verify import check_runs


def apply(
    plan: Plan,
    model: nn.Module,
    *,
    calibrate: Data | None = None,
    samples: int | None = None,
    sequential: bool = False,
    permute: bool = False,
    reconstruct: bool | float = False,
    seed: int = 0,
    progress: Progress | None = None,
    verify: bool = True,
) -> Report:
    """Replace the planned layers of ``model``, in place, by their projections.

    With ``calibrate`` the factors are fitted to what the layers are given on these data, and biases take up what the mean of their
    output loses; see ``projection.project_calibrated``. ``calibrate`` holds inputs as the model takes them: a tensor of them, an
    iterable of batches (alone or first in a tuple), or ``Samples``; of these ``samples`` are taken, by default 512 or as many as there
    are, and kept in memory, each fifth of them to measure errors only. ``sequential`` goes block by block, with the blocks before
    converted already: half as many passes as there are blocks instead of one. ``permute`` puts the hidden units of feed-forward blocks,
    the heads of attentions and the entries of each head in an order that lowers the errors, where the traced graph proves that
    the dense model computes the same in any order. The order is absorbed in the layers that share it, those that stay dense included;
    nothing is left to do at run time, and the report says what was won and what was tied.

    With ``calibrate`` the report also has the fidelity: both models are run on the samples held out, and their outputs, tokens and
    blocks compared. ``reconstruct`` then fits all parameters of the converted model, so that its blocks give what those of the
    dense model give; it is a number of minutes, or True for one minute on CUDA and 20 on a CPU. See ``fidelity.reconstruct``; ``seed``
    is that of its views. The model is never worse afterwards on the samples held out.

    Every check comes before the first change. The new modules are made aside, with the dtype, device, mode, biases
    and ``requires_grad`` of the old ones; then all are swapped in, the plan's switches are set, and with ``verify`` one
    forward in eval mode must call each of them. Whatever fails or is interrupted, the model is as it was before.

    Until the end the old weights are kept, so memory peaks at the dense model, the factors, and a few layers in float64; reconstruction
    needs a copy of the dense model and its own memory besides.

    Raises:
        SurgeryError: the model is converted already, has no weights (meta), or fails the verifying forward.
        PlanError: the plan does not fit the model.
        ProjectionError: a weight or bias has NaN or infinite entries; the message names the layer.
        DataError: calibration samples that the model does not take, or fewer than ``samples``.
        OptionError: options of calibration without data.
    """
    started = perf_counter()
    dense = check_plan(plan, model)
    check_weights(dense)
    params_before = _count(model)
    calibration, permutations, reference = None, (), None
    if calibrate is None:
        if samples is not None or sequential or permute or reconstruct:
            raise OptionError("samples, sequential, permute and reconstruct are options of calibration; give data to calibrate with")
        modules, rows = project_layers(plan.replaced, dense, progress)
    else:
        taken = samples_of(calibrate, count=samples, shape=_sample_shape(plan))
        reference = DenseReference(plan, model, taken, settings_of(reconstruct, seed, model))
        modules, rows, calibration, permutations = project_calibrated_layers(
            plan, model, dense, taken, sequential=sequential, permute=permute, progress=progress
        )
    with Change(model) as change:
        change.convert(plan, modules)
        if verify:
            check_runs(plan, model)
        fidelity, reconstruction = (None, None) if reference is None else reference.run(model, progress)
    return Report(
        rows=tuple(rows.get(layer.fqn) or row_of(layer, (), None, None) for layer in plan.layers),
        model_params_before=params_before,
        model_params_after=_count(model),
        seconds=perf_counter() - started,
        verified=verify,
        calibration=calibration,
        permutations=permutations,
        fidelity=fidelity,
        reconstruction=reconstruction,
    )


def convert(
    model: nn.Module,
    arch: str = "monarch",
    *,
    calibrate: Data | None = None,
    samples: int | None = None,
    sequential: bool = False,
    permute: bool = False,
    reconstruct: bool | float = False,
    seed: int = 0,
    progress: Progress | None = None,
    verify: bool = True,
    budget: float | None = None,
    max_error: float | None = None,
    latency: Path | None = None,
    **options: Any,
) -> Report:
    """``plan`` and ``apply`` in one; ``options`` are those of ``plan``, the others those of ``apply``. Raises what they raise.

    With ``budget``, ``max_error`` or ``latency`` the architectures are chosen by ``allocate``, not by ``arch`` and its options.
    """
    tradeoff = None
    if (budget, max_error, latency) == (None, None, None):
        plan = make_plan(model, arch, **options)
    else:
        named = [name for name in ("nblocks", "rank", "patterns") if options.get(name) is not None] + ["arch"] * (arch != "monarch")
        if named:
            raise OptionError(
                f"a budget, max_error and latency choose the architectures, so {' and '.join(named)} cannot be given with them"
            )
        plan = make_plan(model, PLACEHOLDER, **options)
        plan, tradeoff = allocate(
            plan, model, budget=budget, max_error=max_error, latency=latency, calibrate=calibrate, samples=samples, progress=progress
        )
    report = apply(
        plan,
        model,
        calibrate=calibrate,
        samples=samples,
        sequential=sequential,
        permute=permute,
        reconstruct=reconstruct,
        seed=seed,
        progress=progress,
        verify=verify,
    )
    return replace(report, tradeoff=tradeoff)


def _sample_shape(plan: Plan) -> tuple[int, ...] | None:
    """What one sample looks like, where the plan says that the model takes one batch of samples."""
    first = plan.example[0] if plan.example is not None and len(plan.example) == 1 else None
    return first.shape[1:] if isinstance(first, ExampleInput) else None


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
