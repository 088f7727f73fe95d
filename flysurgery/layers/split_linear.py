"""A fused projection taken apart, such as qkv into q, k and v."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx
from torch import Tensor, nn

from flysurgery.errors import PatternError
from flysurgery.layers.butterfly_linear import ButterflyLinear
from flysurgery.ops import ks_linear_group

torch.fx.wrap("ks_linear_group")  # torch.fx records one call and does not look inside


class SplitLinear(nn.Module):
    """Linear layers side by side: the same x goes to each part, and the outputs are joined on the last dimension.

    The parts become children under their names, in order, so the parameters of part "q" are called ``q.factors.0`` or
    ``q.weight``, and so on. ``weight`` and ``bias`` are those of the parts, one below the other, joined at each read.

    Shapes: input ``(*batch, in_features)``, output ``(*batch, out_features)``, a fresh tensor. Parts of one architecture are
    one launch on CUDA; parts with hooks are called one by one.

    Raises:
        PatternError: there is no part, or two parts take different numbers of features; the message gives both.
    """

    def __init__(self, parts: Mapping[str, ButterflyLinear | nn.Linear]) -> None:
        super().__init__()
        if not parts:
            raise PatternError("a SplitLinear needs at least one part, got none")
        (first, head), *rest = parts.items()
        for name, part in rest:
            if part.in_features != head.in_features:
                raise PatternError(
                    f"the parts of a SplitLinear must take the same features: '{first}' takes {head.in_features}, "
                    f"'{name}' takes {part.in_features}"
                )
        self.in_features = head.in_features
        self.out_features = sum(part.out_features for part in parts.values())
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(
        self,
        x: Tensor,  # shape: (*batch, in_features)
    ) -> Tensor:  # shape: (*batch, out_features)
        parts = [*self._modules.values()]
        plain = [part for part in parts if type(part) is ButterflyLinear and not _hooked(part)]
        if len(plain) == len(parts) and len({part.backend for part in plain}) == 1:
            factors, biases = zip(*[part.own_parameters() for part in plain], strict=True)
            return ks_linear_group(x, factors, biases, backend=plain[0].backend)
        return torch.cat([part(x) for part in parts], dim=-1)  # pyright: ignore[reportOptionalCall] - None is no part

    @property
    def weight(self) -> Tensor:  # shape: (out_features, in_features)
        """The parts' matrices, one below the other, as ``ButterflyLinear.weight`` gives them; writes to it are lost."""
        return torch.cat([part.weight for part in self.children()])  # pyright: ignore[reportArgumentType] - parts are linear layers

    @property
    def bias(self) -> Tensor | None:  # shape: (out_features,)
        """The parts' biases, zeros where one has none; None where no part has one. Writes to it are lost."""
        parts = [(part, getattr(part, "bias", None)) for part in self.children()]
        if all(bias is None for _, bias in parts):
            return None
        like = next(bias for _, bias in parts if bias is not None)
        return torch.cat([like.new_zeros(part.out_features) if bias is None else bias for part, bias in parts])  # pyright: ignore

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _hooked(part: nn.Module) -> bool:
    """Whether somebody waits for the part to be called, so that its factors may not be used without calling it."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)
