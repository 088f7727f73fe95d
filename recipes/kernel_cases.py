"""The tables of kernels as data: what each compares, and on which cases."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import torch
from kernel_ablation import ablation
from kernel_operations import (
    FAMILIES,
    GATED_BLOCKS,
    LAYERS,
    PATCHES,
    TOKENS,
    Place,
    attention,
    factor_gradients,
    few_rows,
    ffn,
    gated_ffn,
    linear,
    norm_linear,
    wide,
)

from flysurgery.bench import Case, in_mode


@dataclass(frozen=True)
class Comparison:
    """What one table compares.

    ``columns`` stand before the candidate's. ``cases`` are what tells them apart, beside the mode, and the rows of x, in the column
    ``rows`` where ``tokens`` says how many an image has. ``quick`` is how many cases --quick takes. ``note`` is the column of what is
    said of a candidate. ``ratios`` maps columns to the candidates that they refer to. ``worst`` is how many times the baseline's error
    a candidate may have. With ``ahead`` the kernels are compiled side by side before the first case.
    """

    columns: tuple[str, ...]
    cases: Sequence[Mapping[str, Any]]
    make: Callable[..., Case]
    modes: str = "fp16,fp32"
    seconds: float = 0.5
    quick: int = 1
    tokens: int | None = None
    note: str | None = None
    ratios: Mapping[str, str] = field(default_factory=lambda: {"ratio_to_dense": "dense"})
    worst: float = 2.0
    ahead: bool = False


def grid(**axes: Iterable[Any]) -> tuple[dict[str, Any], ...]:
    """All combinations of columns' values, those of the last column changing first."""
    return tuple(dict(zip(axes, values, strict=True)) for values in product(*axes.values()))


SIZES = (*((images, 197, 6) for images in (8, 16, 32, 64, 128, 256)), (128, 197, 3), (128, 197, 12), (128, 50, 12), (64, 257, 16))
"""Images, tokens and heads of timm's models."""

WIDE = (("monarch", 768), ("monarch", 512), ("monarch", 1024), ("gonon", 768))
WIDE_ROWS = (16, 197, 788, 1576, 3152, 6304, 12608, 25216)
TO_BOTH = {"ratio_to_dense": "dense", "ratio_to_compiled": "dense compiled"}

TABLES: Mapping[str, Comparison] = {
    "attention": Comparison(
        columns=("mode", "images", "tokens", "heads"),
        cases=[dict(zip(("images", "tokens", "heads"), size, strict=True)) for size in SIZES],
        make=attention,
        modes="fp16,bf16",
        seconds=0.1,
        ratios={"ratio_to_pytorch": "pytorch"},
        worst=1.25,
    ),
    "norm_linear": Comparison(
        columns=("architecture", "mode", "rows"),
        cases=grid(architecture=FAMILIES),
        make=norm_linear,
        modes="all",
        quick=2,
        tokens=TOKENS,
        ratios=TO_BOTH,
    ),
    "fused_linear": Comparison(
        columns=("layer", "architecture", "linears", "mode", "rows"),
        cases=grid(layer=LAYERS),
        make=linear,
        modes="all",
        tokens=PATCHES,
        note="backend",
        worst=16,
    ),
    "factor_gradients": Comparison(
        columns=("layer", "mode"),
        cases=grid(layer=LAYERS),
        make=factor_gradients,
        modes="bf16,fp32",
        seconds=0.1,
        ratios={"ratio_to_einsum": "einsum"},
        worst=16,
        ahead=True,
    ),
    "fused_ffn": Comparison(
        columns=("width", "architecture", "mode", "activation", "rows"),
        cases=grid(width=(384, 192, 768), architecture=FAMILIES, activation=("gelu", "gelu_tanh")),
        make=ffn,
        modes="fp16,bf16,tf32,fp32",
        tokens=TOKENS,
        ratios=TO_BOTH,
        worst=3,
    ),
    "few_rows": Comparison(
        columns=("part", "width", "mode", "rows"),
        cases=grid(
            width=(384, 768),
            rows=(TOKENS, 2 * TOKENS, 4 * TOKENS, 8 * TOKENS),
            part=("norm and q, k, v", "attention", "output projection", "feed-forward"),
        ),
        make=few_rows,
        quick=4,
    ),
    "gated_ffn": Comparison(
        columns=("model", "width", "hidden", "mode", "rows"),
        cases=grid(model=GATED_BLOCKS),
        make=gated_ffn,
        tokens=TOKENS,
        note="launches",
    ),
    "wide": Comparison(
        columns=("architecture", "width", "part", "mode", "rows"),
        cases=[
            {"part": part, "architecture": architecture, "width": width, "rows": rows}
            for (architecture, width), rows, part in product(WIDE, WIDE_ROWS, ("q, k and v", "feed-forward"))
        ],
        make=wide,
        modes="fp16",
        seconds=0.03,
        quick=2,
        ahead=True,
    ),
    "fused_ablation": Comparison(
        columns=("layer", "architecture", "mode", "rows"),
        cases=grid(layer=("square", "up", "down", "monarch square")),
        make=ablation,
        tokens=PATCHES,
        note="config",
        ratios={"ratio_to_tuned": "tuned"},
        worst=4,
        ahead=True,
    ),
}


def launched_once(name: str, place: Place, case: Mapping[str, Any]) -> None:
    """Launch each candidate once, which puts its kernels into the cache folder. What fails here has its row later."""
    try:
        with in_mode(case["mode"]), torch.no_grad():
            ready = TABLES[name].make(place, **case)
            for candidate, run in ready.runs.items():
                if not isinstance(run, str):
                    run(ready.input(candidate))
    except Exception as error:
        print(f"not compiled ahead: {name}, {case}: {error}", flush=True)


def compile_ahead(name: str, place: Place, cases: Sequence[Mapping[str, Any]]) -> None:
    """Compile the kernels of the cases side by side, in processes of their own."""
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(partial(launched_once, name, place), cases))
