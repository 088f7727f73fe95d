"""Replaces PyTorch's attention inside of a module by a fused step."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flysurgery.inference.fused_modules import AttentionStep
from flysurgery.inference.match_block import modules_around
from flysurgery.walker import Survey, name_of, shape_of


def attention_of(seen: Survey, fqn: str) -> Node | None:
    """The only call of scaled_dot_product_attention inside of a module, without mask and dropout; None where there is no such call."""
    inside = [node for node in seen.trace.graph.nodes if fqn in modules_around(seen, node)]
    calls = [node for node in inside if name_of(node) == functional.scaled_dot_product_attention.__name__]
    if len(calls) != 1 or _operands(*calls[0].args, **calls[0].kwargs) is None:
        return None
    return calls[0] if all(len(shape_of(node) or ()) == 4 for node in calls[0].args[:3] if isinstance(node, Node)) else None


class Attending(TorchFunctionMode):
    """A block in which ``step`` computes the attention of calls without mask and dropout and with the scale that it was made for."""

    def __init__(self, step: AttentionStep) -> None:
        super().__init__()
        self.step = step

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        named = kwargs or {}
        if func is functional.scaled_dot_product_attention:
            operands = _operands(*args, **named)
            if operands is not None and named.get("scale") == self.step.scale:
                return self.step(*operands)
        return func(*args, **named)


def _operands(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The operands of a call of scaled_dot_product_attention; None where the call does more than the kernel."""
    return None if attn_mask is not None or dropout_p or is_causal or enable_gqa else (query, key, value)
