"""What the operations mean, of dense layers, factors and patches of images; what they refuse, and what is remembered of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from flysurgery.errors import BackendError
from flysurgery.ops import (
    Dense,
    FeedForward,
    FusedFactors,
    Gated,
    LinearResidual,
    Norm,
    PatchEmbedding,
    reason,
    run,
    ways,
)
from flysurgery.ops.as_dense import side_by_side
from flysurgery.ops.one_launch import multiplied
from tests.support.tolerance import assert_equal


def test_dense_layers_are_factors_and_filters_are_dense_layers() -> None:
    x, residual, scale, weight, bias = integers(5, 48), integers(5, 6), integers(6), integers(6, 3, 4, 4), integers(6)
    matrix = weight.flatten(1)
    for layer in (Dense(matrix, bias), FusedFactors((matrix[None, :, :, None],), bias), Dense(weight, bias)):
        assert layer.sizes == (48, 6)
        assert_equal(LinearResidual(layer, residual, scale).plainly(x), residual + scale * (x @ matrix.T + bias))


def test_gate_and_value_are_two_layers_or_the_halves_of_one() -> None:
    x, gate, value = integers(5, 8), Dense(integers(6, 8), integers(6)), Dense(integers(12, 8)[6:], integers(12)[6:])
    down = Dense(integers(8, 6))
    assert gate.bias is not None and value.bias is not None
    hidden = silu(x @ gate.weight.T + gate.bias) * (x @ value.weight.T + value.bias)
    expected = x + integers(8) * (layer_norm(hidden, (6,), eps=0.1) @ down.weight.T)
    for place, (one, other) in enumerate(((gate, value), (value, gate))):
        assert one.bias is not None and other.bias is not None
        both = Dense(torch.cat([one.weight, other.weight]), torch.cat([one.bias, other.bias]))
        for up in (Gated((one, other), place), Gated((both,), place)):
            assert up.sizes == (8, 6)
            found = FeedForward(None, up, down, "silu", integers(8), inner=Norm(None, None, 0.1)).plainly(x)
            torch.testing.assert_close(found, expected)


def test_linears_side_by_side_are_one_dense_layer_until_a_weight_changes() -> None:
    x, bias = integers(5, 6), integers(6)
    group = FusedFactors((integers(1, 3, 3, 2), integers(2, 3, 3, 1)), bias), Dense(integers(4, 6))
    for _ in range(2):
        one = side_by_side(group, x.dtype)
        assert_equal(linear(x, one.weight, one.bias), torch.cat([multiplied(x, each) for each in group], dim=-1))
        assert side_by_side(group, x.dtype).weight is one.weight
        group[0].factors[1].mul_(2)


FEATURES, TOKENS, COUNT = 6, 2, 12


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).double()


IMAGES, WEIGHT, BIAS = integers(5, 3, 12, 16), integers(FEATURES, 3, 4, 4), integers(FEATURES)
PREFIX = [integers(1, 1, FEATURES), integers(1, FEATURES)]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tensors of any device through, to PyTorch's product."""
    monkeypatch.setattr(ways, "_decided", {})
    monkeypatch.setattr(ways, "_obstacle", lambda *_: None)


def by_hand(position: Tensor | None, prefix: list[Tensor]) -> Tensor:
    """Token by token."""
    expected = torch.empty(5, len(prefix) + COUNT, FEATURES, dtype=torch.float64)
    for place in range(expected.shape[1]):
        patch = place - len(prefix)
        if patch < 0:
            expected[:, place] = prefix[place].flatten()
        else:
            row, column = 4 * (patch // 4), 4 * (patch % 4)
            expected[:, place] = IMAGES[:, :, row : row + 4, column : column + 4].flatten(1) @ WEIGHT.flatten(1).T + BIAS
        if position is not None and position.shape[-2] == COUNT:
            expected[:, place] += position[..., patch, :].flatten() if patch >= 0 else 0
        elif position is not None:
            expected[:, place] += position[..., place, :].flatten()
    return expected


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(("prefix", "rows"), [([], 0), ([], COUNT), (PREFIX, 0), (PREFIX, COUNT), (PREFIX, TOKENS + COUNT)])
def test_position_and_tokens(prefix: list[Tensor], rows: int) -> None:
    position = integers(1, rows, FEATURES) if rows else None
    expected = by_hand(position, prefix)
    assert_equal(PatchEmbedding(WEIGHT, BIAS, position, prefix).plainly(IMAGES), expected)
    assert_equal(run(IMAGES, PatchEmbedding(WEIGHT, BIAS, position, prefix)), expected)


@pytest.mark.usefixtures("taken")
@pytest.mark.parametrize(
    ("position", "prefix", "words"),
    [
        (integers(1, 11, FEATURES), [], "12 patches and 0 tokens before them have no position of 11 rows"),
        (integers(14, FEATURES), PREFIX[:1], "12 patches and 1 tokens before them have no position of 14 rows"),
        (integers(COUNT, 5), [], r"rows of 6 features, got a tensor of shape \(12, 5\)"),
        (None, [integers(2, 1, FEATURES)], r"rows of 6 features, got a tensor of shape \(2, 1, 6\)"),
        (None, [integers(FEATURES)], r"rows of 6 features, got a tensor of shape \(6,\)"),
        (integers(COUNT, FEATURES).float(), [], "torch.float64, got torch.float32"),
    ],
)
def test_rows_of_no_token_are_refused(position: Tensor | None, prefix: list[Tensor], words: str) -> None:
    with pytest.raises(BackendError, match=words):
        run(IMAGES, PatchEmbedding(WEIGHT, BIAS, position, prefix))


@pytest.mark.usefixtures("taken")
def test_images_that_are_no_whole_patches_are_refused() -> None:
    assert "images of 10x16 are not cut into patches of 4x4" in str(reason(IMAGES[:, :, :10], PatchEmbedding(WEIGHT, BIAS)))
    assert "images of 0x16 are not cut" in str(reason(IMAGES[:, :, :0], PatchEmbedding(WEIGHT, BIAS)))


def test_there_may_be_no_images() -> None:
    embedding = PatchEmbedding(WEIGHT, BIAS, integers(COUNT, FEATURES), [])
    assert_equal(embedding.by_product(IMAGES[:0]), embedding.by_product(IMAGES)[:0])


def test_it_needs_a_gpu() -> None:
    assert "CUDA" in str(reason(IMAGES, PatchEmbedding(WEIGHT, BIAS)))
