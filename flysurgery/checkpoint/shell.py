"""A converted model without its weights: only shapes, or everything but the parameters."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from flysurgery.checkpoint.base import build_base
from flysurgery.errors import ModelError
from flysurgery.layers import ButterflyLinear
from flysurgery.surgery import Plan, install

MAX_PARAMETERS = 20_000
"""Most parameter tensors that a base may have. A base is named by a file, so its building must come to an end."""


class _EndlessError(ModelError):
    """A base with too many parameters, which is not to be tried again in another way."""

    def __init__(self) -> None:
        super().__init__(f"the base has more than {MAX_PARAMETERS} parameter tensors; check its arguments")


def build_skeleton(plan: Plan) -> nn.Module:
    """The converted model on the meta device: every name, shape and dtype, and no memory.

    Raises:
        ModelError, PlanError: the base cannot be built, or the plan does not fit it.
    """
    with _no_draws():
        try:
            with _parameters_on_meta():
                model = build_base(_base(plan), plan.base_args, device="meta")
        except _EndlessError:
            raise
        except ModelError:  # a constructor that reads numbers; what else is wrong shows again
            with _parameters_counted():
                model = build_base(_base(plan), plan.base_args).to("meta")
    install(plan, model)
    return model


def build_shell(plan: Plan) -> nn.Module:
    """The converted model with real buffers and plain attributes, its parameters on meta and waiting for weights.

    Buffers outside the state_dict, such as position tables, are computed by the model's constructor, so they must be
    made for real. Parameters are sent to meta as they are registered, before anybody draws random numbers into
    them, which saves most of the time and memory. A constructor that reads its own parameters fails or passes
    meta on to what it computes from them; such a model is built as usual, on the CPU.

    Raises:
        ModelError, PlanError: as ``build_skeleton``.
    """
    with _no_draws():
        try:
            with _parameters_on_meta():
                model = build_base(_base(plan), plan.base_args)
        except _EndlessError:
            raise
        except ModelError:
            model = None
        if model is None or _has_meta_state(model):
            with _parameters_counted():
                model = build_base(_base(plan), plan.base_args)
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


def _no_draws() -> AbstractContextManager[None]:
    """Inside, random numbers are drawn as usual; afterwards the CPU's generator is as it was."""
    return torch.random.fork_rng(devices=[])


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Inside, each parameter that this thread gives to a module goes to meta; tied ones stay tied."""
    thread = threading.get_ident()
    moved: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or threading.get_ident() != thread:
            return None
        if id(parameter) not in moved:
            if len(moved) >= MAX_PARAMETERS:
                raise _EndlessError
            # The original is kept as well, so that no other parameter gets its id.
            moved[id(parameter)] = (parameter, nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad))
        return moved[id(parameter)][1]

    hook = register_module_parameter_registration_hook(move)  # pyright: ignore[reportArgumentType]  its result counts
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _parameters_counted() -> Iterator[None]:
    """Inside, modules of this thread take no more parameters than a base may have."""
    thread, count = threading.get_ident(), itertools.count(1)

    def check(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and threading.get_ident() == thread and next(count) > MAX_PARAMETERS:
            raise _EndlessError

    hook = register_module_parameter_registration_hook(check)
    try:
        yield
    finally:
        hook.remove()


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
