"""Forward and backward as one call, to be timed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flysurgery.inference.clock import Shapes, Way
from flysurgery.inference.fused_modules import Step
from flysurgery.ops import Attention


def with_gradients(call: Callable[..., Any], modules: nn.Module, images: Collection[torch.Size]) -> Way:
    """``call``, and the gradients of its inputs and of the modules' parameters that learn, from ones at all of its floating results.

    Inputs of the shapes of ``images`` are given to the model, and nothing asks for their gradients.
    """
    held = [tensor for each in getattr(modules, "held", ()) if (tensor := getattr(*each)) is not None]
    parameters = [*modules.parameters(), *held]

    def run(*inputs: Tensor) -> object:
        with torch.enable_grad():
            given = [each.detach().requires_grad_(each.is_floating_point() and each.shape not in images) for each in inputs]
            leaves = [each for each in pytree.tree_leaves(call(*given)) if isinstance(each, Tensor) and each.requires_grad]
        wanted = [each for each in (*given, *parameters) if each.requires_grad]
        return torch.autograd.grad(leaves, wanted, [torch.ones_like(each) for each in leaves], allow_unused=True)

    return run


def training_calls(step: Step, shapes: Shapes) -> tuple[list[Callable[..., Any]], Shapes]:
    """The step by its own modules and with fused gradients, and the shapes of the inputs of both.

    q, k and v of one shape come as parts of one tensor, as from one projection.
    """
    ways: list[Callable[..., Any]] = [step.plain, step.trained]
    if not isinstance(step.given, Attention) or len({*shapes}) > 1:
        return ways, shapes
    batch, heads, tokens, features = shapes[0]
    return [_of_parts(way) for way in ways], ((batch, tokens, len(shapes), heads, features),)


def _of_parts(way: Callable[..., Any]) -> Callable[..., Any]:
    return lambda whole: way(*whole.permute(2, 0, 3, 1, 4).unbind(0))


@contextmanager
def rehearsed(model: nn.Module) -> Iterator[None]:
    """A block after which the model and random states are as before, whatever forwards and backwards in training mode did to them.

    Inside, other parameters share the memory of the model's own, whose graphs, hooks and streams of earlier passes stay out of it, and so
    does autocast's cache.
    """
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    torch.clear_autocast_cache()
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    own = [(module, name, each) for module in model.modules() for name, each in module._parameters.items() if each is not None]
    others = {id(each): nn.Parameter(each.detach(), each.requires_grad) for _, _, each in own}
    for module, name, each in own:
        module._parameters[name] = others[id(each)]
    try:
        with torch.random.fork_rng(devices={each.device.index for each in model.parameters() if each.is_cuda}):
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        for module, name, each in own:
            module._parameters[name] = each
        with torch.no_grad():
            for buffer, value in before:
                if not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.copy_(value)
