"""Gradients of wide feed-forward blocks factor by factor, on a CPU: what the kernels would compute, from the images that they read."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.factors import factors_to_dense
from flysurgery.gpu import gather, hidden_gradient
from flysurgery.gpu import wide_gradient as wide
from flysurgery.gpu.block_linear import BlockTiling
from flysurgery.gpu.gather import Packer
from flysurgery.gpu.graph_branch import begin_ahead
from flysurgery.gpu.hidden_gradient import HiddenTiles
from flysurgery.ops import FeedForward, trained, training
from flysurgery.ops.feed_forward import ACTIVATIONS
from flysurgery.patterns import Architecture, gonon, monarch
from tests.support import blocks
from tests.support.blocks import block
from tests.support.captured import races_of_steps

Pair = tuple[Architecture, Architecture]
LIMIT = 227 * 1024
PAIRS: dict[str, Pair] = {
    "Gonon et al.": (gonon(1536, 384), gonon(384, 1536)),
    "Monarch": (monarch(1024, 256), monarch(256, 1024)),
    "dense products with the first factor": (monarch(3072, 768), monarch(768, 3072)),
    "strides in all outer factors": (Architecture.of((1, 384, 64, 3), (2, 32, 32, 3)), Architecture.of((2, 48, 32, 2), (2, 64, 576, 1))),
}
LEFT_OUT = ((), ("scale",), ("norm", "residual"), ("norm", "scale", "residual"))


def product_of_blocks(tile: BlockTiling, x: Tensor, image: Tensor, columns: Tensor) -> Tensor:
    image, rows = image[: tile.weight_indices.size].view(tile.weight_indices.shape), len(x)
    pieces = torch.cat([x.view(rows, -1, 8), x.new_zeros(rows, 1, 8)], dim=1)[:, torch.from_numpy(tile.pieces.copy())]
    panels = image.reshape(tile.tiles, tile.classes, -1, tile.columns, 8)
    y = x.new_empty(rows, tile.tiles, tile.columns, tile.classes)
    y[:, :, torch.from_numpy(tile.place)] = torch.einsum("rtcpk,tcpnk->rtnc", pieces, panels)
    return y.reshape(rows, -1)


def hidden_units(x: Tensor, dy: Tensor, image: Tensor, bias: Tensor | None, activation: str, tiles: HiddenTiles) -> tuple[Tensor, ...]:
    """As the kernel's header says: tiles by class, part and piece; h by part, class and piece."""
    rows, width, read = len(x), tiles.columns, tiles.inputs + tiles.gradients
    panels = image[: tiles.hidden * read].view(tiles.count, read // 64, 8, width // 32, 4, 4, 2, 8)
    weights = panels.permute(0, 3, 5, 4, 6, 1, 2, 7).reshape(tiles.classes, tiles.parts, -1, read)
    u = torch.einsum("rjk,jiuk->rjiu", x.view(rows, tiles.classes, -1), weights[..., : tiles.inputs])
    if bias is not None:
        u = u + bias[: tiles.hidden].view(u.shape[1:])
    with torch.enable_grad():
        u = u.detach().requires_grad_()
        h = ACTIVATIONS[activation](u)
    of_h = torch.einsum("rik,jiuk->rjiu", dy.view(rows, tiles.parts, -1), weights[..., tiles.inputs :])
    du = torch.autograd.grad(h, u, of_h)[0].reshape(rows, -1)
    return h.detach().transpose(1, 2).reshape(rows, -1), du, du.sum(0, keepdim=True)


def forward(x: Tensor, given: FeedForward) -> tuple[Tensor, tuple[Tensor]]:
    way: Any = wide.wide_gradient(given.up.architecture, given.down.architecture, LIMIT)  # pyright: ignore[reportAttributeAccessIssue]
    plain = given._replace(residual=False, scale=None, down=given.down._replace(bias=None))
    v = FeedForward.plainly(plain._replace(down=given.down._replace(factors=given.down.factors[1:], bias=None)), x)  # pyright: ignore
    return given.plainly(x), (v[:, torch.from_numpy(way.narrow)].to(x.dtype).contiguous(),)


@pytest.fixture(autouse=True)
def _kernels_by_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "DEVICE", "cpu")
    monkeypatch.setattr(Packer, "__call__", Packer._by_pytorch)
    for module in (wide, gather):
        monkeypatch.setattr(module, "HALF_MODES", {torch.float64: "fp16", torch.float32: "fp16", torch.bfloat16: "bf16"})
    for name, own in (("launch_blocks", product_of_blocks), ("run_hidden_gradient", hidden_units)):
        monkeypatch.setattr(wide, name, own)
    for module in (wide, training, hidden_gradient):
        monkeypatch.setattr(module, "shared_limit_of", lambda index: LIMIT)
    monkeypatch.setitem(training._FORWARD, FeedForward, forward)


def drawn(pair: Pair, left_out: tuple[str, ...], dtype: torch.dtype = torch.float64) -> FeedForward:
    torch.manual_seed(0)
    operation = block(*pair, "gelu", *left_out)(dtype, 5)
    for tensor in operation.tensors:
        tensor.requires_grad_()
    return operation


LEARNING = [("Gonon et al.", (), learning) for learning in ("up", "down", "norm")]


@pytest.mark.parametrize(("name", "left_out", "learning"), [*product(PAIRS, LEFT_OUT, [""]), *LEARNING], ids=str)
def test_gradients_are_those_of_the_definition(name: str, left_out: tuple[str, ...], learning: str) -> None:
    """Of all layers, or of one that learns alone."""
    operation = drawn(PAIRS[name], left_out)
    learners = getattr(operation, learning).tensors if learning else operation.tensors
    for tensor in operation.tensors:
        tensor.requires_grad_(any(tensor is own for own in learners))
    for rows in (1, 5):
        x = torch.randn(rows, PAIRS[name][0].in_features, dtype=torch.float64, requires_grad=True)
        inputs, dy = (x, *learners), torch.randn(rows, PAIRS[name][1].out_features, dtype=torch.float64)
        found = torch.autograd.grad(trained(x, operation), inputs, dy)
        for ours, theirs in zip(found, torch.autograd.grad(operation.plainly(x), inputs, dy), strict=True):
            assert ours.dtype == theirs.dtype and float((ours - theirs).abs().max()) < 1e-6 * float(theirs.abs().max())  # sums are float32


@pytest.mark.parametrize("left_out", [(), ("scale",)], ids=str)
@pytest.mark.parametrize(
    "kinds", [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)], ids=str
)
def test_captured_steps_wait_for_all_that_they_read(
    kinds: tuple[torch.dtype, torch.dtype], left_out: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With biases of the second dtype, whose gradients are cast."""
    operation = drawn(PAIRS["Monarch"], left_out, kinds[0])
    for linear in (operation.up, operation.down):
        linear.bias.data = linear.bias.data.to(kinds[1])  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
    x, optimizer = torch.randn(5, 256, dtype=torch.float32, requires_grad=True), torch.optim.SGD(operation.tensors, 0.1)
    monkeypatch.setitem(training._FORWARD, FeedForward, lambda x, given: (x.clone(), (x.new_zeros(len(x), factors_width(given)),)))

    def step() -> None:
        begin_ahead(x.device)
        trained(x, operation).sum().backward()
        optimizer.step()

    assert races_of_steps(step, monkeypatch) == []


def factors_width(given: FeedForward) -> int:
    return factors_to_dense(given.down.factors[1:]).shape[0]  # pyright: ignore[reportAttributeAccessIssue]


def test_blocks_that_are_not_taken_say_why() -> None:
    up, down = gonon(576 * 4, 576), gonon(576, 576 * 4)
    assert "whole stages of 64 columns" in str(wide.wide_gradient(up, down, LIMIT))
    wider = Architecture.of((1, 3072, 1536, 1), (1, 1536, 768, 1))
    assert "leave more than 75% of the products" in str(wide.wide_gradient(wider, wider.transpose, LIMIT))
    operation = drawn(PAIRS["Monarch"], ())
    assert [wide.takes_wide_gradient(torch.ones(rows, 256), operation.up, operation.down) for rows in (0, 1)] == [False, True]  # pyright: ignore
