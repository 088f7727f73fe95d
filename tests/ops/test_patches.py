"""What the embedding of patches means, what it refuses, and what compiled graphs hold of it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flysurgery.ops import LayerNorm, Norm, PatchEmbedding, patches, reason, run, ways
from tests.gpu.graphs import Graphs
from tests.support.tolerance import assert_equal

FEATURES, COUNT = 6, 12


def integers(*shape: int) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(sum(shape))).double()


IMAGES, WEIGHT, BIAS = integers(5, 3, 12, 16), integers(FEATURES, 3, 4, 4), integers(FEATURES)


@pytest.mark.parametrize("bias", [None, BIAS])
def test_patch_by_patch(bias: Tensor | None) -> None:
    expected = torch.empty(5, COUNT, FEATURES, dtype=torch.float64)
    for patch in range(COUNT):
        row, column = 4 * (patch // 4), 4 * (patch % 4)
        expected[:, patch] = IMAGES[:, :, row : row + 4, column : column + 4].flatten(1) @ WEIGHT.flatten(1).T
    expected = expected if bias is None else expected + bias
    for found in (PatchEmbedding(WEIGHT, bias).plainly(IMAGES), PatchEmbedding(WEIGHT, bias).by_product(IMAGES)):
        assert_equal(found, expected)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "CUDA" in str(reason(IMAGES, PatchEmbedding(WEIGHT, BIAS)))
    monkeypatch.setattr(ways, "_decided", {})
    monkeypatch.setattr(ways, "_obstacle", lambda *_: None)
    for images, operation, words in (
        (IMAGES[:, :, :10], PatchEmbedding(WEIGHT, BIAS), "images of 10x16 are not cut into patches of 4x4"),
        (IMAGES[:, :, :0], PatchEmbedding(WEIGHT, BIAS), "images of 0x16 are not cut"),
        (IMAGES[:, :2], PatchEmbedding(WEIGHT, BIAS), "as many channels"),
        (IMAGES, PatchEmbedding(WEIGHT, BIAS.float()), "torch.float64, got torch.float32"),
    ):
        assert words in str(reason(images, operation))


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
