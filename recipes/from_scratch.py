"""Train models from scratch: dense, converted, and converted first and dense later, at equal numbers of updates.

    python recipes/from_scratch.py digits --out build/rows.csv
    python recipes/from_scratch.py fractals --minutes 9 --out build/rows.csv
    python recipes/from_scratch.py fractals --seed 0 --images 256000 --only "vit, [dm][a-z]+( 50.*)?,"

The tables, each with a ViT, an MLP-Mixer, a ConvMixer and a MobileNet, of which the last two have their 1x1 convolutions converted:

    digits    scikit-learn's 1198 training digits and 599 held-out ones, and small models
    fractals  1,280,000 new images of 100 generated classes at 224 px, or --images, and timm's ViT-S/16, Mixer-S/16, ConvMixer-768/32 and
              MobileNetV3-L

The ways:

    dense, monarch, low rank    random weights; Monarch has 4 blocks, and low rank as many weights
    monarch N %, then dense     reverse sparsification (arXiv:2204.00595): after a share of the epochs the factors are multiplied out
    dense, projected            the trained dense model, whose weights are projected onto Monarch

All ways of one model and seed have the same dense start, the same images in the same order, and AdamW at the same rate, times the ratio
of fan-ins for factors. ``dense`` and ``dense, projected`` are then trained for a tenth of the epochs at a tenth of the rate:
``top1`` is before that, ``top1_finetuned`` after it. ``forward_ms`` is of 128 random images, in float16 on CUDA. ``seconds`` are of the
training before, on a CPU of the processor's own time. --quick takes two epochs of the small models, by default of Mixer alone.

Needs ``pip install 'flysurgery[train]'``, and for digits half an hour of one CPU core, for fractals a CUDA device and ten minutes a row.
Rows: recipes/results/accuracy.csv
"""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, cast

import timm
import torch
from accuracy import DEMO
from recipe import VIT_S, Place, Table, run
from timm.models.convmixer import ConvMixer
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn
from weight_ways import low_rank

from flysurgery import surgery
from flysurgery.bench import TIMED_MODES, Case, Record, rows_of_case
from flysurgery.bench.variants import definitions
from flysurgery.checkpoint import build_base, load_dense
from flysurgery.evaluation import evaluate, load_data
from flysurgery.finetune import Settings, train, training_data
from flysurgery.walker import example_input

DENSE, MONARCH, LOW_RANK, PROJECTED = "dense", "monarch", "low rank", "dense, projected"
WAYS: Mapping[str, tuple[str, float]] = {
    DENSE: (DENSE, 1.0),
    MONARCH: (MONARCH, 1.0),
    LOW_RANK: (LOW_RANK, 1.0),
    "monarch 50 %, then dense": (MONARCH, 0.5),
    "monarch 90 %, then dense": (MONARCH, 0.9),
}
"""What is trained first, and for which share of the epochs. ``dense`` brings ``dense, projected`` along."""

GREY: dict[str, Any] = {"in_chans": 1, "num_classes": 10}


KINDS: Mapping[str, tuple[Callable[[], Any], int, str]] = {
    "mixer": (partial(MlpMixer, img_size=8, patch_size=2, embed_dim=96, num_blocks=4, **GREY), 8, "mixer_s16_224"),
    "vit": (lambda: build_base(*load_dense(DEMO)[1:]), 8, VIT_S),
    "convmixer": (partial(ConvMixer, dim=96, depth=4, kernel_size=3, patch_size=1, **GREY), 8, "convmixer_768_32"),
    "mobilenet": (partial(timm.create_model, "mobilenetv3_small_050", **GREY), 32, "mobilenetv3_large_100"),
}
"""Of each kind of model what builds the small one, its images' side, and timm's name of the real one."""


def build(kind: str, *, small: bool) -> nn.Module:
    make, side, real = KINDS[kind]
    if not small:
        return timm.create_model(real, num_classes=100)
    model = make()
    model.pretrained_cfg = {"input_size": (1, side, side), "mean": [0.5], "std": [0.5], "fixed_input_size": True}
    model.pretrained_cfg |= {"interpolation": "bilinear", "crop_pct": 1.0}
    return model


RATE = 1e-3


def rows(place: Place, *, data: str, seed: int, model: str, way: str, epochs: int, images: int = 0) -> list[Record]:
    """The row of a way, and with the dense one that of its projection."""
    is_small, batch = data == "digits", 16 if place.quick or data == "digits" else 256
    how: dict[str, Any] = {"workers": 0} if is_small else {"images_per_epoch": images // epochs}
    how |= {"precision": "bf16"} if place.on_cuda else {"precision": "no", "cpu": True}
    settings = Settings(log_every=1000, seed=seed, batch_size=batch, learning_rate=RATE, **how)
    torch.manual_seed(seed)
    made, (first, share) = build(model, small=place.quick or is_small), WAYS[way]
    convert(made, first, init="random", seed=seed)
    after = None if share == 1 else min(max(1, round(share * epochs)), epochs - 1)
    clock = time.perf_counter if place.on_cuda else time.process_time
    begun = clock()
    updates = learn(made, data, replace(settings, epochs=epochs, densify_after=after))
    learnt = {"updates": updates, "seconds": clock() - begun}
    if way != DENSE:
        return [judged(data, made) | learnt]
    models = {DENSE: made, PROJECTED: copy.deepcopy(made)}
    convert(models[PROJECTED], MONARCH)
    times = forward_times(models, place)
    further = max(1, epochs // 10)
    found = []
    for name, each in models.items():
        row = judged(data, each) | learnt | times[name] | {"way": name, "finetune_share": further / epochs}
        learn(each, data, replace(settings, epochs=further, learning_rate=RATE / 10, seed=seed + 1000))
        found.append(row | {"top1_finetuned": judged(data, each)["top1"]})
    return found


def judged(data: str, model: nn.Module) -> Record:
    found = evaluate(model, load_data(data, model), batch_size=128)
    return {"model_params": sum(each.numel() for each in model.parameters()), "top1": found.top1, "samples": found.samples}


def learn(model: nn.Module, data: str, settings: Settings) -> int:
    return train(model, training_data(data, model, settings), settings).updates


def convert(model: nn.Module, to: str, **options: Any) -> None:
    """Convert in place, 1x1 convolutions too; the dense way stays as it is."""
    if to != DENSE:
        plan = surgery.plan(model, MONARCH, convs=True)
        surgery.apply(low_rank(plan) if to == LOW_RANK else plan, model, **options)


def forward_times(models: Mapping[str, nn.Module], place: Place) -> dict[str, Record]:
    """The milliseconds of a forward of each model, timed in one run."""
    mode = "fp16" if place.on_cuda else "fp32"

    def case() -> Case:
        own = {name: copy.deepcopy(model).to(place.device, TIMED_MODES[mode]).eval() for name, model in models.items()}
        x = torch.randn(1 if place.quick else 128, *cast(Tensor, example_input(own[DENSE])).shape[1:]).to(place.device, TIMED_MODES[mode])
        checked = range(min(8, len(x)))
        return Case(own, x, definitions(own, x, checked)[0], checked)

    timed = rows_of_case({}, case, mode, place.protocol)
    return {row["candidate"]: {"forward_ms": row["median_ms"], "status": row["status"]} for row in timed}


def table_of(data: str, images: Mapping[str, tuple[int]], **more: Any) -> Table:
    return Table(
        {"data": (data,), "seed": (0, 1), "model": tuple(KINDS), "way": tuple(WAYS), "epochs": (10,), **images},
        rows,
        timed=False,
        quick={"seed": (0,), "model": ("mixer",), "epochs": (2,), **dict.fromkeys(images, (64,))},
        columns=("model_params", "updates", "seconds", "top1", "top1_finetuned", "finetune_share", "samples", "forward_ms", "status"),
        keep=lambda place, head: head["model"] in ("mixer", "vit") or head["way"] in (DENSE, MONARCH),
        **more,
    )


TABLES = {"digits": table_of("digits", {}, device="cpu"), "fractals": table_of("fractals", {"images": (1_280_000,)}, needs_cuda=True)}

if __name__ == "__main__":
    run(__doc__, TABLES)
