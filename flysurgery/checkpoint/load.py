"""Open a converted model's folder, itself or for timm: all that can be checked is checked before anything is allocated."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from timm.models._features import FeatureGetterNet
from torch import nn

from flysurgery.checkpoint.base import ENTRY_POINT, build_base, build_random, build_shell, plain_arguments, transformers_class
from flysurgery.checkpoint.config import describe, describe_data, is_of_transformers, plan_in, read_config
from flysurgery.checkpoint.files import FILES, TensorFile, open_tensors, parse_json
from flysurgery.checkpoint.meter import Limits
from flysurgery.checkpoint.tensors import (
    SAFETENSORS_DTYPES,
    canonical,
    difference,
    read_device,
    read_dtype,
    sha256_of_each,
    sha256_of_text,
    single_float_dtype,
    unstored_buffers,
)
from flysurgery.errors import CheckpointError, ModelError, PlanError, raised_as
from flysurgery.inference import optimize as make_faster
from flysurgery.patterns import MAX_FEATURES
from flysurgery.surgery import Plan, plan_of

WEIGHTS, PICKLE, REPORT = "model.safetensors", "pytorch_model.bin", "report.json"

SCHEMA = "1"
"""The number that checkpoints carry in the header of their weights; other numbers are refused."""

SCHEMA_KEY = "flysurgery.schema"

HUB = "hf-hub:"
"""What names of repositories of the Hugging Face hub begin with, as for timm."""

FEATURE_ARGUMENTS = ("out_indices", "feature_cls", "output_fmt")
"""What timm's models take besides ``features_only``."""


def load(
    folder: str | Path,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    optimize: bool = False,
    verify: bool = True,
) -> nn.Module:
    """Read a converted model, in eval mode, on ``device`` (default CPU).

    ``folder`` may also be ``"hf-hub:user/name"`` or ``"hf-hub:user/name@revision"``, a repository that is downloaded first.

    Outputs are bit-equal to those of the model that was saved. ``dtype`` turns the floating-point tensors into another dtype; by default
    they stay as they are stored. For a folder, neither the network nor a pickle nor the original weights are used, and no code is named
    by the files but models of timm, torchvision, vit-pytorch and transformers. Names, shapes and dtypes are checked before the weights
    take memory, which peaks at about twice the model's size. What the files make the base's constructor build is bounded by the size of
    the stored tensors. ``verify`` holds the data of each tensor against the SHA-256 that was saved with it, which folders by
    ``save_pretrained`` of transformers or ``save_for_hf`` of timm do not have; for a ViT-L this about doubles the time of loading
    (``docs/python.md``). ``optimize`` calls ``flysurgery.optimize`` on the model, whose outputs are then equal within rounding.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged, contradicts itself, or is of another schema; one sentence.
        OptionError: a dtype or device that there is not.
    """
    if not isinstance(folder, str | Path):
        raise CheckpointError(f"expected the folder of a converted model, got {folder!r}")
    folder = downloaded(folder) if isinstance(folder, str) and folder.startswith(HUB) else Path(folder)
    model = read_model(folder, {}, device=device, dtype=dtype, verify=verify).eval()
    if optimize:
        make_faster(model)
    return model


def downloaded(name: str, cache_dir: str | Path | None = None) -> Path:
    """The local copy of the hub's repository ``user/name`` or ``user/name@revision`` (CheckpointError), with or without ``hf-hub:``."""
    from huggingface_hub import snapshot_download

    repository, _, revision = name.removeprefix(HUB).partition("@")
    with raised_as(CheckpointError, f"{repository} cannot be had from the Hugging Face hub"):
        return Path(snapshot_download(repository, revision=revision or None, cache_dir=cache_dir, allow_patterns=list(FILES)))


def is_converted(folder: str | Path) -> bool:
    """Whether ``folder`` holds a checkpoint of a converted model, a damaged one included. Reads no weights, and never raises."""
    path = Path(folder)
    with suppress(CheckpointError):
        config = read_config(path)
        if is_of_transformers(config) or config["architecture"] == ENTRY_POINT:
            return True
    with suppress(CheckpointError), open_tensors(path / WEIGHTS) as tensors:
        return SCHEMA_KEY in tensors.metadata
    return False


def read_model(
    folder: Path,
    overrides: Mapping[str, Any],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    verify: bool = True,
) -> nn.Module:
    """``load`` with arguments that go over those of the base and may not change any tensor's shape. The mode is as constructed."""
    place, wanted = read_device("cpu" if device is None else device), read_dtype(dtype)
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}")
    config = read_config(folder)
    if not (folder / WEIGHTS).exists() and (folder / PICKLE).exists():
        advice = "save them with safe_serialization=True"
        raise CheckpointError(f"{folder} has its weights in {PICKLE}, a pickle, which is not opened; {advice}")
    with open_tensors(folder / WEIGHTS) as file:
        if is_of_transformers(config) and SCHEMA_KEY not in file.metadata:
            model = _read_by_transformers(config, file, place, wanted)
        else:
            # ``save`` writes a report and a whole header; timm writes neither. A part of a header means damage.
            by_timm = set(file.metadata) <= {"format"} and config.get("architecture") == ENTRY_POINT and not (folder / REPORT).exists()
            listed = None if by_timm else _listed(file)
            model = _shell(config, file, overrides, has_header=not by_timm)
            if listed is not None:
                _check_listed(file, listed, verify=verify)
            _fill(model, file, place, wanted)
    describe(model, config, folder)
    return model


def _shell(config: Mapping[str, Any], file: TensorFile, overrides: Mapping[str, Any], *, has_header: bool) -> nn.Module:
    """The model that the configuration describes, without weights, once it is sure that it and the file fit each other."""
    folder = file.path.parent
    plan = plan_in(config, folder)
    if has_header and file.metadata["plan_sha256"] != sha256_of_text(canonical(plan.to_json())):
        raise CheckpointError(f"{folder / 'config.json'} does not match model.safetensors: its plan or the base's arguments were changed")
    try:
        model = build_shell(plan.with_arguments(overrides), Limits.of_stored(file.shapes.values()))
        _check_tensors(file, model)
    except (CheckpointError, ModelError, PlanError) as error:
        if isinstance(error, CheckpointError) and not overrides:
            raise
        changed = f" with {dict(overrides)}" if overrides else ""
        raise CheckpointError(f"{folder} cannot be loaded{changed}: {error}") from error
    return model


def _read_by_transformers(config: Mapping[str, Any], file: TensorFile, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    """The model in a folder that ``save_pretrained`` wrote, under transformers' own names for tensors and without hashes."""
    folder = file.path.parent
    with raised_as(CheckpointError, f"{folder} cannot be loaded"):
        build_shell(plan_in(config, folder), Limits.of_stored(file.shapes.values()))
        found = transformers_class(config["architectures"][0])
        # Not from the folder: other files of it, such as adapters, would be read too.
        state = {name: file.tensor(name) for name in file.shapes}
        settings = found.config_class.from_dict(dict(config))
        model, problems = found.from_pretrained(None, config=settings, state_dict=state, dtype=dtype or "auto", output_loading_info=True)
    missing = sorted(map(str, problems["missing_keys"]))
    if missing:
        raise CheckpointError(f"{file.path} does not fit its plan: it lacks {', '.join(missing[:3])}")
    return model.to(device)


def _check_tensors(file: TensorFile, model: nn.Module) -> None:
    """Refuse a file whose names, shapes and dtypes are not those of the model, buffers outside the state_dict included if it has them.

    Floating-point tensors may have any such dtype.
    """
    buffers = {name: buffer for name, buffer in unstored_buffers(model).items() if name in file.shapes}
    expected = model.state_dict() | buffers
    wrong = difference(file.shapes, expected)
    if wrong:
        raise CheckpointError(f"{file.path} does not fit its plan: {wrong}")
    for name, tensor in expected.items():
        dtype = file.dtypes[name]
        if dtype != tensor.dtype and not (dtype.is_floating_point and tensor.is_floating_point()):
            raise CheckpointError(f"{file.path} does not fit its plan: {name} is {dtype} instead of {tensor.dtype}")


def _listed(file: TensorFile) -> dict[str, list[str]]:
    """The dtype ("F32") and SHA-256 of each tensor, as ``save`` lists them in the file's header, all of which is checked first."""
    where, metadata = file.path, file.metadata
    if SCHEMA_KEY not in metadata:
        raise CheckpointError(f"{where} is no flysurgery checkpoint: its header has no {SCHEMA_KEY}; dense models are loaded with timm")
    if metadata[SCHEMA_KEY] != SCHEMA:
        wanted = f"use flysurgery {metadata.get('version', 'of the version that wrote it')}"
        raise CheckpointError(f"{where} has schema {metadata[SCHEMA_KEY]}, this version reads schema {SCHEMA}; {wanted}")
    lacking = [key for key in ("plan_sha256", "tensors", "tensors_sha256") if key not in metadata]
    if lacking:
        raise CheckpointError(f"{where} is damaged: its header has no {', '.join(lacking)}")
    if sha256_of_text(metadata["tensors"]) != metadata["tensors_sha256"]:
        raise CheckpointError(f"{where} is damaged or was changed: tensors_sha256 does not match its tensors")
    try:
        tensors = parse_json(metadata["tensors"])
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged: its tensors are no JSON") from error
    entries = tensors.values() if isinstance(tensors, dict) else [None]
    if not all(isinstance(entry, list) and list(map(type, entry)) == [str, str] for entry in entries):
        raise CheckpointError(f"{where} is damaged: its tensors do not map names to dtypes and hashes")
    return tensors


def _check_listed(file: TensorFile, listed: Mapping[str, list[str]], *, verify: bool) -> None:
    """Refuse a file with other tensors or dtypes than its header lists, or, by reading the whole file once, with other hashes."""
    dtypes = {name: SAFETENSORS_DTYPES.get(dtype) for name, (dtype, _) in listed.items()}
    for name in (*file.dtypes, *dtypes):
        if file.dtypes.get(name) != dtypes.get(name):
            differs = f"its header lists {name} as {dtypes.get(name)}, and it is {file.dtypes.get(name)}"
            raise CheckpointError(f"{file.path} is damaged: {differs}")
    found = sha256_of_each(listed, file.window) if verify else {}
    wrong = [name for name, sha256 in found.items() if sha256 != listed[name][1]]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        advice = "copy it again, or load it as it is with verify=False"
        raise CheckpointError(f"{file.path} is damaged or was changed: the data of {wrong[0]}{more} do not match their hash; {advice}")


def _fill(model: nn.Module, file: TensorFile, device: torch.device, dtype: torch.dtype | None) -> None:
    """Give every parameter and buffer its tensor; parameters on meta are replaced, not copied into."""
    uniform = dtype or single_float_dtype(file.dtypes.values())
    read = {name: file.tensor(name, device, dtype) for name in file.shapes}
    state = {name: read[name] for name in model.state_dict()}
    made: dict[int, nn.Parameter] = {}  # by what it replaces, so that what the constructor ties stays tied
    for name, parameter in model.named_parameters(remove_duplicate=False):
        new = nn.Parameter(state[name], requires_grad=parameter.requires_grad)
        first = made.setdefault(id(parameter), new)
        state[name] = first if first is not new and first.equal(new) else new
    model.load_state_dict(state, strict=True, assign=True)
    for name, buffer in unstored_buffers(model).items():
        wanted = uniform if uniform is not None and buffer.is_floating_point() else buffer.dtype
        value = read[name] if name in read else buffer.to(device, wanted)
        parent, _, attribute = name.rpartition(".")
        model.get_submodule(parent).register_buffer(attribute, value, persistent=False)
    model.to(device)


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
    """Build a converted model as timm builds its own: from its ``config.json``, with its weights or random ones, in training mode.

    ``num_classes`` gives it a new, random head where it differs, ``img_size`` resizes its position embedding, and ``features_only`` wraps
    it. Other arguments go to the base's constructor, over ``base_args``, and may not change the shape of any tensor.

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
        advice = "name a folder, as in timm.create_model('local-dir:DIR', pretrained=True)"
        raise CheckpointError(f"{ENTRY_POINT} has no weights of its own; {advice}")
    return Path(config["file"])


def _resize(model: Any, img_size: int | Sequence[int] | None) -> None:
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
    model.set_input_size(img_size=wanted)


def _change_head(model: Any, num_classes: int | None) -> None:
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
    model.reset_classifier(num_classes)
    if dtype is not None:
        model.to(dtype)


def _wrap(model: Any, features: Mapping[str, Any]) -> nn.Module:
    """The model as timm's ``features_only`` gives it: the same levels and layout as those of the dense base."""
    plan = plan_of(model)
    if plan is None or plan.base is None or not hasattr(model, "forward_intermediates"):
        raise CheckpointError(f"features_only cannot be given: a {type(model).__name__} has no forward_intermediates")
    dense: Any = build_base(plan.base, {**plan.base_args, **features, "features_only": True}, device="meta")
    wrapped = FeatureGetterNet(model, out_indices=tuple(dense.feature_info.out_indices), output_fmt=getattr(dense, "output_fmt", "NCHW"))
    wrapped.pretrained_cfg = wrapped.default_cfg = model.pretrained_cfg
    return wrapped
