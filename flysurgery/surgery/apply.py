"""Carry out a plan: check, project, replace and verify all layers, or leave the model as it was. And go back to dense layers."""

import copy
from collections.abc import Mapping
from contextlib import ExitStack
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flysurgery import walker
from flysurgery.calibration import Data, samples_of, unchanged_state
from flysurgery.errors import OptionError, PlanError, ProjectionError, SurgeryError, check_seed, raised_as
from flysurgery.fidelity import Progress, Settings, measure_fidelity
from flysurgery.fidelity import reconstruct as reconstruct_blocks
from flysurgery.surgery import transaction
from flysurgery.surgery.plan import ExampleInput, LayerPlan, Plan
from flysurgery.surgery.projecting import project_calibrated_layers, project_layers
from flysurgery.surgery.report import Report, Row

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


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
    if not isinstance(reconstruct, bool | int | float):
        raise OptionError(f"reconstruct is True or a number of minutes, got {reconstruct!r}")
    check_seed(seed)
    started = perf_counter()
    dense = check_plan(plan, model)
    check_weights(dense, model)
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
    with transaction.changing(model):
        transaction.convert(model, plan, modules)
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
        SurgeryError: the model has no converted layer, is itself one, which cannot be replaced in place, or is optimized; or a layer has
            hooks, which a dense one in its place would lose.
    """
    transaction.refuse_optimized(model)
    layers = transaction.converted_layers(model)
    if not layers and transaction.plan_of(model) is None:
        raise SurgeryError("the model has no converted layer, so there is nothing to densify")
    if "" in layers:
        raise SurgeryError(f"the model is itself a {type(model).__name__} and cannot be replaced in place; put it into a parent module")
    hooked = [fqn for fqn, layer in layers.items() if any(map(walker.is_hooked, layer.modules()))]
    if hooked:
        raise SurgeryError(f"{', '.join(hooked[:5])} has hooks, which a dense layer in its place would lose; remove them first")
    dense = {layer: transaction.dense_layer(layer) for layer in dict.fromkeys(layers.values())}
    with transaction.changing(model):
        for fqn, layer in layers.items():
            transaction.swap(model, (fqn,), dense[layer])
        transaction.unconvert(model)
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
    modules = {layer.fqn: transaction.build_empty(layer, dense[layer.fqn]) for layer in plan.replaced}
    with transaction.changing(model):
        transaction.convert(model, plan, modules)


def sample_shape(plan: Plan) -> tuple[int, ...] | None:
    """The shape of one sample, None where the plan does not say that the model takes one batch of samples."""
    return None if plan.only_input is None else plan.only_input.shape[1:]


def _dense_twin(plan: Plan, dense: nn.Module, *, own_tensors: bool) -> tuple[nn.Module, tuple[walker.Cut, ...]]:
    """A stand-in for the dense model that stays as the model is now, and where the two can be compared.

    With ``own_tensors``, which a reconstruction needs, it shares no parameters with the model.
    """
    example = example_of(plan, dense)
    if example is None and own_tensors:
        raise SurgeryError("the plan describes no example input to trace the model with, which reconstruction needs; plan with tensors")
    cuts = () if example is None else walker.find_cuts(walker.survey(dense, example))
    return (copy.deepcopy(walker.shadow(dense)) if own_tensors else walker.shadow(dense)), cuts


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def check_plan(plan: Plan, model: nn.Module) -> dict[str, transaction.Dense]:
    """Hold a plan against a model, whose weights may live on meta, and give the layers that it replaces.

    Raises:
        SurgeryError: the model is converted already.
        PlanError: a name that the model lacks, a module that is no plain ``nn.Linear``, other sizes or names than the plan
            says, a weight that another module shares, or a parent without the attribute to switch.
    """
    if not isinstance(plan, Plan):
        raise PlanError(f"expected a plan and then a model, got {type(plan).__name__} and {type(model).__name__}")
    transaction.refuse_converted(model)
    if not plan.replaced:
        raise PlanError("the plan replaces nothing; make one that does")
    modules = walker.modules_with_separated(model, [layer.fqn for layer in plan.replaced])
    names: dict[nn.Module, list[str]] = {}
    for fqn, module in modules.items():
        names.setdefault(module, []).append(fqn)
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in names:
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append(module)
    found: dict[str, transaction.Dense] = {}
    for layer in plan.replaced:
        module = modules.get(layer.fqn)
        if module is None or not layer.fqn:
            raise PlanError(f"the plan replaces '{layer.fqn}', and the model has no module of that name; was the plan made for this model?")
        found[layer.fqn] = _checked_dense(layer, module)
        if set(names[module]) != set(layer.names):
            raise PlanError(f"layer {layer.fqn} goes by the names {names[module]} in the model, by {list(layer.names)} in the plan")
        for parameter in module.parameters(recurse=False):
            others = [names[other][0] for other in owners[parameter] if other is not module]
            if others:
                raise PlanError(f"layer {layer.fqn} shares a parameter with {others[0]}, which would be cut off; exclude the layer")
    for switch in plan.switches:
        _check_switch(switch, modules)
    return found


def check_weights(layers: Mapping[str, transaction.Dense], model: nn.Module) -> None:
    """See that every weight to project is there and finite, and that no other parameter has NaN or infinite entries.

    Raises:
        SurgeryError: weights on the meta device.
        ProjectionError: NaN or infinite entries; the message names the layer or the parameter.
    """
    for fqn, module in layers.items():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                raise SurgeryError(f"layer {fqn} is on the meta device and has no weights to project; load the weights first")
            if not bool(torch.isfinite(parameter).all()):
                raise ProjectionError(f"layer {fqn}: its {name} has NaN or infinite entries; mend the checkpoint")
    for name, parameter in model.named_parameters():
        if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
            raise ProjectionError(f"{name} has NaN or infinite entries, and so would all outputs; mend the checkpoint")


def check_runs(plan: Plan, model: nn.Module) -> None:
    """Run the model once, in eval mode, on an input as the plan was made with; modes, buffers and random state stay.

    Raises:
        SurgeryError: the forward failed, or replaced modules were not called; the message names them.
    """
    inputs = example_of(plan, model)
    if inputs is None:
        raise SurgeryError(
            "the plan describes no example input to verify the model with; plan with tensors as example, or pass verify=False"
        )
    ran: set[nn.Module] = set()

    def note(module: nn.Module, *_: object) -> None:
        ran.add(module)

    modules = {layer.fqn: model.get_submodule(layer.fqn) for layer in plan.replaced}
    devices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    with ExitStack() as hooks:
        for module in modules.values():
            hooks.enter_context(module.register_forward_hook(note))
        hooks.enter_context(raised_as(SurgeryError, "the converted model failed in its first forward, so it was put back as it was"))
        with torch.no_grad(), torch.random.fork_rng(devices), unchanged_state(model):
            model(*inputs)
    silent = [fqn for fqn, module in modules.items() if module not in ran]
    if silent:
        raise SurgeryError(
            f"{len(silent)} replaced layers were not called in a forward, so the model was put back as it was; "
            f"exclude them: {', '.join(silent[:5])}{', ...' if len(silent) > 5 else ''}"
        )


def example_of(plan: Plan, model: nn.Module) -> tuple[Any, ...] | None:
    """Arguments for one forward, as the plan describes them, on the model's device; None where it describes none."""
    if plan.example is None:
        return None
    return tuple(
        [_input(one, model) for one in each] if isinstance(each, tuple) else None if each is None else _input(each, model)
        for each in plan.example
    )


def _input(example: ExampleInput, model: nn.Module) -> Tensor:
    dtype = getattr(torch, example.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SurgeryError(f"the plan's example input has the unknown dtype '{example.dtype}'")
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    if example.values:
        return torch.tensor(example.values, dtype=dtype, device=weight.device).view(example.shape)
    if not dtype.is_floating_point:
        return torch.zeros(example.shape, dtype=dtype, device=weight.device)
    # The model's dtype and not the plan's: a plan made on a float32 skeleton serves a half-precision model.
    return torch.randn(example.shape, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)


def _checked_dense(layer: LayerPlan, module: nn.Module) -> transaction.Dense:
    where = f"layer {layer.fqn}"
    if not isinstance(module, walker.CONVOLUTIONS if layer.conv else nn.Linear):
        expected = "a 1x1 convolution" if layer.conv else "an nn.Linear"
        raise PlanError(f"{where}: expected {expected}, the model has a {type(module).__name__}")
    for obstacle in walker.module_obstacles(module):
        raise PlanError(f"{where}: {obstacle.text}; change that first, or exclude the layer")
    shape = tuple(module.weight.shape[:2])
    if shape != (layer.out_features, layer.in_features):
        raise PlanError(f"{where}: the plan says {layer.size}, the model has {shape[0]}x{shape[1]}")
    if (module.bias is not None) != layer.bias:
        has, says = ("a", "none") if module.bias is not None else ("no", "one")
        raise PlanError(f"{where}: the model has {has} bias there, the plan says {says}")
    if module.weight.dtype not in DTYPES:
        raise PlanError(f"{where}: expected a weight in float16, bfloat16, float32 or float64, got {module.weight.dtype}")
    return module


def _check_switch(switch: walker.Switch, modules: dict[str, nn.Module]) -> None:
    where = f"the plan sets {switch.module_fqn}.{switch.attribute}"
    module = modules.get(switch.module_fqn)
    if module is None or not hasattr(module, switch.attribute):
        raise PlanError(f"{where}, and the model has no such attribute; was the plan made for this model?")
    value = getattr(module, switch.attribute)
    if not isinstance(value, bool):
        raise PlanError(f"{where} to {switch.value}, and in the model that attribute is no switch but {value!r}")
