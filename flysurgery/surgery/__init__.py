"""From a model to a plan, from a plan to a converted model with its report, and back to dense."""

from flysurgery.surgery.allocating import PLACEHOLDER as PLACEHOLDER
from flysurgery.surgery.allocating import allocate as allocate
from flysurgery.surgery.allocating import check_budget as check_budget
from flysurgery.surgery.apply import apply as apply
from flysurgery.surgery.apply import convert as convert
from flysurgery.surgery.candidates import candidates as candidates
from flysurgery.surgery.densify import densify as densify
from flysurgery.surgery.install import install as install
from flysurgery.surgery.latency_table import read_latency_table as read_latency_table
from flysurgery.surgery.layer_plan import LayerPlan as LayerPlan
from flysurgery.surgery.layer_plan import Part as Part
from flysurgery.surgery.layer_plan import Reason as Reason
from flysurgery.surgery.mark import OPTIMIZED as OPTIMIZED
from flysurgery.surgery.mark import plan_of as plan_of
from flysurgery.surgery.plan import ExampleInput as ExampleInput
from flysurgery.surgery.plan import Plan as Plan
from flysurgery.surgery.planning import plan as plan
from flysurgery.surgery.planning import samples_of as samples_of
from flysurgery.surgery.report import PartRow as PartRow
from flysurgery.surgery.report import Report as Report
from flysurgery.surgery.report import Row as Row
from flysurgery.surgery.table import grouped as grouped
from flysurgery.surgery.table import short_count as short_count
from flysurgery.surgery.table import text_table as text_table
from flysurgery.surgery.tradeoff import Point as Point
from flysurgery.surgery.tradeoff import Tradeoff as Tradeoff
