"""How much the model's output feels an error of each layer's output, from one backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from flysurgery.calibration.unchanged import unchanged_state
from flysurgery.errors import DataError, SurgeryError

SEED = 0


def sensitivities(model: nn.Module, layers: Sequence[str], batches: Iterable[Tensor]) -> dict[str, float]:
    """For each layer the mean square of what ``probe · output`` changes by, for one entry of the layer's output; probes are random ±1.

    The probes' mean of ``Jᵀ probe probeᵀ J`` is ``JᵀJ``, with J the derivative of the model's output, so the mean square of the
    gradient is that of an entry of J summed over the outputs: what an error in any direction alike does to the model's output, to first
    order. One forward and one backward a batch; parameters' gradients, modes and buffers are as before.

    Raises:
        DataError: the model fails on a batch, or does not give one tensor.
        SurgeryError: no gradient comes to a layer, or one that is not finite.
    """
    sums = dict.fromkeys(layers, torch.zeros(()))
    counts = dict.fromkeys(layers, 0)
    parameter = next(model.parameters())
    generator = torch.Generator().manual_seed(SEED)

    def watch(fqn: str) -> Callable[..., None]:
        def add(gradient: Tensor) -> None:
            square = gradient.detach().to(torch.float32).square().sum(dtype=torch.float32)
            sums[fqn] = sums[fqn].to(square.device) + square
            counts[fqn] += gradient.numel()

        def hook(module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(add)

        return hook

    handles = [model.get_submodule(fqn).register_forward_hook(watch(fqn)) for fqn in layers]
    try:
        with unchanged_state(model), torch.enable_grad():
            for batch in batches:
                x = batch.to(parameter.device, parameter.dtype).detach().requires_grad_()
                try:
                    output = model(x)
                except Exception as error:
                    reason = next(iter(str(error).splitlines()), type(error).__name__)
                    raise DataError(f"the model fails on calibration inputs of shape {tuple(batch.shape)}: {reason}") from error
                if not isinstance(output, Tensor):
                    raise DataError(f"sensitivities need a model that gives one tensor, and this one gives {type(output).__name__}")
                probe = torch.randint(0, 2, output.shape, generator=generator).mul(2).sub(1).to(output)
                torch.autograd.grad(output, x, probe)
    finally:
        for handle in handles:
            handle.remove()
    for fqn in layers:
        if not counts[fqn] or not sums[fqn].isfinite():
            raise SurgeryError(f"layer {fqn} has no finite gradient on the calibration data, so its sensitivity is not known; exclude it")
    return {fqn: float(sums[fqn]) / counts[fqn] for fqn in layers}
