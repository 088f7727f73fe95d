"""A multiplication as plain data: everything that a backend's answer may depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad

from flysurgery.factors import architecture_of
from flysurgery.ops.cuda.modes import tf32_allowed
from flysurgery.patterns import Architecture

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


@dataclass(frozen=True)
class Problem:
    """One multiplication ``y = x W^T + bias`` with W a product of factors.

    ``rows`` is the number of rows of x once all leading dimensions are flattened, and None while a graph is traced:
    the choice must then hold for any number of rows. ``tracing`` asks for operators that a graph can hold: PyTorch's
    own, or registered ones. ``requires_grad`` asks for gradients with respect to x, the factors and the bias.
    ``allow_tf32`` says whether float32 products may round their inputs to TF32 (CUDA only).
    """

    architecture: Architecture
    rows: int | None
    dtype: torch.dtype
    device_type: str
    bias: bool = False
    requires_grad: bool = False
    tracing: bool = False
    allow_tf32: bool = False


def problem_of(
    x: Tensor,  # shape: (*batch, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right as in W = K_1 K_2
    bias: Tensor | None = None,  # shape: (out_features,)
    dtype: torch.dtype | None = None,
    beside: Sequence[Tensor] = (),
) -> Problem:
    """Describe the multiplication of these tensors under the present settings of PyTorch.

    Args:
        dtype: what x will be cast to, if to anything.
        beside: the weights of other linears in the same call.
    """
    tensors = (x, *factors, *beside) if bias is None else (x, *factors, bias, *beside)
    tracing = is_tracing(*tensors)
    architecture = architecture_of(factors)
    return Problem(
        architecture=architecture,
        rows=None if tracing else x.numel() // architecture.in_features,
        dtype=dtype or x.dtype,
        device_type=x.device.type,
        bias=bias is not None,
        requires_grad=torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors),
        tracing=tracing,
        allow_tf32=x.device.type == "cuda" and tf32_allowed(),
    )


def is_tracing(*tensors: Tensor) -> bool:
    """Whether operations on these tensors are recorded or transformed rather than just run.

    This holds under compilation, export and TorchScript tracing, within ``torch.func`` transforms, forward derivatives and dispatch modes
    (fake tensors, operation counters), and for subclasses of Tensor. Only operators that PyTorch knows are safe there.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or not _PLAIN.issuperset(map(type, tensors))
        or bool(torch._C._len_torch_dispatch_stack())
        or _is_transformed()
    )


def _is_transformed() -> bool:
    return peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def foreign_obstacle() -> str | None:
    """Why only PyTorch's own operators may be used here; None where registered ones may be used too."""
    if is_exporting():
        return "an exported graph holds only PyTorch's own operators"
    if not torch.compiler.is_compiling() and _is_transformed():
        return "transforms of torch.func and forward derivatives have rules for PyTorch's own operators alone"
    return None


@torch.compiler.assume_constant_result  # some versions of dynamo evaluate torch.compiler.is_exporting() as true when they trace it
def is_exporting() -> bool:
    """Whether a graph is being made for use without this package: ``torch.export``, ONNX, TorchScript."""
    scripting = torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    return scripting or torch.compiler.is_exporting() or torch.onnx.is_in_onnx_export()
