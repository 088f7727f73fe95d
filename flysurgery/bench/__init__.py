"""Measures speed: each candidate is checked against float64, then timed beside dense in one run, and its row is stamped."""

from flysurgery.bench.measuring import Case, Measured, Protocol, measure, rows_of_case
from flysurgery.bench.plots import check_plot, draw_tradeoff
from flysurgery.bench.rows import Record, Sheet, take_stamp
from flysurgery.bench.timing import TIMED_MODES, in_mode, modes_of, time_interleaved
