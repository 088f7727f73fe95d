"""The registered operator of training, with the kernels emulated: weights are packed once a pass, and not looked up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flysurgery.errors import BackendError
from flysurgery.gpu import gather
from flysurgery.gpu import weight_cache as derivation
from flysurgery.gpu.train_operator import _linear
from flysurgery.patterns import Architecture
from tests.gpu.test_autograd import KEPT, ONE, TWO, operands, reference
from tests.support.problems import make_integers
from tests.support.tolerance import FP64, assert_equal

pytestmark = pytest.mark.usefixtures("emulated")

STEPS = 3
CASES = [(ONE, 1), (TWO, 1), (TWO, 3), (KEPT, 1)]


def trained(x: Tensor, factors: list[Tensor], biases: list[Tensor], linears: int) -> Tensor:
    return torch.ops.flysurgery.ks_linear_trained(x, factors, biases, linears, "bf16")[0]


def narrowed(x: Tensor, factors: list[Tensor], biases: list[Tensor]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """x in bfloat16, weights in float32, leaves of a graph like the operands."""
    narrow = x.detach().bfloat16().requires_grad_(x.requires_grad)
    wide = [[tensor.detach().float().requires_grad_(tensor.requires_grad) for tensor in tensors] for tensors in (factors, biases)]
    return narrow, wide[0], wide[1]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("architecture", "linears"), CASES, ids=str)
def test_weights_are_packed_once_a_pass(architecture: Architecture, linears: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[torch.dtype] = []
    emulated = gather.Gather.prepared

    def counted(own: gather.Gather, dtype: torch.dtype) -> Callable[..., None]:
        launch = emulated(own, dtype)
        return lambda *addresses: launches.append(dtype) or launch(*addresses)

    monkeypatch.setattr(gather.Gather, "prepared", counted)
    run = torch.compile(trained, fullgraph=True, backend="aot_eager") if compiled else trained
    x, factors, biases = operands(architecture, linears, rows=2)
    own_x, own_factors, own_biases = narrowed(x, factors, biases)
    dy = make_integers((2, linears * architecture.out_features), seed=90, mode=FP64)
    for step in range(STEPS):
        expected = torch.autograd.grad(reference(x, factors, biases, linears), (x, *factors, *biases), dy)
        out = run(own_x, own_factors, own_biases, linears)
        found = torch.autograd.grad(out, (own_x, *own_factors, *own_biases), dy.bfloat16())  # pyright: ignore[reportArgumentType]
        for left, right in zip(found, expected, strict=True):
            assert_equal(left, right.to(left.dtype))
        assert len(launches) == 2 * (step + 1), "one for the forward pass and one for the backward pass"
        monkeypatch.setattr(derivation, "_make_to_keep", None)  # it has learnt where weights go, and looks nothing up
        for tensor in (*factors, *biases, *own_factors, *own_biases):
            tensor.data.neg_()  # a write that nobody counts, as by a fused optimizer


@pytest.mark.parametrize("compiled", [False, True])
def test_checkpoints_compute_it_again(compiled: bool) -> None:
    def checkpointed(x: Tensor, factors: list[Tensor], biases: list[Tensor]) -> Tensor:
        return checkpoint(trained, x, factors, biases, 1, use_reentrant=False)  # pyright: ignore[reportReturnType]

    run = torch.compile(checkpointed, fullgraph=True, backend="aot_eager") if compiled else checkpointed
    x, factors, biases = operands(KEPT, 1)
    own = narrowed(x, factors, biases)
    found = torch.autograd.grad(run(*own).sum(), (own[0], *own[1], *own[2]))
    for left, right in zip(found, torch.autograd.grad(reference(x, factors, biases, 1).sum(), (x, *factors, *biases)), strict=True):
        assert_equal(left, right.to(left.dtype))


@pytest.mark.parametrize(("architecture", "linears"), CASES, ids=str)
def test_keeps_its_schema(architecture: Architecture, linears: int) -> None:
    own = narrowed(*operands(architecture, linears))
    torch.library.opcheck(torch.ops.flysurgery.ks_linear_trained.default, (*own, linears, "bf16"))


def test_other_modes_are_refused() -> None:
    with pytest.raises(BackendError, match="bf16, fp16, got 'tf32'"):
        _linear(torch.zeros(1, TWO.in_features), operands(TWO, 1)[1], [], 1, "tf32")
