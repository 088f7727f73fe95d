"""A converted model without its weights: everything but the numbers of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flysurgery.checkpoint.base import build_base
from flysurgery.checkpoint.meter import LimitError, Limits, metered
from flysurgery.errors import ModelError
from flysurgery.layers import ButterflyLinear
from flysurgery.surgery import Plan, install


def build_shell(plan: Plan, limits: Limits) -> nn.Module:
    """The converted model with real buffers and plain attributes, its parameters on meta and waiting for weights.

    Buffers outside the state_dict, such as position tables, are computed by the model's constructor, so they must be
    made for real. Parameters are sent to meta as they are registered, before anybody draws random numbers into
    them, which saves most of the time and memory. A constructor that reads its own parameters fails or passes
    meta on to what it computes from them; such a model is built as usual, on the CPU.

    Raises:
        LimitError: building takes more than ``limits``; nothing beyond them was allocated.
        ModelError, PlanError: the base cannot be built, or the plan does not fit it.
    """
    limits.check_arguments(plan.base_args)
    with torch.random.fork_rng(devices=[]):
        try:
            model = _build(plan, limits, parameters_on_meta=True)
        except LimitError:
            raise
        except ModelError as error:
            if "meta" not in str(error.__cause__).lower():
                raise
            model = None  # the constructor wants numbers that meta does not have
        if model is None or _has_meta_state(model):
            model = _build(plan, limits, parameters_on_meta=False)
        install(plan, model)
    return model


def build_random(plan: Plan, overrides: Mapping[str, Any]) -> nn.Module:
    """The converted model with random weights, with ``overrides`` going over the arguments of its base."""
    plan = plan.with_arguments(overrides)
    model = build_base(_base(plan), plan.base_args)
    install(plan, model)
    for layer in plan.replaced:
        for module in model.get_submodule(layer.fqn).modules():
            if isinstance(module, ButterflyLinear | nn.Linear):
                module.reset_parameters()
    return model


def _build(plan: Plan, limits: Limits, *, parameters_on_meta: bool) -> nn.Module:
    with metered(limits, parameters_on_meta=parameters_on_meta):
        return build_base(_base(plan), plan.base_args)


def _has_meta_state(model: nn.Module) -> bool:
    state = [[value for name, value in vars(module).items() if name not in ("_parameters", "_modules")] for module in model.modules()]
    return any(
        (isinstance(value, Tensor) and value.is_meta) or (isinstance(value, torch.device) and value.type == "meta")
        for value in tree_leaves(state)
    )


def _base(plan: Plan) -> str:
    if plan.base is None:
        raise ModelError(
            "the plan does not say how the dense model is built again, as in base='vit_pytorch:ViT', base_args={'image_size': 224, ...}"
        )
    return plan.base
