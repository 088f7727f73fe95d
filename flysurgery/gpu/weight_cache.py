"""Tensors computed from parameters, such as packed weights, kept until the parameters change or die."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import is_

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from flysurgery.gpu.kernel import may_begin_early
from flysurgery.gpu.replay.recording import forget_recordings, mark_changed, rely_on
from flysurgery.gpu.replay.remembered_calls import forget_changed_calls
from flysurgery.gpu.taken import present_taken
from flysurgery.torch_state import without_autocast

Stamp = tuple[object, ...]


@dataclass
class _Entry:
    references: tuple[weakref.ref[Tensor], ...]
    values: tuple[Tensor, ...]  # keep the memory of the sources from being reused, so that a new address means new values
    stamps: list[Stamp]  # of the sources, when the tensors were made
    tensors: tuple[Tensor, ...]
    ready: torch.cuda.Event | None
    streams: set[int] = field(default_factory=set)
    captured: bool = False


_Key = tuple[int, int, Hashable]
_entries: dict[_Key, _Entry] = {}


def derived(
    token: Hashable,
    sources: tuple[Tensor, ...],
    make: Callable[[], tuple[Tensor, ...]],
    *,
    inference: bool = False,
) -> tuple[Tensor, ...]:
    """Give ``make()``, and remember it for these sources until one of them is written to, moved, retyped or freed.

    The cache is not stored on the sources: state dicts, pickles and deep copies do not contain it. A stream waits for tensors that
    another stream made. When sources are moved or retyped, ``forget_moved`` or the next call frees the memory that was derived from
    the old ones.

    Writes that are noticed: those that change the version that PyTorch counts, those that change the address, and the steps of fused
    optimizers, which count no version, by a hook. Writes that are missed: those through ``tensor.data``, and the replay of a graph
    that trains; call ``forget_derived`` after them. Inference tensors count no versions, so the result is made at each call.

    While a CUDA graph is captured, tensors derived from sources that require gradients are made inside the graph, because
    replays must follow their training. Tensors derived from frozen sources, and in a block of ``taking`` those for ``inference`` from
    any source, are read as they are. If these sources are written to later, the next call outside the graph updates what the graph
    reads.

    Args:
        token: names what is derived, and how.
        make: must not alias the sources.
        inference: whether it is for an operator without gradients.
    """
    capturing = sources[0].is_cuda and torch.cuda.is_current_stream_capturing()
    taken = present_taken() if capturing else None
    follows = capturing and not inference and taken is None
    if capturing and any(source.is_inference() or (follows and source.requires_grad) for source in sources):
        return _make(make)
    if any(map(Tensor.is_inference, sources)):
        return _make_to_keep(make, sources[0].device)
    key = (id(sources[0]), len(sources), token)
    stamps: list[Stamp] = [(source.data_ptr(), source._version, source.dtype, source.shape, source.stride()) for source in sources]
    entry = _entries.get(key)
    same = entry is not None and all(map(is_, [reference() for reference in entry.references], sources))
    if entry is not None and same and entry.stamps == stamps:
        entry.captured = entry.captured or (capturing and taken is None)  # graphs of ``taking`` keep what they read
        _order(entry, capturing)
        rely_on(entry.tensors, sources)
        if taken is not None:
            taken.add(entry.tensors, sources)
        return entry.tensors
    if capturing:
        return _make(make)
    tensors = _make_to_keep(make, sources[0].device)
    if entry is not None and same and entry.captured:
        tensors = _refresh(entry.tensors, tensors)
    _entries[key] = _new_entry(key, sources, stamps, tensors, captured=entry is not None and same and entry.captured)
    return tensors


def forget_derived() -> None:
    """Drop all derived tensors. Call it after writes to parameters that PyTorch does not count.

    Such writes go through ``parameter.data``, or, under PyTorch 2.11, through timm's ``ModelEmaV3``.
    """
    _entries.clear()
    forget_recordings()


def forget_moved() -> None:
    """Free what was derived from sources that were moved to another device or dtype, unless a captured graph may read it.

    ``derived`` would free it at the next call, which may never come. Costs one check of every source.
    """
    for key, entry in [*_entries.items()]:  # other threads may add some
        sources = [reference() for reference in entry.references]
        stays = [source is None or source.data_ptr() == value.data_ptr() for source, value in zip(sources, entry.values, strict=True)]
        if not (entry.captured or all(stays)):
            _entries.pop(key, None)
    forget_changed_calls()


def _after_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    """Fused optimizers write to parameters without counting a version, compiled ones too."""
    if any(group.get("fused") for group in optimizer.param_groups):
        _forget_parameters(optimizer)  # pyright: ignore[reportArgumentType] - the decorator's annotation


@torch.compiler.disable  # breaks the graph of a compiled step of a fused optimizer: the cache is no part of a graph
def _forget_parameters(optimizer: torch.optim.Optimizer) -> None:
    written = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for entry in [*_entries.values()]:  # other threads may add some
        if any(id(reference()) in written for reference in entry.references):
            entry.stamps = []
    forget_recordings()


register_optimizer_step_post_hook(_after_step)


def _make(make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    mark_changed()
    with torch.inference_mode(False), torch.no_grad(), without_autocast("cuda"):
        return make()


def _make_to_keep(make: Callable[[], tuple[Tensor, ...]], device: torch.device) -> tuple[Tensor, ...]:
    """Make tensors that outlive the call, in PyTorch's general memory pool.

    Graphs of ``torch.compile`` warm up in a pool of their own, and later roll it back, even if tensors in it are still held. The
    redirection holds for one thread only, so another thread makes the tensors.
    """
    if device.type != "cuda" or not _has_compiled_graphs(device):
        return _make(make)
    mark_changed()
    caller = torch.cuda.current_stream(device)
    made: Future[tuple[Tensor, ...]] = Future()

    def work() -> None:
        try:
            with torch.cuda.device(device):
                stream = torch.cuda.current_stream()
                stream.wait_stream(caller)
                tensors = _make(make)
                caller.wait_stream(stream)
            made.set_result(tensors)
        except BaseException as error:
            made.set_exception(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    tensors = made.result()
    for tensor in tensors:
        tensor.record_stream(caller)
    return tensors


def _has_compiled_graphs(device: torch.device) -> bool:
    """Whether ``torch.compile`` has made CUDA graphs for this thread. A reset of the compiler imports their module without making any."""
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    try:
        return trees is not None and trees.get_manager(device.index, create_if_none_exists=False) is not None
    except AssertionError:  # the compiler does not know this thread
        return False


def _refresh(old: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Write new values where a captured graph reads the old ones."""
    if any(a.shape != b.shape or a.dtype != b.dtype or a.device != b.device for a, b in zip(old, new, strict=True)):
        return new
    for a, b in zip(old, new, strict=True):
        a.copy_(b)
    return old


def _new_entry(key: _Key, sources: tuple[Tensor, ...], stamps: list[Stamp], tensors: tuple[Tensor, ...], *, captured: bool) -> _Entry:
    def drop(reference: weakref.ref[Tensor]) -> None:
        entry = _entries.get(key)
        if entry is not None and any(reference is own for own in entry.references):
            _entries.pop(key, None)

    references = tuple(weakref.ref(source, drop) for source in sources)
    values = tuple(source.detach() for source in sources)
    if not sources[0].is_cuda:
        return _Entry(references, values, stamps, tensors, None)
    stream = torch.cuda.current_stream(sources[0].device)
    ready = torch.cuda.Event()
    ready.record(stream)
    return _Entry(references, values, stamps, tensors, ready, {stream.cuda_stream}, captured)


def _order(entry: _Entry, capturing: bool) -> None:
    """Let the current stream wait for the one that made the entry. A capture begins with all streams at rest."""
    if entry.ready is None:
        return
    device = entry.tensors[0].device
    if capturing or torch._C._cuda_getCurrentRawStream(device.index) in entry.streams:
        return
    stream = torch.cuda.current_stream(device)
    stream.wait_event(entry.ready)
    for tensor in entry.tensors:
        tensor.record_stream(stream)
    entry.streams.add(stream.cuda_stream)


def derived_for_launch(
    token: Hashable, sources: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]], *, inference: bool = True
) -> tuple[tuple[Tensor, ...], bool]:
    """The result of ``derived``, and whether it existed before the last queued kernel: then the next launch may begin early."""
    changed = False

    def noting() -> tuple[Tensor, ...]:
        nonlocal changed
        changed = True
        return make()

    tensors = derived(token, sources, noting, inference=inference)
    return tensors, not changed and sources[0].is_cuda and may_begin_early(sources[0].device.index)
