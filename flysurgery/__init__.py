"""Replace the linear layers of a pretrained Vision Transformer by products of two Kronecker-sparse factors."""

from importlib import import_module
from typing import TYPE_CHECKING

from flysurgery import registration as _registration
from flysurgery.errors import (
    BackendError,
    CheckpointError,
    DataError,
    FlysurgeryError,
    InferenceError,
    ModelError,
    OptionError,
    PatternError,
    PlanError,
    ProjectionError,
    SelectionError,
    SurgeryError,
    TrainingError,
    WalkError,
)

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
    from flysurgery.checkpoint import load, push_to_hub, save
    from flysurgery.evaluation import evaluate
    from flysurgery.inference import capture, optimize, restore
    from flysurgery.layers import ButterflyLinear
    from flysurgery.surgery import Plan, Report, apply, convert, densify, plan
else:
    _ROOMS = {
        "checkpoint": ("load", "push_to_hub", "save"),
        "evaluation": ("evaluate",),
        "inference": ("capture", "optimize", "restore"),
        "layers": ("ButterflyLinear",),
        "surgery": ("Plan", "Report", "apply", "convert", "densify", "plan"),
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
