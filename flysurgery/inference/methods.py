"""A method of a module and the child before it, as one module; and a step that replaces both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from flysurgery.inference.standin import Condition, Passed, view


class Together(nn.Module):
    """``method`` of a module behind its child ``before``."""

    def __init__(self, module: nn.Module, method: str, before: str) -> None:
        super().__init__()
        self.module, self.method, self.before = module, method, before

    def forward(self, x: Tensor) -> Tensor:
        return getattr(self.module, self.method)(self.module.get_submodule(self.before)(x))

    def replaced(self, step: nn.Module, others: Mapping[str, nn.Module]) -> nn.Module:
        """A view of the module, with ``others`` below it. Its ``before`` gives its input to ``step``, which replaces ``method``."""
        passed = Passed(self.module.get_submodule(self.before), Condition(()))
        return view(self.module, {**others, self.before: passed}, {("", self.method): step})


class StandInMethod:
    """Replaces a method of ``module``. It calls the method on the view ``inner`` as long as the condition holds."""

    def __init__(self, module: nn.Module, method: str, inner: nn.Module, condition: Condition) -> None:
        self.module, self.method, self.inner, self.condition = module, method, inner, condition

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        holder = self.inner if self.condition.holds() else self.module
        return getattr(type(holder), self.method)(holder, *args, **kwargs)
