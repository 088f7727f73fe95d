"""The moments of layers' inputs, from forwards over some batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from flysurgery.calibration.unchanged import unchanged_state
from flysurgery.errors import DataError, SurgeryError
from flysurgery.projection import Moments


class _AllSeen(Exception):  # noqa: N818
    """The way out of a forward in which every wanted layer has had its inputs."""


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
    parameter = next(model.parameters())
    left: dict[str, int] = {}

    def seen(fqn: str) -> None:
        left[fqn] -= 1
        if not any(count > 0 for count in left.values()):
            raise _AllSeen

    with watched(model, layers, seen) as found, unchanged_state(model):
        for batch in batches:
            left |= layers
            try:
                model(batch.to(parameter.device, parameter.dtype))
            except _AllSeen:
                continue
            except Exception as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise DataError(f"the model fails on calibration inputs of shape {tuple(batch.shape)}: {reason}") from error
    return found


@contextmanager
def watched(model: nn.Module, layers: Iterable[str], seen: Callable[[str], None] = lambda fqn: None) -> Iterator[dict[str, Moments]]:
    """Sum up the moments of what enters each of ``layers`` while ``model`` is run; ``seen`` is called after each call of a layer.

    Raises:
        SurgeryError: at the end, for a layer that was not called, or whose inputs were not finite.
    """
    found = {fqn: Moments(_in_features(model.get_submodule(fqn))) for fqn in layers}

    def hook(fqn: str, module: nn.Module, inputs: tuple[object, ...]) -> None:
        (x,) = inputs
        assert isinstance(x, Tensor)
        found[fqn].add(x.movedim(1, -1) if isinstance(module, nn.Conv2d) else x)
        seen(fqn)

    handles = [model.get_submodule(fqn).register_forward_pre_hook(partial(hook, fqn)) for fqn in found]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    for fqn, moments in found.items():
        if not moments.rows:
            raise SurgeryError(f"layer {fqn} was not called on the calibration data, so nothing is known of its inputs; exclude it")
        if not moments.is_finite:
            raise SurgeryError(f"layer {fqn} is given NaN or infinite inputs on the calibration data")


def _in_features(module: nn.Module) -> int:
    return int(module.in_channels if isinstance(module, nn.Conv2d) else module.in_features)  # pyright: ignore[reportArgumentType]
