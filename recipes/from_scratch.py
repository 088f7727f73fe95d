"""Train models from scratch: dense, converted, and converted first and dense later, at equal numbers of updates.

    python recipes/from_scratch.py digits --out build/rows.csv
    python recipes/from_scratch.py fractals --minutes 9 --out build/rows.csv

The data, each with a ViT, an MLP-Mixer, a ConvMixer and a MobileNet, of which the last two have their 1x1 convolutions converted:

    digits    scikit-learn's 1198 training digits and 599 held-out ones, and small models
    fractals  new images of 100 generated classes at 224 px, and timm's ViT-S/16, Mixer-S/16, ConvMixer-768/32 and MobileNetV3-L

The ways:

    dense, monarch, low rank    random weights; Monarch has 4 blocks, and low rank as many weights
    monarch N %, then dense     reverse sparsification (arXiv:2204.00595): after a share of the epochs the factors are multiplied out
    dense, projected            the trained dense model, whose weights are projected onto Monarch

All ways of one model and seed have the same dense start, the same images in the same order, and AdamW at the same rate, times the ratio
of fan-ins for factors. ``dense`` and ``dense, projected`` are then trained for --finetune-share of the epochs at a tenth of the rate:
``top1`` is before that, ``top1_finetuned`` after it. ``forward_ms`` is of 128 random images, in float16 on CUDA. ``seconds`` are of the
training before, on a CPU of the processor's own time. --quick takes two epochs of the small models, by default of Mixer alone.

Needs ``pip install 'flysurgery[train]'``, and for digits half an hour of one CPU core, for fractals a CUDA device and ten minutes a row.
Rows: recipes/results/accuracy.csv
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import recipe
import timm
import torch
from timm.models.convmixer import ConvMixer
from timm.models.mlp_mixer import MlpMixer
from torch import Tensor, nn
from train_digits_vit import BASE, BASE_ARGS, DATA
from weight_ways import low_rank

from flysurgery import surgery
from flysurgery.bench import TIMED_MODES, Case, Record, rows_of_case
from flysurgery.bench.variants import definitions
from flysurgery.errors import FlysurgeryError
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


@dataclass(frozen=True)
class Kind:
    """A kind of model: what builds the small one, the pixels of its images' sides, timm's name of the real one, and its ways."""

    small: Callable[[], nn.Module]
    side: int
    real: str
    ways: tuple[str, ...] = tuple(WAYS)

    def build(self, *, small: bool) -> nn.Module:
        """A dense model with random weights."""
        if not small:
            return timm.create_model(self.real, num_classes=100)
        model: Any = self.small()
        model.pretrained_cfg = DATA | {"input_size": (1, self.side, self.side)}
        return model


KINDS: Mapping[str, Kind] = {
    "mixer": Kind(partial(MlpMixer, img_size=8, patch_size=2, embed_dim=96, num_blocks=4, **GREY), 8, "mixer_s16_224"),
    "vit": Kind(partial(timm.create_model, BASE, **BASE_ARGS), 8, recipe.VIT_S),
    "convmixer": Kind(partial(ConvMixer, dim=96, depth=4, kernel_size=3, patch_size=1, **GREY), 8, "convmixer_768_32", (DENSE, MONARCH)),
    "mobilenet": Kind(partial(timm.create_model, "mobilenetv3_small_050", **GREY), 32, "mobilenetv3_large_100", (DENSE, MONARCH)),
}

TRAINING: Mapping[str, Mapping[str, Any]] = {
    "digits": {"batch_size": 16, "learning_rate": 1e-3, "workers": 0},
    "fractals": {"batch_size": 256, "learning_rate": 1e-3},
}
NUMBERS = ("model_params", "updates", "seconds", "top1", "top1_finetuned", "finetune_share", "samples", "forward_ms", "status")


@dataclass(frozen=True)
class Trial:
    """A dense start and its data, for all ways; ``settings`` are those of every training."""

    data: str
    build: Callable[[], nn.Module]
    settings: Settings
    epochs: int
    further_epochs: int

    def rows(self, way: str, time_forwards: Callable[[Mapping[str, nn.Module]], dict[str, Record]]) -> list[Record]:
        """The row of a way, and with the dense one that of its projection."""
        torch.manual_seed(self.settings.seed)
        model, (first, share) = self.build(), WAYS[way]
        convert(model, first, init="random", seed=self.settings.seed)
        after = None if share == 1 else min(max(1, round(share * self.epochs)), self.epochs - 1)
        learnt = self.learn(model, epochs=self.epochs, densify_after=after)
        if way != DENSE:
            return [self.row(way, model) | learnt]
        models = {DENSE: model, PROJECTED: copy.deepcopy(model)}
        convert(models[PROJECTED], MONARCH)
        times = time_forwards(models)
        return [self.trained_on(name, each) | learnt | times[name] for name, each in models.items()]

    def row(self, way: str, model: nn.Module) -> Record:
        """The accuracy and the size of a model."""
        found, size = evaluate(model, load_data(self.data, model), batch_size=128), sum(each.numel() for each in model.parameters())
        return {"way": way, "model_params": size, "top1": found.top1, "samples": found.samples}

    def trained_on(self, way: str, model: nn.Module) -> Record:
        """A model before and after the further training, on images in another order or on new ones."""
        row, rate = self.row(way, model), cast(float, self.settings.learning_rate) / 10
        self.learn(model, epochs=self.further_epochs, learning_rate=rate, seed=self.settings.seed + 1000)
        return row | {"top1_finetuned": self.row(way, model)["top1"], "finetune_share": self.further_epochs / self.epochs}

    def learn(self, model: nn.Module, **changes: Any) -> Record:
        """Train in place."""
        settings = replace(self.settings, **changes)
        clock = time.process_time if settings.cpu else time.perf_counter
        begun = clock()
        updates = train(model, training_data(self.data, model, settings), settings).updates
        return {"updates": updates, "seconds": clock() - begun}


def convert(model: nn.Module, to: str, **options: Any) -> None:
    """Convert in place, 1x1 convolutions too; the dense way stays as it is."""
    if to != DENSE:
        plan = surgery.plan(model, MONARCH, convs=True)
        if to == LOW_RANK:
            plan = replace(plan, layers=tuple(low_rank(layer) if layer.is_replaced else layer for layer in plan.layers))
        surgery.apply(plan, model, **options)


def forward_times(models: Mapping[str, nn.Module], device: torch.device, options: argparse.Namespace) -> dict[str, Record]:
    """The milliseconds of a forward of each model, timed in one run."""
    mode = "fp16" if device.type == "cuda" else "fp32"

    def case() -> Case:
        own = {name: copy.deepcopy(model).to(device, TIMED_MODES[mode]).eval() for name, model in models.items()}
        x = torch.randn(recipe.images(options, device), *cast(Tensor, example_input(own[DENSE])).shape[1:]).to(device, TIMED_MODES[mode])
        rows = range(min(8, len(x)))
        return Case(own, x, definitions(own, x, rows)[0], rows)

    timed = rows_of_case({}, case, mode, recipe.protocol(options, 15))
    return {row["candidate"]: {"forward_ms": row["median_ms"], "status": row["status"]} for row in timed}


def main() -> None:
    """Train, measure and write."""
    parser = recipe.parser_of(__doc__)
    recipe.add_options(parser, seconds=0.5)
    parser.add_argument("data", choices=TRAINING, metavar="DATA", help="digits or fractals")
    parser.add_argument("--models", nargs="+", choices=KINDS)
    parser.add_argument("--seeds", type=recipe.count, default=2, help="how many, from --seed on")
    parser.add_argument("--epochs", type=recipe.count, default=10)
    parser.add_argument("--finetune-share", type=recipe.duration, default=0.1, help="epochs of the further training over those before")
    parser.add_argument("--images", type=recipe.count, default=1_280_000, help="of fractals, in all epochs")
    parser.add_argument("--minutes", type=recipe.duration, help="begin no row after this many minutes")
    options = parser.parse_args()
    generated, epochs, images = options.data == "fractals", options.epochs, options.images
    if options.quick:
        epochs, images, options.seeds = 2, 1024, 1
    options.device = options.device or (None if generated else "cpu")
    device, _ = recipe.device_and_modes(options)
    if generated and device.type == "cpu" and not options.quick:
        raise SystemExit("this needs a CUDA device, and PyTorch finds none; --quick runs anywhere")
    how: dict[str, Any] = {"images_per_epoch": images // epochs if generated else None, "log_every": 1000, **TRAINING[options.data]}
    how |= {"cpu": True, "precision": "no"} if device.type == "cpu" else {"precision": "bf16"}

    def job(model: str, way: str, seed: int) -> recipe.Job:
        build = partial(KINDS[model].build, small=options.quick or not generated)
        trial = Trial(options.data, build, Settings(**how, seed=seed), epochs, max(1, round(options.finetune_share * epochs)))
        head = {"data": options.data, "model": model, "seed": seed}
        return head | {"way": way}, lambda: [head | row for row in trial.rows(way, partial(forward_times, device=device, options=options))]

    models, seeds = options.models or recipe.few(options, KINDS), range(options.seed, options.seed + options.seeds)
    jobs = [job(model, way, seed) for seed in seeds for model in models for way in KINDS[model].ways]
    columns, failing = ("data", "model", "way", "seed", *NUMBERS), (FlysurgeryError, RuntimeError)
    recipe.make(options, device, columns, jobs, shown=columns[1:], minutes=options.minutes, may_fail=failing)


if __name__ == "__main__":
    recipe.main(main)
