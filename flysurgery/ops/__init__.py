"""How a product of factors is multiplied, and what fused operations compute: problems, descriptions, backends, and the choice."""

from flysurgery.gpu.kernel import compiling
from flysurgery.gpu.operands import Dense, FusedFactors, Gated, Linear, Norm
from flysurgery.gpu.remembered_calls import Repeating, forget_moved
from flysurgery.gpu.weight_cache import forget_derived, taking
from flysurgery.ops.attention import Attention, attended
from flysurgery.ops.backend import Backend, Problem
from flysurgery.ops.choose_backend import BACKENDS, Explanation, Verdict, explain
from flysurgery.ops.choose_launches import Operation, Stage, Way, reason, run, way
from flysurgery.ops.feed_forward import FeedForward
from flysurgery.ops.linears import MOMENTS, LayerNorm, LinearResidual, NormLinears, leaves_moments, run_with_moments
from flysurgery.ops.multiply import ks_linear, ks_linear_group, ks_multiply
from flysurgery.ops.patch_embedding import PatchEmbedding, embedded
from flysurgery.ops.training import trained, trained_with_x, training_reason

__all__ = ["explain", "forget_derived", "ks_linear", "ks_multiply"]
