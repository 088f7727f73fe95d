"""The canonical storage of a Kronecker-sparse factor, its blocks, and the definition of its product."""

from flysurgery.factors.bit_reversal import bit_reversal
from flysurgery.factors.dense import dense_to_factor, factor_to_dense, factors_to_dense
from flysurgery.factors.storage import architecture_of, ks_einsum, pattern_of, to_blocks

__all__ = ["bit_reversal", "factors_to_dense", "ks_einsum"]
