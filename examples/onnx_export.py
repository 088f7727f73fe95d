"""Export a converted model to ONNX, and compare its times with the dense model's in ONNX Runtime and, if installed, OpenVINO.

The factors become grouped 1x1 convolutions over the tokens, which engines run faster than batched products.

    python examples/onnx_export.py --arch gonon
"""

import argparse
import time
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import onnxruntime
import timm
import torch

import flysurgery
from flysurgery.evaluation import preparation

BATCH, THREADS, ROUNDS, OUT = 8, 2, 15, Path("build/onnx")
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--model", default="vit_small_patch16_224")
parser.add_argument("--arch", default="monarch", help="monarch, gonon or lowrank")
parser.add_argument("--random", action="store_true", help="random weights, which need no network and take the same time")
parser.add_argument("--tiny", action="store_true", help="a small model of random weights, to see in seconds that this runs")
options = parser.parse_args()

model = timm.create_model(options.model, pretrained=not (options.tiny or options.random), **(TINY if options.tiny else {})).eval()
images, runs = torch.randn(BATCH, *preparation(model).shape), {}
settings = onnxruntime.SessionOptions()
settings.intra_op_num_threads = THREADS
OUT.mkdir(parents=True, exist_ok=True)
for name in ("dense", "converted"):
    if name == "converted":
        flysurgery.convert(model, options.arch)
    file = OUT / f"{name}.onnx"
    torch.onnx.export(model, (images,), file, dynamo=False, input_names=["images"])
    session = onnxruntime.InferenceSession(file, settings, providers=["CPUExecutionProvider"])
    runs["ONNX Runtime", name] = partial(session.run, None, {"images": images.numpy()})
    if find_spec("openvino"):
        core = import_module("openvino").Core()
        runs["OpenVINO", name] = partial(core.compile_model(file, "CPU", {"INFERENCE_NUM_THREADS": THREADS}), images.numpy())
    with torch.inference_mode():
        difference = abs(runs["ONNX Runtime", name]()[0] - model(images).numpy()).max()
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, outputs differ from PyTorch's by {difference:.1e}")

times = {each: [] for each in runs}
for each in ROUNDS * [*runs]:
    started = time.perf_counter()
    runs[each]()
    times[each].append(1e3 * (time.perf_counter() - started))
for (engine, name), found in times.items():
    print(f"{engine}, {name}: {median(found):.1f} ms, {median(found) / median(times[engine, 'dense']):.2f} of dense")
