"""``flysurgery doctor``: what this machine can run, and why not."""

import platform
from importlib.metadata import PackageNotFoundError, version
from itertools import product

from flysurgery.cli.options import Json
from flysurgery.tables import blocks_of_text, text_table

PACKAGES = ("flysurgery", "torch", "timm", "vit-pytorch", "safetensors", "cuda-core")
FACTS = ("what", "here", "obstacle")
BACKENDS = ("device", "dtype", "backend", "runs", "reason")


def doctor(as_json: Json = False) -> None:
    """Tell what this machine can run, and why not: versions, devices, the kernels' compiler and cache, backends."""
    import torch

    from flysurgery.cli.tables import show
    from flysurgery.gpu.device import cuda_facts

    threads = f"{platform.machine()}, {torch.get_num_threads()} threads"
    found = [
        ("python", f"{platform.python_version()} on {platform.platform()}", None),
        *map(_package, PACKAGES),
        ("CPU", threads, None),
        ("CUDA in torch", torch.version.cuda or "none", None),
        ("driver", *_driver()),
        *cuda_facts(),
    ]
    facts = [dict(zip(FACTS, fact, strict=True)) for fact in found]
    backends = _backends()
    tables = [(FACTS, facts), (BACKENDS, backends)]
    text = blocks_of_text(*(text_table(names, [[row[name] or "" for name in names] for row in rows]) for names, rows in tables))
    show({"facts": facts, "backends": backends}, text, as_json=as_json)


def _package(name: str) -> tuple[str, str, str | None]:
    try:
        return (name, version(name), None)
    except PackageNotFoundError:
        return (name, "none", "it is not installed")


def _driver() -> tuple[str, str | None]:
    from flysurgery.errors import BackendError
    from flysurgery.gpu.compile import cuda_module

    try:
        _, number = cuda_module("bindings.driver").cuDriverGetVersion()
    except BackendError as error:
        return ("unknown", str(error))
    except RuntimeError:  # cuda-bindings looked for the driver's library
        number = 0
    return (f"for CUDA {number // 1000}.{number % 1000 // 10}", None) if number else ("none", "no NVIDIA driver is installed")


def _backends() -> list[dict[str, str]]:
    """What the backends say of a Monarch layer of ViT-S/16 at batch 128, with its class tokens."""
    import torch

    from flysurgery.ops import Problem, explain
    from flysurgery.patterns import monarch

    devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    rows = []
    for device, dtype in product(devices, (torch.float32, torch.bfloat16, torch.float16)):
        explanation = explain(Problem(monarch(384, 384), 25216, dtype, device, bias=True))
        for verdict in explanation.verdicts:
            chosen = verdict.backend == explanation.choice
            runs = "no" if verdict.obstacle is not None else "chosen" if chosen else "yes"
            reason = verdict.obstacle or (explanation.why if chosen else verdict.advice) or ""
            name = str(dtype).removeprefix("torch.")
            rows.append({"device": device, "dtype": name, "backend": verdict.backend, "runs": runs, "reason": reason})
    return rows
