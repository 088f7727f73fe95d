"""A captured graph on the CPU: who waits for whom, and what is read or overwritten without a wait for whoever wrote or reads it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from flysurgery.gpu import branch
from flysurgery.ops import patches, training


class Stream:
    """Stands in for a stream of CUDA; ``behind`` are the numbers of the operations that its next one waits for."""

    device_index = 0

    def __init__(self, cuda_stream: int) -> None:
        self.cuda_stream, self.captures, self.behind = cuda_stream, False, set[int]()

    def wait_stream(self, other: Stream) -> None:
        self.behind |= other.behind
        self.captures |= other.captures


class Capture(TorchDispatchMode):
    """A block whose operations are captured, on ``current`` streams; ``races`` are those that do not wait for what they need.

    Streams stay the same from one block to the next, and begin at rest.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.main = self.current = Stream(0)
        self.races, self._count = list[str](), 0
        self.streams = [self.main]
        self._written = dict[int, int]()  # by memory: the last operation that wrote to it
        self._read = defaultdict[int, set[int]](set)  # likewise: those that have read it since
        patch.setattr(branch, "_captured", lambda device: self.current if self.main.captures else None)
        patch.setattr(branch, "_stream", lru_cache(None)(self._stream))
        patch.setattr(torch.cuda, "stream", self.on)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.current.captures)
        patch.setattr(Tensor, "record_stream", lambda *_: None)
        for module in (patches, training):
            patch.setattr(module, "is_tracing", lambda *_: False)

    def _stream(self, device_index: int, main: int, name: str) -> Stream:
        self.streams.append(Stream(len(self.streams)))
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


def _memories(tree: Any) -> set[int]:
    return {each.untyped_storage()._cdata for each in pytree.tree_leaves(tree) if isinstance(each, Tensor)}
