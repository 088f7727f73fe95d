"""The packed weights of the fused feed-forward block, read as the kernel reads them: they reproduce the block in float64."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flysurgery.factors import ks_einsum
from flysurgery.ops.cuda import ffn
from flysurgery.ops.cuda.ffn import size_obstacle
from flysurgery.ops.cuda.ffn_image import input_order, pack_ffn
from flysurgery.ops.cuda.ffn_tiling import FfnTiling, class_steps, ffn_tiling, tiles_of
from flysurgery.ops.cuda.ffn_warp_tiling import WarpFfnTiling, warp_ffn_tiling
from flysurgery.ops.cuda.tiling import registers_allowed
from flysurgery.patterns import Architecture
from flysurgery.patterns.catalog import gonon, low_rank, monarch

SHARED = 232448
BLOCKS = {
    "gonon 384": (gonon(1536, 384), gonon(384, 1536)),
    "monarch 384": (monarch(1536, 384), monarch(384, 1536)),
    "gonon 192": (gonon(768, 192), gonon(192, 768)),
    "monarch 192": (monarch(768, 192), monarch(192, 768)),
}


class Panels:
    """The image, panel by panel in the order of use."""

    def __init__(self, image: Tensor, stride: int) -> None:
        self.panels = list(image.view(-1, stride))

    def next(self, k: int, columns: int, floats: int = 0) -> tuple[Tensor, Tensor]:
        """Weights of shape (k, columns) and the float32 values behind them."""
        panel = self.panels.pop(0)
        weights = panel[: 2 * k * columns].view(torch.float16).double().view(k // 8, columns, 8).transpose(1, 2).reshape(k, columns)
        return weights, panel[2 * k * columns :][: 4 * floats].view(torch.float32).double()

    def split(self, bytes_of_first: int) -> None:
        """Make two panels of the next one, which holds the weights of two factors."""
        panel = self.panels.pop(0)
        self.panels[:0] = [panel[:bytes_of_first], panel[bytes_of_first:]]

    def of_parts(self, k: int, columns: int, floats: int, parts: int) -> tuple[Tensor, Tensor]:
        """A product that is cut into parts, each with all values."""
        found = [self.next(k // parts, columns, floats) for _ in range(parts)]
        assert all(torch.equal(values, found[0][1]) for _, values in found)
        return torch.cat([weights for weights, _ in found]), found[0][1]


def emulate(tile: FfnTiling, image: Tensor, x: Tensor) -> Tensor:
    """What the kernel computes, in float64 and without the residual: from normalized rows to scaled outputs."""
    first, second, third, last = tile.factors
    weight_unit, hidden_unit, out_unit = tile.units
    panels = Panels(image, tile.stride)

    def pick(u: Tensor, steps: list[tuple[int, int]]) -> Tensor:
        padded = torch.cat([u, u.new_zeros(len(u), 8)], dim=1).view(len(u), -1, 8)
        return padded[:, [t for pair in steps for t in pair]].flatten(1)

    u = []
    for block in x.view(len(x), first.a, first.c).unbind(1):
        weights, _ = panels.of_parts(first.c, 8 * tiles_of(first), 0, tile.parts[0])
        u.append(block[:, torch.from_numpy(input_order(first.c, tile.vector))] @ weights)
    u, hidden = torch.cat(u, dim=1) * weight_unit / hidden_unit, []
    v = x.new_zeros(third.a, len(x), 8 * tiles_of(third))
    blocks = [block for block in range(third.a) for _ in range(second.d * tile.pieces)]
    for piece, cls in enumerate([cls for _ in range(third.a) for cls in range(second.d) for _ in range(tile.pieces)]):
        if tile.joined:
            panels.split(tile.panel_bytes[1] + 4 * tile.hidden)
        weights, bias = panels.of_parts(16 * len(tile.middle_steps[0]), tile.hidden, tile.hidden, tile.parts[1])
        hidden.append(functional.gelu(hidden_unit * (pick(u, tile.middle_steps[cls]) @ weights + bias)) / out_unit)
        late = 0 if tile.joined else 1  # then the product of a piece with the third factor comes after the next piece
        if piece >= late:
            v[blocks[piece - late]] += hidden[piece - late] @ panels.of_parts(tile.hidden, 8 * tiles_of(third), 0, tile.parts[2])[0]
    if not tile.joined:
        v[-1] += hidden[-1] @ panels.of_parts(tile.hidden, 8 * tiles_of(third), 0, tile.parts[2])[0]
    v, y = torch.cat(v.unbind(), dim=1), x.new_full((len(x), last.b, last.d), torch.nan)
    count = 2 if tile.scaled else 1
    lane, held = torch.arange(4)[:, None], torch.arange(2 * tile.run)[None, :]
    for start in range(0, last.b, tile.columns):
        for cls in range(last.d):
            weights, floats = panels.of_parts(16 * len(tile.last_steps[0]), tile.columns, count * tile.columns, tile.parts[3])
            out = pick(v, tile.last_steps[cls]) @ weights + floats[: tile.columns]
            out = out * (floats[tile.columns :] if tile.scaled else out_unit)
            for run in range(0, tile.columns, 8 * tile.run):  # lane t stores what it holds of each tile of a run side by side
                column = run + held // 2 * 8 + 2 * lane + held % 2
                y[:, start + run : start + run + 8 * tile.run, cls] = out[:, column.flatten()]
    assert not panels.panels
    return y.flatten(1)


@pytest.mark.parametrize("find", [ffn_tiling, warp_ffn_tiling])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_the_image_holds_the_block(name: str, scaled: bool, find: Callable[..., FfnTiling | str]) -> None:
    up, down = BLOCKS[name]
    tile = find(up, down, SHARED, scaled=scaled)
    assert isinstance(tile, FfnTiling)
    make = torch.Generator().manual_seed(3)

    def halves(*shape: int) -> Tensor:
        return torch.randint(-8, 9, shape, generator=make).double() / 8

    first, second, third, last = (halves(*pattern.factor_shape) for pattern in tile.factors)
    biases, scale = (halves(up.out_features), halves(down.out_features)), halves(down.out_features)
    norm = (torch.full((up.in_features,), 0.5), halves(up.in_features))
    image = pack_ffn(tile, (first, second, third, last), biases, norm, scale if scaled else None, torch.float16)
    x = halves(5, up.in_features)
    entering = x * norm[0].double() + norm[1]
    hidden = functional.gelu(ks_einsum(ks_einsum(entering, first), second) + biases[0])
    expected = ks_einsum(ks_einsum(hidden, third), last) + biases[1]
    expected = expected * scale if scaled else expected
    # All is exact in float64, but for the beta that passes through the up layer into a float32 bias.
    torch.testing.assert_close(emulate(tile, image, x), expected, rtol=2.0**-20, atol=2.0**-20 * float(expected.abs().max()))


@pytest.mark.parametrize("find", [ffn_tiling, warp_ffn_tiling])
def test_every_weight_is_there_and_panels_have_one_stride(find: Callable[..., FfnTiling | str]) -> None:
    for up, down in BLOCKS.values():
        tile = find(up, down, SHARED, scaled=True)
        assert isinstance(tile, FfnTiling)
        first, second, third, last = (torch.ones(pattern.factor_shape) for pattern in tile.factors)
        image = pack_ffn(tile, (first, second, third, last), (None, None), (None, None), torch.ones(down.out_features), torch.float16)
        assert len(image) == sum(tile.panel_counts) * tile.stride
        second = second / tile.units[0]
        counts = [int((image.view(torch.float16) == value).sum()) for value in (1.0, 0.5)]
        held = torch.cat([factor.flatten() for factor in (first, second, third, last)])
        assert counts == [int((held == value).sum()) for value in (1.0, 0.5)]


@pytest.mark.parametrize(
    ("up", "down", "mode", "activation", "residual", "words"),
    [
        (gonon(1536, 384), gonon(384, 1536), None, "gelu", True, "float16, bfloat16 and float32"),
        (gonon(1536, 384), gonon(384, 1536), "fp16", "relu", True, "activations"),
        (gonon(1536, 384), low_rank(192, 1536), "fp16", "gelu", True, "as many outputs as inputs"),
        (monarch(4096, 1024), monarch(1024, 4096), "fp16", "gelu", True, "no tile"),
        (Architecture.of((1, 1536, 384, 1)), gonon(384, 1536), "fp16", "gelu", True, "two factors"),
        (monarch(1536, 384, 2), monarch(384, 768), "fp16", "gelu", True, "reads 768 features"),
    ],
)
def test_the_reason_says_what_is_wrong(
    up: Architecture, down: Architecture, mode: str | None, activation: str, residual: bool, words: str
) -> None:
    for wgmma in (True, False):
        reason = size_obstacle(up, down, mode, True, activation, residual, SHARED, wgmma=wgmma)
        assert reason is not None and words in reason


@pytest.mark.parametrize("mode", ["tf32", "fp32"])
def test_float32_needs_wgmma_and_a_norm(mode: str) -> None:
    def reason(up: Architecture, down: Architecture, norm: bool = True, wgmma: bool = True) -> str | None:
        return size_obstacle(up, down, mode, norm, "gelu", True, SHARED, wgmma=wgmma)

    assert all(reason(*pair) is None for pair in BLOCKS.values())
    assert "behind a norm" in str(reason(*BLOCKS["gonon 384"], norm=False))
    assert "compute capability 9.0" in str(reason(*BLOCKS["gonon 384"], wgmma=False))
    assert "no tile" in str(reason(gonon(3072, 768), gonon(768, 3072)))
    assert "do not fit in tiles in the rows" in str(reason(monarch(1536, 384), Architecture.of((1, 384, 400, 1), (1, 400, 1536, 1))))


@pytest.mark.parametrize("name", BLOCKS)
def test_neighbouring_tiles_are_a_step_where_a_class_has_both(name: str) -> None:
    up, down = BLOCKS[name]
    for factor, reader in ((up.patterns[1], up.patterns[0]), (down.patterns[1], down.patterns[0])):
        plain, sorted_steps = class_steps(factor, reader), class_steps(factor, reader, neighbours=True)
        for before, steps in zip(plain, sorted_steps, strict=True):
            tiles = [tile for pair in before for tile in pair]
            assert sorted(tile for pair in steps for tile in pair) == sorted(tiles)
            assert all((tile, tile + 1) in steps for tile in tiles if tile >= 0 and tile % 2 == 0 and tile + 1 in tiles)


@pytest.mark.parametrize("width", [192, 384])
def test_panels_that_are_waited_for_together_fit_in_the_ring(width: int) -> None:
    pairs = [(monarch(4 * width, width, n), monarch(width, 4 * width, n)) for n in (2, 4, 8, 16)]
    pairs += [(low_rank(4 * width, width, rank), low_rank(width, 4 * width, rank)) for rank in range(16, width // 2 + 1, 16)]
    found = [tile for pair in pairs for scaled in (False, True) if isinstance(tile := ffn_tiling(*pair, SHARED, scaled=scaled), FfnTiling)]
    assert found and all(tile.slots >= max(2 * tile.parts[0], 2 + tile.parts[2], 2 * tile.parts[3]) for tile in found)


@pytest.mark.parametrize("shared", [99 * 1024, 163 * 1024, SHARED])
@pytest.mark.parametrize("name", [*BLOCKS, "low rank 384", "low rank 192"])
def test_without_wgmma_every_generation_has_a_tiling(name: str, shared: int) -> None:
    width = int(name.split()[-1])
    up, down = BLOCKS.get(name, (low_rank(4 * width, width, width // 4), low_rank(width, 4 * width, width // 4)))
    tile = warp_ffn_tiling(up, down, shared, scaled=True)
    if name == "gonon 384" and shared < 163 * 1024:
        assert isinstance(tile, str) and "no tile" in tile
        return
    assert isinstance(tile, WarpFfnTiling)
    assert tile.shared_bytes <= shared and tile.registers <= registers_allowed(tile.warps)
    assert all(size <= tile.stride for size in (tile.panel_bytes[0], tile.middle_bytes, tile.panel_bytes[3]))


def test_the_device_decides_which_kernel_takes_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ffn, "device_obstacle", lambda index: None)
    monkeypatch.setattr(ffn, "shared_limit_of", lambda index: 99 * 1024)
    found = {}
    for arch in ("sm_89", "sm_90a"):
        monkeypatch.setattr(ffn, "device_arch", lambda index, arch=arch: arch)
        found[arch] = ffn.ffn_obstacle(*BLOCKS["monarch 384"], "fp16", True, "gelu", True, 0)
    assert found["sm_89"] is None
    assert "no tile" in str(found["sm_90a"])  # which has more shared memory in truth


@pytest.mark.parametrize("wgmma", [True, False])
def test_the_tiling_decides_what_is_launched(wgmma: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of y past the last, threads, blocks and shared memory; the kernel itself only notes its launch."""
    launches: list[tuple[object, ...]] = []
    loaded: list[tuple[str, str]] = []

    class Noted:
        def launch(self, grid: tuple[int, ...], block: tuple[int, ...], shared: int, stream: int, *arguments: object, early: bool) -> None:
            launches.append((grid, block, shared, arguments[3], early))

    def load(source: str, defines: object, *, name: str, device_index: int) -> Noted:
        loaded.append((source, name))
        return Noted()

    monkeypatch.setattr(ffn, "load_kernel", load)
    monkeypatch.setattr(ffn, "current_stream", lambda index: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=4))
    tile = (ffn_tiling if wgmma else warp_ffn_tiling)(*BLOCKS["monarch 192"], SHARED, scaled=False)
    assert isinstance(tile, FfnTiling)
    shared_bytes = tile.shared_bytes
    block = ffn.FusedFfn(tile, "fp16", "gelu", True, True, 0)
    monkeypatch.setattr(type(tile), "shared_bytes", property(lambda tile: pytest.fail("a call works its sizes out again")))
    y = block.run(torch.zeros(37, 192, dtype=torch.float16), torch.zeros(1), 1e-6, early=True)
    assert y.shape == (37, 192) and block.run(y[:0], y, 1e-6).shape == (0, 192)
    assert loaded == [("fused_ffn.cu", "fused_ffn") if wgmma else ("ffn_warps.cu", "ffn_warps")]
    assert y.untyped_storage().nbytes() == (64 if wgmma else 37) * 192 * 2
    assert launches == [((1 if wgmma else 3, 1, 1), (512 if wgmma else 32 * 12, 1, 1), shared_bytes, 37, True)]
