"""The kernel for the gradient of one factor, in its autotuned configuration."""

from __future__ import annotations

import torch
from torch import Tensor

from flysurgery.ops.cuda.factor_grad import FactorGrad, grad_configs
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.table import TunedCase, matching, rows_bucket, tuned_config
from flysurgery.patterns import Architecture, Pattern

GRADIENT = "factor_grad"
_gradients: dict[tuple[torch.Size, str, int, int], WeightGradient] = {}


class WeightGradient:
    """``dK[i,p,q,j] = sum over rows of dy[(i*b + p)*d + j] * x[(i*c + q)*d + j]`` for one pattern, mode and device."""

    def __init__(self, pattern: Pattern, mode: str, device_index: int, rows: int) -> None:
        self.pattern, self.mode, self.device_index = pattern, mode, device_index
        limit = shared_limit_of(device_index)
        fields = tuned_config(GRADIENT, Architecture((pattern,)), mode, 1, device_index, rows)
        config = matching(fields, lambda: grad_configs(pattern, mode, limit))
        self._kernel = FactorGrad(pattern, mode, config, shared_limit=limit)

    def cases(self, rows: int) -> list[TunedCase]:
        """What to autotune for calls of so many rows."""
        device = torch.cuda.get_device_name(self.device_index)
        return [TunedCase(device, GRADIENT, Architecture((self.pattern,)), self.mode, 1, rows)]

    def run(
        self,
        x: Tensor,  # shape: (rows, a*c*d)
        dy: Tensor,  # shape: (rows, a*b*d)
    ) -> Tensor:  # shape: (a, b, c, d), float32
        """Sum over the rows, on the current stream."""
        return self._kernel.run(_adjacent(x), _adjacent(dy))


def weight_gradient_for(factor: Tensor, mode: str, rows: int) -> WeightGradient:
    """The kernel for a factor of this shape, the same object as long as the autotuned choices stay."""
    key = (factor.shape, mode, factor.device.index, rows_bucket(rows))
    found = _gradients.get(key)
    if found is None:
        found = _gradients[key] = WeightGradient(Pattern(*factor.shape), mode, factor.device.index, rows)
    return found


def exact_gradient(
    x: Tensor,  # shape: (rows, a*c*d)
    dy: Tensor,  # shape: (rows, a*b*d)
    pattern: Pattern,
) -> Tensor:  # shape: (a, b, c, d), float64
    """The same in float64, by PyTorch, for the mode ``exact``, which has no kernel of its own."""
    a, b, c, d = pattern.factor_shape
    left = dy.double().unflatten(1, (a, b, d)).permute(1, 3, 2, 0).flatten(0, 1)  # shape: (a*d, b, rows)
    right = x.double().unflatten(1, (a, c, d)).permute(1, 3, 0, 2).flatten(0, 1)  # shape: (a*d, rows, c)
    return torch.bmm(left, right).unflatten(0, (a, d)).permute(0, 2, 3, 1).contiguous()


def forget_gradients() -> None:
    """Choose kernels anew at the next call, after the table of configurations has changed."""
    _gradients.clear()


def _adjacent(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.clone(memory_format=torch.contiguous_format)
