"""A layer norm by itself, for its fused gradients."""

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from flysurgery.gpu.parts import Norm, wrong_norm
from flysurgery.ops.norm_linears import plain_norm
from flysurgery.ops.ways import Stages


class LayerNorm(NamedTuple):
    """The norm of x: (batch..., features). Without gradients PyTorch computes it."""

    norm: Norm

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.norm.tensors

    @property
    def form(self) -> tuple[Hashable, ...]:
        return "norm", *self.norm.form

    def wrong(self, x: Tensor) -> str | None:
        return wrong_norm(self.norm, x.shape[-1])

    def stages(self, x: Tensor) -> Stages | str:
        return "a norm by itself is fused with its gradients alone"

    def plainly(self, x: Tensor) -> Tensor:
        return plain_norm(x, self.norm)
