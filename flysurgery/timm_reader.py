"""How timm opens converted models: ``timm.create_model("local-dir:DIR", pretrained=True)``, by its registry of models."""

from typing import Any

from timm.models import register_model
from torch import nn


@register_model
def flysurgery_structured(pretrained: bool = False, **arguments: Any) -> nn.Module:
    """Build a converted model as timm builds its own; see ``flysurgery.checkpoint.build_for_timm``."""
    from flysurgery.checkpoint import build_for_timm  # timm may be imported by the rooms below that one

    return build_for_timm(pretrained, **arguments)
