"""A converted ViT-S/16 on a CUDA device: that it is right, trains, compiles and exports, and what it costs against dense.

``python recipes/vit_s16_on_gpu.py --arch gonon --out recipes/results/vit_s16_gonon_h200.csv``

Random weights: nothing here depends on their values. Inference is timed by CUDA graphs over rotating inputs. A training step
(forward, backward, fused AdamW) is timed eagerly with a look at each loss, eagerly with the next step behind it, and in a CUDA graph:
what the host takes shows in the first, and in the second where it takes longer than the device. All beside dense in the same
run, steps by turns. The error is that of the converted model's features against the same model in float64. ``bound_us`` is what a large
copy and a large matrix product, measured in the same run, allow the converted model.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import recipe
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.bench import MODES, Timing, in_mode, time_interleaved
from flysurgery.bench.training import work_of_step
from flysurgery.bench.variants import by_definition
from flysurgery.bench.work import work_of
from flysurgery.layers import ButterflyLinear
from flysurgery.ops import Problem, explain

_STEPS = 10


@dataclass(frozen=True)
class Row:
    """One measurement of the whole model, milliseconds; ``error`` is relative, in the Frobenius norm."""

    arch: str
    mode: str
    batch: int
    what: str
    dense_ms: float
    converted_ms: float
    ratio_to_dense: float
    error: float | None
    dense_error: float | None
    backends: str
    judged: recipe.Judged


def inference(dense: nn.Module, converted: nn.Module, mode: str, batch: int, arch: str) -> Row:
    """Time one forward pass of each model in a CUDA graph, and hold both against float64."""
    dtype = MODES[mode]
    x = torch.randn(batch, 3, 224, 224, device="cuda", dtype=dtype)
    both = {"dense": dense, "converted": converted}
    models = {name: copy.deepcopy(model).eval().requires_grad_(False).to(dtype) for name, model in both.items()}
    with torch.inference_mode():
        errors = {}
        for name, model in models.items():
            exact = copy.deepcopy(model).double()(x[:8].double())
            errors[name] = float((model(x[:8]).double() - exact).norm() / exact.norm())
        models["dense again"] = models["dense"]
        timings = time_interleaved(models, x, rounds=12)
        works = {name: work_of(by_definition(model), x) for name, model in models.items()}
    layers = [module for module in models["converted"].modules() if isinstance(module, ButterflyLinear)]
    rows = batch * 197
    choices = {explain(Problem(layer.architecture, rows, dtype, "cuda", bias=True, allow_tf32=mode == "tf32")).choice for layer in layers}
    times = timings["dense"].median_ms, timings["converted"].median_ms
    found = errors["converted"], errors["dense"], "+".join(sorted(choices))
    judged = recipe.judge(mode, timings, works)["converted"]
    return Row(arch, mode, batch, "inference", *times, times[1] / times[0], *found, judged)


def training(dense: nn.Module, converted: nn.Module, batch: int, arch: str) -> list[Row]:
    """Time a training step of each model under bfloat16 autocast, in three ways, the models by turns: a host's pace changes."""
    models = {name: _Training(model, batch) for name, model in (("dense", dense), ("converted", converted))}
    works = {name: model.work for name, model in models.items()}
    models["dense again"], works["dense again"] = models["dense"], works["dense"]
    ways: list[tuple[str, Callable[[_Training], object], int, int]] = [
        ("training step", lambda model: float(model.step()), 1, 20),
        (f"training step, {_STEPS} on end", lambda model: [model.step() for _ in range(_STEPS)], _STEPS, 7),
        ("training step, CUDA graph", lambda model: model.graph.replay(), 1, 10),
    ]
    rows = []
    for what, run, steps, rounds in ways:
        times = [[_timed(partial(run, model)) / steps for model in models.values()] for _ in range(rounds)]
        medians = dict(zip(models, map(statistics.median, zip(*times, strict=True)), strict=True))
        judged = recipe.judge("bf16", {name: Timing(ms, ms, ms) for name, ms in medians.items()}, works)["converted"]
        before, after = medians["dense"], medians["converted"]
        rows.append(Row(arch, "bf16", batch, what, before, after, after / before, None, None, "", judged))
    for name in ("dense", "converted"):
        models[name].check()
    return rows


class _Training:
    """A model trained on one batch, whose loss must fall, and one step of it as a graph."""

    def __init__(self, model: nn.Module, batch: int) -> None:
        trained = copy.deepcopy(model).train().requires_grad_(True)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, fused=True, capturable=True)
        x = torch.randn(batch, 3, 224, 224, device="cuda")
        target = torch.randint(0, 1000, (batch,), device="cuda")
        self.work = work_of_step(by_definition(trained), x, target)
        self.step = partial(step, trained, optimizer, x, target)
        self._losses = [float(self.step()) for _ in range(8)]
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._loss = self.step()

    def check(self) -> None:
        """See that the loss has fallen, in steps called one by one and in those of the graph."""
        _must_fall([self._losses[0], float(self.step())])
        self.graph.replay()
        _must_fall([self._losses[0], float(self._loss)])


def _must_fall(losses: list[float]) -> None:
    if not losses[-1] < losses[0]:
        raise SystemExit(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> Tensor:
    """One step; gives the loss before it."""
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", torch.bfloat16, cache_enabled=not torch.cuda.is_current_stream_capturing()):
        loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _timed(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def compiles_and_exports(converted: nn.Module) -> None:
    """Compile the model whole and export it; both must give what it gives."""
    model = copy.deepcopy(converted).eval().requires_grad_(False).half()
    x = torch.randn(4, 3, 224, 224, device="cuda", dtype=torch.float16)
    with torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, fullgraph=True)(x)
        program = torch.export.export(model, (x,)).module()(x)
    for name, got in (("torch.compile", compiled), ("torch.export", program)):
        error = float((got.double() - expected.double()).norm() / expected.double().norm())
        print(f"{name}: relative difference {error:.1e}")
        if not error < 1e-2:
            raise SystemExit(f"{name} changes the result: relative difference {error:.1e}")


def main() -> None:
    """Measure, print and write."""
    parser = recipe.table_arguments(__doc__)
    parser.add_argument("--arch", default="gonon", help="monarch or gonon")
    parser.add_argument("--batch", type=recipe.count, default=128)
    options = recipe.on_cuda(parser)
    torch.manual_seed(0)
    dense = timm.create_model("vit_small_patch16_224", pretrained=False).cuda()
    converted = copy.deepcopy(dense)
    flysurgery.convert(converted, arch=options.arch)
    compiles_and_exports(converted)
    found: list[Row] = []
    for mode in MODES:
        with in_mode(mode):
            found.append(inference(dense, converted, mode, options.batch, options.arch))
    found += training(dense, converted, options.batch, options.arch)
    for row in found:
        print(row)
    recipe.keep(options, found)


if __name__ == "__main__":
    recipe.main(main)
