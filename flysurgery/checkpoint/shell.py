"""A converted model without its weights: only shapes, or everything but the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.checkpoint.base import build_base
from flysurgery.checkpoint.limits import LimitError, Limits
from flysurgery.checkpoint.meter import metered
from flysurgery.errors import ModelError
from flysurgery.layers import ButterflyLinear
from flysurgery.surgery import Plan, install


def build_skeleton(plan: Plan, limits: Limits) -> nn.Module:
    """The converted model on the meta device: every name, shape and dtype, and no memory.

    A constructor that reads numbers cannot run on meta. Then only the parameters are there; where it reads those too, nothing is.

    Raises:
        LimitError: building takes more than ``limits``; nothing beyond them was allocated.
        ModelError, PlanError: the base cannot be built, or the plan does not fit it.
    """
    limits.check_arguments(plan.base_args)
    with _no_draws():
        model = _built(plan, limits, device="meta")
        if model is None:
            model = _built(plan, limits)
        if model is None:
            model = _built_for_real(plan, limits)
        model = model.to("meta")
        install(plan, model)
    return model


def build_shell(plan: Plan, limits: Limits) -> nn.Module:
    """The converted model with real buffers and plain attributes, its parameters on meta and waiting for weights.

    Buffers outside the state_dict, such as position tables, are computed by the model's constructor, so they must be
    made for real. Parameters are sent to meta as they are registered, before anybody draws random numbers into
    them, which saves most of the time and memory. A constructor that reads its own parameters fails or passes
    meta on to what it computes from them; such a model is built as usual, on the CPU.

    Raises:
        LimitError, ModelError, PlanError: as ``build_skeleton``.
    """
    limits.check_arguments(plan.base_args)
    with _no_draws():
        model = _built(plan, limits)
        if model is None or _has_meta_state(model):
            model = _built_for_real(plan, limits)
        install(plan, model)
    return model


def build_random(plan: Plan, overrides: Mapping[str, Any]) -> nn.Module:
    """The converted model with random weights, with ``overrides`` going over the arguments of its base.

    Raises:
        ModelError, PlanError: as ``build_skeleton``.
    """
    plan = replace(plan, base_args={**plan.base_args, **overrides})
    model = build_base(_base(plan), plan.base_args)
    install(plan, model)
    for layer in plan.replaced:
        for module in model.get_submodule(layer.fqn).modules():
            if isinstance(module, ButterflyLinear | nn.Linear):
                module.reset_parameters()
    return model


def _built(plan: Plan, limits: Limits, device: str | None = None) -> nn.Module | None:
    """The base with its parameters on meta; None where its constructor wants numbers that meta does not have."""
    try:
        with metered(limits, parameters_on_meta=True):
            return build_base(_base(plan), plan.base_args, device=device)
    except LimitError:
        raise
    except ModelError as error:
        if "meta" in str(error.__cause__).lower():
            return None
        raise


def _built_for_real(plan: Plan, limits: Limits) -> nn.Module:
    with metered(limits, parameters_on_meta=False):
        return build_base(_base(plan), plan.base_args)


def _no_draws() -> AbstractContextManager[None]:
    """Inside, random numbers are drawn as usual; afterwards the CPU's generator is as it was."""
    return torch.random.fork_rng(devices=[])


def _has_meta_state(model: nn.Module) -> bool:
    return any(
        _on_meta(value) for module in model.modules() for name, value in vars(module).items() if name not in ("_parameters", "_modules")
    )


def _on_meta(value: object) -> bool:
    if isinstance(value, dict):
        return any(_on_meta(each) for each in value.values())
    if isinstance(value, list | tuple):
        return any(_on_meta(each) for each in value)
    return (isinstance(value, Tensor) and value.is_meta) or (isinstance(value, torch.device) and value.type == "meta")


def _base(plan: Plan) -> str:
    if plan.base is None:
        raise ModelError(
            "the plan does not say how the dense model is built again, as in base='vit_pytorch:ViT', base_args={'image_size': 224, ...}"
        )
    return plan.base
