"""Which parameters learn how fast."""

from __future__ import annotations

from typing import Any

from torch import nn

from flysurgery.finetune.settings import Settings
from flysurgery.layers import ButterflyLinear


def parameter_groups(model: nn.Module, settings: Settings) -> list[dict[str, Any]]:
    """Groups for one of timm's optimizers: weight decay for matrices and factors only, and the learning rate of factors by their fan-in.

    A step of Adam moves each entry by about the learning rate whatever the gradient, so the outputs of a layer move in proportion to
    the number of entries that a sum runs over: in_features for a dense layer, c for a factor of pattern (a, b, c, d). Multiplying a
    factor's rate by in_features / c lets one learning rate serve both. timm's schedules read the group's ``lr_scale``.

    Source: A. Potapczynski et al., Compute Better Spent: Replacing Dense Layers with Structured Matrices, arXiv:2406.06248, section 3.
    """
    scales: dict[nn.Parameter, float] = {}
    for module in model.modules():
        if isinstance(module, ButterflyLinear) and settings.factor_rate != "same":
            for factor, pattern in zip(module.factors, module.architecture, strict=True):
                scales[factor] = module.in_features / pattern.c
    undecayed = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()  # pyright: ignore[reportCallIssue]
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            decay = 0.0 if parameter.ndim <= 1 or name in undecayed else settings.weight_decay or 0.0
            groups.setdefault((decay, scales.get(parameter, 1.0)), []).append(parameter)
    return [{"params": members, "weight_decay": decay, "lr_scale": scale} for (decay, scale), members in groups.items()]
