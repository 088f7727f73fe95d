"""What the tests of the CUDA backend share."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flysurgery.gpu import product as multiplication
from flysurgery.gpu import weight_cache
from flysurgery.gpu.gradients import all_gradients, input_gradient
from flysurgery.gpu.table import forget_choices
from tests.gpu.emulation import EmulatedProduct
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


@pytest.fixture(scope="session")
def cpu_operators() -> Iterator[None]:
    """The registered operators, on the CPU as well."""
    importlib.import_module("flysurgery.gpu.operators")  # which registers them
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
