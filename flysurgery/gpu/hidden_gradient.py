"""The hidden units of a feed-forward block of halves and their gradients, in one launch, for its backward pass."""

from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from flysurgery.gpu.device import kernels_take, multiprocessors_of, shared_limit_of
from flysurgery.gpu.fused_linear import packed
from flysurgery.gpu.kernel import current_stream, sized_kernel
from flysurgery.gpu.modes import HALF_MODES
from flysurgery.gpu.tensor_map import boxes

_ROWS, _COLUMNS, _BATCH, _THREADS = 128, 128, 64, 384
_FEWEST_SLOTS, _MOST_SLOTS = 2, 6
_WARPS = 8
"""Of two blocks that share weights. Each adds up its own rows of the same columns."""


@dataclass(frozen=True)
class HiddenTiles:
    """Which columns of x and of dy the tiles of hidden units read, and where they stand in h, as ``kernels/hidden_gradient.cu`` says.

    Attributes:
        columns: hidden units of a tile, a multiple of 32.
        inputs, gradients: columns of x and of dy that a tile reads, multiples of 64.
        classes, parts: blocks of the columns of x and of dy; tiles are sorted by classes and then by parts, h the other way round.
        pieces: tiles of a class and a part.
    """

    columns: int
    inputs: int
    gradients: int
    classes: int
    parts: int
    pieces: int

    @property
    def hidden(self) -> int:
        """Hidden units of all tiles."""
        return self.columns * self.count

    @property
    def count(self) -> int:
        """How many tiles there are."""
        return self.classes * self.parts * self.pieces

    def slots(self, device_index: int) -> int:
        """As many stages of rows and weights as there is room for beside the biases, up to ``_MOST_SLOTS``; 0 for too few."""
        found = min(_MOST_SLOTS, (shared_limit_of(device_index) - 4 * self.hidden) // self.slot_bytes)
        return found if found >= _FEWEST_SLOTS else 0

    @property
    def slot_bytes(self) -> int:
        """Of 64 columns of rows and weights, and two barriers."""
        return (_ROWS + self.columns) * _BATCH * 2 + 16


def dense_tiles(features: int, hidden: int) -> HiddenTiles:
    """Tiles that read all columns; ``hidden`` is a multiple of 128."""
    return HiddenTiles(_COLUMNS, features, features, 1, 1, hidden // _COLUMNS)


def hidden_gradient_takes(
    x: Tensor,  # shape: (rows, in_features)
    out_features: int,
    hidden: int,
) -> bool:
    """Whether the kernel takes these inputs of a dense block with this many outputs and hidden units."""
    features = x.shape[1]
    sizes = features == out_features and features % _BATCH == 0 and hidden % _COLUMNS == 0 and len(x) > 0
    return sizes and kernels_take(x) and x.dtype in HALF_MODES and dense_tiles(features, hidden).slots(x.device.index) > 0


def hidden_image(
    first: Tensor,  # shape: (hidden, features)
    last: Tensor,  # shape: (features, hidden)
) -> Tensor:  # shape: (hidden / 128, 2, features / 64, 8, 4, 4, 4, 2, 8)
    """The weights of both layers of a dense block in the order in which the kernel reads them."""
    return torch.stack([panels(first), panels(last.t())], dim=1)


def panels(
    weight: Tensor,  # shape: (hidden, features)
    columns: int = _COLUMNS,
) -> Tensor:  # shape: (tiles, features / 64, 8, columns / 32, 4, 4, 2, 8)
    """Weights by tiles of ``columns`` hidden units, each by stages of 64 features."""
    # 32 neighbouring hidden units are (lane, tile, 2) in memory and (tile, lane, 2) in a panel
    split = weight.reshape(-1, columns // 32, 4, 4, 2, weight.shape[1] // _BATCH, 8, 8)
    return split.permute(0, 5, 6, 1, 3, 2, 4, 7)


def run_hidden_gradient(
    x: Tensor,  # shape: (rows, any)
    dy: Tensor,  # shape: (rows, any)
    image: Tensor,  # the panels of a tile's hidden units, for x and then for dy, tile by tile
    bias: Tensor | None,  # shape: (hidden,), in the order of the tiles
    activation: str,
    tiles: HiddenTiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # shapes: (rows, hidden) twice, (parts, hidden)
    """``h = activation(u)`` for ``u = x @ first.T + bias``, the gradients of u for gradients dy of ``h @ last.T``, and sums of their rows.

    All are halves of one dtype; sums, activations and slopes are float32, slopes rounded to float16. The sums are of parts of the rows,
    float32, of gradients that are not rounded. Gradients and sums stand in the order of the tiles, h in its own. Without ``tiles`` both
    layers are dense, and the image is that of ``hidden_image``.

    Raises:
        BackendError: the kernel does not compile or launch.
    """
    tiles = tiles or dense_tiles(x.shape[1], _COLUMNS * len(image))
    rows, hidden, index = len(x), tiles.hidden, x.device.index
    h, du = (x.new_empty(rows, hidden) for _ in range(2))
    slots, passes, count = tiles.slots(index), -(-rows // (2 * _ROWS)), tiles.count
    sizes = {"hidden": hidden, "columns": tiles.columns, "parts": tiles.parts, "pieces": tiles.pieces, "stages": slots}
    read = {"inputs": tiles.inputs // _BATCH, "gradients": tiles.gradients // _BATCH}
    kernel = sized_kernel("hidden_gradient", index, mode=x.dtype, activation=activation, **sizes, **read)
    blocks = 2 * min(passes * count, multiprocessors_of(index) // 2)
    parts = min(passes, lcm(blocks, count) // count)  # after so many passes a warp meets the same columns again
    sums = torch.empty((parts * _WARPS, hidden), dtype=torch.float32, device=x.device)
    kernel.launch(
        (blocks, 1, 1),
        (_THREADS, 1, 1),
        slots * tiles.slot_bytes + 4 * hidden,
        current_stream(index),
        *(boxes(packed(x), _ROWS), boxes(packed(dy), _ROWS), image, bias, h, du, sums, rows, parts),
        early=True,
    )
    return h, du, sums
