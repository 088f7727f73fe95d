"""Where: find the linears of a model by dataflow, with their roles and the obstacles to replacing them. Knows no butterflies."""

from flysurgery.walker.attention import SeparateAttention, modules_with_separated, separated, separating
from flysurgery.walker.example import EXAMPLE_BATCH, Example, example_input, positional
from flysurgery.walker.feature_orders import HEADS, HIDDEN_UNITS, QUERY_KEY, VALUE, Member, Shared, Trial, find_shared
from flysurgery.walker.linears import CONVOLUTIONS, ROLES, Call, Obstacle, Role, Slice, Switch, Target, is_hooked, module_obstacles
from flysurgery.walker.operations import is_in_place, name_of, shape_of
from flysurgery.walker.select import block_names, select
from flysurgery.walker.stream_cuts import Cut, find_cuts
from flysurgery.walker.trace import run_fake, shadow
from flysurgery.walker.walk import Survey, survey, targets_of, walk

__all__ = ["Target", "example_input", "walk"]
