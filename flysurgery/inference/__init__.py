"""Converted and dense models made faster for inference: fused modules, and whole forwards captured as CUDA graphs."""

from flysurgery.inference.capture import Captured as Captured
from flysurgery.inference.capture import capture as capture
from flysurgery.inference.optimize import optimize as optimize
from flysurgery.inference.report import OptimizeReport as OptimizeReport
from flysurgery.inference.report import OptimizeRow as OptimizeRow
from flysurgery.inference.restoring import restore as restore
