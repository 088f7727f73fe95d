"""Models of ``nn.MultiheadAttention``: query, key and value are replaced as in other models, and come back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.errors import PlanError
from flysurgery.inference import convert
from flysurgery.layers import ButterflyLinear
from flysurgery.surgery import Plan, apply, densify, install, plan
from tests.surgery.conftest import make_exact, unchanged

torchvision = pytest.importorskip("torchvision", reason="timm brings torchvision")

WIDTH = 64
TOKENS = torch.randn(3, 6, WIDTH, generator=torch.Generator().manual_seed(1)).double()
PADDING = torch.tensor([[False] * 6, [False] * 4 + [True] * 2, [False] * 5 + [True]])


def vit() -> nn.Module:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": WIDTH, "mlp_dim": 128}
    return torchvision.models.VisionTransformer(num_classes=7, **sizes)


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 128, **{"dropout": 0.0, "batch_first": True} | options)
    return nn.TransformerEncoder(layer, 2)


class Translator(nn.Module):
    """Keys and values that come from elsewhere, and have another size than the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, 4, kdim=32, vdim=48, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, x[:, 1:, :32], x[:, 1:, :48])[0]


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "torchvision's ViT": (vit, torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(2)).double()),
    "encoder": (encoder, TOKENS),
    "encoder, norms first, tokens first": (lambda: encoder(norm_first=True, batch_first=False, bias=False), TOKENS),
    "decoder": (lambda: Decoder(), TOKENS),
    "keys of another size": (Translator, TOKENS),
}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 128, dropout=0.0, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, :4], x, memory_key_padding_mask=PADDING[: len(x)])


def made(name: str) -> tuple[nn.Module, Plan, Tensor]:
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = make().double()
    for parameter in model.parameters():  # torchvision's head starts at zero
        nn.init.normal_(parameter, std=0.1)
    roles = [role for role in ("qkv", "attn_out", "ffn") if role != "ffn" or name != "keys of another size"]
    planned = Plan.from_json(plan(model, roles=roles, example=x).to_json())
    return model, planned, x


def outputs_and_gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output, and the derivatives for the input, all norms, biases, and weights that no conversion touches."""
    x = x.clone().requires_grad_()
    result = model(x)
    kept = [parameter for name, parameter in model.named_parameters() if "norm" in name or "ln" in name or "out_proj.bias" in name]
    return [result, *torch.autograd.grad(result.square().sum(), [x, *kept])]


def is_close(got: Tensor, expected: Tensor) -> bool:
    return got.shape == expected.shape and float((got - expected).abs().max()) <= 1e-10 * float(expected.abs().max())


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_exact_products_keep_outputs_and_gradients(name: str, training: bool) -> None:
    model, planned, x = made(name)
    make_exact(planned, model)
    model.train(training)
    dense, kinds = outputs_and_gradients(model, x), [type(module) for module in model.modules()]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    assert {layer.role for layer in planned.replaced} >= {"qkv", "attn_out"}
    apply(planned, model)
    replaced = [model.get_submodule(layer.fqn) for layer in planned.replaced]
    assert all(isinstance(module, ButterflyLinear) and module.training == training for module in replaced)
    assert not any(type(module) is nn.MultiheadAttention for module in model.modules())
    for got, expected in zip(outputs_and_gradients(model, x), dense, strict=True):
        assert is_close(got, expected)
    with torch.no_grad():  # the fast paths of torch would be taken now, where nothing was replaced
        assert is_close(model.eval()(x), dense[0])
    densify(model.train(training))
    assert [type(module) for module in model.modules()] == kinds
    assert model.state_dict().keys() == state.keys() and all(is_close(model.state_dict()[key], value) for key, value in state.items())


def test_padding_reaches_a_converted_encoder_as_nested_tensors_never_do() -> None:
    model, planned, x = made("encoder")
    make_exact(planned, model)
    model.eval()
    assert [switch.attribute for switch in planned.switches] == ["use_nested_tensor"]
    with torch.no_grad():
        nested = model(x, src_key_padding_mask=PADDING)
        for roles in (None, "ffn", "attn_out"):
            part = plan(model, roles=roles, example=x, include="layers.1")
            twin = copy.deepcopy(model)
            apply(part, twin)
            valid = ~PADDING
            assert is_close(twin(x, src_key_padding_mask=PADDING)[valid], nested[valid])
            densify(twin)
            assert twin.use_nested_tensor is True and is_close(twin(x, src_key_padding_mask=PADDING), nested)


def test_only_attentions_of_planned_layers_are_taken_apart() -> None:
    model = vit()
    convert(model, include="layer_1.*self_attention.q")
    kinds = [type(block.self_attention) for block in model.encoder.layers]
    assert kinds == [nn.MultiheadAttention, flysurgery.walker.SeparateAttention]
    attention: Any = model.encoder.layers[1].self_attention
    assert type(attention.k) is nn.Linear
    sizes = {parameter.untyped_storage().nbytes() for parameter in attention.k.parameters()}
    assert sizes == {4 * WIDTH * WIDTH, 4 * WIDTH}  # nothing keeps the weight of all three
    only_ffn = vit()
    convert(only_ffn, roles="ffn")
    assert type(only_ffn.encoder.layers[0].self_attention) is nn.MultiheadAttention


def test_a_shared_attention_stays_shared() -> None:
    model = vit()
    model.encoder.layers[1].self_attention = model.encoder.layers[0].self_attention
    planned = plan(model)
    assert sum(bool(layer.aliases) for layer in planned.replaced) == 3
    apply(planned, model)
    assert model.encoder.layers[1].self_attention is model.encoder.layers[0].self_attention
    assert isinstance(model.encoder.layers[1].self_attention.q, ButterflyLinear)
    densify(model)
    assert type(model.encoder.layers[1].self_attention) is nn.MultiheadAttention
    assert model.encoder.layers[1].self_attention is model.encoder.layers[0].self_attention


def test_after_an_error_the_attentions_are_as_before() -> None:
    model = encoder()
    planned = plan(model, example=TOKENS.float())
    handle = model.layers[1].linear1.register_forward_pre_hook(lambda *_: None)
    with unchanged(model), pytest.raises(PlanError, match="it has hooks"):
        apply(planned, model)
    handle.remove()
    model.register_forward_hook(lambda *_: 1 / 0)
    with unchanged(model), pytest.raises(flysurgery.FlysurgeryError, match="division by zero"):
        apply(planned, model)


def test_calibrated_permuted_and_within_a_budget() -> None:
    images = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    model = vit()
    report = convert(model, calibrate=images, permute=True)
    moved = [each for each in report.permutations if each.layers and each.what == "heads"]
    assert moved and all(row.calibration is not None for row in report.replaced)
    chosen = convert(vit(), "auto", budget=0.5, calibrate=images)
    assert chosen.tradeoff is not None and any(row.role == "qkv" for row in chosen.replaced)


def test_a_plan_and_a_state_make_the_model_again() -> None:
    model = vit().eval()
    planned = plan(model)
    apply(planned, model)
    with torch.device("meta"):
        again = vit().eval()
    install(Plan.from_json(planned.to_json()), again)
    again.load_state_dict(model.state_dict(), assign=True)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), model(x))


def test_a_folder_names_a_model_of_torchvision(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "num_layers": 1, "num_heads": 2, "hidden_dim": WIDTH, "mlp_dim": 128}
    model = torchvision.models.VisionTransformer(**sizes).eval()
    convert(model, base="torchvision:VisionTransformer", base_args=sizes)
    flysurgery.save(model, tmp_path / "vit")
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(flysurgery.load(tmp_path / "vit")(x), model(x))


@pytest.mark.parametrize("make", [torchvision.models.swin_t, torchvision.models.swin_v2_t])
def test_a_parent_that_hands_weights_to_a_function_keeps_its_layers_dense(make: Callable[..., nn.Module]) -> None:
    with torch.device("meta"):
        model = make()
    planned = plan(model, roles=("qkv", "attn_out", "ffn"), example=torch.zeros(1, 3, 64, 64))
    assert {layer.role for layer in planned.replaced} == {"ffn_in", "ffn_out"}
    reasons = {layer.reason.text for layer in planned.layers if layer.role in ("qkv", "attn_out") and layer.reason is not None}
    assert reasons == {"its parent reads the weight, at least in some cases, and does not call the module"}
