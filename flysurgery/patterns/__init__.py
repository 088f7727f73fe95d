"""Which entries may be nonzero: patterns and architectures, as integers only."""

from flysurgery.patterns.catalog import (
    ARCHITECTURES,
    OF_BLOCKS,
    deformable,
    family_of,
    gonon,
    kaleidoscope,
    low_rank,
    monarch,
    named,
    square_dyadic,
)
from flysurgery.patterns.pattern import MAX_FEATURES, Architecture, Pattern, check_fits, product_pattern

__all__ = ["Architecture", "Pattern", "deformable", "gonon", "kaleidoscope", "low_rank", "monarch", "named", "square_dyadic"]
