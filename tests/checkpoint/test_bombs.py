"""Folders of some kilobytes that ask for gigabytes or minutes: refused within a second and 200 MB more than a valid folder takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.bombs import BOMBS, make_bombs
from tests.checkpoint.conftest import need_recorded_arguments

SECONDS = 1.0
MEMORY_BYTES = 200 << 20

LOAD_ALL = """
import json, resource, sys, time
from pathlib import Path
import flysurgery
from flysurgery.errors import CheckpointError

def taken():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

folders, room = json.loads(sys.argv[1]), int(sys.argv[2])
for valid, _ in folders:
    flysurgery.load(valid)
resource.setrlimit(resource.RLIMIT_AS, (taken() + room, resource.RLIM_INFINITY))
for valid, folder in folders:
    before = time.process_time()
    try:
        flysurgery.load(folder)
        outcome = "loaded"
    except CheckpointError as error:
        outcome = "refused", str(error)
    except BaseException as error:
        outcome = type(error).__name__, str(error)[:300]
    print(json.dumps([outcome, time.process_time() - before]), flush=True)
"""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What loading each bomb gave in a process whose memory is limited, and its seconds of computing."""
    need_recorded_arguments()
    if not Path("/proc/self/statm").exists():
        pytest.skip("only Linux says how much memory a process has reserved")
    folders = json.dumps([[str(valid), str(bomb)] for valid, bomb in make_bombs(tmp_path_factory.mktemp("bombs"))])
    done = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, folders, str(MEMORY_BYTES)], capture_output=True, text=True, timeout=120, check=False
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) == len(BOMBS), done.stderr[-2000:]
    return lines


@pytest.mark.parametrize("number", range(len(BOMBS)), ids=[f"{base}-{changes}" for base, changes in BOMBS])
def test_bomb(number: int, outcomes: list[Any]) -> None:
    (outcome, message), seconds = outcomes[number]
    assert outcome == "refused", (outcome, message)
    assert "\n" not in message and len(message) <= 400, message
    assert seconds <= SECONDS, (seconds, message)
