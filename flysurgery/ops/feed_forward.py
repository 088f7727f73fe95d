"""A feed-forward block with its norm, layer scale and residual: by which launches, and why no kernel takes it.

``flysurgery.ops.composed`` has the same made of PyTorch's operators, for everything that a reason excludes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.dense import dense_advice
from flysurgery.ops.cuda.ffn import ffn_obstacle
from flysurgery.ops.cuda.ffn_operator import ffn_operator
from flysurgery.ops.cuda.modes import present_mode
from flysurgery.ops.decided import decided
from flysurgery.ops.epilogue import common_obstacle, epilogue_reason, linear_epilogue, wrong_size, wrong_vector
from flysurgery.ops.few_rows import few_rows_linear, takes_few_rows
from flysurgery.ops.gated import gated_stages, multiplied
from flysurgery.ops.norm_linears import fused_norm_linear, in_one_launch
from flysurgery.ops.normed import norm_reason, normed, wrong_norm
from flysurgery.ops.parts import Dense, FusedFactors, Gated, Linear, Norm
from flysurgery.ops.stage import Stage, Way
from flysurgery.ops.wide import takes_ffn, wide_ffn, wide_ffn_launches
from flysurgery.patterns import Architecture


class Block(NamedTuple):
    """The operands of ``ffn`` beside x, in the same order."""

    norm: Norm | None
    up: Linear | Gated
    down: Linear
    activation: str
    scale: Tensor | None
    residual: bool
    inner: Norm | None
    moments: Tensor | None

    def added_to(self, x: Tensor) -> Tensor | None:
        """What the last layer's outputs are added to."""
        return x if self.residual else None


def ffn(
    x: Tensor,  # shape: (*batch, in_features)
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str = "gelu",
    scale: Tensor | None = None,  # shape: (out_features,)
    residual: bool = True,
    inner: Norm | None = None,
    moments: Tensor | None = None,  # shape: (rows, parts, 2), float32
) -> Tensor:  # shape: (*batch, out_features)
    """``x + scale * down(inner(activation(up(norm(x)))))``, without ``x +`` where ``residual`` is false.

    Where ``up`` is gated, ``activation(gate) * value`` takes the place of the activation. One launch where a kernel takes the whole
    block, two for few rows; else one for the norm and what stands behind it with the activation, or one for each, and one for the last
    layer with scale and residual, behind one for a norm before it; or, of wide layers, one for each factor and one for the
    norm's moments, unless ``moments`` has those of the rows of x, as ``linear_residual_moments`` leaves them.
    Intermediates are rounded to the dtype of x where they enter a product or are stored; norm, sums, activation and residual are
    float32. Weights may be wider than x; they are rounded when they are packed, once for each version.

    Raises:
        BackendError: no kernel takes this; the message is what ``ffn_reason`` answers.
    """
    way = ffn_way(x, norm, up, down, activation, scale, residual, inner, moments)
    if isinstance(way, str):
        raise BackendError(way)
    return way.run()


def ffn_way(
    x: Tensor,
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str = "gelu",
    scale: Tensor | None = None,
    residual: bool = True,
    inner: Norm | None = None,
    moments: Tensor | None = None,
) -> Way | str:
    """How ``ffn`` computes this, or why no kernel takes the block. Looks at shapes, dtypes, devices and gradients only."""
    norms = [each for each in (norm, inner) if each is not None]
    vectors = [*[part for each in norms for part in each.tensors], *(() if scale is None else (scale,))]
    forms = None if norm is None else norm.form, up.form, down.form, scale is None, None if inner is None else inner.form
    block = Block(norm, up, down, activation, scale, residual, inner, moments)
    stages = decided(
        lambda: _stages(x, norm, up, down, activation, scale, residual, inner),
        (x, *up.tensors, *down.tensors, *vectors),
        "ffn",
        *forms,
        activation,
        residual,
    )
    return stages if isinstance(stages, str) else Way(stages, x, block)


def ffn_launches(
    x: Tensor,
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str = "gelu",
    scale: Tensor | None = None,
    residual: bool = True,
    inner: Norm | None = None,
) -> tuple[str, ...]:
    """What the launches of ``ffn`` compute, one after the other; none where ``ffn_reason`` has something against it."""
    way = ffn_way(x, norm, up, down, activation, scale, residual, inner)
    return () if isinstance(way, str) else way.launches()


def ffn_reason(
    x: Tensor,
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str = "gelu",
    scale: Tensor | None = None,
    residual: bool = True,
    inner: Norm | None = None,
) -> str | None:
    """Why no kernel takes this feed-forward block; None where one does."""
    way = ffn_way(x, norm, up, down, activation, scale, residual, inner)
    return way if isinstance(way, str) else None


def _stages(
    x: Tensor,
    norm: Norm | None,
    up: Linear | Gated,
    down: Linear,
    activation: str,
    scale: Tensor | None,
    residual: bool,
    inner: Norm | None,
) -> tuple[Stage, ...] | str:
    """Which way a block goes, the fastest first, or why no kernel takes it."""
    wrong = _wrong(x, norm, up, down, scale, residual, inner)
    if wrong is not None:
        return wrong
    norms_reason = norm_reason(norm, up.sizes[0], x.dtype) or norm_reason(inner, down.sizes[0], x.dtype)
    before_last = () if inner is None else (Stage(("inner norm",), lambda y, x, block: normed(y, block.inner)),)
    if isinstance(up, Gated):
        first = norms_reason or gated_stages(x, norm, up, activation)
        return first if isinstance(first, str) else (*first, *before_last, _last(x, down, scale, residual))
    if takes_few_rows(x, (up,), norm, activation) and takes_few_rows(x, (down,), inner):
        first = "up and activation" if norm is None else "norm, up and activation"
        last = " and ".join([*(["inner norm, down"] if inner else ["down"]), *_added(scale, residual)])
        return Stage((first,), _first_of_few_rows), Stage((last,), _last_of_few_rows)
    if norms_reason is None and takes_few_rows(x, (up,), None, activation) and takes_few_rows(x, (down,)):
        first = Stage(("up and activation",), lambda y, x, block: few_rows_linear(y, None, (block.up,), block.activation))
        return *_before(norm), first, *before_last, _last(x, down, scale, residual)
    whole = _whole_obstacle(x, norm, up, down, activation, residual, inner)
    if isinstance(up, FusedFactors) and isinstance(down, FusedFactors):
        if whole is None:
            return (Stage(("the whole block",), _whole),)
        if inner is None and takes_ffn(x, up, down, activation):
            return norms_reason or (Stage(wide_ffn_launches(x, norm, up, down, scale, residual), _by_factors),)
    launches = norms_reason or epilogue_reason(up, x.dtype, x.device, activation)
    if launches is not None:
        return f"{whole}; {launches}"
    return *_first(x, norm, up, activation), *before_last, _last(x, down, scale, residual)


def _wrong(
    x: Tensor, norm: Norm | None, up: Linear | Gated, down: Linear, scale: Tensor | None, residual: bool, inner: Norm | None
) -> str | None:
    """Why the operands of a block do not fit each other, or no operator takes them."""
    norms = [each for each in (norm, inner) if each is not None]
    tensors = (*up.tensors, *down.tensors, *(part for each in norms for part in each.tensors), *(() if scale is None else (scale,)))
    (inputs, hidden), (taken, outputs) = up.sizes, down.sizes
    wrong = common_obstacle(x, tensors) or wrong_vector(down.bias, outputs, "bias")
    wrong = wrong or next(filter(None, (wrong_size(x, each) for each in (up.members if isinstance(up, Gated) else (up,)))), None)
    wrong = wrong or wrong_vector(scale, outputs, "scale") or wrong_norm(norm, inputs) or wrong_norm(inner, hidden)
    if wrong is None and (hidden != taken or (residual and inputs != outputs)):
        return f"expected layers that fit each other and the residual, got {inputs} to {hidden} and {taken} to {outputs} features"
    return wrong


def _first_of_few_rows(y: Tensor, x: Tensor, block: Block) -> Tensor:
    assert not isinstance(block.up, Gated), "the stages say so"
    return few_rows_linear(y, block.norm, (block.up,), block.activation)


def _last_of_few_rows(y: Tensor, x: Tensor, block: Block) -> Tensor:
    return few_rows_linear(y, block.inner, (block.down,), "none", block.added_to(x), block.scale)


def _first(x: Tensor, norm: Norm | None, up: Linear, activation: str) -> tuple[Stage, ...]:
    """``activation(up(norm(x)))``, in one launch where the fused kernel takes the norm as well."""
    if norm is not None and isinstance(up, FusedFactors) and in_one_launch(x, [up]):
        launch = "norm, up and activation"
        return (Stage((launch,), lambda y, x, block: fused_norm_linear(y, block.norm, (block.up,), block.activation)),)
    return *_before(norm), Stage(("up and activation",), lambda y, x, block: linear_epilogue(y, block.up, block.activation))


def _before(norm: Norm | None) -> tuple[Stage, ...]:
    """The norm of x, where there is one, in a launch of its own."""
    return () if norm is None else (Stage(("norm",), lambda y, x, block: normed(y, block.norm)),)


def _last(x: Tensor, down: Linear, scale: Tensor | None, residual: bool) -> Stage:
    """``x + scale * down(hidden)``, in one launch where there is a kernel for it; x tells how many rows the hidden units have."""
    added = _added(scale, residual)
    launch = " and ".join(["down", *added])
    if takes_few_rows(x, (down,)):
        return Stage((launch,), lambda y, x, block: few_rows_linear(y, None, (block.down,), "none", block.added_to(x), block.scale))
    if _added_in_one_launch(x, down):
        return Stage((launch,), lambda y, x, block: linear_epilogue(y, block.down, "none", block.added_to(x), block.scale))
    launches = ("down", *([" and ".join(added)] if added else []))
    return Stage(launches, lambda y, x, block: _multiplied_and_added(y, block.down, block.added_to(x), block.scale))


def _added(scale: Tensor | None, residual: bool) -> tuple[str, ...]:
    """What is done to the last layer's product, in words."""
    return (*(("scale",) if scale is not None else ()), *(("residual",) if residual else ()))


def _added_in_one_launch(x: Tensor, down: Linear) -> bool:
    """Whether a kernel multiplies and adds to the residual, and is the fastest."""
    if epilogue_reason(down, x.dtype, x.device) is not None:
        return False
    mode = present_mode(x.dtype)
    return not isinstance(down, Dense) or _dense_advice(*down.sizes, mode or "", x.device.index) is None


def _multiplied_and_added(hidden: Tensor, linear: Linear, residual: Tensor | None, scale: Tensor | None) -> Tensor:
    y = multiplied(hidden, linear)
    if scale is None:
        return y if residual is None else residual + y
    scale = scale.to(y.dtype)
    return y * scale if residual is None else torch.addcmul(residual, y, scale)


def _by_factors(y: Tensor, x: Tensor, block: Block) -> Tensor:
    norm, up, down, activation, scale, residual, _, moments = block
    assert isinstance(up, FusedFactors) and isinstance(down, FusedFactors), "the stages say so"
    return wide_ffn(x, norm, up, down, activation, scale, residual, moments)


def _whole(y: Tensor, x: Tensor, block: Block) -> Tensor:
    """The block in one launch."""
    norm, up, down, activation, scale, residual, *_ = block
    assert isinstance(up, FusedFactors) and isinstance(down, FusedFactors), "the stages say so"
    parts = (None, None, None) if norm is None else (norm.weight, norm.bias, norm.eps)
    rows = x.reshape(-1, x.shape[-1])
    y = ffn_operator(rows, *parts, list(up.factors), up.bias, list(down.factors), down.bias, activation, scale, residual)
    return y.view(*x.shape[:-1], y.shape[-1])


def _whole_obstacle(
    x: Tensor, norm: Norm | None, up: Linear, down: Linear, activation: str, residual: bool, inner: Norm | None
) -> str | None:
    """Why no kernel takes the whole block in one launch."""
    if inner is not None:
        return "the kernel of a whole block has no norm between its layers"
    if isinstance(up, Dense) or isinstance(down, Dense):
        return "the kernel of a whole block multiplies factors, and one of its layers is dense"
    mode = present_mode(x.dtype)
    return _ffn_obstacle(up.shapes, down.shapes, mode, norm is not None, activation, residual, x.device.index)


@torch.compiler.assume_constant_result  # depends on the machine and the arguments alone
def _ffn_obstacle(
    up: tuple[tuple[int, ...], ...],
    down: tuple[tuple[int, ...], ...],
    mode: str | None,
    norm: bool,
    activation: str,
    residual: bool,
    device_index: int,
) -> str | None:
    return ffn_obstacle(Architecture.of(*up), Architecture.of(*down), mode, norm, activation, residual, device_index)


@torch.compiler.assume_constant_result
def _dense_advice(inputs: int, outputs: int, mode: str, device_index: int) -> str | None:
    return dense_advice(inputs, outputs, mode, device_index)
