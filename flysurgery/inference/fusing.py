"""Fused modules for a run that trains without them as well."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flysurgery.errors import BackendError, InferenceError, WalkError
from flysurgery.inference.optimize import optimize

Groups = list[list[str]]
"""Names and kinds of groups of layers, as JSON has them."""


def fuse(model: nn.Module, example: Any = None, only: Groups | None = None, **how: Any) -> Groups:
    """Put fused modules into a model, as ``optimize`` does it; gives the names and kinds of the groups.

    With ``only``, those of an earlier call, the same groups are fused, so that a resumed run computes what it would have computed. A model
    that ``optimize`` refuses or cannot trace stays as it is, and so does one whose kernels do not compile, or for whose measurement the
    memory does not suffice.
    """
    if only == []:
        return []
    try:
        return [[*each] for each in optimize(model, example, only=only, **how).chosen]
    except (BackendError, InferenceError, WalkError):
        return []
    except torch.cuda.OutOfMemoryError:  # measuring may need more than the updates do, whose batches may be smaller
        torch.cuda.empty_cache()
        return []
