"""Time Vision Transformers and their parts, converted beside dense: Tables 3, 5 and 6 of Gonon et al. 2024 and further ones.

    python recipes/vits.py table3 --out build/vits.csv
    python recipes/vits.py headline --joules --out build/headline.csv    # two minutes

The tables:

    table3     parts of a ViT-S/16 at batch 128, in float32 to bfloat16. --batch and --model go further
    table6     its linear layers with and without bias
    cpu        parts of a ViT-S/16 on two threads of a CPU at batch 16, also beside int8 (dynamic quantization, float32 only). Nothing
               else may run meanwhile
    table5     what part of a dense model's time the linears of its feed-forward networks take, one after the other with nothing between
               them. More than this a faster feed-forward linear cannot win
    optimized  models as flysurgery.optimize makes them, beside dense, compiled and converted ones. "dense optimized" is what fusion gives
               without any structure
    headline   the main ones of these: ViT-S/16 with 128 images and with one, and ViT-B/16, in fp16
    training   a training step (forward, backward, fused AdamW, bfloat16 autocast), called from Python one by one, also through
               torch.compile, and ten in a row, and as a CUDA graph. Errors are those of a gradient
    finetune   images a second of flysurgery finetune, with a dense teacher and bfloat16 autocast; fused modules are for long runs

Random weights: no time depends on their values. Protocol ``paper``: separate q, k and v, attention written out, no compiler. Protocol
``today``: timm's model, one qkv, ``scaled_dot_product_attention``, also through ``torch.compile``. Each ratio is to dense in the same run
and mode; ``paper_ratio`` is what the authors report on an A100 in float32. CUDA graphs run over inputs larger than the L2 cache. Errors
are those of the outputs against float64; a candidate that is wrong gets no time. ``bound_ms`` is what a large copy and a large matrix
product, measured in the same run, allow. --joules measures those of a batch too, from NVML's counter over windows of a second of replayed
graphs. --arch takes gonon (widths that are multiples of 24), monarch and lowrank, --model any ViT of timm.

Needs any device; optimized, headline, training and finetune a CUDA device, cpu a quiet CPU and half an hour.
Rows: recipes/results/vits.csv, recipes/results/optimized_vits.csv, recipes/results/training_h200.csv,
recipes/results/finetune_h200.csv
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from recipe import VIT_S, Place, Table, run
from vit_parts import FINETUNED, INT8, PAPER, PAPER_SHARES, TRAINED, finetune_rows, part_case, share_case, training_case
from vit_units import PROTOCOLS, parts

from flysurgery.bench import Record

CANDIDATES = ("dense", "dense optimized", "layer", "two launches", "fused modules", "bmm", "einsum", "bsr")
WHOLE = ("dense", "dense optimized", "converted", "optimized", "dense compiled", "optimized compiled")
UNITS = (*PAPER, "qkv + bias")
FREE = ("model", "arch")


def has_part(place: Place, head: Record) -> bool:
    """Whether a protocol has a part, and launches it in this way: the compiler's launches are for today's, graphs for CUDA."""
    if head["compiled"] and (head["protocol"], head["launch"]) != ("today", "eager"):
        return False
    return (place.on_cuda or head["launch"] == "eager") and head["unit"] in parts(head["protocol"], head["model"], head["arch"])


def table_of_parts(units: tuple[str, ...], **more: Any) -> Table:
    axes = {"arch": ("gonon",), "batch": (128,), "mode": ("all",), "compiled": ("",), "launch": ("graph", "eager")} | more.pop("axes", {})
    return Table(
        {"model": (VIT_S,), "protocol": PROTOCOLS, "unit": units, **axes},
        part_case,
        quick={"batch": (1,), "compiled": ("",)},
        columns=("backend", "paper_ratio"),
        free=FREE,
        keep=has_part,
        **{"candidates": CANDIDATES, "rounds": 30, **more},
    )


MODELS: Mapping[str, Any] = {
    "make": partial(part_case, protocol="today", unit="model"),
    "candidates": WHOLE,
    "free": FREE,
    "needs_cuda": True,
    "seconds": 2.0,
}
COMPILED = ("", "compile", "max-autotune")

TABLES = {
    "table3": table_of_parts(("linear N x N", "FFN", "attention", "block", "model"), axes={"compiled": COMPILED}),
    "table6": table_of_parts(tuple(unit for unit in UNITS if unit.startswith(("linear", "qkv")))),
    "cpu": table_of_parts(
        UNITS,
        axes={"arch": ("gonon", "monarch"), "batch": (16,), "mode": ("fp32", "bf16"), "compiled": COMPILED[:2]},
        candidates=("dense", "layer", "bmm", "einsum", INT8),
        seconds=3.0,
        rounds=15,
        device="cpu",
        threads=2,
    ),
    "table5": Table(
        {"model": tuple(PAPER_SHARES), "batch": (128,), "mode": ("fp16", "fp32")},
        share_case,
        quick={"model": (VIT_S,), "batch": (1,)},
        columns=("paper_ratio",),
        free=("model",),
        rounds=30,
    ),
    "optimized": Table(
        {"model": (VIT_S,), "batch": (128, 1), "mode": ("all",), "arch": ("gonon", "monarch")},
        quick={"batch": (1,), "arch": ("monarch",)},
        **MODELS,
    ),
    "headline": Table(
        {"arch": ("gonon",), "mode": ("fp16",)},
        cases=[{"model": model, "batch": batch} for model, batch in ((VIT_S, 128), (VIT_S, 1), ("vit_base_patch16_224", 128))],
        few=1,
        **MODELS,
    ),
    "training": Table(
        {"model": (VIT_S,), "arch": ("gonon",), "batch": (128,), "mode": ("bf16",), "steps": (1, 10), "launch": ("eager", "graph")},
        training_case,
        quick={"batch": (1,), "mode": ("bf16",)},
        candidates=TRAINED,
        free=FREE,
        keep=lambda place, head: head["launch"] == "eager" or (place.on_cuda and head["steps"] == 1),
        needs_cuda=True,
        seconds=2.0,
    ),
    "finetune": Table(
        {
            "model": (VIT_S, "vit_base_patch16_224"),
            "way": FINETUNED,
            "arch": ("dense", "gonon", "monarch"),
            "batch_size": (128,),
            "updates": (150,),
            "seed": (0,),
        },
        rows=finetune_rows,
        quick={"model": (VIT_S,), "way": FINETUNED[:1], "arch": ("monarch",), "batch_size": (2,), "updates": (2,)},
        columns=("images_per_second", "seconds", "start_seconds", "loss", "peak_gib"),
        free=FREE,
        needs_cuda=True,
    ),
}

if __name__ == "__main__":
    run(__doc__, TABLES)
