"""The hidden units of a feed-forward block of halves and their gradients, in one launch, for its backward pass."""

from math import lcm

import torch
from torch import Tensor

from flysurgery.gpu.device import kernels_take, multiprocessors_of, shared_limit_of
from flysurgery.gpu.fused_linear import packed
from flysurgery.gpu.kernel import current_stream, sized_kernel
from flysurgery.gpu.modes import HALF_MODES
from flysurgery.gpu.tensor_map import boxes

_ROWS, _COLUMNS, _BATCH, _THREADS = 128, 128, 64, 384
_SLOT_BYTES = (_ROWS + _COLUMNS) * _BATCH * 2 + 16
"""Of rows, weights and two barriers."""

_FEWEST_STAGES, _MOST_STAGES = 2, 6
_WARPS = 8
"""Of two blocks that share weights. Each adds up its own rows of the same columns."""


def hidden_gradient_takes(
    x: Tensor,  # shape: (rows, in_features)
    out_features: int,
    hidden: int,
) -> bool:
    """Whether the kernel takes these inputs of a block with this many outputs and hidden units."""
    features = x.shape[1]
    sizes = features == out_features and features % _BATCH == 0 and hidden % _COLUMNS == 0 and len(x) > 0
    return sizes and kernels_take(x) and x.dtype in HALF_MODES and _stages(hidden, x.device.index) >= _FEWEST_STAGES


def hidden_image(
    first: Tensor,  # shape: (hidden, features)
    last: Tensor,  # shape: (features, hidden)
) -> Tensor:  # shape: (hidden / 128, 2, features / 64, 8, 4, 4, 4, 2, 8)
    """The weights of both layers in the order in which the kernel reads them."""
    return torch.stack([_panels(first), _panels(last.t())], dim=1)


def _panels(weight: Tensor) -> Tensor:  # shape: (hidden, features)
    # 32 neighbouring hidden units are (lane, tile, 2) in memory and (tile, lane, 2) in a panel
    split = weight.reshape(weight.shape[0] // _COLUMNS, 4, 4, 4, 2, weight.shape[1] // _BATCH, 8, 8)
    return split.permute(0, 5, 6, 1, 3, 2, 4, 7)


def run_hidden_gradient(
    x: Tensor,  # shape: (rows, features)
    dy: Tensor,  # shape: (rows, features)
    image: Tensor,  # of ``hidden_image``
    bias: Tensor | None,  # shape: (hidden,)
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # shapes: (rows, hidden) twice, (parts, hidden)
    """``h = activation(u)`` for ``u = x @ first.T + bias``, the gradients of u for gradients dy of ``h @ last.T``, and sums of their rows.

    All are halves of one dtype; sums, activations and slopes are float32, slopes rounded to float16. The sums are of parts of the rows,
    float32, of gradients that are not rounded.

    Raises:
        BackendError: the kernel does not compile or launch.
    """
    (rows, features), hidden, index = x.shape, image.shape[0] * _COLUMNS, x.device.index
    h, du = (x.new_empty(rows, hidden) for _ in range(2))
    stages = _stages(hidden, index)
    kernel = sized_kernel("hidden_gradient", index, features=features, hidden=hidden, mode=x.dtype, activation=activation, stages=stages)
    passes, tiles = -(-rows // (2 * _ROWS)), image.shape[0]
    blocks = 2 * min(passes * tiles, multiprocessors_of(index) // 2)
    parts = min(passes, lcm(blocks, tiles) // tiles)  # after so many passes a warp meets the same columns again
    sums = torch.empty((parts * _WARPS, hidden), dtype=torch.float32, device=x.device)
    kernel.launch(
        (blocks, 1, 1),
        (_THREADS, 1, 1),
        stages * _SLOT_BYTES + 4 * hidden,
        current_stream(index),
        *(boxes(packed(x), _ROWS), boxes(packed(dy), _ROWS), image, bias, h, du, sums, rows, parts),
        early=True,
    )
    return h, du, sums


def _stages(hidden: int, device_index: int) -> int:
    """As many slots as there is room for beside the biases, up to ``_MOST_STAGES``."""
    return min(_MOST_STAGES, (shared_limit_of(device_index) - 4 * hidden) // _SLOT_BYTES)
