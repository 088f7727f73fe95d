"""Builds the model that timm asks for under the registered name, so that ``timm.create_model("local-dir:DIR")`` opens a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from timm.models._features import FeatureGetterNet
from torch import nn

from flysurgery.checkpoint.base import ENTRY_POINT, build_base, build_random, plain_arguments
from flysurgery.checkpoint.config import describe_data
from flysurgery.checkpoint.load import downloaded, read_model
from flysurgery.checkpoint.tensors import single_float_dtype
from flysurgery.errors import CheckpointError, ModelError, PlanError, raised_as
from flysurgery.patterns import MAX_FEATURES
from flysurgery.surgery import Plan, plan_of

FEATURE_ARGUMENTS = ("out_indices", "feature_cls", "output_fmt")
"""What timm's models take besides ``features_only``."""


def build_for_timm(
    pretrained: bool = False,
    *,
    base: str | None = None,
    base_args: Mapping[str, Any] | None = None,
    plan: Mapping[str, Any] | None = None,
    pretrained_cfg: Mapping[str, Any] | None = None,
    pretrained_cfg_overlay: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    **arguments: Any,
) -> nn.Module:
    """Build a converted model as timm builds its own: from its ``config.json``, with its weights or with random ones.

    ``num_classes`` gives it a new, random head where it differs, ``img_size`` resizes its position embedding, and
    ``features_only`` wraps it. Other arguments go to the base's constructor, over ``base_args``, and may not change the
    shape of any tensor. As with timm's own models, the result is in training mode.

    Raises:
        CheckpointError: no folder was named, it is damaged, or an argument does not go with the model.
    """
    if base is None or plan is None:
        raise CheckpointError(f"{ENTRY_POINT} is built from a checkpoint's folder: timm.create_model('local-dir:DIR', pretrained=True)")
    # timm passes on the saved arguments a second time, for filters of dense checkpoints; there is none here.
    arguments.pop("pretrained_model_args", None)
    wants_features = arguments.pop("features_only", False)
    features = {name: arguments.pop(name) for name in FEATURE_ARGUMENTS if name in arguments}
    num_classes, img_size = arguments.pop("num_classes", None), arguments.pop("img_size", None)
    config = {**(pretrained_cfg or {}), **(pretrained_cfg_overlay or {})}
    try:
        overrides = plain_arguments(arguments)
        model = read_model(_folder(config, cache_dir), overrides) if pretrained else build_random(Plan.from_json(plan), overrides)
        with raised_as(CheckpointError, f"img_size={img_size!r:.60} cannot be given"):
            _resize(model, img_size)
        with raised_as(CheckpointError, f"num_classes={num_classes!r:.60} cannot be given"):
            _change_head(model, num_classes)
        describe_data(model, config)
        with raised_as(CheckpointError, "features_only cannot be given"):
            return _wrap(model, features) if wants_features else model
    except (ModelError, PlanError) as error:
        raise CheckpointError(f"the converted {base!s:.60} cannot be built: {error}") from error


def _folder(config: Mapping[str, Any], cache_dir: str | Path | None) -> Path:
    if config.get("source") == "hf-hub" and config.get("hf_hub_id"):
        return downloaded(str(config["hf_hub_id"]), cache_dir)
    if not config.get("file"):
        raise CheckpointError(
            f"{ENTRY_POINT} has no weights of its own; name a folder, as in timm.create_model('local-dir:DIR', pretrained=True)"
        )
    return Path(config["file"])


def _resize(model: nn.Module, img_size: int | Sequence[int] | None) -> None:
    if img_size is None:
        return
    wanted = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
    if len(wanted) != 2 or not all(type(side) is int and 0 < side <= MAX_FEATURES for side in wanted):
        raise CheckpointError(f"img_size must be a positive whole number or two of them, got {img_size!r:.60}")
    current = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if current is not None and tuple(current) == wanted:
        return
    if not hasattr(model, "set_input_size"):
        raise CheckpointError(f"img_size={img_size} cannot be given: a {type(model).__name__} keeps the input size that it was saved with")
    model.set_input_size(img_size=wanted)  # pyright: ignore[reportCallIssue]


def _change_head(model: nn.Module, num_classes: int | None) -> None:
    if num_classes is None:
        return
    if type(num_classes) is not int or not 0 <= num_classes <= MAX_FEATURES:
        raise CheckpointError(f"num_classes must be a whole number from 0 to {MAX_FEATURES}, got {num_classes!r:.60}")
    plan = plan_of(model)
    if num_classes == getattr(model, "num_classes", None if plan is None else plan.base_args.get("num_classes")):
        return
    if not hasattr(model, "reset_classifier"):
        raise CheckpointError(f"num_classes={num_classes} cannot be given: a {type(model).__name__} keeps the head that it was saved with")
    dtype = single_float_dtype(parameter.dtype for parameter in model.parameters())
    model.reset_classifier(num_classes)  # pyright: ignore[reportCallIssue]
    if dtype is not None:
        model.to(dtype)


def _wrap(model: nn.Module, features: Mapping[str, Any]) -> nn.Module:
    """The model as timm's ``features_only`` gives it: the same levels and layout as those of the dense base."""
    plan = plan_of(model)
    if plan is None or plan.base is None or not hasattr(model, "forward_intermediates"):
        raise CheckpointError(f"features_only cannot be given: a {type(model).__name__} has no forward_intermediates")
    dense: Any = build_base(plan.base, {**plan.base_args, **features, "features_only": True}, device="meta")
    wrapped = FeatureGetterNet(model, out_indices=tuple(dense.feature_info.out_indices), output_fmt=getattr(dense, "output_fmt", "NCHW"))
    wrapped.pretrained_cfg = wrapped.default_cfg = model.pretrained_cfg
    return wrapped
