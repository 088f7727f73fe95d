"""Carry out a plan: check, project, replace and verify all layers, or leave the model as it was."""

from __future__ import annotations

from time import perf_counter

from torch import nn

from flysurgery.calibration import Data, samples_of
from flysurgery.errors import OptionError
from flysurgery.surgery.calibrating import project_calibrated_layers
from flysurgery.surgery.check import check_plan, check_weights
from flysurgery.surgery.comparing import DenseReference, settings_of
from flysurgery.surgery.plan import ExampleInput, Plan
from flysurgery.surgery.projecting import Progress, project_layers
from flysurgery.surgery.report import Report, row_of
from flysurgery.surgery.transaction import Change
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

    ``calibrate`` fits the factors to the inputs that the layers receive on these data, and corrects the mean of the outputs by the
    biases; see ``projection.project_calibrated``. It is a tensor of model inputs, an iterable of batches (alone or first in a tuple), or
    ``Samples``. ``samples`` of them are used and kept in memory, by default 512 or as many as there are; every fifth one only measures
    errors. ``sequential`` calibrates block by block, on inputs from the converted blocks before. It takes half as many passes as there are
    blocks, instead of one. ``permute`` orders the hidden units of feed-forward blocks, the heads of attentions and the entries of each
    head so that the errors fall, where the traced graph proves that the dense model computes the same in any order. The layers
    that share an order absorb it, dense ones included, so it costs nothing at run time. The report says what it gained and what is tied.

    With ``calibrate`` the report also has the fidelity: both models run on the held-out samples, and their outputs, tokens and
    blocks are compared. ``reconstruct`` then fits all parameters of the converted model, so that its blocks give the outputs of the
    dense model's blocks. It is a number of minutes, or True for one minute on CUDA and 20 on a CPU. ``seed`` is that of its views. On the
    held-out samples the model is never worse afterwards. See ``fidelity.reconstruct``.

    All checks come before the first change. The new modules are made separately, with the dtype, device, mode, biases
    and ``requires_grad`` of the old ones. Then all of them replace the old ones, and the plan's switches are set. With ``verify`` one
    forward in eval mode must call each new module. After an error or an interruption the model is as it was before.

    The old weights are kept until the end. So memory peaks at the dense model, the factors, and a few layers in float64.
    Reconstruction also needs a copy of the dense model and its own memory.

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
        taken = samples_of(calibrate, count=samples, shape=sample_shape(plan))
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


def sample_shape(plan: Plan) -> tuple[int, ...] | None:
    """What one sample looks like, where the plan says that the model takes one batch of samples."""
    first = plan.example[0] if plan.example is not None and len(plan.example) == 1 else None
    return first.shape[1:] if isinstance(first, ExampleInput) else None


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
