"""The models of the survey: one of every timm architecture file, vit-pytorch's classes, and transformers' classes for vision tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import timm
import torch
from timm.models import is_model_in_modules
from torch import nn

CHOSEN = """
    beit_base_patch16_224 halonet_h1 botnet26t_256 lambda_resnet26t mobileone_s0 cait_xxs24_224 coat_tiny coat_lite_tiny convit_tiny
    convmixer_768_32 convnext_zepto_rms cpubone_nano crossvit_tiny_240 csatv2 cs3darknet_focus_s cspnext_tiny davit_tiny
    deepseek_vit_412m deit_tiny_patch16_224 densenet121 dla46x_c dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0
    tinynet_d efficientvim_m1 efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 vit_small_patch16_rope_224 fasternet_t0 fastvit_t8
    focalnet_tiny_srf gcvit_xxtiny gemma4_vit_167m ghostnet_050 hardcorenas_b hgnetv2_b0 hiera_tiny_224 hieradet_small hrnet_w18_small
    iformer_t inception_next_atto inception_resnet_v2 inception_v3 inception_v4 lcnetv2_small levit_128s levit_conv_128s lowformer_b0
    mambaout_femto coatnet_nano_rw_224 maxvit_rmlp_pico_rw_256 maxxvit_rmlp_nano_rw_256 caformer_s18 poolformerv2_s12 mixer_s32_224
    gmlp_ti16_224 resmlp_12_224 mobilenetv3_small_050 mobilenetv5_base mobilevit_xxs mobilevitv2_050 mvitv2_tiny
    naflexvit_base_patch16_gap nasnetalarge jx_nest_tiny nextvit_small nf_regnet_b0 pit_ti_224 pnasnet5large pvt_v2_b0 qwen3_vit_88m
    rdnet_tiny regnetx_002 repghostnet_050 repvit_m0_9 res2next50 resnest14d resnet10t resnetv2_18 rexnet_100 selecsls42
    legacy_seresnet18 sequencer2d_s shvit_s1 skresnet18 starnet_s050 swiftformer_xs swin_tiny_patch4_window7_224 swinv2_tiny_window8_256
    swinv2_cr_tiny_224 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m twins_svt_small twins_pcpvt_small vgg11 visformer_tiny
    vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vit_relpos_small_patch16_224 samvit_base_patch16_224 vitamin_small_224 volo_d1_224
    ese_vovnet19b_slim_dw legacy_xception xception41p xcit_nano_12_p8_224
"""
"""Of a file of timm with several sizes a small model, and of one with several kinds of blocks one of each."""


@dataclass(frozen=True)
class Case:
    """A model to survey: how it is built, what goes around it, and its input, None where the walk finds one."""

    family: str
    name: str
    base: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    example: Callable[[], Any] | None = None
    wrap: Callable[[nn.Module], nn.Module] | None = None


def timm_cases() -> list[Case]:
    """The chosen models of each file, at their default arguments; of a file without any its first one."""
    found = {file: [name for name in CHOSEN.split() if is_model_in_modules(name, {file})] for file in timm.list_modules()}
    found = {file: names or timm.list_models(module=file)[:1] for file, names in found.items()}
    # The door for converted folders is no model of timm.
    return [Case(file, name, name) for file, names in found.items() for name in names if name != "flysurgery_structured"]


# Narrow and shallow, since the variants differ in their structure and not in their sizes.
SIZES = {"image_size": 64, "patch_size": 8, "num_classes": 50, "dim": 128, "depth": 2, "heads": 4, "mlp_dim": 256, "dim_head": 32}
VIDEO = {"image_patch_size": 8, "frames": 4, "frame_patch_size": 2}


def vit_pytorch_cases() -> list[Case]:
    """The variants, with their own arguments beside the common sizes."""
    return [*_plain(), *_hierarchical(), *_of_other_inputs(), *_wrapped()]


PLAIN = """
    vit:ViT simple_vit:SimpleViT distill:DistillableViT deepvit:DeepViT local_vit:LocalViT rvt:RvT learnable_memory_vit:ViT
    vit_with_patch_dropout:ViT vit_for_small_dataset:ViT vit_with_decorr:ViT vit_with_keel_post_ln:ViT vit_detpool:ViTDetPool vit_5:ViT
    mp3:ViT normalized_vit:nViT vat:ViT simple_uvit:SimpleUViT simple_flash_attn_vit:SimpleViT
    simple_vit_attn_residual:SimpleViTAttnResidual simple_vit_orthog_residual_update:SimpleViT simple_vit_with_patch_dropout:SimpleViT
    simple_vit_with_qk_norm:SimpleViT simple_vit_with_register_tokens:SimpleViT simple_vit_with_relative_proj_pos_bias:SimpleViT
    simple_vit_with_sparse_gating:SimpleViTWithSparseGating simple_vit_with_specialized_cls:SimpleViT
    simple_vit_with_value_residual:SimpleViT attn_residual_with_dca_simple_vit:SimpleViT
"""
"""Classes that the common sizes are enough for."""


def _plain() -> list[Case]:
    """Vision Transformers of one resolution that take an image."""
    t2t = {"t2t_layers": ((7, 4), (3, 2)), "patch_size": None}
    loops = {"depth": None, "pre_loop_depth": 1, "num_looped_blocks": 1, "post_loop_depth": 1, "loop_depth": 2}
    variants: list[tuple[str, str, dict[str, Any]]] = [
        *((module, name, {}) for module, _, name in (each.partition(":") for each in PLAIN.split())),
        ("distill", "DistillableT2TViT", t2t),
        ("cait", "CaiT", {"cls_depth": 1}),
        ("t2t", "T2TViT", t2t),
        ("parallel_vit", "ViT", {"num_parallel_branches": 2}),
        ("ats_vit", "ViT", {"max_tokens_per_depth": (32, 16)}),
        ("vit_with_patch_merger", "ViT", {"patch_merge_layer": 1, "patch_merge_num_tokens": 4}),
        ("xcit", "XCiT", {"cls_depth": 1}),
        ("look_vit", "LookViT", {"mlp_dim": None, "highres_patch_size": 4, "patch_size": 8}),
        ("jumbo_vit", "JumboViT", {"dim": 32, "mlp_dim": 2, "jumbo_cls_k": 3}),
        ("looped_vit", "LoopedViT", loops),
        ("wwt", "WWT", {"num_slots": 8}),
        ("jet_vit", "JetViT", {"window_size": 4, "attn_layers": ["WA", "FA"]}),
        ("simple_vit_with_fft", "SimpleViT", {"freq_patch_size": 8}),
        ("simple_vit_with_hyper_connections", "SimpleViT", {"num_residual_streams": 2}),
    ]
    return [_case(module, name, SIZES | arguments) for module, name, arguments in variants]


def _hierarchical() -> list[Case]:
    """Models of several resolutions, at sizes near their own."""
    cct = {"img_size": 64, "embedding_dim": 128, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 50}
    stages = {"num_classes": 50, "depth": (1, 1, 1, 1)}
    channels = (16, 32, 48, 48, 64, 64, 80, 80, 96, 96, 384)
    cross = {"image_size": 64, "num_classes": 50, "depth": 1, "sm_dim": 96, "lg_dim": 128, "sm_patch_size": 8, "lg_patch_size": 16}
    cross_sizes = {"sm_enc_mlp_dim": 192, "lg_enc_mlp_dim": 256, "sm_enc_heads": 4, "lg_enc_heads": 4, "cross_attn_heads": 4}
    return [
        _case("cct", "CCT", cct | {"n_conv_layers": 2, "positional_embedding": "learnable"}),
        _case("cross_vit", "CrossViT", cross | cross_sizes),
        _case("pit", "PiT", SIZES | {"image_size": 64, "depth": (1, 1)}),
        _case(
            "levit", "LeViT", {"image_size": 64, "num_classes": 50, "dim": (128, 192, 256), "depth": 1, "heads": (4, 6, 8), "mlp_mult": 2}
        ),
        _case("cvt", "CvT", {"num_classes": 50, "s3_depth": 2}),
        _case("twins_svt", "TwinsSVT", {"num_classes": 50, "s4_depth": 1, "s3_depth": 1}),
        _case("regionvit", "RegionViT", stages | {"dim": (32, 64, 128, 256), "window_size": 7}),
        _case("crossformer", "CrossFormer", stages | {"dim": (32, 64, 128, 256)}),
        _case(
            "scalable_vit",
            "ScalableViT",
            stages | {"dim": 32, "heads": (2, 4, 8, 8), "reduction_factor": (8, 4, 2, 1), "window_size": (64, 32, None, None)},
        ),
        _case("sep_vit", "SepViT", stages | {"dim": 32, "heads": (1, 2, 4, 8)}),
        _case("max_vit", "MaxViT", stages | {"dim": 32, "dim_conv_stem": 32}),
        _case("max_vit_with_registers", "MaxViT", stages | {"dim": 32, "dim_conv_stem": 32}),
        _case(
            "nest",
            "NesT",
            {"image_size": 64, "patch_size": 4, "dim": 48, "heads": 3, "num_hierarchies": 2, "block_repeats": (1, 1), "num_classes": 50},
        ),
        _case("mobile_vit", "MobileViT", {"image_size": (256, 256), "dims": (96, 120, 144), "channels": channels, "num_classes": 50}),
    ]


def _of_other_inputs() -> list[Case]:
    """Series, volumes and videos, and images of several sizes at once."""

    def images() -> Any:
        return ([torch.zeros(3, 64, 64), torch.zeros(3, 32, 64)],)

    def videos() -> Any:
        return ([torch.zeros(3, 4, 64, 64), torch.zeros(3, 4, 32, 64)],)

    volume = {"ndim": 3, "input_shape": (8, 32, 32), "patch_size": (2, 8, 8), "image_size": None}
    video = SIZES | VIDEO | {"patch_size": None}
    vivit = video | {"depth": None, "spatial_depth": 1, "temporal_depth": 1}
    cct_3d = {"img_size": 64, "num_frames": 4, "embedding_dim": 128, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2.0, "num_classes": 50}
    return [
        _case("na_vit", "NaViT", SIZES, images),
        _case("na_vit_nested_tensor", "NaViT", SIZES, images),
        _case("na_vit_nested_tensor_3d", "NaViT", SIZES | {"max_frames": 4, "frame_patch_size": 2}, videos),
        _case("vit_1d", "ViT", SIZES | {"image_size": None, "seq_len": 64}),
        _case("simple_vit_1d", "SimpleViT", SIZES | {"image_size": None, "seq_len": 64}),
        _case("vit_3d", "ViT", video),
        _case("simple_vit_3d", "SimpleViT", video),
        _case("simple_flash_attn_vit_3d", "SimpleViT", video),
        _case("cct_3d", "CCT", cct_3d | {"positional_embedding": "learnable"}, lambda: torch.zeros(2, 3, 4, 64, 64)),
        _case("vivit", "ViViT", vivit | {"variant": "factorized_encoder"}),
        _case("vivit", "ViViT", vivit | {"variant": "factorized_self_attention"}),
        _case("vivit_with_moss", "ViViT", vivit),
        _case("vit_nd", "ViTND", SIZES | volume),
        _case("vit_nd_rotary", "ViTND", SIZES | volume),
        _case("vit_nd_pope", "ViTND", SIZES | volume),
    ]


def _wrapped() -> list[Case]:
    """A ViT within the classes that train it or look into it."""
    from vit_pytorch.extractor import Extractor
    from vit_pytorch.learnable_memory_vit import Adapter
    from vit_pytorch.mae import MAE
    from vit_pytorch.mp3 import MP3
    from vit_pytorch.recorder import Recorder
    from vit_pytorch.simmim import SimMIM

    wrappers: list[tuple[str, str, Callable[[Any], nn.Module]]] = [
        ("vit", "MAE", lambda vit: MAE(encoder=vit, decoder_dim=64, decoder_heads=4)),
        ("vit", "SimMIM", lambda vit: SimMIM(encoder=vit)),
        ("mp3", "MP3", lambda vit: MP3(vit=vit, masking_ratio=0.75)),
        ("vit", "Recorder", lambda vit: Recorder(vit)),
        ("vit", "Extractor", lambda vit: Extractor(vit)),
        ("learnable_memory_vit", "Adapter", lambda vit: Adapter(vit=vit)),
    ]
    return [
        Case(module, f"{name} of {module}:ViT", f"vit_pytorch.{module}:ViT", SIZES, lambda: torch.zeros(2, 3, 64, 64), wrap)
        for module, name, wrap in wrappers
    ]


def _case(module: str, name: str, arguments: dict[str, Any], example: Callable[[], Any] | None = None) -> Case:
    given = {key: value for key, value in arguments.items() if value is not None}
    variant = f" {given['variant']}" if "variant" in given else ""
    return Case(module, f"{module}:{name}{variant}", f"vit_pytorch.{module}:{name}", given, example)


TASKS = ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "OBJECT_DETECTION", "SEGMENTATION", "DEPTH", "IMAGE_TO_IMAGE", "MASKED_IMAGE")
TASKS += ("BACKBONE", "ZERO_SHOT_IMAGE", "KEYPOINT", "MASK_GENERATION")
"""What names of transformers' tables of vision models hold."""

SHALLOW = frozenset({"num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer", "num_decoder_layers"})
"""Entries of configurations that count layers, of which two are enough to see each kind."""

READ_BY_NUMBER = ("Backbone", "Depth", "Segment", "Dpt", "DPT")
"""Parts of the names of classes that read hidden states by numbers of the configuration."""


def transformers_cases() -> list[Case]:
    """Every model class of transformers' tables of vision tasks, with the sizes of its default configuration and few layers."""
    from transformers.models.auto import modeling_auto

    names = [name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES") and any(task in name for task in TASKS)]
    tables = [getattr(modeling_auto, name) for name in names]
    found: dict[str, str] = {}
    for table in tables:
        for family, names in table.items():
            for name in [names] if isinstance(names, str) else names:
                found.setdefault(name, family)
    return [Case(family, name, f"transformers:{name}", _shallow_arguments(name)) for name, family in sorted(found.items())]


def _shallow_arguments(name: str) -> dict[str, Any]:
    """The entries of the default configuration that make the model shallow; none where its hidden states are read by their numbers."""
    import transformers

    config = getattr(transformers, name).config_class
    if config is None or any(part in name for part in READ_BY_NUMBER):
        return {}
    return _shallow(config().to_dict())


def _shallow(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that count layers, at most two each, also in the configurations of towers."""
    towers = {key: _shallow(value) for key, value in entries.items() if isinstance(value, dict) and "model_type" in value}
    counts = {key: min(2, value) for key, value in entries.items() if key in SHALLOW and isinstance(value, int)}
    return counts | {key: {"model_type": entries[key]["model_type"]} | value for key, value in towers.items() if value}
