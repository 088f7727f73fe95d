"""From a model to a plan, from a plan to a converted model with its report, and back to dense."""

from flysurgery.surgery.allocation import (
    PLACEHOLDER,
    Allocation,
    Picks,
    allocate,
    check_budget,
    convert_to_fidelity,
    named_candidates,
    prepare,
)
from flysurgery.surgery.apply import apply, check_calibration, densify, install, sample_shape
from flysurgery.surgery.base import (
    ENTRY_POINT,
    QUANT_METHOD,
    classes_of,
    find_base,
    is_of_transformers,
    quantization_entry,
    transformers_arguments,
)
from flysurgery.surgery.change import plan_of
from flysurgery.surgery.choices import Measurement, TimedChoice, TimedGroup, Tradeoff
from flysurgery.surgery.choosing import Setting, choose_measured
from flysurgery.surgery.convert import choose, convert
from flysurgery.surgery.measuring import measure_groups
from flysurgery.surgery.plan import ExampleInput, LayerPlan, Part, Plan
from flysurgery.surgery.planning import count_samples, plan
from flysurgery.surgery.report import Report, Row, block_errors, fidelity_rows, measures
from flysurgery.surgery.serial import as_json

__all__ = ["Plan", "Report", "apply", "convert", "densify", "install", "plan"]
