"""Convert a model and train it on a data set of your own, with the dense model as its teacher.

The folder holds one folder of images for each class, itself or in `train` and `val`.

    python examples/own_data.py --data FOLDER --weights dense.safetensors
"""

import argparse
import copy
from pathlib import Path

import timm
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder

import flysurgery
from flysurgery.checkpoint import load_weights
from flysurgery.evaluation import preparation
from flysurgery.finetune import Settings, train, training_data

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--model", default="vit_small_patch16_224")
parser.add_argument(
    "--weights", type=Path, help="of the dense model, trained on these classes; without them published ones, with a new head"
)
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--out", type=Path, default=Path("checkpoints/own_data"))
parser.add_argument("--tiny", action="store_true", help="a small model of random weights, to see in seconds that this runs")
options = parser.parse_args()

train_folder, held_out = (options.data / name if (options.data / name).is_dir() else options.data for name in ("train", "val"))
classes = len(ImageFolder(train_folder).classes)
teacher = timm.create_model(options.model, num_classes=classes, **(TINY if options.tiny else {})).eval()
if not options.tiny:
    load_weights(teacher, options.weights or parser.error("--weights FILE is needed: a dense model that knows these classes"))

student = copy.deepcopy(teacher)
flysurgery.convert(student, "monarch")

settings = Settings(epochs=options.epochs, batch_size=options.batch)
outcome = train(student, training_data(options.data, student, settings, teacher=True), settings, teacher=teacher)
flysurgery.save(outcome.model.cpu(), options.out, force=True)

# Any loader of images and labels measures it.
loader = DataLoader(ImageFolder(held_out, preparation(student).transform()), options.batch)
print(f"dense: {flysurgery.evaluate(teacher.cpu(), loader)}")
print(f"converted: {flysurgery.evaluate(flysurgery.load(options.out), loader)}")
