"""Rivals of a converted backbone: int8, magnitude 2:4, and the compiler alone, all on the linear layers that the conversions replace."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn

from flysurgery import surgery
from flysurgery.bench.variants import INT8_ERROR, forget_compiled
from flysurgery.errors import FlysurgeryError

Run = Callable[[Tensor], Tensor]

COMPILED = "dense compiled"

TUNED: Mapping[str, bool] = MappingProxyType(
    {
        "max_autotune": True,
        "coordinate_descent_tuning": True,
        "coordinate_descent_check_all_directions": True,
        "force_fuse_int_mm_with_mul": True,
    }
)
"""What ``mode="max-autotune-no-cudagraphs"`` of ``torch.compile`` sets, and what torchao recommends beside it for int8 products."""


class RivalError(FlysurgeryError):
    """A rival lacks what it needs."""


@dataclass(frozen=True)
class Rival:
    """One rival. ``convert`` changes the named linear layers of a dense model in place, in any precision and on any device.

    ``runs`` gives the ways to run a model so converted on CUDA, of which the fastest counts. ``kept`` is the share of the layers'
    weights that are kept. ``allowed`` is the relative rms error that its outputs may have beside the dense model's; with 0 they are
    held against the converted model in float64.
    """

    convert: Callable[[nn.Module, Collection[str]], None]
    runs: Callable[[nn.Module, Collection[str]], Mapping[str, Run]]
    kept: float = 1.0
    allowed: float = 0.0

    def params(self, model: nn.Module, linears: Collection[str]) -> int:
        """The parameters of a converted model that are kept, of whatever size each is."""
        dropped = sum(round((1 - self.kept) * _linear(model, name).weight.numel()) for name in linears)
        return sum(each.numel() for each in model.parameters()) - dropped


def linears_of(backbone: nn.Module) -> tuple[str, ...]:
    """The names of the linear layers that every conversion of the table replaces."""
    return tuple(layer.fqn for layer in surgery.plan(backbone, arch="monarch").replaced)


def _linear(model: nn.Module, name: str) -> nn.Linear:
    found = model.get_submodule(name)
    assert isinstance(found, nn.Linear), "the walker names linear layers"
    return found


def _as_it_is(_model: nn.Module, _linears: Collection[str]) -> None:
    pass


def _to_int8(model: nn.Module, linears: Collection[str]) -> None:
    """int8 weights, a scale for each row, and activations rounded at each call, a scale for each token.

    Raises:
        RivalError: torchao is not installed.
    """
    if importlib.util.find_spec("torchao") is None:
        raise RivalError("int8 needs torchao: pip install torchao")
    quantization = importlib.import_module("torchao.quantization")
    # Its settings of the compiler would stay set for the whole process; TUNED has them.
    config = quantization.Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    quantization.quantize_(model, config, filter_fn=lambda _module, name: name in linears)


@torch.no_grad()
def _prune(model: nn.Module, linears: Collection[str]) -> None:
    """Of each four weights in a row, set the two of least magnitude to zero."""
    for name in linears:
        weight = _linear(model, name).weight
        groups = weight.unflatten(1, (-1, 4))
        groups.scatter_(2, groups.abs().topk(2, dim=2, largest=False).indices, 0)


def _store_sparse(model: nn.Module, linears: Collection[str]) -> None:
    """Pruned weights in the form that sparse tensor cores take: float16 or bfloat16, on CUDA."""
    for name in linears:
        layer = _linear(model, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a prototype, it says
            layer.weight = nn.Parameter(torch.sparse.to_sparse_semi_structured(layer.weight.detach()), requires_grad=False)
        # Older releases of PyTorch give a transposed result otherwise, which attention has only a slow kernel for.
        layer.weight.fuse_transpose_cusparselt = True  # pyright: ignore[reportAttributeAccessIssue]


def _compiled(model: nn.Module, _linears: Collection[str]) -> dict[str, Run]:
    forget_compiled()
    return {
        "torch.compile": torch.compile(model, dynamic=False),
        "torch.compile, tuned": torch.compile(model, dynamic=False, options=dict(TUNED)),
    }


def _sparse(model: nn.Module, linears: Collection[str]) -> dict[str, Run]:
    _store_sparse(model, linears)
    return {"not compiled": model, **_compiled(model, linears)}


RIVALS: Mapping[str, Rival] = MappingProxyType(
    {
        COMPILED: Rival(_as_it_is, _compiled),
        "int8": Rival(_to_int8, _compiled, allowed=INT8_ERROR),
        "2:4": Rival(_prune, _sparse, kept=0.5),
    }
)
