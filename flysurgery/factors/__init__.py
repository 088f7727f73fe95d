"""The canonical storage of a Kronecker-sparse factor, its blocks, and the definition of its product."""

from flysurgery.factors.bit_reversal import bit_reversal as bit_reversal
from flysurgery.factors.dense import dense_to_factor as dense_to_factor
from flysurgery.factors.dense import factor_to_dense as factor_to_dense
from flysurgery.factors.dense import factors_to_dense as factors_to_dense
from flysurgery.factors.storage import architecture_of as architecture_of
from flysurgery.factors.storage import ks_einsum as ks_einsum
from flysurgery.factors.storage import pattern_of as pattern_of
from flysurgery.factors.storage import to_blocks as to_blocks
