"""Makes models faster: fused modules for inference and training, whole forwards as CUDA graphs."""

from flysurgery.inference.capture import Captured, capture
from flysurgery.inference.optimize import Groups, OptimizeReport, OptimizeRow, fuse, optimize
from flysurgery.inference.standin import is_optimized, restore

__all__ = ["Captured", "OptimizeReport", "capture", "optimize", "restore"]
