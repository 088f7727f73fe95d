"""Kernels that are compiled side by side: launches wait for none of them, and nothing of what they leave is used."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from flysurgery.errors import BackendError
from flysurgery.factors import factors_to_dense
from flysurgery.gpu.kernel import Kernel, compiling, is_compiling
from flysurgery.gpu.weight_cache import derived
from flysurgery.layers import ButterflyLinear
from flysurgery.patterns import monarch
from tests.support.problems import make_input
from tests.support.tolerance import FP32

GRID = (1, 1, 1)
IMPORTING = """
import time
from concurrent.futures import ThreadPoolExecutor
from flysurgery.gpu.compile import cuda_module

def device_class(number):
    time.sleep(0.01 * number)
    return cuda_module("core").Device

with ThreadPoolExecutor(40) as pool:
    assert len(set(pool.map(device_class, range(40)))) == 1
print("complete")
"""


def test_kernels_are_loaded_beside_each_other_and_none_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    together, loaded = threading.Barrier(2, timeout=20), list[str]()

    def load(kernel: Kernel) -> None:
        together.wait()  # which a single thread would never pass
        loaded.append(kernel.name)

    monkeypatch.setattr(Kernel, "load", load)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    kernels = [Kernel(name, {}, 0) for name in ("left", "right")]
    with compiling():
        for kernel in kernels * 3:
            kernel.launch(GRID, GRID, 0, 0)
    assert sorted(loaded) == ["left", "right"]


def test_threads_that_import_cuda_core_at_different_times_get_all_of_it() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTING], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "complete\n", done.stderr


def test_a_kernel_that_does_not_compile_raises_at_the_end_and_at_its_next_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(kernel: Kernel) -> None:
        raise BackendError("a cause")

    monkeypatch.setattr(Kernel, "load", load)
    kernel, reached = Kernel("wrong", {}, 0), []
    with pytest.raises(BackendError, match="a cause"), compiling():
        kernel.launch(GRID, GRID, 0, 0)
        reached.append(kernel)
    with pytest.raises(BackendError, match="a cause"):
        kernel.launch(GRID, GRID, 0, 0)
    assert reached


def test_an_error_ends_the_block_without_the_loads_that_have_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on = list[str](), threading.Event()

    def load(kernel: Kernel) -> None:
        begun.append(kernel.name)
        goes_on.wait(20)

    monkeypatch.setattr(Kernel, "load", load)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    kernels = [Kernel(name, {}, 0) for name in ("first", "second")]
    with pytest.raises(KeyboardInterrupt), compiling():
        with compiling():  # ends itself alone
            pass
        for kernel in kernels:
            kernel.launch(GRID, GRID, 0, 0)
        threading.Timer(0.2, goes_on.set).start()
        raise KeyboardInterrupt
    assert begun == ["first"] and not is_compiling()


def test_nothing_is_remembered_of_what_is_packed_meanwhile() -> None:
    source, made = torch.zeros(3), list[torch.Tensor]()

    def make() -> tuple[torch.Tensor, ...]:
        made.append(torch.empty(1))
        return (made[-1],)

    with compiling():
        assert derived("test", (source,), make)[0] is made[0]
    assert derived("test", (source,), make)[0] is made[1]
    assert derived("test", (source,), make)[0] is made[1]


def test_backward_passes_stay_in_the_thread() -> None:
    threads = list[int]()
    x = torch.zeros(1, requires_grad=True)
    x.register_hook(lambda _: threads.append(threading.get_ident()))
    with compiling():
        x.sum().backward()
    assert threads == [threading.get_ident()]


@pytest.mark.gpu
def test_all_is_right_after_a_first_pass_that_only_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLYSURGERY_CACHE", str(tmp_path))
    layer = ButterflyLinear(monarch(416, 224), device="cuda")  # of sizes that no other test has, whose kernels may be loaded
    x = make_input(70, layer.in_features, FP32, device="cuda").requires_grad_()
    with compiling():
        layer(x).sum().backward()
    assert sum(each.is_file() for each in tmp_path.rglob("*")) > 1, "nothing was compiled"
    wanted = functional.linear(x.double(), factors_to_dense([each.double() for each in layer.factors]), layer.bias.double())
    of_wanted = torch.autograd.grad(wanted.sum(), (x, *layer.parameters()))
    given = layer(x)
    torch.testing.assert_close(given, wanted.float(), rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(torch.autograd.grad(given.sum(), (x, *layer.parameters())), of_wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
