"""Layers of two factors that are too wide for one launch: one launch for each factor, or for the two factors around an activation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from flysurgery.gpu.factor_by_factor import middle_places, wide_ffn_obstacle, wide_group_obstacle
from flysurgery.gpu.ffn_middle import fills_rounds
from flysurgery.gpu.parts import FusedFactors, Norm

MOMENTS = "moments"
"""The launch of a norm before factors that finds the mean and the deviation of each row."""

GROUP_LAUNCHES = MOMENTS, "norm and first factors", "second factors"
"""What the launches of ``run_wide_group`` compute, one after the other."""

NARROWEST_BLOCK, NARROWEST_GROUP = 512, 768
"""From this many features on, one launch for each factor is faster: for feed-forward blocks, and for few rows of linears that share x.

``recipes/kernel_tables.py wide`` of commit 880089d timed both ways, for few rows and many.
"""

WIDEST_TOGETHER, ROWS_TOGETHER = 768, 10
"""With at most this many features between their two factors, and at least this many rows for each of these features, linears that share
x are faster in one launch.

A row's features between the factors lie in a warp's registers. More of them leave room for fewer columns of the outputs. On an H200 in fp16
q, k and v of 768 features take 11.6 us in one launch and 13.8 factor by factor (architecture of Gonon et al., 192 between, 2048 rows),
59 and 81 (25216 rows); Monarch's, 768 between, 21 and 20, 122 and 163; those of 1024 features (Monarch, 1024 between) 273 and 218.
"""


def wide_ffn_launches(
    x: Tensor, norm: Norm | None, up: FusedFactors, down: FusedFactors, scale: Tensor | None, residual: bool
) -> tuple[str, ...]:
    """What the launches of ``run_wide_ffn`` compute, one after the other."""
    joined = fills_rounds(x.numel() // x.shape[-1], middle_places(up.architecture, down.architecture, x.device.index))
    first = ("first factor of up",) if norm is None else (MOMENTS, "norm and first factor of up")
    last = ["second factor of down", *(["scale"] if scale is not None else []), *(["residual"] if residual else [])]
    middle = ("second factor of up and activation", "first factor of down")
    return (*first, *([" and ".join(middle)] if joined else middle), " and ".join(last))


def takes_ffn(x: Tensor, up: FusedFactors, down: FusedFactors) -> bool:
    """Whether a feed-forward block that no kernel takes as a whole is multiplied factor by factor."""
    return x.shape[-1] >= NARROWEST_BLOCK and wide_ffn_obstacle(up.architecture, down.architecture, x.dtype, x.device.index) is None


def takes_group(x: Tensor, group: Sequence[FusedFactors], together: bool) -> bool:
    """Whether linears of one architecture, with a bias each or none, are multiplied factor by factor.

    Args:
        together: whether a kernel takes them in one launch.
    """
    architecture, features = group[0].architecture, x.shape[-1]
    between = max(architecture.inner_features, default=0)
    if together and between <= WIDEST_TOGETHER and x.numel() >= ROWS_TOGETHER * between * features:
        return False
    return features >= NARROWEST_GROUP and wide_group_obstacle(architecture, len(group), x.dtype, x.device.index) is None
