"""From a model to a plan, from a plan to a converted model with its report, and back to dense."""

from flysurgery.surgery.allocating import PLACEHOLDER as PLACEHOLDER
from flysurgery.surgery.allocating import FidelityGoal as FidelityGoal
from flysurgery.surgery.allocating import allocate as allocate
from flysurgery.surgery.allocating import check_budget as check_budget
from flysurgery.surgery.allocating import decide as decide
from flysurgery.surgery.allocating import prepare as prepare
from flysurgery.surgery.allocation import Allocation as Allocation
from flysurgery.surgery.allocation import Trials as Trials
from flysurgery.surgery.allocation import within as within
from flysurgery.surgery.apply import apply as apply
from flysurgery.surgery.apply import densify as densify
from flysurgery.surgery.apply import install as install
from flysurgery.surgery.candidates import candidates as candidates
from flysurgery.surgery.candidates import named_candidates as named_candidates
from flysurgery.surgery.candidates import read_latency_table as read_latency_table
from flysurgery.surgery.change import STANDS_FOR as STANDS_FOR
from flysurgery.surgery.change import is_optimized as is_optimized
from flysurgery.surgery.change import plan_of as plan_of
from flysurgery.surgery.choices import Measurement as Measurement
from flysurgery.surgery.choices import Point as Point
from flysurgery.surgery.choices import Search as Search
from flysurgery.surgery.choices import Split as Split
from flysurgery.surgery.choices import TimedChoice as TimedChoice
from flysurgery.surgery.choices import TimedGroup as TimedGroup
from flysurgery.surgery.choices import Tradeoff as Tradeoff
from flysurgery.surgery.convert import convert as convert
from flysurgery.surgery.plan import ExampleInput as ExampleInput
from flysurgery.surgery.plan import LayerPlan as LayerPlan
from flysurgery.surgery.plan import Part as Part
from flysurgery.surgery.plan import Plan as Plan
from flysurgery.surgery.plan import Reason as Reason
from flysurgery.surgery.planning import plan as plan
from flysurgery.surgery.planning import samples_of as samples_of
from flysurgery.surgery.report import PartRow as PartRow
from flysurgery.surgery.report import Report as Report
from flysurgery.surgery.report import Row as Row
from flysurgery.surgery.report import block_errors as block_errors
from flysurgery.surgery.report import fidelity_rows as fidelity_rows
from flysurgery.surgery.report import measures as measures
from flysurgery.surgery.report import permutation_tables as permutation_tables
from flysurgery.surgery.serial import as_json as as_json
from flysurgery.surgery.tables import grouped as grouped
from flysurgery.surgery.tables import short_count as short_count
from flysurgery.surgery.tables import text_table as text_table

finite = as_json
