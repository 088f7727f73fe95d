"""A captured part of training gives what it gives from Python, although its weights are packed ahead of what is queued."""

from collections.abc import Callable, Iterable
from itertools import cycle

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

import flysurgery
from flysurgery.gpu import weight_cache
from flysurgery.gpu.graph_branch import ahead
from flysurgery.inference import clock
from flysurgery.ops import trained, training
from tests.support.blocks import TRAINED, to_train
from tests.support.captured import checkpoint_each
from tests.support.problems import all_pairs

pytestmark = pytest.mark.gpu

REPLAYS = 3


def pause() -> None:
    """On the current stream, for longer than all else in a graph here takes."""
    torch.cuda._sleep(2_000_000)


@pytest.fixture
def late(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Puts off what would be read too early: what is packed, or, where this is called, a write to what is packed."""
    if request.param == "write":
        return pause

    def after_a_pause(sources: tuple[Tensor, ...], make: Callable[[], object]) -> object:
        return ahead(sources, lambda: (pause(), make())[1])

    for module in (training, weight_cache):
        monkeypatch.setattr(module, "ahead", after_a_pause)
    return lambda: None


@pytest.fixture
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A small one, of which all is fused that may be."""
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: (2.0, 1.0))
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10).cuda().train()
    if request.param != "dense":
        flysurgery.convert(model, request.param)
    with torch.autocast("cuda", torch.bfloat16):
        report = flysurgery.optimize(model, torch.randn(64, 3, 64, 64, device="cuda"), training=True)
    assert {row.group for row in report.fused} >= {"qkv", "attn_out", "ffn", "patches"}, str(report)
    return model


def from_python_and_captured(run: Callable[[], list[Tensor]], state: Callable[[], Iterable[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """What the last of some runs gives, and how it leaves its state: pairs of a run from Python, and of a replay. All begin alike."""
    side = torch.cuda.Stream()

    @torch.no_grad()
    def copies(results: list[Tensor]) -> list[Tensor]:
        torch.cuda.synchronize()
        return [each.detach().clone() for each in (*results, *state())]

    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # which compiles
        before, results = copies([]), list[Tensor]()
        for _ in range(REPLAYS):
            results = run()
        expected = copies(results)
        with torch.no_grad():
            for tensor, value in zip(state(), before, strict=True):
                tensor.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            results = run()
        for _ in range(REPLAYS):
            graph.replay()
    return list(zip(copies(results), expected, strict=True))


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


MODELS, LATE = ("dense", "gonon", "monarch"), ("pack", "write")


@pytest.mark.parametrize(("model", "use_reentrant", "late"), all_pairs(MODELS, (None, False, True), LATE), indirect=["model", "late"])
def test_two_steps_in_one_graph(model: nn.Module, use_reentrant: bool | None, late: Callable[[], None]) -> None:
    """Also with checkpoints around blocks. Steps on weights of the step before would leave updates that differ by half."""
    x, classes = torch.randn(64, 3, 64, 64, device="cuda"), torch.arange(64, device="cuda") % 10
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=True)
    if use_reentrant is not None:
        checkpoint_each(model.get_submodule("blocks"), use_reentrant)
    start = [parameter.detach().clone() for parameter in model.parameters()]

    def two_steps() -> list[Tensor]:
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
                loss = functional.cross_entropy(model(x).float(), classes)
            loss.backward()
            late()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return []

    def state() -> list[Tensor]:
        return [*model.parameters(), *(each for kept in optimizer.state.values() for each in kept.values())]

    pairs = from_python_and_captured(two_steps, state)[: len(start)]
    moved = [distance(found - own, expected - own) for (found, expected), own in zip(pairs, start, strict=True) if own.ndim > 1]
    assert max(moved) < 0.02, "the bias of k, whose gradient is zero in truth, is none of these"


@pytest.mark.parametrize(("model", "late"), [*zip(MODELS, cycle(LATE))], indirect=True)
def test_graphs_of_forward_and_backward(model: nn.Module, late: Callable[[], None]) -> None:
    """They read the weights of now."""
    blocks, x = model.get_submodule("blocks"), torch.randn(64, 17, 192, device="cuda").bfloat16().requires_grad_()
    weights = [parameter for parameter in blocks.parameters() if parameter.ndim > 1]

    def results() -> list[Tensor]:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = blocks(x)
        return [each.clone() for each in (y.detach(), *torch.autograd.grad(y, (x, *weights), torch.ones_like(y)))]

    @torch.no_grad()
    def scale(factor: float) -> None:
        for weight in weights:
            weight.mul_(factor)

    scale(2.0)
    expected = results()
    scale(0.5)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
        torch.cuda.make_graphed_callables(blocks, (torch.zeros_like(x, requires_grad=True),))  # pyright: ignore[reportArgumentType]
    scale(2.0)
    assert max(map(distance, results(), expected)) < 1e-5


@pytest.mark.parametrize("late", LATE, indirect=True)
@pytest.mark.parametrize("name", TRAINED)
def test_weights_that_are_computed_in_the_graph(name: str, late: Callable[[], None]) -> None:
    wide, operation = to_train(name, 301, 192)
    for tensor in operation.tensors:  # weights are float32, what has rows is not
        tensor.data = tensor.data.to(torch.bfloat16 if tensor.shape[0] == 301 else torch.float32)
    x = wide.detach().bfloat16().requires_grad_()

    def two_calls() -> list[Tensor]:
        found = list[Tensor]()
        for factor in (2.0, 0.5):
            late()
            y = trained(x, pytree.tree_map_only(Tensor, lambda tensor, factor=factor: tensor * factor, operation))
            found += [y, *torch.autograd.grad(y, (x, *operation.tensors), torch.ones_like(y))]
        return found

    assert max(distance(*pair) for pair in from_python_and_captured(two_calls, list)) < 1e-5
