"""Dense matrices to the nearest products of Kronecker-sparse factors."""

from flysurgery.projection.block_cycling import Fitted as Fitted
from flysurgery.projection.calibrated import CalibratedProjection as CalibratedProjection
from flysurgery.projection.calibrated import calibrated_projection as calibrated_projection
from flysurgery.projection.calibrated import project_calibrated as project_calibrated
from flysurgery.projection.mm_star import factor_mm_star as factor_mm_star
from flysurgery.projection.moments import Metric as Metric
from flysurgery.projection.moments import Moments as Moments
from flysurgery.projection.moments import OutputError as OutputError
from flysurgery.projection.moments import metric_of as metric_of
from flysurgery.projection.moments import output_error as output_error
from flysurgery.projection.permutation import Features as Features
from flysurgery.projection.permutation import Orders as Orders
from flysurgery.projection.permutation import Sharing as Sharing
from flysurgery.projection.permutation import Side as Side
from flysurgery.projection.permutation import choose_orders as choose_orders
from flysurgery.projection.project import Projection as Projection
from flysurgery.projection.project import draw as draw
from flysurgery.projection.project import product_of as product_of
from flysurgery.projection.project import project as project
from flysurgery.projection.project import random_start as random_start
from flysurgery.projection.side_by_side import FitProblem as FitProblem
from flysurgery.projection.side_by_side import fit_side_by_side as fit_side_by_side
from flysurgery.projection.side_by_side import workers as workers
