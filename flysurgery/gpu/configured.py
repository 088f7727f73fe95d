"""The kernels of single factors, in their autotuned configurations, or in the first ones where nothing was tuned."""

from __future__ import annotations

from functools import cache

from flysurgery.gpu.device import shared_limit_of
from flysurgery.gpu.single import SingleFactor
from flysurgery.gpu.single_by_bmm import BatchedConfig, BatchedFactor, batched_configs, batched_pays
from flysurgery.gpu.single_choice import candidates
from flysurgery.gpu.single_tiling import SingleConfig
from flysurgery.gpu.table import matching, rows_bucket, tuned_config
from flysurgery.patterns import Architecture, Pattern

SINGLE = "single_factor"
FactorConfig = SingleConfig | BatchedConfig
FactorProduct = SingleFactor | BatchedFactor


def factor_configs(pattern: Pattern, mode: str, rows: int, shared_limit: int) -> tuple[FactorConfig, ...]:
    """Ways to multiply this many rows by one factor: first the default without a timing, then the best of the other kind."""
    singles, batched = candidates(pattern, mode, shared_limit), batched_configs(mode)
    if batched_pays(pattern, mode, rows_bucket(rows)):
        return (*batched, *singles)
    return (*singles[:1], *batched, *singles[1:])


def factor_config(pattern: Pattern, mode: str, device_index: int, rows: int) -> FactorConfig | None:
    """The autotuned way for this many rows, otherwise the first; None where there is none."""
    fields = tuned_config(SINGLE, Architecture((pattern,)), mode, 1, device_index, rows)
    configs = factor_configs(pattern, mode, rows, shared_limit_of(device_index))
    return matching(fields, lambda: configs) or next(iter(configs), None)


def chosen_factor(pattern: Pattern, mode: str, device_index: int, rows: int) -> FactorProduct:
    """The product with one factor in the faster way; the same object for the same configuration."""
    return factor_product(pattern, mode, factor_config(pattern, mode, device_index, rows), shared_limit_of(device_index))


@cache
def factor_product(pattern: Pattern, mode: str, config: FactorConfig | None, shared_limit: int) -> FactorProduct:
    """The product with one factor in one configuration. None takes the first for ``SingleFactor``."""
    if isinstance(config, BatchedConfig):
        return BatchedFactor(pattern, mode, config)
    return SingleFactor(pattern, mode, config, shared_limit=shared_limit)
