"""A captured graph on the CPU: who waits for whom, and what is read or overwritten without a wait for whoever wrote or reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from flysurgery.gpu import graph_branch
from flysurgery.ops import patch_embedding, training


class Stream:
    """Stands in for a stream of CUDA; ``behind`` are the numbers of the operations that its next one waits for."""

    def __init__(self) -> None:
        self.captures, self.behind = False, set[int]()

    def wait_stream(self, other: Stream) -> None:
        self.behind |= other.behind
        self.captures |= other.captures


class Capture(TorchDispatchMode):
    """A block whose operations are captured, on ``current`` streams; ``races`` are those that do not wait for what they need.

    Streams stay the same from one block to the next, and begin at rest.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.main = self.current = Stream()
        self.races, self._count = list[str](), 0
        self.streams = [self.main]
        self._references = list[StorageWeakRef]()  # so that no other memory gets the same number
        self._written = dict[int, int]()  # by memory: the last operation that wrote to it
        self._read = defaultdict[int, set[int]](set)  # likewise: those that have read it since
        patch.setattr(graph_branch, "_captured", lambda device: self.current if self.main.captures else None)
        patch.setattr(graph_branch, "_side_of", lru_cache(None)(self._side_of))
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current.captures)
        patch.setattr(Tensor, "record_stream", lambda *_: None)
        for module in (patch_embedding, training):
            patch.setattr(module, "is_tracing", lambda *_: False)

    def _side_of(self, main: Stream, name: str) -> Stream:
        self.streams.append(Stream())
        return self.streams[-1]

    def __enter__(self) -> Capture:
        self.main.captures = True
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for stream in self.streams:
            stream.captures, stream.behind = False, set()
        self._written.clear()
        self._read.clear()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, named = _memories((args, kwargs)), kwargs or {}
        schema = enumerate(func._schema.arguments)
        changed = _memories([args[n] if n < len(args) else named.get(each.name) for n, each in schema if each.is_write])
        result = func(*args, **named)
        self._references += [StorageWeakRef(each.untyped_storage()) for each in _tensors(result)]
        made = _memories(result) - given
        if made or changed:  # it is no view
            self._note(str(func), given, changed, made)
        return result

    def _note(self, name: str, given: set[int], changed: set[int], made: set[int]) -> None:
        needed = {self._written[memory] for memory in given if memory in self._written}
        needed = needed.union(*(self._read[memory] for memory in changed))
        if not needed <= self.current.behind:
            self.races.append(name)
        self._count += 1
        self.current.behind.add(self._count)
        for memory in given:
            self._read[memory].add(self._count)
        for memory in changed | made:
            self._written[memory], self._read[memory] = self._count, set()


def races_of_steps(step: Callable[[], None], patch: pytest.MonkeyPatch) -> list[str]:
    """What does not wait for what it needs in two captured steps, behind one that is not captured."""
    step()
    with Capture(patch) as captured:
        step()
        step()
    return captured.races


def take_hidden_units(patch: pytest.MonkeyPatch) -> None:
    """Let the kernel of hidden units take every feed-forward block: one that reads what it reads, and gives zeros."""

    def run(x: Tensor, dy: Tensor, image: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor, ...]:
        zero = sum(each.sum() for each in (x, dy, image, bias) if each is not None) * 0
        return tuple(x.new_zeros(rows, image.shape[0] * 128) + zero for rows in (len(x), len(x), 1))

    patch.setattr(training, "hidden_gradient_takes", lambda *_: True)
    patch.setattr(training, "run_hidden_gradient", run)


class _Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, use_reentrant: bool) -> None:
        super().__init__()
        self.block, self.use_reentrant = block, use_reentrant

    def forward(self, x: Tensor) -> object:
        return checkpoint(self.block, x, use_reentrant=self.use_reentrant, preserve_rng_state=False)


def checkpoint_each(blocks: nn.Module, use_reentrant: bool) -> None:
    """Put a checkpoint around each block, whose forward pass then is computed again in the backward pass."""
    for name, block in [*blocks.named_children()]:
        setattr(blocks, name, _Checkpointed(block, use_reentrant))


def _tensors(tree: Any) -> list[Tensor]:
    return [each for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)]


def _memories(tree: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in _tensors(tree)}
