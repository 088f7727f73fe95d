"""What PyTorch's sparse layouts can compute on a device, for the two backends that use them."""

from __future__ import annotations

import torch

from flysurgery.ops.problem import Problem


def sparse_obstacle(problem: Problem) -> str | None:
    """Why PyTorch cannot multiply by a compressed sparse matrix here; None when it can.

    On the CPU it goes through MKL, which knows float32 and float64 only.
    """
    if problem.tracing:
        return "sparse layouts cannot be traced into a graph"
    if problem.device_type not in ("cpu", "cuda"):
        return f"PyTorch has sparse products on cpu and cuda, x is on {problem.device_type}"
    if problem.dtype.is_complex:
        return f"its sparse products of complex numbers are not tested, x is {problem.dtype}"
    if problem.device_type == "cpu":
        if not torch.backends.mkl.is_available():
            return "PyTorch multiplies sparse matrices on the CPU through MKL, which this build lacks"
        if problem.dtype not in (torch.float32, torch.float64):
            return f"MKL multiplies sparse matrices in float32 and float64, x is {problem.dtype}"
    return None
