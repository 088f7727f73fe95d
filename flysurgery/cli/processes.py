"""The processes that ``torchrun`` or ``accelerate launch`` started for one command: connected, each on its own GPU, and with one voice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from flysurgery.cli import options
from flysurgery.errors import OptionError

if TYPE_CHECKING:
    import torch

FAILED = "flysurgery/failed"  # counts, in the launcher's store, the processes that have failed


@contextmanager
def together() -> Iterator[None]:
    """Connect the processes of a launcher while a verb runs, which this decorates; without a launcher nothing is different.

    Where processes fail, the first of them to do so raises its error, and the others end in silence with its exit code, since most of them
    fail for want of the first.
    """
    from torch import distributed as dist

    if not (dist.is_available() and dist.is_torchelastic_launched() and int(os.environ["WORLD_SIZE"]) > 1):
        yield
        return
    from torch.distributed.rendezvous import rendezvous

    store, rank, count = next(rendezvous("env://"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count)
    try:
        yield
    except BaseException as error:
        # The connections are left open until the process ends: the others would fail as soon as they are closed.
        if not _fails_first(store):
            raise typer.Exit(getattr(error, "exit_code", 1)) from error
        raise
    dist.destroy_process_group()


def is_first() -> bool:
    """Whether this process is the one that writes and prints: the only one, or the first."""
    from torch import distributed as dist

    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def device_of_process(text: str | None) -> torch.device:
    """The device that the user named, or the fastest one there is; of several processes each gets a GPU of its own."""
    import torch

    device = options.device_of(text)
    if device.type != "cuda" or not _are_several():
        return device
    own, found = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if device.index is not None:
        raise OptionError(f"each process takes a GPU of its own, got --device {text}; leave it out, or give --device cpu")
    if own >= found:
        raise OptionError(f"each process takes a GPU of its own, and this machine has {found}; start no more processes than that")
    torch.cuda.set_device(own)
    return torch.device("cuda", own)


def check_shared(*, shared: bool) -> None:
    """Refuse several processes where there is no work that they share."""
    if _are_several() and not shared:
        raise OptionError(
            "several processes share the work of --reconstruct only, without --measure and --dry-run; start convert in one process"
        )


def _are_several() -> bool:
    from torch import distributed as dist

    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _fails_first(store: Any) -> bool:
    try:
        return store.add(FAILED, 1) == 1
    except RuntimeError:  # the process that held the store has ended
        return False
