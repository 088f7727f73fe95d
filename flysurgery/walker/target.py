"""What a walk finds: targets, and what is known about each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from flysurgery.walker.obstacles import Obstacle

Role = Literal["qkv", "attn_out", "ffn_in", "ffn_out", "head", "other"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Slice:
    """Rows ``start`` to ``stop`` (exclusive) of a fused projection's weight.

    ``name`` is ``"q"``, ``"k"``, ``"v"`` or ``"ffn"``; joined by ``"_"`` where the same rows serve two of them (``"k_v"``).
    """

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Switch:
    """An attribute to set on the module ``module_fqn``, so that it calls its linear and does not read the linear's weight."""

    module_fqn: str
    attribute: str
    value: bool


@dataclass(frozen=True)
class Target:
    """A linear map of the model, as the traced graph shows it.

    ``fqn`` names the module; where the weight is a bare parameter of a larger module (obstacle ``raw-weight``) it names that parameter.
    ``rows`` counts the rows that one forward multiplies, summed over ``calls``, for the example that was walked: divide by the
    example's batch size for rows an image. ``bias`` says whether the module itself holds one. ``aliases`` are further names of
    the same module. ``split`` holds the row ranges of a fused projection, in ascending order and covering all rows, or None where
    the graph does not prove them or where there is nothing to split. ``pair`` names the linear that alone reads the output, feature by
    feature through element-wise operators only, so that the features between the two may stand in any order.
    """

    fqn: str
    role: Role
    in_features: int
    out_features: int
    bias: bool
    calls: int
    rows: int
    obstacles: tuple[Obstacle, ...] = ()
    split: tuple[Slice, ...] | None = None
    aliases: tuple[str, ...] = ()
    switches: tuple[Switch, ...] = ()
    pair: str | None = None

    @property
    def blocked(self) -> bool:
        """Whether some obstacle makes a replacement impossible."""
        return any(obstacle.blocking for obstacle in self.obstacles)
