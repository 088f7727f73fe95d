"""The backend ``cuda``: the fused kernels, for layers whose sizes and dtypes they know."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.gpu.device import device_obstacle, shared_limit_of
from flysurgery.gpu.factor_product import factor_config, product_obstacle, run_product
from flysurgery.gpu.fused_linear import fused_reason
from flysurgery.gpu.gradients import EagerLinear
from flysurgery.gpu.modes import mode_of
from flysurgery.gpu.single_by_bmm import BatchedConfig
from flysurgery.ops.backend import Backend, Problem, Runner, problem_of
from flysurgery.patterns import Architecture
from flysurgery.torch_state import foreign_obstacle


class CudaBackend(Backend):
    """CUDA kernels compiled for the device at hand: one launch for two factors, or factor by factor for others."""

    name = "cuda"
    rounds = groups = True

    def remark(self, problem: Problem) -> str | None:
        """A remark on how a problem is run, where that is not by one kernel of this package."""
        mode, device_index = _mode(problem), torch.cuda.current_device()
        fused = None if mode is None else fused_reason(problem.architecture, mode, 1, shared_limit_of(device_index))
        if mode is None or fused is None:
            return None
        found = [] if len(problem.architecture) == 1 else [f"factor by factor, as {fused}"]
        rows = problem.rows or 0
        batched = [str(p) for p in problem.architecture if isinstance(factor_config(p, mode, device_index, rows), BatchedConfig)]
        if batched:
            found.append(f"{' and '.join(batched)} by PyTorch's product of the blocks, the faster way at this size")
        return "; ".join(found) or None

    def can_run(self, problem: Problem) -> str | None:
        if problem.device_type != "cuda":
            return f"it needs tensors on a CUDA device, these are on {problem.device_type}"
        foreign = foreign_obstacle() if problem.tracing else None
        if foreign is not None:
            return foreign
        mode = _mode(problem)
        if mode is None:
            return f"it has kernels for float32, float16 and bfloat16, not {problem.dtype}"
        shapes = tuple(pattern.factor_shape for pattern in problem.architecture)
        return _kernel_obstacle(shapes, mode, problem.linears, problem.requires_grad)

    def linear(self, x: Tensor, factors: Sequence[Tensor], bias: Tensor | None) -> Tensor:
        return self.runner(problem_of(x, factors, bias))(x, factors, () if bias is None else (bias,))

    def runner(self, problem: Problem) -> Runner:
        dtype, linears, mode = problem.dtype, problem.linears, _mode(problem)
        assert mode is not None, "can_run has refused other dtypes"

        def registered(x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
            product = torch.ops.flysurgery.ks_linear(x.to(dtype).reshape(-1, x.shape[-1]), list(factors), list(biases), linears, mode)
            return product.reshape(*x.shape[:-1], product.shape[1])

        def with_gradients(x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
            return EagerLinear.apply(dtype, linears, mode, len(factors), x, *factors, *biases)  # pyright: ignore[reportReturnType]

        def without_gradients(x: Tensor, factors: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
            return run_product(x.to(dtype), factors, biases, linears, mode)

        if problem.tracing:
            return registered
        return with_gradients if problem.requires_grad else without_gradients


def _mode(problem: Problem) -> str | None:
    return mode_of(problem.dtype, allow_tf32=problem.allow_tf32)


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _kernel_obstacle(shapes: tuple[tuple[int, int, int, int], ...], mode: str, linears: int, requires_grad: bool) -> str | None:
    return device_obstacle() or _size_obstacle(shapes, mode, linears, requires_grad, shared_limit_of(torch.cuda.current_device()))


@lru_cache(maxsize=4096)
def _size_obstacle(
    shapes: tuple[tuple[int, int, int, int], ...], mode: str, linears: int, requires_grad: bool, shared_limit: int
) -> str | None:
    architecture = Architecture.of(*shapes)
    obstacle = product_obstacle(architecture, mode, linears, shared_limit)
    return obstacle or (product_obstacle(architecture.transpose, mode, 1, shared_limit) if requires_grad else None)
