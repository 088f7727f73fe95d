"""The throughput of fine-tuning on two GPUs of one host, beside one GPU.

    python recipes/finetune_on_two_gpus.py --out recipes/results/finetune_two_gpus_h200.csv

A ViT-S/16 with random weights is converted and fine-tuned on generated images with its dense self as teacher, by the command line,
each time under ``accelerate launch``: one process, two processes with DistributedDataParallel, and two with FSDP2. The same
number of images for each process, so a ratio of 2 is the best that there is. --quick takes a tiny model and few images, and with
--device cpu processes on the CPU, to see that it runs; accelerate has no FSDP there.

Needs two CUDA devices and a minute and a half, two with ``--updates 250``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import recipe
import torch

from flysurgery.bench import Record, draw_ratios
from flysurgery.bench.rows import columns_of
from flysurgery.checkpoint import build_base, save, save_dense
from flysurgery.surgery import convert

BASE = "vit_small_patch16_224"
FULL = {"num_classes": 100}
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}

QUICK_UPDATES, QUICK_BATCH = 3, 4
WAYS = {
    "one": ["--num_processes", "1"],
    "ddp": ["--multi_gpu", "--num_processes", "2"],
    "fsdp2": [
        *("--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        *("--fsdp_transformer_layer_cls_to_wrap", "Block", "--fsdp_reshard_after_forward", "true"),
    ],
}
"""How accelerate is told to run."""


@dataclass(frozen=True)
class Row:
    """One run. ``images_per_second`` of all processes together; ``ratio_to_one`` against the run on one."""

    way: str
    arch: str
    processes: int
    batch_size: int
    updates: int
    images_per_second: float
    ratio_to_one: float
    loss: float
    seconds: float
    status: str = "ok"


@dataclass(frozen=True)
class Setting:
    """What all runs share."""

    arch: str
    batch_size: int
    updates: int
    timeout: float
    cpu: bool


def run(way: str, folder: Path, setting: Setting) -> Row:
    """One fine-tuning in processes of its own; its ratio is not known here."""
    processes = processes_of(way)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--dynamo_backend", "no", "--num_machines", "1", *WAYS[way]]
    launch += ["--mixed_precision", "bf16", "--main_process_port", "0", "-m", "flysurgery.cli"]
    if setting.cpu:  # where accelerate's own launcher wants MPI for more than one process
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m", "flysurgery.cli"]
    images = setting.updates * setting.batch_size * processes
    command = ["finetune", str(folder / setting.arch), "--teacher", str(folder / "dense"), "--data", "fractals", "--epochs", "1"]
    command += ["--images-per-epoch", str(images), "--batch-size", str(setting.batch_size), "--log-every", "10", "--json"]
    command += ["--optimizer", "adamw"]  # which both ways have: Muon needs whole matrices, and FSDP shares them out
    command += ["--out", str(folder / way)] + (["--cpu"] if setting.cpu else [])
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    head = way, setting.arch, processes, setting.batch_size
    try:
        done = subprocess.run([*launch, *command], env=environment, capture_output=True, text=True, check=False, timeout=setting.timeout)
    except subprocess.TimeoutExpired:
        return Row(*head, setting.updates, 0.0, 0.0, 0.0, 0.0, "timed out")
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("flysurgery:") or "Error" in line), "failed")
        print(done.stderr[-3000:], file=sys.stderr)
        return Row(*head, setting.updates, 0.0, 0.0, 0.0, 0.0, reason)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    if found["processes"] != processes:
        raise SystemExit(f"{way}: expected {processes} processes, accelerate ran {found['processes']}")
    return Row(*head, found["updates"], found["images_per_second"], 0.0, found["loss"], found["seconds"])


def processes_of(way: str) -> int:
    """How many processes train."""
    return 1 if way == "one" else 2


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars of the time of an image over that of one process."""
    ratios = [each | {"ratio_to_one": 1 / float(each["ratio_to_one"])} for each in records if float(each["ratio_to_one"])]
    draw_ratios(ratios, plot, group=("arch", "batch_size"), series="way", ratio="ratio_to_one", title=str(records[0]["device"]))


def main() -> None:
    """Prepare the models, run, print and write."""
    parser = recipe.arguments(__doc__)
    parser.add_argument("--arch", default="monarch", help="monarch or gonon")
    parser.add_argument("--batch-size", type=recipe.count, help=f"images of one process, 128 by default, {QUICK_BATCH} with --quick")
    parser.add_argument("--updates", type=recipe.count, help=f"100 by default, {QUICK_UPDATES} with --quick")
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--timeout", type=recipe.duration, default=150.0, help="seconds for each run")
    options = parser.parse_args()
    device, _ = recipe.device_and_modes(options)
    cpu = device.type == "cpu"
    if not (cpu and options.quick) and torch.cuda.device_count() < 2:
        found = torch.cuda.device_count()
        raise SystemExit(f"this needs two CUDA devices, and PyTorch finds {found}; --quick --device cpu runs anywhere, with a tiny model")
    batch, updates = (QUICK_BATCH, QUICK_UPDATES) if options.quick else (128, 100)
    setting = Setting(options.arch, options.batch_size or batch, options.updates or updates, options.timeout, cpu)
    shared = {"arch": setting.arch, "batch_size": setting.batch_size, "updates": setting.updates}
    heads = {way: {"way": way} | shared for way in options.ways if not (cpu and way == "fsdp2")}
    arguments = TINY if options.quick else FULL
    with recipe.start(options, device, Row) as rows, tempfile.TemporaryDirectory() as name:
        todo = [way for way, head in heads.items() if not rows.has(head | {"status": "ok"})]
        folder = Path(name)
        if todo:
            torch.manual_seed(options.seed)
            model = build_base(BASE, arguments)
            save_dense(model, folder / "dense", BASE, arguments, force=False)
            save(model, folder / setting.arch, report=convert(model, setting.arch, base=BASE, base_args=arguments))
        for way in todo:
            row = run(way, folder, setting)
            found = [float(each["images_per_second"]) for each in rows.rows(heads["one"])] if "one" in heads else []
            one = row.images_per_second if way == "one" else next(iter(found), 0.0)
            rows.add([replace(row, ratio_to_one=row.images_per_second / one if one else 0.0)], way)
    recipe.show(rows, columns_of(Row))
    if options.plot is not None:
        draw(rows.records, options.plot)


if __name__ == "__main__":
    recipe.main(main)
