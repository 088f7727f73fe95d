"""Fused blocks through the compiler on a GPU: one operator each, as long as that is all that they are."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.inference.fused_block import FusedBlock
from tests.support.tolerance import assert_equal

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"img_size": 64, "patch_size": 16, "embed_dim": 384, "depth": 2, "num_heads": 6, "num_classes": 5}


@pytest.fixture
def x() -> Tensor:
    return torch.randn((64, 17, 384), generator=torch.Generator().manual_seed(3)).cuda().half()


@pytest.fixture
def blocks(faster: None, x: Tensor) -> Iterator[nn.Module]:
    """The blocks of a small ViT, all of whose groups are fused, called three times."""
    torch.compiler.reset()
    model = timm.create_model("vit_small_patch16_224", **SIZES).eval().requires_grad_(False)
    flysurgery.convert(model, "gonon", roles=("ffn", "qkv"))
    model.cuda().half()
    flysurgery.optimize(model, torch.zeros((64, 3, 64, 64), device="cuda").half())
    blocks = model.get_submodule("blocks")
    with torch.no_grad():
        for _ in range(3):
            blocks(x)
    yield blocks
    torch.compiler.reset()


def operators(blocks: nn.Module, x: Tensor) -> list[object]:
    """What a compiler's graph calls."""
    found: list[object] = []

    def look(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., Any]:
        found.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    torch.compile(blocks, fullgraph=True, backend=look)(x)
    return found


SEALED = [torch.ops.flysurgery.sealed] * 2


@torch.no_grad()
def test_a_block_is_one_operator(blocks: nn.Module, x: Tensor) -> None:
    assert operators(blocks, x) == SEALED
    assert operators(copy.deepcopy(blocks), x) == SEALED


@torch.no_grad()
def test_until_it_is_known_to_launch_kernels_alone_the_compiler_sees_them(blocks: nn.Module, x: Tensor) -> None:
    for block in blocks.children():
        assert isinstance(block, FusedBlock)
        block._repeating.repeats = False
    assert len(operators(blocks, x)) > 4


def test_gradients_autocast_and_exports_need_more_than_one_operator(blocks: nn.Module, x: Tensor) -> None:
    assert operators(blocks, x) == SEALED  # no gradients are asked for
    with torch.autocast("cuda", torch.bfloat16):
        assert torch.ops.flysurgery.sealed not in operators(blocks, x)
    blocks.requires_grad_(True)
    assert torch.ops.flysurgery.sealed not in operators(blocks, x)
    blocks.requires_grad_(False)
    exported = torch.export.export(blocks, (x,), strict=False)
    assert not any("sealed" in str(node.target) for node in exported.graph.nodes)


def scale(blocks: nn.Module) -> None:
    blocks.get_parameter("0.mlp.fc1.bias").add_(1.0)


def replace(blocks: nn.Module) -> None:
    layer = blocks.get_submodule("1.attn.proj")
    assert isinstance(layer, nn.Linear)
    layer.weight = nn.Parameter(2 * layer.weight, requires_grad=False)


def hook(blocks: nn.Module) -> None:
    blocks.get_submodule("1.mlp").register_forward_hook(lambda module, args, y: -y)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("change", [scale, replace, hook])
@torch.no_grad()
def test_compiled_blocks_give_what_they_give_by_themselves(
    blocks: nn.Module, x: Tensor, mode: str, change: Callable[[nn.Module], None]
) -> None:
    run = torch.compile(blocks, fullgraph=True, mode=mode)
    for _ in range(4):
        assert_equal(run(x), blocks(x))
    if mode != "default" and change is hook:
        return  # a replayed graph runs no Python
    change(blocks)
    for _ in range(4):
        expected = blocks(x)
        assert_equal(run(x), expected)
