"""Accuracy at real size without a download: a ViT-S/16 trained on generated images, then converted in many ways.

    python recipes/fractal_accuracy.py --folder build/fractals --minutes 9.5 --out recipes/results/fractal_accuracy_h200.csv

The first call trains the dense model for --train-minutes and keeps it in FOLDER; then the table's rows are made one by one until
--minutes are over. The same command once more goes on with the rows that are missing. The weights are kept in bfloat16, in files of
less than 16 MiB. --quick does all of it with a tiny model and few images, on any machine, to see that it runs; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accuracy_cases import METHODS, TARGETS, all_cases, run
from safetensors.torch import load_file, save_file
from torch import nn

from flysurgery.checkpoint import build_base
from flysurgery.cli.options import device_of
from flysurgery.evaluation import Fractals, ImageData, evaluate, preparation
from flysurgery.finetune import Settings, train, training_data

FILE_BYTES = 15 << 20
FINE_TUNING_RATE = 3e-4


@dataclass(frozen=True)
class Size:
    """What is trained, on what, and how."""

    base: str
    base_args: dict[str, Any]
    held_out: int
    calibration: int
    batch: int
    fine_tuning_batch: int
    rate: float
    precision: str


FULL = Size("vit_small_patch16_224", {"num_classes": 100}, 10_000, 512, 512, 256, 1e-3, "bf16")
QUICK = Size(
    "vit_small_patch16_224",
    {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5},
    *(100, 64, 16, 16, 1e-3, "no"),
)


def learn(model: nn.Module, size: Size, images: int, *, rate: float, batch: int, seed: int, teacher: nn.Module | None = None) -> float:
    """Train in place on ``images`` new images, which never repeat, and give the speed in images a second."""
    updates = max(1, images // batch)
    precision: Any = size.precision
    settings = Settings(
        epochs=1,
        batch_size=batch,
        images_per_epoch=updates * batch,
        learning_rate=rate,
        precision=precision,
        log_every=25,
        seed=seed,
        cpu=next(model.parameters()).device.type == "cpu",
    )
    data = training_data("fractals", model, settings)

    def progress(done: int, total: int, text: str) -> None:
        if done % 100 == 0 or done == total:
            print(f"  update {done} of {total}, {text}", flush=True)

    return train(model, data, settings, teacher=teacher, progress=progress).images_per_second


def held_out_images(model: nn.Module, samples: int, device: torch.device) -> ImageData:
    """Held-out fractals, made on ``device``."""
    wanted = preparation(model)
    classes: Any = model.num_classes
    size = (wanted.height, wanted.width)
    data = Fractals("held-out", classes, size, mean=wanted.mean, std=wanted.std, device=device, samples=samples)
    return ImageData("fractals", data, samples, classes)


def train_dense(size: Size, minutes: float | None, images: int, device: torch.device, folder: Path) -> tuple[nn.Module, int]:
    """Train the dense model for about ``minutes``, or on ``images``, and keep it."""
    torch.manual_seed(0)
    if minutes is not None:
        probe = learn(build_base(size.base, size.base_args).to(device), size, 60 * size.batch, rate=size.rate, batch=size.batch, seed=1)
        images = int(60 * minutes * probe)
        print(f"{probe:.0f} images a second, so {images} images in {minutes:g} minutes", flush=True)
    torch.manual_seed(0)
    model = build_base(size.base, size.base_args).to(device)
    started = time.perf_counter()
    learn(model, size, images, rate=size.rate, batch=size.batch, seed=0)
    seconds = time.perf_counter() - started
    # Rounded before anything is measured, so that a later call finds the same model.
    model = model.to(torch.bfloat16).float()
    accuracy = evaluate(model, held_out_images(model, size.held_out, device), batch_size=128, device=device)
    print(f"dense: {accuracy}; {images} images in {seconds:.0f} s", flush=True)
    keep(model, folder, images, seconds)
    return model, images


def keep(model: nn.Module, folder: Path, images: int, seconds: float) -> None:
    """Write the weights into small files, and last how they came about."""
    folder.mkdir(parents=True, exist_ok=True)
    shares: list[dict[str, torch.Tensor]] = [{}]
    room = FILE_BYTES
    for name, tensor in model.state_dict().items():
        stored = tensor.detach().cpu().to(torch.bfloat16).contiguous()
        if stored.nbytes > room and shares[-1]:
            shares.append({})
            room = FILE_BYTES
        shares[-1][name] = stored
        room -= stored.nbytes
    for number, share in enumerate(shares):
        save_file(share, folder / f"dense-{number}.safetensors")
    (folder / "dense.json").write_text(json.dumps({"images": images, "seconds": seconds, "files": len(shares)}) + "\n", encoding="utf-8")


def kept(size: Size, folder: Path) -> tuple[nn.Module, int] | None:
    """The dense model of an earlier call and the images that it was trained on."""
    if not (folder / "dense.json").is_file():
        return None
    facts = json.loads((folder / "dense.json").read_text(encoding="utf-8"))
    state: dict[str, torch.Tensor] = {}
    for number in range(facts["files"]):
        state |= load_file(folder / f"dense-{number}.safetensors")
    model = build_base(size.base, size.base_args)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model, facts["images"]


def main() -> None:
    """Train, convert, measure and write."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/fractals"), metavar="FOLDER", help="the dense model's place")
    parser.add_argument("--out", type=Path, help="CSV file to write; by default in FOLDER", metavar="FILE")
    parser.add_argument("--minutes", type=float, default=9.5, help="begin no row after this many minutes")
    parser.add_argument("--train-minutes", type=float, default=4.5, help="length of the dense training")
    parser.add_argument("--finetune-share", type=float, default=0.05, help="images of a fine-tuning over those of the training")
    parser.add_argument("--classes", type=int, help="number of classes, instead of 100")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--methods", nargs="*", default=list(METHODS), choices=METHODS)
    parser.add_argument("--device", help="cpu, cuda, ...; by default cuda where there is one")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    device = device_of(options.device)
    if device.type == "cpu" and not options.quick:
        raise SystemExit("this needs a CUDA device, and PyTorch finds none; --quick runs anywhere")
    size = QUICK if options.quick else FULL
    if options.classes is not None:
        size = replace(size, base_args=size.base_args | {"num_classes": options.classes})
    minutes = None if options.quick else options.train_minutes
    dense, images = kept(size, options.folder) or train_dense(size, minutes, 960, device, options.folder)
    share = options.finetune_share
    held_out = held_out_images(dense, size.held_out, device)
    wanted = preparation(dense)
    known = Fractals("train", held_out.num_classes, (wanted.height, wanted.width), mean=wanted.mean, std=wanted.std, device=device, seed=9)
    teacher = dense.to(device)

    def fine_tune(model: nn.Module) -> None:
        learn(model, size, int(share * images), rate=FINE_TUNING_RATE, batch=size.fine_tuning_batch, seed=2, teacher=teacher)

    run(
        dense,
        size.base,
        size.base_args,
        all_cases(options.targets, options.methods),
        calibration=known.batch(range(size.calibration))[0],
        held_out=held_out,
        fine_tune=fine_tune,
        finetune_share=share,
        out=options.out or options.folder / "accuracy.csv",
        device=device,
        minutes=options.minutes - (time.perf_counter() - started) / 60,
        echo=lambda text: print(text, flush=True),
    )


if __name__ == "__main__":
    main()
