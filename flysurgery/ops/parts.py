"""What the inference operators take beside x: a norm, and a linear layer, of factors or dense, with its bias."""

from __future__ import annotations

from math import prod
from operator import index
from typing import NamedTuple

from torch import Tensor

from flysurgery.factors import architecture_of


class Norm(NamedTuple):
    """Layer norm over the last dimension: ``(x - mean) / sqrt(variance + eps) * weight + bias``."""

    weight: Tensor | None  # shape: (features,)
    bias: Tensor | None  # shape: (features,)
    eps: float = 1e-5

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([part for part in self[:2] if part is not None])

    @property
    def form(self) -> tuple[bool, bool]:
        """Which of the tensors are there."""
        return self.weight is None, self.bias is None


class FusedFactors(NamedTuple):
    """One butterfly layer: its factors, left to right as in W = K_1 K_2, and its bias."""

    factors: tuple[Tensor, ...]  # shapes: (a, b, c, d)
    bias: Tensor | None = None  # shape: (out_features,)

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs."""
        architecture = architecture_of(self.factors)
        return architecture.in_features, architecture.out_features

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Of the factors, as constants for a compiler that takes them for unknown, as those of tensors that are no parameters."""
        return tuple(tuple(map(index, factor.shape)) for factor in self.factors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.factors if self.bias is None else (*self.factors, self.bias)

    @property
    def form(self) -> tuple[int, bool]:
        """Which of the tensors are there, and that they are factors."""
        return len(self.factors), self.bias is None


class Dense(NamedTuple):
    """One dense layer: its weight, as a parameter so that what is packed from it is remembered, and its bias."""

    weight: Tensor  # shape: (out_features, *), of in_features elements in each of the outputs
    bias: Tensor | None = None  # shape: (out_features,)

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs, constants likewise."""
        outputs, *inputs = map(index, self.weight.shape)
        return prod(inputs), outputs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    @property
    def form(self) -> tuple[int, bool]:
        """Which of the tensors are there, and that the weight is no factor."""
        return 0, self.bias is None


Linear = FusedFactors | Dense


class Gated(NamedTuple):
    """Layers behind which ``activation(gate) * value`` stands: those of the gate and the value, or one whose outputs are both.

    ``gate`` is the index of the gate among the two layers, or among the halves of the one's outputs.
    """

    members: tuple[Linear, ...]
    gate: int = 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs, and what is left when gate and value have been multiplied."""
        return self.members[0].sizes[0], sum(member.sizes[1] for member in self.members) // 2

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for member in self.members for tensor in member.tensors)

    @property
    def form(self) -> tuple[object, ...]:
        """Which half or member is the gate, and the members' forms."""
        return self.gate, *[member.form for member in self.members]
