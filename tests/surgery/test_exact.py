"""Models of every kind, whose planned weights are products already: converted they give the same; and attention of torch."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
import vit_pytorch
from torch import Tensor, nn

import flysurgery
from flysurgery.errors import PlanError
from flysurgery.layers import ButterflyLinear
from flysurgery.surgery import ExampleInput, Plan, apply, convert, densify, plan
from flysurgery.walker import walk
from tests.support.composed import Composed
from tests.support.models import TRUNK, VIT_PYTORCH, is_close, unchanged
from tests.surgery.conftest import PADDING, TINY, WIDTH, encoder, make_exact, torchvision_vit

Make = Callable[[], Any]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


IMAGES, LARGE, TOKENS = random(2, 3, 32, 32), random(2, 3, 64, 64), random(3, 6, WIDTH)


def mobile() -> nn.Module:
    """A feed-forward block of convolutions, whose result goes through a view."""
    step = lambda self, x: (x + self.down(self.up(x).relu())).view(x.shape[0], 16, -1)  # noqa: E731
    return Composed(step, up=nn.Conv2d(16, 64, 1), down=nn.Conv2d(64, 16, 1, bias=False))


def listed() -> nn.Module:
    """Calls its children from a list of its own, of which modules know nothing, and looks at the dtype of a weight."""

    def step(self: Any, x: Tensor) -> Tensor:
        y = x.to(self.steps[0].weight.dtype)
        for each in self.steps:
            y = each(y)
        return x + y

    steps = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)]
    return Composed(step, steps=steps, **{f"step_{index}": each for index, each in enumerate(steps)})


def translator() -> nn.Module:
    """Keys and values that come from elsewhere, and have another size than the queries."""
    attend = nn.MultiheadAttention(WIDTH, 4, kdim=32, vdim=48, batch_first=True)
    return Composed(lambda self, x: x + self.attend(x, x[:, 1:, :32], x[:, 1:, :48])[0], attend=attend)


def decoder() -> nn.Module:
    inner = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True), 1)
    return Composed(lambda self, x: self.inner(x[:, :4], x, memory_key_padding_mask=PADDING[: len(x)]), inner=inner)


VISION = TRUNK | {"image_size": 32}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 50}
STAGES = {"num_encoder_blocks": 2, "depths": [1, 1], "hidden_sizes": [16, 32], "num_attention_heads": [1, 2], "sr_ratios": [2, 1]}
STAGES |= {"patch_sizes": [7, 3], "strides": [4, 2], "mlp_ratios": [4, 4], "decoder_hidden_size": 32}
SWIN = {"model_type": "swin", "image_size": 64, "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "window_size": 4}
SWIN |= {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
MASKS: dict[str, Any] = {"backbone_config": SWIN, "feature_size": 32, "mask_feature_size": 32, "hidden_dim": 32, "num_queries": 5}
MASKS |= {"encoder_feedforward_dim": 64, "dim_feedforward": 64, "encoder_layers": 1, "decoder_layers": 2, "num_attention_heads": 2}


def hub(name: str, **entries: Any) -> Make:
    """A class of transformers, with a configuration of these entries."""
    found = getattr(transformers, name)
    return lambda: found(found.config_class(**entries))


ALL: dict[str, Any] = {"roles": ("ffn", "qkv", "attn_out")}
MODELS: dict[str, tuple[Make, Any, dict[str, Any]]] = {
    "timm": (lambda: timm.create_model("vit_tiny_patch16_224", **TINY), IMAGES, ALL),
    "switched": (lambda: timm.create_model("beit_base_patch16_224", **TINY), IMAGES, ALL),
    "gated": (lambda: timm.create_model("eva02_tiny_patch14_224", **TINY | {"patch_size": 16, "embed_dim": 96}), IMAGES, ALL),
    "vit-pytorch": (lambda: vit_pytorch.ViT(**VIT_PYTORCH), IMAGES, ALL),
    "listed": (listed, random(2, 16, 64), {"roles": ("ffn",)}),
    "convolutions": (mobile, random(2, 16, 8, 8), {"convs": True}),
    "torchvision": (torchvision_vit, IMAGES, ALL),
    "encoder": (encoder, TOKENS, ALL),
    "encoder, norms first, tokens first": (lambda: encoder(norm_first=True, batch_first=False, bias=False), TOKENS, ALL),
    "decoder": (decoder, TOKENS, ALL),
    "keys of another size": (translator, TOKENS, {"roles": ("qkv", "attn_out")}),
    "segmentation": (hub("SegformerForSemanticSegmentation", **STAGES), {"pixel_values": LARGE}, ALL),
    "masks": (hub("Mask2FormerForUniversalSegmentation", **MASKS), {"pixel_values": LARGE}, ALL),
    "video": (hub("VideoMAEForVideoClassification", **VISION, num_frames=4), {"pixel_values": random(2, 4, 3, 32, 32)}, ALL),
    "images and texts": (
        hub("CLIPModel", vision_config=VISION, text_config=TEXT, projection_dim=16),
        {"pixel_values": IMAGES, "input_ids": torch.arange(14).view(2, 7)},
        ALL,
    ),
}


@cache
def planned(name: str) -> Plan:
    """The plan of one of these, by way of JSON."""
    make, inputs, options = MODELS[name]
    return Plan.from_json(plan(make().double(), example=inputs, **options).to_json())


FAST_PATHS = ("torchvision", "encoder", "encoder, norms first, tokens first", "decoder", "keys of another size")
"""Models of ``nn.MultiheadAttention``, which goes other ways in training."""


def outputs(model: nn.Module, inputs: Any) -> list[Tensor]:
    if isinstance(inputs, Tensor):
        return [model(inputs)]
    return [each for each in model(**inputs).values() if isinstance(each, Tensor)]


def with_gradients(model: nn.Module, inputs: Any, kept: list[str]) -> list[Tensor]:
    """The outputs, and the gradients of the first input and of those parameters that no conversion touches."""
    first = (inputs if isinstance(inputs, Tensor) else inputs["pixel_values"]).clone().requires_grad_()
    found = outputs(model, first if isinstance(inputs, Tensor) else inputs | {"pixel_values": first})
    loss = sum((each.square().sum() for each in found if each.is_floating_point()), torch.zeros(()))
    wanted = [first, *map(model.get_parameter, kept)]
    return [*found, *torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize(
    ("name", "training"), [*((name, False) for name in MODELS), *((name, True) for name in FAST_PATHS)], ids=lambda each: str(each)
)
def test_products_that_are_exact_keep_outputs_and_gradients(name: str, training: bool) -> None:
    made, (make, inputs, _) = planned(name), MODELS[name]
    torch.manual_seed(5)
    model = make().double()
    for parameter in model.parameters():  # some heads and biases start at zero
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    make_exact(made, model)
    model.train(training)
    fqns = tuple(f"{layer.fqn}." for layer in made.replaced)
    kept = [each for each, _ in model.named_parameters() if not each.startswith(fqns) and "_proj_" not in each]
    dense, kinds = with_gradients(model, inputs, kept), [type(module) for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert apply(made, model).verified
    replaced = [part for layer in made.replaced for part in model.get_submodule(layer.fqn).modules() if isinstance(part, ButterflyLinear)]
    assert len(replaced) >= len(made.replaced) >= 2 and all(part.training == training for part in replaced)
    assert not any(type(module) is nn.MultiheadAttention for module in model.modules())
    assert all(is_close(got, right, 1e-9) for got, right in zip(with_gradients(model, inputs, kept), dense, strict=True))
    with torch.no_grad():  # the fast paths of torch would be taken now, where nothing was replaced
        assert all(is_close(got, right, 1e-9) for got, right in zip(outputs(model.eval(), inputs), dense, strict=False))
    densify(model.train(training))
    assert [type(module) for module in model.modules()] == kinds
    assert model.state_dict().keys() == state.keys() and all(is_close(model.state_dict()[key], value, 1e-9) for key, value in state.items())


def test_a_folder_with_attention_of_torch_is_opened_by_both(tmp_path: Path) -> None:
    make, inputs, _ = MODELS["masks"]
    model, images = make().eval(), {"pixel_values": inputs["pixel_values"].float()}
    apply(replace(planned("masks"), example=(ExampleInput((2, 3, 64, 64), "float32"),)), model)
    assert isinstance(model.get_submodule("model.transformer_module.decoder.layers.0.cross_attn.k"), ButterflyLinear)
    flysurgery.save(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "theirs")
    with torch.no_grad():
        expected = outputs(model, images)
        for again in (flysurgery.load(tmp_path / "ours"), type(model).from_pretrained(tmp_path / "theirs")):
            assert all(torch.equal(got, right) for got, right in zip(outputs(again, images), expected, strict=True))


def test_padding_reaches_a_converted_encoder_as_nested_tensors_never_do() -> None:
    model, x, made = encoder().double().eval(), TOKENS, planned("encoder")
    make_exact(made, model)
    assert [switch.attribute for switch in made.switches] == ["use_nested_tensor"]
    targets = walk(model, x)
    with torch.no_grad():
        nested = model(x, src_key_padding_mask=PADDING)
        for roles in (None, "ffn", "attn_out"):
            part = plan(model, roles=roles, example=x, include="layers.1", targets=targets)
            twin = copy.deepcopy(model)
            apply(part, twin)
            valid = ~PADDING
            torch.testing.assert_close(twin(x, src_key_padding_mask=PADDING)[valid], nested[valid], rtol=0, atol=1e-9)
            densify(twin)
            assert twin.use_nested_tensor is True
            torch.testing.assert_close(twin(x, src_key_padding_mask=PADDING), nested, rtol=0, atol=1e-9)


def test_only_attentions_of_planned_layers_are_taken_apart() -> None:
    model = torchvision_vit()
    convert(model, include="layer_1.*self_attention.q")
    kinds = [type(block.self_attention) for block in model.encoder.layers]
    assert kinds == [nn.MultiheadAttention, flysurgery.walker.SeparateAttention]
    attention: Any = model.encoder.layers[1].self_attention
    assert type(attention.k) is nn.Linear
    sizes = {parameter.untyped_storage().nbytes() for parameter in attention.k.parameters()}
    assert sizes == {4 * WIDTH * WIDTH, 4 * WIDTH}  # nothing keeps the weight of all three


def test_after_an_error_the_attentions_are_as_before() -> None:
    model = encoder()
    made = replace(planned("encoder"), example=(ExampleInput((3, 6, WIDTH), "float32"),))
    handle = model.layers[1].linear1.register_forward_pre_hook(lambda *_: None)
    with unchanged(model), pytest.raises(PlanError, match="it has hooks"):
        apply(made, model)
    handle.remove()
    model.register_forward_hook(lambda *_: 1 / 0)
    with unchanged(model), pytest.raises(flysurgery.FlysurgeryError, match="division by zero"):
        apply(made, model)
