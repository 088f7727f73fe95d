"""Convert a timm model with the help of a folder of photographs, save it, and run it as fast as this device can.

python examples/deploy_timm.py --photographs FOLDER
"""

import argparse
from pathlib import Path

import timm
import torch

import flysurgery
from flysurgery.evaluation import load_calibration

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="vit_small_patch16_224")
parser.add_argument("--photographs", type=Path, required=True, help="a folder of images; no labels are needed")
parser.add_argument("--out", type=Path, default=Path("checkpoints/deployed"))
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--tiny", action="store_true", help="a small model of random weights, to see in seconds that this runs")
options = parser.parse_args()

model = timm.create_model(options.model, pretrained=not options.tiny, **(TINY if options.tiny else {})).eval()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model.to(device)

# What is replaced by what; nothing has changed yet.
plan = flysurgery.plan(model, "monarch", nblocks=4)
print(plan)

# The factors are fitted to what the layers receive on the photographs. Every fifth photograph only measures.
samples = load_calibration(options.photographs, model)
report = flysurgery.apply(plan, model, calibrate=samples, sequential=True)
print(report.fidelity)
flysurgery.save(model, options.out, report=report, force=True)

# Elsewhere: the folder is enough. No original weights and no network are needed.
dtype = torch.float16 if device.type == "cuda" else torch.float32
model = flysurgery.load(options.out, device=device, dtype=dtype)
images = samples.inputs[: options.batch].to(device, dtype)
print(flysurgery.optimize(model, images))
with torch.inference_mode():
    run = flysurgery.capture(model, images) if device.type == "cuda" else model
    print(f"classes of the first photographs: {run(images).argmax(1)[:5].tolist()}")
