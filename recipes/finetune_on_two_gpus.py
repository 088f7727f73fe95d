"""Fine-tuning on one GPU and on two of one host: images a second, and that both learn.

    python recipes/finetune_on_two_gpus.py --out recipes/results/finetune_two_gpus_h200.csv

A ViT-S/16 with random weights is converted and fine-tuned on generated images with its dense self as teacher, by the command line,
each time under ``accelerate launch``: one process, two processes with DistributedDataParallel, and two with FSDP2. The same
number of images for each process, so a ratio of 2 is the best that there is. --cpu uses processes on the CPU and a tiny model, to see
that it runs; accelerate has no FSDP there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flysurgery.bench import take_stamp, write_csv
from flysurgery.checkpoint import build_base, save, save_dense
from flysurgery.surgery import convert

BASE = "vit_small_patch16_224"
FULL = {"num_classes": 100}
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 5}

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


def run(way: str, folder: Path, options: argparse.Namespace) -> Row:
    """One fine-tuning in processes of its own."""
    processes = 1 if way == "one" else 2
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--dynamo_backend", "no", "--num_machines", "1", *WAYS[way]]
    launch += ["--mixed_precision", "bf16", "--main_process_port", "0", "-m", "flysurgery.cli"]
    if options.cpu:  # where accelerate's own launcher wants MPI for more than one process
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes), "-m", "flysurgery.cli"]
    images = options.updates * options.batch_size * processes
    command = ["finetune", str(folder / options.arch), "--teacher", str(folder / "dense"), "--data", "fractals", "--epochs", "1"]
    command += ["--images-per-epoch", str(images), "--batch-size", str(options.batch_size), "--log-every", "10", "--json"]
    command += ["--out", str(folder / way)] + (["--cpu"] if options.cpu else [])
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([*launch, *command], env=environment, capture_output=True, text=True, check=False, timeout=options.timeout)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("flysurgery:") or "Error" in line), "failed")
        print(done.stderr[-3000:], file=sys.stderr)
        return Row(way, options.arch, processes, options.batch_size, options.updates, 0.0, 0.0, 0.0, 0.0, reason)
    found = json.loads(done.stdout[done.stdout.index("{") :])
    if found["processes"] != processes:
        raise SystemExit(f"{way}: expected {processes} processes, accelerate ran {found['processes']}")
    speed, loss = found["images_per_second"], found["loss"]
    return Row(way, options.arch, processes, options.batch_size, found["updates"], speed, 0.0, loss, found["seconds"])


def main() -> None:
    """Prepare the models, run, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="monarch", help="monarch or gonon")
    parser.add_argument("--batch-size", type=int, default=128, help="images of one process")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--timeout", type=float, default=150, help="seconds for each run")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path, help="CSV file to write", metavar="FILE")
    options = parser.parse_args()
    if options.cpu:
        options.ways = [way for way in options.ways if way != "fsdp2"]
    if not options.cpu and torch.cuda.device_count() < 2:
        raise SystemExit(f"this needs two CUDA devices, and PyTorch finds {torch.cuda.device_count()}; --cpu runs anywhere")
    arguments = TINY if options.cpu else FULL
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.manual_seed(0)
        model = build_base(BASE, arguments)
        save_dense(model, folder / "dense", BASE, arguments, force=False)
        save(model, folder / options.arch, report=convert(model, options.arch, base=BASE, base_args=arguments))
        for way in options.ways:
            try:
                row = run(way, folder, options)
            except subprocess.TimeoutExpired:
                row = Row(way, options.arch, 1 if way == "one" else 2, options.batch_size, options.updates, 0.0, 0.0, 0.0, 0.0, "timed out")
            one = next((each.images_per_second for each in [*rows, row] if each.way == "one"), 0.0)
            rows.append(replace(row, ratio_to_one=row.images_per_second / one if one else 0.0))
            print(rows[-1], flush=True)
            if options.out is not None:
                write_csv(options.out, rows, take_stamp(torch.device("cpu" if options.cpu else "cuda")))


if __name__ == "__main__":
    main()
