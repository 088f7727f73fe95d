"""The modules that surgery puts in the place of dense linear layers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from flysurgery.errors import PatternError
from flysurgery.factors import factors_to_dense
from flysurgery.ops import forget_moved, ks_linear, ks_linear_group
from flysurgery.patterns import Architecture
from flysurgery.projection import draw

__all__ = ["ButterflyConv", "ButterflyLinear", "SplitLinear"]

torch.fx.wrap("ks_linear")  # torch.fx records one call and does not look inside
torch.fx.wrap("ks_linear_group")


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
        self.architecture, self.backend = architecture, backend
        self.in_features, self.out_features = architecture.in_features, architecture.out_features
        self._names = [str(place) for place in range(len(architecture))]
        self.factors = nn.ParameterList(
            nn.Parameter(torch.empty(pattern.factor_shape, device=device, dtype=dtype)) for pattern in architecture
        )
        self.bias: nn.Parameter | None
        self.register_parameter("bias", nn.Parameter(torch.empty(self.out_features, device=device, dtype=dtype)) if bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new factors by ``projection.draw``, and the bias as ``nn.Linear`` does."""
        draw(self.factors, self.architecture)
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features)
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
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
        if not torch.compiler.is_compiling():
            parameters = self._modules["factors"]._parameters  # pyright: ignore[reportOptionalMemberAccess]
            try:
                factors = tuple([parameters[name] for name in self._names])
                return factors, self._parameters["bias"]  # pyright: ignore[reportReturnType] - None is no factor
            except KeyError:  # parametrized, or replaced by plain tensors
                pass
        return tuple(self.factors), self.bias

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        """Move and retype the parameters, as ``to`` does, and free their packed forms."""
        super()._apply(fn, recurse)
        forget_moved()
        return self

    def extra_repr(self) -> str:
        return f"architecture={self.architecture}, density={self.architecture.density:.3f}, bias={self.bias is not None}"


class ButterflyConv(ButterflyLinear):
    """A ``ButterflyLinear`` on the channels, in the place of an ``nn.Conv1d``, ``nn.Conv2d`` or ``nn.Conv3d`` with a kernel of one.

    ``axes`` counts the spatial axes: 1, 2 or 3. Parameters are those of ``ButterflyLinear``, of the same names.

    Shapes: input ``(*batch, in_features, *spatial)``, output ``(*batch, out_features, *spatial)``, a fresh tensor. Its memory is laid out
    as that of the input: one of ``channels_last`` is multiplied as it lies, any other is transposed before and after.
    """

    def __init__(self, architecture: Architecture, bias: bool = True, *, axes: int = 2, **others: Any) -> None:
        super().__init__(architecture, bias, **others)
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        channels = -1 - self.axes
        result = super().forward(x.movedim(channels, -1)).movedim(-1, channels)
        return result.contiguous() if x.is_contiguous() else result

    @property
    def weight(self) -> Tensor:  # shape: (out_features, in_features, *(1,) * axes)
        """The product of the factors as a convolution's weight; see ``ButterflyLinear.weight``."""
        return super().weight[(..., *(None,) * self.axes)]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, axes={self.axes}"


class SplitLinear(nn.Module):
    """Linear layers side by side, such as q, k and v of a fused projection: each gets the same x, and the outputs are joined.

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
        first, head = next(iter(parts.items()))
        for name, part in parts.items():
            if part.in_features != head.in_features:
                raise PatternError(
                    f"the parts of a SplitLinear must take the same features: '{first}' takes {head.in_features}, "
                    f"'{name}' takes {part.in_features}"
                )
            self.add_module(name, part)
        self.in_features = head.in_features
        self.out_features = sum(part.out_features for part in parts.values())

    def forward(self, x: Tensor) -> Tensor:
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
        like = next((bias for _, bias in parts if bias is not None), None)
        if like is None:
            return None
        return torch.cat([like.new_zeros(part.out_features) if bias is None else bias for part, bias in parts])  # pyright: ignore

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def _hooked(part: nn.Module) -> bool:
    """Whether somebody waits for the part to be called, so that its factors may not be used without calling it."""
    return bool(part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)
