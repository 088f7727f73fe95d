"""Carry out a plan: check, project, replace and verify all layers, or leave the model as it was. And go back to dense layers."""

import copy
from time import perf_counter
from typing import Literal

from torch import nn

from flysurgery.calibration import Data, samples_of
from flysurgery.errors import OptionError, SurgeryError
from flysurgery.fidelity import Progress, Settings, measure_fidelity
from flysurgery.fidelity import reconstruct as reconstruct_blocks
from flysurgery.surgery.change import (
    build_empty,
    changing,
    convert,
    converted_layers,
    dense_layer,
    plan_of,
    refuse_optimized,
    swap,
    unconvert,
)
from flysurgery.surgery.check import check_plan, check_runs, check_weights, example_of
from flysurgery.surgery.plan import Plan
from flysurgery.surgery.projecting import project_calibrated_layers, project_layers
from flysurgery.surgery.report import Report, Row
from flysurgery.walker import Cut, find_cuts, shadow, survey


def apply(
    plan: Plan,
    model: nn.Module,
    *,
    init: Literal["projection", "random"] = "projection",
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

    ``init="random"`` draws the factors instead, for training from them; biases and dense layers stay. Architectures that have no
    projection, such as the kaleidoscope, need it. ``calibrate`` then gives data to measure the fidelity with and to ``reconstruct`` on.

    ``calibrate`` fits the factors to the inputs that the layers receive on these data, and corrects the mean of the outputs by the
    biases; see ``projection.project_calibrated``. It is a tensor of model inputs, an iterable of batches (alone or first in a tuple), or
    ``Samples``. ``samples`` of them are used and kept in memory, by default 512 or as many as there are; every fifth one only measures
    errors. ``sequential`` calibrates block by block, on inputs from the converted blocks before. It takes half as many passes as there are
    blocks, instead of one. ``permute`` orders the hidden units of feed-forward blocks, the heads of attentions and the entries of each
    head so that the errors fall, where the dense model, tried in float64, computes the same in another order. The layers
    that share an order absorb it, dense ones included, so it costs nothing at run time. The report says what it gained and what is tied.

    With ``calibrate`` the report also has the fidelity: the outputs, tokens and blocks of both models are compared on the held-out
    samples. ``reconstruct`` then fits all parameters of the converted model, so that its blocks give the outputs of the
    dense model's blocks. It is a number of minutes, or True for one minute on CUDA and 20 on a CPU. ``seed`` is that of its views and of
    random factors. On the held-out samples the model is never worse afterwards. See ``fidelity.reconstruct``.

    All checks come before the first change. The new modules are made aside, with the dtype, device, mode, biases and ``requires_grad``
    of the old ones; then all take their places, and the plan's switches are set. With ``verify`` one forward in eval mode must call each
    new module. After an error or an interruption the model is as it was before. Memory peaks at the dense model, the factors, and a few
    layers in float64; reconstruction also needs a copy of the dense model and its own memory.

    Raises:
        SurgeryError: the model is converted already, has no weights (meta), or fails the verifying forward.
        PlanError: the plan does not fit the model.
        ProjectionError: a weight or bias has NaN or infinite entries; the message names the layer.
        DataError: calibration samples that the model does not take, or fewer than ``samples``.
        OptionError: options of calibration without data, options of the projection beside random factors, or an unknown ``init``.
    """
    check_calibration(calibrate, samples=samples, sequential=sequential, permute=permute, reconstruct=reconstruct)
    if init not in ("projection", "random"):
        raise OptionError(f"init must be projection or random, got {init!r}")
    if init == "random" and (sequential or permute):
        raise OptionError("sequential and permute are options of the projection, and init 'random' takes none; leave them out")
    started = perf_counter()
    dense = check_plan(plan, model)
    check_weights(dense)
    params_before = _count(model)
    calibration, permutations, fidelity, reconstruction = None, (), None, None
    taken = None if calibrate is None else samples_of(calibrate, count=samples, shape=sample_shape(plan))
    settings = None
    if reconstruct is not False:
        settings = Settings.on(next(model.parameters()).device, None if reconstruct is True else float(reconstruct), seed)
    twin, cuts = (None, ()) if taken is None else _dense_twin(plan, model, own_tensors=settings is not None)
    if init == "random" or taken is None:
        modules, rows = project_layers(plan.replaced, dense, progress, seed=seed if init == "random" else None)
    else:
        modules, rows, calibration, permutations = project_calibrated_layers(
            plan, model, dense, taken, sequential=sequential, permute=permute, progress=progress
        )
    with changing(model):
        convert(model, plan, modules)
        if verify:
            check_runs(plan, model)
        if taken is not None and twin is not None:
            if settings is not None:
                reconstruction = reconstruct_blocks(model, twin, taken, cuts, settings, progress=progress)
            fidelity = reconstruction.after if reconstruction else measure_fidelity(model, twin, taken.held_out(), cuts)
    return Report(
        rows=tuple(rows.get(layer.fqn) or Row.of(layer) for layer in plan.layers),
        model_params_before=params_before,
        model_params_after=_count(model),
        seconds=perf_counter() - started,
        verified=verify,
        calibration=calibration,
        permutations=permutations,
        fidelity=fidelity,
        reconstruction=reconstruction,
    )


def check_calibration(data: object, **options: object) -> None:
    """Raise ``OptionError`` for options that are given without the data that they need."""
    given = [name for name, value in options.items() if value is not None and value is not False]
    if data is None and given:
        need = "needs" if len(given) == 1 else "need"
        raise OptionError(f"{' and '.join(given)} {need} data to calibrate with; give --calibrate DATA (calibrate=DATA in Python)")


def densify(model: nn.Module) -> int:
    """Replace every converted layer of ``model``, in place, by an ``nn.Linear`` (or 1x1 convolution) with the product of its factors.

    Dtype, device, mode and ``requires_grad`` stay. A split layer becomes one matrix again, parents' switches are set back, and the
    model has no plan, so it can be converted again. Products are summed in float64 and rounded once to the factors' dtype. Returns the
    number of layers; a shared one counts once.

    Raises:
        SurgeryError: the model has no converted layer, is itself one, which cannot be replaced in place, or is optimized.
    """
    refuse_optimized(model)
    layers = converted_layers(model)
    if not layers and plan_of(model) is None:
        raise SurgeryError("the model has no converted layer, so there is nothing to densify")
    if "" in layers:
        raise SurgeryError(f"the model is itself a {type(model).__name__} and cannot be replaced in place; put it into a parent module")
    dense = {layer: dense_layer(layer) for layer in dict.fromkeys(layers.values())}
    with changing(model):
        for fqn, layer in layers.items():
            swap(model, (fqn,), dense[layer])
        unconvert(model)
    return len(dense)


def install(plan: Plan, model: nn.Module) -> None:
    """Replace the planned layers of ``model``, in place, by modules of the same shapes, and set the plan's switches.

    Nothing is projected: the factors hold arbitrary numbers until weights are loaded. Works on the meta device, where
    nothing is allocated. Every check comes before the first change.

    Raises:
        SurgeryError: the model is converted already.
        PlanError: the plan does not fit the model: a name that it lacks, or other sizes.
    """
    dense = check_plan(plan, model)
    modules = {layer.fqn: build_empty(layer, dense[layer.fqn]) for layer in plan.replaced}
    with changing(model):
        convert(model, plan, modules)


def sample_shape(plan: Plan) -> tuple[int, ...] | None:
    """The shape of one sample, None where the plan does not say that the model takes one batch of samples."""
    return None if plan.only_input is None else plan.only_input.shape[1:]


def _dense_twin(plan: Plan, dense: nn.Module, *, own_tensors: bool) -> tuple[nn.Module, tuple[Cut, ...]]:
    """A stand-in for the dense model that stays as the model is now, and where the two can be compared.

    With ``own_tensors``, which a reconstruction needs, it shares no parameters with the model.
    """
    example = example_of(plan, dense)
    if example is None and own_tensors:
        raise SurgeryError("the plan describes no example input to trace the model with, which reconstruction needs; plan with tensors")
    cuts = () if example is None else find_cuts(survey(dense, example))
    return (copy.deepcopy(shadow(dense)) if own_tensors else shadow(dense)), cuts


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
