"""What compilers and exporters see of the CUDA backend, with the kernels emulated."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from flysurgery.ops import ks_linear
from flysurgery.ops.backends import cuda as backend
from flysurgery.ops.problem import problem_of
from flysurgery.torch_state import tf32_allowed
from tests.gpu.emulation import EmulatedProduct
from tests.gpu.gpu_layer import Layer, check, rows_of
from tests.support.tolerance import FP32


@pytest.fixture
def on_cuda(emulated: type[EmulatedProduct], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors on the CPU pass for tensors on a CUDA device."""
    monkeypatch.setattr(
        importlib.import_module("flysurgery.ops.multiply"),
        "problem_of",
        lambda *described: replace(problem_of(*described), device_type="cuda", allow_tf32=tf32_allowed()),
    )
    monkeypatch.setattr(backend, "device_obstacle", lambda: None)
    monkeypatch.setattr(backend, "shared_limit_of", lambda index: 227 * 1024)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Default(nn.Module):
    """The layer with no backend named."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return ks_linear(x, tuple(self.layer.factors), self.layer.bias)


@pytest.mark.parametrize("train", [False, True])
def test_one_graph_with_our_operator_for_any_number_of_rows(on_cuda: None, train: bool) -> None:
    layer = Layer(mode=FP32, device="cpu").requires_grad_(train)
    targets: set[str] = set()

    def look(graph: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        targets.update(str(node.target) for node in graph.graph.nodes)
        return graph

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=look)
    for rows in (5, 9, 1):
        x = rows_of(rows, FP32, device="cpu").requires_grad_(train)
        out = compiled(x)
        check(out, layer, x)
        assert out.requires_grad is train
    assert any("flysurgery.ks_linear" in target for target in targets)


@pytest.mark.parametrize("strict", [False, True])
def test_exports_hold_plain_operators_alone(on_cuda: None, strict: bool) -> None:
    layer, x = Layer(mode=FP32, device="cpu").requires_grad_(False), rows_of(5, FP32, device="cpu")
    exported = torch.export.export(Default(layer), (x,), strict=strict)
    assert {str(node.target).split(".")[0] for node in exported.graph.nodes if node.op == "call_function"} <= {"aten"}
    check(exported.module()(x), layer, x)
