"""An input that a model accepts: models of timm and transformers say so themselves, vit-pytorch's show it in their patch embedding."""

import inspect
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flysurgery.errors import WalkError, first_line
from flysurgery.walker.trace import device_of, on_device_of, run_fake, shadow

Example: TypeAlias = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""The arguments of one forward: a tensor, a tuple by position, or a mapping by name (a dict, or what processors of transformers give)."""

EXAMPLE_BATCH = 2
EXAMPLE_TOKENS = 8
_COMMON_SIZES = (224, 256, 384, 128, 64, 32)
# Tokens that are no patches: none, a class token, or a class token and a distillation token.
_PREFIX_TOKENS = (0, 1, 2)


def example_input(
    model: nn.Module,
) -> Tensor | tuple[Any, ...]:  # shape: (2, channels, height, width), or (2, ...) as the model takes it
    """Zeros that ``model`` accepts as its only input, in its dtype and on its device; for one of token ids and images a tuple of both.

    Sizes are those of a timm model's patch embedding or ``pretrained_cfg``, of the configuration of a model of transformers, or those
    that fit einops' ``Rearrange`` before a linear (vit-pytorch) and the position embedding; else usual ones. The first is taken
    that passes a forward on fake tensors.

    Raises:
        WalkError: none passes; an example must then be given.
    """
    sizes = _timm_sizes(model)
    if len(sizes) == 1:
        return _zeros(model, sizes[0])
    configured = _configured_sizes(model)
    squares = ((count, size, size) for count in _channels(model, 3) for size in _COMMON_SIZES)
    sizes = sizes or itertools.chain(configured, _patch_grid_sizes(model), squares)
    takes_both = {"input_ids", "pixel_values"} <= inspect.signature(model.forward).parameters.keys()
    ids = torch.zeros(EXAMPLE_BATCH, EXAMPLE_TOKENS, dtype=torch.long, device=device_of(model))
    both = ({"input_ids": ids, "pixel_values": _zeros(model, size)} for size in configured if takes_both)
    reason = ""
    for example in itertools.chain((_zeros(model, size) for size in sizes), both):
        try:
            double = shadow(model)
            run_fake(double, on_device_of(double, positional(model, example)))
        except Exception as error:  # whatever the forward raises, it means that this example is not it
            shapes = " and ".join(str(tuple(each.shape)) for each in pytree.tree_leaves(example))
            reason = reason or f", and zeros of shape {shapes} fail ({first_line(error)})"
            continue
        return example if isinstance(example, Tensor) else positional(model, example)
    name = type(model).__name__
    if hasattr(getattr(model, "config", None), "to_dict") and not configured:
        name += ", whose configuration names no image_size"
    raise WalkError(f"no example input is known for {name}{reason}; give an example: a tensor, a tuple or a dict of what its forward takes")


def positional(model: nn.Module, example: Example) -> tuple[Any, ...]:
    """The arguments of one forward by position, with None for those before the last given one that were left out.

    A name that the forward does not take by position is refused (WalkError).
    """
    if not isinstance(example, Mapping):
        return example if isinstance(example, tuple) else (example,)
    parameters = inspect.signature(model.forward).parameters.values()
    places = [each.name for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    defaults = {each.name: None if each.default is each.empty else each.default for each in parameters}
    strange = sorted(set(example) - set(places))
    if strange or not example:
        what = f"no argument {', '.join(map(repr, strange))} by position" if strange else "no argument in an empty example"
        raise WalkError(f"the forward of {type(model).__name__} takes {what}; it takes {', '.join(places)}")
    last = max(map(places.index, example))
    return tuple(example.get(name, defaults[name]) for name in places[: last + 1])


def _zeros(model: nn.Module, size: tuple[int, ...]) -> Tensor:
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return torch.zeros(EXAMPLE_BATCH, *size, dtype=dtype, device=device_of(model))


def _timm_sizes(model: nn.Module) -> list[tuple[int, ...]]:
    """The size that the patch embedding was built for, and that of the configuration where it is another one (a stem may come first)."""
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None) or {}
    config = config if isinstance(config, dict) else vars(config)
    if config.get("input_size") is None:
        return []
    channels, *configured = config["input_size"]
    sizes = (getattr(m, "img_size", None) for m in model.modules() if hasattr(m, "patch_size"))
    built = next((size for size in sizes if size is not None), configured)
    built = tuple(built) if isinstance(built, (tuple, list)) else (built, built)
    return [(count, *sides) for count in _channels(model, channels) for sides in dict.fromkeys((built, tuple(configured)))]


def _channels(model: nn.Module, usual: int) -> tuple[int, ...]:
    """Those of the first convolution, and the usual ones: pixels may become channels before that."""
    conv = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    return tuple(dict.fromkeys((usual if conv is None else conv.in_channels, usual)))


def _configured_sizes(model: nn.Module) -> list[tuple[int, ...]]:
    """The size that the configuration of a model of transformers names, if it does, with the frames of a video where it has them."""
    config = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return []
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or getattr(config, "crop_size", None)
    sides = [size, size] if isinstance(size, int) else [*(size or ())]
    channels = getattr(config, "num_channels", None) or getattr(config, "in_chans", None) or 3
    frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
    image = (channels, *sides)
    return [] if len(sides) != 2 else [image if frames is None else (frames, *image)]


def _patch_grid_sizes(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Sizes from a patch embedding: the first module with einops' pattern, the linear after it, and the position embedding."""
    after = itertools.dropwhile(lambda m: not (hasattr(m, "pattern") and hasattr(m, "axes_lengths")), model.modules())
    rearrange: Any = next(after, None)
    linear = next((m for m in after if isinstance(m, nn.Linear)), None)
    if linear is None:
        return
    known = dict(rearrange.axes_lengths)
    groups = re.findall(r"\([^)]*\)|\S+", rearrange.pattern.split("->")[0])
    axes = [group.strip("()").split() for group in groups[1:]]  # without the batch axis
    free = [axis for axis in itertools.chain(*axes) if axis not in known]
    channels = linear.in_features // max(math.prod(known.values()), 1)
    grid = [axis for axis in free if axis != "c"]
    side = max(known.values(), default=16)
    ways = [way for patches in _patch_counts(model, side) for way in _factorizations(patches, len(grid))]
    for lengths in sorted(ways, key=lambda lengths: max(lengths) / min(lengths)):
        of = {**known, **dict(zip(grid, lengths, strict=True)), "c": channels}
        yield tuple(math.prod(of[axis] for axis in group) for group in axes)


def _patch_counts(model: nn.Module, side: int) -> list[int]:
    """Numbers of patches that the position embedding allows, one less for each prefix token; without one, those of the usual images."""
    tables = [getattr(model, name, None) for name in ("pos_embedding", "pos_embed")]
    lengths = [math.prod(table.shape[:-1]) for table in tables if isinstance(table, Tensor)]
    counts = [length - prefix for length in lengths for prefix in _PREFIX_TOKENS if length > prefix]
    return counts or [(size // side) ** 2 for size in _COMMON_SIZES if size >= side]


def _factorizations(number: int, count: int) -> list[tuple[int, ...]]:
    """Ways to write ``number`` as a product of ``count`` factors."""
    if count <= 1:
        return [(number,)] if count else []
    firsts = [first for first in range(1, number + 1) if number % first == 0]
    return [(first, *rest) for first in firsts for rest in _factorizations(number // first, count - 1)]
