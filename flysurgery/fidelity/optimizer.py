"""An optimizer whose steps are shares of a parameter's size: orthogonal steps for factors and matrices, Adam's for everything else."""

# pyright: reportPrivateImportUsage=false
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.layers import ButterflyLinear

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
MOMENTUM = 0.95
BETAS = (0.9, 0.99)
EPSILON = 1e-12
SMALLEST = 1e-3  # the size that a parameter near zero counts with


class Muon(torch.optim.Optimizer):
    """Moves each parameter by about ``lr`` times its size at the start, so that one rate serves parameters of all sizes.

    A factor of pattern (a, b, c, d) is a·d dense blocks of b×c; each of them, and each dense matrix, moves by an orthogonal matrix along
    the mean gradient. Vectors, scales and embeddings move as Adam moves them, and are pulled back to their start, so that they end within
    about their size of it. Makes no use of weight decay. ``lr`` may be a tensor of one number, for a step that a CUDA graph replays;
    nothing is read from the device. Groups of parameters are those of ``parameter_groups``.

    The bias of keys is why there is a pull. It adds the same to all scores of a query, so no output depends on it, and its gradient is
    rounding error. Adam makes that as large as any other gradient, and the bias may grow until half precision loses the keys.

    Source for orthogonal steps and their size: J. Liu et al., Muon is scalable for LLM training, arXiv:2502.16982.
    """

    def __init__(self, parameters: Iterable[dict[str, Any]], lr: float | Tensor = 3e-3) -> None:
        super().__init__(parameters, {"lr": lr, "size": 1.0, "block": None})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            members = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not members:
                continue
            gradients, block, size = [parameter.grad.float() for parameter in members], group["block"], group["size"]
            moves = self._adam(members, gradients, size) if block is None else self._orthogonal(members, gradients, *block)
            torch._foreach_mul_(moves, group["lr"] * size)
            torch._foreach_sub_(members, moves)
        return loss

    def _orthogonal(self, members: list[nn.Parameter], gradients: list[Tensor], rows: int, columns: int) -> list[Tensor]:
        """Give moves whose entries have a root mean square of about 1."""
        momentum = [self._kept(parameter, "momentum") for parameter in members]
        torch._foreach_lerp_(momentum, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momentum, MOMENTUM)
        blocks = [_as_blocks(each, rows, columns) for each in ahead]
        moved = orthogonal(torch.cat(blocks)) * math.sqrt(max(rows, columns))
        parts = moved.split([len(each) for each in blocks])
        return [_from_blocks(block, parameter.shape) for block, parameter in zip(parts, members, strict=True)]

    def _adam(self, members: list[nn.Parameter], gradients: list[Tensor], size: float) -> list[Tensor]:
        """Give Adam's moves, at first up to 2.1 times as long for lack of its correction, and the pull to the start."""
        first, second = BETAS
        start, mean, square = ([self._kept(parameter, name) for parameter in members] for name in ("start", "mean", "square"))
        torch._foreach_lerp_(mean, gradients, 1 - first)
        torch._foreach_lerp_(square, torch._foreach_mul(gradients, gradients), 1 - second)
        moves = torch._foreach_div(mean, torch._foreach_add(torch._foreach_sqrt(square), EPSILON))
        away = torch._foreach_sub([parameter.float() for parameter in members], start)
        return list(torch._foreach_add(moves, away, alpha=1 / size))

    def _kept(self, parameter: nn.Parameter, name: str) -> Tensor:
        """Give what is kept of a parameter in float32: its start, or a mean that begins at zero."""
        state = self.state[parameter]
        if name not in state:
            start = torch.zeros_like(parameter) if name != "start" else parameter.detach().clone()
            state[name] = start.float()
        return state[name]


def orthogonal(matrices: Tensor) -> Tensor:  # shapes: (batch, rows, columns)
    """Bring the singular values of matrices to about 1, by five steps of a Newton-Schulz iteration in bfloat16.

    Source: K. Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024.
    """
    a, b, c = COEFFICIENTS
    is_wide = matrices.shape[-2] <= matrices.shape[-1]
    x = (matrices if is_wide else matrices.mT).bfloat16()
    x = x / (torch.linalg.matrix_norm(x, keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return (x if is_wide else x.mT).to(matrices.dtype)


def _as_blocks(factor: Tensor, rows: int, columns: int) -> Tensor:
    return factor.reshape(1, rows, columns) if factor.ndim == 2 else factor.permute(0, 3, 1, 2).reshape(-1, rows, columns)


def _from_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) == 2:
        return blocks.view(shape)
    a, b, c, d = shape
    return blocks.view(a, d, b, c).permute(0, 2, 3, 1)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Group the parameters that learn by their size, to a power of two, and by the shape of their blocks.

    "size" is the root mean square of the entries; "block" the rows and columns of a factor's blocks or of a matrix, None for the rest.
    """
    blocks: dict[nn.Parameter, tuple[int, int]] = {}
    for module in model.modules():
        if isinstance(module, ButterflyLinear):
            blocks.update({f: (pattern.b, pattern.c) for f, pattern in zip(module.factors, module.architecture, strict=True)})
    groups: dict[tuple[float, tuple[int, int] | None], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.is_floating_point():
            is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
            block = blocks.get(parameter, (parameter.shape[0], parameter.shape[1]) if is_matrix else None)
            root = float(parameter.detach().float().square().mean().sqrt())
            size = 2.0 ** round(math.log2(max(root, SMALLEST)))
            groups.setdefault((size, block), []).append(parameter)
    return [{"params": members, "size": size, "block": block} for (size, block), members in groups.items()]
