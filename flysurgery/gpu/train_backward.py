"""The backward pass of linears that share x: for each factor one launch for the chain of gradients, and one for its own gradient."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.gpu.configured import GRADIENT, SINGLE, factor_grad, joined_pattern, single_factor
from flysurgery.gpu.factor_grad import GradientSplits, sum_of_splits
from flysurgery.gpu.gather import Packer, can_gather
from flysurgery.gpu.kernel import Prepared, Rows, Series, current_stream, in_rows
from flysurgery.gpu.modes import HALVES
from flysurgery.gpu.table import TunedCase
from flysurgery.gpu.weight_cache import derived
from flysurgery.patterns import Architecture, Pattern

_ALIGNMENT = 256


class _Plan(NamedTuple):
    """The launches of a call, and the memory that they need."""

    launches: Series
    offsets: list[int]  # into the memory of the call: bytes
    memory_bytes: int


class Chain:
    """The kernels of the backward pass of several linears of one architecture that share x, for one mode and device.

    The inputs of all factors but the last are computed again from x instead of being kept from the forward pass. For q, k and v of a
    ViT-S/16 this saves three quarters of the memory of x. Inputs at most half as wide as x, as in the second layer of its feed-forward
    blocks, are kept (``keeps``): writing and reading them takes less time than reading x twice.
    """

    def __init__(self, architecture: Architecture, mode: str, linears: int, device_index: int, rows: int) -> None:
        self.architecture, self.mode, self.linears, self.device_index = architecture, mode, linears, device_index
        patterns = architecture.patterns
        last = patterns[-1].transpose
        summed = Pattern(last.a, last.b, linears * last.c, last.d)
        self._inputs = [single_factor(pattern, mode, device_index, rows) for pattern in reversed(patterns[1:])]
        self._outputs = [single_factor(pattern.transpose, mode, device_index, rows) for pattern in patterns[:-1]]
        self._sum = single_factor(summed, mode, device_index, rows, segments=linears)
        self._wide_sum = single_factor(summed, mode, device_index, rows, segments=linears, wide=True)
        eights = mode in HALVES and patterns[-1].b * patterns[-1].d % 8 == 0
        self._joined = [*[1] * (len(patterns) - 1), linears if eights else 1]  # of the last factor, all linears meet the same x
        self._gradients = [factor_grad(p, mode, device_index, rows, joined) for p, joined in zip(patterns, self._joined, strict=True)]
        self._products = [*(pattern for pattern in patterns[1:]), *(pattern.transpose for pattern in patterns[:-1]), summed]
        self.pack = Packer(self._pack, mode)
        self.images = len(self._products)
        self.keeps = keeps_inputs(architecture, linears)
        self._shapes = [(linears * a, b, c, d) for a, b, c, d in (pattern.factor_shape for pattern in patterns)]
        self._plans: dict[tuple[Hashable, ...], _Plan] = {}

    @property
    def takes_wide(self) -> bool:
        """Whether the gradient of x may be float32 where x is in halves: that takes more shared memory."""
        return self._wide_sum.fits

    @property
    def sums_dy(self) -> bool:
        """Whether ``queue`` gives gradients of biases."""
        return self._gradients[0].sums_dy

    def cases(self, rows: int) -> list[TunedCase]:
        """The cases to autotune for calls with this many rows: one for each kind of launch."""
        wide = [joined_pattern(pattern, joined) for pattern, joined in zip(self.architecture, self._joined, strict=True)]
        return [*self._cases(SINGLE, self._products, rows), *self._cases(GRADIENT, wide, rows)]

    def input_cases(self, rows: int) -> list[TunedCase]:
        """Those of ``input_launches``."""
        return self._cases(SINGLE, self.architecture.patterns[1:], rows)

    def _cases(self, kernel: str, patterns: Iterable[Pattern], rows: int) -> list[TunedCase]:
        device = torch.cuda.get_device_name(self.device_index)
        return [TunedCase(device, kernel, Architecture((pattern,)), self.mode, 1, rows) for pattern in patterns]

    def _pack(self, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """An image a launch: of the factors but the leftmost, from right to left, then of all transposed, from left to right."""
        length = len(self.architecture)
        places = [factors[place::length] for place in range(length)]  # of each place in the product, the factors of all linears
        images = [torch.cat([single.pack(factor) for factor in own]) for single, own in zip(self._inputs, places[:0:-1], strict=True)]
        for single, own in zip(self._outputs, places[:-1], strict=True):
            images.append(torch.cat([single.pack(factor.transpose(1, 2)) for factor in own]))
        joined = torch.cat([factor.transpose(1, 2) for factor in places[-1]], dim=2)
        return (*images, self._sum.pack(joined))

    def input_launches(self, x: Rows) -> list[tuple[Prepared, Rows]]:
        """The launches that compute the inputs of all factors but the last from x of this layout, the rightmost first, with their layouts.

        A launch takes the addresses of its input, of an image, of no bias, and of its output.
        """
        found: list[tuple[Prepared, Rows]] = []
        for single, features in zip(self._inputs, reversed(self.architecture.inner_features), strict=True):
            launch, wide = single.prepared(x, self.linears, self.device_index), self.linears * features
            x = Rows(x.rows, wide, wide, 0, x.dtype)
            found.append((launch, x))
        return found

    def inputs(
        self,
        x: Tensor,  # shape: (rows, in_features)
        images: Sequence[Tensor],  # the first of what ``pack`` gives
    ) -> list[Tensor]:  # shapes: (rows, linears * features)
        """The inputs of all factors but the last, left to right."""
        found: list[Tensor] = []
        for single, image in zip(self._inputs, images, strict=True):
            x = single.run(x, image, None, self.linears)
            found.insert(0, x)
        return found

    def run(
        self,
        dy: Tensor,  # shape: (*batch, linears * out_features)
        x: Tensor,  # shape: (*batch, in_features)
        factors: tuple[Tensor, ...],  # shapes: (a, b, c, d), left to right; of several linears one after the other
        kept: Sequence[Tensor],  # what ``inputs`` gave, or nothing
        with_input: bool,
        with_bias: bool,
    ) -> list[Tensor]:
        """The gradients of all linears' factors of each place in the product, of their biases if asked for, and of x if asked for.

        The gradients of one place, or of the biases, follow each other along the first dimension. That of x has the dtype of x. Factors
        change at every step, so they are packed anew where that takes one launch; otherwise the cache is used.
        """
        linears, count = self.linears, len(self._shapes)
        shapes = [*self._shapes, (dy.shape[-1],)] if with_bias else self._shapes
        dtype = torch.promote_types(x.dtype, torch.float32)
        found = [x.new_empty(*shape, dtype=dtype) for shape in shapes]
        dx = x.new_empty(*x.shape) if with_input else None
        results = found if dx is None else [*found, dx]
        if x.numel() == 0:
            return [gradient.zero_() for gradient in results]
        steps = [(gradient.data_ptr(), gradient.nbytes // linears) for gradient in found]
        addresses = [start + n * step for n in range(linears) for start, step in steps[:count]]
        if self.sums_dy:
            addresses += [start + n * step for start, step in steps[count:] for n in range(linears)]
        operands, gather = [*map(Tensor.data_ptr, kept)], self.pack.gather
        if gather is not None and can_gather(factors, self.mode):
            self.queue(dy, x, operands, addresses, dx, [gather.table_at, *map(Tensor.data_ptr, factors)], factors[0].dtype)
        else:  # a table that is built here needs memory that outlives the call
            images = derived(self.pack, factors, lambda: self.pack(factors))
            self.queue(dy, x, [*map(Tensor.data_ptr, images), *operands], addresses, dx)
        if with_bias and not self.sums_dy:
            torch.sum(dy.reshape(-1, dy.shape[-1]), 0, out=found[count])
        return results

    def queue(
        self,
        dy: Tensor,  # shape: (*batch, linears * out_features)
        x: Tensor,  # shape: (*batch, in_features), a row at least
        operands: Sequence[int],  # the addresses of what ``pack`` gives, then of the inputs of all factors but the last, or not
        gradients: Sequence[int],  # those of the factors' gradients, of one linear after the other, and of the biases' if wanted
        dx: Tensor | None,  # shape: (*batch, in_features), contiguous; of the dtype of x, or float32 where ``takes_wide``
        sources: Sequence[int] = (),  # the addresses of the table that packs, and of the factors, in place of what ``pack`` gives
        source: torch.dtype | None = None,  # the factors' dtype there
    ) -> None:
        """Write the gradients, float32 where x is in halves, on the current stream. Biases need ``sums_dy``."""
        x_at, dy_at = x.data_ptr(), dy.data_ptr()
        kept, dx_dtype = len(operands) > (0 if sources else self.images), None if dx is None else dx.dtype
        key = (x.shape, x.stride(), x_at % 16, x.dtype, dy.stride(), dy_at % 16, len(gradients), dx_dtype, kept, source)
        plan = self._plans.get(key)
        if plan is None:
            (own_x, at_x), (own_dy, at_dy) = in_rows(x), in_rows(dy)
            if own_x is not x or own_dy is not dy:
                self.queue(own_dy, own_x, operands, gradients, dx, sources, source)
                return
            with_bias, wide = len(gradients) > self.linears * len(self._shapes), dx_dtype not in (None, x.dtype)
            plan = self._plans[key] = self._plan(at_x, at_dy, dx is not None, with_bias, wide, kept, source)
        memory = x.new_empty(plan.memory_bytes, dtype=torch.uint8)
        start = memory.data_ptr()
        dx_at = 0 if dx is None else dx.data_ptr()
        places = [start + offset for offset in plan.offsets]
        plan.launches(current_stream(x.get_device()), 0, x_at, dy_at, dx_at, *places, *operands, *gradients, *sources)

    def _plan(self, x: Rows, dy: Rows, with_input: bool, with_bias: bool, wide: bool, kept: bool, source: torch.dtype | None) -> _Plan:
        """The launches for x and dy of these layouts.

        The memory of the call holds the inputs of all factors but the last, unless they were kept, and later their gradients in the
        same place. It also holds the gradients of splits of the rows, which one launch adds for all factors and biases, and the images,
        where the first launch packs them from factors of the dtype ``source``.
        """
        patterns, linears, device = self.architecture.patterns, self.linears, self.device_index
        last = len(patterns) - 1
        inner = [Rows(x.rows, linears * n, linears * n, 0, x.dtype) for n in self.architecture.inner_features]
        at_inputs, at_gradients = [*inner, x], [dy, *inner]
        inputs, gradients = [*(f"kept {place}" if kept else place for place in range(last)), "x"], ["dy", *range(last)]
        images = iter([f"image {index}" for index in range(self.images)])
        launches: list[tuple[Prepared, tuple[Hashable, ...]]] = []
        for place, (launch, _), image in zip(reversed(range(last)), self.input_launches(x), images, strict=False):
            if not kept:
                launches.append((launch, (inputs[place + 1], image, None, inputs[place])))
        element = torch.promote_types(x.dtype, torch.float32).itemsize
        sizes = [_aligned(at.rows * at.features * at.dtype.itemsize) for at in inner]
        *offsets, workspace = accumulate(sizes, initial=0)
        offsets.append(workspace)
        of_factors: list[list[GradientSplits]] = []
        of_biases: list[GradientSplits] = []
        size = 0
        for place, gradient in enumerate(self._gradients):
            pattern, summed = patterns[place], with_bias and place == 0 and self.sums_dy
            product, splits, step, behind = gradient.prepared(at_inputs[place], at_gradients[place], linears, summed, device)
            launches.append((product, (inputs[place], gradients[place], f"splits {place}", f"splits of biases {place}")))
            first = size // element
            of_factors.append([GradientSplits(first + n * pattern.nnz, splits, step, pattern.nnz) for n in range(linears)])
            if summed:
                width = pattern.out_features
                of_biases = [GradientSplits(first + behind + n * width, splits, step, width) for n in range(linears)]
            offsets += [workspace + size, workspace + size + behind * element]
            size += _aligned(splits * step * element)
            if place < last:
                single = self._outputs[place]
                launches.append((single.prepared(at_gradients[place], linears, device), (gradients[place], next(images), None, place)))
        parts = [part for linear in zip(*of_factors, strict=True) for part in linear] + of_biases
        results = [f"gradient {index}" for index in range(len(parts))]
        launches.append((sum_of_splits(parts, device), ("workspace", *results)))
        if with_input:
            total = self._wide_sum if wide else self._sum
            launches.append((total.prepared(at_gradients[last], 1, device), (gradients[last], next(images), None, "input")))
        names = [None, "x", "dy", "input", *range(last), "workspace"]
        names += [name for place in range(last + 1) for name in (f"splits {place}", f"splits of biases {place}")]
        names += [*(f"image {index}" for index in range(self.images)), *(f"kept {place}" for place in range(last) if kept), *results]
        size = _aligned(workspace + size)
        if source is not None:
            gather = self.pack.gather
            assert gather is not None, "the table's address was given"
            sources = [f"source {index}" for index in range(linears * len(patterns))]
            launches.insert(0, (gather.prepared(source), (*sources, "table", "image 0")))
            names += ["table", *sources]
            offsets += [size + offset for offset in gather.offsets]
            size += gather.size * x.dtype.itemsize
        series = Series([(launch, [*map(names.index, operands)]) for launch, operands in launches], len(names))
        return _Plan(series, offsets, size)


def keeps_inputs(architecture: Architecture, linears: int) -> bool:
    """See ``Chain``."""
    return linears == 1 < len(architecture) and 2 * sum(architecture.inner_features) <= architecture.in_features


def _aligned(size: int) -> int:
    return ceil(size / _ALIGNMENT) * _ALIGNMENT
