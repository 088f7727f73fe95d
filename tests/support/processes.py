"""Two processes of one program, as ``torchrun`` starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])


def launch(folder: Path, program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run ``program`` in two processes with ``folder`` as their working directory, where it lies as ``program.py`` then."""
    (folder / "program.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py", *map(str, arguments)]
    with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as launcher:
        try:
            out, err = launcher.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            launcher.terminate()  # by which it ends the processes that it started; a kill would leave them
            raise
    return subprocess.CompletedProcess(command, launcher.returncode, out, err)
