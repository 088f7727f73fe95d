"""Run a model over samples to measure the inputs of its layers, and how much its output depends on each layer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from flysurgery.calibration.samples import Samples
from flysurgery.errors import DataError, SurgeryError, raised_as
from flysurgery.projection import Moments

PROBE_SEED = 0


@dataclass(frozen=True)
class Inputs:
    """The moments of one layer's inputs, on samples to fit with and on held-out ones."""

    fit: Moments
    held_out: Moments


class _AllSeen(BaseException):
    """Ends a forward in which every wanted layer has had its inputs; no error, so that a model that catches errors lets it through."""


@contextmanager
def unchanged_state(model: nn.Module) -> Iterator[None]:
    """Put ``model`` into eval mode inside the block. Afterwards each module has its old mode, and each buffer its old values."""
    modules = [(module, module.training, dict(module._buffers)) for module in model.modules()]
    values = [(buffer, buffer.clone()) for _, _, buffers in modules for buffer in buffers.values() if buffer is not None]
    model.eval()
    try:
        yield
    finally:
        for module, training, buffers in modules:
            module.training = training
            module._buffers.clear()
            module._buffers.update(buffers)
        for buffer, value in values:
            buffer.copy_(value)


def main_output(output: object) -> object:
    """The scores, or else the tokens, in what a model of transformers returns; what other models return, as it is."""
    if isinstance(output, Mapping):
        found = (getattr(output, name, None) for name in ("logits", "last_hidden_state"))
        return next((each for each in found if isinstance(each, Tensor)), output)
    return output


def inputs_of(model: nn.Module, layers: Mapping[str, int], samples: Samples) -> dict[str, Inputs]:
    """Run ``collect`` on the samples to fit with and on the held-out ones; gives the inputs of each layer by name."""
    fit, held_out = collect(model, layers, samples.fit()), collect(model, layers, samples.held_out())
    return {fqn: Inputs(fit[fqn], held_out[fqn]) for fqn in layers}


@torch.no_grad()
def collect(model: nn.Module, layers: Mapping[str, int], batches: Iterable[Tensor]) -> dict[str, Moments]:
    """Run ``model`` over ``batches``, in eval mode, and sum up the moments of what enters each of ``layers``.

    ``layers`` gives the names of linear layers, or of 1x1 convolutions, and how often a forward calls each; a forward ends with the
    last of these calls. Keeps one n×n matrix in float64 a layer, and nothing of the batches. The model's modes, buffers and hooks
    are as before.

    Raises:
        DataError: the model fails on a batch; the message has its reason.
        SurgeryError: a layer that a forward does not call, or whose inputs are not finite.
    """
    left: dict[str, int] = {}

    def seen(fqn: str) -> None:
        left[fqn] -= 1
        if max(left.values()) <= 0:
            raise _AllSeen

    with watched(model, layers, seen) as found, unchanged_state(model):
        for batch in batches:
            left |= layers
            with suppress(_AllSeen):
                run(model, batch)
    return found


@contextmanager
def watched(model: nn.Module, layers: Iterable[str], seen: Callable[[str], None] = lambda fqn: None) -> Iterator[dict[str, Moments]]:
    """Sum up the moments of what enters each of ``layers`` while ``model`` is run; ``seen`` is called after each call of a layer.

    Raises:
        SurgeryError: at the end, for a layer that was not called, or whose inputs were not finite.
    """
    modules = {fqn: model.get_submodule(fqn) for fqn in layers}
    found = {fqn: Moments(module.get_parameter("weight").shape[1]) for fqn, module in modules.items()}

    def hook(fqn: str, module: nn.Module, inputs: tuple[object, ...]) -> None:
        (x,) = inputs
        assert isinstance(x, Tensor)
        found[fqn].add(x.movedim(1, -1) if isinstance(module, nn.Conv2d) else x)
        seen(fqn)

    with ExitStack() as hooks:
        for fqn, module in modules.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(hook, fqn)))
        yield found
    for fqn, moments in found.items():
        if not moments.rows:
            raise SurgeryError(f"layer {fqn} was not called on the calibration data, so nothing is known of its inputs; exclude it")
        if not moments.is_finite:
            raise SurgeryError(f"layer {fqn} is given NaN or infinite inputs on the calibration data")


def sensitivities(model: nn.Module, layers: Sequence[str], batches: Iterable[Tensor]) -> dict[str, float]:
    """Estimate for each layer how much an error in its output changes the model's output, to first order.

    J is the derivative of the model's output with respect to the layer's. A random probe of ±1 has the mean ``E[Jᵀ probe probeᵀ J] = JᵀJ``.
    So the mean square of the gradient of ``probe · output`` is the mean of JᵀJ's diagonal: the squared change of the output for an
    error of size one in a random direction. Each batch costs one forward and one backward. Gradients, modes and buffers are as before.

    Raises:
        DataError: the model fails on a batch, or does not give one tensor.
        SurgeryError: no gradient comes to a layer, or one that is not finite.
    """
    sums = dict.fromkeys(layers, torch.zeros(()))
    counts = dict.fromkeys(layers, 0)
    generator = torch.Generator().manual_seed(PROBE_SEED)

    def add(fqn: str, gradient: Tensor) -> None:
        square = gradient.detach().to(torch.float32).square().sum(dtype=torch.float32)
        sums[fqn] = sums[fqn].to(square.device) + square
        counts[fqn] += gradient.numel()

    def hook(fqn: str, module: nn.Module, inputs: tuple[object, ...], output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(partial(add, fqn))

    with ExitStack() as hooks, unchanged_state(model), torch.enable_grad():
        for fqn in layers:
            hooks.enter_context(model.get_submodule(fqn).register_forward_hook(partial(hook, fqn)))
        for batch in batches:
            x = _as_input(batch, model).detach().requires_grad_()
            output = main_output(run(model, x))
            if not isinstance(output, Tensor):
                raise DataError(f"sensitivities need a model that gives one tensor, and this one gives {type(output).__name__}")
            probe = torch.randint(0, 2, output.shape, generator=generator).mul(2).sub(1).to(output)
            torch.autograd.grad(output, x, probe)
    for fqn in layers:
        if not counts[fqn] or not sums[fqn].isfinite():
            raise SurgeryError(f"layer {fqn} has no finite gradient on the calibration data, so its sensitivity is not known; exclude it")
    return {fqn: float(sums[fqn]) / counts[fqn] for fqn in layers}


def run(model: nn.Module, batch: Tensor) -> object:
    """Give what ``model`` returns for ``batch``, which is moved to the model's device and dtype.

    Raises:
        DataError: the model fails; the message has its reason.
    """
    x = _as_input(batch, model)
    with raised_as(DataError, f"the model fails on inputs of shape {tuple(x.shape)}"):
        return model(x)


def _as_input(batch: Tensor, model: nn.Module) -> Tensor:
    parameter = next(model.parameters())
    return batch.to(parameter.device, parameter.dtype)
