"""Weights as kernels read them, kept from call to call, and whether a launch may read them before the one queued before has ended."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import Tensor

from flysurgery.ops.cuda.kernel import may_begin_early
from flysurgery.ops.derived import derived


def kept(
    token: Hashable, sources: tuple[Tensor, ...], make: Callable[[], tuple[Tensor, ...]], *, inference: bool = True
) -> tuple[tuple[Tensor, ...], bool]:
    """What ``derived`` gives, and whether it was there before the kernel queued last on a GPU: a launch may then begin early."""
    changed = False

    def noting() -> tuple[Tensor, ...]:
        nonlocal changed
        changed = True
        return make()

    tensors = derived(token, sources, noting, inference=inference)
    return tensors, not changed and sources[0].is_cuda and may_begin_early(sources[0].device.index)
