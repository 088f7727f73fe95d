"""Attention on the GPU, of float32 and of halves for few queries, beside PyTorch's in the same dtype and the truth in float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flysurgery.ops import attention, attention_reason, composed
from flysurgery.ops.cuda.attention import head_attention, launch_attention
from flysurgery.ops.cuda.kernel import device_arch
from flysurgery.ops.cuda.obstacles import shared_limit_of
from tests.support.problems import keep_bits
from tests.support.rounding import rounding_as
from tests.support.tolerance import BF16, FP16, FP32_BY_FP16_PAIRS, TF32, Arithmetic, assert_epilogue_comparable, assert_equal

pytestmark = pytest.mark.gpu

MODES = {"fp32": FP32_BY_FP16_PAIRS, "tf32": TF32}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[Arithmetic]:
    with rounding_as(request.param):
        yield MODES[request.param]


def operands(batch: int, heads: int, tokens: int, head: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(tokens + head)
    sizes = (tokens, keys or tokens, keys or tokens)
    q, k, v = (torch.randn(batch, heads, size, head, generator=generator, device="cuda") for size in sizes)
    return q, k, v


def yardstick(q: Tensor, k: Tensor, v: Tensor, scale: float, mode: Arithmetic) -> Tensor:
    """By PyTorch's products and softmax in float32; for TF32, which cuBLAS leaves out at some sizes, of inputs rounded to its bits."""

    def taken(part: Tensor) -> Tensor:
        return keep_bits(part, mode.exact_bits) if mode is TF32 else part

    weights = torch.softmax(taken(q) @ taken(k).mT * scale, dim=-1)
    return taken(weights) @ taken(v)


@pytest.mark.parametrize(("tokens", "keys"), [(197, None), (64, None), (1009, None), (196, 77), (80, 5)])
@pytest.mark.parametrize("head", [64, 32, 48, 16])
def test_as_accurate_as_pytorch(mode: Arithmetic, tokens: int, keys: int | None, head: int) -> None:
    q, k, v = operands(2, 3, tokens, head, keys)
    truth = scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert_epilogue_comparable(attention(q, k, v), yardstick(q, k, v, head**-0.5, mode), truth, mode)


def test_views_of_one_projection_and_other_scales(mode: Arithmetic) -> None:
    q, k, v = torch.randn(3, 197, 3, 4, 64, device="cuda").permute(2, 0, 3, 1, 4).unbind(0)
    out = attention(q, k, v, 0.5)
    assert_equal(out, attention(q.contiguous(), k.contiguous(), v.contiguous(), 0.5))
    assert out.transpose(1, 2).is_contiguous()
    truth = composed.attention(q.double(), k.double(), v.double(), 0.5)
    assert_epilogue_comparable(out, yardstick(q, k, v, 0.5, mode), truth, mode)


@pytest.mark.parametrize("power", [-100, -20, 0, 20, 60])
def test_the_range_of_float32(power: int) -> None:
    q, k, v = operands(1, 2, 100, 64)
    out = attention(q * 2.0**-power, k * 2.0**power, v * 2.0**power)
    assert_equal(out * 2.0**-power, attention(q, k, v))


def test_one_key_gets_all() -> None:
    q, k, v = operands(2, 2, 70, 64, keys=1)
    v = v.half().float()  # which pairs of fp16 hold
    assert_equal(attention(q, k, v), v.expand_as(q))


def test_a_softmax_that_takes_one_key() -> None:
    q, k, v = operands(1, 2, 100, 64)
    v = v.half().float()  # which pairs of fp16 hold
    chosen = (q.double() @ k.double().mT).argmax(-1, keepdim=True).expand_as(v)
    assert_equal(attention(q * 2.0**30, k, v), v.gather(2, chosen))


def test_one_row_has_no_influence_on_another() -> None:
    q, k, v = operands(1, 1, 150, 64)
    out = attention(q, k, v)
    q[:, :, 3] = torch.nan
    changed = attention(q, k, v)
    assert bool(changed[:, :, 3].isnan().all())
    others = [row for row in range(150) if row != 3]
    assert_equal(changed[:, :, others], out[:, :, others])
    assert attention(q[:, :, :0], k, v).shape == (1, 1, 0, 64)


def test_graphs_and_schema(mode: Arithmetic) -> None:
    q, k, v = operands(2, 2, 130, 64)
    torch.library.opcheck(torch.ops.flysurgery.attention.default, (q, k, v, 0.125, "tf32" if mode is TF32 else "fp32"))
    expected = attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    out.fill_(torch.nan)
    graph.replay()
    assert_equal(out, expected)


def test_reasons() -> None:
    q, k, v = operands(1, 2, 20, 64)
    assert attention_reason(q, k, v) is None
    assert attention_reason(q.half(), k.half(), v.half()) is None
    assert "got 80" in str(attention_reason(*operands(1, 1, 8, 80)))
    assert "fit each other" in str(attention_reason(q, k[:, :1], v))
    assert "no gradients" in str(attention_reason(q.requires_grad_(), k, v))


def by_heads(mode: Arithmetic, q: Tensor, k: Tensor, v: Tensor, scale: float = 0.125) -> Tensor:
    """By the kernel whose blocks take whole heads, however few there are."""
    if device_arch(0) != "sm_90a":
        pytest.skip("warpgroups multiply on sm_90a only")
    sizes = head_attention("tf32" if mode is TF32 else "fp32", max(q.shape[2], 1), k.shape[2], shared_limit_of(0))
    assert sizes is not None
    return launch_attention(sizes, q, k, v, scale)


@pytest.mark.parametrize(
    ("tokens", "keys"), [(5, 130), (50, 50), (80, 5), (129, 129), (196, 77), (197, 197), (197, 64), (200, 208), (257, 257)]
)
def test_whole_heads_as_accurate_as_pytorch(mode: Arithmetic, tokens: int, keys: int) -> None:
    q, k, v = operands(1 + 500 // tokens, 3, tokens, 64, keys)
    truth = scaled_dot_product_attention(q.double(), k.double(), v.double())
    out = by_heads(mode, q, k, v)
    assert_epilogue_comparable(out, yardstick(q, k, v, 0.125, mode), truth, mode)
    assert out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("scale", [0.5, 1e-4, -0.125, 0.0])
def test_whole_heads_of_views_and_by_other_scales(mode: Arithmetic, scale: float) -> None:
    q, k, v = torch.randn(60, 197, 3, 4, 64, device="cuda").permute(2, 0, 3, 1, 4).unbind(0)
    out = by_heads(mode, q, k, v, scale)
    assert_equal(out, by_heads(mode, q.contiguous(), k.contiguous(), v.contiguous(), scale))
    truth = composed.attention(q.double(), k.double(), v.double(), scale)
    assert_epilogue_comparable(out, yardstick(q, k, v, scale, mode), truth, mode)


@pytest.mark.parametrize("power", [-100, -20, 0, 20, 60])
def test_whole_heads_in_the_range_of_float32(mode: Arithmetic, power: int) -> None:
    q, k, v = operands(1, 2, 197, 64)
    out = by_heads(mode, q * 2.0**-power, k * 2.0**power, v * 2.0**power)
    assert_equal(out * 2.0**-power, by_heads(mode, q, k, v))


@pytest.mark.parametrize("below", [1e2, 1e4])
def test_whole_heads_with_scores_far_below_zero(mode: Arithmetic, below: float) -> None:
    """Keys that are not there would outweigh all others."""
    q, k, v = operands(1, 2, 197, 64)
    q[..., 0], k[..., 0] = -(below**0.5), below**0.5
    truth = scaled_dot_product_attention(q.double(), k.double(), v.double(), scale=1.0)
    assert_epilogue_comparable(by_heads(mode, q, k, v, 1.0), yardstick(q, k, v, 1.0, mode), truth, mode)


@pytest.mark.parametrize("wrong", [3, 196])
def test_one_row_has_no_influence_on_another_of_its_head(mode: Arithmetic, wrong: int) -> None:
    q, k, v = operands(1, 2, 197, 64)
    out = by_heads(mode, q, k, v)
    q[:, 0, wrong] = torch.nan
    changed = by_heads(mode, q, k, v)
    assert bool(changed[:, 0, wrong].isnan().all())
    others = [row for row in range(197) if row != wrong]
    assert_equal(changed[:, :, others], out[:, :, others])
    assert_equal(changed[:, 1], out[:, 1])
    assert by_heads(mode, q[:, :, :0], k, v).shape == (1, 2, 0, 64)


@pytest.mark.parametrize(("tokens", "keys"), [(1, 1), (70, 1)])
def test_one_key_gets_all_of_a_whole_head(mode: Arithmetic, tokens: int, keys: int) -> None:
    q, k, v = operands(200, 2, tokens, 64, keys)
    v = v.half().float()  # which fp16 holds
    assert_equal(by_heads(mode, q, k, v), v.expand_as(q))


def test_a_softmax_of_a_whole_head_that_takes_one_key() -> None:
    q, k, v = operands(1, 2, 197, 64)
    v = v.half().float()  # which fp16 holds
    chosen = (q.double() @ k.double().mT).argmax(-1, keepdim=True).expand_as(v)
    assert_equal(by_heads(FP32_BY_FP16_PAIRS, q * 2.0**30, k, v), v.gather(2, chosen))


def test_many_heads_are_taken_whole(mode: Arithmetic) -> None:
    q, k, v = operands(50, 3, 197, 64)
    same = by_heads(mode, q, k, v)
    assert_equal(attention(q, k, v), same)
    torch.library.opcheck(torch.ops.flysurgery.attention.default, (q, k, v, 0.125, "tf32" if mode is TF32 else "fp32"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v)
    out.fill_(torch.nan)
    graph.replay()
    assert_equal(out, same)


@pytest.fixture(params=[FP16, BF16], ids=["fp16", "bf16"])
def halves(request: pytest.FixtureRequest) -> Arithmetic:
    return request.param


@pytest.mark.parametrize(("batch", "tokens", "keys"), [(1, 197, None), (1, 256, None), (3, 64, None), (2, 100, 77), (1, 37, 5)])
@pytest.mark.parametrize("head", [64, 32])
def test_few_queries_as_accurate_as_pytorch(halves: Arithmetic, batch: int, tokens: int, keys: int | None, head: int) -> None:
    q, k, v = (part.to(halves.dtype) for part in operands(batch, 6, tokens, head, keys))
    truth = scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert_epilogue_comparable(attention(q, k, v), scaled_dot_product_attention(q, k, v), truth, halves)


def test_few_queries_of_one_projection_in_graphs(halves: Arithmetic) -> None:
    x = torch.randn(1, 197, 3, 6, 64, device="cuda").to(halves.dtype)
    q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)
    expected = attention(q.contiguous(), k.contiguous(), v.contiguous(), 0.5)
    torch.library.opcheck(torch.ops.flysurgery.few_attention.default, (q.contiguous(), k.contiguous(), v.contiguous(), 0.125))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(q, k, v, 0.5)
    assert out.transpose(1, 2).is_contiguous()
    out.fill_(torch.nan)
    graph.replay()
    assert_equal(out, expected)


def test_few_queries_one_key_and_one_row(halves: Arithmetic) -> None:
    q, k, v = (part.to(halves.dtype) for part in operands(2, 2, 70, 64, keys=1))
    assert_equal(attention(q, k, v), v.expand_as(q))
    q, k, v = (part.to(halves.dtype) for part in operands(1, 2, 100, 64))
    chosen = (q.double() @ k.double().mT).argmax(-1, keepdim=True).expand_as(v)
    assert_equal(attention(q, k, v, 1e6), v.gather(2, chosen))
    out = attention(q, k, v)
    q[:, :, 3] = torch.nan
    changed = attention(q, k, v)
    assert bool(changed[:, :, 3].isnan().all())
    others = [row for row in range(100) if row != 3]
    assert_equal(changed[:, :, others], out[:, :, others])
