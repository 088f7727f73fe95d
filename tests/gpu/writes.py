"""Writes to a weight, which whoever keeps something made of it has to notice: of each way by which parameters are trained or filled."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from flysurgery.gpu.graph_branch import begin_ahead, know
from flysurgery.gpu.uncounted_writes import doubt_trained
from flysurgery.gpu.weight_cache import forget_derived

Use = Callable[[], object]
"""Packs the weight."""
CPU = torch.device("cpu")


def unseen(weight: nn.Parameter) -> None:
    weight.data.sub_(1.0)


def uncounted(weight: nn.Parameter) -> None:
    """As FSDP2 fills the memory of a whole parameter again."""
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):  # pyright: ignore[reportPrivateImportUsage]
        weight.mul_(2.0)


@torch.no_grad()
def fused_sgd(weight: nn.Parameter) -> None:
    settings = {"weight_decay": 0.0, "momentum": 0.0, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False}
    torch._fused_sgd_([weight], [torch.ones_like(weight)], [], is_first_step=True, **settings)  # pyright: ignore


class Hidden(torch.optim.Optimizer):
    """Writes through ``data``, as kernels of other libraries do, and calls what packs the weight before the step has ended."""

    def __init__(self, weight: nn.Parameter, use: Use) -> None:
        super().__init__([weight], {})
        self.use = use

    def step(self, closure: object = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for _ in range(2):
            self.use()
            unseen(self.param_groups[0]["params"][0])
        self.use()


def stepped(make: Callable[..., torch.optim.Optimizer], weight: nn.Parameter, use: Use, compiled: bool = False, **settings: bool) -> None:
    optimizer = make([weight], 0.1, **settings)
    (torch.compile(optimizer.step, backend="aot_eager") if compiled else optimizer.step)()


def own_hook(weight: nn.Parameter, use: Use, closure: bool = False) -> None:
    optimizer = torch.optim.SGD([weight], 0.1, fused=True)
    optimizer.register_step_post_hook(lambda *_: use())
    optimizer.step((lambda: use() or 0.0) if closure else None)  # pyright: ignore


def between_frozen_calls(weight: nn.Parameter, use: Use, thawed: bool) -> None:
    forget_derived()
    weight.requires_grad_(False)
    use()
    torch.optim.SGD([weight.requires_grad_(thawed)], 0.1, fused=True).step()
    weight.requires_grad_(False)


def behind_a_backward_pass(write: Callable[[nn.Parameter], object], weight: nn.Parameter, use: Use) -> None:
    doubt_trained([weight])
    write(weight)


def other_memory(weight: nn.Parameter, use: Use) -> None:
    weight.data = weight.data * 2.0


def filled_after_a_step(weight: nn.Parameter, use: Use) -> None:
    """FSDP2: the optimizer has a part of each parameter, and what layers read is filled from all parts."""
    part = nn.Parameter(torch.ones(3))
    part.grad = torch.ones(3)
    torch.optim.SGD([part], 0.1).step()
    uncounted(weight)


def part_of_larger_memory(weight: nn.Parameter, use: Use) -> None:
    """As FSDP1 and DeepSpeed lay parameters; the version of a part is its own."""
    flat = torch.cat([weight.detach().flatten(), weight.detach().flatten()])
    weight.data = flat[: weight.numel()].view_as(weight)
    know((weight,))
    begin_ahead(CPU)
    use()
    flat.mul_(2.0)


def forgotten(weight: nn.Parameter, use: Use) -> None:
    unseen(weight)
    forget_derived()


WRITES: dict[str, Callable[[nn.Parameter, Use], Any]] = {
    "in place": lambda weight, use: weight.detach().mul_(2.0),
    "to a view": lambda weight, use: weight.detach()[:2].mul_(2.0),
    "SGD": partial(stepped, torch.optim.SGD),
    "foreach AdamW": partial(stepped, torch.optim.AdamW, foreach=True),
    "fused AdamW": partial(stepped, torch.optim.AdamW, fused=True),
    "optimizer that writes through data": lambda weight, use: Hidden(weight, use).step(),
    "own hook of a fused optimizer": own_hook,
    "closure and own hook of a fused optimizer": partial(own_hook, closure=True),
    "fused step between frozen calls": partial(between_frozen_calls, thawed=True),
    "fused step on a frozen weight": partial(between_frozen_calls, thawed=False),
    "through data behind a backward pass": partial(behind_a_backward_pass, unseen),
    "_fused_sgd_ behind a backward pass": partial(behind_a_backward_pass, fused_sgd),
    "through data, then forgotten": forgotten,
    "_fused_sgd_, then forgotten": lambda weight, use: (fused_sgd(weight), forget_derived()),
    "swapped": lambda weight, use: torch.utils.swap_tensors(weight, nn.Parameter(weight.detach() * 2.0)),
    "other memory": other_memory,
    "memory filled after a step": filled_after_a_step,
    "part of a larger memory": part_of_larger_memory,
}
