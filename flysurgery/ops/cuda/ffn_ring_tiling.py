"""What the tilings share of feed-forward kernels whose warps own rows and share a ring of panels. Integers only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeVar

from flysurgery.ops.cuda.ffn_tiling import FfnTiling, braces
from flysurgery.ops.cuda.tiling import registers_allowed

_MOST_SLOTS = 16
RingTile = TypeVar("RingTile", bound="RingFfnTiling")


@dataclass(frozen=True)
class RingFfnTiling(FfnTiling):
    """Sizes of a kernel with the ring of ``kernels/fused_ring.cuh``, all of whose warps multiply.

    Attributes:
        warps: warps a block that multiply.
    """

    warps: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def whole_units(self) -> bool:
        return False

    @property
    def most_registers(self) -> int:
        """Registers a thread that multiplies may use."""
        return registers_allowed(self.warps)

    @property
    def slot_bytes(self) -> int:
        """What a slot takes in shared memory: a panel, two barriers and a counter."""
        return self.stride + 20

    @property
    def held_bytes(self) -> int:
        """Shared memory beside the ring."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block: the ring and what lies beside it."""
        return self.slots * self.slot_bytes + self.held_bytes

    def defines(self) -> dict[str, int | str]:
        middle, last = ([[list(pair) for pair in steps] for steps in each] for each in (self.middle_steps, self.last_steps))
        return {**self.sizes(), "WARPS": self.warps, "U_TILES": braces(middle), "V_TILES": braces(last)}


def filled(tile: RingTile, shared_limit: int) -> RingTile | None:
    """The tile with as many slots as there is room for; None where they are too few, or registers are."""
    slots = min((shared_limit - tile.held_bytes) // tile.slot_bytes, sum(tile.panel_counts), _MOST_SLOTS)
    return replace(tile, slots=slots) if tile.registers <= tile.most_registers and slots >= tile.least_slots else None


def fastest(tiles: Iterable[RingTile]) -> RingTile | None:
    """The most warps, then the widest pieces."""
    return max(tiles, key=lambda tile: (tile.warps, tile.hidden, tile.columns), default=None)
