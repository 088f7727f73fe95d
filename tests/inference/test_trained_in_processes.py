"""A model that is optimized for training in two processes: wrapped by DistributedDataParallel, and sharded by FSDP2."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.processes import launch

PROGRAM = """
import copy, json
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import flysurgery
from flysurgery import ops
from flysurgery.inference import clock
from tests.inference.test_training import distance, gradients, images, learning
dist.init_process_group("gloo")
clock.medians_ms = lambda ways, inputs, **_: (2.0, 1.0)
rank, ran, seen, own = dist.get_rank(), [], {}, ops.trained
optimized, joined = learning(convert=True), learning(convert=True).double()
x = images(optimized, 4)
flysurgery.optimize(optimized, x, training=True)
x = x.double()
expected = gradients(joined, x)
ops.trained = lambda x, operation: ran.append(1) or own(x, operation)
for kind in ("wrapped", "sharded"):
    model = copy.deepcopy(optimized).double()
    if kind == "wrapped":
        model = DistributedDataParallel(model)
    else:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    ran.clear()
    for _ in range(2):
        gradients(model, x.chunk(2)[rank])
    means = [getattr(each.grad, "full_tensor", lambda: each.grad)() for each in model.parameters()]
    found = dict(zip(expected, [expected["result"], *(2 * mean for mean in means)], strict=True))
    seen[kind] = [max(distance(found, expected).values()), len(ran)]
    flysurgery.restore(model)
    try:
        flysurgery.optimize(model, x, training=True)
    except flysurgery.errors.InferenceError as error:
        seen[kind].append(str(error))
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(seen))
"""


def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    done = launch(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {kind: said for kind, (_, _, said) in seen.items()} == {
        "wrapped": "DistributedDataParallel cannot be traced; optimize the model in it, its module",
        "sharded": "the model's parameters are sharded already; optimize the model first, and shard it then",
    }
    for error, ran, _ in seen.values():
        assert error < 1e-10 and ran == 12  # two passes of six operations
