"""Measures speed: each candidate is checked against float64, then timed beside dense in one run, and its row is stamped."""

from flysurgery.bench.measuring import Case as Case
from flysurgery.bench.measuring import Measured as Measured
from flysurgery.bench.measuring import Protocol as Protocol
from flysurgery.bench.measuring import measure as measure
from flysurgery.bench.measuring import rows_of_case as rows_of_case
from flysurgery.bench.plots import check_plot as check_plot
from flysurgery.bench.plots import draw_tradeoff as draw_tradeoff
from flysurgery.bench.rows import Record as Record
from flysurgery.bench.rows import Sheet as Sheet
from flysurgery.bench.rows import take_stamp as take_stamp
from flysurgery.bench.timing import TIMED_MODES as TIMED_MODES
from flysurgery.bench.timing import in_mode as in_mode
from flysurgery.bench.timing import modes_of as modes_of
from flysurgery.bench.timing import time_interleaved as time_interleaved
