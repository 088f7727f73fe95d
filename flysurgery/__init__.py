"""Replace the linear layers of a pretrained Vision Transformer by products of two Kronecker-sparse factors."""

from importlib import import_module
from typing import TYPE_CHECKING

from flysurgery import registration as _registration
from flysurgery.errors import BackendError as BackendError
from flysurgery.errors import CheckpointError as CheckpointError
from flysurgery.errors import DataError as DataError
from flysurgery.errors import FlysurgeryError as FlysurgeryError
from flysurgery.errors import InferenceError as InferenceError
from flysurgery.errors import ModelError as ModelError
from flysurgery.errors import OptionError as OptionError
from flysurgery.errors import PatternError as PatternError
from flysurgery.errors import PlanError as PlanError
from flysurgery.errors import ProjectionError as ProjectionError
from flysurgery.errors import SelectionError as SelectionError
from flysurgery.errors import SurgeryError as SurgeryError
from flysurgery.errors import TrainingError as TrainingError
from flysurgery.errors import WalkError as WalkError

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "ButterflyLinear",
    "CheckpointError",
    "DataError",
    "FlysurgeryError",
    "InferenceError",
    "ModelError",
    "OptionError",
    "PatternError",
    "Plan",
    "PlanError",
    "ProjectionError",
    "Report",
    "SelectionError",
    "SurgeryError",
    "TrainingError",
    "WalkError",
    "__version__",
    "apply",
    "capture",
    "convert",
    "densify",
    "evaluate",
    "load",
    "optimize",
    "plan",
    "push_to_hub",
    "restore",
    "save",
]

if TYPE_CHECKING:
    from flysurgery.checkpoint import load as load
    from flysurgery.checkpoint import push_to_hub as push_to_hub
    from flysurgery.checkpoint import save as save
    from flysurgery.evaluation import evaluate as evaluate
    from flysurgery.inference import capture as capture
    from flysurgery.inference import convert as convert
    from flysurgery.inference import optimize as optimize
    from flysurgery.inference import restore as restore
    from flysurgery.layers import ButterflyLinear as ButterflyLinear
    from flysurgery.surgery import Plan as Plan
    from flysurgery.surgery import Report as Report
    from flysurgery.surgery import apply as apply
    from flysurgery.surgery import densify as densify
    from flysurgery.surgery import plan as plan
else:
    _ROOMS = {
        "checkpoint": ("load", "push_to_hub", "save"),
        "evaluation": ("evaluate",),
        "inference": ("capture", "convert", "optimize", "restore"),
        "layers": ("ButterflyLinear",),
        "surgery": ("Plan", "Report", "apply", "densify", "plan"),
    }

    def __getattr__(name: str) -> object:
        """Import a room when it, or what it offers here, is asked for first: PyTorch and timm take seconds."""
        room = next((room for room, names in _ROOMS.items() if name in names), None)
        if room is not None:
            return getattr(import_module(f"{__name__}.{room}"), name)
        try:
            return import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'") from error


_registration.register()
