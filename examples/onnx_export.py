"""Export a converted model to ONNX, and compare its times and outputs in ONNX Runtime with the dense model's.

The factors become grouped 1x1 convolutions over the tokens, which engines run faster than batched products.

    python examples/onnx_export.py --arch gonon --threads 2
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import onnxruntime
import timm
import torch

import flysurgery
from flysurgery.evaluation import preparation

TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="vit_small_patch16_224")
parser.add_argument("--arch", default="monarch", help="monarch, gonon or lowrank")
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--rounds", type=int, default=15)
parser.add_argument("--out", type=Path, default=Path("build/onnx"))
parser.add_argument("--tiny", action="store_true", help="a small model of random weights, to see in seconds that this runs")
options = parser.parse_args()

model = timm.create_model(options.model, pretrained=not options.tiny, **(TINY if options.tiny else {})).eval()
images = torch.randn(options.batch, *preparation(model).shape)
options.out.mkdir(parents=True, exist_ok=True)

settings = onnxruntime.SessionOptions()
settings.intra_op_num_threads = options.threads
sessions = {}
for name in ("dense", "converted"):
    if name == "converted":
        flysurgery.convert(model, options.arch)
    file = options.out / f"{name}.onnx"
    torch.onnx.export(model, (images,), file, dynamo=False, input_names=["images"], dynamic_axes={"images": {0: "batch"}})
    sessions[name] = onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
    with torch.inference_mode():
        difference = abs(sessions[name].run(None, {"images": images.numpy()})[0] - model(images).numpy()).max()
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, outputs differ from PyTorch's by {difference:.1e}")

times: dict[str, list[float]] = {name: [] for name in sessions}
for _ in range(options.rounds):
    for name, session in sessions.items():
        started = time.perf_counter()
        session.run(None, {"images": images.numpy()})
        times[name].append(1e3 * (time.perf_counter() - started))
for name, each in times.items():
    print(f"{name}: {median(each):.1f} ms, {median(each) / median(times['dense']):.2f} of dense")
