"""Where: find the linears of a model by dataflow, with their roles and the obstacles to replacing them. Knows no butterflies."""

from flysurgery.walker.blocks import block_names as block_names
from flysurgery.walker.example import EXAMPLE_BATCH as EXAMPLE_BATCH
from flysurgery.walker.example import example_input as example_input
from flysurgery.walker.export import run_fake as run_fake
from flysurgery.walker.linears import Call as Call
from flysurgery.walker.obstacles import CODES as CODES
from flysurgery.walker.obstacles import Obstacle as Obstacle
from flysurgery.walker.obstacles import has_own_forward as has_own_forward
from flysurgery.walker.obstacles import is_plain_pointwise as is_plain_pointwise
from flysurgery.walker.operations import is_in_place as is_in_place
from flysurgery.walker.operations import name_of as name_of
from flysurgery.walker.operations import shape_of as shape_of
from flysurgery.walker.owners import CONVOLUTIONS as CONVOLUTIONS
from flysurgery.walker.select import select as select
from flysurgery.walker.shadow import shadow as shadow
from flysurgery.walker.survey import Survey as Survey
from flysurgery.walker.survey import survey as survey
from flysurgery.walker.target import ROLES as ROLES
from flysurgery.walker.target import Role as Role
from flysurgery.walker.target import Slice as Slice
from flysurgery.walker.target import Switch as Switch
from flysurgery.walker.target import Target as Target
from flysurgery.walker.walk import walk as walk
