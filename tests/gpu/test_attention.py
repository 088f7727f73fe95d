"""Attention on the GPU by each of its kernels, beside PyTorch's in the same arithmetic and the truth in float64."""

from dataclasses import dataclass
from itertools import cycle

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from flysurgery import ops
from flysurgery.gpu.attention import run_attention
from flysurgery.gpu.row_sums import known_sums
from tests.support.blocks import check_replay
from tests.support.problems import all_pairs, keep_bits
from tests.support.tolerance import ARITHMETICS, TF32, Arithmetic, assert_epilogue_comparable, assert_equal

pytestmark = pytest.mark.gpu

Operands = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Attention:
    """A kernel in one mode: of whole heads of floats, of short sequences of halves, or of few queries of halves."""

    kind: str
    mode: str

    def __str__(self) -> str:
        return f"{self.kind}-{self.mode}"

    @property
    def arithmetic(self) -> Arithmetic:
        return ARITHMETICS[self.mode]

    def operands(self, batch: int, heads: int, tokens: int, keys: int | None = None, head: int = 64) -> Operands:
        generator = torch.Generator("cuda").manual_seed(tokens + head)
        sizes = (tokens, keys or tokens, keys or tokens)
        q, k, v = (torch.randn(batch, heads, n, head, generator=generator, device="cuda").to(self.arithmetic.dtype) for n in sizes)
        return q, k, v

    def run(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
        if self.kind == "short":
            return run_attention(q, k, v, q.shape[3] ** -0.5 if scale is None else scale, self.mode, False)
        return ops.run(q, ops.Attention(k, v, scale))

    def yardstick(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """PyTorch's kernel; of floats its products and softmax, in TF32, which cuBLAS leaves out at some sizes, of rounded inputs."""
        if self.kind != "whole heads":
            if scale <= 0:  # some of PyTorch's kernels take it for positive
                q, scale = q * scale, 1.0
            return scaled_dot_product_attention(q, k, v, scale=scale)

        def taken(part: Tensor) -> Tensor:
            return keep_bits(part, TF32.exact_bits) if self.arithmetic is TF32 else part

        weights = torch.softmax(taken(q) @ taken(k).mT * scale, dim=-1)
        return taken(weights) @ taken(v)

    def check(self, parts: Operands, scale: float | None = None) -> None:
        q, k, v = parts
        check_replay(lambda: self.run(q, k, v, scale))
        own = q.shape[3] ** -0.5 if scale is None else scale
        out, truth = self.run(q, k, v, scale), ops.Attention(k.double(), v.double(), own).plainly(q.double())
        assert_epilogue_comparable(out, self.yardstick(q, k, v, own), truth, self.arithmetic)
        assert out.transpose(1, 2).is_contiguous()


WHOLE = [Attention("whole heads", mode) for mode in ("fp32", "tf32")]
SHORT, FEW = ([Attention(kind, mode) for mode in ("fp16", "bf16")] for kind in ("short", "few"))
every = pytest.mark.parametrize("kernel", [*WHOLE, *SHORT, *FEW], ids=str, indirect=True)
of_long = pytest.mark.parametrize("kernel", [*WHOLE, *SHORT], ids=str, indirect=True)


SIZES = [(5, 130), (80, 5), (129, 129), (197, 197), (197, 64), (257, 257)]
SHORT_SIZES = [*SIZES, (1, 1), (193, 193), (5, 300), (257, 300)]
FEW_SIZES = [(1, 197, 197, 64), (1, 256, 256, 32), (2, 100, 77, 32), (1, 37, 5, 64)]
CASES = [(kernel, 1 + 500 // tokens, 3, tokens, keys, 64) for kernel in WHOLE for tokens, keys in SIZES]
CASES += [(kernel, 5 + 50 // tokens, 3, tokens, keys, 64) for kernel, (tokens, keys) in zip(cycle(SHORT), SHORT_SIZES)]
# more heads than multiprocessors: warpgroups take turns at them, further apart than the ring has slots
CASES += [(kernel, 60, 12, tokens, keys, 64) for kernel in SHORT for tokens, keys in ((5, 300), (197, 197))]
CASES += [(kernel, batch, 6, tokens, keys, head) for kernel, (batch, tokens, keys, head) in zip(cycle(FEW), FEW_SIZES)]


@pytest.mark.parametrize(("kernel", "batch", "heads", "tokens", "keys", "head"), CASES, ids=str, indirect=["kernel"])
def test_as_accurate_as_pytorch(kernel: Attention, batch: int, heads: int, tokens: int, keys: int, head: int) -> None:
    kernel.check(kernel.operands(batch, heads, tokens, keys, head))


SCALED = [(kernel, scale) for kernel in (*WHOLE, *SHORT) for scale in (1e-4, -0.125, 0.0)] + [(kernel, 0.5) for kernel in FEW]


@pytest.mark.parametrize(("kernel", "scale"), SCALED, ids=str, indirect=["kernel"])
def test_views_of_one_projection_shared_keys_and_other_scales(kernel: Attention, scale: float) -> None:
    images = 60 if kernel.kind == "whole heads" else 3
    q, k, v = torch.randn(images, 197, 3, 4, 64, device="cuda").to(kernel.arithmetic.dtype).permute(2, 0, 3, 1, 4).unbind(0)
    kernel.check((q, k, v), scale)
    assert_equal(kernel.run(q, k, v, scale), kernel.run(q.contiguous(), k.contiguous(), v.contiguous(), scale))
    if kernel.kind == "short":
        kernel.check((q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)))


@pytest.mark.parametrize("power", [-100, -20, 60])
@pytest.mark.parametrize("kernel", WHOLE, ids=str, indirect=True)
def test_the_range_of_float32(kernel: Attention, power: int) -> None:
    q, k, v = kernel.operands(1, 2, 197)
    out = ops.run(q * 2.0**-power, ops.Attention(k * 2.0**power, v * 2.0**power))
    assert_equal(out * 2.0**-power, ops.run(q, ops.Attention(k, v)))


@of_long
def test_scores_far_below_zero(kernel: Attention) -> None:
    """Keys that are not there would outweigh all others."""
    q, k, v = kernel.operands(1, 2, 197)
    q[..., 0], k[..., 0] = -100.0, 100.0
    kernel.check((q, k, v), 1.0)


@pytest.mark.parametrize(("tokens", "wrong"), [(100, 3), (197, 196)])
@every
def test_a_softmax_that_takes_one_key_and_a_row_that_influences_no_other(kernel: Attention, tokens: int, wrong: int) -> None:
    """The only key there is, or by far the largest."""
    q, k, v = kernel.operands(1, 2, tokens)
    out = kernel.run(q, k, v)
    q[:, 0, wrong] = torch.nan
    changed = kernel.run(q, k, v)
    assert bool(changed[:, 0, wrong].isnan().all())
    others = [row for row in range(tokens) if row != wrong]
    assert_equal(changed[:, :, others], out[:, :, others])
    assert_equal(changed[:, 1], out[:, 1])
    assert kernel.run(q[:, :, :0], k, v).shape == (1, 2, 0, 64)
    assert "no gradients" in str(ops.reason(k.clone().requires_grad_(), ops.Attention(k, v)))
    q, k, v = kernel.operands(1 if kernel.kind == "few" else 200, 2, tokens)
    v = v.half().to(v.dtype)  # which fp16 holds
    assert_equal(kernel.run(q, k[:, :, :1], v[:, :, :1]), v[:, :, :1].expand_as(q))
    if kernel.mode == "tf32":
        return  # rounded scores may take another key
    q, k, v = q[:1], k[:1], v[:1]
    chosen = (q.double() @ k.double().mT).argmax(-1, keepdim=True).expand_as(v)
    if kernel.kind == "whole heads":
        assert_equal(kernel.run(q * 2.0**30, k, v), v.gather(2, chosen))
    else:
        rtol = 2 * kernel.arithmetic.u_out if kernel.kind == "short" else 0
        torch.testing.assert_close(kernel.run(q, k, v, 1e5 if kernel.kind == "short" else 1e6), v.gather(2, chosen), rtol=rtol, atol=0)


HALF_DTYPES = (torch.float16, torch.bfloat16)
TRAINED_SIZES = [(3, 2, 1), (2, 3, 48), (2, 1, 64), (50, 6, 197), (3, 2, 208), (30, 6, 257), (2, 2, 300)]


@pytest.mark.parametrize(("size", "dtype"), [*zip(TRAINED_SIZES, cycle(HALF_DTYPES)), ((50, 6, 197), torch.float16)], ids=str)
def test_gradients_of_attention(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Of q, k and v side by side and apart: as near to float64 as PyTorch's, and the same again."""
    batch, heads, tokens = size
    generator = torch.Generator("cuda").manual_seed(tokens)
    whole = torch.randn(batch, tokens, 3, heads, 64, generator=generator, device="cuda").to(dtype)
    whole[0, 0, 0] *= 20  # one query looks at one key
    dy = torch.randn(batch, tokens, heads, 64, generator=generator, device="cuda").to(dtype).transpose(1, 2)
    scale = 0.2

    def parts(tensor: Tensor) -> Operands:
        q, k, v = (tensor[:, :, n].transpose(1, 2) for n in range(3))
        return q, k, v

    def gradients(given: Tensor, dy: Tensor, ours: bool) -> list[Tensor]:
        given = given.detach().requires_grad_()
        q, k, v = parts(given * 1)
        y = ops.attended(q, ops.Attention(k, v, scale)) if ours else scaled_dot_product_attention(q, k, v, scale=scale)
        (found,) = torch.autograd.grad(y, given, dy)
        return [y.detach(), *parts(found)]

    truth, theirs, ours = gradients(whole.double(), dy.double(), False), gradients(whole, dy, False), gradients(whole, dy, True)
    for one, other, expected in zip(ours, theirs, truth, strict=True):
        errors = [float((each.double() - expected).norm() / expected.norm()) for each in (one, other)]
        assert errors[0] <= 1.2 * errors[1] + 1e-6, errors
    for one, again in zip(ours, gradients(whole, dy, True), strict=True):
        assert_equal(one, again)
    apart = [part.contiguous().requires_grad_() for part in parts(whole)]
    y = ops.attended(apart[0], ops.Attention(apart[1], apart[2], scale))
    for one, again in zip(ours[1:], torch.autograd.grad(y, apart, dy), strict=True):
        assert_equal(one, again)


SUMMED_SIZES = [(3, 2, 1), (200, 3, 50), (2, 1, 64), (128, 6, 197), (9, 5, 257), (1, 140, 70)]


@pytest.mark.parametrize(("size", "by_head", "dtype"), all_pairs(SUMMED_SIZES, (False, True), HALF_DTYPES), ids=str)
def test_sums_of_gradients_over_tokens(size: tuple[int, int, int], by_head: bool, dtype: torch.dtype) -> None:
    """They come with the gradient of q, k and v side by side, or of those of each head, near to float64, and the same again."""
    batch, heads, tokens = size
    generator = torch.Generator("cuda").manual_seed(tokens)
    whole = torch.randn(batch, tokens, 3 * heads * 64, generator=generator, device="cuda").to(dtype).requires_grad_()
    dy = torch.randn(batch, tokens, heads, 64, generator=generator, device="cuda").to(dtype).transpose(1, 2)

    def parts(tensor: Tensor) -> Operands:  # shapes: (batch, heads, tokens, 64)
        split = (
            tensor.view(*tensor.shape[:-1], heads, 3, 64) if by_head else tensor.view(*tensor.shape[:-1], 3, heads, 64).transpose(-3, -2)
        )
        q, k, v = split.transpose(-4, -3).unbind(-2)
        return q, k, v

    def found() -> Tensor:
        q, k, v = parts(whole)
        (gradient,) = torch.autograd.grad(ops.attended(q, ops.Attention(k, v)), whole, dy)
        sums = known_sums(gradient)
        assert sums is not None and known_sums(gradient.clone()) is None
        assert known_sums(gradient.add_(1.0)) is None
        return sums

    sums, wide = found(), whole.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(scaled_dot_product_attention(*parts(wide)), wide, dy.double())
    assert_equal(sums, found())
    of_q, of_k, of_v = (each[:, :, 0].sum(0) for each in parts(sums.double()[:, None]))
    size = parts(expected)[0].square().sum((0, 2)).sqrt().norm()
    assert (of_q - parts(expected)[0].sum((0, 2))).norm() <= 4 * torch.finfo(dtype).eps * size + 1e-4
    assert (of_k == 0).all() and parts(expected)[1].sum((0, 2)).abs().max() < 1e-9
    assert (of_v - parts(expected)[2].sum((0, 2))).norm() <= 1e-6 * dy.double().norm()


def test_no_sums_come_with_a_gradient_whose_rows_are_not_tokens() -> None:
    whole = torch.randn(50, 4, 3 * 64, device="cuda", dtype=torch.float16, requires_grad=True)  # tokens before images
    q, k, v = whole.view(50, 4, 3, 1, 64).permute(2, 1, 3, 0, 4).unbind(0)
    (gradient,) = torch.autograd.grad(ops.attended(q, ops.Attention(k, v)).sum(), whole)
    assert known_sums(gradient) is None
