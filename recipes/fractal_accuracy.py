"""Train a ViT-S/16 on generated images, convert it in many ways, and compare the accuracies.

    torchrun --nproc-per-node 2 recipes/fractal_accuracy.py --folder build/fractals --train-minutes 4
    python recipes/fractal_accuracy.py --folder build/fractals --minutes 5 --out recipes/results/fractal_accuracy_h200.csv

The first call trains the dense model on two GPUs and keeps it in FOLDER, its weights in bfloat16 in files of less than 16 MiB. The second
one makes the table's rows, several at a time on each GPU, and begins none once --minutes are over; the same command once more goes on
with the rows that are missing. Without the first call the second one trains on one GPU. --quick does all of it with a tiny model and few
images, on any machine, to see that it runs; its numbers mean nothing.

Needs one or more CUDA devices and about ten minutes, in one or several runs.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import recipe
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from accuracy_cases import METHODS, TARGETS, Workshop, all_cases, check_out, run
from safetensors.torch import load_file, save_file
from torch import nn

from flysurgery.checkpoint import build_base
from flysurgery.cli.options import device_of
from flysurgery.evaluation import Fractals, ImageData, evaluate, preparation
from flysurgery.finetune import Outcome, Settings, leave_processes, train, training_data

FILE_BYTES = 15 << 20
PROBE = 60
"""Updates that are made to tell how fast training is."""

PROCESSES_A_GPU = 3
"""Conversions wait for the processor, so that several of them keep a GPU busy."""


@dataclass(frozen=True)
class Size:
    """What is trained, on what, and how; batches are those of one process."""

    base: str
    base_args: dict[str, Any]
    held_out: int
    calibration: int
    batch: int
    rate: float
    fine_tuning_batch: int
    fine_tuning_rate: float
    precision: str


FULL = Size("vit_small_patch16_224", {"num_classes": 100}, 10_000, 512, 256, 1e-3, 128, 1e-4, "bf16")
QUICK = Size(
    "vit_small_patch16_224",
    {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5},
    *(100, 64, 16, 1e-3, 16, 3e-4, "no"),
)


def learn(model: nn.Module, size: Size, images: int, *, seed: int, teacher: nn.Module | None = None) -> Outcome:
    """Train in place on about ``images`` new images, of all processes together and never the same twice; with a teacher, fine-tune."""
    batch, rate = (size.batch, size.rate) if teacher is None else (size.fine_tuning_batch, size.fine_tuning_rate)
    precision: Any = size.precision
    together = batch * int(os.environ.get("WORLD_SIZE", "1"))
    settings = Settings(
        epochs=1,
        batch_size=batch,
        images_per_epoch=max(1, images // together) * together,
        learning_rate=rate,
        optimizer="adamw",
        smoothing=0.0,
        precision=precision,
        log_every=25,
        seed=seed,
        cpu=next(model.parameters()).device.type == "cpu",
    )

    def progress(done: int, total: int, text: str) -> None:
        if teacher is None and (done % 250 == 0 or done == total):
            print(f"  update {done} of {total}, {text}", flush=True)

    return train(model, training_data("fractals", model, settings), settings, teacher=teacher, progress=progress)


def held_out_images(model: nn.Module, samples: int, device: torch.device) -> ImageData:
    """Held-out fractals, made on ``device``."""
    wanted = preparation(model)
    classes: Any = model.num_classes
    size = (wanted.height, wanted.width)
    data = Fractals("held-out", classes, size, mean=wanted.mean, std=wanted.std, device=device, samples=samples)
    return ImageData("fractals", data, samples, classes)


def train_dense(size: Size, minutes: float | None, images: int, device: torch.device, folder: Path) -> None:
    """Train the dense model for about ``minutes``, or on ``images``, in all processes together, and keep it."""
    torch.manual_seed(0)
    if minutes is not None:
        probe = learn(build_base(size.base, size.base_args).to(device), size, PROBE * size.batch, seed=1)
        images = int(60 * minutes * probe.images_per_second)
        (images,) = broadcast_object_list([images])  # the clocks of the processes differ
    torch.manual_seed(0)
    started = time.perf_counter()
    outcome = learn(build_base(size.base, size.base_args).to(device), size, images, seed=0)
    if not outcome.is_main:
        return
    seconds = time.perf_counter() - started
    # Rounded before anything is measured, so that a later call finds the same model.
    model = outcome.model.to(torch.bfloat16).float()
    facts = {"images": outcome.images, "updates": outcome.updates, "processes": outcome.processes, "seconds": round(seconds, 1)}
    keep(model, folder, facts)
    accuracy = evaluate(model, held_out_images(model, size.held_out, device), batch_size=128, device=device)
    print(f"dense: {accuracy}; trained on {json.dumps(facts)}", flush=True)


def keep(model: nn.Module, folder: Path, facts: dict[str, Any]) -> None:
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
    (folder / "dense.json").write_text(json.dumps(facts | {"files": len(shares)}) + "\n", encoding="utf-8")


def kept(size: Size, folder: Path) -> tuple[nn.Module, int]:
    """The dense model of an earlier call and the images that it was trained on."""
    facts = json.loads((folder / "dense.json").read_text(encoding="utf-8"))
    state: dict[str, torch.Tensor] = {}
    for number in range(facts["files"]):
        state |= load_file(folder / f"dense-{number}.safetensors")
    model = build_base(size.base, size.base_args)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval(), facts["images"]


def open_workshop(size: Size, folder: Path, share: float, device: torch.device) -> Workshop:
    """All that rows are made with."""
    dense, images = kept(size, folder)
    dense = dense.to(device)
    held_out = held_out_images(dense, size.held_out, device)
    wanted = preparation(dense)
    known = Fractals("train", held_out.num_classes, (wanted.height, wanted.width), mean=wanted.mean, std=wanted.std, device=device, seed=9)

    def fine_tune(model: nn.Module) -> None:
        learn(model, size, int(share * images), seed=2, teacher=dense)

    calibration = known.batch(range(size.calibration))[0]
    return Workshop(dense, size.base, size.base_args, calibration, held_out, fine_tune, share, folder)


def places(device: torch.device, processes: int | None) -> list[str]:
    """What CUDA_VISIBLE_DEVICES is in each process that makes rows; none where this one makes them."""
    if device.type != "cuda":
        return [""] * (processes or 0)
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]
    return [gpus[number % len(gpus)] for number in range(processes or PROCESSES_A_GPU * len(gpus))]


def main() -> None:
    """Train, convert, measure and write."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/fractals"), metavar="FOLDER", help="the dense model's place")
    parser.add_argument("--out", type=Path, help="CSV file to write; by default in FOLDER", metavar="FILE")
    parser.add_argument("--minutes", type=recipe.duration, default=9.5, help="begin no row after this many minutes")
    parser.add_argument("--train-minutes", type=recipe.duration, default=4.5, help="length of the dense training")
    parser.add_argument("--finetune-share", type=recipe.duration, default=0.05, help="images of a fine-tuning over those of the training")
    parser.add_argument("--classes", type=recipe.count, help="number of classes, instead of 100")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--processes", type=recipe.count, help="rows made at a time, shared out over the GPUs; by default three on each")
    parser.add_argument("--device", help="cpu, cuda, ...; by default cuda where there is one")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    device = device_of(options.device)
    if device.type == "cpu" and not options.quick:
        raise SystemExit("this needs a CUDA device, and PyTorch finds none; --quick runs anywhere")
    size = QUICK if options.quick else FULL
    if options.classes is not None:
        size = replace(size, base_args=size.base_args | {"num_classes": options.classes})
    out = options.out or options.folder / "accuracy.csv"
    check_out(out, device)
    if not (options.folder / "dense.json").is_file():
        state = PartialState(cpu=device.type == "cpu")
        train_dense(size, None if options.quick else options.train_minutes, 960, state.device or device, options.folder)
    if "WORLD_SIZE" in os.environ:
        leave_processes()
        return
    run(
        partial(open_workshop, size, options.folder, options.finetune_share, device),
        all_cases(options.targets, options.methods),
        out,
        device=device,
        gpus=places(device, options.processes),
        minutes=options.minutes - (time.perf_counter() - started) / 60,
        echo=lambda text: print(text, flush=True),
    )


if __name__ == "__main__":
    recipe.main(main)
