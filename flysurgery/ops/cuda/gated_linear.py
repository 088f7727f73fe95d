"""A gate and a value of two factors each, multiplied, in one launch, behind a layer norm or not, with their registered operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from flysurgery.ops.cuda.fused import ACTIVATIONS, FusedLinear, fused_reason
from flysurgery.ops.cuda.met import meet
from flysurgery.ops.cuda.modes import dtype_of
from flysurgery.ops.cuda.norm_linear import fold
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.table import TunedCase, rows_bucket, tuned_config
from flysurgery.ops.derived import derived
from flysurgery.patterns import Architecture

GATED_LINEAR, NORM_GATED_LINEAR = "gated_linear", "norm_gated_linear"


@lru_cache(maxsize=4096)
def gated_linear_obstacle(
    shapes: tuple[tuple[int, ...], ...], linears: int, mode: str, activation: str, norm: bool, device_index: int
) -> str | None:
    """Why no launch computes a gate and a value of factors of these shapes; None where one does.

    ``linears`` is 2 where each has factors of its own, 1 where they are the halves of one layer's outputs.
    """
    if activation not in ACTIVATIONS:
        return f"the fused kernel has the activations {', '.join(ACTIVATIONS)}, not '{activation}'"
    architecture = half_architecture(shapes) if linears == 1 else Architecture.of(*shapes)
    if isinstance(architecture, str):
        return architecture
    return fused_reason(architecture, mode, linears, shared_limit_of(device_index), norm=norm, gated=True)


def half_architecture(shapes: Sequence[Sequence[int]]) -> Architecture | str:
    """The architecture of either half of a layer's outputs, which have all factors but the left one in common; or why there is none."""
    (a, b, c, d), *others = (tuple(shape) for shape in shapes)
    if a != 1 or b % 2:
        return (
            f"the halves of a layer's outputs are products by themselves where its left factor has a = 1 and an even b, got {(a, b, c, d)}"
        )
    return Architecture.of((1, b // 2, c, d), *others)


class GatedLinears:
    """The kernel of a gate and a value, as autotuning meets it."""

    def __init__(self, architecture: Architecture, linears: int, mode: str, norm: bool, device_index: int, rows: int) -> None:
        self.architecture, self.linears, self.mode, self.norm, self.device_index = architecture, linears, mode, norm, device_index
        fields, kind = tuned_config(self.name, architecture, mode, linears, device_index, rows), {"norm": norm, "gated": True}
        config = FusedLinear.tuned(architecture, mode, linears, fields, **kind, device_index=device_index) if fields else None
        self.kernel = FusedLinear(architecture, mode, linears, config=config, **kind, device_index=device_index)

    @property
    def name(self) -> str:
        """The kernel's name in tables."""
        return NORM_GATED_LINEAR if self.norm else GATED_LINEAR

    def cases(self, rows: int) -> list[TunedCase]:
        """What to autotune for calls of so many rows."""
        return [TunedCase(torch.cuda.get_device_name(self.device_index), self.name, self.architecture, self.mode, self.linears, rows)]


@lru_cache(maxsize=256)
def _gated_linears(shapes: tuple[torch.Size, ...], linears: int, mode: str, norm: bool, device_index: int, bucket: int) -> GatedLinears:
    architecture = half_architecture(shapes) if linears == 1 else Architecture.of(*shapes)
    assert isinstance(architecture, Architecture)  # else there was an obstacle
    return GatedLinears(architecture, linears, mode, norm, device_index, bucket)


def forget_gated_linears() -> None:
    """Choose kernels anew at the next call, after the table of configurations has changed."""
    _gated_linears.cache_clear()


def run_gated_linear(
    x: Tensor,  # shape: (rows, in_features)
    weight: Tensor | None,  # shape: (in_features,)
    bias: Tensor | None,  # shape: (in_features,)
    eps: float | None,
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left and right; of gate and value, or of one layer whose outputs are both
    biases: Sequence[Tensor],  # shapes: (out_features,), one a layer, or none
    gate: int,
    activation: str,
    mode: str,
) -> Tensor:  # shape: (rows, out_features)
    """``activation(gate) * value`` of rows, normalized where ``eps`` is not None, in one launch on the current stream.

    ``gate`` is the index of the gate among the two layers, or among the halves of the one's outputs.

    Raises:
        BackendError: no kernel runs these factors; ``gated_linear_obstacle`` tells beforehand.
    """
    device_index = x.device.index
    if device_index != torch.cuda.current_device():
        with torch.cuda.device(device_index):
            return run_gated_linear(x, weight, bias, eps, factors, biases, gate, activation, mode)
    shapes, linears = tuple(factor.shape for factor in factors[:2]), len(factors) // 2
    found = _gated_linears(shapes, linears, mode, eps is not None, device_index, rows_bucket(x.shape[0]))
    meet(found, x)
    sources = (*factors, *biases, *(part for part in (weight, bias) if part is not None))

    def make() -> tuple[Tensor, ...]:
        pairs, offsets = gate_and_value(factors, biases, gate)
        pairs, offset = fold(pairs, offsets, weight, bias)
        image = found.kernel.pack(pairs)
        return (image,) if offset is None else (image, offset.to(dtype_of(mode)))

    packed = derived((found, gate, weight is None, bias is None, len(biases)), sources, make)
    return found.kernel.run(x, packed[0], packed[1] if len(packed) > 1 else None, None, activation, eps or 0.0)


def gate_and_value(factors: Sequence[Tensor], biases: Sequence[Tensor], gate: int) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """The left and right factors of the gate and then of the value, and their biases, if any."""
    if len(factors) == 2:
        pairs = [(half, factors[1]) for half in factors[0].chunk(2, dim=1)]
        offsets = [half for bias in biases for half in bias.chunk(2)]
    else:
        pairs, offsets = [(factors[0], factors[1]), (factors[2], factors[3])], list(biases)
    return (pairs, offsets) if gate == 0 else (pairs[::-1], offsets[::-1])


def _fake_gated_linear(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    factors: Sequence[Tensor],
    biases: Sequence[Tensor],
    gate: int,
    activation: str,
    mode: str,
) -> Tensor:
    a, b, _, d = factors[0].shape
    return x.new_empty((x.shape[0], a * b * d * len(factors) // 4))


_library = torch.library.Library("flysurgery", "FRAGMENT")
_library.define(
    "gated_linear(Tensor x, Tensor? weight, Tensor? bias, float? eps, Tensor[] factors, Tensor[] biases, int gate, str activation, "
    "str mode) -> Tensor"
)
_library.impl("gated_linear", run_gated_linear, "CUDA")
torch.library.register_fake("flysurgery::gated_linear", _fake_gated_linear, lib=_library)
