"""Makes models faster for inference: architectures chosen by measured times, fused modules, whole forwards as CUDA graphs."""

from flysurgery.inference.capture import Captured as Captured
from flysurgery.inference.capture import capture as capture
from flysurgery.inference.choosing import Setting as Setting
from flysurgery.inference.choosing import choose_measured as choose_measured
from flysurgery.inference.convert import choose as choose
from flysurgery.inference.convert import convert as convert
from flysurgery.inference.measuring import measure_groups as measure_groups
from flysurgery.inference.optimize import OptimizeReport as OptimizeReport
from flysurgery.inference.optimize import OptimizeRow as OptimizeRow
from flysurgery.inference.optimize import optimize as optimize
from flysurgery.inference.standin import restore as restore
