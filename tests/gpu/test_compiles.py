"""Calls on a GPU that is not there: every kernel compiles and hardly spills registers, and every weight comes to a launch.

Most variants are those of a GPU for which nothing was tuned.
"""

import gc
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu import attention as attention_kernels
from flysurgery.gpu import hidden_gradient, layer_norm, row_sums, weight_space
from flysurgery.gpu import kernel as kernels
from flysurgery.gpu.block_linear import launch_blocks, no_summands
from flysurgery.gpu.compile import Compiled, compile_cubin, kernel_path
from flysurgery.gpu.factor_by_factor import run_wide_ffn
from flysurgery.gpu.factor_product import run_product
from flysurgery.gpu.gated import run_gated
from flysurgery.gpu.gradients import all_gradients
from flysurgery.gpu.wide_gradient import wide_gradient
from flysurgery.ops import (
    Attention,
    Dense,
    FeedForward,
    FusedFactors,
    Gated,
    Linear,
    LinearResidual,
    Norm,
    NormLinears,
    PatchEmbedding,
    choose_launches,
    run,
)
from flysurgery.patterns import Architecture, Pattern, gonon, monarch
from tests.patterns.strategies import pairs
from tests.support import blocks
from tests.support.blocks import Make, added, block, inputs_of, layer, normal, three
from tests.support.rounding import fresh_memory_is_nan, rounding_as

SPILLED_BYTES = {
    "fused_linear": 2048,  # fp32 by pairs lives on 255 registers: its configurations were chosen by time
    "fused_ffn": 128,  # at the end, where scaled sums and the rows to be added are held together
    "ffn_floats": 96,  # outside of the loop over pieces of hidden units
    "block_linear": 96,  # three classes of outputs at once, and activations in float32
    "dense_linear": 64,  # patches of 8x8: their few inputs leave room for the widest tile
    "hidden_gradient": 16,
    "few_rows": 8,  # as many registers as let two blocks run at once
    "attention": 24,
    "single_factor": 12,
}
"""The most that a kernel may spill; others nothing."""


class Noting:
    """In the place of a kernel: notes what it is given, byte by byte."""

    def __init__(self, name: str, defines: Mapping[str, int | str], device_index: int) -> None:
        self.name, self.defines = name, defines

    def launch(self, grid: object, block: object, shared_bytes: int, stream: object, *arguments: Any, early: bool = False) -> None:
        memory = [getattr(argument, "at", argument) for argument in arguments]
        LAUNCHES.append((self, [each.contiguous().view(-1).view(torch.uint8).clone() for each in memory if isinstance(each, Tensor)]))


Launches = list[tuple[Noting, list[Tensor]]]
LAUNCHES: Launches = []
"""Of the present test; kernels are remembered beyond it."""
Call = tuple[Callable[[], object], Sequence[Tensor]]
"""A call, and the tensors that it is to read whole."""
ROWS = 3300
"""More than those that count as few."""
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32


@cache
def compiled(kernel: Noting) -> Compiled:
    return compile_cubin(f"{kernel.name}.cu", kernel.defines, arch=kernels.ARCH, name=kernel.name)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    """The CPU passes for an H200, whose kernels do nothing."""
    properties, own = SimpleNamespace(shared_memory_per_block_optin=227 * 1024, multi_processor_count=132), Tensor.to
    monkeypatch.setattr(blocks, "DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: None, raising=False)
    monkeypatch.setattr(Tensor, "to", lambda x, *to, **more: x if to and getattr(to[0], "type", "") == "cuda" else own(x, *to, **more))
    monkeypatch.setattr(kernels, "Kernel", Noting)
    monkeypatch.setattr(choose_launches, "_decided", {})
    monkeypatch.setattr(choose_launches, "_obstacle", lambda *_: None)
    for module in (layer_norm, row_sums, weight_space):
        monkeypatch.setattr(module, "kernels_take", lambda x: True)
    LAUNCHES.clear()
    with fresh_memory_is_nan(), torch.no_grad():
        yield LAUNCHES


def called(make: Make, dtype: torch.dtype, rows: int = ROWS) -> Call:
    operation = make(dtype, rows)
    x = normal(rows, inputs_of(operation), dtype=dtype)
    return lambda: run(x, operation), operation.tensors


def joined(dtype: torch.dtype) -> Call:
    up, down = Architecture.of((1, 256, 128, 3), (2, 192, 64, 1)), Architecture.of((1, 64, 128, 2), (2, 128, 384, 1))
    x, layers = normal(192 * 132, 128, dtype=dtype), (layer(up, dtype), layer(down, dtype))  # rows that fill all multiprocessors
    return lambda: run_wide_ffn(x, None, *layers, "gelu", None, residual=x)[0], (*layers[0].tensors, *layers[1].tensors)


def factors(make: Callable[[int, int], Architecture], width: int) -> tuple[Architecture, Architecture]:
    return make(4 * width, width), make(width, 4 * width)


def attention(batch: int, tokens: int, dtype: torch.dtype, head: int = 64) -> tuple[Tensor, Attention]:
    q, k, v = (normal(batch, 3, tokens, head, dtype=dtype) for _ in range(3))
    return q, Attention(k, v)


def attended(batch: int, tokens: int, dtype: torch.dtype) -> Call:
    q, given = attention(batch, tokens, dtype)
    return lambda: run(q, given), given.tensors


def multiplied(mode: str, dtype: torch.dtype, *patterns: tuple[int, int, int, int], cut: int = 0) -> Call:
    """``cut``: elements that x lies off every vector alignment."""
    linear = layer(Architecture.of(*patterns), dtype)
    x = normal(ROWS, linear.sizes[0] + cut, dtype=dtype)[:, cut:]
    return lambda: run_product(x, linear.factors, linear.tensors[-1:], 1, mode), linear.tensors


def patches(dtype: torch.dtype) -> Call:
    given = PatchEmbedding(normal(384, 3, 8, 8, dtype=dtype), None, normal(1, 17, 384, dtype=dtype), [normal(1, 1, 384, dtype=dtype)])
    images = normal(2, 3, 32, 32, dtype=dtype)
    return lambda: run(images, given), given.tensors


def gate_and_value(dtype: torch.dtype) -> Call:
    both = normal(ROWS, 4096, dtype=dtype)
    return lambda: run_gated(both[:, :2048], both[:, 2048:], "silu"), (both,)


def gradients(dtype: torch.dtype, *patterns: tuple[int, int, int, int], linears: int) -> Call:
    architecture = Architecture.of(*patterns)
    parts = tuple(factor for _ in range(linears) for factor in layer(architecture, dtype).factors)
    x, dy = normal(64, architecture.in_features, dtype=dtype), normal(64, linears * architecture.out_features, dtype=dtype)

    def call() -> None:
        all_gradients(dy, x, parts, linears, "fp32" if dtype == FLOAT else "bf16", False, True)
        weight_space.multiplied_out(parts, linears, dtype)

    return call, (*parts, dy)


def of_norms_and_activations(dtype: torch.dtype) -> Call:
    x, g, weight = normal(64, 1024, dtype=dtype), normal(64, 1024, dtype=dtype), normal(1024, dtype=FLOAT)

    def call() -> None:
        layer_norm.norm_gradient(x, g, weight, 1e-6, g)
        for activation in ("gelu", "gelu_tanh", "silu"):
            row_sums.activation_gradient(x, g, activation)

    return call, (x, g, weight)


def of_hidden_units(features: int, hidden: int, dtype: torch.dtype) -> Call:
    x, dy, bias = (normal(*shape, dtype=dtype) for shape in ((300, features), (300, features), (hidden,)))
    first, last = normal(hidden, features, dtype=dtype), normal(features, hidden, dtype=dtype)

    def call() -> None:
        for activation in ("gelu", "gelu_tanh", "silu"):
            hidden_gradient.run_hidden_gradient(x, dy, hidden_gradient.hidden_image(first, last), bias, activation)

    return call, (x, dy, bias, first, last)


def of_wide_block(make: Callable[[int, int], Architecture], dtype: torch.dtype) -> Call:
    up, down = (layer(architecture, dtype) for architecture in factors(make, 768))
    gradient, x = wide_gradient(up.architecture, down.architecture, 227 * 1024), normal(300, 768, dtype=dtype)
    assert not isinstance(gradient, str)

    def call() -> None:
        images = gradient.weights(up, down, None, dtype)
        for tile, image in zip(gradient.blocks or (), (images.into, images.back), strict=False):
            launch_blocks(tile, x, image, no_summands(tile, x.device))
        hidden_gradient.run_hidden_gradient(x, x, images.panels, images.bias, "gelu", gradient.tiles)

    return call, (*up.tensors, *down.factors)


def of_attention(batch: int, tokens: int, dtype: torch.dtype) -> Call:
    parts = [normal(batch, 6, tokens, 64, dtype=dtype) for _ in range(5)]
    q, k, v, y, dy = parts
    sums = normal(batch, 6, tokens, dtype=FLOAT)

    def call() -> None:
        sizes = attention_kernels.attention_gradient(64, tokens, tokens, "bf16" if dtype == BFLOAT else "fp16", 227 * 1024)
        assert sizes is not None
        attention_kernels.run_attention(q, k, v, 0.125, sizes.mode, False, sums)
        attention_kernels.run_attention_gradient(sizes, (q, k, v), y, sums, dy, 0.125, [torch.empty_like(q) for _ in range(3)])

    return call, (*parts, sums)


CALLS: dict[str, Callable[[], Call]] = {
    "three behind a norm": lambda: called(three(monarch(384, 384)), HALF),
    "wide ones behind a norm": lambda: called(three(gonon(768, 768)), HALF),
    "wide ones factor by factor": lambda: called(three(gonon(768, 768)), HALF, 1800),
    "few rows behind a norm": lambda: called(three(gonon(384, 384)), HALF, 197),
    "few rows": lambda: called(added((384, 1536)), BFLOAT, 65),
    "factors with scale and residual": lambda: called(added(gonon(192, 768)), HALF),
    "streamed weights": lambda: called(added((768, 768)), HALF, 6400),
    "a gate behind a norm": lambda: called(block([monarch(1024, 192)], monarch(192, 512), "silu", "inner"), HALF),
    "a dense gate": lambda: called(block([(384, 2048)], monarch(384, 1024), "silu", "inner"), BFLOAT),
    "a gate and a value": lambda: gate_and_value(BFLOAT),
    "a block": lambda: called(block(*factors(gonon, 192)), HALF),
    "a block of bfloat16": lambda: called(block(*factors(monarch, 384), "gelu_tanh"), BFLOAT),
    "a block of float32": lambda: called(block(*factors(monarch, 192), "silu"), FLOAT),
    "a block of TF32": lambda: called(block(*factors(monarch, 384), "gelu_tanh"), FLOAT),
    "a wide block": lambda: called(block(*factors(gonon, 768)), HALF),
    "two factors around an activation": lambda: joined(HALF),
    "heads of float32": lambda: attended(2, 257, FLOAT),
    "short heads": lambda: attended(20, 197, BFLOAT),
    "few heads": lambda: attended(1, 197, HALF),
    "patches": lambda: patches(HALF),
    "two factors in float32": lambda: multiplied("fp32", FLOAT, (1, 96, 96, 4), (4, 96, 96, 1)),
    "two factors of three classes": lambda: multiplied("fp32", FLOAT, (1, 32, 32, 3), (6, 16, 24, 1)),
    "two factors with tiles across classes": lambda: multiplied("tf32", FLOAT, (1, 16, 36, 4), (12, 12, 16, 1)),
    "low rank in TF32": lambda: multiplied("tf32", FLOAT, (1, 24, 16, 1), (1, 16, 40, 1)),
    "one factor, not aligned": lambda: multiplied("bf16", BFLOAT, (1, 192, 48, 2), cut=1),
    "one factor in float32": lambda: multiplied("fp32", FLOAT, (1, 192, 192, 3)),
    "one factor of odd sizes": lambda: multiplied("tf32", FLOAT, (2, 3, 5, 3)),
    "one factor of large blocks": lambda: multiplied("fp16", HALF, (1, 512, 512, 2)),
    "gradients of three": lambda: gradients(BFLOAT, (1, 192, 48, 2), (2, 48, 192, 1), linears=3),
    "gradients of odd sizes": lambda: gradients(FLOAT, (2, 6, 4, 3), (3, 8, 5, 1), linears=1),
    "gradients of 197 tokens": lambda: of_attention(30, 197, BFLOAT),
    "gradients of 257 tokens": lambda: of_attention(30, 257, HALF),
    "gradients of 1536 hidden units": lambda: of_hidden_units(384, 1536, BFLOAT),
    "gradients of a wide block": lambda: of_wide_block(gonon, BFLOAT),
    "gradients of a wide Monarch block": lambda: of_wide_block(monarch, HALF),
    "gradients of 3072 hidden units": lambda: of_hidden_units(768, 3072, HALF),
}
for kind in (HALF, FLOAT):
    CALLS[f"some rows of {kind}"] = partial(called, added((384, 1536)), kind, 394)
    CALLS[f"{kind} with scale and residual"] = partial(called, added((384, 384)), kind)
for kind in (HALF, BFLOAT, FLOAT):
    CALLS[f"gradients of norms of {kind}"] = partial(of_norms_and_activations, kind)


def bytes_given(launches: Launches) -> list[Tensor]:
    return [memory for _, given in launches for memory in given]


@pytest.mark.parametrize("name", CALLS)
def test_what_is_launched_compiles_and_is_given_every_weight(launches: Launches, name: str) -> None:
    """A weight whose sign is changed, one out of the middle or the last, changes what a kernel is given."""
    with rounding_as("tf32" if "TF32" in name else "fp32"):
        call, tensors = CALLS[name]()
        call()
        before = bytes_given(launches)
        for kernel in {kernel for kernel, _ in launches}:
            assert compiled(kernel).spill_bytes <= SPILLED_BYTES.get(kernel.name, 0), f"{kernel.name}, {kernel.defines}"
            assert compiled(kernel).serialized == ()
        for tensor in tensors:
            for place in (int(torch.randint(tensor.numel(), (), generator=torch.Generator().manual_seed(tensor.numel()))), -1):
                weight = tensor.view(-1)[place]
                weight.neg_()
                launches.clear()
                call()
                assert not all(map(torch.equal, bytes_given(launches), before)), f"element {place} of {tuple(tensor.shape)}"
                weight.neg_()


def test_every_kernel_is_launched(launches: Launches) -> None:
    for make in CALLS.values():
        make()[0]()
    assert {kernel.name for kernel, _ in launches} == {path.stem for path in kernel_path().glob("*.cu")}


@st.composite
def layers(draw: st.DrawFn, dtype: torch.dtype) -> tuple[Linear, Linear]:
    """Up and down again, each by two factors or dense; of sizes that suit kernels and of others."""
    unit, (left, right) = draw(st.sampled_from([1, 8, 32])), draw(pairs())
    up = Architecture.of((left.a, left.b * unit, left.c * unit, left.d), (right.a, right.b * unit, right.c * unit, right.d))

    def linear(architecture: Architecture) -> Linear:
        if draw(st.booleans()):
            return Dense(torch.ones(architecture.shape, dtype=dtype), None)
        patterns = architecture.patterns
        if draw(st.integers(0, 3)) == 0:
            patterns = (Pattern(1, architecture.out_features, architecture.in_features, 1),)
        return FusedFactors(tuple(torch.ones(pattern.factor_shape, dtype=dtype) for pattern in patterns), None)

    return linear(up), linear(up.transpose)


@settings(max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([HALF, BFLOAT, FLOAT]).flatmap(layers), st.sampled_from([0, 1, 40, 700, 4000]), st.booleans())
def test_any_sizes_are_taken_or_refused_in_a_sentence(launches: Launches, layers: tuple[Linear, Linear], rows: int, normed: bool) -> None:
    launches.clear()
    up, down = layers
    (inputs, outputs), norm = up.sizes, Norm(None, None)
    x, residual = (torch.ones(rows, features, dtype=up.tensors[0].dtype) for features in (inputs, outputs))
    before = norm if normed else None
    of_linears = NormLinears(norm, (up,)), LinearResidual(up, residual)
    for operation in (*of_linears, FeedForward(before, up, down), FeedForward(before, Gated((up, up)), down, "silu")):
        found = choose_launches.way(x, operation)
        if isinstance(found, str):
            assert re.search("[a-z]+ [a-z]+", found)
        else:
            assert found.run().shape == operation.plainly(x).shape


def test_what_no_kernel_takes_is_refused_with_every_reason(launches: Launches) -> None:
    x, given = normal(3, 12, dtype=FLOAT), block(*factors(monarch, 12))(FLOAT, 3)
    obstacle = choose_launches.reason(x, given)
    assert obstacle is not None and re.search(r"16 columns at a time.*; .*4 columns of a class at a time, .* c = 3", obstacle)
    with pytest.raises(BackendError, match=re.escape(obstacle)):
        run(x, given)


def test_what_is_remembered_holds_no_tensors(launches: Launches) -> None:
    up, down = factors(monarch, 64)
    x, given = normal(3, 64, dtype=HALF), block([up, up], down)(HALF, 3)
    references = [weakref.ref(tensor) for tensor in (x, *given.tensors)]
    assert choose_launches.reason(x, given) is None
    del x, given
    gc.collect()
    assert all(reference() is None for reference in references)


@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT])
def test_whole_blocks_and_heads_of_small_models_are_one_launch(launches: Launches, dtype: torch.dtype) -> None:
    for make, width in product((gonon, monarch), (192, 384)):
        found = choose_launches.way(normal(4000, width, dtype=dtype), block(*factors(make, width))(dtype, 4000))
        assert not isinstance(found, str) and found.launches() == ("the whole block",)
    for tokens in (1, 5, 50, 129, 197, 208, 257):
        assert choose_launches.reason(*attention(1, tokens, dtype)) is None


def refused(make: Make, features: int = 64, **changed: Any) -> tuple[Tensor, Any]:
    return normal(9, features, dtype=HALF), make(HALF, 9)._replace(**changed)


GATED = block([(64, 96), (64, 96)], (96, 64), "silu", "inner")
REASONS: dict[str, Callable[[], tuple[Tensor, Any]]] = {
    "take 64 features": lambda: refused(three(monarch(64, 64)), 60),
    "expected a residual": lambda: refused(added((64, 64)), residual=normal(4, 64, dtype=HALF)),
    "shape (64,)": lambda: refused(GATED, scale=normal(60, dtype=HALF)),
    "fit each other and the residual": lambda: refused(block((64, 96), (80, 64))),
    "silu, got 'relu'": lambda: refused(GATED, activation="relu"),
    "with as many outputs": lambda: refused(block([(64, 96), (64, 64)], (80, 64), "silu", "inner")),
    "takes float32 behind a norm": lambda: (normal(3, 12, dtype=FLOAT), block(*factors(monarch, 12), "gelu", "norm")(FLOAT, 3)),
    "that fit each other, and one dtype": lambda: (attention(1, 8, HALF)[0], attention(2, 8, HALF)[1]),
}


@pytest.mark.parametrize("words", REASONS)
def test_the_reason_says_what_is_wrong(launches: Launches, words: str) -> None:
    assert words in str(choose_launches.reason(*REASONS[words]()))
