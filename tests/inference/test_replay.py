"""On a GPU: calls that launch again what they launched before, beside a compiler too, and whole forwards as CUDA graphs."""

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flysurgery
from flysurgery.errors import InferenceError
from flysurgery.gpu import weight_cache as derivation
from flysurgery.gpu.weight_cache import forget_derived
from flysurgery.ops import Repeating
from tests.inference.models import images, small
from tests.support.tolerance import assert_equal

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"img_size": 64, "patch_size": 16, "embed_dim": 384, "depth": 2, "num_heads": 6, "num_classes": 5}
REPEATED = 3
"""What is fused by itself: the patches and two blocks."""
ROUNDS = 12
"""Of what is done again and again while much else happens on the GPU."""


@pytest.fixture
def x() -> Tensor:
    return torch.randn((64, 3, 64, 64), generator=torch.Generator().manual_seed(3)).cuda().half()


@pytest.fixture
def model(faster: None, x: Tensor) -> Iterator[nn.Module]:
    """A small ViT all of whose groups are fused, called twice."""
    model = timm.create_model("vit_small_patch16_224", **SIZES).eval().requires_grad_(False)
    flysurgery.convert(model, "gonon", roles=("ffn", "qkv"))
    model.cuda().half()
    flysurgery.optimize(model, x)
    with torch.no_grad():
        model(x)
        model(x)
        yield model


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The functions that were called, because what they launched before could not be launched again."""
    repeat, seen = Repeating.__call__, list[object]()

    def noting(self: Repeating, run: Callable[..., Any], modules: Any, *operands: Tensor) -> Any:
        def counted(*operands: Tensor) -> Any:
            seen.append(run)
            return run(*operands)

        return repeat(self, counted, modules, *operands)

    monkeypatch.setattr(Repeating, "__call__", noting)
    return seen


def anew(model: nn.Module, x: Tensor) -> Tensor:
    """What the model gives where nothing is repeated."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Repeating, "__call__", lambda self, run, modules, *operands: run(*operands))
        return model(x)


def test_calls_are_repeated_for_inputs_that_look_the_same_and_any_layout_is_right(model: nn.Module, x: Tensor, asked: list[object]) -> None:
    for scale in (1.0, -2.0):
        expected = anew(model, scale * x)
        asked.clear()
        assert_equal(model(scale * x), expected)
        assert not asked
    few, expected = x[:3], anew(model, x[:3])
    assert_equal(model(few), expected)
    assert len(asked) >= REPEATED
    asked.clear()
    assert_equal(model(few), expected)
    assert not asked
    at_an_odd_address = x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    with_gaps = x.new_empty((*x.shape[:-1], 2 * x.shape[-1]))[..., ::2].copy_(x)
    one, expected = x[:1].expand_as(x), anew(model, x)
    for _ in range(3):
        for each in (x.to(memory_format=torch.channels_last), at_an_odd_address, with_gaps, x.mT.contiguous().mT):
            assert_equal(model(each), expected)
        assert_equal(model(one), anew(model, one))
        assert model(x[:0]).shape == (0, 5)


def test_weights_that_change_are_followed(model: nn.Module, x: Tensor, asked: list[object]) -> None:
    before, weight = model(x), model.get_parameter("blocks.1.mlp.fc1.factors.0")
    original = weight.clone()
    weight.mul_(2)
    for _ in range(3):
        assert_equal(model(x), anew(model, x))
    assert not torch.equal(model(x), before)
    weight.copy_(original)
    assert_equal(model(x), before)
    state = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: 0.5 * value for name, value in state.items()}, assign=True)
    assert_equal(model(x), anew(model, x))
    model.load_state_dict(state)
    assert_equal(model(x), before)
    assert_equal(model.bfloat16()(x.bfloat16()), anew(model, x.bfloat16()))
    assert_equal(model.half()(x), anew(model, x))


def test_moved_away_it_leaves_no_memory_behind(model: nn.Module, x: Tensor) -> None:
    expected = model(x)
    left = []
    for _ in range(2):  # what kernels keep for a device besides weights is there from the first time on
        before = torch.cuda.memory_allocated()
        model.cpu()
        left.append(before - torch.cuda.memory_allocated())
        before = torch.cuda.memory_allocated()
        model.cuda()
        assert_equal(model(x), expected)
        assert_equal(model(x), expected)
    weights = sum(each.nbytes for each in model.parameters())
    assert left[0] == left[1] >= 1.5 * weights, "packed ones as well"


def test_modes_streams_and_graphs(model: nn.Module, x: Tensor) -> None:
    expected = model(x)
    with torch.inference_mode():
        for _ in range(3):
            assert_equal(model(x), expected)
        assert model(x).is_inference()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        elsewhere = [model(x) for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    for y in elsewhere:
        assert_equal(y, expected)
    captured = flysurgery.capture(model, x)
    assert_equal(captured(x), expected)
    model.get_parameter("blocks.0.mlp.fc1.factors.0").mul_(3)
    changed = model(x)  # also outside of the graph
    assert_equal(captured(x), changed)
    assert not torch.equal(changed, expected)


def litter() -> None:
    """Memory that was freed is full of NaN afterwards, whoever still reads it."""
    kept = [torch.full((size,), float("nan"), device="cuda", dtype=torch.float16) for size in (1 << 10, 1 << 14, 1 << 18, 1 << 22) * 4]
    del kept


@pytest.mark.parametrize("own_streams", [False, True], ids=["one stream", "streams"])
def test_threads_with_inputs_of_their_own(model: nn.Module, x: Tensor, own_streams: bool) -> None:
    given = [x[:count] * (1 + count / 64) for count in (64, 1, 3, 17)]
    expected = [anew(model, each) for each in given]
    torch.cuda.synchronize()

    def work(first: int) -> None:
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()) if own_streams else nullcontext():
            for turn in range(ROUNDS):
                which = (first + turn) % len(given)
                y = model(given[which])
                litter()
                assert_equal(y, expected[which])

    with ThreadPoolExecutor(len(given)) as threads:
        list(threads.map(work, range(len(given))))


def test_writes_between_calls_on_several_streams(model: nn.Module, x: Tensor) -> None:
    """Each round writes to weights on one stream and calls on another, which waits for it; the memory of packed weights is given back."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    names = [name for name, _ in model.named_parameters() if "blocks" in name or "pos_embed" in name]
    for turn in range(2 * ROUNDS):
        writing, calling = streams[turn % 3], streams[(turn + 1 + turn // 3) % 3]
        writing.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(writing):
            model.get_parameter(names[7 * turn % len(names)]).mul_(-1.25 if turn % 2 else 0.8)
        calling.wait_stream(writing)
        with torch.cuda.stream(calling):
            results = [model(x) for _ in range(3)]
            litter()
            expected = anew(model, x)
        torch.cuda.current_stream().wait_stream(calling)
        for y in results:
            assert_equal(y, expected)


def test_transforms_get_pytorchs_operators(model: nn.Module) -> None:
    """Which alone have rules for them: kernels would leave out tangents, and know no vmap."""
    own = copy.deepcopy(model)
    flysurgery.restore(own)
    tokens = torch.randn((3, 2, 17, 384), generator=torch.Generator().manual_seed(4)).cuda().half()
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for blocks in (model.get_submodule("blocks"), own.get_submodule("blocks")):
            blocks(tokens[0])
        mapped, expected = [torch.vmap(each.get_submodule("blocks"))(tokens) for each in (model, own)]
        assert_equal(mapped, expected)
        model.float(), own.float()  # in halves PyTorch 2.11 has no forward derivative of a norm
        tokens = tokens.float()
        tangents, expected = [torch.func.jvp(each.get_submodule("blocks"), (tokens[0],), (tokens[1],))[1] for each in (model, own)]
        assert_equal(tangents, expected)
        assert tangents.count_nonzero()


def replace(blocks: nn.Module) -> None:
    layer: Any = blocks.get_submodule("1.attn.proj")
    layer.weight = nn.Parameter(2 * layer.weight, requires_grad=False)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize(
    "change",
    [
        lambda blocks: blocks.get_parameter("0.mlp.fc1.bias").add_(1.0),
        replace,
        lambda blocks: blocks.get_submodule("1.mlp").register_forward_hook(lambda module, args, y: -y),
    ],
    ids=["scale", "replace", "hook"],
)
def test_compiled_blocks_give_what_they_give_by_themselves(model: nn.Module, mode: str, change: Callable[[nn.Module], object]) -> None:
    blocks, tokens = model.get_submodule("blocks"), torch.randn((64, 17, 384), generator=torch.Generator().manual_seed(3)).cuda().half()
    for _ in range(3):
        blocks(tokens)
    exported = torch.export.export(blocks, (tokens,), strict=False)
    assert not any("flysurgery" in str(node.target) for node in exported.graph.nodes)
    torch.compiler.reset()
    run = torch.compile(blocks, mode=mode)
    for _ in range(4):
        assert_equal(run(tokens), blocks(tokens))
    change(blocks)
    for _ in range(4):
        expected = blocks(tokens)
        assert_equal(run(tokens), expected)
    torch.compiler.reset()


def test_replays_give_what_the_model_gives() -> None:
    model = small(embed_dim=64)
    x = images(model).cuda()
    model.cuda()
    captured = flysurgery.capture(model, x)
    with torch.no_grad():
        for scale in (1.0, -2.0):
            assert_equal(captured(scale * x), model(scale * x))
    first = captured(x)
    kept = first.clone()
    shared = captured(2 * x, fresh=False)
    assert_equal(first, kept)
    captured(x, fresh=False)
    assert_equal(shared, kept)
    assert_equal(captured(x.clone().requires_grad_()), kept)
    assert not captured._input.requires_grad
    with torch.inference_mode():
        captured = flysurgery.capture(model, 3 * x)
        assert_equal(captured(x), kept)
    assert_equal(captured(x), kept)  # out of the mode that it was made in
    with pytest.raises(InferenceError, match="captured for"):
        captured(x[:1])
    with pytest.raises(InferenceError, match="training mode"):
        flysurgery.capture(model.train(), x)


@pytest.mark.parametrize("trains", [False, True], ids=["frozen", "trains"])
def test_weights_that_were_packed_count_in_the_next_call(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(embed_dim=64)
    x = images(model).cuda()
    model.cuda().requires_grad_(trains)
    captured, weight = flysurgery.capture(model, x), model.get_parameter("blocks.0.mlp.fc1.factors.0")
    packed = list[object]()
    monkeypatch.setattr(derivation, "_make", lambda make, own=derivation._make: packed.append(make) or own(make))
    with torch.no_grad():
        before = captured(x)
        assert_equal(before, model(x))
        assert not packed, "graphs read weights as they were packed before"
        weight.mul_(2)
        after = captured(x)
        assert packed and not torch.equal(after, before)
        assert_equal(after, model(x))
        weight.data = 0.5 * weight.data
        assert_equal(captured(x), before)
        weight.data.mul_(2)  # which PyTorch does not tell
        forget_derived()
        assert_equal(captured(x), after)
    model.train()
    assert_equal(captured(x), after)
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(InferenceError, match="training mode"):
        captured(x)
