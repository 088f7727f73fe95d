"""Grouped 1x1 convolutions over the tokens of a sample: the form in which other engines run the factors fastest."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.factors import to_blocks
from flysurgery.ops.backend import Backend, Runner
from flysurgery.ops.problem import Problem


class ConvolutionBackend(Backend):
    """``conv1d`` with a group for each of the a*d dense blocks. Features are channels, rows of a sample are positions.

    ONNX files have it: ONNX Runtime and OpenVINO run it faster than dense layers, and batched products, with a transposition
    around each, mostly slower (rows in ``docs/python.md``). In PyTorch it is slower than the other backends.
    """

    name = "convolution"

    def can_run(self, problem: Problem) -> str | None:
        exported = problem.tracing and torch.onnx.is_in_onnx_export()
        return None if exported else "it is the form of a layer in ONNX files, and none is written now"

    def linear(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return _by_samples(x, factors, () if bias is None else (bias,))

    def runner(self, problem: Problem) -> Runner:
        return _by_samples


def _by_samples(
    x: Tensor,  # shape: (*batch, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right
    biases: Sequence[Tensor],  # one of shape (out_features,), or none
) -> Tensor:  # shape: (*batch, out_features)
    samples = x if x.dim() == 3 else x.flatten(1, -2) if x.dim() > 3 else x.reshape(1, -1, x.shape[-1])
    rows = samples.shape[1]
    columns = samples.transpose(1, 2)  # shape: (samples, features, rows)
    for factor in reversed(factors):
        a, b, c, d = factor.shape
        if d > 1:
            columns = columns.reshape(-1, a, c, d, rows).transpose(2, 3).reshape(-1, a * d * c, rows)
        columns = functional.conv1d(columns, to_blocks(factor).flatten(0, 1)[..., None], groups=a * d)
        if d > 1:
            columns = columns.reshape(-1, a, d, b, rows).transpose(2, 3).reshape(-1, a * b * d, rows)
    product = columns.transpose(1, 2).reshape(*x.shape[:-1], -1)
    return product + biases[0] if biases else product
