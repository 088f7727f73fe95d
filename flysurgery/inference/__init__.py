"""Makes models faster for inference: architectures chosen by measured times, fused modules, whole forwards as CUDA graphs."""

from flysurgery.inference.capture import Captured, capture
from flysurgery.inference.choosing import Setting, choose_measured
from flysurgery.inference.convert import choose, convert
from flysurgery.inference.measuring import measure_groups
from flysurgery.inference.optimize import OptimizeReport, OptimizeRow, optimize
from flysurgery.inference.standin import restore

__all__ = ["Captured", "OptimizeReport", "capture", "convert", "optimize", "restore"]
