"""Dense models: weights and folders, read and written, and bases built from names and plain values, what building takes being counted."""

import argparse
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from flysurgery.checkpoint import build_base, load_dense, load_weights, save_dense
from flysurgery.checkpoint.meter import LimitError, Limits, metered
from flysurgery.errors import CheckpointError, ModelError
from tests.checkpoint.conftest import VIT_PYTORCH, WEIGHTS_FILE, outputs, rewrite_config
from tests.support.models import VIT, VIT_ARGUMENTS, vit


def tiny() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


@pytest.fixture
def weights() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(t.shape) if t.is_floating_point() else t + 7 for name, t in tiny().state_dict().items()}


def same(model: nn.Module, weights: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("wrap", [".safetensors", ".pt", "", "state_dict", "model"])
def test_formats_casts_and_training_checkpoints(wrap: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    halves = {name: t.half() if t.is_floating_point() else t for name, t in weights.items()}
    file = tmp_path / f"weights{wrap}"
    if wrap == ".safetensors":
        save_file(halves, file)
    elif wrap in ("state_dict", "model"):
        prefixed = {f"module.{name}": tensor for name, tensor in halves.items()}
        torch.save({wrap: prefixed, "epoch": 3, "args": argparse.Namespace(lr=0.1)}, file)
    else:
        torch.save(halves, file)
    model = tiny()
    load_weights(model, file)
    assert same(model, {name: t.float() if t.is_floating_point() else t for name, t in halves.items()})


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({"0.weight": None, "0.bias": None, "1.weight": None, "1.bias": None}, "4 missing: 0.weight, 0.bias, 1.weight, ..."),
        ({"2.weight": torch.zeros(1)}, "1 unknown: 2.weight"),
        ({"0.weight": torch.zeros(4, 5)}, r"1 of another shape: 0.weight is \[4, 5\] instead of \[4, 3\]"),
    ],
)
def test_weights_that_do_not_fit(changes: dict[str, Tensor | None], fact: str, weights: dict[str, Tensor], tmp_path: Path) -> None:
    save_file({name: tensor for name, tensor in {**weights, **changes}.items() if tensor is not None}, tmp_path / "w.safetensors")
    model = tiny()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=fact) as caught:
        load_weights(model, tmp_path / "w.safetensors")
    assert "Sequential" in str(caught.value) and "\n" not in str(caught.value)
    assert same(model, before), "nothing may be loaded if anything does not fit"


class Command:
    """What a pickle may hold besides tensors."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (os.mkdir, ("made",))


@pytest.mark.parametrize(
    ("name", "content", "fact"),
    [
        ("w.pt", {"model": Command()}, "Python objects are never unpickled"),
        ("w.pt", {}, "no state_dict"),
        ("w.pt", {"state_dict": {"0.weight": 3}}, "no state_dict"),
        ("w.pt", b"", r"w\.pt"),
        ("w.safetensors", b"short", r"w\.safetensors"),
        ("w.npz", b"PK\x03\x04", r"w\.npz"),
        ("nowhere.safetensors", None, r"there is no .*nowhere\.safetensors"),
        ("", None, "cannot be read|is a folder"),
        ("w.pt", os.mkfifo, "is a pipe, expected a regular file"),
        ("w.safetensors", os.mkfifo, "is a pipe, expected a regular file"),
    ],
)
def test_files_that_hold_no_weights(name: str, content: Any, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / name
    if callable(content):
        content(file)
    elif content is not None:
        file.write_bytes(content) if isinstance(content, bytes) else torch.save(content, file)
    with pytest.raises(CheckpointError, match=fact) as caught:
        load_weights(tiny(), file)
    assert "\n" not in str(caught.value) and not Path("made").exists()


@pytest.mark.parametrize("safe", [True, False])
def test_opens_what_timm_saved(safe: bool, tmp_path: Path) -> None:
    model = vit()
    nn.init.normal_(model.head.weight)
    timm.models.save_for_hf(model, str(tmp_path), safe_serialization=safe)
    rewrite_config(tmp_path, lambda config: config["pretrained_cfg"].update(mean=[0.1, 0.2, 0.3]))
    loaded, base, _ = load_dense(tmp_path)
    assert torch.equal(outputs(loaded), outputs(model)) and not loaded.training and base == VIT
    assert loaded.pretrained_cfg["mean"] == (0.1, 0.2, 0.3)
    assert not any(loaded.pretrained_cfg.get(name) for name in ("tag", "license", "url", "hf_hub_id")), "timm notes them for any weights"


def test_sizes_come_from_the_data_where_no_arguments_are_saved(tmp_path: Path) -> None:
    """Published folders say only num_classes, pooling and input size."""
    model = timm.create_model(VIT, img_size=32, num_classes=3, in_chans=1, depth=12)
    timm.models.save_for_hf(model, str(tmp_path), safe_serialization=True)
    rewrite_config(tmp_path, lambda config: config.pop("model_args"))
    loaded, _, base_args = load_dense(tmp_path)
    assert base_args == {"num_classes": 3, "in_chans": 1, "img_size": [32, 32], "global_pool": "token"}
    assert loaded.pos_embed.shape == model.pos_embed.shape


@pytest.mark.parametrize(
    ("change", "error", "fact"),
    [
        ({"architecture": "flysurgery_structured"}, CheckpointError, "flysurgery.load"),
        ({"architecture": "nonesuch"}, ModelError, "nonesuch"),
        ({"architecture": 3}, CheckpointError, "names no architecture"),
        ({"model_args": {"pretrained": True}}, ModelError, "may not set pretrained"),
        (lambda folder: (folder / WEIGHTS_FILE).unlink(), CheckpointError, r"no weights: expected model\.safetensors or pytorch"),
        (shutil.rmtree, CheckpointError, "there is no folder"),
    ],
)
def test_folders_that_are_refused(change: Any, error: type[Exception], fact: str, tmp_path: Path) -> None:
    save_dense(vit(), tmp_path / "dense", VIT, VIT_ARGUMENTS, force=False)
    change(tmp_path / "dense") if callable(change) else rewrite_config(tmp_path / "dense", lambda config: config.update(change))
    with pytest.raises(error, match=fact):
        load_dense(tmp_path / "dense")


def test_what_is_written_opens_everywhere(saved: Path, tmp_path: Path) -> None:
    model = vit()
    nn.init.normal_(model.head.weight)
    model.blocks[1].mlp.fc1.weight = model.blocks[0].mlp.fc1.weight  # used twice, and written twice
    save_dense(model, tmp_path / "dense", f"{VIT}.augreg_in21k", VIT_ARGUMENTS, force=False)
    opened, base, base_args = load_dense(tmp_path / "dense")
    assert (base, base_args) == (VIT, VIT_ARGUMENTS), "a tag of published weights is not kept"
    assert torch.equal(outputs(opened), outputs(model))
    assert torch.equal(outputs(timm.create_model(f"local-dir:{tmp_path / 'dense'}", pretrained=True).eval()), outputs(model))
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["pretrained_cfg"]["input_size"] == [3, 16, 16]
    with pytest.raises(CheckpointError, match="exists; give force=True"):
        save_dense(model, tmp_path / "dense", VIT, VIT_ARGUMENTS, force=False)
    save_dense(model, tmp_path / "dense", VIT, VIT_ARGUMENTS, force=True)
    with pytest.raises(ModelError, match="holds a converted model"):
        load_weights(model, saved / WEIGHTS_FILE)


def test_bases_are_what_their_libraries_build() -> None:
    """A size of two sides is a list in JSON, and must become a tuple."""
    torch.manual_seed(5)
    built = build_base(VIT, VIT_ARGUMENTS)
    torch.manual_seed(5)
    expected = timm.create_model(VIT, **VIT_ARGUMENTS)
    assert all(torch.equal(a, b) for a, b in zip(built.state_dict().values(), expected.state_dict().values(), strict=True))
    giant = build_base("vit_giant_patch14_clip_224.laion2b", {"depth": 100}, device="meta")
    assert giant.num_classes == 1024 and all(tensor.is_meta for tensor in giant.state_dict().values())
    for base in ("vit_pytorch:ViT", "vit_pytorch.simple_vit:SimpleViT"):
        model = build_base(base, VIT_PYTORCH | {"image_size": [16, 32]}, device="meta")
        assert model(torch.zeros(1, 3, 16, 32, device="meta")).shape == (1, 5)
    model = build_base("torchvision:vit_b_16", {"image_size": 32, "num_classes": 5}, device="meta")
    assert model(torch.zeros(1, 3, 32, 32, device="meta")).shape == (1, 5)


NAMES = (  # those that look like timm's, those with a prefix, and what is in a library and no class of models
    *("", "é", "/etc", "vit_pytorch", "vit_pytorch/vit", "vit_tiny_patch16_224.x y", "flysurgery_structured.x"),
    *(":", "torch.nn:Linear", "local-dir:/", "vit_pytorch:", "vit_pytorch..vit:ViT", "vit_pytorch.vit.x:ViT", "vit_pytorch:ViT.forward"),
    *("vit_pytorch:nonesuch", "vit_pytorch.vit:Rearrange", "vit_pytorch.vit:pair", "vit_pytorch.vit:torch"),
    *("torchvision:vit_b_17", "torchvision:get_model", "torchvision:_utils", "torchvision.ops:nms", "torchvision:"),
    *("transformers:Nothing", "transformers:ViTConfig"),
)
REFUSED: list[tuple[str, Any, str | None]] = [
    *((name, {}, None) for name in NAMES),
    (VIT, [("depth", 1)], "must map argument names to values"),
    (VIT, {"depth of": 1}, "must map argument names to values"),
    (VIT, {"sizes": {1: 2}}, "sizes must be a value that JSON has"),
    (VIT, {"depth": -(10**400)}, "depth must be a number of at most 16777216"),
    (VIT, {"img_size": [16, float("inf")]}, "img_size must be a number"),
    (VIT, {"cache_dir": "/", "checkpoint_path": "x"}, "may not set cache_dir, checkpoint_path"),
    (VIT, {"depth": -1, "embed_dim": 31}, f"{VIT} cannot be built"),
    (VIT, {"surprise": 1}, "surprise"),
    ("torchvision:vit_b_16", {"weights": "DEFAULT"}, "may not set weights"),
    ("transformers:ViTModel", {"attn_implementation": "a/b"}, "may not set attn_implementation"),
    ("transformers:TimmWrapperModel", {"model_args": {"checkpoint_path": "a.pth"}}, "may not set checkpoint_path"),
    ("transformers:DetrModel", {"backbone_config": {"use_pretrained_backbone": True}}, "may not set use_pretrained_backbone"),
    ("transformers:DetrModel", {"backbone_config": {"backbone": "hf-hub:a/b"}}, "may not name models from elsewhere"),
]


@pytest.mark.parametrize(("base", "arguments", "fact"), REFUSED)
def test_names_and_arguments_that_are_refused(base: str, arguments: Any, fact: str | None) -> None:
    with pytest.raises(ModelError, match=fact) as caught:
        build_base(base, arguments, device="meta")
    assert "\n" not in str(caught.value)


LIMITS = Limits(steps=300, nbytes=1 << 20)
BUILDS: list[tuple[str, Callable[[str], object]]] = [  # the first is a terabyte, which no machine gives
    ("bytes", lambda device: torch.zeros(1 << 40, device=device)),
    ("bytes", lambda device: torch.arange(100_000, device=device)[:, None] - torch.arange(100_000, device=device)),
    ("bytes", lambda device: torch.arange(2000, device=device)[:, None].repeat(1, 2000)),
    ("bytes", lambda device: [torch.ones(10_000, device=device) for _ in range(100)]),
    ("bytes", lambda device: list(torch.ones(50_000, device=device))),
    ("bytes", lambda _: torch.tensor([1.0] * 300_000)),
    ("300 steps", lambda device: [nn.LayerNorm(1, device=device) for _ in range(60)]),
    ("300 steps", lambda _: nn.Sequential(*[nn.Identity() for _ in range(301)])),
    ("300 steps", lambda device: [torch.ones(1, device=device) for _ in range(301)]),
]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(("words", "build"), BUILDS)
def test_bytes_and_steps_are_counted_before_they_are_taken(words: str, build: Callable[[str], object], device: str) -> None:
    with pytest.raises(LimitError, match=words), metered(LIMITS, parameters_on_meta=True):
        build(device)


def test_parameters_on_meta_and_views_take_nothing_and_another_thread_builds_as_it_likes() -> None:
    made: list[nn.Module] = []
    with metered(LIMITS, parameters_on_meta=True):
        layer, other = nn.Linear(4096, 4096), nn.Linear(8, 8, bias=False)
        other.weight = layer.weight
        table = torch.ones(100_000)
        for _ in range(50):
            table = table.view(100, 1000).T.T.flatten()
        thread = threading.Thread(target=lambda: made.append(nn.Sequential(*[nn.Linear(60, 60) for _ in range(301)])))
        thread.start()
        thread.join()
    assert layer.weight.is_meta and layer.weight.requires_grad and other.weight is layer.weight and not table.is_meta
    assert not any(parameter.is_meta for parameter in made[0].parameters())
    with pytest.raises(LimitError, match="bytes"), metered(LIMITS, parameters_on_meta=False):
        nn.Linear(4096, 4096)
    assert len([nn.Identity() for _ in range(301)]) == 301, "nothing is counted afterwards"
