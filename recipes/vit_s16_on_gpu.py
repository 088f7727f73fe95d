"""A converted ViT-S/16 on a CUDA device: that it is right, trains, compiles and exports, and what it costs against dense.

``python recipes/vit_s16_on_gpu.py --arch gonon --out recipes/results/vit_s16_gonon_h200.csv``

Random weights: nothing here depends on their values. Inference is timed by CUDA graphs over rotating inputs. A training step
(forward, backward, fused AdamW) is timed eagerly with a look at each loss, eagerly with the next step behind it, and in a CUDA graph:
what the host takes shows in the first, and in the second where it takes longer than the device. All beside dense in the same
run, steps by turns in shuffled order. The error is that of the converted model's features against the same model in float64.
``bound_us`` is what a large copy and a large matrix product, measured in the same run, allow the converted model. With --quick nothing is
compiled or exported, and on a CPU the model has one block.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import recipe
import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.bench import MODES, Measured, Record, Timing, noise_of, status_of
from flysurgery.bench.training import work_of_step
from flysurgery.bench.variants import by_definition
from flysurgery.bench.work import work_of
from flysurgery.layers import ButterflyLinear
from flysurgery.ops import Problem, explain

DEPTH = 12
TRAINING = "training step"
_STEPS = 10


@dataclass(frozen=True)
class Row:
    """One measurement of the whole model, milliseconds; ``error`` is relative, in the Frobenius norm."""

    arch: str
    mode: str
    batch: int
    what: str
    dense_ms: float | None
    converted_ms: float | None
    ratio_to_dense: float | None
    error: float | None
    dense_error: float | None
    backends: str
    judged: recipe.Judged


@dataclass(frozen=True)
class Models:
    """A dense model and the same converted."""

    dense: nn.Module
    converted: nn.Module


def inference(table: recipe.Table, models: Models, arch: str, mode: str, batch: int, what: str) -> list[Row]:
    """Time one forward pass of each model in a CUDA graph, and hold both against float64."""
    dtype = MODES[mode]
    x = torch.randn(batch, 3, 224, 224, device=table.device).to(dtype)
    runs = {name: copy.deepcopy(model).eval().requires_grad_(False).to(dtype) for name, model in vars(models).items()}
    checked = range(min(8, batch))
    with torch.inference_mode():
        truths = {name: copy.deepcopy(model).double()(x[list(checked)].double()) for name, model in runs.items()}
    works = {name: work_of(by_definition(model), x) for name, model in runs.items()}
    found = table.measure(mode, runs, x, truths, works, worst=16, rows=checked)
    layers = [module for module in runs["converted"].modules() if isinstance(module, ButterflyLinear)]
    problems = [Problem(each.architecture, batch * 197, dtype, table.device.type, bias=True, allow_tf32=mode == "tf32") for each in layers]
    backends = "+".join(sorted({str(explain(problem).choice) for problem in problems}))
    dense, converted = found["dense"], found["converted"]
    _, ratio, judged = recipe.cells(converted, dense)
    return [Row(arch, mode, batch, what, dense.median_ms, converted.median_ms, ratio, converted.error, dense.error, backends, judged)]


def training(table: recipe.Table, models: Models, arch: str, mode: str, batch: int, what: str) -> list[Row]:
    """Time a training step of each model under bfloat16 autocast, in three ways, the models by turns: a host's pace changes."""
    trained = {name: _Training(model, batch, table.device) for name, model in vars(models).items()}
    works = {name: model.work for name, model in trained.items()}
    trained["dense again"] = trained["dense"]
    ways: list[tuple[str, Callable[[_Training], object] | str, int, int]] = [
        (what, lambda model: float(model.step()), 1, 20),
        (f"{what}, {_STEPS} on end", lambda model: [model.step() for _ in range(_STEPS)], _STEPS, 7),
        (f"{what}, CUDA graph", (lambda model: model.replay()) if table.on_cuda else recipe.NEEDS_CUDA, 1, 10),
    ]
    rows, shuffle = [], random.Random(table.options.seed).sample
    for label, run, steps, rounds in ways:
        if isinstance(run, str):
            rows.append(Row(arch, mode, batch, label, None, None, None, None, None, "", recipe.cells(Measured("graph", run))[-1]))
            continue
        count = max(1, rounds // 10) if table.options.quick else rounds
        times: dict[str, list[float]] = {name: [] for name in trained}
        for _ in range(count):
            for name in shuffle(list(trained), len(trained)):
                times[name].append(_timed(partial(run, trained[name]), table.device) / steps)
        medians = {name: statistics.median(own) for name, own in times.items()}
        noise = noise_of({name: Timing(ms, ms, ms) for name, ms in medians.items()})
        before, after, work = medians["dense"], medians["converted"], works["converted"]
        bound = table.ceilings(mode).bound_ms(work)
        status = status_of(noise, table.device.type)
        judged = recipe.Judged(work.bytes_moved, work.flops, 1e3 * bound, bound / after, noise, status)
        rows.append(Row(arch, mode, batch, label, before, after, after / before, None, None, "", judged))
    for name in ("dense", "converted"):
        trained[name].check()
    return rows


class _Training:
    """A model trained on one batch, whose loss must fall, and on CUDA one step of it as a graph."""

    def __init__(self, model: nn.Module, batch: int, device: torch.device) -> None:
        on_cuda = device.type == "cuda"
        trained = copy.deepcopy(model).train().requires_grad_(True)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, fused=True, capturable=on_cuda)
        x = torch.randn(batch, 3, 224, 224, device=device)
        target = torch.randint(0, 1000, (batch,), device=device)
        self.work = work_of_step(by_definition(trained), x, target)
        self.step = partial(step, trained, optimizer, x, target)
        self._losses = [float(self.step()) for _ in range(8)]
        self._graph = torch.cuda.CUDAGraph() if on_cuda else None
        if self._graph is not None:
            with torch.cuda.graph(self._graph):
                self._loss = self.step()

    def replay(self) -> None:
        """One step, as a graph."""
        assert self._graph is not None
        self._graph.replay()

    def check(self) -> None:
        """See that the loss has fallen, in steps called one by one and in those of the graph."""
        _must_fall([self._losses[0], float(self.step())])
        if self._graph is not None:
            self.replay()
            _must_fall([self._losses[0], float(self._loss)])


def _must_fall(losses: list[float]) -> None:
    if not losses[-1] < losses[0]:
        raise SystemExit(f"the loss did not fall: {losses[0]:.3f} to {losses[-1]:.3f}")


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor) -> Tensor:
    """One step; gives the loss before it."""
    optimizer.zero_grad(set_to_none=True)
    capturing = x.is_cuda and torch.cuda.is_current_stream_capturing()
    with torch.autocast(x.device.type, torch.bfloat16, cache_enabled=not capturing):
        loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
    return loss.detach()


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one run."""
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


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


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars for inference and each way to train, a picture for each architecture."""
    recipe.draw(plot, records, group=("what",), series="mode", by="arch")


def main() -> None:
    """Measure, print and write."""
    parser = recipe.arguments(__doc__, modes="all", seconds=2.0)
    parser.add_argument("--arch", default="gonon", help="monarch or gonon")
    parser.add_argument("--batch", type=recipe.count, help="images a forward, 128 by default")
    table = recipe.table_of(parser)
    options = table.options
    depth = 1 if options.quick and not table.on_cuda else DEPTH
    torch.manual_seed(options.seed)
    dense = timm.create_model(recipe.VIT_S, pretrained=False, depth=depth).to(table.device)
    converted = copy.deepcopy(dense)
    flysurgery.convert(converted, arch=options.arch)
    if not options.quick:
        compiles_and_exports(converted)
    models = Models(dense, converted)
    whats = [each if depth == DEPTH else f"{each}, {depth} block" for each in ("inference", TRAINING)]
    head = {"arch": options.arch, "batch": options.batch or recipe.images(options, table.device)}
    cases = [head | {"mode": mode, "what": whats[0]} for mode in table.modes] + [head | {"mode": "bf16", "what": whats[1]}]

    def rows_of(table: recipe.Table, **case: Any) -> list[Row]:
        return (inference if case["what"] == whats[0] else training)(table, models, **case)

    table.make(Row, cases, rows_of, draw)


if __name__ == "__main__":
    recipe.main(main)
