"""How the dense kernels divide a layer among blocks: the weights stay in shared memory, or stream through it."""

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

from flysurgery.gpu.modes import OfMode, macros

BATCH_BYTES = 128
_WIDEST = 128
_UNIT = 64
_STREAMED_SUMS = 384


class Patch(NamedTuple):
    """Patches of images in place of rows: their height and width, and how many rows of y stand before those of each image."""

    high: int
    wide: int
    prefix: int = 0


NO_PATCH = Patch(0, 0)


@dataclass(frozen=True)
class DenseTiling(OfMode):
    """Sizes of ``kernels/dense_linear.cu``."""

    kernel: ClassVar[str] = "dense_linear"
    in_features: int
    out_features: int
    mode: str
    warps: int  # of a block, 16 rows each; a multiple of four
    columns: int  # outputs of a block, whose weights it keeps in shared memory
    stages: int  # batches of x in shared memory, a warp
    gated: bool = False  # whether half of a block's outputs are a gate's, and half the value's at the same places

    @property
    def batch(self) -> int:
        """Inputs of a batch."""
        return BATCH_BYTES // self.element_bytes

    @property
    def run(self) -> int:
        """Tiles of 8 columns of which a lane's columns are adjacent: 16 bytes."""
        return 8 // self.element_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        weights = self.in_features * self.columns * 2 * self.images
        return weights + self.warps * self.stages * 16 * BATCH_BYTES + self.columns * 8 + self.in_features // self.batch * 8

    @property
    def registers(self) -> int:
        """Registers of a thread, estimated: sums, and all others."""
        return self.columns // 2 * (2 if self.element_bytes == 4 else 1) + 40

    def blocks(self, rows: int, multiprocessors: int) -> int:
        """How many blocks to launch."""
        tiles = self.out_features // self.columns
        return tiles * max(1, min(-(-rows // _UNIT), multiprocessors // tiles))

    def defines(self, activation: str, residual: bool, patch: Patch = NO_PATCH, moments: bool = False) -> dict[str, int]:
        """The macros that the kernel is compiled with; ``residual`` says whether one, or a position of patches, is added.

        Only the kernel whose weights stay reads patches; only the other one leaves moments.
        """
        places = {"patch_high": patch.high, "patch_wide": patch.wide, "prefix": patch.prefix}
        more = {"moments": moments} if isinstance(self, StreamTiling) else places
        return macros(self, activation=activation, residual=residual, **more)


@lru_cache(maxsize=1024)
def dense_tiling(in_features: int, out_features: int, mode: str, shared_limit: int, gated: bool = False) -> DenseTiling | str:
    """The tiling for a layer, or why there is none: the widest column tile, to at most 128, beside which 12 warps keep 3 batches each.

    Fewer warps or batches only where not even the narrowest tile leaves room for them.
    """
    tile = DenseTiling(in_features, out_features, mode, 0, 0, 0)
    unit = 8 * tile.run * (2 if gated else 1)
    if in_features % tile.batch or out_features % unit:
        return f"the dense kernel takes multiples of {tile.batch} inputs and {unit} outputs, got {in_features} and {out_features}"
    widths = [columns for columns in range(_WIDEST, 0, -unit) if out_features % columns == 0]
    for warps, batches in ((12, (4, 3)), (8, (4, 3)), (4, (4, 3, 2))):
        for columns in widths:
            for stages in batches:
                tile = DenseTiling(in_features, out_features, mode, warps, columns, stages, gated)
                if tile.shared_bytes <= shared_limit and tile.registers * warps * 32 <= 65536:
                    return tile
    return f"the weights of {in_features} inputs of the narrowest tile exceed {shared_limit} bytes of shared memory"


@dataclass(frozen=True)
class StreamTiling(DenseTiling):
    """Sizes of ``kernels/dense_stream.cu``, whose ``stages``, of 64 inputs of rows and weights, pass all warps."""

    kernel: ClassVar[str] = "dense_stream"

    @property
    def rows(self) -> int:
        """Of a tile: as many as the registers of a warpgroup hold sums of."""
        return _UNIT * (_STREAMED_SUMS // self.columns)

    @property
    def shared_bytes(self) -> int:
        ring = self.stages * ((self.rows + self.columns) * BATCH_BYTES + 16)
        return ring + self.rows // _UNIT * (_UNIT * self.columns * 2 + 24) + self.out_features * 8

    brought, fetched = (_UNIT, 32), (_UNIT // 4, 32)
    """Rows and columns of the boxes of a residual and of y, whose rows are short enough that lanes meet no bank twice."""

    @property
    def column_tiles(self) -> int:
        return self.out_features // self.columns

    def tiles(self, rows: int) -> int:
        """How many tiles there are for all rows, by pairs one above the other."""
        return 2 * -(-rows // (2 * self.rows)) * self.column_tiles

    def blocks(self, rows: int, multiprocessors: int) -> int:
        return min(self.tiles(rows), multiprocessors // 2 * 2)


def stream_tiling(resident: DenseTiling, shared_limit: int) -> StreamTiling | None:
    """The tiling of streaming weights for many rows; None where weights can stay in shared memory with tiles that are wide enough.

    The widest tile beside which four stages fit, or three.
    """
    if resident.element_bytes != 2 or resident.gated or resident.columns >= _WIDEST:
        return None
    for stages in (4, 3):
        for columns in (192, 128, 96):
            tile = StreamTiling(resident.in_features, resident.out_features, resident.mode, 12, columns, stages)
            if resident.out_features % columns == 0 and tile.shared_bytes <= shared_limit:
                return tile
    return None
