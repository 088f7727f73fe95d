"""The multiplications: by one factor, by a layer with its bias, and by several layers that read the same x, such as q, k and v."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flysurgery.errors import BackendError, PatternError
from flysurgery.factors import architecture_of
from flysurgery.ops.backend import Runner, problem_of
from flysurgery.ops.choose_backend import choose
from flysurgery.ops.choose_launches import decided
from flysurgery.torch_state import autocast_dtype, without_autocast


def ks_multiply(
    x: Tensor,  # shape: (*batch, a*c*d)
    factor: Tensor,  # shape: (a, b, c, d)
    *,
    backend: str | None = None,
) -> Tensor:  # shape: (*batch, a*b*d)
    """Multiply the rows of ``x`` by a Kronecker-sparse factor: ``x @ K.T``.

    ``K[(i*b + p)*d + j, (i*c + q)*d + j] = factor[i, p, q, j]``; all other entries are zero.
    Costs ``2*a*b*c*d`` flops per row. Rows are samples; any leading shape, zero rows included. Under autocast the
    operands are cast as ``F.linear`` casts them.

    Raises:
        PatternError: ``x.shape[-1] != a*c*d``; the message gives both numbers.
        BackendError: no backend, or not the named one, can run this; the message gives each reason.

    Source: Gonon et al. 2024, arXiv:2405.15013, Algorithm 1.
    """
    return ks_linear(x, (factor,), backend=backend)


def ks_linear(
    x: Tensor,  # shape: (*batch, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right as in W = K_1 K_2
    bias: Tensor | None = None,  # shape: (out_features,)
    *,
    backend: str | None = None,
) -> Tensor:  # shape: (*batch, out_features)
    """Apply a linear layer whose matrix is a product of factors: ``x @ (K_1 K_2 ... K_L).T + bias``.

    x meets the last factor first. Costs twice the factors' nonzeros in flops per row. What lies between two
    factors is rounded to the dtype of x, unless the backend keeps it wider. Any floating dtype; complex64 and complex128 by
    PyTorch's operators alone. Gradients with respect to x, the factors and the bias. Under autocast the operands are cast as
    ``F.linear`` casts them. The result is a fresh tensor.

    Raises:
        PatternError: the factors do not chain, or x or the bias does not fit them; the message gives both numbers.
        BackendError: dtypes or devices differ, or no backend, or not the named one, can run this, with each reason.
    """
    biases = () if bias is None else (bias,)
    run, dtype = decided(lambda: _decide(x, factors, bias, backend), (x, *factors, *biases), backend, bias is None)
    if dtype is None:
        return run(x, factors, biases)
    with without_autocast(x.device.type):
        return run(x.to(dtype), [factor.to(dtype) for factor in factors], [each.to(dtype) for each in biases])


def _decide(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, backend: str | None) -> tuple[Runner, torch.dtype | None]:
    """What runs this, and the dtype that operands are cast to before; None where they stay as they are."""
    autocast = autocast_dtype(x.device.type)
    _check(x, factors, bias, autocast)
    problem = problem_of(x, factors, bias, _under_autocast(x, autocast))
    chosen = choose(problem, backend)
    return chosen.runner(problem), None if autocast is None or chosen.rounds else problem.dtype


def _under_autocast(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype that autocast to ``dtype`` gives to an operand of a matrix product: float64 and complex numbers stay as they are."""
    return tensor.dtype if dtype is None or tensor.dtype == torch.float64 or tensor.is_complex() else dtype


def _check(x: Tensor, factors: Sequence[Tensor], bias: Tensor | None, autocast: torch.dtype | None) -> None:
    """That the operands fit each other, in sizes, dtypes and devices."""
    architecture = architecture_of(factors)
    if x.dim() == 0 or x.shape[-1] != architecture.in_features:
        raise PatternError(f"factors {architecture} take rows of {architecture.in_features} features, got x of shape {tuple(x.shape)}")
    if bias is not None and tuple(bias.shape) != (architecture.out_features,):
        raise PatternError(f"factors {architecture} take a bias of {architecture.out_features} entries, got shape {tuple(bias.shape)}")
    if not (x.is_floating_point() or x.dtype in (torch.complex64, torch.complex128)):
        raise BackendError(f"expected x of a floating dtype, complex64 or complex128, got {x.dtype}; convert it with .to()")
    dtype, device = _under_autocast(x, autocast), x.device
    named = [(f"factor {index}", factor) for index, factor in enumerate(factors)]
    for name, tensor in named if bias is None else (*named, ("the bias", bias)):
        if _under_autocast(tensor, autocast) != dtype or tensor.device != device:
            raise BackendError(
                f"expected x and {name} to have the same dtype and device, but got {x.dtype} on {device} and "
                f"{tensor.dtype} on {tensor.device}; convert one of them with .to()"
            )


def ks_linear_group(
    x: Tensor,  # shape: (*batch, in_features)
    linears: Sequence[Sequence[Tensor]],  # each: factors left to right, shapes (a, b, c, d)
    biases: Sequence[Tensor | None],  # shapes: (out_features,), one for each linear
    *,
    backend: str | None = None,
) -> Tensor:  # shape: (*batch, sum of all out_features)
    """Apply linear layers to the same x and join their outputs on the last dimension.

    Equal to ``torch.cat([ks_linear(x, factors, bias) ...], -1)``. Where all have the same architecture and the chosen
    backend multiplies them together, as the CUDA kernels do, one launch computes all of them and reads x once.

    Raises:
        PatternError, BackendError: as ``ks_linear``.
    """
    factors = [factor for linear in linears for factor in linear]
    present = [bias for bias in biases if bias is not None]
    asked = ("group", backend, *map(len, linears), *[bias is None for bias in biases])
    run = decided(lambda: _decide_group(x, linears, biases, backend), (x, *factors, *present), *asked)
    if run is None:
        return torch.cat([ks_linear(x, own, bias, backend=backend) for own, bias in zip(linears, biases, strict=True)], dim=-1)
    return run(x, factors, present)


def _decide_group(x: Tensor, linears: Sequence[Sequence[Tensor]], biases: Sequence[Tensor | None], backend: str | None) -> Runner | None:
    """The function that runs them in one launch; None where no backend has one."""
    present = [bias for bias in biases if bias is not None]
    if len(linears) == 1 or len(present) not in (0, len(linears)) or x.device.type != "cuda" or x.dim() == 0:
        return None
    dtype = autocast_dtype("cuda") if x.dtype != torch.float64 else None
    architecture, *others = map(architecture_of, linears)
    weights = [*(factor for linear in linears for factor in linear), *present]
    if any(other != architecture for other in others) or x.shape[-1] != architecture.in_features:
        return None
    if any(tuple(bias.shape) != (architecture.out_features,) for bias in present):
        return None
    if any(tensor.device != x.device or (dtype is None and tensor.dtype != x.dtype) for tensor in weights):
        return None
    problem = problem_of(x, linears[0], biases[0], dtype, beside=weights)
    chosen, together = choose(problem, backend), replace(problem, linears=len(linears))
    return chosen.runner(together) if chosen.groups and chosen.can_run(together) is None else None
