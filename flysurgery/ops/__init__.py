"""How a product of factors is multiplied: a problem, the backends, and the choice between them."""

from flysurgery.ops.attend import attention as attention
from flysurgery.ops.attend import attention_reason as attention_reason
from flysurgery.ops.backend import Backend as Backend
from flysurgery.ops.dispatch import Explanation as Explanation
from flysurgery.ops.dispatch import Verdict as Verdict
from flysurgery.ops.dispatch import explain as explain
from flysurgery.ops.feed_forward import ffn as ffn
from flysurgery.ops.feed_forward import ffn_launches as ffn_launches
from flysurgery.ops.feed_forward import ffn_reason as ffn_reason
from flysurgery.ops.group import ks_linear_group as ks_linear_group
from flysurgery.ops.multiply import ks_linear as ks_linear
from flysurgery.ops.multiply import ks_multiply as ks_multiply
from flysurgery.ops.norm_linears import norm_linear as norm_linear
from flysurgery.ops.norm_linears import norm_linear_launches as norm_linear_launches
from flysurgery.ops.norm_linears import norm_linear_reason as norm_linear_reason
from flysurgery.ops.parts import Dense as Dense
from flysurgery.ops.parts import FusedFactors as FusedFactors
from flysurgery.ops.parts import Gated as Gated
from flysurgery.ops.parts import Linear as Linear
from flysurgery.ops.parts import Norm as Norm
from flysurgery.ops.patches import patch_embedding as patch_embedding
from flysurgery.ops.patches import patch_embedding_reason as patch_embedding_reason
from flysurgery.ops.problem import Problem as Problem
from flysurgery.ops.registry import BACKENDS as BACKENDS
from flysurgery.ops.residual import linear_residual as linear_residual
from flysurgery.ops.residual import linear_residual_reason as linear_residual_reason
