"""What a MODEL argument names, and where its weights come from. Nothing is built before it is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from flysurgery.checkpoint import build_base, check_base, first_line, is_converted, load, load_dense, load_weights, vouch_for_weights
from flysurgery.cli.options import model_arguments
from flysurgery.errors import CheckpointError, ModelError, OptionError

CONNECT_SECONDS = 10.0

HUB_FILES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")
"""Under which names the hub holds the weights of timm's models."""

WEIGHT_SUFFIXES = frozenset({".safetensors", ".pt", ".pth", ".bin", ".tar", ".ckpt"})


@dataclass(frozen=True)
class Skeleton:
    """A dense model of which only the shapes matter, and how it is built again."""

    model: nn.Module
    base: str
    base_args: Mapping[str, Any]


@dataclass(frozen=True)
class Constructor:
    """A timm name or a vit-pytorch class; its weights are in a file, published, or random."""

    name: str
    base: str
    base_args: dict[str, Any] = field(default_factory=dict)
    weights: Path | None = None

    def check_weights(self, *, pretrained: bool) -> None:
        """Fail early where ``build`` would find no weights to download.

        Raises:
            ModelError: the message names ``--checkpoint FILE`` and ``--no-pretrained``.
        """
        if pretrained and self.weights is None:
            check_available(self.base)

    def skeleton(self) -> Skeleton:
        """The model on the meta device, in well under a second for most models.

        One whose constructor reads its own numbers is built on the CPU.
        """
        try:
            model = build_base(self.base, self.base_args, device="meta")
        except ModelError:
            model = build_base(self.base, self.base_args)
        return Skeleton(model, self.base, self.base_args)

    def build(self, *, pretrained: bool, seed: int, device: torch.device) -> nn.Module:
        """The model with its weights, in eval mode, on ``device``.

        Raises:
            ModelError: no weights can be had, or a file's tensors do not fit the model.
            CheckpointError: a file that cannot be read.
        """
        if self.weights is None and pretrained:
            return _build_pretrained(self.base, self.base_args).to(device).eval()
        torch.manual_seed(seed)
        model = build_base(self.base, self.base_args)
        if self.weights is not None:
            load_weights(model, self.weights)
        return model.to(device).eval()


@dataclass(frozen=True)
class _Folder:
    name: str
    folder: Path

    def check_weights(self, *, pretrained: bool) -> None:
        """Nothing to do: the weights are here."""


class DenseFolder(_Folder):
    """A folder in timm's own layout, with its weights."""

    @cached_property
    def _opened(self) -> tuple[nn.Module, str, dict[str, Any]]:
        return load_dense(self.folder)

    def skeleton(self) -> Skeleton:
        """The model itself, which is on this disk anyway."""
        return Skeleton(*self._opened)

    def build(self, *, pretrained: bool, seed: int, device: torch.device) -> nn.Module:
        """The model with its weights, in eval mode, on ``device``."""
        return self._opened[0].to(device)


class ConvertedFolder(_Folder):
    """A folder that ``convert`` wrote."""

    def build(self, *, pretrained: bool, seed: int, device: torch.device) -> nn.Module:
        """The converted model, in eval mode, on ``device``."""
        return load(self.folder, device=device, optimize=False)


Source = Constructor | DenseFolder | ConvertedFolder


def find(text: str, *, base: str | None = None, model_args: list[str] | None = None, checkpoint: Path | None = None) -> Source:
    """Tell what MODEL names, with the options that go with it: a folder or file where one exists, else a constructor.

    Raises:
        ModelError: nothing has that name; the message lists the nearest ones.
        CheckpointError: a weight file is missing.
        OptionError: options that contradict what MODEL is.
    """
    path, arguments = Path(text), model_arguments(model_args)
    if checkpoint is not None and not checkpoint.is_file():
        raise CheckpointError(f"--checkpoint names no file: {checkpoint}")
    if path.is_dir():
        _refuse_options(path, {"--model-args": arguments, "--checkpoint": checkpoint, "--base": base})
        return (ConvertedFolder if is_converted(path) else DenseFolder)(path.resolve().name, path)
    if path.is_file():
        if base is None:
            raise OptionError(f"{text} holds weights only; say which model they belong to, as in --base vit_small_patch16_224")
        _refuse_options(path, {"--checkpoint": checkpoint})
        return _constructor(path.stem, base, arguments, path)
    if base is not None:
        raise OptionError(f"--base goes with a file of weights as MODEL, and there is no file {text}")
    if path.parent != Path() or path.suffix in WEIGHT_SUFFIXES:
        raise ModelError(f"there is no file or folder {text}")
    return _constructor(text.replace(":", "."), text, arguments, checkpoint)


def find_dense(
    text: str, *, base: str | None = None, model_args: list[str] | None = None, checkpoint: Path | None = None
) -> Constructor | DenseFolder:
    """``find`` for what can be converted.

    Raises:
        ModelError: MODEL is converted already; besides the errors of ``find``.
    """
    source = find(text, base=base, model_args=model_args, checkpoint=checkpoint)
    if isinstance(source, ConvertedFolder):
        raise ModelError(f"{text} is converted already; make it dense first: flysurgery densify {text} --out DIR")
    return source


def _refuse_options(path: Path, options: Mapping[str, object]) -> None:
    given = [option for option, value in options.items() if value]
    if given:
        raise OptionError(f"{path} has its own model or weights; {' and '.join(given)} cannot be given with it")


def _constructor(name: str, base: str, base_args: dict[str, Any], weights: Path | None) -> Constructor:
    check_base(base)
    return Constructor(name, base, base_args, weights)


def _build_pretrained(name: str, arguments: dict[str, Any]) -> nn.Module:
    """Build a timm model and load its published weights, from the local cache or the network.

    Raises:
        ModelError: there are none, or they cannot be reached; the message names ``--checkpoint FILE`` and
            ``--no-pretrained``.
    """
    check_available(name)
    try:
        model = timm.create_model(name, pretrained=True, **arguments)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        raise ModelError(_instead(f"the weights of {name} could not be loaded ({first_line(error)})")) from error
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
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    hub_id = config.hf_hub_id
    if not hub_id or any(isinstance(try_to_load_from_cache(hub_id, file), str) for file in HUB_FILES):
        return
    try:
        get_session().head(constants.ENDPOINT, timeout=CONNECT_SECONDS)
    except Exception as error:  # requests, httpx or httpx2, depending on the hub client's version
        if "ReadTimeout" not in type(error).__name__:
            raise ModelError(_instead(f"the weights of {name} cannot be downloaded from {constants.ENDPOINT}: no connection")) from error


def _instead(reason: str) -> str:
    return f"{reason}; give a folder that holds them, a file with --checkpoint FILE, or convert random ones with --no-pretrained"
