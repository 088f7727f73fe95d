"""The kernels of single factors, in their autotuned configurations, else the first candidates."""

from __future__ import annotations

from functools import cache

from flysurgery.ops.cuda.factor_grad import FactorGrad, grad_configs
from flysurgery.ops.cuda.grad_tiling import GradConfig
from flysurgery.ops.cuda.obstacles import shared_limit_of
from flysurgery.ops.cuda.single import SingleFactor, candidates
from flysurgery.ops.cuda.single_tiling import SingleConfig
from flysurgery.ops.cuda.table import matching, tuned_config
from flysurgery.patterns import Architecture, Pattern

SINGLE = "single_factor"
GRADIENT = "factor_grad"


def single_factor(pattern: Pattern, mode: str, device_index: int, rows: int, segments: int = 1) -> SingleFactor:
    """The product with one factor; the same object for the same configuration. ``segments`` as in ``SingleFactor``."""
    fields = tuned_config(SINGLE, Architecture((pattern,)), mode, 1, device_index, rows)
    config = matching(fields, lambda: candidates(pattern, mode, shared_limit_of(device_index)))
    return _single_factor(pattern, mode, config, shared_limit_of(device_index), segments)


def factor_grad(pattern: Pattern, mode: str, device_index: int, rows: int) -> FactorGrad:
    """The gradient of one factor; the same object for the same configuration."""
    fields = tuned_config(GRADIENT, Architecture((pattern,)), mode, 1, device_index, rows)
    config = matching(fields, lambda: grad_configs(pattern, mode, shared_limit_of(device_index)))
    return _factor_grad(pattern, mode, config, shared_limit_of(device_index))


@cache
def _single_factor(pattern: Pattern, mode: str, config: SingleConfig | None, shared_limit: int, segments: int) -> SingleFactor:
    return SingleFactor(pattern, mode, config, shared_limit=shared_limit, segments=segments)


@cache
def _factor_grad(pattern: Pattern, mode: str, config: GradConfig | None, shared_limit: int) -> FactorGrad:
    return FactorGrad(pattern, mode, config, shared_limit=shared_limit)
