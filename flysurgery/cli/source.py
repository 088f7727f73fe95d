"""What a MODEL argument names, and where its weights come from. Nothing is built before it is asked for."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from flysurgery import checkpoint as storage
from flysurgery import surgery
from flysurgery.cli.options import choices_of, model_arguments, names
from flysurgery.errors import CheckpointError, ModelError, OptionError, first_line, raised_as

PLANNING = ("roles", "include", "exclude", "blocks", "min_size", "convs", "nblocks", "rank", "patterns", "per_layer")
"""The options of verbs that ``surgery.plan`` has under the same names."""

CONNECT_SECONDS = 10.0

HUB_FILES = ("model.safetensors", "open_clip_model.safetensors", "pytorch_model.bin", "open_clip_pytorch_model.bin")
"""Under which names the hub holds the weights of timm's models."""

WEIGHT_SUFFIXES = frozenset({".safetensors", ".pt", ".pth", ".bin", ".tar", ".ckpt"})


Described = tuple[str, dict[str, Any]]  # a base, and the arguments with which it builds a model


class Dense:
    """What MODEL names, where it can be converted; ``name`` is that of the model."""

    name: str

    def check_weights(self, *, pretrained: bool) -> None:
        """Raise ``ModelError`` early where ``build`` would find no weights; the message says what to do."""

    def described(self) -> Described:
        raise NotImplementedError

    def skeleton(self) -> nn.Module:
        """The model for its shapes: on the meta device, in well under a second for most; one that reads its own numbers, on the CPU."""
        try:
            return storage.build_base(*self.described(), device="meta")
        except ModelError:
            return storage.build_base(*self.described())

    def plan(self, skeleton: nn.Module, arch: str, options: Mapping[str, Any]) -> surgery.Plan:
        """The plan for the ``skeleton`` by those of a verb's options that choose layers and architectures."""
        readers = {"roles": partial(names, option="--roles"), "per_layer": choices_of}
        given = {name: options[name] for name in PLANNING if options.get(name) not in (None, (), [])}
        given |= {name: read(given[name]) for name, read in readers.items() if name in given}
        base, base_args = self.described()
        return surgery.plan(skeleton, arch, base=base, base_args=base_args, **given)

    def build(self, *, pretrained: bool, seed: int, device: torch.device) -> nn.Module:
        """The model with its weights, or with random ones, in eval mode, on ``device``.

        Raises ``ModelError`` where no weights can be had, or they do not fit, and ``CheckpointError`` for a file that cannot be read.
        """
        torch.manual_seed(seed)
        return self._built(pretrained=pretrained).to(device).eval()

    def _built(self, *, pretrained: bool) -> nn.Module:
        raise NotImplementedError


@dataclass(frozen=True)
class Constructor(Dense):
    """A timm name or a vit-pytorch class; its weights are in a file, published, or random."""

    name: str
    base: str
    base_args: dict[str, Any]
    weights: Path | None

    def __post_init__(self) -> None:
        storage.check_base(self.base)

    def check_weights(self, *, pretrained: bool) -> None:
        if pretrained and self.weights is None:
            check_available(self.base)

    def described(self) -> Described:
        return self.base, self.base_args

    def _built(self, *, pretrained: bool) -> nn.Module:
        if self.weights is None and pretrained:
            check_available(self.base)
            try:
                model = timm.create_model(self.base, pretrained=True, **self.base_args)
            except (OSError, RuntimeError, TypeError, ValueError) as error:
                raise ModelError(_instead(f"the weights of {self.base} could not be loaded ({first_line(error)})")) from error
            storage.vouch_for_weights(model)
            return model
        model = storage.build_base(self.base, self.base_args)
        if self.weights is not None:
            storage.load_weights(model, self.weights)
        return model


@dataclass(frozen=True)
class DenseFolder(Dense):
    """A folder in timm's own layout, with its weights."""

    name: str
    folder: Path

    @cached_property
    def _opened(self) -> tuple[nn.Module, str, dict[str, Any]]:
        return storage.load_dense(self.folder)

    def described(self) -> Described:
        return self._opened[1:]

    def skeleton(self) -> nn.Module:
        return self._opened[0]

    def _built(self, *, pretrained: bool) -> nn.Module:
        return self._opened[0]


@dataclass(frozen=True)
class ConvertedFolder:
    """A folder that ``convert`` wrote."""

    name: str
    folder: Path

    def check_weights(self, *, pretrained: bool) -> None:
        """Nothing to do: the weights are here."""

    def build(self, *, pretrained: bool, seed: int, device: torch.device) -> nn.Module:
        return storage.load(self.folder, device=device)


@dataclass(frozen=True)
class TransformersModel(Dense):
    """A model of transformers, by a name on the hub or a folder, that its ``from_pretrained`` opens."""

    name: str
    where: Path

    def check_weights(self, *, pretrained: bool) -> None:
        self.described()  # the configuration, which is read before anything else is done

    def described(self) -> Described:
        return self._base

    def skeleton(self) -> nn.Module:
        model = super().skeleton()
        storage.describe_images(model, self._processor)
        return model

    def _built(self, *, pretrained: bool) -> nn.Module:
        base, arguments = self._base
        if not pretrained:
            model = storage.build_base(base, arguments)
        else:
            found = storage.transformers_class(base.partition(":")[2])
            with raised_as(ModelError, f"the weights of {self.where} could not be loaded"):
                model, problems = found.from_pretrained(str(self.where), output_loading_info=True)
            missing = sorted(map(str, problems["missing_keys"]))
            if missing:
                raise ModelError(f"{self.where} does not hold all weights of {found.__name__}: it lacks {', '.join(missing[:3])}")
        storage.describe_images(model, self._processor)
        return model

    @cached_property
    def _base(self) -> Described:
        """The class that the configuration names, and the configuration's entries."""
        from transformers import AutoConfig

        if not self.where.is_dir():
            if self.where.is_absolute() or len(self.where.parts) > 2:
                raise ModelError(f"there is no folder {self.where}")
            if not _within_reach(str(self.where), ("config.json",)):
                raise ModelError(
                    f"{self.where} cannot be downloaded: no connection to the Hugging Face hub; give a folder that save_pretrained wrote, "
                    "or a class with random weights, as in transformers:ViTModel --no-pretrained"
                )
        try:
            config = AutoConfig.from_pretrained(str(self.where), trust_remote_code=False)
        except Exception as error:
            raise ModelError(
                f"transformers finds no model '{self.where}' ({first_line(error)}); give a name on the hub, a folder, "
                "or transformers:CLASS with --no-pretrained"
            ) from error
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError(
                f"{self.where} is quantized or converted already; make it dense first: flysurgery densify {self.where} --out DIR"
            )
        named = config.architectures or []
        if len(named) != 1:
            raise ModelError(f"the configuration of {self.where} must name one class in 'architectures', got {named}")
        storage.transformers_class(named[0])
        return f"transformers:{named[0]}", surgery.transformers_arguments(config.to_dict())

    @cached_property
    def _processor(self) -> Mapping[str, Any]:
        """The settings of the model's image processor; empty where it has none."""
        from transformers.utils.hub import cached_file

        try:
            file = cached_file(str(self.where), storage.PROCESSOR, _raise_exceptions_for_missing_entries=False)
            return {} if file is None else storage.read_json(Path(file))
        except OSError:  # there is none
            return {}


Source = Dense | ConvertedFolder


def find(text: str, *, base: str | None = None, model_args: list[str] | None = None, checkpoint: Path | None = None) -> Source:
    """Tell what MODEL names, with the options that go with it: a folder or file where one exists, else a constructor.

    Raises ``ModelError`` where nothing has that name, with the nearest ones, ``CheckpointError`` where a weight file is missing, and
    ``OptionError`` for options that contradict what MODEL is.
    """
    path, arguments = Path(text), model_arguments(model_args)
    if checkpoint is not None and not checkpoint.is_file():
        raise CheckpointError(f"--checkpoint names no file: {checkpoint}")
    if path.is_dir():
        _refuse_options(path, {"--model-args": arguments, "--checkpoint": checkpoint, "--base": base})
        kind = ConvertedFolder if storage.is_converted(path) else TransformersModel if _names_transformers(path) else DenseFolder
        return kind(path.resolve().name, path)
    if path.is_file():
        if base is None:
            raise OptionError(f"{text} holds weights only; say which model they belong to, as in --base vit_small_patch16_224")
        _refuse_options(path, {"--checkpoint": checkpoint})
        return Constructor(path.stem, base, arguments, path)
    if base is not None:
        raise OptionError(f"--base goes with a file of weights as MODEL, and there is no file {text}")
    named = text.removeprefix(storage.TRANSFORMERS)
    if named != text and not re.fullmatch(r"[A-Z]\w*", named):
        _refuse_options(path, {"--model-args": arguments, "--checkpoint": checkpoint})
        return TransformersModel(Path(named).name, Path(named))
    if path.parent != Path() or path.suffix in WEIGHT_SUFFIXES:
        raise ModelError(f"there is no file or folder {text}")
    return Constructor(text.replace(":", "."), text, arguments, checkpoint)


def find_pair(text: str, other: str | None, **described: Any) -> tuple[Source, Source | None]:
    """``find`` for a model and the one that it is held against. Where ``text`` is a folder, the options ``described`` are the other's."""
    are_others = other is not None and Path(text).is_dir()
    source = find(text, **({} if are_others else described))
    return source, None if other is None else find(other, **(described if are_others else {}))


def find_dense(text: str, *, base: str | None = None, model_args: list[str] | None = None, checkpoint: Path | None = None) -> Dense:
    """``find`` for what can be converted. Raises ``ModelError`` for what is converted already."""
    source = find(text, base=base, model_args=model_args, checkpoint=checkpoint)
    if isinstance(source, Dense):
        return source
    raise ModelError(f"{text} is converted already; make it dense first: flysurgery densify {text} --out DIR")


def base_of(model: nn.Module, folder: Path) -> Described:
    """The base of a converted model, and its arguments. Raises ``CheckpointError`` where its ``folder`` does not say them."""
    plan = surgery.plan_of(model)
    if plan is None or plan.base is None:
        raise CheckpointError(f"{folder} does not say which dense model it was made from")
    return plan.base, dict(plan.base_args)


def _names_transformers(folder: Path) -> bool:
    """Whether a folder holds a dense model as ``save_pretrained`` of transformers writes it."""
    try:
        config = storage.read_json(folder / "config.json")
    except (CheckpointError, FileNotFoundError):
        return False
    return isinstance(config, dict) and isinstance(config.get("model_type"), str) and isinstance(config.get("architectures"), list)


def _refuse_options(path: Path, options: Mapping[str, object]) -> None:
    given = [option for option, value in options.items() if value]
    if given:
        raise OptionError(f"{path} has its own model or weights; {' and '.join(given)} cannot be given with it")


def check_available(name: str) -> None:
    """Raise ``ModelError`` at once where the weights of ``name`` are neither published, nor cached, nor within reach of the network.

    The hub client retries a failed connection for most of a minute. One request without retries tells whether there
    is a network at all. A server that is reached and slow is left to the client and its patience.
    """
    if ":" in name:
        raise ModelError(_instead(f"no weights are published for the class {name}"))
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise ModelError(_instead(f"timm publishes no weights for {name}"))
    if config.hf_hub_id and not _within_reach(config.hf_hub_id, HUB_FILES):
        raise ModelError(_instead(f"the weights of {name} cannot be downloaded from the Hugging Face hub: no connection"))


def _within_reach(hub_id: str, files: Sequence[str]) -> bool:
    """Whether one of the files is cached, or the hub answers."""
    from huggingface_hub import constants, get_session, try_to_load_from_cache

    if any(isinstance(try_to_load_from_cache(hub_id, file), str) for file in files):
        return True
    try:
        get_session().head(constants.ENDPOINT, timeout=CONNECT_SECONDS)
    except Exception as error:  # requests, httpx or httpx2, depending on the hub client's version
        return "ReadTimeout" in type(error).__name__
    return True


def _instead(reason: str) -> str:
    return f"{reason}; give a folder that holds them, a file with --checkpoint FILE, or, except for a teacher, --no-pretrained"
