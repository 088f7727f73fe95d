"""The accuracy of the demo model after each way to make it smaller, before and after fine-tuning.

    python recipes/digits_accuracy.py --out recipes/results/digits_accuracy.csv

The rows are those of ``accuracy_cases``. The fine-tuning takes 6 epochs with the dense model as teacher, 5 % of the 120 that it was
trained for. Calibration images come from the training part, accuracy and output errors from the 599 held-out digits. One digit is 0.17
points. The same command once more goes on with the rows that are missing.

Needs ``pip install 'flysurgery[train]'`` and ten minutes of one CPU core.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import recipe
import torch
from accuracy_cases import METHODS, TARGETS, Workshop, all_cases, run
from torch import nn

from flysurgery.checkpoint import load_dense
from flysurgery.evaluation import load_calibration, load_data
from flysurgery.finetune import Settings, train, training_data

DEMO = Path(__file__).parents[1] / "checkpoints" / "digits_vit"
QUICK_TARGETS, QUICK_METHODS = ("monarch",), ("svd", "calibrated")
EPOCHS = 120
"""Of the demo model's training, by its model card."""


def fine_tune(dense: nn.Module, epochs: int, model: nn.Module) -> None:
    """Train ``model`` in place on the digits, with ``dense`` as teacher."""
    settings = Settings(epochs=epochs, smoothing=0.0, log_every=1000, workers=0, cpu=True)
    train(model, training_data("digits", model, settings), settings, teacher=dense)


def open_workshop(epochs: int) -> Workshop:
    """All that rows are made with."""
    dense, base, base_args = load_dense(DEMO)
    dense = dense.eval()
    calibration = load_calibration("digits", dense).inputs
    return Workshop(dense, base, base_args, calibration, load_data("digits", dense), partial(fine_tune, dense, epochs), epochs / EPOCHS)


def main() -> None:
    """Convert, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FILE", help="CSV file to write, by default in build")
    parser.add_argument("--quick", action="store_true", help="one target, two ways and one epoch, to see that it runs")
    parser.add_argument("--epochs", type=recipe.count, help="length of each fine-tuning, 6 by default, 1 with --quick")
    parser.add_argument("--targets", nargs="*", choices=TARGETS)
    parser.add_argument("--methods", nargs="*", choices=METHODS)
    parser.add_argument("--processes", type=recipe.count, default=0, help="rows made at a time; without it they are made in this process")
    options = parser.parse_args()
    epochs = options.epochs or (1 if options.quick else 6)
    targets = options.targets or (QUICK_TARGETS if options.quick else TARGETS)
    methods = options.methods or (QUICK_METHODS if options.quick else METHODS)
    run(
        partial(open_workshop, epochs),
        all_cases(targets, methods),
        options.out or Path("build", f"digits_accuracy{'.quick' if options.quick else ''}.csv"),
        device=torch.device("cpu"),
        gpus=[""] * options.processes,
        echo=lambda text: print(text, flush=True),
    )


if __name__ == "__main__":
    recipe.main(main)
