"""The operands of kernels besides x: a norm, and a linear layer, of factors or dense, with its bias; and whether they fit."""

from math import prod
from typing import NamedTuple

from torch import Tensor

from flysurgery.factors import architecture_of, ks_einsum
from flysurgery.patterns import Architecture


def present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """The tensors that are there."""
    return tuple([tensor for tensor in tensors if tensor is not None])


def sent_through(
    row: Tensor,  # shape: (in_features,)
    *factors: Tensor,  # shapes: (a, b, c, d), in the order in which the row meets them
) -> Tensor:  # shape: (out_features,)
    """The product of a row and factors."""
    rows = row[None]
    for factor in factors:
        rows = ks_einsum(rows, factor)
    return rows[0]


class Norm(NamedTuple):
    """Layer norm over the last dimension: ``(x - mean) / sqrt(variance + eps) * weight + bias``."""

    weight: Tensor | None  # shape: (features,)
    bias: Tensor | None  # shape: (features,)
    eps: float = 1e-5

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return present(*self[:2])

    @property
    def form(self) -> tuple[bool, bool]:
        """Which of the tensors are missing."""
        return self.weight is None, self.bias is None

    def folded_into(self, *factors: Tensor) -> tuple[Tensor, Tensor | None]:  # shapes: (a, b, c, d), (out_features,)
        """The first of some factors, in the order in which a row meets them, times the weight; and what all of them make of the bias."""
        first = factors[0]
        sent = None if self.bias is None else sent_through(self.bias.detach().to(first.dtype), *factors)
        if self.weight is not None:
            first = first * self.weight.detach().to(first.dtype).view(first.shape[0], 1, first.shape[2], first.shape[3])
        return first, sent


class FusedFactors(NamedTuple):
    """One butterfly layer: its factors, left to right as in W = K_1 K_2, and its bias."""

    factors: tuple[Tensor, ...]  # shapes: (a, b, c, d)
    bias: Tensor | None = None  # shape: (out_features,)

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs."""
        return self.architecture.in_features, self.architecture.out_features

    @property
    def architecture(self) -> Architecture:
        """The factors' patterns."""
        return architecture_of(self.factors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return present(*self.factors, self.bias)

    @property
    def form(self) -> tuple[int, bool]:
        """How many factors there are, and whether the bias is missing."""
        return len(self.factors), self.bias is None


class Dense(NamedTuple):
    """One dense layer: its weight and its bias. The weight is a parameter, so that its packed form is remembered."""

    weight: Tensor  # shape: (out_features, *), of in_features elements in each of the outputs
    bias: Tensor | None = None  # shape: (out_features,)

    @property
    def sizes(self) -> tuple[int, int]:
        """Inputs and outputs."""
        outputs, *inputs = self.weight.shape
        return prod(inputs), outputs

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return present(*self)

    @property
    def form(self) -> tuple[int, bool]:
        """That there are no factors, and whether the bias is missing."""
        return 0, self.bias is None


Linear = FusedFactors | Dense


class Gated(NamedTuple):
    """Layers whose outputs become ``activation(gate) * value``: one for the gate and one for the value, or one layer for both.

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


def wrong_size(x: Tensor, linear: Linear) -> str | None:
    """Why rows of x do not fit a linear, or its bias does not; None where they do."""
    inputs, outputs = linear.sizes
    if x.dim() == 0 or x.shape[-1] != inputs:
        dense = isinstance(linear, Dense)
        named = f"a weight of shape {tuple(linear.weight.shape)} takes" if dense else f"factors {linear.architecture} take"
        return f"{named} {inputs} features, got x of shape {tuple(x.shape)}"
    return wrong_vector(linear.bias, outputs, "bias")


def wrong_vector(vector: Tensor | None, size: int, name: str) -> str | None:
    """Why a vector does not have one entry for each feature; None where it does, or there is none."""
    if vector is None or tuple(vector.shape) == (size,):
        return None
    return f"expected a {name} of shape ({size},), got {tuple(vector.shape)}"


def wrong_norm(norm: Norm | None, features: int) -> str | None:
    """Why a norm's weight or bias do not fit this many features; None where they do, or there is no norm."""
    if norm is None:
        return None
    return wrong_vector(norm.weight, features, "norm weight") or wrong_vector(norm.bias, features, "norm bias")
