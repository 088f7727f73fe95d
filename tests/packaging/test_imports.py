"""What importing costs, and which room may import which."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

MEASURE = """
import json, sys, time
started = time.perf_counter()
import torch, timm
between = time.perf_counter()
import flysurgery
ended = time.perf_counter()
heavy = sorted({"scipy", "sklearn", "matplotlib", "pandas", "cuda.core", "rich.table", "typer"} & set(sys.modules))
registered = timm.is_model("flysurgery_structured")
print(json.dumps({"before": between - started, "added": ended - between, "registered": registered, "heavy": heavy}))
"""


def measured() -> dict:
    return json.loads(subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True).stdout)


def test_importing_adds_little_to_torch_and_timm_and_registers_the_entry_point() -> None:
    """The aim is 0.3 s on a machine that needs 2 s or more for the two; a ratio, and a second and third try, as clocks are noisy."""
    for _ in range(3):
        run = measured()
        assert run["registered"] and run["heavy"] == []
        if run["added"] < max(0.3, 0.25 * run["before"]):
            return
    raise AssertionError(f"importing adds {run['added']:.2f} s to {run['before']:.2f} s")


def test_the_rooms_import_downwards_only() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


LATER = """
import sys
import flysurgery
light = not {"torch", "timm", "numpy"} & set(sys.modules)
import timm
print(light, timm.is_model("flysurgery_structured"), "flysurgery.checkpoint" in sys.modules)
print(flysurgery.plan.__module__, flysurgery.ops.__name__)
try:
    flysurgery.nonsense
except AttributeError as error:
    print(error)
"""


def test_rooms_are_imported_when_they_are_asked_for() -> None:
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=True)
    first, second, third = done.stdout.splitlines()
    assert (first, second) == ("True True False", "flysurgery.surgery.planning flysurgery.ops")
    assert third == "module 'flysurgery' has no attribute 'nonsense'"
