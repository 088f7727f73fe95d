"""A reconstruction in two processes: one start, one schedule, one result, and views of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flysurgery.fidelity.processes import Processes
from tests.support.processes import launch

TENSORS = """
import json, torch
from torch import distributed as dist
from flysurgery.fidelity.processes import Processes
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
    both = [None, None]
    dist.all_gather_object(both, (seen, said))
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(both))
"""

FIT = """
import json, sys, torch
from torch import distributed as dist
from flysurgery.calibration import Samples
from flysurgery.fidelity import Settings, reconstruct, reconstruction, step
from tests.fidelity.test_reconstruct import images, pair
kind, device = sys.argv[1], torch.device("cpu")
dist.init_process_group("gloo")
rank = dist.get_rank()
if kind == "cuda":
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
student, teacher, cuts = pair()
with torch.no_grad():
    student.blocks[0].attn.proj.weight.mul_(1 + rank)  # the first process's start is what counts
drawn, views, affordable = [], step.views, reconstruction._affordable
def recorded(pictures, chosen, **options):
    if chosen.device.type == "cpu":
        drawn.append(chosen.tolist())
    return views(pictures, chosen, **options)
step.views = recorded
reconstruction._affordable = lambda *given: affordable(*given) * 0 + 40 + rank  # two counts, of which the first process's holds
student, teacher = student.to(device), teacher.to(device)
done = reconstruct(student, teacher, Samples(images(40)), cuts, Settings(minutes=60, batch=8))
whole = torch.cat([each.detach().flatten() for each in student.parameters()]).double().cpu()
mine = {"whole": whole.tolist()[::97], "sum": float(whole.abs().sum()), "history": done.history, "updates": done.updates, "drawn": drawn}
both = [None, None]
dist.all_gather_object(both, mine | {"batch": done.batch, "kept": done.kept})
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(both))
"""


def printed(folder: Path, program: str, *arguments: object) -> list[Any]:
    """What each of the two processes found."""
    done = launch(folder, program, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def check_together(first: dict[str, Any], second: dict[str, Any]) -> None:
    """One result, which is closer than the start."""
    same = ("whole", "sum", "history", "updates", "batch", "kept")
    assert [first[name] for name in same] == [second[name] for name in same]
    assert first["updates"] == 40 and first["batch"] == 16 and first["kept"] > 0
    errors = dict(first["history"])
    assert errors[first["kept"]] == min(errors.values()) < errors[0]


def test_alone_nothing_is_changed() -> None:
    tensor = torch.arange(3.0)
    with Processes(torch.device("cpu")) as alone:
        alone.average([tensor])
        alone.share([tensor])
        assert alone.agreed(tensor) is tensor
    assert tensor.tolist() == [0.0, 1.0, 2.0] and (alone.count, alone.rank) == (1, 0)


def test_two_processes_have_one_mean_one_start_and_one_mind(tmp_path: Path) -> None:
    first, second = printed(tmp_path, TENSORS)
    assert first == second
    (tensors, agreed, count), said = first
    assert tensors[0] == [[1.5, 1.5]] * 3 and tensors[1] == [0.0, 2.0, 4.0, 6.0]
    assert tensors[2:] == [[0.0, 0.0], [5.0, 5.0, 5.0]] and agreed == {"rank": 0} and count == 2
    assert (
        said == "SurgeryError: the processes converted the model by different plans, so they cannot fit it together; give all of them one"
    )


def test_two_processes_end_with_one_model_from_views_of_their_own(tmp_path: Path) -> None:
    first, second = printed(tmp_path, FIT, "cpu")
    check_together(first, second)
    assert len(first["drawn"]) == len(second["drawn"]) and first["drawn"] != second["drawn"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason=f"needs two CUDA devices, and PyTorch finds {torch.cuda.device_count()}")
def test_two_gpus_end_with_one_model(tmp_path: Path) -> None:
    check_together(*printed(tmp_path, FIT, "cuda"))
