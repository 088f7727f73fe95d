"""Small models of tests, each as its parts and one function."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Composed(nn.Module):
    """Attributes by their names, of which modules and parameters are registered, and a forward: a function of the module and its inputs."""

    def __init__(self, step: Callable[..., Any], **attributes: Any):
        super().__init__()
        self.step = step
        for name, each in attributes.items():
            setattr(self, name, each)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.step(self, *inputs, **named)
