"""What is done with optimized models: saved, compiled, changed and moved."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import flysurgery
from flysurgery.errors import InferenceError
from flysurgery.gpu.weight_cache import derived
from flysurgery.inference.standin import StandIn
from tests.inference.models import BLOCK, images, small
from tests.support.tolerance import assert_equal

BLOCKS = BLOCK * 2


def test_a_folder_keeps_the_plain_weights(called: list[str], tmp_path: Path) -> None:
    model = small()
    x = images(model)
    before = model(x)
    with torch.device("meta"):  # another default device changes nothing
        flysurgery.optimize(model)
    assert_equal(model(x), before)
    assert called == ["patch_embedding", *BLOCKS, "layer_norm"]
    flysurgery.save(model, tmp_path / "model")
    for optimize, kernels in ((False, []), (True, ["patch_embedding", *BLOCKS, "layer_norm"])):
        called.clear()
        loaded = flysurgery.load(tmp_path / "model", optimize=optimize)
        with torch.no_grad():
            assert_equal(loaded(x), before)
        assert called == kernels


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


def replace_layer(model: nn.Module) -> None:
    model.get_submodule("blocks.0.mlp").fc1 = nn.Linear(48, 192).requires_grad_(False)


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
        *((each, BLOCKS[:4]) for each in (replace_layer, prune)),
        (with_forward("blocks.0.attn"), BLOCKS[4:]),
        (with_forward("patch_embed.proj"), BLOCKS),
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


def test_replicas_are_refused_in_one_sentence(called: list[str]) -> None:
    model = small()
    flysurgery.optimize(model)
    with pytest.raises(InferenceError, match="DataParallel cannot replicate an optimized model"):
        for module in model.modules():  # as torch.nn.parallel.replicate does for each device
            module._replicate_for_data_parallel()  # pyright: ignore[reportCallIssue]


def test_without_kernels_only_patches_by_themselves_can_be_fused() -> None:
    model = small()
    report = flysurgery.optimize(model)
    without = {row.group for row in report.rows if row.reason and row.reason.code == "no-kernel"}
    assert without == {"qkv", "attention", "attn_out", "ffn", "norm", "patches"}
    times = next(row for row in report.rows if row.fqn == "patch_embed.proj")
    assert times.plain_ms and times.fused_ms
    if report.fused:
        assert report.whole_ms is not None and report.whole_ms[1] <= report.whole_ms[0]


@pytest.mark.usefixtures("faster")
def test_images_of_other_channels_meet_the_models_own_error() -> None:
    model = small()
    flysurgery.optimize(model)
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 1 channels"):
        model(torch.zeros(2, 1, 32, 32))


def test_moved_they_free_what_was_packed(called: list[str]) -> None:
    model = small()
    flysurgery.optimize(model)
    parameters = {name: each for name, each in model.named_parameters() if name.startswith(("patch_embed", "blocks", "norm"))}
    packed = [weakref.ref(derived("packed", (each,), lambda each=each: (each.clone(),))[0]) for each in parameters.values()]
    assert packed and all(each() is not None for each in packed)
    model.double()
    assert not any(each() is not None for each in packed)
