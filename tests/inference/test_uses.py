"""What is done with optimized models: saving and loading, features, compilation, gradients, autocast, other calls."""

from __future__ import annotations

import copy
import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models._features import FeatureGetterNet
from torch import nn
from torch.overrides import TorchFunctionMode

import flysurgery
from flysurgery.errors import InferenceError
from flysurgery.gpu.weight_cache import derived
from flysurgery.inference.fused_modules import LayerNormStep, LinearResidualStep
from flysurgery.inference.standin import Passed, StandIn
from tests.inference.models import BLOCK, SWIN, images, ready, small
from tests.support.tolerance import assert_equal

BLOCKS = BLOCK * 2


def test_a_folder_keeps_the_wish_and_the_plain_weights(called: list[str], tmp_path: Path) -> None:
    model = small()
    x = images(model)
    before = model(x)
    with torch.device("meta"):  # another default device changes nothing
        flysurgery.optimize(model)
    assert_equal(model(x), before)
    assert called == ["patch_embedding", *BLOCKS, "layer_norm"]
    flysurgery.save(model, tmp_path / "model", optimize=True)
    assert json.loads((tmp_path / "model" / "config.json").read_text())["optimize"] is True
    assert "On CUDA `flysurgery.load` fuses groups of layers" in (tmp_path / "model" / "README.md").read_text()
    for optimize, kernels in ((None, []), (False, []), (True, ["patch_embedding", *BLOCKS, "layer_norm"])):
        called.clear()
        loaded = flysurgery.load(tmp_path / "model", optimize=optimize)  # None: only on CUDA
        with torch.no_grad():
            assert_equal(loaded(x), before)
        assert called == kernels


def test_features_and_intermediates(called: list[str]) -> None:
    model = small()
    x = images(model)
    wrapped = FeatureGetterNet(model, out_indices=(0, 1))
    runs = (lambda: model.forward_features(x), lambda: model.forward_intermediates(x)[1][0], lambda: wrapped(x)[1])  # pyright: ignore
    before = [run() for run in runs]
    flysurgery.optimize(model)
    for run, expected in zip(runs, before, strict=True):
        called.clear()
        assert_equal(run(), expected)
        assert called == ["patch_embedding", *BLOCKS]


def test_calls_of_another_form_go_to_the_own_modules(called: list[str]) -> None:
    model = small()
    x, mask = images(model), torch.zeros(17, 17).masked_fill(torch.ones(17, 17).tril() == 0, float("-inf"))
    masked, causal = (model.forward_features(x, **options) for options in ({"attn_mask": mask}, {"is_causal": True}))  # pyright: ignore
    flysurgery.optimize(model)
    assert_equal(model.forward_features(x, attn_mask=mask), masked)  # pyright: ignore[reportCallIssue]
    assert_equal(model.forward_features(x, is_causal=True), causal)  # pyright: ignore[reportCallIssue]
    assert called == ["patch_embedding", "layer_norm"] * 2


def test_under_autocast_the_own_modules_run(called: list[str]) -> None:
    model = small()
    x = images(model)
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x)
        flysurgery.optimize(model)
        assert_equal(model(x), before)
    assert called == []


@pytest.mark.usefixtures("compilable")
@pytest.mark.parametrize(
    ("name", "itself"), [("vit_tiny_patch16_224", False), ("eva02_base_patch14_224", False), ("vit_tiny_patch16_224", True)]
)
def test_compiled_whole(name: str, itself: bool) -> None:
    model = small(name, depth=1)
    x = torch.randn(2, 17, 48) if itself else images(model)
    model = model.get_submodule("blocks.0") if itself else model
    before = model(x)
    assert any(row.group == "ffn" for row in flysurgery.optimize(model, x).fused)
    assert itself or isinstance(model.get_submodule("blocks.0"), StandIn)
    with torch.no_grad():
        assert_equal(torch.compile(model, fullgraph=True, backend="eager")(x), before)


@pytest.mark.usefixtures("compilable")
def test_a_norm_by_itself_is_the_compilers() -> None:
    step, x = LayerNormStep(nn.LayerNorm(16), 1e-6), torch.randn(3, 16)
    assert not isinstance(step.way(x), str)
    refused = torch.compile(lambda: isinstance(step.way(x), str), fullgraph=True, backend="eager")
    assert refused() is True


def replace_layer(model: nn.Module) -> None:
    model.get_submodule("blocks.0.mlp").fc1 = nn.Linear(48, 192).requires_grad_(False)


def remove_norm(model: nn.Module) -> None:
    model.get_submodule("blocks.1").norm1 = nn.Identity()


def prune(model: nn.Module) -> None:
    model.prune_intermediate_layers([0], prune_norm=True, prune_head=True)  # pyright: ignore[reportCallIssue]


def with_forward(name: str) -> Callable[[nn.Module], None]:
    """Set a forward on a module, as one that keeps the attention's maps."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(name)
        own = module.forward
        module.forward = lambda *args, own=own, **kwargs: 2 * own(*args, **kwargs)

    return change


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        *((each, BLOCKS[:4]) for each in (replace_layer, remove_norm, prune)),
        (with_forward("blocks.0.attn"), BLOCKS[4:]),
        (with_forward("blocks.1.mlp.act"), BLOCKS[:4]),
        (with_forward("patch_embed.proj"), BLOCKS),
        (with_forward("pos_drop"), BLOCKS),
    ],
)
def test_children_and_forwards_that_are_replaced_later_count(
    called: list[str], change: Callable[[nn.Module], None], fused: list[str]
) -> None:
    model = small()
    x, plain = images(model), copy.deepcopy(model)
    flysurgery.optimize(model)
    model(x)
    for each in (model, plain):
        torch.manual_seed(1)
        change(each)
    called.clear()
    assert_equal(model(x), plain(x))
    assert [name for name in called if name in BLOCKS] == fused


def test_a_norm_that_is_replaced_later_takes_back_its_work(called: list[str]) -> None:
    """It is put in the place of one that passes its input on to a fused module."""
    model = ready(timm.create_model("swin_tiny_patch4_window7_224", **SWIN))
    x = images(model)
    flysurgery.optimize(model)
    block = model.get_submodule("layers.0.blocks.1")
    assert isinstance(block.norm2, Passed)
    block.norm2 = nn.Identity()
    called.clear()
    y = model(x)
    assert called.count("ffn") == 1
    flysurgery.restore(model)
    assert_equal(y, model(x))


def test_names_that_lie(called: list[str]) -> None:
    class Lying(nn.Module):
        """As a transformer block, with the names of its parts exchanged."""

        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.mlp, self.attn = block.attn, block.mlp
            self.norm2, self.norm1 = block.norm1, block.norm2

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.mlp(self.norm2(x)) + x
            return self.attn(self.norm1(x)) + x

    model = small()
    for index in range(2):
        model.blocks[index] = Lying(model.blocks[index]).eval()  # pyright: ignore
    x = images(model)
    before = model(x)
    flysurgery.optimize(model)
    assert_equal(model(x), before)
    assert called == ["patch_embedding", *BLOCKS, "layer_norm"]


def test_moved_they_free_what_was_packed(called: list[str]) -> None:
    model = small()
    flysurgery.optimize(model)
    parameters = {name: each for name, each in model.named_parameters() if name.startswith(("patch_embed", "blocks", "norm"))}
    packed = [weakref.ref(derived("packed", (each,), lambda each=each: (each.clone(),))[0]) for each in parameters.values()]
    assert packed and all(each() is not None for each in packed)
    model.double()
    assert not any(each() is not None for each in packed)


def test_tensors_may_be_swapped_after_a_forward(called: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model, other = small(), small()
    flysurgery.optimize(model)
    x = images(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    model(x)
    gc.collect()  # PyTorch's tracers leave weak references of their own until then
    model.load_state_dict(other.state_dict())
    called.clear()
    assert_equal(model(x), other(x))
    assert called
    model.double()
    assert model(x.double()).dtype == torch.float64


def test_replicas_are_refused_in_one_sentence(called: list[str]) -> None:
    model = small()
    flysurgery.optimize(model)
    with pytest.raises(InferenceError, match="DataParallel cannot replicate an optimized model"):
        for module in model.modules():  # as torch.nn.parallel.replicate does for each device
            module._replicate_for_data_parallel()  # pyright: ignore[reportCallIssue]


@pytest.mark.usefixtures("compilable")
def test_modes_are_told_of_what_the_own_modules_do_alone() -> None:
    """A mode is told of each look at a tensor as well, which takes longer than the kernels' launches."""

    class Told(TorchFunctionMode):
        functions = 0

        def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
            self.functions += 1
            return func(*args, **(kwargs or {}))

    linear = nn.Linear(48, 48).requires_grad_(False)
    step, x = LinearResidualStep(linear, None), torch.randn(5, 48)
    with Told() as mode:
        fused = step(x, x)
    assert mode.functions == 0
    step.enabled = False
    with Told() as mode:
        assert_equal(step(x, x), fused)
    assert mode.functions >= 2
