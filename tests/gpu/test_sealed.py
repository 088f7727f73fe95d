"""Modules that a compiler calls as one operator, here on the CPU, for which the operator is registered as well."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from flysurgery.errors import BackendError
from flysurgery.gpu import sealed
from flysurgery.gpu.sealed import Seal
from tests.gpu.graphs import Graphs
from tests.support.tolerance import assert_equal

X = torch.arange(6.0).view(2, 3)


class Scaling(nn.Module):
    """Scales its input by a parameter and a buffer; ``result`` makes something else of that."""

    twice: Tensor

    def __init__(self, scale: float, result: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        self.child = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(scale), requires_grad=False)})
        self.register_buffer("twice", torch.tensor(2.0))
        self.register_buffer("nothing", None)
        self.result = result
        self.seal = Seal(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.seal = Seal(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.seal(x) if torch.compiler.is_compiling() else self.result(self.child["scale"] * self.twice * x)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    torch.compiler.reset()
    with torch.library._scoped_library("flysurgery", "IMPL") as library:
        library.impl("sealed", sealed._run, "CPU")
        yield


def compiled(module: nn.Module, graphs: Graphs | None = None) -> Callable[[Tensor], Tensor]:
    return torch.compile(module, fullgraph=True, backend=graphs or Graphs())


def test_one_graph_of_one_operator_serves_all_modules_that_look_the_same() -> None:
    graphs = Graphs()
    modules = [Scaling(3.0), Scaling(5.0)]
    for module in modules:
        assert_equal(compiled(module, graphs)(X), 2 * module.child["scale"] * X)
    assert len(graphs.made) == 1 and graphs.operators() == ["sealed"]


def rescale(module: Scaling) -> None:
    module.child["scale"].mul_(2)


def replace(module: Scaling) -> None:
    module.child["scale"] = nn.Parameter(torch.tensor(6.0), requires_grad=False)


def retype(module: Scaling) -> None:
    module.double()
    module.float()
    module.twice.mul_(2)


@pytest.mark.parametrize("change", [rescale, replace, retype])
def test_what_is_changed_later_counts(change: Callable[[Scaling], None]) -> None:
    module = Scaling(3.0)
    run = compiled(module)
    assert_equal(run(X), 6 * X)
    change(module)
    assert_equal(run(X), 12 * X)


def test_copies_are_called_by_themselves_and_of_modules_that_share_their_parameters_the_youngest() -> None:
    module = Scaling(3.0)
    twin = copy.deepcopy(module)
    rescale(twin)
    assert_equal(compiled(twin)(X), 12 * X)
    assert_equal(compiled(module)(X), 6 * X)
    old, new = Scaling(3.0), Scaling(3.0, lambda y: -y)
    new.load_state_dict(old.state_dict(keep_vars=True), assign=True)
    assert_equal(torch.ops.flysurgery.sealed(X, old.seal.tensors()), -6 * X)


def test_other_parameters_than_a_modules_own_are_refused_and_so_is_one_that_is_no_more() -> None:
    module = Scaling(3.0)
    others = {"child.scale": torch.tensor(1.0)}
    run = torch.compile(lambda x: functional_call(module, others, (x,)), backend="aot_eager")
    gone = Scaling(3.0).seal.tensors()
    for call in (lambda: run(X), lambda: torch.ops.flysurgery.sealed(X, gone)):
        with pytest.raises(BackendError, match="own parameters"):
            call()


@pytest.mark.parametrize("result", [Tensor.double, lambda y: y[:1]])
def test_another_result_than_was_compiled_is_refused(result: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(BackendError, match="compiled to give"):
        compiled(Scaling(3.0, result))(X)


def test_any_number_of_rows_by_one_graph_and_a_fake_result_like_the_real_one() -> None:
    module, graphs = Scaling(3.0, lambda y: y.mT.contiguous().mT), Graphs()
    run = compiled(module, graphs)
    for rows in (2, 5, 7):
        x = torch.ones(rows, 3)
        y = run(x)
        assert_equal(y, 6 * x)
        assert y.is_contiguous()
    assert len(graphs.made) == 2  # of two rows, and of any number
    real = torch.ops.flysurgery.sealed(X.mT, module.seal.tensors())
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = torch.ops.flysurgery.sealed(mode.from_tensor(X.mT), module.seal.tensors())
    assert (fake.shape, fake.stride(), fake.dtype, fake.device) == (real.shape, real.stride(), real.dtype, real.device)


@pytest.mark.parametrize("compiling", [False, True])
def test_the_operator_is_for_cuda_and_compilers(compiling: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_dynamo_compiling", lambda: compiling)
    module, on_cuda = Scaling(3.0), SimpleNamespace(is_cuda=True, requires_grad=False)
    assert not module.seal.applies(X)
    assert module.seal.applies(on_cuda) is compiling  # pyright: ignore[reportArgumentType]
    module.child["scale"].requires_grad_(True)
    assert not module.seal.applies(on_cuda)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        assert module.seal.applies(on_cuda) is compiling  # pyright: ignore[reportArgumentType]
        monkeypatch.setattr(sealed, "is_exporting", lambda: True)
        assert not module.seal.applies(on_cuda)  # pyright: ignore[reportArgumentType]
