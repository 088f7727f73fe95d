"""Packed weights on the GPU: they follow training, loading, streams and graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from flysurgery.gpu.weight_cache import forget_derived
from flysurgery.patterns import Architecture
from tests.gpu.gpu_blocks import check_replay
from tests.gpu.gpu_layer import DEEP, SQUARE, Layer, check, rows_of
from tests.support.tolerance import BF16, FP32_BY_FP16_PAIRS, Arithmetic, assert_equal

pytestmark = pytest.mark.gpu


@torch.no_grad()
def test_other_streams_wait_for_the_packing() -> None:
    x = rows_of(64)
    for _ in range(20):
        layer = Layer()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        torch.cuda._sleep(2_000_000)
        here = layer(x)  # packs behind the sleeping kernel
        with torch.cuda.stream(side):
            there = layer(x)
        torch.cuda.synchronize()
        assert_equal(there, here)


@pytest.mark.parametrize("architecture", [SQUARE, DEEP], ids=str)
def test_inference_in_a_graph(architecture: Architecture) -> None:
    layer, x = Layer(architecture).requires_grad_(False), rows_of(129, architecture=architecture)
    check_replay(lambda: layer(x))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    x.copy_(-rows_of(129, architecture=architecture))
    graph.replay()
    check(out, layer, x)
    layer.factors[0].mul_(2)
    layer(x)  # a call outside brings new weights to the graph
    graph.replay()
    check(out, layer, x)


def test_weights_that_train_are_packed_inside_the_graph() -> None:
    layer, x = Layer(), rows_of(64)
    with torch.no_grad():
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = layer(x)
        layer.factors[1].mul_(-2)
        graph.replay()
        check(out, layer, x)


def test_a_training_step_in_a_graph() -> None:
    layer, x = Layer(mode=FP32_BY_FP16_PAIRS), rows_of(300, FP32_BY_FP16_PAIRS)
    reference = copy.deepcopy(layer)
    optimizers = [torch.optim.SGD(module.parameters(), 0.05) for module in (layer, reference)]

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        module(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(layer, optimizers[0])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(layer, optimizers[0])
    for _ in range(3):
        graph.replay()
    for _ in range(5):
        step(reference, optimizers[1])
    for ours, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
        assert_equal(ours, theirs)


def test_replays_that_train_are_missed_until_forgotten() -> None:
    layer, x = Layer(mode=FP32_BY_FP16_PAIRS), rows_of(64, FP32_BY_FP16_PAIRS)
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        layer.factors[0].mul_(-2)
    with torch.no_grad():
        before = layer(x)
        graph.replay()
        assert_equal(layer(x), before)
        forget_derived()
        check(layer(x), layer, x)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("mode", [FP32_BY_FP16_PAIRS, BF16], ids=lambda mode: mode.name)
def test_compiled_graphs_follow_training(mode: Arithmetic) -> None:
    layer, x = Layer(mode=mode), rows_of(300, mode)
    reference = copy.deepcopy(layer)
    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    for run, module in ((compiled, layer), (reference, reference)):
        optimizer = torch.optim.SGD(module.parameters(), 0.05)
        for _ in range(6):
            torch.compiler.cudagraph_mark_step_begin()
            optimizer.zero_grad()  # the gradients are memory of the graph, which the next step writes anew
            run(x).square().mean().backward()
            optimizer.step()
    for index, (ours, theirs) in enumerate(zip(layer.factors, reference.factors, strict=True)):
        assert not torch.equal(ours, Layer(mode=mode).factors[index])
        assert_equal(ours, theirs)


@pytest.mark.usefixtures("fresh_compiler")
@torch.no_grad()
def test_compiled_graphs_keep_their_packed_weights() -> None:
    layers = [Layer().requires_grad_(False) for _ in range(4)]
    compiled = [torch.compile(layer, mode="reduce-overhead", fullgraph=True) for layer in layers]
    for rows in (64, 129, 64, 300, 129):
        x = rows_of(rows)
        for layer, run in zip(layers, compiled, strict=True):
            torch.compiler.cudagraph_mark_step_begin()
            check(run(x).clone(), layer, x)
            torch.empty(1 << 20, device="cuda").fill_(float("nan"))
            check(run(x).clone(), layer, x)
