"""The fused feed-forward block as a registered operator, for graphs and compilers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from flysurgery.ops.cuda.ffn import run_ffn
from flysurgery.ops.cuda.registered import Operator

FFN_OPERANDS = (
    "Tensor x, Tensor? norm_weight, Tensor? norm_bias, float? eps, Tensor[] up, Tensor? up_bias, Tensor[] down, Tensor? down_bias, "
    "str activation, Tensor? scale, bool residual"
)
"""Of every operator for a feed-forward block."""


def _ffn(x: Tensor, norm_weight: Tensor | None, norm_bias: Tensor | None, eps: float | None, *block: Any) -> Tensor:
    return run_ffn(x, None if eps is None else (norm_weight, norm_bias), eps or 0.0, *block)


def fake_ffn(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float | None,
    up: Sequence[Tensor],
    up_bias: Tensor | None,
    down: Sequence[Tensor],
    *others: Any,
) -> Tensor:
    """The shape and dtype of what an operator of ``FFN_OPERANDS`` gives."""
    a, b, _, d = down[0].shape
    return x.new_empty((x.shape[0], a * b * d))


ffn_operator = Operator(f"ffn({FFN_OPERANDS}) -> Tensor", _ffn, fake_ffn)
