"""From a model to a plan, from a plan to a converted model with its report, and back to dense."""

from flysurgery.surgery.allocation import PLACEHOLDER, allocate, check_budget, layer_candidates
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
from flysurgery.surgery.choices import Measurement, Tradeoff
from flysurgery.surgery.convert import choose, convert, convert_to_fidelity
from flysurgery.surgery.make_plan import count_samples, plan
from flysurgery.surgery.measuring import Setting, choose_measured, measure_groups
from flysurgery.surgery.plan import ExampleInput, LayerPlan, Part, Plan
from flysurgery.surgery.report import Report, Row, block_errors, fidelity_rows, measures
from flysurgery.surgery.serial import as_json
from flysurgery.surgery.transaction import draw_anew, plan_of

__all__ = ["Plan", "Report", "apply", "convert", "densify", "install", "plan"]
