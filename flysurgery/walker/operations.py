"""The vocabulary: which aten operators move entries, which map them one by one, which mix them."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.utils import _pytree as pytree


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The same entries under the same indices (the dtype may change).
IDENTITY = _names("_to_copy alias clone contiguous detach dropout feature_dropout lift_fresh lift_fresh_copy to type_as")

# Entries moved, copied or dropped, none changed; every argument but the tensors is plain data.
SHAPE = IDENTITY | _names(
    "_unsafe_view cat chunk concat concatenate expand expand_as flatten getitem hsplit hstack mT moveaxis movedim narrow numpy_T permute "
    "ravel repeat repeat_interleave reshape reshape_as select slice split split_with_sizes squeeze stack swapaxes swapdims t "
    "tensor_split tile transpose unbind unflatten unsafe_chunk unsafe_split unsqueeze view view_as vsplit vstack"
)

# Results that may have the memory of the first argument.
VIEW = SHAPE - _names(
    "_to_copy cat clone concat concatenate dropout feature_dropout hstack lift_fresh_copy repeat repeat_interleave stack tile to type_as "
    "vstack"
)
# Views that not all strides allow.
STRIDED = _names("_unsafe_view view view_as")

# Also moves entries, by amounts or indices that are not followed.
REARRANGE = _names(
    "as_strided col2im constant_pad_nd copy flip gather im2col index index_put index_select masked_select meshgrid pad pad_sequence "
    "pixel_shuffle pixel_unshuffle roll scatter select_scatter slice_scatter take_along_dim unfold view_as_complex view_as_real"
)

ACTIVATION = _names(
    "celu elu erf gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid logit mish prelu relu relu6 rrelu selu sigmoid "
    "silu softplus softshrink softsign special_erf special_expit tanh threshold"
)

# Each output entry comes from the entries at the same (broadcast) index of the inputs.
POINTWISE = ACTIVATION - {"glu"} | _names(
    "abs absolute add addcdiv addcmul ceil clamp clamp_max clamp_min clip cos div divide exp exp2 expm1 floor lerp log log1p log2 "
    "masked_fill maximum minimum mul multiply nan_to_num neg negative pow reciprocal round rsqrt rsub sign sin sqrt square sub subtract "
    "true_divide where"
)

# New tensors that have a shape, but no values, from their first argument.
FRESH = _names("empty_like full_like new_empty new_full new_ones new_zeros ones_like rand_like randn_like zeros_like")
SUM = _names("add lerp rsub sub subtract")
PRODUCT = _names("addcdiv addcmul div divide mul multiply true_divide")
NORM = _names("batch_norm group_norm instance_norm layer_norm native_layer_norm rms_norm _fused_rms_norm")
REDUCTION = _names("amax amin cumsum linalg_vector_norm logsumexp max mean min norm prod std std_mean sum var var_mean")
# Pools and resizing work on each channel apart, as does a depthwise convolution.
CHANNELWISE = _names(
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_max_pool2d avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d "
    "upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d _upsample_bicubic2d_aa "
    "_upsample_bilinear2d_aa"
)
CONVOLUTION = _names("conv1d conv2d conv3d convolution")
PRODUCT_OF_MATRICES = _names("baddbmm bmm einsum matmul mm")
SOFTMAX = _names("softmax _softmax _safe_softmax")


def reached(start: Iterable[Node], after: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """The nodes of ``start``, and all that ``after`` leads to from them, step by step."""
    found, pending = set[Node](), [*start]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += after(node)
    return found


def name_of(node: Node) -> str:
    """The operator's name without overload, and without the underscore of an in-place form; empty where the node calls nothing."""
    if node.op != "call_function":
        return ""
    packet = getattr(node.target, "overloadpacket", node.target)
    name = getattr(packet, "__name__", str(packet))
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def modules_of(node: Node) -> list[tuple[str, Any]]:
    """Names and classes of the modules in whose forwards the node ran, the outermost first."""
    return list((node.meta.get("nn_module_stack") or {}).values())


def is_in_place(node: Node) -> bool:
    """Whether the operator writes into one of its arguments."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


def is_fused_attention(name: str) -> bool:
    """Whether an operator of that name is attention from query, key and value to the output."""
    return "scaled_dot_product" in name or name == "flex_attention"


def value_of(node: Node) -> Any:
    """The fake result that the exporter recorded: a tensor, a tuple or list of tensors, or a number."""
    return node.meta.get("val")


def is_static(value: Any) -> bool:
    """Whether all sizes of a recorded result are plain numbers, none of them dependent on data."""
    return all(isinstance(size, int) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) for size in leaf.shape)


def shape_of(node: Node) -> tuple[int, ...] | None:
    """The result's shape, or None where the node gives no tensor of known sizes."""
    value = value_of(node)
    return tuple(value.shape) if isinstance(value, Tensor) and is_static(value) else None


def is_discrete(node: Node) -> bool:
    """Whether the result is a tensor of integers or truth values: an index or a mask, through which no values flow."""
    value = value_of(node)
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def einsum_letters(node: Node) -> tuple[list[str], str]:
    """The letters of each operand of an einsum, and those of its result; none of these where the equation leaves them out."""
    operands, _, result = str(node.args[0]).replace(" ", "").partition("->")
    return operands.split(","), result


def is_depthwise(node: Node) -> bool:
    """Whether a convolution has one group a channel."""
    weight = node.args[1] if len(node.args) > 1 else None
    shape = shape_of(weight) if isinstance(weight, Node) else None
    return shape is not None and shape[1] == 1
