"""Models without their weights, dense and converted. Code of timm, torchvision, vit-pytorch and transformers runs, and no other."""

import difflib
import importlib
import json
import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from flysurgery.checkpoint.meter import LimitError, Limits, metered
from flysurgery.errors import ModelError, first_line, raised_as, shown
from flysurgery.patterns import MAX_FEATURES
from flysurgery.surgery import ENTRY_POINT as ENTRY_POINT
from flysurgery.surgery import Plan, draw_anew, install

REFUSED_ARGUMENTS = frozenset({"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_model_args", "checkpoint_path"})
REFUSED_ARGUMENTS |= {"cache_dir", "device", "dtype", "weights"}
"""Arguments of timm and torchvision that would read a file, reach for the network, or decide where the model lives."""

TRANSFORMERS = "transformers:"
"""What the bases begin with that are classes of transformers."""

TORCHVISION = "torchvision:"
"""What the bases begin with that are classifiers of torchvision, by their names or classes."""

REFUSED_CONFIG = frozenset({"auto_map", "attn_implementation", "experts_implementation", "quantization_config", "use_pretrained_backbone"})
REFUSED_CONFIG |= {"transformers_weights", "fusion_config"} | REFUSED_ARGUMENTS - {"device", "dtype", "weights"}
"""Entries of a configuration of transformers that name code, kernels or weights."""

SOURCES = ("hf-hub:", "hf_hub:", "local-dir:")
"""What timm's names of models from elsewhere begin with."""


def without_tag(base: str) -> str:
    """The base without the tag of a timm name, which names published weights."""
    return base if ":" in base else base.partition(".")[0]


def build_base(base: str, base_args: Mapping[str, Any] | None = None, *, device: torch.device | str | None = None) -> nn.Module:
    """Build the dense model with its own random start, without any weights from elsewhere.

    ``base`` is a timm name, with or without a weights' tag, or ``"vit_pytorch:ViT"``, ``"vit_pytorch.simple_vit:SimpleViT"``,
    ``"torchvision:vit_b_16"`` or ``"transformers:ViTModel"``. ``base_args`` are its keyword arguments, or the entries of the
    configuration of a class of transformers, JSON values only; lists become tuples. On the meta device only shapes are made.

    Raises:
        ModelError: no such model, an argument that is no plain value or is refused, or the constructor's own complaint.
    """
    factory = _factory(base)
    arguments = plain_arguments(base_args or {})
    on_meta = device is not None and torch.device(device).type == "meta"
    # whatever a constructor makes of arguments that it does not like
    with raised_as(ModelError, f"{base} cannot be built with {shown(arguments)}"), torch.device("meta") if on_meta else nullcontext():
        model = factory(**arguments)
    return model if device is None or on_meta else model.to(device)


def check_base(base: str) -> None:
    """Refuse a name that ``build_base`` does not know (ModelError); the message lists the nearest ones."""
    _factory(base)


def plain_arguments(base_args: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with lists as tuples, as constructors take them; refuses what is no JSON, too large or a refused name (ModelError)."""
    if not isinstance(base_args, Mapping) or not all(isinstance(name, str) and name.isidentifier() for name in base_args):
        raise ModelError(f"base_args must map argument names to values, got {shown(base_args)}")
    refused = sorted(REFUSED_ARGUMENTS & set(base_args))
    if refused:
        raise ModelError(f"base_args may not set {', '.join(refused)}: a base is built from its name and sizes alone")
    return {name: _plain(value, name) for name, value in base_args.items()}


def _plain(value: Any, name: str) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_plain(each, name) for each in value)
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(each, name) for key, each in value.items()}
    if isinstance(value, int | float) and not abs(value) <= MAX_FEATURES:  # NaN fails it too
        raise ModelError(f"base_args: {name} must be a number of at most {MAX_FEATURES}, got {shown(value)}")
    if value is None or isinstance(value, str | int | float):
        return value
    raise ModelError(f"base_args: {name} must be a value that JSON has (text, number, list, ...), got {shown(value)}")


def _factory(base: str) -> Callable[..., nn.Module]:
    if ":" not in base:
        return _timm_factory(base)
    if base.startswith(TORCHVISION):
        return _torchvision_factory(base.removeprefix(TORCHVISION))
    return _transformers_factory(base.removeprefix(TRANSFORMERS)) if base.startswith(TRANSFORMERS) else _vit_pytorch_factory(base)


def _timm_factory(base: str) -> Callable[..., nn.Module]:
    architecture, _, tag = base.partition(".")
    if not re.fullmatch(r"\w+", architecture) or not timm.is_model(architecture) or architecture == ENTRY_POINT:
        known = timm.list_models()
        near = [name for name in known if name.startswith(architecture)] or difflib.get_close_matches(architecture[:60], known, cutoff=0.5)
        hint = f"the nearest names are {', '.join(near[:3])}" if near else "others begin with vit_pytorch:, torchvision: or transformers:"
        raise ModelError(f"timm {timm.__version__} has no model '{architecture}'; {hint}")
    tags = timm.list_models(f"{architecture}.*", include_tags=True)
    if tag and base not in tags:
        raise ModelError(f"timm {timm.__version__} has no weights '{tag}' for {architecture}; it has {', '.join(tags) or 'none'}")
    return lambda **arguments: timm.create_model(base, pretrained=False, **arguments)


def _vit_pytorch_factory(base: str) -> Callable[..., nn.Module]:
    parts = re.fullmatch(r"(vit_pytorch(?:\.[A-Za-z]\w*)?):([A-Za-z]\w*)", base)
    if parts is None:
        known = "vit_pytorch:CLASS, vit_pytorch.MODULE:CLASS, torchvision:NAME or transformers:CLASS"
        raise ModelError(f"a base outside timm is {known}, got '{base}'")
    module_name, class_name = parts.groups()
    found: Any = getattr(_imported(module_name), class_name, None)
    # The class must be vit-pytorch's own: what its modules import from elsewhere is not to be called by name.
    if not (isinstance(found, type) and issubclass(found, nn.Module) and found.__module__.partition(".")[0] == "vit_pytorch"):
        raise ModelError(f"{module_name} has no model class '{class_name}'")
    return found


def _torchvision_factory(name: str) -> Callable[..., nn.Module]:
    models = _imported("torchvision.models")
    found: Any = getattr(models, name, None)
    if not (name in models.list_models(module=models) or (isinstance(found, type) and issubclass(found, nn.Module))):
        raise ModelError(f"torchvision has no classifier '{name:.60}'")
    return found


def _transformers_factory(name: str) -> Callable[..., nn.Module]:
    found = transformers_class(name)

    def build(**arguments: Any) -> nn.Module:
        _refuse_sources(arguments)
        return found(found.config_class.from_dict(json.loads(json.dumps(arguments))))  # with lists, and no tuples

    return build


def transformers_class(name: str) -> Any:
    """A model class of transformers by its name. Raises ModelError where there is no such class, or no transformers."""
    transformers = _imported("transformers", "; pip install 'flysurgery[huggingface]'")
    found = getattr(transformers, name, None) if re.fullmatch(r"[A-Za-z]\w*", name) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) and found.config_class is not None):
        raise ModelError(f"transformers {transformers.__version__} has no model class '{name}'")
    return found


def _imported(module: str, advice: str = "") -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModelError(f"{module} cannot be imported: {first_line(error)}{advice}") from error


def _refuse_sources(value: Any) -> None:
    """Refuse entries of a configuration that name code or weights from elsewhere, at any depth."""
    if isinstance(value, str) and value.startswith(SOURCES):
        raise ModelError(f"base_args may not name models from elsewhere, got '{value:.60}'")
    if isinstance(value, dict):
        refused = sorted(key for key, each in value.items() if each and key.lstrip("_") in REFUSED_CONFIG)
        if refused:
            raise ModelError(f"base_args may not set {', '.join(refused)}: a base is built from its configuration's sizes alone")
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else ():
        _refuse_sources(each)


def build_shell(plan: Plan, limits: Limits) -> nn.Module:
    """The converted model with real buffers and plain attributes, its parameters on meta and waiting for weights.

    Buffers outside the state_dict, such as position tables, are computed by the model's constructor, so they must be made for real.
    Parameters are sent to meta as they are registered, before anybody draws random numbers into them, which saves most of the time and
    memory. A constructor that reads its own parameters fails or passes meta on; such a model is built as usual, on the CPU.

    Raises:
        LimitError: building takes more than ``limits``; nothing beyond them was allocated.
        ModelError, PlanError: the base cannot be built, or the plan does not fit it.
    """
    limits.check_arguments(plan.base_args)
    base = _base_of(plan)
    with torch.random.fork_rng(devices=[]):
        try:
            with metered(limits, parameters_on_meta=True):
                model = build_base(base, plan.base_args)
        except ModelError as error:
            if isinstance(error, LimitError) or "meta" not in str(error.__cause__).lower():
                raise
            model = None  # the constructor wants numbers that meta does not have
        if model is None or _has_meta_state(model):
            with metered(limits, parameters_on_meta=False):
                model = build_base(base, plan.base_args)
        install(plan, model)
    return model


def build_random(plan: Plan, overrides: Mapping[str, Any]) -> nn.Module:
    """The converted model with random weights, with ``overrides`` going over the arguments of its base."""
    plan = plan.with_arguments(overrides)
    model = build_base(_base_of(plan), plan.base_args)
    install(plan, model)
    for layer in plan.replaced:
        draw_anew(model.get_submodule(layer.fqn))
    return model


def _has_meta_state(model: nn.Module) -> bool:
    """Whether a buffer or a plain attribute is on meta, or says that something is."""
    state = [[value for name, value in vars(module).items() if name not in ("_parameters", "_modules")] for module in model.modules()]
    devices = (value.device if isinstance(value, Tensor) else value for value in tree_leaves(state))
    return any(isinstance(device, torch.device) and device.type == "meta" for device in devices)


def _base_of(plan: Plan) -> str:
    if plan.base is None:
        example = "base='vit_pytorch:ViT', base_args={'image_size': 224, ...}"
        raise ModelError(f"the plan does not say how the dense model is built again, as in {example}")
    return plan.base
