"""The canonical storage of a Kronecker-sparse factor, other layouts, and the definition of its product."""

from flysurgery.factors.bit_reversal import bit_reversal as bit_reversal
from flysurgery.factors.dense import dense_to_factor as dense_to_factor
from flysurgery.factors.dense import factor_to_dense as factor_to_dense
from flysurgery.factors.dense import factors_to_dense as factors_to_dense
from flysurgery.factors.layouts import from_blocks as from_blocks
from flysurgery.factors.layouts import to_blocks as to_blocks
from flysurgery.factors.reference import ks_einsum as ks_einsum
from flysurgery.factors.storage import architecture_of as architecture_of
from flysurgery.factors.storage import pattern_of as pattern_of
