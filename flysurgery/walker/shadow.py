"""A stand-in of the model to trace: same tensors, own modules, and nothing that a trace does is left behind."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import logging
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.errors import WalkError

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter or buffer; the CPU where it has none."""
    first = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def shadow(model: nn.Module) -> nn.Module:
    """A copy of the module tree that holds the same parameters and buffers (not copies of them), in eval mode and without hooks.

    Attributes can be set on it, and what a trace of it stores in modules does not reach ``model``.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in itertools.chain(model.parameters(), model.buffers())}
    for module in model.modules():
        # deepcopy refuses tensors that are results of operations, such as an attention map kept for later
        kept = [value for value in vars(module).values() if isinstance(value, Tensor)]
        memo.update({id(value): value.detach().clone() for value in kept if id(value) not in memo})
    try:
        double = copy.deepcopy(model, memo)
    except Exception as error:
        raise WalkError(f"{type(model).__name__} cannot be walked, because its modules cannot be copied: {one_line(error)}") from error
    for module in double.modules():
        for name in _HOOKS:
            getattr(module, name, {}).clear()
    return double.eval()


def shadow_on_cpu(model: nn.Module) -> nn.Module:
    """A ``shadow`` with tensors on the CPU in place of those on the meta device; nobody writes them, so they take no memory."""
    double = shadow(model)
    made: dict[int, Tensor] = {}
    for module in double.modules():
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        empty = torch.empty_like(tensor, device="cpu")
                        made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                    store[name] = made[id(tensor)]  # pyright: ignore[reportArgumentType]
    return double


@contextlib.contextmanager
def isolated(double: nn.Module) -> Iterator[None]:
    """For the time of a trace: no gradients, no warnings or printed graphs, and random states and function caches untouched by it."""
    state, disabled = random.getstate(), logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    _clear_caches(double)
    try:
        with (
            torch.no_grad(),
            torch.random.fork_rng(devices=[]),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        _clear_caches(double)
        logging.disable(disabled)
        random.setstate(state)


def one_line(error: Exception) -> str:
    """The first sentence of an error's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first_sentence = lines[0].split(". ")[0] if lines else type(error).__name__
    return first_sentence[:300].rstrip(".")


def _clear_caches(model: nn.Module) -> None:
    """Empty the ``functools`` caches beside the model's classes: a cached fake tensor would spoil later real forwards, and the reverse."""
    names = {type(module).__module__ for module in model.modules()}
    for name in names:
        if name in sys.modules and not name.startswith("torch."):
            for value in list(vars(sys.modules[name]).values()):
                if callable(getattr(value, "cache_clear", None)):
                    value.cache_clear()
