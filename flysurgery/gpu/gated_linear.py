"""A layer whose outputs are a gate and a value, multiplied in the layer's launch, with or without a norm; and its operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.factors import architecture_of
from flysurgery.gpu.fused import ACTIVATIONS, FusedLinear, fused_reason
from flysurgery.gpu.modes import dtype_of
from flysurgery.gpu.norm_linear import fold, with_sums
from flysurgery.gpu.obstacles import shared_limit_of
from flysurgery.gpu.registered import Operator, rows_like
from flysurgery.gpu.table import TunedCase, rows_bucket, tuned_config
from flysurgery.gpu.tuning_record import meet
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.patterns import Architecture

GATED_LINEAR, NORM_GATED_LINEAR = "gated_linear", "norm_gated_linear"


@lru_cache(maxsize=4096)
def gated_linear_obstacle(architecture: Architecture, mode: str, activation: str, norm: bool, device_index: int) -> str | None:
    """Why no single launch computes a layer of gate and value and their product; None where one does."""
    if activation not in ACTIVATIONS:
        return f"the fused kernel has the activations {', '.join(ACTIVATIONS)}, not '{activation}'"
    return fused_reason(architecture, mode, 1, shared_limit_of(device_index), norm=norm, gated=True)


class GatedLinear:
    """The kernel of a gate and a value, as autotuning sees it."""

    def __init__(self, architecture: Architecture, mode: str, norm: bool, device_index: int, rows: int) -> None:
        self.architecture, self.mode, self.norm, self.device_index = architecture, mode, norm, device_index
        fields, kind = tuned_config(self.name, architecture, mode, 1, device_index, rows), {"norm": norm, "gated": True}
        config = FusedLinear.tuned(architecture, mode, 1, fields, **kind, device_index=device_index) if fields else None
        self.kernel = FusedLinear(architecture, mode, config=config, **kind, device_index=device_index)

    @property
    def name(self) -> str:
        """The kernel's name in tables."""
        return NORM_GATED_LINEAR if self.norm else GATED_LINEAR

    def cases(self, rows: int) -> list[TunedCase]:
        """The cases to autotune for calls with this many rows."""
        return [TunedCase(torch.cuda.get_device_name(self.device_index), self.name, self.architecture, self.mode, 1, rows)]


@lru_cache(maxsize=256)
def _gated_linear(shapes: tuple[torch.Size, ...], mode: str, norm: bool, device_index: int, bucket: int) -> GatedLinear:
    return GatedLinear(Architecture.of(*shapes), mode, norm, device_index, bucket)


def forget_gated_linears() -> None:
    """Let the next call choose kernels again, after the table of configurations has changed."""
    _gated_linear.cache_clear()


def run_gated_linear(
    x: Tensor,  # shape: (rows, in_features)
    weight: Tensor | None,  # shape: (in_features,)
    bias: Tensor | None,  # shape: (in_features,)
    eps: float | None,
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left and right
    offset: Tensor | None,  # shape: (out_features,)
    gate: int,
    activation: str,
    mode: str,
) -> Tensor:  # shape: (rows, out_features / 2)
    """``activation(gate) * value`` of the halves of a layer's outputs, in one launch on the current stream.

    Its rows are normalized, with ``weight`` and ``bias``, where ``eps`` is not None. ``offset`` is the layer's bias, ``gate`` the
    index of the gate among the halves.

    Raises:
        BackendError: no kernel runs these factors; ``gated_linear_obstacle`` tells beforehand.
    """
    device_index = x.device.index
    found = _gated_linear(tuple(factor.shape for factor in factors), mode, eps is not None, device_index, rows_bucket(x.shape[0]))
    meet(found, x)
    left, right = factors

    def make() -> tuple[Tensor, ...]:
        halves = [part.detach().chunk(2, dim=dim) for part, dim in ((left, 1), (offset, 0)) if part is not None]
        of_left, *of_offset = [torch.cat((each[gate], each[1 - gate]), dim=1 - index) for index, each in enumerate(halves)]
        pairs, columns = fold([(of_left, right)], of_offset, weight, bias)
        image = found.kernel.pack(pairs)
        if eps is not None:
            return image, with_sums(columns, pairs, dtype_of(mode))
        return (image,) if columns is None else (image, columns.to(dtype_of(mode)))

    sources = (left, right, *(part for part in (offset, weight, bias) if part is not None))
    packed, early = derived_for_launch((found, gate, offset is None, weight is None, bias is None), sources, make)
    return found.kernel.run(x, packed[0], packed[1] if len(packed) > 1 else None, None, activation, eps or 0.0, early=early)


gated_linear_operator = Operator(
    "gated_linear(Tensor x, Tensor? weight, Tensor? bias, float? eps, Tensor[] factors, Tensor? offset, int gate, str activation, "
    "str mode) -> Tensor",
    run_gated_linear,
    lambda x, given: rows_like(x, architecture_of(given.factors).out_features // 2),
)
