"""A reconstruction in two processes: one start, one schedule, one result, and views of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.processes import launch

FIT = """
import json, sys, torch
from torch import distributed as dist
from flysurgery.calibration import Samples
from flysurgery.fidelity import Settings, reconstruct, reconstruction, step
from flysurgery.fidelity.processes import Processes
from tests.fidelity.test_reconstruct import images, pair
kind, device = sys.argv[1], torch.device("cpu")
dist.init_process_group("gloo")
rank = dist.get_rank()
with Processes(torch.device("cpu")) as processes:
    tensors = [torch.full((2, 3), 1.0 + rank).T, torch.arange(4.0) * (1 + 2 * rank)]
    processes.average(tensors)
    shared = [torch.full((2,), float(rank), requires_grad=True), torch.full((3,), 5.0 + rank, dtype=torch.float64)]
    processes.share(shared)
    seen = [each.tolist() for each in (*tensors, *shared)], processes.agreed({"rank": rank}), processes.count
    try:
        processes.share([torch.zeros(2 + rank)])
        said = None
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
if kind == "cuda":
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
student, teacher, cuts = pair()
with torch.no_grad():
    student.blocks[0].attn.proj.weight.mul_(1 + rank)  # the first process's start is what counts
drawn, views, affordable = [], step.views, reconstruction._affordable
def recorded(pictures, chosen, varied):
    if chosen.device.type == "cpu":
        drawn.append(chosen.tolist())
    return views(pictures, chosen, varied)
step.views = recorded
reconstruction._affordable = lambda *given: affordable(*given) * 0 + 40 + rank  # two counts, of which the first process's holds
student, teacher = student.to(device), teacher.to(device)
done = reconstruct(student, teacher, Samples(images(40)), cuts, Settings(minutes=60, batch=8))
whole = torch.cat([each.detach().flatten() for each in student.parameters()]).double().cpu()
mine = {"whole": whole.tolist()[::97], "sum": float(whole.abs().sum()), "history": done.history, "updates": done.updates, "drawn": drawn}
both = [None, None]
dist.all_gather_object(both, mine | {"batch": done.batch, "kept": done.kept, "seen": seen, "said": said})
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(both))
"""


def fitted(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What each of the two processes found, which is one result, closer than the start."""
    done = launch(folder, FIT, kind)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = json.loads(done.stdout.splitlines()[-1])
    same = ("whole", "sum", "history", "updates", "batch", "kept", "seen", "said")
    assert [first[name] for name in same] == [second[name] for name in same]
    assert first["updates"] == 40 and first["batch"] == 16 and first["kept"] > 0
    errors = dict(first["history"])
    assert errors[first["kept"]] == min(errors.values()) < errors[0]
    return [first, second]


def test_two_processes_have_one_mean_one_start_and_one_model_from_views_of_their_own(tmp_path: Path) -> None:
    first, second = fitted(tmp_path, "cpu")
    assert len(first["drawn"]) == len(second["drawn"]) and first["drawn"] != second["drawn"]
    tensors, agreed, count = first["seen"]
    assert tensors == [[[1.5, 1.5]] * 3, [0.0, 2.0, 4.0, 6.0], [0.0, 0.0], [5.0, 5.0, 5.0]] and agreed == {"rank": 0} and count == 2
    assert first["said"].startswith("SurgeryError: the processes converted the model by different plans, so they cannot fit it together")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two CUDA devices, and PyTorch finds {torch.cuda.device_count()}")
def test_two_gpus_end_with_one_model(tmp_path: Path) -> None:
    fitted(tmp_path, "cuda")
