"""Attention of halves in short sequences on the GPU, by both kernels, beside PyTorch's in the same dtype and the truth in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flysurgery.ops import attention, attention_reason
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.short_attention import launch_short_attention, short_attention
from tests.support.tolerance import BF16, FP16, Arithmetic, assert_epilogue_comparable, assert_equal

pytestmark = pytest.mark.gpu

Operands = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(params=[FP16, BF16], ids=["fp16", "bf16"])
def halves(request: pytest.FixtureRequest) -> Arithmetic:
    return request.param


@pytest.fixture(params=[False, True], ids=["warps", "warpgroups"])
def wgmma(request: pytest.FixtureRequest) -> bool:
    if request.param and device_arch(0) != "sm_90a":
        pytest.skip("warpgroups multiply on sm_90a only")
    return request.param


def operands(batch: int, heads: int, tokens: int, head: int, keys: int, dtype: torch.dtype) -> Operands:
    generator = torch.Generator("cuda").manual_seed(tokens + head)
    q, k, v = (torch.randn(batch, heads, size, head, generator=generator, device="cuda").to(dtype) for size in (tokens, keys, keys))
    return q, k, v


def attend(wgmma: bool, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    sizes = short_attention(q.shape[3], max(q.shape[2], 1), k.shape[2], shared_limit_of(0), wgmma=wgmma)
    return launch_short_attention(sizes, q, k, v, q.shape[3] ** -0.5 if scale is None else scale)


def check(wgmma: bool, halves: Arithmetic, parts: Operands, scale: float | None = None) -> None:
    q, k, v = parts
    truth = scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=scale)
    out = attend(wgmma, q, k, v, scale)
    if scale is not None and scale <= 0:  # some of PyTorch's kernels take it for positive
        q, scale = q * scale, 1.0
    assert_epilogue_comparable(out, scaled_dot_product_attention(q, k, v, scale=scale), truth, halves)
    assert out.transpose(1, 2).is_contiguous()


TOKENS = (1, 5, 17, 50, 129, 192, 193, 197, 200, 201, 208, 257)


@pytest.mark.parametrize(
    ("head", "tokens", "halves"),
    [(head, tokens, (FP16, BF16)[(place + head // 32) % 2]) for head in (64, 32) for place, tokens in enumerate(TOKENS)],
    ids=lambda value: getattr(value, "name", None),
)
def test_as_accurate_as_pytorch(wgmma: bool, head: int, tokens: int, halves: Arithmetic) -> None:
    """The code for both kinds of halves differs in the instructions' type, so each takes every other number of tokens."""
    check(wgmma, halves, operands(1 + 50 // tokens, 3, tokens, head, tokens, halves.dtype))


@pytest.mark.parametrize(("tokens", "keys"), [(196, 77), (80, 5), (5, 130), (300, 64), (197, 5), (136, 208), (257, 300)])
def test_as_many_keys_as_one_likes(wgmma: bool, halves: Arithmetic, tokens: int, keys: int) -> None:
    check(wgmma, halves, operands(5, 3, tokens, 64, keys, halves.dtype))


@pytest.mark.parametrize(("tokens", "keys"), [(5, 300), (64, 197), (70, 300)])
def test_few_queries_of_more_heads_than_multiprocessors(wgmma: bool, halves: Arithmetic, tokens: int, keys: int) -> None:
    """Warpgroups that take turns at different heads, further apart than the ring has slots."""
    check(wgmma, halves, operands(60, 12, tokens, 64, keys, halves.dtype))


@pytest.mark.parametrize("images", [1, 50])
@pytest.mark.parametrize("tokens", [130, 197, 257])
def test_more_heads_than_multiprocessors(wgmma: bool, halves: Arithmetic, tokens: int, images: int) -> None:
    check(wgmma, halves, operands(images, 12, tokens, 64, tokens, halves.dtype))


@pytest.mark.parametrize("scale", [0.5, 1e-4, -0.125, 0.0])
def test_views_of_one_projection_and_other_scales(wgmma: bool, halves: Arithmetic, scale: float) -> None:
    q, k, v = torch.randn(3, 197, 3, 4, 64, device="cuda").to(halves.dtype).permute(2, 0, 3, 1, 4).unbind(0)
    check(wgmma, halves, (q, k, v), scale)
    assert_equal(attend(wgmma, q, k, v, scale), attend(wgmma, q.contiguous(), k.contiguous(), v.contiguous(), scale))


@pytest.mark.parametrize("tokens", [50, 197])
def test_heads_that_share_keys_and_values(wgmma: bool, halves: Arithmetic, tokens: int) -> None:
    q, k, v = operands(2, 3, tokens, 64, tokens, halves.dtype)
    check(wgmma, halves, (q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)))


@pytest.mark.parametrize("tokens", [100, 197, 257])
def test_a_softmax_that_takes_one_key(wgmma: bool, halves: Arithmetic, tokens: int) -> None:
    q, k, v = operands(1, 2, tokens, 64, tokens, halves.dtype)
    chosen = (q.double() @ k.double().mT).argmax(-1, keepdim=True).expand_as(v)
    torch.testing.assert_close(attend(wgmma, q, k, v, 1e5), v.gather(2, chosen), rtol=2 * halves.u_out, atol=0)
    assert_equal(attend(wgmma, q, k[:, :, :1], v[:, :, :1]), v[:, :, :1].expand_as(q))


@pytest.mark.parametrize("below", [1e2, 1e4])
def test_scores_far_below_zero(wgmma: bool, halves: Arithmetic, below: float) -> None:
    """Keys that are not there would outweigh all others."""
    q, k, v = operands(1, 2, 197, 64, 197, halves.dtype)
    q[..., 0], k[..., 0] = -(below**0.5), below**0.5
    check(wgmma, halves, (q, k, v), 1.0)


@pytest.mark.parametrize(("tokens", "wrong"), [(150, 3), (150, 149), (197, 3), (197, 193)])
def test_one_row_has_no_influence_on_another(wgmma: bool, halves: Arithmetic, tokens: int, wrong: int) -> None:
    q, k, v = operands(1, 2, tokens, 64, tokens, halves.dtype)
    out = attend(wgmma, q, k, v)
    q[:, 0, wrong] = torch.nan
    changed = attend(wgmma, q, k, v)
    assert bool(changed[:, 0, wrong].isnan().all())
    others = [row for row in range(tokens) if row != wrong]
    assert_equal(changed[:, :, others], out[:, :, others])
    assert_equal(changed[:, 1], out[:, 1])
    assert attend(wgmma, q[:, :, :0], k, v).shape == (1, 2, 0, 64)


def test_graphs_schema_and_reasons(halves: Arithmetic) -> None:
    q, k, v = operands(40, 2, 130, 64, 130, halves.dtype)
    torch.library.opcheck(torch.ops.flysurgery.short_attention.default, (q, k, v, 0.125))
    expected = attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    out.fill_(torch.nan)
    graph.replay()
    assert_equal(out, expected)
    assert attention_reason(q, k, v) is None
    assert "got 48" in str(attention_reason(*operands(1, 1, 8, 48, 8, halves.dtype)))
    assert "5000 keys" in str(attention_reason(*operands(1, 1, 8, 64, 5000, halves.dtype)))
