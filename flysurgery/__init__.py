"""Replace the linear layers of a pretrained Vision Transformer by products of two Kronecker-sparse factors."""

# Importing the checkpoint room also registers timm's entry point, by which timm opens converted folders.
from flysurgery.checkpoint import load as load
from flysurgery.checkpoint import save as save
from flysurgery.errors import FlysurgeryError as FlysurgeryError
from flysurgery.evaluation import evaluate as evaluate
from flysurgery.inference import capture as capture
from flysurgery.inference import optimize as optimize
from flysurgery.inference import restore as restore
from flysurgery.layers import ButterflyLinear as ButterflyLinear
from flysurgery.surgery import Plan as Plan
from flysurgery.surgery import Report as Report
from flysurgery.surgery import apply as apply
from flysurgery.surgery import convert as convert
from flysurgery.surgery import densify as densify
from flysurgery.surgery import plan as plan
from flysurgery.transformers_hook import register as _register_with_transformers

_register_with_transformers()

__version__ = "0.1.0"

__all__ = [
    "ButterflyLinear",
    "FlysurgeryError",
    "Plan",
    "Report",
    "__version__",
    "apply",
    "capture",
    "convert",
    "densify",
    "evaluate",
    "load",
    "optimize",
    "plan",
    "restore",
    "save",
]
