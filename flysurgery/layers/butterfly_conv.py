"""A 1x1 convolution whose matrix is a product of Kronecker-sparse factors."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.layers.butterfly_linear import ButterflyLinear
from flysurgery.patterns import Architecture


class ButterflyConv(ButterflyLinear):
    """A ``ButterflyLinear`` on the channels, in the place of an ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d`` with a kernel of one.

    ``axes`` counts the spatial axes: 1, 2 or 3. Parameters are those of ``ButterflyLinear``, of the same names.

    Shapes: input ``(*batch, in_features, *spatial)``, output ``(*batch, out_features, *spatial)``, a fresh tensor. Its memory is laid out
    as that of the input: one of ``channels_last`` is multiplied as it lies, any other is transposed before and after.
    """

    def __init__(
        self,
        architecture: Architecture,
        bias: bool = True,
        *,
        axes: int = 2,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(architecture, bias, backend=backend, device=device, dtype=dtype)
        self.axes = axes

    def forward(
        self,
        x: Tensor,  # shape: (*batch, in_features, *spatial)
    ) -> Tensor:  # shape: (*batch, out_features, *spatial)
        channels = -1 - self.axes
        result = super().forward(x.movedim(channels, -1)).movedim(-1, channels)
        return result.contiguous() if x.is_contiguous() else result

    @property
    def weight(self) -> Tensor:  # shape: (out_features, in_features, *(1,) * axes)
        """The product of the factors as a convolution's weight; see ``ButterflyLinear.weight``."""
        return super().weight[(..., *(None,) * self.axes)]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, axes={self.axes}"
