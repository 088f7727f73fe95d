"""Accuracy of a model on images that are at hand, and its fidelity to another model."""

from flysurgery.evaluation.data import ImageData, Preparation, digits, load_calibration, load_data, load_unseen, preparation
from flysurgery.evaluation.evaluate import Accuracy, check_comparable, common_cuts, compare, evaluate
from flysurgery.evaluation.fractals import Fractals

__all__ = ["Accuracy", "ImageData", "evaluate", "load_calibration", "load_data", "preparation"]
