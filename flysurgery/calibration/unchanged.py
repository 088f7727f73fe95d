"""Running a model without leaving a trace in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def unchanged_state(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; afterwards each module has its own mode and its own buffers with their old values."""
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
