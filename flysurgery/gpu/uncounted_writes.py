"""Whether parameters may have been written to without PyTorch's counting it, by an optimizer or by whoever trains without one."""

from collections.abc import Sequence
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class _Moments:
    """When such writes were last possible, on a clock that counts the occasions."""

    now = 0
    steps = 0  # of any optimizer: its parameters may be others than those that it writes to in the end, as with FSDP2
    stepping = False
    forgotten = 0
    written: ClassVar[dict[int, int]] = {}  # by the id of a parameter that an optimizer had
    held: ClassVar[WeakKeyDictionary[Optimizer, set[int]]] = WeakKeyDictionary()  # the ids of the parameters that one has


def _tick() -> int:
    _Moments.now += 1
    return _Moments.now


def moment() -> int:
    """The last occasion of such writes: a number that another one replaces, at each call while an optimizer makes a step."""
    return _tick() if _Moments.stepping else _Moments.now


class Trust:
    """What is known about parameters when something is derived from them.

    In doubt are parameters that an optimizer has, after each of its steps; those that require gradients, after each step of any
    optimizer, and during it; and all after ``doubt``. Without such an occasion, ``holds`` costs a tenth of a microsecond.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._now, self._marks = _Moments.now, _marks(parameters)

    def holds(self, parameters: Sequence[Tensor]) -> bool:
        """Whether these, the same as before, are beyond doubt."""
        if self._now != _Moments.now:
            if self._marks != _marks(parameters):
                return False
            self._now = _Moments.now
        return True


def _marks(parameters: Sequence[Tensor]) -> list[object]:
    trains = any(parameter.requires_grad for parameter in parameters)
    steps = _tick() if trains and _Moments.stepping else _Moments.steps  # unlike any other during a step
    return [_Moments.forgotten, steps if trains else None, *map(_Moments.written.get, map(id, parameters))]


def doubt() -> None:
    """Let everything that was derived from parameters be made again at its next use, and all calls be recorded again."""
    _Moments.forgotten = _tick()


def doubt_trained(parameters: Sequence[Tensor]) -> None:
    """Note that these got gradients. Unless an optimizer has them, and has made a step, they are written to by hand."""
    ids = {*map(id, parameters)}
    if not any(held >= ids for held in _Moments.held.values()):
        _Moments.steps = _tick()


def _note_step(optimizer: Optimizer, stepping: bool) -> None:
    """Before and after a step: an optimizer's own hooks, which come between, may run the model.

    Not where a compiler traces the step, whose graph ``_mark_step`` would break, and PyTorch counts what the optimizer writes.
    """
    if not torch.compiler.is_compiling() or any(group.get("fused") for group in optimizer.param_groups):
        _mark_step(optimizer, stepping)  # pyright: ignore[reportCallIssue] - the decorator's annotation


@torch.compiler.disable
def _mark_step(optimizer: Optimizer, stepping: bool) -> None:
    _Moments.stepping = stepping
    ids = _Moments.held[optimizer] = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    _Moments.steps = _tick()
    _Moments.written.update(dict.fromkeys(ids, _Moments.now))


register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: _note_step(optimizer, True))
register_optimizer_step_post_hook(lambda optimizer, args, kwargs: _note_step(optimizer, False))
