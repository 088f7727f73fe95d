"""A linear layer whose matrix is a product of Kronecker-sparse factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from flysurgery.factors import factors_to_dense
from flysurgery.ops import forget_moved, ks_linear
from flysurgery.patterns import Architecture
from flysurgery.projection import draw

torch.fx.wrap("ks_linear")  # torch.fx records one call and does not look inside


class ButterflyLinear(nn.Module):
    """``y = x (K_1 K_2 ... K_L)^T + bias``; replaces an ``nn.Linear``.

    ``factors`` holds one parameter of shape (a, b, c, d) for each pattern of ``architecture``, left to right; a row x
    meets the last one first. ``weight`` is their product, computed at each read. ``backend`` names one way to multiply; None takes the
    fastest known. CUDA kernels keep packed factors; ``flysurgery.ops.forget_derived`` lists the writes after which to call it.

    Shapes: input ``(*batch, in_features)``, output ``(*batch, out_features)``, always a fresh tensor.

    Raises:
        PatternError, BackendError: when called, as ``ks_linear`` does.
    """

    def __init__(
        self,
        architecture: Architecture,
        bias: bool = True,
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.backend = backend
        self.in_features = architecture.in_features
        self.out_features = architecture.out_features
        self._names = [str(place) for place in range(len(architecture))]
        self.factors = nn.ParameterList(
            nn.Parameter(torch.empty(pattern.factor_shape, device=device, dtype=dtype)) for pattern in architecture
        )
        self.bias: nn.Parameter | None
        if bias:
            self.bias = nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new factors by ``projection.draw``, and the bias as ``nn.Linear`` does."""
        draw(self.factors, self.architecture)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(
        self,
        x: Tensor,  # shape: (*batch, in_features)
    ) -> Tensor:  # shape: (*batch, out_features)
        factors, bias = self.own_parameters()
        return ks_linear(x, factors, bias, backend=self.backend)

    @property
    def weight(self) -> Tensor:  # shape: (out_features, in_features)
        """The product of the factors, in their dtype, for readers of an ``nn.Linear``; differentiable, and no parameter.

        It is a new tensor at each read, so writes to it are lost. Costs ``factors_to_dense``.
        """
        return factors_to_dense(self.own_parameters()[0])

    def own_parameters(self) -> tuple[tuple[Tensor, ...], Tensor | None]:
        """``tuple(self.factors), self.bias``. Every call needs them, so plain parameters are read at a tenth of the usual cost."""
        if torch.compiler.is_compiling():
            return tuple(self.factors), self.bias
        parameters = self._modules["factors"]._parameters  # pyright: ignore[reportOptionalMemberAccess]
        try:
            factors = tuple([parameters[name] for name in self._names])
            return factors, self._parameters["bias"]  # pyright: ignore[reportReturnType] - None is no factor
        except KeyError:  # parametrized, or replaced by plain tensors
            return tuple(self.factors), self.bias

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> ButterflyLinear:
        """Move and retype the parameters, as ``to`` does, and free their packed forms."""
        super()._apply(fn, recurse)
        forget_moved()
        return self

    def extra_repr(self) -> str:
        return f"architecture={self.architecture}, density={self.architecture.density:.3f}, bias={self.bias is not None}"
