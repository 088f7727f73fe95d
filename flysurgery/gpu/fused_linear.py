"""The fused two-factor layer in one launch, with what stands before and behind it: ``act(x (K1 K2)ᵀ + bias) + residual``, or gated."""

from collections.abc import Sequence
from functools import cache, cached_property, lru_cache

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.device import multiprocessors_of, shared_limit_of
from flysurgery.gpu.gather import Packer
from flysurgery.gpu.kernel import Kernel, Sizes, current_stream, float_bits, load_kernel, rows_and_stride
from flysurgery.gpu.modes import dtype_of, macros
from flysurgery.gpu.operands import FusedFactors, Norm, present, sent_through
from flysurgery.gpu.recording import fresh
from flysurgery.gpu.tiling import FusedConfig, Tiling, configs, every_config, fits, tiling
from flysurgery.gpu.tuned_table import TunedCase, chosen_by_table, meet, rows_bucket, tuned_config
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.gpu.weight_image import pack, panel_indices
from flysurgery.patterns import Architecture

KINDS = {"fused_linear": (False, False), "norm_linear": (True, False), "gated_linear": (False, True), "norm_gated_linear": (True, True)}
"""The kernel's names in tables: whether a norm stands before the layer, and whether its outputs are a gate and a value."""

_ALIGNMENT = 16


@lru_cache(maxsize=4096)
def fused_reason(
    architecture: Architecture, mode: str, linears: int, shared_limit: int, *, norm: bool = False, gated: bool = False
) -> str | None:
    """Why the fused kernel cannot run so many linears of an architecture that read the same x, or None where it can.

    ``norm``: a layer norm stands before them. ``gated``: as for ``FusedLinear``. ``shared_limit``: bytes of shared memory of a block.
    """
    tile = tiling(architecture, mode, linears, norm=norm, gated=gated)
    if isinstance(tile, str):
        return tile
    if next(every_config(tile, shared_limit), None) is None:
        return f"no tile of {linears} x {architecture} in mode {mode} fits in the registers and {shared_limit} bytes of shared memory"
    return None


class FusedLinear:
    """A fused layer of one tiling and one of its ``configs`` on one device.

    The outputs of linears that share x lie side by side. With a norm before them the sum of each output's weights lies behind the bias.
    Gated, the outputs are a gate and then a value, of equal size, and the result is ``activation(gate) * value``.

    Cost of a call of R rows: ``R * flops_per_row`` operations (three times in mode ``fp32``) and
    ``R * (in_features + linears * out_features)`` elements moved, plus the weights once a block from the L2 cache.
    """

    def __init__(self, tile: Tiling, config: FusedConfig, device_index: int) -> None:
        self.config, self.tile, self.device_index = config, tile.of(config), device_index
        self._out_features = tile.out_features // (2 if tile.gated else 1)
        self._launchers: dict[tuple[int, str, bool, bool], tuple[Kernel, Sizes]] = {}

    def cases(self, rows: int) -> list[TunedCase]:
        """The case to autotune for calls with this many rows."""
        tile = self.tile
        name, linears = torch.cuda.get_device_name(self.device_index), tile.linears * tile.blocks
        return [TunedCase(name, _name_of(tile.norm, tile.gated), Architecture((tile.second, tile.first)), tile.mode, linears, rows)]

    @cached_property
    def _indices(self) -> tuple[Tensor, Tensor]:
        first, second = panel_indices(self.tile, self.config)
        device = torch.device("cuda", self.device_index)
        return torch.from_numpy(first).long().to(device), torch.from_numpy(second).long().to(device)

    @cached_property
    def packer(self) -> Packer:
        """What ``pack`` gives for left and right factors in turn, by one launch where weights are only moved and rounded to halves."""
        return Packer(lambda factors: (self.pack([*zip(factors[::2], factors[1::2], strict=True)]),), self.tile.mode)

    def pack(self, linears: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """The weights' image, uint8, for ``run``; each linear gives its left and its right factor, canonical (a, b, c, d)."""
        together = self.tile.linears
        parts = [linears[start : start + together] for start in range(0, len(linears), together)]
        return torch.cat([pack(self.tile, part, self._indices) for part in parts])

    def run(
        self,
        x: Tensor,  # shape: (*batch, in_features)
        image: Tensor,
        bias: Tensor | None = None,  # shape: (linears * out_features,), and as much behind it where scaled or behind a norm
        residual: Tensor | None = None,  # shape: (*batch, linears * out_features)
        activation: str = "none",
        eps: float = 0.0,
        scaled: bool = False,
        early: bool = False,
    ) -> Tensor:  # shape: (*batch, linears * out_features), half of them where gated
        """Launch on the current stream. Tensors that the kernel cannot read in place are copied first. ``eps`` is the norm's.

        ``early``: image and bias were packed before the last queued kernel, and are read while that kernel still runs.
        """
        x, rows, stride = _in_vectors(x)
        y = fresh((*x.shape[:-1], self._out_features), x.dtype, x.device)
        if rows == 0:
            return y
        bias = None if bias is None else readable(bias)
        residual_stride = 0
        if residual is not None:
            residual, _, residual_stride = _in_vectors(residual)
        key = (rows, activation, scaled, residual is not None)
        kernel, sizes = self._launchers.get(key) or self._launcher(*key)
        numbers = rows, stride, residual_stride, float_bits(eps)
        kernel.launch(*sizes, current_stream(x.device.index), x, image, bias, residual, y, *numbers, early=early)
        return y

    def _launcher(self, rows: int, activation: str, scaled: bool, residual: bool) -> tuple[Kernel, Sizes]:
        """The kernel for an epilogue, and the sizes of its launch for this many rows; remembered, as a lookup costs more than a launch."""
        tile, config, index = self.tile, self.config, self.device_index
        epilogue = macros(activation=activation, scaled=scaled, residual=residual)
        kernel = load_kernel("fused_linear", {**tile.defines(config), **epilogue}, index)
        grid = (min(-(-rows // 64), max(multiprocessors_of(index) // tile.blocks, 1)), tile.blocks, 1)
        found = self._launchers[rows, activation, scaled, residual] = kernel, (grid, (32 * config.warps, 1, 1), tile.shared_bytes(config))
        return found


@chosen_by_table
def fused_kernel(
    architecture: Architecture, mode: str, linears: int, rows: int, *, norm: bool = False, gated: bool = False, device_index: int
) -> FusedLinear:
    """The kernel for this many rows, as ``rows_bucket`` gives them, in its autotuned configuration, or in the first one.

    It is the same object for the same configuration. So different numbers of rows share packed weights where they can.

    Raises:
        BackendError: there is none; ``fused_reason`` tells beforehand.
    """
    tile, limit = tiling(architecture, mode, linears, norm=norm, gated=gated), shared_limit_of(device_index)
    if isinstance(tile, str):
        raise BackendError(tile)
    fields = tuned_config(_name_of(norm, gated), architecture, mode, linears, device_index, rows)
    try:
        config = FusedConfig(**fields) if fields else None
    except TypeError:  # of another version of the kernel
        config = None
    if config is None or not fits(tile, config, limit):
        config = next(iter(configs(tile, limit)), None)
    if config is None:
        raise BackendError(f"no configuration of the fused kernel fits {tile.second}, {tile.first} in mode {tile.mode}")
    return _kernel(tile, config, device_index)


def _name_of(norm: bool, gated: bool) -> str:
    return next(name for name, kind in KINDS.items() if kind == (norm, gated))


_kernel = cache(FusedLinear)


def run_fused_linears(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    group: Sequence[FusedFactors],  # of one architecture, with a bias each or none
    gate: int | None,
    activation: str,
    residual: Tensor | None,  # shape: (*batch, linears * out_features)
    scale: Tensor | None,  # shape: (linears * out_features,)
    mode: str,
) -> Tensor:  # shape: (*batch, linears * out_features), half of them where gated
    """``residual + activation(scale * group(norm(x)))``, the linears' outputs side by side, in one launch on the current stream.

    The norm's weight is multiplied into the right factors, its bias by the factors and added to the biases, both before rounding. Where
    ``gate`` is not None, the outputs of one linear are two halves, and the result is ``activation(gate) * value``; it is the index of the
    gate. A norm or a gate excludes ``scale``.

    Raises:
        BackendError: no kernel runs these factors; ``fused_reason`` tells beforehand.
    """
    affine = norm or Norm(None, None, 0.0)
    rows, kinds = rows_bucket(x.numel() // x.shape[-1]), {"norm": norm is not None, "gated": gate is not None}
    kernel = fused_kernel(group[0].architecture, mode, len(group), rows, **kinds, device_index=x.device.index)
    meet(kernel.cases, x)
    biases = present(*[member.bias for member in group])

    def make() -> tuple[Tensor, ...]:
        pairs, offset = [(left, right) for left, right in (member.factors for member in group)], torch.cat(biases) if biases else None
        if gate is not None:
            pairs = [(_gate_first(left, 1, gate), right) for left, right in pairs]
            offset = None if offset is None else _gate_first(offset, 0, gate)
        if norm is not None:
            pairs, offset = _fold(norm, pairs, offset)
        behind = _sums(pairs, dtype_of(mode)) if norm is not None else None if scale is None else scale.detach().double()
        if behind is not None:
            offset = torch.cat((torch.zeros_like(behind) if offset is None else offset, behind))
        (image,) = kernel.packer(tuple(factor for pair in pairs for factor in pair))
        return image, *([] if offset is None else [offset.to(dtype_of(mode))])

    sources = present(*[part for member in group for part in member.tensors], *affine.tensors, scale)
    token = kernel, gate, len(biases), affine.form, scale is None
    (image, *behind), early = derived_for_launch(token, sources, make)
    return kernel.run(x, image, next(iter(behind), None), residual, activation, affine.eps, scaled=scale is not None, early=early)


def _gate_first(rows: Tensor, dim: int, gate: int) -> Tensor:
    """The halves of a factor's outputs, or of a bias, the gate before the value."""
    halves = rows.detach().chunk(2, dim=dim)
    return torch.cat((halves[gate], halves[1 - gate]), dim=dim)


Pairs = Sequence[tuple[Tensor, Tensor]]
"""A left and a right factor of each linear, shapes (a, b, c, d)."""


def _fold(
    norm: Norm,
    pairs: Pairs,
    offset: Tensor | None,  # shape: (linears * out_features,)
) -> tuple[list[tuple[Tensor, Tensor]], Tensor | None]:  # shape of the latter: (linears * out_features,)
    """Factors and offset, float64, that give for a normalized row what the linears behind the norm give; None for no offset."""
    lefts, rights = ([factor.detach().double() for factor in side] for side in zip(*pairs, strict=True))
    folded = [norm.folded_into(right, left) for left, right in zip(lefts, rights, strict=True)]
    sent = present(*[shift for _, shift in folded])
    offset = None if offset is None else offset.detach().double()
    if sent:
        offset = torch.cat(sent) if offset is None else torch.cat(sent) + offset
    return [(left, right) for left, (right, _) in zip(lefts, folded, strict=True)], offset


def _sums(pairs: Pairs, dtype: torch.dtype) -> Tensor:  # shape: (linears * out_features,)
    """The sum of each output's weights, rounded as the kernel has them: what a row's mean is multiplied with."""
    rounded = [(left.to(dtype).double(), right.to(dtype).double()) for left, right in pairs]
    a, _, c, d = rounded[0][1].shape
    ones = rounded[0][1].new_ones(a * c * d)
    return torch.cat([sent_through(ones, right, left) for left, right in rounded])


def readable(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its features are not adjacent, or its rows do not have one stride of a multiple of 16 bytes."""
    return _in_vectors(tensor)[0]


def packed(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its elements do not lie one after the other, from a multiple of 16 bytes on."""
    placed = tensor.is_contiguous() and not tensor.data_ptr() % _ALIGNMENT
    return tensor if placed else tensor.clone(memory_format=torch.contiguous_format)


def strides_of(*rows: Tensor | None) -> list[int]:
    """Bytes from row to row of matrices; 0 where there is none."""
    return [0 if part is None else part.stride(0) * part.element_size() for part in rows]


def _in_vectors(tensor: Tensor) -> tuple[Tensor, int, int]:
    """A readable tensor, its rows, and the bytes from one to the next."""
    placed, width = rows_and_stride(tensor), tensor.element_size()
    if placed is None or (tensor.data_ptr() | placed[1] * width) % _ALIGNMENT:
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        placed = tensor.numel() // tensor.shape[-1], tensor.shape[-1]
    return tensor, placed[0], placed[1] * width
