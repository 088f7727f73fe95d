"""The backward pass of linears that share x: one launch a factor for the chain of gradients, one for those of the weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from math import ceil
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.ops.cuda.configured import GRADIENT, SINGLE, factor_grad, joined_pattern, single_factor
from flysurgery.ops.cuda.gather import Packer
from flysurgery.ops.cuda.kernel import Prepared, Rows, address_of, current_stream, in_rows
from flysurgery.ops.cuda.modes import HALVES
from flysurgery.ops.cuda.table import TunedCase
from flysurgery.patterns import Architecture, Pattern

_ALIGNMENT = 256


class _Plan(NamedTuple):
    """The launches of a call, each with what picks its operands out of all addresses, and the memory that they need."""

    launches: list[tuple[Prepared, Callable[[list[int]], tuple[int, ...]]]]
    offsets: list[int]  # into the memory of the call: bytes
    memory_bytes: int


class Chain:
    """The kernels of the backward pass of several linears of one architecture that share x, for one mode and device.

    The inputs of all factors but the last are computed again from x rather than kept from the forward pass, which saves, for q, k
    and v of a ViT-S/16, three quarters of the memory that x takes. Where they are at most half as wide as x, as in the second layer
    of its feed-forward blocks, they are kept (``keeps``): to read x twice takes longer than to write and read them.
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
        self.keeps = linears == 1 < len(patterns) and 2 * sum(architecture.inner_features) <= architecture.in_features
        self._shapes = [(linears * a, b, c, d) for a, b, c, d in (pattern.factor_shape for pattern in patterns)]
        self._plans: dict[tuple[Rows, Rows, bool, bool, bool, bool], _Plan] = {}

    def cases(self, rows: int) -> list[TunedCase]:
        """What to autotune for calls of so many rows: one case a kind of launch."""
        device = torch.cuda.get_device_name(self.device_index)
        found = [TunedCase(device, SINGLE, Architecture((pattern,)), self.mode, 1, rows) for pattern in self._products]
        wide = [joined_pattern(pattern, joined) for pattern, joined in zip(self.architecture, self._joined, strict=True)]
        return [*found, *(TunedCase(device, GRADIENT, Architecture((pattern,)), self.mode, 1, rows) for pattern in wide)]

    def _pack(self, factors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """An image a launch: of the factors but the leftmost, from right to left, then of all transposed, from left to right."""
        length = len(self.architecture)
        places = [factors[place::length] for place in range(length)]  # of each place in the product, the factors of all linears
        images = [torch.cat([single.pack(factor) for factor in own]) for single, own in zip(self._inputs, places[:0:-1], strict=True)]
        for single, own in zip(self._outputs, places[:-1], strict=True):
            images.append(torch.cat([single.pack(factor.transpose(1, 2)) for factor in own]))
        joined = torch.cat([factor.transpose(1, 2) for factor in places[-1]], dim=2)
        return (*images, self._sum.pack(joined))

    def inputs(
        self,
        x: Tensor,  # shape: (*batch, in_features)
        images: Sequence[Tensor | int],  # what ``pack`` gives, or the addresses
    ) -> list[Tensor]:  # shapes: (*batch, linears * inner_features)
        """What flows into each factor but the last, the leftmost first, for ``run`` to take."""
        found: list[Tensor] = []
        for single, image in zip(self._inputs, images, strict=False):
            x = single.run(x, image, None, self.linears)
            found.insert(0, x)
        return found

    def run(
        self,
        dy: Tensor,  # shape: (*batch, linears * out_features)
        x: Tensor,  # shape: (*batch, in_features)
        images: Sequence[Tensor | int],  # what ``pack`` gives, or the addresses
        with_input: bool,
        with_bias: bool,
        wide: bool = False,
        kept: Sequence[Tensor] = (),  # what ``inputs`` gave, or nothing
    ) -> list[Tensor]:
        """The gradients of all linears' factors of each place in the product, of their biases if asked for, and of x if asked for.

        Those of one place, or of the biases, follow each other along the first dimension. That of x has its dtype; if ``wide`` it is
        float32, where the kernel's shared memory suffices for that.
        """
        (x, at_x), (dy, at_dy) = in_rows(x), in_rows(dy)
        wide = wide and self._wide_sum.fits
        shapes = [*self._shapes, (at_dy.features,)] if with_bias else self._shapes
        dtype = torch.promote_types(x.dtype, torch.float32)
        found = [torch.empty(shape, dtype=dtype, device=x.device) for shape in shapes]
        if with_input:
            found.append(x.new_empty(x.shape, dtype=torch.float32 if wide else x.dtype))
        if at_x.rows == 0:
            return [gradient.zero_() for gradient in found]
        key = (at_x, at_dy, with_input, with_bias, wide, bool(kept))
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._plan(*key)
        memory = torch.empty(plan.memory_bytes, dtype=torch.uint8, device=x.device)
        start = memory.data_ptr()
        addresses = [0, x.data_ptr(), dy.data_ptr()]
        addresses += [start + offset for offset in plan.offsets]
        addresses += map(address_of, images)
        addresses += map(Tensor.data_ptr, (*found, *kept))
        stream = current_stream(x.device.index)
        for launch, operands in plan.launches:
            launch(stream, *operands(addresses))
        if with_bias and not self._gradients[0].sums_dy:
            torch.sum(dy.reshape(-1, dy.shape[-1]), 0, out=found[len(self._gradients)])
        return found

    def _plan(self, x: Rows, dy: Rows, with_input: bool, with_bias: bool, wide: bool, kept: bool) -> _Plan:
        """The launches for x and dy that lie so.

        What flows into a factor but the last, unless it was kept, and later its gradient, which takes the same place, lie in memory of
        the call. So do the gradients of splits of the rows.
        """
        patterns, linears, device = self.architecture.patterns, self.linears, self.device_index
        last = len(patterns) - 1
        inner = [Rows(x.rows, linears * n, linears * n, 0, x.dtype) for n in self.architecture.inner_features]
        at_inputs, at_gradients = [*inner, x], [dy, *inner]
        inputs, gradients = [*(f"kept {place}" if kept else place for place in range(last)), "x"], ["dy", *range(last)]
        images = iter([f"image {index}" for index in range(self.images)])
        launches: list[tuple[Prepared, tuple[Hashable, ...]]] = []
        for place, single, image in zip(reversed(range(last)), self._inputs, images, strict=False):
            if not kept:
                launches.append((single.prepared(at_inputs[place + 1], linears, device), (inputs[place + 1], image, None, inputs[place])))
        split_bytes, of_factors = 0, 0
        for place, gradient in enumerate(self._gradients):
            summed = with_bias and place == 0 and gradient.sums_dy
            product, total, size, own = gradient.prepared(at_inputs[place], at_gradients[place], linears, summed, device)
            results = (f"factors {place}", "biases" if summed else None)
            if total is None:
                launches.append((product, (inputs[place], gradients[place], *results)))
            else:
                of_factors, split_bytes = own if summed else of_factors, max(split_bytes, 4 * size)
                launches.append((product, (inputs[place], gradients[place], "splits", "splits of biases")))
                launches.append((total, ("splits", *results)))
            if place < last:
                single = self._outputs[place]
                launches.append((single.prepared(at_gradients[place], linears, device), (gradients[place], next(images), None, place)))
        if with_input:
            total = self._wide_sum if wide else self._sum
            launches.append((total.prepared(at_gradients[last], 1, device), (gradients[last], next(images), None, "input")))
        sizes = [ceil(at.rows * at.features * at.dtype.itemsize / _ALIGNMENT) * _ALIGNMENT for at in inner]
        *offsets, splits = accumulate(sizes, initial=0)
        names = [None, "x", "dy", *range(last), "splits", "splits of biases", *(f"image {index}" for index in range(self.images))]
        names += [*(f"factors {place}" for place in range(last + 1)), *(["biases"] if with_bias else [])]
        names += [*(["input"] if with_input else []), *(f"kept {place}" for place in range(last))]
        return _Plan(
            launches=[(launch, itemgetter(*map(names.index, operands))) for launch, operands in launches],
            offsets=[*offsets, splits, splits + 4 * of_factors],
            memory_bytes=splits + split_bytes,
        )
