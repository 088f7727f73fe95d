"""What the embedding of patches means, where position has rows for which tokens, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flysurgery.errors import BackendError
from flysurgery.ops import LayerNorm, Norm, PatchEmbedding, patches, reason, run, ways
from tests.gpu.graphs import Graphs
from tests.support.tolerance import assert_equal

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
    monkeypatch.setattr(patches, "_patches_obstacle", lambda *_: "no kernel")


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


def test_it_needs_a_gpu() -> None:
    assert "CUDA" in str(reason(IMAGES, PatchEmbedding(WEIGHT, BIAS)))


def test_a_compiled_graph_holds_one_operator_and_no_other_operation_is_fused_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patches, "_patches_obstacle", lambda *_: None)
    look = Graphs()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        images, weight, bias = (each.to("cuda") for each in (IMAGES.half(), WEIGHT.half(), BIAS.half()))

        def embed(images: Tensor) -> Tensor:
            assert reason(images[:, 0], LayerNorm(Norm(None, None))) is not None
            return run(images, PatchEmbedding(weight, bias))

        compiled = torch.compile(embed, fullgraph=True, dynamic=True, backend=look)
        assert compiled(images).shape == (5, COUNT, FEATURES)
    assert look.operators() == ["dense_patches"]
