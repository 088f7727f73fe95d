"""What surgery does to one linear layer: pure data, checked against itself."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from flysurgery.errors import PatternError, PlanError
from flysurgery.patterns import MAX_FEATURES, Architecture, check_fits, family_of


@dataclass(frozen=True)
class Reason:
    """Why a layer stays dense: a code for programs and a sentence for people."""

    code: str
    text: str


@dataclass(frozen=True)
class Part:
    """Rows ``start`` to ``stop`` of a layer's weight; ``architecture`` None keeps them dense.

    ``name`` is None where the layer is replaced as one matrix, else the name of the part, such as "q".
    """

    name: str | None
    start: int
    stop: int
    architecture: Architecture | None


@dataclass(frozen=True)
class LayerPlan:
    """One linear layer: its sizes, whether it is replaced, and by what.

    ``conv``: it is a 1x1 convolution, whose channels are the features. ``calls`` and ``rows`` (rows of x, summed over the
    calls) are those of one forward of one sample.
    Parameters are counted with the bias, flops (two a weight and row) without.

    Raises:
        PlanError: the parts do not tile the rows, do not fit the sizes, or contradict the status.
    """

    fqn: str
    role: str
    in_features: int
    out_features: int
    bias: bool
    calls: int
    rows: int
    status: str
    reason: Reason | None = None
    aliases: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ()
    conv: bool = False

    def __post_init__(self) -> None:
        if not all(0 < size <= MAX_FEATURES for size in (self.out_features, self.in_features)):
            raise PlanError(f"layer {self.fqn}: sizes must lie between 1 and {MAX_FEATURES}, got {self.size}")
        if self.status == "keep" and self.parts:
            raise PlanError(f"layer {self.fqn} is kept dense and yet has parts; take one of the two out")
        if self.status == "replace":
            _check_parts(self)

    @property
    def is_replaced(self) -> bool:
        """Whether surgery replaces this layer."""
        return self.status == "replace"

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the layer's module."""
        return (self.fqn, *self.aliases)

    @property
    def size(self) -> str:
        """The weight's shape as text, ``out x in``."""
        return f"{self.out_features}x{self.in_features}"

    @property
    def weights_before(self) -> int:
        """Entries of the dense weight."""
        return self.out_features * self.in_features

    @property
    def weights_after(self) -> int:
        """Stored weights after surgery, without the bias."""
        if not self.is_replaced:
            return self.weights_before
        return sum(_weights(part, self.in_features) for part in self.parts)

    @property
    def params_before(self) -> int:
        """Parameters of the dense layer."""
        return self.weights_before + self.bias * self.out_features

    @property
    def params_after(self) -> int:
        """Parameters after surgery."""
        return self.weights_after + self.bias * self.out_features

    @property
    def flops_before(self) -> int:
        """Floating-point operations that one sample costs in the dense layer."""
        return 2 * self.weights_before * self.rows

    @property
    def flops_after(self) -> int:
        """Floating-point operations that one sample costs after surgery."""
        return 2 * self.weights_after * self.rows

    @property
    def architecture(self) -> str | None:
        """The architectures of the parts as text; None where the layer stays dense."""
        if not self.is_replaced:
            return None
        names: dict[str, list[str]] = {}
        for part in self.parts:
            names.setdefault("dense" if part.architecture is None else str(part.architecture), []).append(part.name or "")
        return "; ".join(f"{','.join(of)} {text}".strip() for text, of in names.items())

    @property
    def family(self) -> str | None:
        """The family of the parts' architectures, or their families; None where the layer stays dense."""
        if not self.is_replaced:
            return None
        return " and ".join(dict.fromkeys("dense" if part.architecture is None else family_of(part.architecture) for part in self.parts))


def _weights(part: Part, in_features: int) -> int:
    return part.architecture.num_parameters if part.architecture else (part.stop - part.start) * in_features


def _check_parts(layer: LayerPlan) -> None:
    parts = layer.parts
    bounds = [0, *(part.stop for part in parts)]
    if [part.start for part in parts] != bounds[:-1] or bounds[-1] != layer.out_features or any(a >= b for a, b in pairwise(bounds)):
        spans = ", ".join(f"{part.start} to {part.stop}" for part in parts)
        raise PlanError(f"layer {layer.fqn}: its parts must tile the rows 0 to {layer.out_features} in order, got {spans or 'none'}")
    if not any(part.architecture for part in parts):
        raise PlanError(f"layer {layer.fqn} is replaced and yet no part of it has an architecture")
    names = [part.name for part in parts]
    if len(parts) == 1 and names != [None]:
        raise PlanError(f"layer {layer.fqn} is one matrix, so its only part has no name; got {names[0]!r}")
    if len(parts) > 1 and (
        len(set(names)) < len(parts) or not all(name and name.isidentifier() and not hasattr(nn.Module, name) for name in names)
    ):
        raise PlanError(f"layer {layer.fqn}: its parts need different names that a module can take, got {names}")
    for part in parts:
        if part.architecture is None:
            continue
        try:
            check_fits(part.architecture, part.stop - part.start, layer.in_features)
        except PatternError as error:
            raise PlanError(f"layer {layer.fqn}: {error}") from error
        if part.architecture.density > 1:
            raise PlanError(f"layer {layer.fqn}: architecture {part.architecture} has more parameters than the dense {layer.size} matrix")
