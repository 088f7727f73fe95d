"""Accuracy of a model on images that are at hand, and its fidelity to another model."""

from flysurgery.evaluation.against import check_comparable as check_comparable
from flysurgery.evaluation.against import common_cuts as common_cuts
from flysurgery.evaluation.against import compare as compare
from flysurgery.evaluation.data import ImageData as ImageData
from flysurgery.evaluation.data import Preparation as Preparation
from flysurgery.evaluation.data import digits as digits
from flysurgery.evaluation.data import load_calibration as load_calibration
from flysurgery.evaluation.data import load_data as load_data
from flysurgery.evaluation.data import load_unseen as load_unseen
from flysurgery.evaluation.data import preparation as preparation
from flysurgery.evaluation.evaluate import Accuracy as Accuracy
from flysurgery.evaluation.evaluate import evaluate as evaluate
from flysurgery.evaluation.fractals import Fractals as Fractals
