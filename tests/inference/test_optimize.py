"""Which groups are fused in models of each kind, that outputs stay, the way back, and what is done with optimized models."""

import copy
import importlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.errors import InferenceError, SurgeryError, WalkError
from flysurgery.inference.standin import StandIn
from tests.inference.models import BLOCK, SMALL, SWIN, WHOLE, check_fused, images, left, ready, saved, small
from tests.support.composed import Composed
from tests.support.tolerance import assert_equal

pytestmark = pytest.mark.usefixtures("all_tokens")

MASKED = [name for name in WHOLE if name != "attention"]
SPLIT = [name for name in WHOLE if name != "norm_linear"]
WRITTEN = ["norm_linear", "linear_residual", "ffn"] * 2
VIT = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 48, "depth": 2, "heads": 2, "mlp_dim": 96, "dim_head": 24}


def build(name: str, options: dict[str, Any]) -> nn.Module:
    if ":" not in name:
        return timm.create_model(name, **options)
    module, _, of = name.partition(":")
    return getattr(importlib.import_module(module), of)(**options)


@pytest.mark.parametrize(
    ("name", "options", "kernels", "reasons"),
    [
        ("deit3_small_patch16_224", SMALL, WHOLE, set()),
        ("beit_base_patch16_224", SMALL, MASKED, {"inline"}),
        ("vit_small_patch16_224", {**SMALL, "act_layer": "gelu_tanh", "class_token": False, "global_pool": "avg"}, WHOLE, set()),
        ("eva02_tiny_patch14_224", SMALL, WHOLE, {"call-form"}),  # gate and value from one layer, and layer norms without a scale
        ("eva02_base_patch14_224", SMALL, SPLIT, {"norm-shared", "call-form"}),  # from two layers, and a norm before the last one
        ("swin_tiny_patch4_window7_224", SWIN, ["patch_embedding", "ffn", "ffn"], {"no-norm", "no-residual"}),
        ("vit_pytorch.vit:ViT", VIT, WRITTEN, set()),
    ],
)
def test_groups_are_found_and_outputs_stay(
    called: list[str], name: str, options: dict[str, Any], kernels: list[str], reasons: set[str]
) -> None:
    model = ready(build(name, options))
    assert {*left(check_fused(model, images(model), called, kernels)).values()} == reasons


def of_another_class(model: Any) -> None:
    class Other(nn.Linear):
        pass

    model.blocks[0].attn.proj = Other(48, 48).eval()


def with_own_forwards(model: nn.Module) -> None:
    """One that reads another weight looks like any linear in a trace."""
    weight, layer, patches = torch.randn(192, 48), model.get_submodule("blocks.0.mlp.fc1"), model.get_submodule("patch_embed.proj")
    vars(layer)["forward"] = lambda x: nn.functional.linear(x, weight)
    vars(patches)["forward"] = lambda x: nn.functional.conv2d(x, patches.weight.flip(0), stride=8)  # pyright: ignore


def with_another_step(model: nn.Module) -> None:
    block = model.get_submodule("blocks.0")

    class Shifted(type(block)):  # pyright: ignore[reportUntypedBaseClass]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1.0

    block.__class__ = Shifted


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        (of_another_class, {"blocks.0.attn.proj": "no-kernel"}),
        (with_own_forwards, {"blocks.0.mlp.fc2": "no-kernel", "patch_embed.proj": "overlap", "_pos_embed": "no-patches"}),
        (with_another_step, {"blocks.0.attn.proj": "more"}),
    ],
)
def test_what_is_not_as_it_seems_is_left_with_the_reason(
    called: list[str], change: Callable[[nn.Module], None], reasons: dict[str, str]
) -> None:
    model = small(convert=change is of_another_class)
    change(model)
    report = check_fused(model, images(model), called)
    assert left(report) == reasons
    assert all(row.reason is None or row.reason.text in str(report) for row in report.rows)


class Always(nn.Module):
    """An active dropout, also in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


def test_training_mode_hooks_and_active_dropouts_leave_a_group_as_it_was(called: list[str]) -> None:
    names = ("attn.qkv", "attn", "attn.proj", "mlp.fc2")
    model: Any = small()
    model.blocks[0].mlp.train()
    model.blocks[1].norm1.register_forward_hook(lambda *_: None)
    codes = {f"blocks.{index}.{name}": code for index, code in ((0, "training"), (1, "hooked")) for name in names}
    assert left(flysurgery.optimize(model)) == codes
    model = small()
    model.blocks[0].mlp.drop1 = Always()
    model.blocks[1].drop_path2 = Always()
    fused = {row.fqn for row in flysurgery.optimize(model).fused}
    assert "blocks.0.mlp.fc2" not in fused and "blocks.1.attn.proj" not in fused
    assert isinstance(model.get_submodule("blocks.1.mlp"), StandIn)  # without the dropout and the sum behind it


def test_parts_and_wholes_know_of_each_other(called: list[str]) -> None:
    model = small()
    x = torch.randn(2, 17, 48)
    flysurgery.optimize(model.get_submodule("blocks.0"), x)
    for change in (flysurgery.optimize, flysurgery.densify, flysurgery.convert):
        with pytest.raises((InferenceError, SurgeryError), match="restore"):
            change(model)
    assert flysurgery.restore(model) == 1
    flysurgery.optimize(model)
    blocks = nn.Sequential(*model.get_submodule("blocks").children())
    before = blocks(x)
    with pytest.raises(InferenceError, match="optimized already"):
        flysurgery.optimize(blocks, x)
    assert flysurgery.restore(blocks) == 2
    called.clear()
    assert_equal(blocks(x), before)
    assert not called
    assert flysurgery.restore(model) == 4
    assert flysurgery.restore(model) == 0
    flysurgery.densify(model)


def compiled_in_place() -> nn.Module:
    model = nn.Linear(3, 3).eval()
    model.compile()
    return model


ASKING_FOR_VALUES = Composed(lambda self, x: self.inner(x[x[:, 0] > 0]), inner=nn.Linear(3, 3)).eval()


@pytest.mark.parametrize(
    ("make", "example", "words"),
    [
        (lambda: torch.compile(nn.Linear(3, 3).eval()), None, "the model is compiled already"),
        (compiled_in_place, None, "the model is compiled already"),
        (lambda: nn.Sequential(nn.Identity(), torch.compile(nn.Linear(3, 3))).eval(), None, "its 1 is compiled already"),
        (lambda: nn.Sequential(*small(convert=False).blocks), None, "give an example"),  # pyright: ignore
        (small, torch.zeros(0, 3, 32, 32), "the example of VisionTransformer is empty; give one with at least one sample"),
        (small, torch.zeros(2, 3, 31, 31), "Input height"),
        (lambda: ASKING_FOR_VALUES, torch.randn(5, 3), r"Composed cannot be walked, because it does not run without data: aten\.nonzero"),
        (small, torch.zeros(2, 3, 32, 32).half(), "Half"),
        (small, "digits", "'str' object"),
    ],
)
def test_models_and_examples_that_cannot_be_optimized_are_left_with_one_sentence(make: Callable[[], Any], example: Any, words: str) -> None:
    model = make()
    modules = list(model.modules())
    with pytest.raises((InferenceError, WalkError), match=words):
        flysurgery.optimize(model, example)
    assert list(model.modules()) == modules
    with pytest.raises(InferenceError, match="to optimize, got str"):
        flysurgery.optimize("vit_tiny_patch16_224")  # pyright: ignore[reportArgumentType]


def test_what_cannot_be_captured_is_refused_in_one_sentence() -> None:
    model, x = nn.Linear(3, 4), torch.zeros(2, 3)
    for given, words in (((model, x), "one CUDA device"), (("vit", x), "to capture, got str"), ((model, (x,)), "as example, got tuple")):
        with pytest.raises(InferenceError, match=words):
            flysurgery.capture(*given)  # pyright: ignore[reportArgumentType]


def test_a_folder_keeps_the_plain_weights(called: list[str], tmp_path: Path) -> None:
    model = small()
    x = images(model)
    before = model(x)
    with torch.device("meta"):  # another default device changes nothing
        flysurgery.optimize(model)
    flysurgery.save(model, tmp_path / "model")
    for optimize, kernels in ((False, []), (True, WHOLE)):
        called.clear()
        loaded = flysurgery.load(tmp_path / "model", optimize=optimize)
        with torch.no_grad():
            assert_equal(loaded(x), before)
        assert called == kernels


KINDS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "model": lambda: (model := small(), images(model)),
    "block": lambda: (small().get_submodule("blocks.0"), torch.randn(2, 17, 48)),
    "of two layers": lambda: (model := small("eva02_base_patch14_224"), images(model)),
    "of vit-pytorch": lambda: (model := ready(build("vit_pytorch.vit:ViT", VIT)), images(model)),
}
Change = Callable[[nn.Module], Any]


def loaded(assign: bool) -> Change:
    return lambda model: model.load_state_dict({name: 0.5 * each for name, each in model.state_dict().items()}, assign=assign) and None


def hooked(name: str) -> Change:
    """By a hook that would cancel itself if it ran twice."""
    return lambda model: model.get_submodule(name).register_forward_hook(lambda module, args, y: -y) and None


def with_hooked_norm(model: nn.Module) -> None:
    norm = [each for each in model.modules() if isinstance(each, nn.LayerNorm)][-2]
    norm.register_forward_hook(lambda module, args, y: -y)


def hooked_and_compiled(model: nn.Module) -> Any:
    torch.compiler.reset()  # a compiler does not ask again for hooks
    with_hooked_norm(model)
    return torch.compile(model, backend="eager")


def replace_layer(model: nn.Module) -> None:
    model.get_submodule("blocks.0.mlp").fc1 = nn.Linear(48, 192).requires_grad_(False)


def prune(model: nn.Module) -> None:
    model.prune_intermediate_layers([0], prune_norm=True, prune_head=True)  # pyright: ignore[reportCallIssue]


def with_forward(name: str) -> Change:
    """Set a forward on a module, as one that keeps the attention's maps."""

    def change(model: nn.Module) -> None:
        module = model.get_submodule(name)
        own = module.forward
        module.forward = lambda *args, own=own, **kwargs: 2 * own(*args, **kwargs)

    return change


OF_ALL: dict[str, tuple[Change, str]] = {
    "copied": (copy.deepcopy, "all"),
    "pickled": (saved, "all"),
    "loaded": (loaded(False), "all"),
    "assigned": (loaded(True), "all"),
    "compiled": (lambda model: torch.compile(model, backend="eager"), "all"),
    "in training mode": (nn.Module.train, "none"),
    "hooked": (with_hooked_norm, "some"),
}
"""Of each kind of model, and whether all kernels still run, none, or some: in a whole model those of all blocks but one."""
OF_MODEL: dict[str, tuple[Change, str]] = {
    "hooked and compiled": (hooked_and_compiled, "some"),
    "hooked layer": (hooked("blocks.1.mlp.fc1"), "some"),
    "hooked patches": (hooked("patch_embed.proj"), "all"),
    "another layer": (replace_layer, "some"),
    "pruned": (prune, "some"),
    "forward of attention": (with_forward("blocks.0.attn"), "some"),
    "forward of patches": (with_forward("patch_embed.proj"), "all"),
}


@pytest.mark.parametrize(("kind", "change"), [*product(KINDS, OF_ALL), *product(["model"], OF_MODEL)])
@torch.no_grad()
def test_changed_both_ways_they_give_the_same(called: list[str], kind: str, change: str) -> None:
    """And under autocast, where the own modules run, and once restored."""
    model, x = KINDS[kind]()
    plain, (apply, runs) = copy.deepcopy(model), (OF_ALL | OF_MODEL)[change]
    flysurgery.optimize(model, x)
    model(x)
    whole, changed = called.copy(), []
    for each in (model, plain):
        torch.manual_seed(1)
        found = apply(each)
        changed.append(each if found is None else found)
    called.clear()
    assert_equal(changed[0](x), changed[1](x))
    kernels = called.copy()
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(changed[0](x), changed[1](x))
    assert called == kernels
    if runs != "some":
        assert kernels == whole * (runs == "all")
    else:
        assert len(kernels) == len(whole) - len(BLOCK) if kind == "model" else len(kernels) < len(whole)
    assert flysurgery.restore(changed[0]) > 0
    if change != "forward of patches":  # which was set on the module that stood in, and is gone with it
        assert_equal(changed[0](x), changed[1](x))
    assert called == kernels


@pytest.mark.usefixtures("faster")
def test_replicas_are_refused_and_images_of_other_channels_meet_the_models_own_error() -> None:
    model = small()
    flysurgery.optimize(model)
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 1 channels"):
        model(torch.zeros(2, 1, 32, 32))
    with pytest.raises(InferenceError, match="DataParallel cannot replicate an optimized model"):
        for module in model.modules():  # as torch.nn.parallel.replicate does for each device
            module._replicate_for_data_parallel()  # pyright: ignore[reportCallIssue]


def test_without_kernels_only_patches_by_themselves_can_be_fused() -> None:
    model = small()
    report = flysurgery.optimize(model)
    without = {row.group for row in report.rows if row.reason and row.reason.code == "no-kernel"}
    assert without == {"qkv", "attention", "attn_out", "ffn", "patches"}
    times = next(row for row in report.rows if row.fqn == "patch_embed.proj")
    assert times.plain_ms and times.fused_ms
    if report.fused:
        assert report.whole_ms is not None and report.whole_ms[1] <= report.whole_ms[0]
