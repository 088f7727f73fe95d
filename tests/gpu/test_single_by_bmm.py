"""A factor as a batched product: its arithmetic on the CPU and on the GPU, the choice, the passes of training."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.gpu.single_by_bmm import BatchedConfig, BatchedFactor, Transposition, batched_pays
from flysurgery.ops import ks_linear
from flysurgery.patterns import Architecture, Pattern
from tests.gpu.gpu_layer import Layer, check_product
from tests.support.problems import make_input
from tests.support.tolerance import BF16, FP16, Arithmetic, assert_bounded, assert_equal, assert_factor_gradient_bounded

PATTERNS = [Pattern(2, 24, 32, 4), Pattern(1, 16, 40, 1), Pattern(3, 16, 40, 1), Pattern(1, 20, 24, 3)]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transpositions by PyTorch."""

    def run(part: Transposition, x: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
        turned = x.reshape(-1, part.matrices, part.slow, part.fast).mT.reshape(out.shape)
        out.copy_(turned if bias is None else turned + bias)

    monkeypatch.setattr(Transposition, "run", run)


def integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("mode", DTYPES)
@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_equals_the_definition(pattern: Pattern, mode: str) -> None:
    dtype, kernel = DTYPES[mode], BatchedFactor(pattern, mode, BatchedConfig(1))
    factor, bias = integers(pattern.factor_shape, 1, torch.float32), integers((pattern.out_features,), 8, dtype)
    image = kernel.pack(factor)
    for rows in (0, 1, 1500):
        x = integers((rows, pattern.in_features + 1), 9, dtype)[:, 1:]
        expected = ks_einsum(x.float(), factor)
        assert_equal(kernel.run(x, image), expected)
        assert_equal(kernel.run(x, image, bias), expected + bias.float())
    filled, once_more = (torch.nn.functional.pad(tensor, (0, 5), value=torch.nan) for tensor in (image, bias))
    assert_equal(kernel.run(x.unflatten(0, (3, 500)), filled, once_more).view(1500, -1), expected + bias.float())


@pytest.fixture
def long_sums() -> Iterator[None]:
    """PyTorch's products sum in float32 to the end, as the bounds have it; by default cuBLAS may add parts of a sum in 16 bits."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction
    settings.allow_fp16_reduced_precision_reduction = settings.allow_bf16_reduced_precision_reduction = False
    yield
    settings.allow_fp16_reduced_precision_reduction, settings.allow_bf16_reduced_precision_reduction = before


@pytest.mark.gpu
@pytest.mark.usefixtures("long_sums", "fresh_compiler")
@pytest.mark.parametrize(("pattern", "mode"), [(Pattern(2, 512, 512, 2), FP16), (Pattern(2, 384, 512, 3), BF16)], ids=str)
def test_layers_of_large_blocks_train_compile_and_replay(pattern: Pattern, mode: Arithmetic) -> None:
    assert batched_pays(pattern, "fp16", 3000)
    layer = Layer(Architecture((pattern,)), mode)
    x = make_input(3000, pattern.in_features, mode, device="cuda").requires_grad_()
    factors, dy = [factor.detach() for factor in layer.factors], make_input(3000, pattern.out_features, mode, device="cuda")

    def check(out: Tensor) -> None:
        assert_bounded(out.detach(), x.detach(), factors, layer.bias.detach(), mode, bias_apart=True)

    calls: tuple[Callable[[Tensor], Tensor], ...] = (layer, torch.compile(layer, fullgraph=True, dynamic=True))
    for call in calls:
        out = call(x)
        check(out)
        dx, gradient = torch.autograd.grad(out, (x, layer.factors[0]), dy)
        assert_factor_gradient_bounded(gradient, 0, x.detach(), factors, dy, mode)
        assert_bounded(dx, dy, [factors[0].transpose(1, 2)], None, mode)
        assert call(x[:0]).shape == (0, pattern.out_features)
        check_product(call(x[:1]), x[:1].detach(), factors, layer.bias)
    with torch.no_grad():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ks_linear(x, tuple(layer.factors), layer.bias, backend="cuda")
        graph.replay()
        check(out)


TRANSPOSED = [(1, 64, 4), (3, 48, 3), (2, 100, 66), (1, 1, 7), (1, 48, 2050)]
"""Matrices a row, and the sides of one: small ones together, tiles cut on either side, odd ones."""


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", TRANSPOSED, ids=str)
def test_transpositions_on_the_gpu(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    matrices, slow, fast = size
    features = matrices * slow * fast
    for rows, shift in ((1, 0), (37, 0), (37, 1), (1000, 0)):
        x = torch.randn((rows, features + 2 * shift), device="cuda").to(dtype)[:, shift : shift + features]
        out = torch.empty((rows, features + 3 * shift), device="cuda", dtype=dtype)[:, shift : shift + features]
        bias = torch.randn(features, device="cuda").to(dtype)
        turned = x.reshape(rows, matrices, slow, fast).mT.reshape(rows, features)
        Transposition(*size).run(x, out)
        assert_equal(out, turned)
        Transposition(*size).run(x, out, bias)
        assert_equal(out, (turned.float() + bias.float()).to(dtype))
