"""Small models of each kind, with weights that leave nothing at zero or one."""

import copy
import functools
import io
from typing import Any

import timm
import torch
from torch import Tensor, nn

import flysurgery
from flysurgery.walker import example_input

SMALL: dict[str, Any] = {"img_size": 32, "num_classes": 5, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 2}
"""Arguments that make one of timm's ViTs small."""
SWIN: dict[str, Any] = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (2,), "num_heads": (2,), "num_classes": 5}
BLOCK = ["norm_linear", "attention", "linear_residual", "ffn"]
WHOLE = ["patch_embedding", *BLOCK * 2]
"""The operators that such a model calls when all of it is fused."""


def ready(model: nn.Module, *, convert: bool = True, **options: Any) -> nn.Module:
    """The model in eval mode, every weight moved at random (layer scales and norms too), and by default converted, with ``options``."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.eval().requires_grad_(False)
    if convert:
        flysurgery.convert(model, "monarch", roles=("ffn", "qkv", "attn_out"), nblocks=4, **options)
    return model


def small(name: str = "vit_tiny_patch16_224", *, convert: bool = True, **options: Any) -> nn.Module:
    """One of timm's ViTs, small and ready, of which each call gives a copy."""
    return copy.deepcopy(_small(name, convert, tuple(options.items())))


@functools.cache
def _small(name: str, convert: bool, options: tuple[tuple[str, Any], ...]) -> nn.Module:
    arguments = SMALL | dict(options)  # which older versions of timm do not keep
    named = {"base": name, "base_args": arguments} if convert else {}
    return ready(timm.create_model(name, **arguments), convert=convert, **named)


def images(model: nn.Module, count: int = 2) -> Tensor:
    example = example_input(model)
    return torch.randn((count, *example.shape[1:]), generator=torch.Generator().manual_seed(2))


def left(report: Any) -> dict[str, str]:
    """The codes of the reasons why groups are left as they were."""
    return {row.fqn: row.reason.code for row in report.rows if row.reason is not None}


def check_fused(model: nn.Module, x: Any, called: list[str], kernels: list[str] | None = None, *, keep: bool = False) -> Any:
    """The report of ``optimize``, after which these kernels are ``called``, and not a bit of the output differs.

    Stand-ins have the same operators in the same order. The model is restored, unless it is to ``keep`` them.
    """
    before, names, modules = outputs(model, x), list(model.state_dict()), list(model.modules())
    report = flysurgery.optimize(model, x)
    called.clear()
    assert all(map(torch.equal, outputs(model, x), before)) and list(model.state_dict()) == names
    assert kernels is None or called == kernels
    called.clear()
    if not keep:
        assert (report.restore() > 0) == bool(report.fused) and list(model.modules()) == modules
        assert all(map(torch.equal, outputs(model, x), before)) and not called
    return report


def outputs(model: nn.Module, x: Any) -> list[Tensor]:
    y = model(*x) if isinstance(x, tuple) else model(x)
    return [y] if isinstance(y, Tensor) else list(y)


def saved(model: nn.Module) -> nn.Module:
    """The model, pickled and read again."""
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)
