"""What the tests of the CUDA backend share; also the backend on the CPU, where the definition stands in for the kernels."""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flysurgery.factors import ks_einsum
from flysurgery.gpu import factor_product as multiplication
from flysurgery.gpu import weight_cache
from flysurgery.gpu.gradients import all_gradients, input_gradient
from flysurgery.gpu.modes import HALVES
from flysurgery.gpu.tuned_table import TunedCase, forget_choices
from flysurgery.patterns import Architecture
from tests.support.rounding import rounding_as
from tests.support.tolerance import ARITHMETICS


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder for this test."""
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=ARITHMETICS)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    """Lets PyTorch's own products round as the mode does."""
    with rounding_as(request.param):
        yield request.param


@pytest.fixture
def kernel(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A kernel in one mode, which PyTorch's own products then round as."""
    with rounding_as(request.param.mode):
        yield request.param


@pytest.fixture
def fresh_compiler() -> None:
    """Dynamo gives up on code that it has compiled for many layers, as the tests before this one may have made it."""
    torch.compiler.reset()


class EmulatedProduct:
    """Stands in for ``Product``; counts how often it packs."""

    packs = 0

    def __init__(self, architecture: Architecture, mode: str, linears: int, device_index: int | None, rows: int) -> None:
        self.architecture, self.mode, self.linears, self.device_index = architecture, mode, linears, 0

    def cases(self, rows: int) -> list[TunedCase]:
        return [TunedCase("emulated", "fused_linear", self.architecture, self.mode, self.linears, rows)]

    def pack(self, factors: tuple[Tensor, ...], biases: tuple[Tensor, ...], transposed: bool) -> tuple[Tensor, ...]:
        EmulatedProduct.packs += 1
        linears = multiplication.split_linears(factors, self.linears, transposed)
        shapes = [pattern.factor_shape for pattern in self.architecture]
        assert all(tuple(factor.shape) == shape for factors in linears for factor, shape in zip(factors, shapes, strict=True))
        images = tuple(factor.detach().clone() for factors in linears for factor in factors)
        return (*images, torch.cat(biases).detach()) if biases else images

    def run(self, x: Tensor, packed: Sequence[Tensor], with_bias: bool, early: bool = False) -> Tensor:
        length, outputs, dtype = len(self.architecture), [], x.dtype
        images = packed[:-1] if with_bias else packed
        if self.mode in HALVES:
            x = x.float()
        for start in range(0, len(images), length):
            value = x
            for image in reversed(images[start : start + length]):
                value = ks_einsum(value, image.to(x.dtype))
            outputs.append(value)
        y = torch.cat(outputs, dim=-1)
        return (y + packed[-1][: y.shape[-1]].to(x.dtype) if with_bias else y).to(dtype)


@pytest.fixture(scope="session")
def cpu_operators() -> Iterator[None]:
    """The registered operators, on the CPU as well."""
    importlib.import_module("flysurgery.gpu.gradients")  # which registers them
    library = torch.library.Library("flysurgery", "IMPL")
    kernels = {
        "ks_linear": multiplication.run_product,
        "ks_linear_input_gradient": input_gradient,
        "ks_linear_gradients": all_gradients,
    }
    for name, run in kernels.items():
        library.impl(name, run, "CPU")
        library.impl(f"{name}_launched", run, "CPU")
    yield
    library._destroy()


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, cpu_operators: None) -> Iterator[type[EmulatedProduct]]:
    """The kernels replaced by the definition, on the CPU."""
    monkeypatch.setattr(multiplication, "product_of", EmulatedProduct)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(weight_cache, "_entries", {})
    EmulatedProduct.packs = 0
    forget_choices()
    yield EmulatedProduct
    forget_choices()
