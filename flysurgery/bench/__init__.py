"""Timing in one run, each candidate against dense: stamped, interleaved, and checked before it is timed."""

from flysurgery.bench.multiply import MultiplyRow as MultiplyRow
from flysurgery.bench.multiply import bench_multiply as bench_multiply
from flysurgery.bench.rows import to_json as to_json
from flysurgery.bench.rows import write_csv as write_csv
from flysurgery.bench.stamp import Stamp as Stamp
from flysurgery.bench.stamp import take_stamp as take_stamp
from flysurgery.bench.timing import Timing as Timing
from flysurgery.bench.timing import time_interleaved as time_interleaved
