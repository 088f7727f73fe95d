"""Every kernel compiles and hardly spills registers; its wgmma instructions do not wait for others.

Most variants are those of a GPU for which nothing was tuned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import pytest
import torch

from flysurgery.gpu.attention import ring_attention
from flysurgery.gpu.compile import compile_cubin, kernel_path
from flysurgery.gpu.dense_tiling import Patch, dense_tiling, stream_tiling
from flysurgery.gpu.factor_by_factor import group_tilings, wide_middle, wide_tilings
from flysurgery.gpu.few_rows import few_rows_tilings
from flysurgery.gpu.ffn_float_tiling import float_ffn_tiling
from flysurgery.gpu.ffn_tiling import ffn_tiling
from flysurgery.gpu.fused_configs import configs
from flysurgery.gpu.kernel import ARCH
from flysurgery.gpu.modes import ACTIVATIONS, MODE_NUMBERS
from flysurgery.gpu.single_by_bmm import Transposition
from flysurgery.gpu.single_choice import candidates
from flysurgery.gpu.single_tiling import SingleTiling
from flysurgery.gpu.some_rows import some_rows_tiling
from flysurgery.gpu.tiling import tiling
from flysurgery.gpu.weight_space import macros
from flysurgery.patterns import Architecture, Pattern, gonon, monarch

LIMIT = 227 * 1024
"""Bytes of shared memory that a block may use."""
Defines = Mapping[str, "int | str"]
Made = TypeVar("Made")


def made(found: Made | str | None) -> Made:
    """A tiling, not the reason why there is none."""
    assert found is not None and not isinstance(found, str), found
    return found


def fused(architecture: Architecture, mode: str, linears: int, activation: str = "none", **parts: bool) -> Defines:
    """``parts``: norm, gated, residual, scaled."""
    tile = made(tiling(architecture, mode, linears, norm=parts.get("norm", False), gated=parts.get("gated", False)))
    config = configs(tile, LIMIT)[0]
    epilogue = {"RESIDUAL": int(parts.get("residual", False)), "SCALED": int(parts.get("scaled", False))}
    return {**tile.of(config).defines(config), "ACTIVATION": ACTIVATIONS.index(activation), **epilogue}


def whole_ffn(up: Architecture, down: Architecture, mode: str, activation: str, *, scaled: bool) -> Defines:
    tile = made(
        ffn_tiling(up, down, LIMIT, scaled=scaled) if mode in ("fp16", "bf16") else float_ffn_tiling(up, down, mode, LIMIT, scaled=scaled)
    )
    return {**tile.defines(), "MODE": MODE_NUMBERS[mode], "ACTIVATION": ACTIVATIONS.index(activation), "NORM": 1, "RESIDUAL": 1}


def stream(size: int) -> Defines:
    tile = made(stream_tiling(made(dense_tiling(size, size, "fp16", LIMIT)), LIMIT))
    return tile.defines("gelu", residual=True, moments=True)


def dense(outputs: int, mode: str, *, gated: bool = False) -> Defines:
    return made(dense_tiling(768, outputs, mode, LIMIT, gated=gated)).defines("silu", residual=not gated)


def blocks(place: int, architectures: tuple[Architecture, ...]) -> Defines:
    """One factor of a feed-forward block of two layers, or of three linears that share x."""
    tiles = made(wide_tilings(*architectures, LIMIT) if len(architectures) == 2 else group_tilings(*architectures, 3, LIMIT))
    activation = "gelu" if place == 1 and len(architectures) == 2 else "none"
    dtype = torch.bfloat16 if place % 2 else torch.float16
    return tiles[place].defines(dtype, activation, norm=int(place == 0), residual=place == 3, scaled=place == 3)


def single(pattern: Pattern, mode: str, *, aligned: bool = True) -> Defines:
    tile = SingleTiling(pattern, mode, candidates(pattern, mode, LIMIT)[0])
    return tile.defines(tile.x_vector if aligned else tile.element_bytes)


WIDE = gonon(3072, 768), gonon(768, 3072)
Variants = Mapping[str, Callable[[], Defines]]
KERNELS: dict[str, tuple[int, Variants]] = {
    # Spills of fp32 by pairs, which lives on 255 registers: its configurations were chosen by time.
    "fused_linear": (
        2048,
        {
            "three behind a norm": lambda: fused(monarch(384, 384), "fp16", 3, norm=True),
            "a gate behind a norm": lambda: fused(monarch(1024, 192), "fp16", 1, "silu", norm=True, gated=True),
            "fp32": lambda: fused(monarch(384, 384), "fp32", 1),
            "scale and residual": lambda: fused(gonon(192, 768), "fp16", 1, "gelu", residual=True, scaled=True),
            "low rank": lambda: fused(Architecture.of((1, 24, 16, 1), (1, 16, 40, 1)), "tf32", 1),
        },
    ),
    # Spills at the end, where scaled sums and the rows to be added are held together.
    "fused_ffn": (
        128,
        {
            "fp16": lambda: whole_ffn(gonon(768, 192), gonon(192, 768), "fp16", "gelu", scaled=True),
            "bf16": lambda: whole_ffn(monarch(1536, 384), monarch(384, 1536), "bf16", "gelu_tanh", scaled=True),
        },
    ),
    # Spills outside of the loop over pieces of hidden units.
    "ffn_floats": (
        96,
        {
            "fp32": lambda: whole_ffn(monarch(768, 192), monarch(192, 768), "fp32", "silu", scaled=True),
            "tf32": lambda: whole_ffn(monarch(1536, 384), monarch(384, 1536), "tf32", "gelu_tanh", scaled=False),
        },
    ),
    # Spills of three classes of outputs at once, and of activations in float32.
    "block_linear": (
        96,
        {f"factor {place} of a block": lambda place=place: blocks(place, WIDE) for place in range(4)}
        | {"factor 0 of a group": lambda: blocks(0, (gonon(768, 768),))},
    ),
    "ffn_middle": (0, {"gelu": lambda: made(wide_middle(*WIDE, LIMIT)).defines(torch.float16, "gelu")}),
    # Spills of patches of 8x8: their few inputs leave room for the widest tile.
    "dense_linear": (
        64,
        {
            "fp16": lambda: dense(384, "fp16"),
            "fp32": lambda: dense(384, "fp32"),
            "a gate": lambda: dense(4096, "bf16", gated=True),
            "patches": lambda: made(dense_tiling(192, 384, "fp16", LIMIT)).defines("none", True, Patch(8, 8, 5)),
        },
    ),
    "dense_stream": (0, {"768": lambda: stream(768)}),
    # Spills for as many registers as let two blocks run at once.
    "few_rows": (
        8,
        {
            name: lambda norm=norm: few_rows_tilings(384, 1536, norm, LIMIT)[0].defines(torch.float16, "gelu", residual=True)
            for name, norm in (("norm", True), ("no norm", False))
        },
    ),
    "few_attention": (0, {"64": lambda: {"HEAD": 64, "WARPS": 7, "STEPS": 2, "MODE": 0}}),
    "some_rows": (
        0,
        {
            mode: lambda mode=mode: some_rows_tiling(394, 384, 1536, mode, 132, LIMIT).defines("gelu", residual=True)
            for mode in ("fp16", "fp32")
        },
    ),
    "attention": (24, {"fp32": lambda: made(ring_attention(64, 257, 257, "fp32", LIMIT)).defines()}),
    "short_attention": (0, {"bf16": lambda: made(ring_attention(64, 197, 197, "bf16", LIMIT)).defines()}),
    "single_factor": (
        12,
        {
            "unaligned bf16": lambda: single(Pattern(1, 192, 48, 2), "bf16", aligned=False),
            "fp32": lambda: single(Pattern(1, 192, 192, 3), "fp32"),
            "odd sizes": lambda: single(Pattern(2, 3, 5, 3), "tf32"),
        },
    ),
    "factor_gradients": (
        0,
        {
            "three of halves": lambda: macros(gonon(384, 384), torch.bfloat16, 3),
            "odd sizes": lambda: macros(Architecture.of((2, 6, 4, 3), (3, 8, 5, 1)), torch.float32, 1),
        },
    ),
    "multiply_out": (0, {"three of halves": lambda: macros(gonon(384, 384), torch.bfloat16, 3)}),
    "norm_gradient": (0, {f"mode {mode}": lambda mode=mode: {"COLUMNS": 1024, "MODE": mode} for mode in range(3)}),
    "row_sums": (
        0,
        {
            name: lambda name=name: {"COLUMNS": 1536, "MODE": 1, "ACTIVATION": ACTIVATIONS.index(name)}
            for name in ("none", "gelu", "gelu_tanh", "silu")
        },
    ),
    "gather": (0, {"nine": lambda: {"SLOTS": 9, "SOURCE": 0, "TARGET": 1}}),
    "transpose": (0, {"odd": lambda: Transposition(2, 19, 3).defines(torch.bfloat16, aligned=False)}),
    "gated": (0, {"silu": lambda: {"COLUMNS": 2048, "MODE": 2, "ACTIVATION": ACTIVATIONS.index("silu")}}),
    "layer_norm": (0, {"moments": lambda: {"COLUMNS": 4096, "MODE": 2, "MOMENTS": 1}}),
}


def test_every_source_is_here() -> None:
    assert set(KERNELS) == {path.stem for path in kernel_path().glob("*.cu")}


@pytest.mark.parametrize(("kernel", "variant"), [(kernel, variant) for kernel, (_, variants) in KERNELS.items() for variant in variants])
def test_compiles(kernel: str, variant: str) -> None:
    spill_bytes, variants = KERNELS[kernel]
    compiled = compile_cubin(f"{kernel}.cu", variants[variant](), arch=ARCH, name=kernel)
    assert compiled.spill_bytes <= spill_bytes
    assert compiled.serialized == ()
