"""timm models with the weights that timm publishes for them."""

from __future__ import annotations

from typing import Any

import timm
from torch import nn

from flysurgery.checkpoint import vouch_for_weights
from flysurgery.errors import ModelError

CONNECT_SECONDS = 10.0


def build_pretrained(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build a timm model and load its published weights, from the local cache or the network.

    Raises:
        ModelError: there are none, or they cannot be reached; the message names ``--checkpoint FILE`` and
            ``--no-pretrained``.
    """
    check_available(name)
    try:
        model = timm.create_model(name, pretrained=True, **arguments)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(_instead(f"the weights of {name} could not be loaded ({_first_line(error)})")) from error
    vouch_for_weights(model)
    return model


def check_available(name: str) -> None:
    """Fail at once where the weights of ``name`` are neither published, nor cached, nor within reach of the network.

    The hub client retries a failed connection for most of a minute. One request without retries tells whether there
    is a network at all. A server that is reached and slow is left to the client and its patience.

    Raises:
        ModelError: as in ``build_pretrained``.
    """
    if ":" in name:
        raise ModelError(_instead(f"vit-pytorch publishes no weights for {name}"))
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise ModelError(_instead(f"timm publishes no weights for {name}"))
    if not config.hf_hub_id or _is_cached(config.hf_hub_id):
        return
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=CONNECT_SECONDS)
    except Exception as error:  # requests, httpx or httpx2, depending on the hub client's version
        if "ReadTimeout" not in type(error).__name__:
            raise ModelError(_instead(f"the weights of {name} cannot be downloaded from {constants.ENDPOINT}: no connection")) from error


def _is_cached(hub_id: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    files = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")
    return any(isinstance(try_to_load_from_cache(hub_id, file), str) for file in files)


def _instead(reason: str) -> str:
    return f"{reason}; give a folder that holds them, a file with --checkpoint FILE, or convert random ones with --no-pretrained"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
