"""The plan of a model as it stands, which may have a new head or image size since it was converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import timm
import torch
from torch import Tensor, nn

from flysurgery.checkpoint.compare import difference
from flysurgery.checkpoint.limits import Limits
from flysurgery.checkpoint.shell import build_shell, build_skeleton
from flysurgery.checkpoint.tensors import single_float_dtype, unstored_buffers
from flysurgery.errors import CheckpointError, ModelError, PlanError
from flysurgery.surgery import Plan, plan_of

ADVICE = "give plan or convert the base= and base_args= that the model was built with"


def current_plan(model: nn.Module) -> Plan:
    """The plan that rebuilds ``model``, checked by rebuilding it on meta.

    Where a timm model got another head or input size after it was built (``reset_classifier``, ``set_input_size``), the
    base's arguments follow it.

    Raises:
        CheckpointError: the model is not converted, its plan names no base, or the base does not rebuild it.
    """
    plan = plan_of(model)
    if plan is None:
        raise CheckpointError("the model is not converted, so there is no plan to save; convert it first, or save it with timm")
    try:
        plan = replace(plan, base=_known_base(plan.base))
        limits = _limits(model)
        skeleton = build_skeleton(plan, limits)
        changed = _changed(_traits(skeleton), _traits(model))
        if changed:
            plan = replace(plan, base_args={**plan.base_args, **changed})
            skeleton = build_skeleton(plan, limits)
    except (ModelError, PlanError) as error:
        raise CheckpointError(f"the model could not be loaded again: {error}; {ADVICE}") from error
    wrong = difference(_shapes(model), _shapes(skeleton))
    if wrong:
        raise CheckpointError(f"{plan.base} with {dict(plan.base_args)} does not rebuild this model ({wrong}); {ADVICE}")
    return plan


def changed_buffers(model: nn.Module, plan: Plan, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Buffers outside the state_dict whose values loading would not give: these have to be stored as well.

    A table of positions computed on a GPU may differ in its last bit from one computed on a CPU, for example.

    Raises:
        CheckpointError: a buffer that the base does not have, or has in another shape.
    """
    mine, rebuilt = unstored_buffers(model), unstored_buffers(build_shell(plan, _limits(model)))
    wrong = difference(_sizes(mine), _sizes(rebuilt))
    if wrong:
        raise CheckpointError(f"{plan.base} with {dict(plan.base_args)} does not rebuild this model's buffers ({wrong})")
    uniform = dtype or single_float_dtype({name: tensor.dtype for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)})
    return {name: buffer for name, buffer in mine.items() if not _same(_as(buffer, dtype), _as(rebuilt[name], uniform))}


def _limits(model: nn.Module) -> Limits:
    """The limits under which the model will be loaded; a tensor that is used twice is stored once."""
    state = [tensor for tensor in model.state_dict().values() if isinstance(tensor, Tensor)]
    stored = {(tensor.device, tensor.data_ptr(), tensor.shape): tensor.shape for tensor in state}
    return Limits.of_stored(list(stored.values()), len(state))


def _known_base(base: str | None) -> str | None:
    """The base without a weights' tag that timm does not publish, as models from other folders and hubs have it."""
    if base is None or ":" in base or "." not in base:
        return base
    architecture = base.partition(".")[0]
    return base if base in timm.list_models(f"{architecture}.*", include_tags=True) else architecture


def _traits(model: nn.Module) -> dict[str, Any]:
    """What timm models let their users change after construction."""
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    found = {
        "num_classes": getattr(model, "num_classes", None),
        "global_pool": getattr(model, "global_pool", None),
        "img_size": list(size) if isinstance(size, tuple) else None,
    }
    return {name: value for name, value in found.items() if isinstance(value, int | str | list)}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in after.items() if name in before and before[name] != value}


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(getattr(tensor, "shape", ())) for name, tensor in model.state_dict().items()}


def _sizes(buffers: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(buffer.shape) for name, buffer in buffers.items()}


def _as(buffer: Tensor, dtype: torch.dtype | None) -> Tensor:
    return buffer.to("cpu", dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype)


def _same(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or (one.is_floating_point() and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True))
