"""Further branches of a CUDA graph that is being captured, for small launches that would hold up large ones."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from typing import ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, UntypedStorage
from torch.utils import _pytree as pytree

from flysurgery.gpu.uncounted_writes import moment

Given = ParamSpec("Given")
Found = TypeVar("Found")


class Branch:
    """Work that runs beside what follows on the current stream of a device, until ``join``.

    Gradients of factors, casts and sums take few multiprocessors, and each of them would hold up the large products behind it. Outside of
    captures all runs in order, as events cost the host more than they save.
    """

    def __init__(self, device: torch.device) -> None:
        self._main = _captured(device)
        self._kept = list[object]()

    def run(self, function: Callable[Given, Found], *args: Given.args, **kwargs: Given.kwargs) -> Found:
        """Queue a function. Its result may be read after ``join``.

        Until then the function and its arguments are kept, as others would take their memory.
        """
        if self._main is None:
            return function(*args, **kwargs)
        side = _side_of(self._main, "beside")
        side.wait_stream(self._main)
        self._kept += [function, args, kwargs]
        with torch.cuda.stream(side):
            return function(*args, **kwargs)

    def join(self) -> None:
        """Let the current stream wait for all that was queued."""
        if self._main is not None and self._kept:
            self._main.wait_stream(_side_of(self._main, "beside"))
            self._kept.clear()


_States = Mapping[UntypedStorage, tuple[int, int, int]]
"""By memory: a source's id, version and address."""


_BRANCHES = 4
"""For ``ahead``: what is packed takes many launches, each of which waits for large ones to leave it room."""

_turns = count()
_known = WeakKeyDictionary[UntypedStorage, tuple[int, Tensor]]()
"""By memory: a source's id, and an empty tensor with the version of the source. ``torch.utils.swap_tensors`` takes no weak references."""
_forks: dict[torch.cuda.Stream, tuple[int, _States]] = {}
"""By branch for ``ahead``: the moment when it was last put behind the stream it belongs to, and the states of the sources then."""


def ahead(sources: Sequence[Tensor], make: Callable[[], Found]) -> Found:
    """Give ``make()``, which reads only ``sources``. While a graph is captured, it runs on one of some branches, in turn.

    The current stream waits for the result. The branch does not wait for the current stream as long as no source is written to. So a
    replay packs the weights of later layers while it computes the first ones. The branch waits for the current stream if a source may
    have been written to unnoticed: no earlier call outside of captures had it, its memory has moved, it is a view of memory that others
    may write to, or ``uncounted_writes`` knows of an occasion since. After other writes that PyTorch does not count, call ``begin_ahead``.
    """
    main = _captured(sources[0].device)
    if main is None:
        know(sources)
        return make()
    side = _side_of(main, f"ahead {next(_turns) % _BRANCHES}")
    with torch.cuda.stream(side):
        begun = torch.cuda.is_current_stream_capturing()
    since, states = _forks.get(side, (None, {}))
    if not begun or since != moment() or not all(_ordered(source, states) for source in sources):
        _put_behind(main, side)
    with torch.cuda.stream(side):
        found = make()
    main.wait_stream(side)
    for tensor in pytree.tree_leaves(found):
        if isinstance(tensor, Tensor):  # its memory must not be taken before those have read it
            tensor.record_stream(main)
            tensor.record_stream(_side_of(main, "beside"))
    return found


def begin_ahead(device: torch.device) -> None:
    """Let the branches for ``ahead`` begin here rather than at their first use, behind all that is queued until then."""
    main = _captured(device)
    if main is not None:
        for turn in range(_BRANCHES):
            side = _side_of(main, f"ahead {turn}")
            _put_behind(main, side)
            main.wait_stream(side)  # a branch that nothing uses must end too


def _put_behind(main: torch.cuda.Stream, side: torch.cuda.Stream) -> None:
    """Let a branch wait for all that is queued on the stream it belongs to."""
    side.wait_stream(main)
    states: _States = WeakKeyDictionary()
    for memory in [each for reference in _known.keyrefs() if (each := reference()) is not None]:  # other threads may add to it
        identity, counter = _known[memory]
        states[memory] = identity, counter._version, memory.data_ptr()
    _forks[side] = moment(), states


def _ordered(source: Tensor, states: _States) -> bool:
    """Whether everything that was ever written to a source had been queued by then."""
    whole = _whole(source)
    memory = whole.untyped_storage()
    return not whole.is_inference() and states.get(memory) == (id(whole), whole._version, memory.data_ptr())


def know(sources: Sequence[Tensor]) -> None:
    """Note sources of a later ``ahead``, except parts of a larger memory, which may be written to as a whole."""
    for whole in map(_whole, sources):
        memory = whole.untyped_storage()
        if _known.get(memory, (0,))[0] == id(whole) or whole.is_inference() or whole.nbytes < memory.nbytes():
            continue
        with torch.inference_mode(False):
            counter = whole.detach()  # which has the version of the source, also without its memory
            counter.data = whole.new_empty(0)
        _known[memory] = id(whole), counter


def _whole(source: Tensor) -> Tensor:
    """The tensor that a view is a part of, which counts the writes to both; the view itself may be made anew for each call."""
    return source if source._base is None else source._base


def _captured(device: torch.device) -> torch.cuda.Stream | None:
    """The current stream of a device, if a graph of it is being captured."""
    captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    return torch.cuda.current_stream(device) if captures else None


@lru_cache(maxsize=64)
def _side_of(main: torch.cuda.Stream, name: str) -> torch.cuda.Stream:
    """A stream beside another one: its own, so that captures of several threads stay apart."""
    return torch.cuda.Stream(main.device, priority=-1)
