"""Train the small Vision Transformer in checkpoints/digits_vit on scikit-learn's digits.

    python recipes/train_digits_vit.py [--out FOLDER]

1198 of the 1797 digits are trained on, the other 599 only tested; two to four minutes on one CPU core. What is written is
a dense model in timm's layout: timm.create_model("local-dir:FOLDER", pretrained=True).

Needs ``pip install 'flysurgery[train]'`` and two to four minutes of one CPU core.
"""

from __future__ import annotations

import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import recipe
import timm
import torch
from timm.optim._param_groups import param_groups_weight_decay
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from flysurgery.checkpoint import save_dense
from flysurgery.errors import OptionError
from flysurgery.evaluation import Accuracy, digits, evaluate, load_data

SEED = 0
EPOCHS, QUICK_EPOCHS = 120, 1
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
WEIGHT_DECAY = 0.1
LABEL_SMOOTHING = 0.1
WARM_UP = 0.1  # share of the steps
DROP_PATH = 0.1

BASE = "vit_tiny_patch16_224"
BASE_ARGS = {"img_size": [8, 8], "patch_size": 2, "in_chans": 1, "num_classes": 10, "embed_dim": 96, "depth": 4, "num_heads": 3}
DATA: dict[str, Any] = {"input_size": [1, 8, 8], "mean": [0.5], "std": [0.5]}
DATA |= {"fixed_input_size": True, "interpolation": "bilinear", "crop_pct": 1.0}
BLACK = -1.0  # a pixel of value 0, normalized

# Distortions, each uniform between minus and plus the number.
ROTATION = math.radians(10)
SCALE = 0.1
SHEAR = 0.1
SHIFT = 0.12  # of half the image


def distort(images: Tensor, generator: torch.Generator) -> Tensor:
    """Rotate, scale, shear and shift each image by its own random amounts; what moves in from outside is black."""

    def draw(bound: float) -> Tensor:
        return (2 * torch.rand(len(images), generator=generator) - 1) * bound

    angle, shear = draw(ROTATION), draw(SHEAR)
    width, height = 1 + draw(SCALE), 1 + draw(SCALE)
    rows = [
        torch.stack([angle.cos() * width, shear - angle.sin() * height, draw(SHIFT)], dim=1),
        torch.stack([angle.sin() * width, angle.cos() * height, draw(SHIFT)], dim=1),
    ]
    grid = functional.affine_grid(torch.stack(rows, dim=1), list(images.shape), align_corners=False)
    return functional.grid_sample(images - BLACK, grid, align_corners=False) + BLACK


def train(model: nn.Module, data: TensorDataset, epochs: int) -> None:
    """Fit ``model`` to ``data`` in place."""
    images, classes = data.tensors
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(param_groups_weight_decay(model, WEIGHT_DECAY), lr=LEARNING_RATE)
    steps = epochs * math.ceil(len(images) / BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps, pct_start=WARM_UP)
    model.train()
    for epoch in range(epochs):
        total = 0.0
        for batch in torch.randperm(len(images), generator=generator).split(BATCH_SIZE):
            scores = model(distort(images[batch], generator))
            loss = functional.cross_entropy(scores, classes[batch], label_smoothing=LABEL_SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item() * len(batch)
        if (epoch + 1) % 10 == 0 or epoch + 1 == epochs:
            print(f"epoch {epoch + 1} of {epochs}, loss {total / len(images):.3f}", flush=True)


CARD = """---
library_name: timm
pipeline_tag: image-classification
---
# digits_vit

A small dense Vision Transformer for handwritten digits, to try conversions on without a download.

- Architecture: `{base}` of timm with `{args}`; {parameters:,} parameters, float32
- Trained on: 1198 of the 1797 digits of scikit-learn (8x8 pixels, UCI Optical Recognition of Handwritten Digits)
- Tested on: the other {samples}: **{top1:.2%}** top-1, {top5:.2%} top-5
- Training: `recipes/train_digits_vit.py`, seed {seed}, {epochs} epochs, {seconds:.0f} s on one CPU core
- Versions: Python {python}, torch {torch}, timm {timm}

It reads 10 classes off upright, centred 8x8 digits as scikit-learn has them, and nothing else.

```python
model = timm.create_model("local-dir:checkpoints/digits_vit", pretrained=True)
```

```sh
flysurgery convert checkpoints/digits_vit --arch monarch --evaluate digits
```
"""


def write(model: Any, folder: Path, accuracy: Accuracy, epochs: int, seconds: float) -> None:
    """Write the model as timm opens it, and its card."""
    labels = {"label_names": [str(digit) for digit in range(10)]}
    model.pretrained_cfg = DATA | labels | {"num_classes": 10, "first_conv": "patch_embed.proj", "classifier": "head"}
    save_dense(model, folder, BASE, BASE_ARGS, force=True)
    facts = {"base": BASE, "args": json.dumps(BASE_ARGS), "parameters": sum(parameter.numel() for parameter in model.parameters())}
    facts |= {"samples": accuracy.samples, "top1": accuracy.top1, "top5": accuracy.top5, "seed": SEED, "epochs": epochs, "seconds": seconds}
    facts |= {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__}
    (folder / "README.md").write_text(CARD.format(**facts), encoding="utf-8")


def main() -> None:
    parser = recipe.parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="one epoch, to see that it runs; by default into build/digits_vit")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="checkpoints/digits_vit by default")
    options = parser.parse_args()
    folder = options.out or (Path("build/digits_vit") if options.quick else Path(__file__).parents[1] / "checkpoints" / "digits_vit")
    if folder.exists() and not folder.is_dir():
        raise OptionError(f"--out takes a folder, and {folder} is none; choose another name")
    epochs = QUICK_EPOCHS if options.quick else EPOCHS
    torch.set_num_threads(1)  # the batches are too small to be worth sharing out, and sums come out the same everywhere
    torch.manual_seed(SEED)
    model = timm.create_model(BASE, drop_path_rate=DROP_PATH, **BASE_ARGS)
    started = time.perf_counter()
    train(model, digits("train", (8, 8), mean=DATA["mean"], std=DATA["std"]), epochs)
    seconds = time.perf_counter() - started
    accuracy = evaluate(model, load_data("digits", model))
    write(model, folder, accuracy, epochs, seconds)
    print(f"{accuracy}; trained in {seconds:.0f} s, written to {folder}")


if __name__ == "__main__":
    recipe.main(main)
