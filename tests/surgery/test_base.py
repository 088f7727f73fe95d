"""What a timm model says of itself is enough to build it again."""

from __future__ import annotations

import json

import pytest
import timm
import torch
from torch import nn

from flysurgery.errors import OptionError
from flysurgery.surgery.base import find_base

TINY = {"depth": 2, "embed_dim": 64, "num_heads": 2}
MODELS = [
    ("vit_tiny_patch16_224", {"img_size": 32, "num_classes": 7, "in_chans": 1, **TINY}),
    ("vit_tiny_patch16_224", {"global_pool": "avg", "num_classes": 0, **TINY}),
    ("beit_base_patch16_224", TINY),
    ("eva02_tiny_patch14_224", {**TINY, "img_size": 56}),
    ("deit3_small_patch16_224", TINY),
    ("swin_tiny_patch4_window7_224", {"img_size": 112, "in_chans": 4}),
    ("swinv2_tiny_window8_256", {}),
    ("levit_128s", {"num_classes": 5}),
    ("mobilevit_xs", {}),
    ("vit_base_patch16_siglip_224.v2_webli", {"depth": 1}),
]


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(("name", "arguments"), MODELS)
def test_rebuilding_on_meta_gives_the_same_state(name: str, arguments: dict[str, object]) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, **arguments)
        base, base_args = find_base(model, None, None)
        assert base is not None
        assert base.startswith(name)
        again = timm.create_model(base, **json.loads(json.dumps(base_args)))
    assert shapes(again) == shapes(model)


def test_a_timm_without_recorded_arguments_gives_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(timm.models, "get_model_args", raising=False)
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, in_chans=1, num_classes=7)
    assert find_base(model, None, None)[1] == {"img_size": [32, 32], "in_chans": 1, "num_classes": 7}


def test_classes_changed_after_the_construction_are_seen() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", **TINY)
        model.reset_classifier(3)
    assert find_base(model, None, None)[1]["num_classes"] == 3


def test_what_is_given_goes_first() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", num_classes=7, **TINY)
    base, base_args = find_base(model, None, {"num_classes": 9})
    assert (base, base_args["num_classes"], base_args["depth"]) == ("vit_tiny_patch16_224.augreg_in21k_ft_in1k", 9, 2)
    assert find_base(model, "vit_pytorch:ViT", {"depth": 1}) == ("vit_pytorch:ViT", {"depth": 1})


def test_arguments_that_json_lacks_leave_the_base_open() -> None:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", act_layer=nn.ReLU, **TINY)
    assert find_base(model, None, None) == (None, {})
    assert find_base(nn.Linear(2, 2), None, None) == (None, {})
    with pytest.raises(OptionError, match="base_args must be values that JSON has"):
        find_base(model, "vit_tiny_patch16_224", {"act_layer": nn.ReLU})
