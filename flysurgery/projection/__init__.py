"""Dense matrices to the nearest products of Kronecker-sparse factors."""

from flysurgery.projection.block_cycling import Fitted
from flysurgery.projection.calibrated import (
    CalibratedProjection,
    FitProblem,
    calibrated_projection,
    fit_side_by_side,
    project_calibrated,
    workers,
)
from flysurgery.projection.mm_star import factor_mm_star
from flysurgery.projection.moments import Metric, Moments, OutputError, metric_of, output_error
from flysurgery.projection.permutation import Features, Orders, Sharing, Side, choose_orders
from flysurgery.projection.project import Projection, draw, product_of, project, random_start

__all__ = ["CalibratedProjection", "Metric", "Moments", "Projection", "factor_mm_star", "metric_of", "project", "project_calibrated"]
