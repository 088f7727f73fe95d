"""Calls that launch again what they launched before: what is repeated, and what calls for asking anew."""

import copy
import ctypes
import pickle
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from flysurgery.gpu import remembered_calls
from flysurgery.gpu.kernel import Kernel
from flysurgery.gpu.recording import fresh, rely_on
from flysurgery.gpu.remembered_calls import Repeating, forget_moved
from flysurgery.gpu.weight_cache import derived, forget_derived
from tests.support.tolerance import assert_equal

FEATURES = 6


class Adding(Kernel):
    """A kernel on the CPU: reads and writes memory by the addresses of its parameters, y = x + factor * w."""

    def __init__(self) -> None:
        super().__init__("adding", {}, 0)
        self.words = [1, 1, 1, 1]

    def load(self) -> None:
        """There is nothing to load."""

    def add(self, x: Tensor, w: Tensor, y: Tensor, factor: int) -> None:
        self.launch((1, 1, 1), (1, 1, 1), 0, 0, x, w, y, factor)

    def queue(self, config: Any, address: int) -> None:
        parameters = (ctypes.c_void_p * 4).from_address(address)
        x, w, y, factor = (ctypes.c_int64.from_address(parameter or 0).value for parameter in parameters)
        x, w, y = ((ctypes.c_float * FEATURES).from_address(address) for address in (x, w, y))
        for place in range(FEATURES):
            y[place] = x[place] + factor * w[place]


class Layer(nn.Module):
    """``x + weight + 2 * weight``, in two launches; or what ``between`` makes of the first's result, in its place."""

    def __init__(self, between: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(FEATURES).float(), requires_grad=False)
        self.between = between
        self.repeating = Repeating()
        self.calls = 0
        self.kernel = Adding()

    def launched(self, x: Tensor, factor: int) -> Tensor:
        (w,) = derived("copy", (self.weight,), lambda: (self.weight.clone(),))
        y = fresh(x.shape, x.dtype, x.device)
        self.kernel.add(x, w, y, factor)
        return y

    def compute(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = self.launched(x, 1)
        return self.launched(y if self.between is None else self.between(y), 2).view(2, -1)

    def forward(self, x: Tensor) -> Tensor:
        return self.repeating(self.compute, self.modules, x)

    def check(self, calls: int, x: Tensor | None = None) -> None:
        """The next call is right, and asks so often."""
        x = torch.randn(FEATURES) if x is None else x
        before = self.calls
        y = self(x)
        between = self.between or (lambda y: y)
        assert_equal(y, (between(x + self.weight) + 2 * self.weight).view(2, -1))
        assert self.calls - before == calls


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The CPU passes for a GPU."""
    monkeypatch.setattr(remembered_calls, "_on_current_device", lambda x: True)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    forget_derived()
    yield
    forget_derived()


@pytest.fixture
def layer() -> Layer:
    """One that has packed its weights, and noted its launches."""
    layer = Layer()
    layer.check(1)
    layer.check(1)
    return layer


KINDS = {
    "inputs": lambda x: x,
    "of another shape": lambda x: x[None],
    "with gradients": lambda x: x.clone().requires_grad_(),
    "at another address modulo 16 bytes": lambda x: torch.cat([x[:1], x])[1:],
}
MODES = {"gradients": torch.enable_grad, "no gradients": torch.no_grad, "inference": torch.inference_mode}


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from([*KINDS]), st.sampled_from([*MODES]), st.booleans()), max_size=12))
def test_calls_that_look_the_same_are_repeated(calls: list[tuple[str, str, bool]]) -> None:
    """Each first one is asked for, and all under autocast; no result is written to later."""
    layer = Layer()
    layer.check(1)  # packs
    seen, kept = set(), []
    for kind, mode, cast in calls:
        with MODES[mode](), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            x = KINDS[kind](torch.randn(FEATURES))
            look = kind, mode == "gradients"
            layer.check(int(cast or look not in seen), x)
            seen |= set() if cast else {look}
            y = layer(x)
            assert y.is_inference() == (mode == "inference")
        kept.append((y, y.clone()))
    for y, before in kept:
        assert_equal(y, before)


def test_no_kernel_has_gradients_and_forwards_may_be_set(layer: Layer) -> None:
    layer.weight.requires_grad_()
    layer.check(1)
    with torch.no_grad():
        layer.check(1)
        layer.check(0)
        layer.forward, forward = lambda x: forward(x), layer.forward
        layer.check(1)


def fused_step(layer: Layer) -> None:
    layer.weight.grad = torch.ones(FEATURES)
    torch.optim.SGD([layer.weight], 0.5, fused=True).step()


CHANGES = {
    "written": lambda layer: layer.weight.mul_(2),
    "moved": lambda layer: setattr(layer.weight, "data", layer.weight + 1),
    "replaced": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight + 1, requires_grad=False)),
    "fused step": fused_step,
    "forgotten": lambda layer: forget_derived(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_changed_are_read_anew(layer: Layer, change: str) -> None:
    with torch.no_grad():
        if change == "fused step":
            layer.weight.requires_grad_()
            layer.check(1)
        CHANGES[change](layer)
        layer.check(1)  # packs
        layer.check(1)  # notes
        layer.check(0)


def test_parts_of_a_larger_memory_are_packed_at_each_call(layer: Layer) -> None:
    flat = torch.arange(2 * FEATURES).float()
    layer.weight.data = flat[:FEATURES]
    for _ in range(3):
        layer.check(1)
        flat.mul_(2)


def test_what_was_noted_is_let_go_of_once_parameters_have_moved(layer: Layer) -> None:
    other = Layer()
    other.check(1)
    other.check(1)
    parameters, calls = layer.repeating._known
    assert parameters is not None and calls
    left = weakref.ref(parameters)
    del parameters, calls
    layer.double().float()
    assert left() is not None
    forget_moved()
    assert left() is None
    other.check(0)
    layer.check(1)


@pytest.mark.parametrize("between", [lambda y: y + 1, lambda y: y.mul_(3)], ids=["elsewhere", "in place"])
def test_pytorch_between_two_launches_is_done_each_time(between: Any) -> None:
    layer = Layer(between)
    for _ in range(4):
        layer.check(1)
    assert not any(layer.repeating._known[1].values())


def test_operands_in_one_place_are_not_told_apart() -> None:
    layer = Layer()

    def second(x: Tensor, other: Tensor) -> Tensor:
        return layer.launched(other, 1)

    x, other = torch.ones(FEATURES), torch.zeros(FEATURES)
    for _ in range(3):
        layer.repeating(second, layer.modules, x, x)
    assert_equal(layer.repeating(second, layer.modules, x, other), layer.weight.detach())


def test_constants_are_found_where_they_are() -> None:
    layer, table = Layer(), torch.ones(FEATURES)

    def compute(x: Tensor) -> Tensor:
        layer.calls += 1
        rely_on([table])
        y = fresh(x.shape, x.dtype, x.device)
        layer.kernel.add(x, table, y, 1)
        return y

    for scale in (1.0, 2.0, 3.0):
        assert_equal(layer.repeating(compute, layer.modules, torch.full((FEATURES,), scale)), torch.full((FEATURES,), scale + 1))
    assert layer.calls == 1


def test_memory_of_what_was_noted_is_bounded_and_may_be_cleared(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_calls, "_REMEMBERED", 3)
    for count in range(1, 9):
        layer(torch.ones(FEATURES * count))
    assert len(layer.repeating._known[1]) <= 3
    layer.repeating._known[1].clear()  # as another thread may
    layer.check(1)


def test_copies_and_pickles_begin_anew(layer: Layer) -> None:
    assert layer.repeating._known[1]
    for twin in (copy.deepcopy(layer.repeating), pickle.loads(pickle.dumps(layer.repeating))):
        assert isinstance(twin, Repeating) and not twin._known[1]
