"""Figure 7 of Gonon et al. 2024 on this machine: joules of a call, one factor by every implementation, and a whole ViT-S/16.

    python recipes/energy.py --out recipes/results/energy_h200.csv --plot recipes/results/energy_h200.png

Energy is read from NVML's counter of the whole device, between two of its steps at least a second apart, with graphs replayed all the
time; idle power is measured at the start and noted in each row. The candidates of a model come in a shuffled order, dense twice among
them, and those of a pattern in one layout likewise, bmm twice; where these two differ by more than 3 %, all rows beside them say noisy.
``bound_ms`` is what a large copy and a large matrix product, measured in the same run, allow for a call, which takes ``call_ms``. Patterns
come in one shuffled order, so that runs that go on add to a random subset.
Needs an NVIDIA GPU and nvidia-ml-py, and says so elsewhere; with --quick on a CPU, rows have times and no joules.
"""

from __future__ import annotations

import time
from functools import cache, partial
from statistics import median

import recipe

from flysurgery.bench import (
    EnergyMeter,
    EnergyRow,
    Meter,
    NoMeter,
    draw_boxes,
    energy_boxes,
    energy_of_factor,
    energy_of_model,
    measure_ceilings,
)
from flysurgery.bench.paper_patterns import ROWS, energy_patterns, shuffled

QUICK_LARGEST = 1024
"""Features in and out of the patterns that a CPU takes."""

COLUMNS = (
    *("what", "mode", "layout", "candidate", "joules", "above_idle_joules", "watts", "idle_watts"),
    *("call_ms", "share_of_bound", "noise", "status"),
)


def main() -> None:
    """Measure for as long as told, print, draw."""
    parser = recipe.arguments(__doc__, modes="fp32")
    recipe.add_patterns(parser, "60 by default, 2 with --quick")
    parser.add_argument("--windows", type=recipe.count, default=3)
    parser.add_argument("--model", default=recipe.VIT_S)
    parser.add_argument("--batch", type=recipe.count, help="images a forward, 128 by default")
    parser.add_argument("--optimized", action="store_true", help="the model as flysurgery.optimize makes it too, and dense optimized")
    options = parser.parse_args()
    device, modes = recipe.device_and_modes(options)
    rows = options.rows or recipe.images(options, device) * (ROWS // 128)
    quickly = options.quick and device.type == "cpu"
    if device.type == "cpu" and not quickly:
        raise SystemExit("energy is read from an NVIDIA GPU's counter, and the device is cpu; --quick times calls without it, on few rows")
    meter: Meter = NoMeter() if quickly else EnergyMeter(device)
    batch = options.batch or recipe.images(options, device)
    end = time.monotonic() + 60 * options.minutes
    how = {"seconds": 0.1 if quickly else 1.0, "windows": 2 if options.quick else options.windows, "idle_watts": meter.idle_watts()}
    patterns = [each for each in shuffled(energy_patterns(), options.seed) if not quickly or max(each.shape) <= QUICK_LARGEST]
    patterns = patterns[: options.count or (2 if options.quick else 60)]
    ceilings = cache(partial(measure_ceilings, device=device, quick=options.quick))
    with recipe.start(options, device, EnergyRow) as run:
        for mode in modes:
            names = ("dense", "layer", "bmm", *(("dense, optimized", "layer, optimized") if options.optimized else ()))
            head = {"what": options.model, "rows": batch, "mode": mode}
            if not all(run.has(head | {"candidate": name}) for name in names):
                what = options.model, {}, "gonon", batch
                found = energy_of_model(meter, *what, mode, device, ceilings(mode), candidates=names, **how)
                run.add(found, options.model)
        for pattern, mode in ((each, mode) for each in patterns for mode in modes):
            if run.has({"what": str(pattern), "rows": rows, "mode": mode}):
                continue
            if time.monotonic() > end:
                print("the time is over; the next run goes on", flush=True)
                break
            run.add(energy_of_factor(meter, pattern, rows, mode, device, ceilings(mode), **how), f"{pattern} {mode}")
    recipe.show(run, COLUMNS)
    boxes, ratios = energy_boxes(run.records)
    if ratios:
        share = sum(ratio < 1 for ratio in ratios) / len(ratios)
        print(f"energy of cuda over the least of bmm, einsum, bsr: median {median(ratios):.2f}, below 1 on {share:.0%} of {len(ratios)}")
        print("Gonon et al. report a median of 0.85, and 72 %, on a V100")
    if options.plot is not None and run.records:
        panel = ("d(b+c)/(bc)", "energy of cuda / least of bmm, einsum, bsr", boxes)
        draw_boxes({"Figure 7": panel}, options.plot, title=f"{run.records[0]['device']}, {', '.join(modes)}")


if __name__ == "__main__":
    recipe.main(main)
