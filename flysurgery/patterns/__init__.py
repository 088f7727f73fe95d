"""Which entries may be nonzero: patterns and architectures, as integers only."""

from flysurgery.patterns.architecture import Architecture as Architecture
from flysurgery.patterns.architecture import check_fits as check_fits
from flysurgery.patterns.architecture import product_pattern as product_pattern
from flysurgery.patterns.catalog import ARCHITECTURES as ARCHITECTURES
from flysurgery.patterns.catalog import OF_BLOCKS as OF_BLOCKS
from flysurgery.patterns.catalog import deformable as deformable
from flysurgery.patterns.catalog import family_of as family_of
from flysurgery.patterns.catalog import gonon as gonon
from flysurgery.patterns.catalog import kaleidoscope as kaleidoscope
from flysurgery.patterns.catalog import low_rank as low_rank
from flysurgery.patterns.catalog import monarch as monarch
from flysurgery.patterns.catalog import named as named
from flysurgery.patterns.catalog import square_dyadic as square_dyadic
from flysurgery.patterns.pattern import MAX_FEATURES as MAX_FEATURES
from flysurgery.patterns.pattern import Pattern as Pattern
