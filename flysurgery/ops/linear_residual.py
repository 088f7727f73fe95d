"""A linear layer with its layer scale and residual: what is computed, and which launch computes it."""

from collections.abc import Hashable
from typing import NamedTuple

from torch import Tensor

from flysurgery.gpu.dense import run_dense_moments, streamed_for
from flysurgery.gpu.modes import mode_for
from flysurgery.gpu.parts import Dense, Linear, present, wrong_size, wrong_vector
from flysurgery.ops.one_launch import epilogue_reason, few_rows_linear, linear_epilogue, multiplied, rows_of, takes_few_rows
from flysurgery.ops.ways import Stage, Stages, reason


class LinearResidual(NamedTuple):
    """``residual + scale * linear(x)``, in one launch; x: (batch..., in_features)."""

    linear: Linear
    residual: Tensor  # shape: (*batch, out_features)
    scale: Tensor | None = None  # shape: (out_features,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return present(*self.linear.tensors, self.residual, self.scale)

    @property
    def form(self) -> tuple[Hashable, ...]:
        return "linear_residual", self.linear.form, self.scale is None

    def wrong(self, x: Tensor) -> str | None:
        outputs, residual = self.linear.sizes[1], self.residual
        wrong = wrong_size(x, self.linear) or wrong_vector(self.scale, outputs, "scale")
        expected = (*x.shape[:-1], outputs)
        if wrong is None and (residual.shape != expected or residual.dtype != x.dtype):
            return f"expected a residual of shape {expected} and {x.dtype}, got {tuple(residual.shape)} and {residual.dtype}"
        return wrong

    def stages(self, x: Tensor) -> Stages | str:
        if takes_few_rows(x, (self.linear,)):
            return (Stage((), lambda y, x, given: few_rows_linear(y, None, (given.linear,), "none", given.residual, given.scale)),)
        obstacle = epilogue_reason(x, self.linear)
        return obstacle or (Stage((), lambda y, x, given: linear_epilogue(y, given.linear, "none", given.residual, given.scale)),)

    def plainly(self, x: Tensor) -> Tensor:
        y = multiplied(x, self.linear)
        return self.residual + (y if self.scale is None else y * self.scale)


def leaves_moments(x: Tensor, operation: LinearResidual) -> bool:
    """Whether the kernel of an operation can also write the moments of its result's rows, at almost no cost."""
    linear, residual, _ = operation
    if not isinstance(linear, Dense) or reason(x, operation) is not None:
        return False
    rows = residual.numel() // max(1, residual.shape[-1])
    return streamed_for(rows, *linear.sizes, mode_for(x), x.device.index) is not None


def run_with_moments(x: Tensor, operation: LinearResidual) -> tuple[Tensor, Tensor]:  # shapes: (*batch, out_features), (rows, parts, 2)
    """The result of an operation that ``leaves_moments``, and the moments of its rows, float32, for the next norm.

    A row is divided into parts of equal size. Each part's moments are its mean and the sum of the squared deviations from it.
    """
    linear, residual, scale = operation
    assert isinstance(linear, Dense), "other layers leave no moments"
    y, moments = run_dense_moments(rows_of(x), linear, rows_of(residual), scale, mode_for(x))
    return y.view(residual.shape), moments
