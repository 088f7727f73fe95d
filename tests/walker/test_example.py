"""Inputs that models accept, above all those of transformers; and a walk leaves no trace, in the model or in the process."""

import copy
import importlib
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.parametrizations import spectral_norm

import flysurgery
from flysurgery.errors import WalkError
from flysurgery.surgery.apply import example_of
from flysurgery.walker import EXAMPLE_BATCH, example_input, walk
from tests.support.composed import Composed
from tests.support.models import ONE_BLOCK, TRUNK, unchanged
from tests.walker.toys import WIDTH, FusedAttention, Stack, tokens


def stem() -> nn.Module:
    """A convolutional stem of unknown make, and as many positions as it gives at 128x128 pixels."""
    positions = nn.Parameter(torch.zeros(8, 8, 8))
    return Composed(lambda self, x: self.stem(x) + self.positions, stem=nn.Conv2d(5, 8, 16, stride=16), positions=positions).double()


def vit_pytorch(name: str, **options: Any) -> nn.Module:
    module, _, of = name.partition(":")
    return getattr(importlib.import_module(f"vit_pytorch.{module}"), of)(**ONE_BLOCK | options)


IMAGES, IMAGE = TRUNK | {"image_size": 32}, torch.zeros(2, 3, 32, 32)
TEXT = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 50}
RESNET = {"model_type": "rt_detr_resnet", "embedding_size": 16, "hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1]}
RESNET |= {"layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"]}
DETECTOR: dict[str, Any] = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128}
DETECTOR |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": 5, "encoder_hidden_dim": 64}
DETECTOR |= {"encoder_in_channels": [16, 32, 32], "decoder_in_channels": [64] * 3, "backbone_config": RESNET}


def build(name: str, device: str = "cpu", **entries: Any) -> Any:
    found = getattr(transformers, name)
    torch.manual_seed(0)
    with torch.device(device):
        return found(found.config_class(**entries)).eval()


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, img_size=(32, 64), in_chans=1), (1, 32, 64)),
        (lambda: timm.create_model("swin_tiny_patch4_window7_224", img_size=64, window_size=4, in_chans=4), (4, 64, 64)),
        (lambda: timm.create_model("tresnet_m", layers=(1, 1, 1, 1)), (3, 224, 224)),  # whose first convolution takes 48 channels
        (lambda: vit_pytorch("vit_1d:ViT", seq_len=64), (3, 64)),
        (lambda: build("YolosModel", **TRUNK, image_size=[32, 64], num_channels=1), (1, 32, 64)),
        (lambda: build("VideoMAEModel", **TRUNK, image_size=32, num_frames=4), (4, 3, 32, 32)),
        (stem, (5, 128, 128)),
    ],
)
def test_models_run_on_their_example(make: Callable[[], nn.Module], size: tuple[int, ...]) -> None:
    model = make().eval()
    example = example_input(model)
    assert tuple(example.shape) == (EXAMPLE_BATCH, *size) and example.dtype == next(model.parameters()).dtype
    with torch.no_grad():
        model(example)


class Config:
    to_dict = dict


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, ids: Tensor, images: Tensor | None = None) -> Tensor:
        assert images is not None, "images are missing"
        return self.linear(images) + ids


MISSING = "images are missing; the example gives ids; if the forward needs images too, give a tuple or a dict of what it takes$"


@pytest.mark.parametrize(
    ("make", "example", "words"),
    [
        (FusedAttention, None, r"for FusedAttention, and zeros of shape \(2, .*\) fail \(.+\); give an example"),
        (lambda: FusedAttention(config=Config()), None, r"whose configuration names no image_size, and zeros .* fail .*give an example"),
        (lambda: nn.Bilinear(8, 8, 8), None, r"missing 1 required positional argument.*; give an example: a tensor, a tuple or a dict"),
        (Pair, torch.zeros(2, 8), MISSING),
        *((lambda: build("ViTModel", "meta", **IMAGES), given, "it takes pixel_values") for given in ({"pixels": IMAGE}, {})),
    ],
)
def test_models_without_a_known_size_and_examples_that_do_not_fit(make: Callable[[], nn.Module], example: Any, words: str) -> None:
    with pytest.raises(WalkError, match=words):
        walk(make(), example)


def test_models_of_two_inputs() -> None:
    assert len(walk(Pair(), (torch.zeros(2, 8), torch.zeros(2, 8)))) == 1
    model = build("CLIPModel", vision_config=IMAGES, text_config=TEXT)
    ids, images = example_input(model)
    assert ids.shape == (2, 8) and images.shape == (2, 3, 32, 32)
    plan = flysurgery.plan(model)
    assert {layer.fqn.partition("_")[0] for layer in plan.replaced} == {"text", "vision"}
    assert flysurgery.apply(plan, model).verified


def test_an_example_by_name_keeps_its_small_numbers() -> None:
    model = build("Siglip2VisionModel", **IMAGES | {"num_patches": 16})
    sizes = torch.tensor([[4, 4], [2, 8]])
    example = {"pixel_values": torch.randn(2, 16, 192), "spatial_shapes": sizes, "pixel_attention_mask": torch.ones(2, 16).long()}
    plan = flysurgery.plan(model, example=example)
    again = flysurgery.Plan.from_json(plan.to_json())
    assert again == plan
    assert torch.equal(example_of(again, model)[2], sizes)
    flysurgery.apply(again, model)


@pytest.mark.parametrize(
    ("name", "entries", "heads"),
    [
        ("YolosForObjectDetection", TRUNK | {"image_size": [64, 64]}, 6),
        ("RTDetrForObjectDetection", DETECTOR, 12),  # whose layers correct the boxes of those before, by sums
    ],
)
def test_classes_and_boxes_of_detectors_are_heads(name: str, entries: dict[str, Any], heads: int) -> None:
    targets = walk(build(name, "meta", **entries), torch.zeros(2, 3, 64, 64))
    targets = [target for target in targets if all(obstacle.code != "conv1x1" for obstacle in target.obstacles)]
    found = [target.fqn for target in targets if target.role == "head"]
    assert len(found) == heads and all(any(part in fqn for part in ("class", "box", "score")) for fqn in found)
    counts = Counter(target.role for target in targets)
    assert counts["ffn_in"] == counts["ffn_out"] > 0


def test_forwards_and_traces_leave_nothing_that_changes_the_next() -> None:
    sizes = {"backbone_out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16] * 4, "reassemble_factors": [4, 2, 1, 0.5]}
    model = build("DPTForDepthEstimation", **IMAGES | sizes | {"num_hidden_layers": 4, "fusion_hidden_size": 16, "is_hybrid": False})
    before = len(flysurgery.plan(model).replaced)
    model(torch.randn(2, 3, 32, 32))  # transformers registers its hooks now
    assert len(flysurgery.plan(model).replaced) == before > 0
    model = build("DINOv3ViTModel", **IMAGES)
    flysurgery.plan(model)  # of which no fake tensor stays in a cache
    assert not isinstance(model(torch.randn(2, 3, 32, 32)).last_hidden_state, FakeTensor)


def test_the_model_is_as_before_and_its_parameters_may_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    model = timm.create_model("beit_base_patch16_224", depth=2, embed_dim=48, num_heads=3, img_size=32, drop_rate=0.1).train()
    model.get_submodule("blocks.1").eval()
    model.get_submodule("blocks.0").requires_grad_(False)
    spectral_norm(model.get_submodule("blocks.0.mlp.fc1"))  # whose buffers change where the weight is read in training mode

    with unchanged(model):
        walk(model)
    assert model.get_submodule("blocks.0.attn").qkv_bias_separate is False
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    weight = model.get_parameter("fc_norm.weight")
    model.double().load_state_dict(copy.deepcopy(model.state_dict()))
    assert model.get_parameter("fc_norm.weight") is weight and weight.dtype == torch.float64


def test_what_a_forward_stores_stays_out_of_the_model() -> None:
    class Storing(FusedAttention):
        def __init__(self) -> None:
            super().__init__()
            self.kept: list[Tensor] = []
            self.last: Tensor | None = None
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            torch.manual_seed(7)
            x = x + torch.rand_like(x) * random.random()
            self.count += 1
            self.kept.append(x)
            self.last = super().forward(x)
            return self.last

    model = Storing()
    model(tokens()).sum().backward()  # leaves a tensor with a gradient function behind, which deepcopy alone refuses
    last, states = model.last, (torch.get_rng_state(), random.getstate())
    assert [target.role for target in walk(model, tokens())] == ["qkv", "attn_out"]
    assert len(model.kept) == 1 and model.last is last and model.count == 1
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1] and torch.is_grad_enabled()


UNTRACED = r"^FusedAttention cannot be walked, because torch\.export cannot trace it: "


@pytest.mark.parametrize("context", [torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.device("meta")])
def test_within_a_context_of_the_caller_and_on_the_meta_device(context: AbstractContextManager[object]) -> None:
    model = Stack(FusedAttention())
    outside = walk(model, tokens(7))
    with context:
        assert walk(model, tokens(7)) == outside
    assert walk(model.to("meta"), tokens(7)) == outside


@pytest.mark.parametrize(
    ("make", "width", "words"),
    [
        (lambda: FusedAttention(lambda self, x, fused: x if x.sum() > 0 else fused), WIDTH, UNTRACED),
        (FusedAttention, WIDTH + 1, f"{UNTRACED}.*25"),
        (lambda: FusedAttention(handle=(_ for _ in ())), WIDTH, "FusedAttention cannot be walked, .* its modules cannot be copied"),
        (lambda: "vit", WIDTH, r"^expected a torch\.nn\.Module to walk, got str$"),
    ],
)
def test_what_cannot_be_walked_is_one_sentence_and_nothing_is_printed(
    make: Callable[[], Any], width: int, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WalkError, match=words) as caught:
        walk(make(), tokens(width))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""
