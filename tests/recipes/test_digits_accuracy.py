"""The table of accuracies on the digits, made in processes of their own: the dense model's rows and what calibration gains."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

from tests.recipes.conftest import RECIPES


def test_rows_made_in_two_processes(tmp_path: Path) -> None:
    out = tmp_path / "rows.csv"
    options = ["--quick", "--processes", "2", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(RECIPES.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(RECIPES / "digits_accuracy.py"), *options]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    with out.open(newline="") as file:
        dense, svd, calibrated = csv.DictReader(file)
    assert [row["status"] for row in (dense, svd, calibrated)] == ["ok"] * 3
    assert dense["top1"] == "0.985" and float(svd["top1"]) < 0.97 < float(calibrated["top1"])
    for role in ("qkv", "ffn_in", "ffn_out"):
        assert float(calibrated[f"error_{role}"]) <= 0.7 * float(svd[f"error_{role}"])
