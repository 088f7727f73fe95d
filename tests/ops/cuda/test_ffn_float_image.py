"""The packed weights of the float32 feed-forward block, read as the kernel reads them: they reproduce it, and nothing overflows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.factors import ks_einsum
from flysurgery.ops.cuda.ffn_float_image import pack_float_ffn
from flysurgery.ops.cuda.ffn_float_tiling import HEADER_BYTES, FloatFfnTiling, float_ffn_tiling
from flysurgery.ops.cuda.ffn_image import input_order
from flysurgery.ops.cuda.ffn_tiling import tiles_of
from tests.ops.cuda.test_ffn_image import BLOCKS, SHARED

LARGEST_HALF = 65504.0


class Panels:
    """The image, panel by panel in the order of use."""

    def __init__(self, tile: FloatFfnTiling, image: Tensor) -> None:
        self.tile, self.panels = tile, list(image[HEADER_BYTES:].view(-1, tile.stride))
        self.fits = image[:20].view(torch.float32).double()

    def next(self, k: int, columns: int, parts: int, floats: int = 0) -> tuple[Tensor, Tensor]:
        """Weights of shape (k, columns) in some parts, and the float32 values behind the first one's."""
        found = [self.panels.pop(0) for _ in range(parts)]
        size = 2 * k // parts * columns
        images = [torch.cat([panel[n * size : (n + 1) * size] for panel in found]) for n in range(self.tile.images)]
        weights = sum((image.view(torch.float16).double() for image in images), start=torch.zeros(()))
        ordered = weights.view(k // 8, columns, 8).transpose(1, 2).reshape(k, columns)
        return ordered, found[0][size * self.tile.images :][: 4 * floats].view(torch.float32).double()


def emulate(tile: FloatFfnTiling, image: Tensor, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    """What the kernel computes, in float64 and without the residual, from normalized rows; and its operands."""
    first, second, third, last = tile.factors
    panels = Panels(tile, image)
    u_fit, to_hidden, hidden_fit, v_fit, to_output = panels.fits

    def pick(held: Tensor, steps: list[tuple[int, int]]) -> Tensor:
        padded = torch.cat([held, held.new_zeros(len(held), 8)], dim=1).view(len(held), -1, 8)
        return padded[:, [t for pair in steps for t in pair]].flatten(1)

    def up(piece: int) -> Tensor:
        steps = tile.middle_steps[piece // tile.pieces % second.d]
        return pick(u, steps) @ panels.next(16 * len(steps), tile.hidden, tile.parts[1])[0]

    order = torch.from_numpy(input_order(first.c, tile.vector))
    x = x * 2.0**tile.normalized_exponent
    u = [block[:, order] @ panels.next(first.c, 8 * tiles_of(first), tile.parts[0])[0] for block in x.view(len(x), first.a, -1).unbind(1)]
    u = torch.cat(u, dim=1) * u_fit
    v, operands = x.new_zeros(third.a, len(x), 8 * tiles_of(third)), [x, u]
    count = second.d * tile.pieces
    sums = up(0)
    for piece in range(third.a * count):
        following = up(piece + 1) if piece + 1 < third.a * count else sums
        weights, bias = panels.next(tile.hidden, 8 * tiles_of(third), tile.parts[2], tile.hidden)
        operands.append(functional.gelu(sums * to_hidden + bias) * hidden_fit)
        v[piece // count] += operands[-1] @ weights
        sums = following
    v, y = torch.cat(v.unbind(), dim=1) * v_fit, x.new_full((len(x), last.b, last.d), torch.nan)
    lane, held = torch.arange(4)[:, None], torch.arange(2 * tile.run)[None, :]
    for start in range(0, last.b, tile.columns):
        for cls, steps in enumerate(tile.last_steps):
            weights, floats = panels.next(16 * len(steps), tile.columns, tile.parts[3], (2 if tile.scaled else 1) * tile.columns)
            out = pick(v, steps) @ weights * to_output + floats[: tile.columns]
            out = out * floats[tile.columns :] if tile.scaled else out
            for run in range(start, start + tile.columns, 8 * tile.run):  # a lane holds two outputs of each tile of a run
                column = run - start + held // 2 * 8 + 2 * lane + held % 2
                place = run + (held // tile.span * 4 + lane) * tile.span + held % tile.span
                y[:, place.flatten(), cls] = out[:, column.flatten()]
    assert not panels.panels
    return y.flatten(1), [*operands, v]


@pytest.mark.parametrize("mode", ["tf32", "fp32"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_image_holds_the_block(name: str, scaled: bool, mode: str) -> None:
    up, down = BLOCKS[name]
    tile = float_ffn_tiling(up, down, mode, SHARED, scaled=scaled)
    assert isinstance(tile, FloatFfnTiling)
    torch.manual_seed(3)
    first, second, third, last = (
        torch.randn(pattern.factor_shape).double() * size for pattern, size in zip(tile.factors, (1e-9, 1e3, 1, 1e20), strict=True)
    )
    biases, scale = (
        (torch.randn(up.out_features).double(), torch.randn(down.out_features).double()),
        torch.randn(down.out_features).double(),
    )
    norm = (torch.randn(up.in_features).double(), torch.randn(up.in_features).double())
    image = pack_float_ffn(tile, (first, second, third, last), biases, norm, scale if scaled else None)
    x = functional.layer_norm(torch.randn(5, up.in_features).double(), (up.in_features,))
    hidden = functional.gelu(ks_einsum(ks_einsum(x * norm[0] + norm[1], first), second) + biases[0])
    expected = ks_einsum(ks_einsum(hidden, third), last) + biases[1]
    expected = expected * scale if scaled else expected
    out, _ = emulate(tile, image, x)
    assert float((out - expected).norm() / expected.norm()) < (2.0**-20 if mode == "fp32" else 2.0**-10)


@pytest.mark.parametrize("name", BLOCKS)
def test_no_row_overflows_a_half(name: str) -> None:
    """The longest rows that there are: of one large element, and those along what makes one hidden unit."""
    up, down = BLOCKS[name]
    tile = float_ffn_tiling(up, down, "fp32", SHARED, scaled=False)
    assert isinstance(tile, FloatFfnTiling)
    torch.manual_seed(4)
    first, second, third, last = (torch.randn(pattern.factor_shape).double() for pattern in tile.factors)
    rows = torch.cat(
        [torch.eye(up.in_features).double()[:3], ks_einsum(ks_einsum(torch.eye(up.in_features).double(), first), second).T[:9]]
    )
    rows = rows / rows.norm(dim=1, keepdim=True) * up.in_features**0.5
    image = pack_float_ffn(tile, (first, second, third, last), (None, None), (None, None), None)
    _, operands = emulate(tile, image, rows)
    assert all(float(value.abs().max()) <= LARGEST_HALF for value in operands)
    assert all(float(value.abs().max()) >= 2.0**-8 * LARGEST_HALF for value in operands[:2])
