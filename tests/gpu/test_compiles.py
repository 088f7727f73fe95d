"""Every kernel compiles for the architectures that it names, and hardly spills registers; its wgmma instructions do not wait for others.

Most variants are those of a GPU for which nothing was tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch

from flysurgery.gpu.block_linear import ACTIVATIONS
from flysurgery.gpu.compile import compile_cubin, kernel_path
from flysurgery.gpu.dense_tiling import Patch, dense_tiling, stream_tiling
from flysurgery.gpu.factor_gradients import macros
from flysurgery.gpu.few_rows import few_rows_tilings
from flysurgery.gpu.ffn_float_tiling import float_ffn_tiling
from flysurgery.gpu.ffn_tiling import ffn_tiling
from flysurgery.gpu.fused_configs import configs
from flysurgery.gpu.modes import MODE_NUMBERS
from flysurgery.gpu.ring_attention import ring_attention
from flysurgery.gpu.single import candidates
from flysurgery.gpu.single_tiling import SingleTiling
from flysurgery.gpu.some_rows_tiling import some_rows_tiling
from flysurgery.gpu.tiling import tiling
from flysurgery.gpu.transposition import Transposition
from flysurgery.gpu.wide_ffn import wide_middle, wide_tilings
from flysurgery.gpu.wide_group import group_tilings
from flysurgery.patterns import Architecture, Pattern, gonon, monarch

SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90a": 227 * 1024, "sm_100": 227 * 1024}
HOPPER = ("sm_90a",)
Defines = Mapping[str, "int | str"]
Made = TypeVar("Made")


def made(found: Made | str | None) -> Made:
    """A tiling, not the reason why there is none."""
    assert found is not None and not isinstance(found, str), found
    return found


def fused(architecture: Architecture, mode: str, linears: int, limit: int, wgmma: bool, activation: str = "none", **parts: bool) -> Defines:
    """``parts``: norm, gated, residual, scaled."""
    tile = made(tiling(architecture, mode, linears, norm=parts.get("norm", False), gated=parts.get("gated", False)))
    config = configs(tile, limit, wgmma=wgmma)[0]
    epilogue = {"RESIDUAL": int(parts.get("residual", False)), "SCALED": int(parts.get("scaled", False))}
    return {**tile.of(config).defines(config), "ACTIVATION": ACTIVATIONS[activation], **epilogue}


def whole_ffn(up: Architecture, down: Architecture, mode: str, activation: str, *, scaled: bool) -> Defines:
    shared = SHARED_BYTES["sm_90a"]
    tile = made(
        ffn_tiling(up, down, shared, scaled=scaled) if mode in ("fp16", "bf16") else float_ffn_tiling(up, down, mode, shared, scaled=scaled)
    )
    return {**tile.defines(), "MODE": MODE_NUMBERS[mode], "ACTIVATION": ACTIVATIONS[activation], "NORM": 1, "RESIDUAL": 1}


def stream(size: int, limit: int) -> Defines:
    tile = made(stream_tiling(made(dense_tiling(size, size, "fp16", limit, wgmma=True)), limit))
    return tile.defines("gelu", residual=True, moments=True)


def dense(outputs: int, mode: str, limit: int, wgmma: bool, *, gated: bool = False) -> Defines:
    return made(dense_tiling(768, outputs, mode, limit, wgmma, gated=gated)).defines("silu", residual=not gated)


def blocks(place: int, architectures: tuple[Architecture, ...]) -> Defines:
    """One factor of a feed-forward block of two layers, or of three linears that share x."""
    limit = SHARED_BYTES["sm_90a"]
    tiles = made(wide_tilings(*architectures, limit) if len(architectures) == 2 else group_tilings(*architectures, 3, limit))
    activation = ACTIVATIONS["gelu" if place == 1 and len(architectures) == 2 else "none"]
    return tiles[place].defines(place % 2, activation, norm=place == 0, residual=place == 3, scaled=place == 3)


def single(pattern: Pattern, mode: str, limit: int, *, aligned: bool = True) -> Defines:
    tile = SingleTiling(pattern, mode, candidates(pattern, mode, limit)[0])
    return tile.defines(tile.x_vector if aligned else tile.element_bytes)


WIDE = gonon(3072, 768), gonon(768, 3072)
OF_ALL = tuple(SHARED_BYTES)
Variants = Mapping[str, Callable[[int, bool], Defines]]
KERNELS: dict[str, tuple[tuple[str, ...], int, Variants]] = {
    # Spills of fp32 by pairs, which lives on 255 registers: its configurations were chosen by time.
    "fused_linear": (
        OF_ALL,
        2048,
        {
            "three behind a norm": lambda limit, wgmma: fused(monarch(384, 384), "fp16", 3, limit, wgmma, norm=True),
            "a gate behind a norm": lambda limit, wgmma: fused(monarch(1024, 192), "fp16", 1, limit, wgmma, "silu", norm=True, gated=True),
            "fp32": lambda limit, wgmma: fused(monarch(384, 384), "fp32", 1, limit, wgmma),
            "scale and residual": lambda limit, wgmma: fused(gonon(192, 768), "fp16", 1, limit, wgmma, "gelu", residual=True, scaled=True),
            "low rank": lambda limit, wgmma: fused(Architecture.of((1, 24, 16, 1), (1, 16, 40, 1)), "tf32", 1, limit, wgmma),
        },
    ),
    # Spills at the end, where scaled sums and the rows to be added are held together.
    "fused_ffn": (
        HOPPER,
        128,
        {
            "fp16": lambda *_: whole_ffn(gonon(768, 192), gonon(192, 768), "fp16", "gelu", scaled=True),
            "bf16": lambda *_: whole_ffn(monarch(1536, 384), monarch(384, 1536), "bf16", "gelu_tanh", scaled=True),
        },
    ),
    # Spills outside of the loop over pieces of hidden units.
    "ffn_floats": (
        HOPPER,
        96,
        {
            "fp32": lambda *_: whole_ffn(monarch(768, 192), monarch(192, 768), "fp32", "silu", scaled=True),
            "tf32": lambda *_: whole_ffn(monarch(1536, 384), monarch(384, 1536), "tf32", "gelu_tanh", scaled=False),
        },
    ),
    # Spills of three classes of outputs at once, and of activations in float32.
    "block_linear": (
        HOPPER,
        96,
        {f"factor {place} of a block": lambda *_, place=place: blocks(place, WIDE) for place in range(4)}
        | {"factor 0 of a group": lambda *_: blocks(0, (gonon(768, 768),))},
    ),
    "ffn_middle": (HOPPER, 0, {"gelu": lambda limit, _: made(wide_middle(*WIDE, limit)).defines(0, ACTIVATIONS["gelu"])}),
    # Spills of patches of 8x8: their few inputs leave room for the widest tile.
    "dense_linear": (
        OF_ALL,
        64,
        {
            "fp16": lambda limit, wgmma: dense(384, "fp16", limit, wgmma),
            "fp32": lambda limit, wgmma: dense(384, "fp32", limit, wgmma),
            "a gate": lambda limit, wgmma: dense(4096, "bf16", limit, wgmma, gated=True),
            "patches": lambda limit, wgmma: made(dense_tiling(192, 384, "fp16", limit, wgmma)).defines("none", True, Patch(8, 8, 5)),
        },
    ),
    "dense_stream": (HOPPER, 0, {"768": lambda limit, _: stream(768, limit)}),
    # Spills for as many registers as let two blocks run at once.
    "few_rows": (
        OF_ALL,
        8,
        {
            name: lambda limit, _, norm=norm: few_rows_tilings(384, 1536, norm, limit)[0].defines(torch.float16, "gelu", residual=True)
            for name, norm in (("norm", True), ("no norm", False))
        },
    ),
    "few_attention": (OF_ALL, 0, {"64": lambda *_: {"HEAD": 64, "WARPS": 7, "STEPS": 2, "MODE": 0}}),
    "some_rows": (
        HOPPER,
        0,
        {
            mode: lambda limit, _, mode=mode: some_rows_tiling(394, 384, 1536, mode, 132, limit).defines("gelu", residual=True)
            for mode in ("fp16", "fp32")
        },
    ),
    "attention": (HOPPER, 24, {"fp32": lambda limit, _: made(ring_attention(64, 257, 257, "fp32", limit)).defines()}),
    "short_attention": (HOPPER, 0, {"bf16": lambda limit, _: made(ring_attention(64, 197, 197, "bf16", limit)).defines()}),
    # Three of 255 registers, which ptxas spills for the largest float32 tile on sm_100.
    "single_factor": (
        OF_ALL,
        12,
        {
            "unaligned bf16": lambda limit, _: single(Pattern(1, 192, 48, 2), "bf16", limit, aligned=False),
            "fp32": lambda limit, _: single(Pattern(1, 192, 192, 3), "fp32", limit),
            "odd sizes": lambda limit, _: single(Pattern(2, 3, 5, 3), "tf32", limit),
            "exact": lambda limit, _: single(Pattern(1, 64, 64, 4), "exact", limit),
        },
    ),
    "factor_gradients": (
        OF_ALL,
        0,
        {
            "three of halves": lambda *_: macros(gonon(384, 384), torch.bfloat16, 3),
            "odd sizes": lambda *_: macros(Architecture.of((2, 6, 4, 3), (3, 8, 5, 1)), torch.float32, 1),
        },
    ),
    "multiply_out": (OF_ALL, 0, {"three of halves": lambda *_: macros(gonon(384, 384), torch.bfloat16, 3)}),
    "norm_gradient": (OF_ALL, 0, {f"mode {mode}": lambda *_, mode=mode: {"COLUMNS": 1024, "MODE": mode} for mode in range(3)}),
    "row_sums": (
        OF_ALL,
        0,
        {
            name: lambda *_, name=name: {"COLUMNS": 1536, "MODE": 1, "ACTIVATION": ACTIVATIONS[name]}
            for name in ("none", "gelu", "gelu_tanh", "silu")
        },
    ),
    "gather": (OF_ALL, 0, {"nine": lambda *_: {"SLOTS": 9, "SOURCE": 0, "TARGET": 1}}),
    "transpose": (OF_ALL, 0, {"odd": lambda *_: Transposition(2, 19, 3).defines(torch.bfloat16, aligned=False)}),
    "gated": (OF_ALL, 0, {"silu": lambda *_: {"COLUMNS": 2048, "MODE": 2, "ACTIVATION": ACTIVATIONS["silu"]}}),
    "layer_norm": (OF_ALL, 0, {"moments": lambda *_: {"COLUMNS": 4096, "MODE": 2, "MOMENTS": 1}}),
}
SOURCES = {"attention": "attention_wgmma", "short_attention": "short_attention_wgmma"}


def test_every_source_is_here() -> None:
    assert {SOURCES.get(kernel, kernel) for kernel in KERNELS} == {path.stem for path in kernel_path().glob("*.cu")}


@pytest.mark.parametrize(
    ("kernel", "variant", "arch"),
    [(kernel, variant, arch) for kernel, (archs, _, variants) in KERNELS.items() for variant in variants for arch in archs],
)
def test_compiles(kernel: str, variant: str, arch: str) -> None:
    _, spill_bytes, variants = KERNELS[kernel]
    defines = variants[variant](SHARED_BYTES[arch], arch == "sm_90a")
    compiled = compile_cubin(f"{SOURCES.get(kernel, kernel)}.cu", defines, arch=arch, name=kernel)
    assert compiled.spill_bytes <= spill_bytes
    assert compiled.serialized == ()
