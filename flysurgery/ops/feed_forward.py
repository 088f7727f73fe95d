"""A feed-forward block with its norm, layer scale and residual: what is computed, and which launches compute it."""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.errors import BackendError
from flysurgery.gpu.dense import dense_obstacle, run_dense_gated
from flysurgery.gpu.factor_by_factor import fills_rounds, middle_places, run_wide_ffn, wide_ffn_obstacle
from flysurgery.gpu.ffn import run_ffn
from flysurgery.gpu.gated import gated_obstacle, run_gated
from flysurgery.gpu.modes import mode_for
from flysurgery.gpu.operands import FusedFactors, Gated, Linear, Norm, present, wrong_norm, wrong_size, wrong_vector
from flysurgery.ops.choose_launches import Stage, Stages
from flysurgery.ops.linears import MOMENTS, plain_norm
from flysurgery.ops.one_launch import (
    epilogue_reason,
    few_rows_linear,
    fused,
    in_one_launch,
    like,
    linear_epilogue,
    multiplied,
    norm_reason,
    normed,
    rows_of,
    takes_few_rows,
    whole_reason,
)

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}

NARROWEST_BLOCK = 512
"""From this many features on, one launch for each factor is faster; timed as for ``NormLinears``."""


class FeedForward(NamedTuple):
    """``x + scale * down(inner(activation(up(norm(x)))))``, without ``x +`` where ``residual`` is false; x: (batch..., in_features).

    Where ``up`` is gated, ``activation(gate) * value`` takes the place of the activation. The number of launches depends on the case:

    - One, where a kernel takes the whole block; two, for few rows.
    - Wide layers: one for each factor, and one for the norm's moments, unless ``moments`` has those of the rows of x, as
      ``run_with_moments`` gives them.
    - Otherwise: one for the norm with the first layer and the activation, or one for each of these; one for an inner norm; and one for
      the last layer with scale and residual.

    Intermediates are rounded to the dtype of x where they enter a product or are stored; norm, sums, activation and residual are
    float32. Weights may be wider than x; they are rounded when they are packed, once for each version.
    """

    norm: Norm | None
    up: Linear | Gated
    down: Linear
    activation: str = "gelu"
    scale: Tensor | None = None  # shape: (out_features,)
    residual: bool = True
    inner: Norm | None = None
    moments: Tensor | None = None  # shape: (rows, parts, 2), float32

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        norms = [part for norm in (self.norm, self.inner) if norm is not None for part in norm.tensors]
        return present(*self.up.tensors, *self.down.tensors, *norms, self.scale)

    @property
    def form(self) -> tuple[Hashable, ...]:
        norms = [None if norm is None else norm.form for norm in (self.norm, self.inner)]
        return "ffn", *norms, self.up.form, self.down.form, self.scale is None, self.activation, self.residual

    def wrong(self, x: Tensor) -> str | None:
        (inputs, hidden), (taken, outputs) = self.up.sizes, self.down.sizes
        layers = self.up.members if isinstance(self.up, Gated) else (self.up,)
        wrong = wrong_vector(self.down.bias, outputs, "bias") or next(filter(None, (wrong_size(x, each) for each in layers)), None)
        wrong = wrong or wrong_vector(self.scale, outputs, "scale") or wrong_norm(self.norm, inputs) or wrong_norm(self.inner, hidden)
        if wrong is None and (hidden != taken or (self.residual and inputs != outputs)):
            return f"expected layers that fit each other and the residual, got {inputs} to {hidden} and {taken} to {outputs} features"
        return wrong or self._wrong_activation()

    def _wrong_activation(self) -> str | None:
        known = ", ".join(ACTIVATIONS)
        return None if self.activation in ACTIVATIONS else f"expected an activation out of {known}, got '{self.activation}'"

    def stages(self, x: Tensor) -> Stages | str:
        norm, up, down, inner = self.norm, self.up, self.down, self.inner
        norms_reason = norm_reason(x, norm, up.sizes[0]) or norm_reason(x, inner, down.sizes[0])
        between = () if inner is None else (Stage(("inner norm",), lambda y, x, block: normed(y, block.inner)),)
        if isinstance(up, Gated):
            first = norms_reason or _gated(x, norm, up)
            return first if isinstance(first, str) else (*first, *between, _last(x, self))
        if takes_few_rows(x, (up,), norm) and takes_few_rows(x, (down,), inner):
            launch = "up and activation" if norm is None else "norm, up and activation"
            first = Stage((launch,), lambda y, x, block: few_rows_linear(y, block.norm, (block.up,), block.activation))
            return first, _last(x, self, inner)
        if norms_reason is None and takes_few_rows(x, (up,)) and takes_few_rows(x, (down,)):
            first = Stage(("up and activation",), lambda y, x, block: few_rows_linear(y, None, (block.up,), block.activation))
            return *_before(norm), first, *between, _last(x, self)
        whole = whole_reason(x, norm, up, down) if inner is None else "the kernel of a whole block has no norm between its layers"
        if isinstance(up, FusedFactors) and isinstance(down, FusedFactors):
            if whole is None:
                return (Stage(("the whole block",), lambda y, x, block: like(x, run_ffn(rows_of(x), *block[:6]))),)
            if inner is None and takes_each_factor(x, up, down):
                return norms_reason or (_each_factor(x, self, middle_places(up.architecture, down.architecture, x.device.index)),)
        apart = norms_reason or epilogue_reason(x, up)
        if apart is not None:
            return f"{whole}; {apart}"
        return *_first(x, norm, up), *between, _last(x, self)

    def plainly(self, x: Tensor) -> Tensor:
        wrong = self._wrong_activation()
        if wrong is not None:
            raise BackendError(wrong)
        activation, normed = ACTIVATIONS[self.activation], plain_norm(x, self.norm)
        if isinstance(self.up, Gated):
            gate, value = _gate_and_value(normed, self.up)
            hidden = activation(gate) * value
        else:
            hidden = activation(multiplied(normed, self.up))
        y = multiplied(plain_norm(hidden, self.inner), self.down)
        y = y if self.scale is None else y * self.scale
        return x + y if self.residual else y


def _before(norm: Norm | None) -> Stages:
    """The norm of x, where there is one, in a launch of its own."""
    return () if norm is None else (Stage(("norm",), lambda y, x, block: normed(y, block.norm)),)


def _first(x: Tensor, norm: Norm | None, up: Linear) -> Stages:
    """``activation(up(norm(x)))``, in one launch where the fused kernel takes the norm as well."""
    if norm is not None and isinstance(up, FusedFactors) and in_one_launch(x, [up]):
        return (Stage(("norm, up and activation",), lambda y, x, block: fused(y, block.norm, (block.up,), block.activation)),)
    return *_before(norm), Stage(("up and activation",), lambda y, x, block: linear_epilogue(y, block.up, block.activation))


def _gated(x: Tensor, norm: Norm | None, up: Gated) -> Stages | str:
    """``activation(gate(norm(x))) * value(norm(x))``, the fastest way first, or why no kernel takes it.

    Factors whose outputs hold gate and value take one launch, with the norm if it fits. Dense layers take one launch after the norm's. In
    all other cases each layer has its own launch, and the gate has one more.
    """
    members, (inputs, outputs) = up.members, up.sizes
    sizes = [member.sizes[1] for member in members]
    if len(sizes) not in (1, 2) or sizes[0] != sizes[-1] or sum(sizes) % 2:
        return f"expected two layers for gate and value with as many outputs, or one whose outputs are both, got {sizes} outputs"
    obstacle = gated_obstacle(outputs, x.dtype)
    if obstacle is not None:
        return obstacle
    factors = [member for member in members if isinstance(member, FusedFactors)]
    if len(members) == len(factors) == 1:
        if norm is not None and in_one_launch(x, factors, gated=True):
            launch = "norm, gate and value"
            return (Stage((launch,), lambda y, x, block: fused(y, block.norm, block.up.members, block.activation, block.up.gate)),)
        if in_one_launch(x, factors, norm=False, gated=True):
            launch = "gate and value"
            return *_before(norm), Stage((launch,), lambda y, x, block: fused(y, None, block.up.members, block.activation, block.up.gate))
    biases = present(*[member.bias for member in members])
    dense = not factors and len(biases) in (0, len(members))
    if dense and dense_obstacle(inputs, 2 * outputs, mode_for(x), x.device.index, gated=True, fast=True) is None:
        return *_before(norm), Stage(("gate and value",), _gated_dense)
    products = ("gate", "value") if len(members) == 2 else ("both halves",)  # a product of factors may take a launch for each factor
    return *_before(norm), Stage((*products, "their product"), _gated_apart)


def _gated_dense(y: Tensor, x: Tensor, block: Any) -> Tensor:
    weights = [member.weight for member in block.up.members]
    biases = present(*[member.bias for member in block.up.members])
    return like(y, run_dense_gated(rows_of(y), weights, biases, block.up.gate, block.activation, mode_for(y)))


def _gated_apart(y: Tensor, x: Tensor, block: Any) -> Tensor:
    gate, value = _gate_and_value(y, block.up)
    return like(y, run_gated(rows_of(gate), rows_of(value), block.activation))


def _gate_and_value(x: Tensor, up: Gated) -> tuple[Tensor, Tensor]:
    """The outputs of both layers, or the halves of those of the one."""
    outputs = [multiplied(x, member) for member in up.members]
    parts = outputs if len(outputs) == 2 else outputs[0].chunk(2, dim=-1)
    return parts[up.gate], parts[1 - up.gate]


def takes_each_factor(x: Tensor, up: FusedFactors, down: FusedFactors) -> bool:
    """Whether a block that no kernel takes as a whole is multiplied factor by factor."""
    return x.shape[-1] >= NARROWEST_BLOCK and wide_ffn_obstacle(up.architecture, down.architecture, x.dtype, x.device.index) is None


def _each_factor(x: Tensor, block: FeedForward, places: int) -> Stage:
    """One launch for each factor, or for the two around the activation where rows fill the rounds of their kernel of so many places."""
    first = ("first factor of up",) if block.norm is None else (MOMENTS, "norm and first factor of up")
    middle = ("second factor of up and activation", "first factor of down")
    middle = (" and ".join(middle),) if fills_rounds(x.numel() // x.shape[-1], places) else middle
    launches = *first, *middle, " and ".join(["second factor of down", *_added(block)])

    def run(y: Tensor, x: Tensor, block: Any) -> Tensor:
        rows = rows_of(x)
        y, _ = run_wide_ffn(rows, *block[:5], residual=rows if block.residual else None, moments=block.moments)
        return like(x, y)

    return Stage(launches, run)


def _last(x: Tensor, block: FeedForward, inner: Norm | None = None) -> Stage:
    """``x + scale * down(inner(hidden))``, in one launch where there is a kernel for it; x tells how many rows the hidden units have."""
    folded = inner is not None
    launch = " and ".join(["inner norm, down" if folded else "down", *_added(block)])
    if takes_few_rows(x, (block.down,), inner):

        def few_rows(y: Tensor, x: Tensor, block: FeedForward) -> Tensor:
            return few_rows_linear(y, block.inner if folded else None, (block.down,), *_epilogue(x, block))

        return Stage((launch,), few_rows)
    if epilogue_reason(x, block.down, fast=True) is None:
        return Stage((launch,), lambda y, x, block: linear_epilogue(y, block.down, *_epilogue(x, block)))
    added = " and ".join(_added(block))
    return Stage(("down", added) if added else ("down",), _multiplied_and_added)


def _added(block: FeedForward) -> list[str]:
    """The operations behind the last layer's product, in words."""
    return [*([] if block.scale is None else ["scale"]), *(["residual"] if block.residual else [])]


def _epilogue(x: Tensor, block: FeedForward) -> tuple[str, Tensor | None, Tensor | None]:
    """The last layer's activation, of which there is none, what is added to its outputs, and their scale."""
    return "none", x if block.residual else None, block.scale


def _multiplied_and_added(hidden: Tensor, x: Tensor, block: FeedForward) -> Tensor:
    y, (_, residual, scale) = multiplied(hidden, block.down), _epilogue(x, block)
    if scale is None:
        return y if residual is None else residual + y
    scale = scale.to(y.dtype)
    return y * scale if residual is None else torch.addcmul(residual, y, scale)
