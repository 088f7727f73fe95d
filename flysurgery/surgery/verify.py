"""One forward that shows that every replaced module runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.calibration import unchanged_state
from flysurgery.errors import SurgeryError
from flysurgery.surgery.plan import ExampleInput, Plan


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
    ran: set[str] = set()
    hooks = [model.get_submodule(layer.fqn).register_forward_hook(_note(layer.fqn, ran)) for layer in plan.replaced]
    devices = sorted({parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda})
    try:
        with torch.no_grad(), torch.random.fork_rng(devices), unchanged_state(model):
            model(*inputs)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise SurgeryError(f"the converted model failed in its first forward, so it was put back as it was: {first_line}") from error
    finally:
        for hook in hooks:
            hook.remove()
    silent = [layer.fqn for layer in plan.replaced if layer.fqn not in ran]
    if silent:
        raise SurgeryError(
            f"{len(silent)} replaced layers were not called in a forward, so the model was put back as it was; "
            f"exclude them: {', '.join(silent[:5])}{', ...' if len(silent) > 5 else ''}"
        )


def example_of(plan: Plan, model: nn.Module) -> tuple[Any, ...] | None:
    """Arguments for one forward, as the plan describes them, on the model's device; None where it describes none."""
    if plan.example is None:
        return None
    return tuple([_input(one, model) for one in each] if isinstance(each, tuple) else _input(each, model) for each in plan.example)


def _note(fqn: str, ran: set[str]) -> Callable[[nn.Module, object, object], None]:
    def hook(module: nn.Module, inputs: object, output: object) -> None:
        ran.add(fqn)

    return hook


def _input(example: ExampleInput, model: nn.Module) -> Tensor:
    dtype = getattr(torch, example.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise SurgeryError(f"the plan's example input has the unknown dtype '{example.dtype}'")
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    if not dtype.is_floating_point:
        return torch.zeros(example.shape, dtype=dtype, device=weight.device)
    # The model's dtype and not the plan's: a plan made on a float32 skeleton serves a half-precision model.
    return torch.randn(example.shape, generator=torch.Generator().manual_seed(0)).to(weight.device, weight.dtype)
