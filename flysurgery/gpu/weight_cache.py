"""Tensors computed from parameters, such as packed weights, kept until the parameters change or die, and those that graphs read."""

import sys
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

from flysurgery.gpu.graph_branch import ahead, know
from flysurgery.gpu.kernel import is_compiling
from flysurgery.gpu.recording import mark_changed, rely_on
from flysurgery.gpu.uncounted_writes import Trust, doubt
from flysurgery.torch_state import without_autocast

Stamp = tuple[object, ...]
_Key = tuple[int, int, Hashable]


@dataclass
class _Entry:
    storages: tuple[weakref.ref[UntypedStorage], ...]  # whose death ends the entry, so that an address in use means the same memory
    stamps: list[Stamp]  # of the sources, when the tensors were made
    trust: Trust
    tensors: tuple[Tensor, ...]
    ready: torch.cuda.Event | None = None
    streams: set[int] = field(default_factory=set)
    captured: bool = False


_entries: dict[_Key, _Entry] = {}


def derived(
    token: Hashable, sources: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]], *, inference: bool = False
) -> tuple[Tensor, ...]:
    """Give ``make()``, and remember it for these sources until one of them is written to, moved, retyped or freed.

    The cache is not stored on the sources: state dicts, pickles and deep copies do not contain it. It refers to their memory weakly, and
    not to the tensors, so that ``torch.utils.swap_tensors`` takes them; it ends when the memory is freed. A stream waits for tensors that
    another stream made.

    ``forget_derived`` lists the writes that are missed. Of inference tensors, which count no versions, in a block of ``compiling``, and of
    views of a larger memory, such as the flat buffers of FSDP1 and DeepSpeed, which are written to as a whole, nothing is remembered.

    While a CUDA graph is captured, tensors derived from sources that require gradients are made inside the graph, because replays must
    follow their training. Tensors derived from frozen sources, and in a block of ``taking`` those from any
    source, are read as they are, and so are those for ``inference`` outside of a block of ``training``. If these sources are written to
    later, the next call outside the graph updates what the graph reads.

    Args:
        token: names what is derived, and how.
        make: must not alias the sources.
        inference: whether it is for an operator without gradients.
    """
    return derived_for_launch(token, sources, make, inference=inference)[0]


def derived_for_launch(
    token: Hashable, sources: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]], *, inference: bool = True
) -> tuple[tuple[Tensor, ...], bool]:
    """The result of ``derived``, and whether it existed before the last queued kernel: then the next launch may begin early."""
    capturing = sources[0].is_cuda and torch.cuda.is_current_stream_capturing()
    taken = _thread.taken if capturing else None
    follows = capturing and taken is None and (_thread.trains or not inference)
    if capturing and any(source.is_inference() or (follows and source.requires_grad) for source in sources):
        return _in_graph(sources, make), False
    if is_compiling() or any(map(Tensor.is_inference, sources)):
        return make_to_keep(make, sources[0].device), False
    key = (sources[0].data_ptr(), len(sources), token)
    stamps: list[Stamp] = [(id(each), each.data_ptr(), each._version, each.dtype, each.shape, each.stride()) for each in sources]
    entry = _entries.get(key)
    if entry is not None and entry.stamps == stamps and entry.trust.holds(sources):
        entry.captured = entry.captured or (capturing and taken is None)  # graphs of ``taking`` keep what they read
        _order(entry, capturing)
        rely_on(entry.tensors, sources)
        if taken is not None:
            taken.add(entry.tensors, sources)
        return entry.tensors, True
    if capturing:
        return _in_graph(sources, make), False
    if _thread.trains:
        know(sources)
    trust, tensors = Trust(sources), make_to_keep(make, sources[0].device)
    if any(source.nbytes < source.untyped_storage().nbytes() for source in sources):
        return tensors, False
    captured = entry is not None and entry.captured
    if entry is not None and captured:
        tensors = _refresh(entry.tensors, tensors)
    _remember(key, _Entry((), stamps, trust, tensors, captured=captured), sources)
    return tensors, False


def derived_bytes(addresses: Collection[int]) -> int:
    """Count the bytes that are remembered for sources of which the first lies at one of these addresses."""
    return sum(each.nbytes for key, entry in list(_entries.items()) if key[0] in addresses for each in entry.tensors)


def forget_derived() -> None:
    """Let all that kernels derived from parameters, such as packed weights, be made anew at its next use. Call it after missed writes.

    Only CUDA kernels keep such tensors. Noticed are writes that PyTorch counts; those to a flat buffer of which parameters are views;
    those of optimizers to their parameters; those to parameters that require gradients, before the end of an optimizer's step; and those
    of training without an optimizer, whose gradients come from a backward pass through converted layers. Missed are:

    - other writes through ``parameter.data``, ``untyped_storage()``, NumPy, DLPack or another library;
    - other calls of ``torch.optim.adamw.adamw(fused=True)``, ``torch._fused_sgd_`` and the like;
    - updates of timm's ``ModelEmaV3`` under PyTorch 2.11, which does not count ``torch._foreach_lerp_``;
    - weights that FSDP2 gathers after ``load_state_dict``, without an optimizer's step between;
    - replays of a CUDA graph that trains.
    """
    doubt()


def _make(make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    mark_changed()
    with torch.inference_mode(False), torch.no_grad(), without_autocast("cuda"):
        return make()


def _in_graph(sources: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Make tensors inside of a graph that is being captured, in a block of ``training`` ahead of what is queued."""
    return ahead(sources, lambda: _make(make)) if _thread.trains else _make(make)


def make_to_keep(make: Callable[[], tuple[Tensor, ...]], device: torch.device) -> tuple[Tensor, ...]:
    """Make tensors that outlive the call, in PyTorch's general memory pool.

    Graphs of ``torch.compile`` warm up in a pool of their own, and later roll it back, even if tensors in it are still held. The
    redirection holds for one thread only, so another thread makes the tensors.
    """
    if device.type != "cuda" or not _has_compiled_graphs(device):
        return _make(make)
    mark_changed()
    caller = torch.cuda.current_stream(device)

    def work() -> tuple[Tensor, ...]:
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            stream.wait_stream(caller)
            tensors = _make(make)
            caller.wait_stream(stream)
            return tensors

    with ThreadPoolExecutor(1) as another:
        tensors = another.submit(work).result()
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


def _remember(key: _Key, entry: _Entry, sources: tuple[Tensor, ...]) -> None:
    def drop(reference: weakref.ref[UntypedStorage]) -> None:
        kept = _entries.get(key)
        if kept is not None and any(reference is own for own in kept.storages):
            _entries.pop(key, None)

    entry.storages = tuple(weakref.ref(source.untyped_storage(), drop) for source in sources)
    if sources[0].is_cuda:
        stream = torch.cuda.current_stream(sources[0].device)
        entry.ready = torch.cuda.Event()
        entry.ready.record(stream)
        entry.streams.add(stream.cuda_stream)
    _entries[key] = entry


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


class Taken:
    """Tensors that graphs read, held as long as this object lives, and the parameters from which they are derived."""

    def __init__(self) -> None:
        self._kept, self._sources, self._seen = list[Tensor](), list[Tensor](), list[tuple[int, int]]()
        self._trust = Trust(())

    def add(self, tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Note that graphs read these tensors, which are derived from the present values of the sources."""
        self._kept += tensors
        for source in sources:
            if not any(source is each for each in self._sources):
                self._sources.append(source)
                self._kept.append(source.detach())  # holds its memory, so that no other tensor gets the address
                self._seen.append((source._version, source.data_ptr()))

    def trust(self) -> None:
        """Take all of them as they are now."""
        self._trust = Trust(self._sources)

    def right(self) -> bool:
        """Whether no source was written to, moved or retyped since the block of ``taking``, as far as is known."""
        return self._trust.holds(self._sources) and self._seen == [(source._version, source.data_ptr()) for source in self._sources]


class _OfThread(threading.local):
    taken: Taken | None = None  # of the graph that this thread captures; without one, a graph packs weights that require gradients itself
    trains = False


_thread = _OfThread()


@contextmanager
def taking() -> Iterator[Taken]:
    """Let graphs that this thread captures in the block read packed weights as they are, even if parameters require gradients.

    Use it for graphs that are captured again when their ``Taken`` is no longer valid. It must live as long as the graphs.
    """
    taken = _thread.taken = Taken()
    try:
        yield taken
    finally:
        _thread.taken = None
        taken.trust()


@contextmanager
def training() -> Iterator[None]:
    """Let operators without gradients be part of training: graphs that are captured in the block pack weights in each replay."""
    before, _thread.trains = _thread.trains, True
    try:
        yield
    finally:
        _thread.trains = before
