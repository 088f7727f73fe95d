"""A feed-forward block with its norm, layer scale and residual: what is computed, and which launches compute it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.errors import BackendError
from flysurgery.gpu.factor_by_factor import run_wide_ffn
from flysurgery.gpu.ffn import run_ffn
from flysurgery.gpu.gated import gated_obstacle
from flysurgery.gpu.parts import FusedFactors, Gated, Linear, Norm, present, wrong_norm, wrong_size, wrong_vector
from flysurgery.ops.norm_linears import plain_norm
from flysurgery.ops.one_launch import (
    epilogue_reason,
    few_rows_linear,
    fused_norm_linear,
    gated_apart,
    gated_dense,
    gated_factors,
    in_one_launch,
    like,
    linear_epilogue,
    multiplied,
    norm_reason,
    normed,
    rows_of,
    takes_few_rows,
    takes_gated_dense,
    takes_gated_factors,
    whole_reason,
)
from flysurgery.ops.ways import Stage, Stages
from flysurgery.ops.wide import takes_ffn, wide_ffn_launches

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "silu": functional.silu,
}


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
        return wrong or wrong_activation(self.activation)

    def stages(self, x: Tensor) -> Stages | str:
        norm, up, down, _, _, residual, inner, _ = self
        norms_reason = norm_reason(x, norm, up.sizes[0]) or norm_reason(x, inner, down.sizes[0])
        before_last = () if inner is None else (Stage(("inner norm",), lambda y, x, block: normed(y, block.inner)),)
        if isinstance(up, Gated):
            first = norms_reason or _gated(x, norm, up)
            return first if isinstance(first, str) else (*first, *before_last, _last(x, self))
        if takes_few_rows(x, (up,), norm) and takes_few_rows(x, (down,), inner):
            first = "up and activation" if norm is None else "norm, up and activation"
            last = " and ".join([*(["inner norm, down"] if inner else ["down"]), *self._added])
            return (
                Stage((first,), lambda y, x, block: few_rows_linear(y, block.norm, (block.up,), block.activation)),
                Stage((last,), lambda y, x, block: _last_of_few_rows(y, x, block, block.inner)),
            )
        if norms_reason is None and takes_few_rows(x, (up,)) and takes_few_rows(x, (down,)):
            first = Stage(("up and activation",), lambda y, x, block: few_rows_linear(y, None, (block.up,), block.activation))
            return *_before(norm), first, *before_last, _last(x, self)
        whole = "the kernel of a whole block has no norm between its layers"
        whole = whole_reason(x, norm, up, down) if inner is None else whole
        if isinstance(up, FusedFactors) and isinstance(down, FusedFactors):
            if whole is None:
                return (Stage(("the whole block",), lambda y, x, block: like(x, run_ffn(rows_of(x), *block[:6]))),)
            if inner is None and takes_ffn(x, up, down):
                if norms_reason is not None:
                    return norms_reason
                launches = wide_ffn_launches(x, norm, up, down, self.scale, residual)
                return (Stage(launches, lambda y, x, block: like(x, run_wide_ffn(rows_of(x), *block[:6], moments=block.moments))),)
        apart = norms_reason or epilogue_reason(x, up)
        if apart is not None:
            return f"{whole}; {apart}"
        return *_first(x, norm, up), *before_last, _last(x, self)

    def plainly(self, x: Tensor) -> Tensor:
        wrong = wrong_activation(self.activation)
        if wrong is not None:
            raise BackendError(wrong)
        activation, normed = ACTIVATIONS[self.activation], plain_norm(x, self.norm)
        if isinstance(self.up, Gated):
            parts = [multiplied(normed, member) for member in self.up.members]
            parts = parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)
            hidden = activation(parts[self.up.gate]) * parts[1 - self.up.gate]
        else:
            hidden = activation(multiplied(normed, self.up))
        y = multiplied(plain_norm(hidden, self.inner), self.down)
        y = y if self.scale is None else y * self.scale
        return x + y if self.residual else y

    def added_to(self, x: Tensor) -> Tensor | None:
        """What the last layer's outputs are added to."""
        return x if self.residual else None

    @property
    def _added(self) -> tuple[str, ...]:
        """The operations behind the last layer's product, in words."""
        return (*(("scale",) if self.scale is not None else ()), *(("residual",) if self.residual else ()))


def wrong_activation(activation: str) -> str | None:
    """Why there is no such activation; None where there is."""
    return None if activation in ACTIVATIONS else f"expected an activation out of {', '.join(ACTIVATIONS)}, got '{activation}'"


def _before(norm: Norm | None) -> Stages:
    """The norm of x, where there is one, in a launch of its own."""
    return () if norm is None else (Stage(("norm",), lambda y, x, block: normed(y, block.norm)),)


def _first(x: Tensor, norm: Norm | None, up: Linear) -> Stages:
    """``activation(up(norm(x)))``, in one launch where the fused kernel takes the norm as well."""
    if norm is not None and isinstance(up, FusedFactors) and in_one_launch(x, [up]):
        launch = "norm, up and activation"
        return (Stage((launch,), lambda y, x, block: fused_norm_linear(y, block.norm, (block.up,), block.activation)),)
    return *_before(norm), Stage(("up and activation",), lambda y, x, block: linear_epilogue(y, block.up, block.activation))


def _gated(x: Tensor, norm: Norm | None, up: Gated) -> Stages | str:
    """``activation(gate(norm(x))) * value(norm(x))``, the fastest way first, or why no kernel takes it.

    Factors whose outputs hold gate and value take one launch, with the norm if it fits. Dense layers take one launch after the norm's. In
    all other cases each layer has its own launch, and the gate has one more.
    """
    outputs = [member.sizes[1] for member in up.members]
    if len(outputs) not in (1, 2) or outputs[0] != outputs[-1] or sum(outputs) % 2:
        return f"expected two layers for gate and value with as many outputs, or one whose outputs are both, got {outputs} outputs"
    obstacle = gated_obstacle(up.sizes[1], x.dtype)
    if obstacle is not None:
        return obstacle
    both = up.members[0] if len(up.members) == 1 else None
    if isinstance(both, FusedFactors):
        if takes_gated_factors(x, norm is not None, both):
            launch = "gate and value" if norm is None else "norm, gate and value"
            return (Stage((launch,), lambda y, x, block: gated_factors(y, block.norm, block.up, block.activation)),)
        if takes_gated_factors(x, False, both):
            return *_before(norm), Stage(("gate and value",), lambda y, x, block: gated_factors(y, None, block.up, block.activation))
    if takes_gated_dense(x, up):
        return *_before(norm), Stage(("gate and value",), lambda y, x, block: gated_dense(y, block.up, block.activation))
    products = ("gate", "value") if len(up.members) == 2 else ("both halves",)  # a product of factors may take a launch for each factor
    return *_before(norm), Stage((*products, "their product"), lambda y, x, block: gated_apart(y, block.up, block.activation))


def _last(x: Tensor, block: FeedForward) -> Stage:
    """``x + scale * down(hidden)``, in one launch where there is a kernel for it; x tells how many rows the hidden units have."""
    added = block._added
    launch = " and ".join(["down", *added])
    if takes_few_rows(x, (block.down,)):
        return Stage((launch,), lambda y, x, block: _last_of_few_rows(y, x, block, None))
    if epilogue_reason(x, block.down, fast=True) is None:
        return Stage((launch,), lambda y, x, block: linear_epilogue(y, block.down, "none", block.added_to(x), block.scale))
    return Stage(("down", *([" and ".join(added)] if added else [])), _multiplied_and_added)


def _last_of_few_rows(y: Tensor, x: Tensor, block: FeedForward, inner: Norm | None) -> Tensor:
    return few_rows_linear(y, inner, (block.down,), "none", block.added_to(x), block.scale)


def _multiplied_and_added(hidden: Tensor, x: Tensor, block: FeedForward) -> Tensor:
    y, residual, scale = multiplied(hidden, block.down), block.added_to(x), block.scale
    if scale is None:
        return y if residual is None else residual + y
    scale = scale.to(y.dtype)
    return y * scale if residual is None else torch.addcmul(residual, y, scale)
