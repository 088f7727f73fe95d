"""Linears in training. Their weights change at every step, so one launch packs them for both passes (in graphs for each pass)."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.gpu.doubt import doubt_trained
from flysurgery.gpu.gather import Gather, Packer, aligned
from flysurgery.gpu.gradients import chain_for
from flysurgery.gpu.kernel import Prepared, Series, current_device, current_stream, in_rows
from flysurgery.gpu.modes import HALVES
from flysurgery.gpu.product import Product
from flysurgery.gpu.run_product import product_for
from flysurgery.gpu.table import TunedCase, rows_bucket
from flysurgery.gpu.train_backward import Chain
from flysurgery.gpu.tuning_record import meet
from flysurgery.gpu.weight_cache import derived

_trained: dict[tuple[object, ...], Trained] = {}
_forgotten = 0


class _Plan(NamedTuple):
    """A forward pass: the launches that pack and multiply, and the offsets, in bytes, of their results in one piece of memory."""

    launches: Series
    size: int  # of the memory, elements
    offsets: list[int]  # of the images, then of the inputs that are kept
    behind: list[int]  # those of the backward pass
    results: list[tuple[int, ...]]  # shapes: of the product, then of the inputs that are kept


class Trained:
    """A product and its backward pass. Packing halves takes less time than looking them up in a cache.

    The parameters' shapes and dtypes are the same at each call.

    Args:
        product: that of all factors, or of the leftmost alone where the chain keeps its input.
    """

    def __init__(self, product: Product, chain: Chain, factors: int, with_bias: bool) -> None:
        self.product, self.chain, self.device_index = product, chain, product.device_index
        self._factors, self._with_bias = factors, with_bias
        self._keeps = len(product.architecture) < len(chain.architecture)
        self._multiplied = 1 if self._keeps else factors
        self.packer = Packer(self._pack, product.mode)
        self._kept = len(chain.architecture) - 1 if self._keeps else 0
        self._forward_packer = Packer(lambda sources: self._pack(sources)[: self._kept - chain.images], product.mode)
        self._plans: dict[tuple[Hashable, ...], _Plan] = {}
        self._apart_plans: dict[tuple[Hashable, ...], _Plan] = {}

    def cases(self, rows: int) -> list[TunedCase]:
        """The cases to autotune for a forward pass with this many rows; the backward pass gives its own."""
        return [*self.product.cases(rows), *(self.chain.input_cases(rows) if self._keeps else ())]

    def _pack(self, sources: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The images of the product, those of its biases, and those of the backward pass."""
        factors, biases = sources[: self._factors], sources[self._factors :]
        multiplied = self.product.pack_plainly(factors[: self._multiplied], biases, transposed=False)
        return (*multiplied, *self.chain.pack.plainly(factors))

    def forward(self, x: Tensor, parameters: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, list[int]] | None:
        """The product, as ``Product.run`` gives it, and the operands of ``backward`` besides x; None where no table packs the parameters.

        These operands are one piece of memory, with the weights for both passes and the inputs of factors that are kept, and the offsets
        of those for the backward pass.
        """
        gather = self.packer.gather or self.packer.gather_for(parameters)
        if gather is None or not all(map(Tensor.is_contiguous, parameters)):
            return None
        meet(self, x)
        x, x_at, plan = self._planned(self._plans, x, parameters, gather, self.chain.images)
        memory = x.new_empty(plan.size)
        start = memory.data_ptr()
        places = [start + offset for offset in plan.offsets]
        sources = map(Tensor.data_ptr, parameters)
        if not self.product.is_one_launch:
            plan.launches(current_stream(x.get_device()), 0, x_at, gather.table_at, *places, *sources)
            return self._by_pytorch(x, memory, gather), memory, plan.behind
        y = x.new_empty(*plan.results[0])
        plan.launches(current_stream(x.get_device()), 0, x_at, gather.table_at, *places, *sources, y.data_ptr())
        return y, memory, plan.behind

    def apart(
        self,
        x: Tensor,  # shape: (rows, in_features)
        parameters: tuple[Tensor, ...],
    ) -> list[Tensor]:
        """The product, then the inputs of factors that are kept, left to right. For graphs, in which each pass packs its own weights."""
        meet(self, x)
        gather = self._forward_packer.gather
        if gather is None or not self.product.is_one_launch or not all(map(Tensor.is_contiguous, parameters)):
            return self._apart_by_pytorch(x, parameters)
        x, x_at, plan = self._planned(self._apart_plans, x, parameters, gather, self._kept)
        images = x.new_empty(gather.size)
        start = images.data_ptr()
        y, *kept = found = [x.new_empty(*shape) for shape in plan.results]
        places = [start + offset for offset in gather.offsets]
        sources = map(Tensor.data_ptr, parameters)
        addresses = (x_at, gather.table_at, *places, *map(Tensor.data_ptr, kept), *sources, y.data_ptr())
        plan.launches(current_stream(x.get_device()), 0, *addresses)
        return found

    def _apart_by_pytorch(self, x: Tensor, parameters: tuple[Tensor, ...]) -> list[Tensor]:
        """The same where the product takes tensors, and at the first call, which builds the table for packing."""
        packer = self._forward_packer
        learnt = packer.gather is not None  # otherwise the table needs memory that outlives the call
        images = packer(parameters) if learnt else derived(packer, parameters, lambda: packer(parameters))
        own = len(images) - self._kept
        kept = self.chain.inputs(x, images[own:]) if self._keeps else []
        return [self.product.run(kept[0] if kept else x, images[:own], self._with_bias), *kept]

    def _by_pytorch(self, x: Tensor, memory: Tensor, gather: Gather) -> Tensor:
        """The product where it takes tensors."""
        *images, behind = memory.split_with_sizes([*gather.sizes, len(memory) - sum(gather.sizes)])
        if self._keeps:
            features = self.chain.architecture.inner_features[0]
            x = behind[: x.numel() // x.shape[-1] * features].view(*x.shape[:-1], features)
        return self.product.run(x, images[: -self.chain.images], self._with_bias)

    def _planned(
        self, plans: dict[tuple[Hashable, ...], _Plan], x: Tensor, parameters: Sequence[Tensor], gather: Gather, behind_product: int
    ) -> tuple[Tensor, int, _Plan]:
        """x as the product reads it, its address, and the plan for inputs like it."""
        at = x.data_ptr()
        key = x.shape, x.stride(), at % 16
        plan = plans.get(key)
        if plan is None:
            own = self.product.readable(x)
            if own is not x:
                return self._planned(plans, own, parameters, gather, behind_product)
            plan = plans[key] = self._plan(x, parameters, gather, behind_product)
        return x, at, plan

    def _plan(self, x: Tensor, parameters: Sequence[Tensor], gather: Gather, behind_product: int) -> _Plan:
        at, inner = in_rows(x)[1], self.chain.architecture.inner_features if self._keeps else ()
        images, sources = [f"image {n}" for n in range(len(gather.offsets))], [f"source {n}" for n in range(len(parameters))]
        kept = [f"kept {place}" for place in range(len(inner))]
        launches: list[tuple[Prepared, tuple[str | None, ...]]] = [(gather.prepared(parameters[0].dtype), (*sources, "table", images[0]))]
        flows = "x"
        if self._keeps:
            steps = zip(self.chain.input_launches(at), images[len(images) - behind_product :], reversed(kept), strict=False)
            for (launch, lies), image, result in steps:
                launches.append((launch, (flows, image, None, result)))
                flows, at = result, lies
        if self.product.is_one_launch:
            launch, operands = self.product.prepared(at)
            own = {"x": flows, "image": images[0], "bias": images[1] if self._with_bias else None, "y": "y", None: None}
            launches.append((launch, tuple(own[operand] for operand in operands)))
        names = [None, "x", "table", *images, *kept, *sources, *(["y"] if self.product.is_one_launch else [])]
        series = Series([(launch, [*map(names.index, operands)]) for launch, operands in launches], len(names))
        *behind, size = accumulate((aligned(at.rows * features) for features in inner), initial=sum(gather.sizes))
        offsets = [*gather.offsets, *(x.element_size() * place for place in behind)]
        outputs = self.product.linears * self.product.architecture.out_features
        results = [(*x.shape[:-1], features) for features in (outputs, *inner)]
        return _Plan(series, size, offsets, offsets[-self.chain.images - len(inner) :], results)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        memory: Tensor,
        offsets: Sequence[int],
        parameters: tuple[Tensor, ...],
        with_input: bool,
        with_bias: bool,
        wide: bool,
    ) -> tuple[Tensor | None, list[Tensor]]:
        """The gradient of x if asked for, float32 if ``wide``, and those of the factors, then of the biases if asked for, all float32."""
        doubt_trained(parameters[: self._factors])
        meet(self.chain, x)
        dx = None
        if with_input:
            dx = x.new_empty(*x.shape, dtype=torch.float32) if wide and self.chain.takes_wide else x.new_empty(*x.shape)
        wanted = parameters if with_bias else parameters[: self._factors]
        if parameters[0].dtype == torch.float32:
            found = [*map(torch.empty_like, wanted)]
        else:
            found = [torch.empty_like(parameter, dtype=torch.float32) for parameter in wanted]
        start = memory.data_ptr()
        operands = [start + offset for offset in offsets]
        self.chain.queue(dy, x, operands, [*map(Tensor.data_ptr, found)], dx)
        return dx, found


class TrainedCall:
    """The constant part of calls of linears that share x: the dtype that x is cast to, the mode, and the kernels.

    Args:
        count: how many of the parameters are factors. Biases lie behind them.
    """

    def __init__(self, dtype: torch.dtype, linears: int, mode: str, count: int) -> None:
        self.dtype, self.linears, self.mode, self.count = dtype, linears, mode, count
        self._known: tuple[torch.Size, int, int, int] | None = None
        self._trained: Trained | None = None

    def trained(self, x: Tensor, parameters: tuple[Tensor, ...]) -> Trained | None:
        """The kernels for both passes; None where caching the weights is better, or x is on another device.

        All shapes but that of x stay the same, and so do dtypes.
        """
        known = x.shape, x.get_device(), current_device(), _forgotten
        if known != self._known:
            self._trained = _trained_for(x, parameters, self.count, self.linears, self.mode)
            self._known = known
        return self._trained


def _trained_for(x: Tensor, parameters: tuple[Tensor, ...], count: int, linears: int, mode: str) -> Trained | None:
    device_index, rows = x.device.index, x.numel() // x.shape[-1]
    if rows == 0 or mode not in HALVES or device_index != current_device():
        return None
    key = (mode, linears, device_index, rows_bucket(rows), *[(parameter.shape, parameter.dtype) for parameter in parameters])
    found = _trained.get(key)
    if found is None:
        factors = parameters[:count]
        chain = chain_for(factors, linears, mode, device_index, rows)
        product = product_for(factors[:1] if chain.keeps else factors, linears, mode, device_index, rows, False)
        found = _trained[key] = Trained(product, chain, count, len(parameters) > count)
    return found


def forget_trained() -> None:
    """Let the next call choose kernels again, after the table of configurations has changed."""
    global _forgotten
    _forgotten += 1
    _trained.clear()
