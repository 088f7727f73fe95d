"""Walk, plan and convert one model of every timm architecture file, vit-pytorch's classes, and transformers' classes for vision tasks.

    python recipes/survey_models.py timm --out build/survey.csv

The tables:

    timm          one model of every architecture file
    vit_pytorch   its classes
    transformers  its classes for vision tasks

Each model is built with random weights: timm's at their default arguments, transformers' by their default configurations, with few layers
where that is possible. Every linear of attention or a feed-forward block that the walk finds is planned as Monarch of four blocks, and the
planned weights are set to products of random factors. The model then computes in float64 and in float32, is converted, and computes again:
``error_ratio`` is the error of the converted model over that of the dense one in the same arithmetic. ``kept`` counts the layers of these
roles that stay dense, by reason, and ``called`` replaced modules that a forward calls. Counts of layers by role are the walk's; shared
modules count once. The output is kept where ``error_ratio`` is at most 16. Models of more than 400 million parameters are walked and
planned only. A model runs in a process of its own.

Rows: recipes/results/survey.csv

Needs a CPU core and twenty to forty minutes for each library.
"""

import ast
import copy
import importlib
import inspect
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
from recipe import Place, Table, run
from timm.models import is_model_in_modules
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flysurgery.bench import Record
from flysurgery.checkpoint import build_base
from flysurgery.errors import FlysurgeryError, ModelError, first_line
from flysurgery.factors import factors_to_dense
from flysurgery.surgery import Plan, apply, plan
from flysurgery.surgery.apply import check_plan
from flysurgery.walker import example_input, walk


@dataclass(frozen=True)
class Case:
    """A model to survey: how it is built, what goes around it, and its input, None where the walk finds one."""

    family: str
    name: str
    base: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    example: Callable[[], Any] | None = None
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model

    def build(self, device: str | None = None) -> nn.Module:
        return self.wrap(build_base(self.base, self.arguments, device=device))

    def skeleton(self) -> nn.Module:
        try:
            with torch.device("meta"):
                return self.build("meta")
        except ModelError:  # a constructor that computes something from its weights
            return self.build()


def _listed(library: str) -> list[list[str]]:
    """The words of each line of a library's list of models."""
    lines = Path(__file__).with_name(f"survey_{library}.txt").read_text(encoding="utf-8").splitlines()
    return [line.split() for line in lines]


def timm_cases() -> list[Case]:
    """The models that survey_timm.txt names of each file, at their default arguments; of a file without any its first one.

    Of a file with several sizes it names a small model, and of one with several kinds of blocks one of each.
    """
    chosen = [name for (name,) in _listed("timm")]
    found = {file: [name for name in chosen if is_model_in_modules(name, {file})] for file in timm.list_modules()}
    found = {file: names or timm.list_models(module=file)[:1] for file, names in found.items()}
    # flysurgery_structured, the door for converted folders, is no model of timm.
    return [Case(file, name, name) for file, names in found.items() for name in names if name != "flysurgery_structured"]


SIZES = {"image_size": 64, "patch_size": 8, "num_classes": 50, "dim": 128, "depth": 2, "heads": 4, "mlp_dim": 256, "dim_head": 32}
SIZES |= {"image_patch_size": 8, "frames": 4, "frame_patch_size": 2}
"""What constructors of vit-pytorch get, as far as they have it: narrow and shallow, since variants differ in structure and not in size."""

EXAMPLES: Mapping[str, Callable[[], Any]] = {
    "na_vit": lambda: ([torch.zeros(3, 64, 64), torch.zeros(3, 32, 64)],),
    "na_vit_nested_tensor": lambda: ([torch.zeros(3, 64, 64), torch.zeros(3, 32, 64)],),
    "na_vit_nested_tensor_3d": lambda: ([torch.zeros(3, 4, 64, 64), torch.zeros(3, 4, 32, 64)],),
    "cct_3d": lambda: torch.zeros(2, 3, 4, 64, 64),
}
"""Inputs of the modules whose models take several sizes at once, or none that the walk finds."""

WRAPPERS: Sequence[tuple[str, str, str, str, Mapping[str, Any]]] = (
    ("vit", "MAE", "mae", "encoder", {"decoder_dim": 64, "decoder_heads": 4}),
    ("vit", "SimMIM", "simmim", "encoder", {}),
    ("mp3", "MP3", "mp3", "vit", {"masking_ratio": 0.75}),
    ("vit", "Recorder", "recorder", "vit", {}),
    ("vit", "Extractor", "extractor", "vit", {}),
    ("learnable_memory_vit", "Adapter", "learnable_memory_vit", "vit", {}),
)
"""Classes around a ViT, which train it or look into it: the ViT's module, the class, its module, what it calls the ViT, and arguments."""


def vit_pytorch_cases() -> list[Case]:
    """The classes in survey_vit_pytorch.txt, with their own arguments beside the common sizes, and a ViT within the classes around it."""
    cases = [_vit_pytorch_case(place, dict(each.split("=", 1) for each in own)) for place, *own in _listed("vit_pytorch")]
    for module, name, own, called, arguments in WRAPPERS:
        wrapper = getattr(importlib.import_module(f"vit_pytorch.{own}"), name)
        wrap = lambda vit, wrapper=wrapper, called=called, arguments=arguments: wrapper(**{called: vit}, **arguments)  # noqa: E731
        inner = _vit_pytorch_case(f"{module}:ViT", {})
        cases.append(replace(inner, name=f"{name} of {inner.name}", example=lambda: torch.zeros(2, 3, 64, 64), wrap=wrap))
    return cases


def _vit_pytorch_case(place: str, own: Mapping[str, str]) -> Case:
    """A class with its own arguments, as texts, and the common sizes that its constructor or that of a base has."""
    module, _, name = place.partition(":")
    bases = getattr(importlib.import_module(f"vit_pytorch.{module}"), name).__mro__
    known = {each for base in bases if base.__module__.startswith("vit_pytorch") for each in inspect.signature(base).parameters}
    arguments = {key: value for key, value in SIZES.items() if key in known}
    arguments |= {key: ast.literal_eval(value) for key, value in own.items()}
    variant = f" {arguments['variant']}" if "variant" in own else ""
    return Case(module, f"{place}{variant}", f"vit_pytorch.{place}", arguments, EXAMPLES.get(module))


TASKS = ("IMAGE_CLASSIFICATION", "VIDEO_CLASSIFICATION", "OBJECT_DETECTION", "SEGMENTATION", "DEPTH", "IMAGE_TO_IMAGE", "MASKED_IMAGE")
TASKS += ("BACKBONE", "ZERO_SHOT_IMAGE", "KEYPOINT", "MASK_GENERATION")
"""What names of transformers' tables of vision models hold."""

SHALLOW = frozenset({"num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "n_layer", "num_decoder_layers"})
"""Entries of configurations that count layers, of which two are enough to see each kind."""

READ_BY_NUMBER = ("Backbone", "Depth", "Segment", "Dpt", "DPT")
"""Parts of the names of classes that read hidden states by numbers of the configuration."""


def transformers_cases() -> list[Case]:
    """Every model class of transformers' tables of vision tasks, with the sizes of its default configuration and few layers.

    It has all of its layers where it reads hidden states by their numbers.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    found: dict[str, Any] = {}
    for table in dir(modeling_auto):
        if table.endswith("_MAPPING_NAMES") and any(task in table for task in TASKS):
            for family, names in getattr(modeling_auto, table).items():
                found = dict.fromkeys([names] if isinstance(names, str) else names, family) | found
    cases = []
    for name, family in sorted(found.items()):
        config: Any = getattr(transformers, name).config_class
        arguments = {}
        if config is not None and not any(part in name for part in READ_BY_NUMBER):
            arguments = _shallow(config().to_dict())
        cases.append(Case(family, name, f"transformers:{name}", arguments))
    return cases


def _shallow(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that count layers, at most two each, also in the configurations of towers."""
    towers = {key: _shallow(value) for key, value in entries.items() if isinstance(value, dict) and "model_type" in value}
    counts = {key: min(2, value) for key, value in entries.items() if key in SHALLOW and isinstance(value, int)}
    return counts | {key: {"model_type": entries[key]["model_type"]} | value for key, value in towers.items() if value}


QUICK = ("deit_tiny_patch16_224", "vit:ViT", "DeiTForImageClassification")  # the models that ``--quick`` takes
LARGEST, TOLERANCE, SECONDS = 400_000_000, 16.0, 240.0
"""Most parameters of a model that is built and converted, the largest ratio of errors at which the output counts as kept, and the longest
that one model may take."""

ROLES = ("qkv", "attn_out", "ffn_in", "ffn_out")
COLUMNS = ("exported", "linears", *ROLES, "head", "other", "obstacles", "replaced", "kept")
COLUMNS += ("converted", "called", "error_ratio", "output_kept", "seconds", "note")


def survey(library: str, model: str) -> Record:
    """All steps for one model; what fails is noted in the row."""
    warnings.simplefilter("ignore")
    row: Record = {"exported": False, "replaced": 0, "converted": False, "called": 0}
    row |= dict.fromkeys((*ROLES, "head", "other", "linears"), 0)
    started = time.perf_counter()
    try:
        _survey(cases_of(library)[model], row)
    except FlysurgeryError as error:
        row["note"] = f"{type(error).__name__}: {error}"
    except Exception as error:
        return {"note": f"CRASH {type(error).__name__}: {first_line(error)}"[:300]}
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def _survey(case: Case, row: Record) -> None:
    skeleton = case.skeleton()
    example = example_input(skeleton) if case.example is None else case.example()
    targets = walk(skeleton, example)
    row |= {"exported": True, "linears": len(targets), **Counter(target.role for target in targets)}
    row["obstacles"] = _counted(obstacle.code for target in targets for obstacle in target.obstacles)
    roles = [role for role in ROLES if row[role]]
    if not roles:
        row["note"] = "no linear layer belongs to attention or a feed-forward block"
        return
    made = plan(skeleton, roles=roles, example=example, targets=targets)
    row["replaced"] = len(made.replaced)
    row["kept"] = _counted(layer.reason.code for layer in made.layers if layer.reason is not None and layer.role in roles)
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    if size > LARGEST:
        row["note"] = f"walked and planned only: it has {size / 1e6:.0f} million parameters"
        return
    torch.manual_seed(0)
    model = case.build().eval()
    del skeleton
    _make_exact(made, model)
    _compare(made, model, example, row)


def _counted(codes: Iterable[str]) -> str:
    return "; ".join(f"{code} {count}" for code, count in sorted(Counter(codes).items()))


@torch.no_grad()
def _make_exact(made: Plan, model: nn.Module) -> None:
    """Set each planned weight to a product of random factors, of the size that it had."""
    dense = check_plan(made, model)
    for layer in made.replaced:
        weight = dense[layer.fqn].weight.flatten(1)
        for part in layer.parts:
            if part.architecture is not None:
                rows = weight[part.start : part.stop]
                product = factors_to_dense([torch.randn(each.factor_shape, dtype=torch.float64) for each in part.architecture])
                rows.copy_(product * (_rms(rows.double()) / _rms(product)))


@torch.no_grad()
def _compare(made: Plan, model: nn.Module, example: Any, row: Record) -> None:
    generator = torch.Generator().manual_seed(1)
    arguments = example if isinstance(example, tuple) else (example[:1] if isinstance(example, Tensor) else example,)
    inputs = _floats(arguments, lambda t: torch.randn(t.shape, generator=generator))
    truth = _outputs(copy.deepcopy(model).double(), _floats(inputs, Tensor.double))
    dense = _outputs(model, inputs)
    apply(made, model, verify=False)  # what follows shows the same
    called: set[str] = set()
    for layer in made.replaced:
        model.get_submodule(layer.fqn).register_forward_hook(lambda *_, fqn=layer.fqn: called.add(fqn))
    result = _outputs(model, inputs)
    ratio = round(_rms(result - truth) / max(_rms(dense - truth), 1e-30), 3)
    row |= {"converted": True, "called": len(called), "error_ratio": ratio, "output_kept": ratio <= TOLERANCE}


def _floats(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Inputs whose floating-point tensors are changed; the others are zeros."""
    return pytree.tree_map_only(Tensor, lambda t: change(t) if t.is_floating_point() else torch.zeros(t.shape, dtype=t.dtype), inputs)


def _outputs(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    torch.manual_seed(2)
    leaves = pytree.tree_leaves(model(*inputs))
    return torch.cat([leaf.double().flatten() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()])


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


LIBRARIES = {"timm": timm_cases, "vit_pytorch": vit_pytorch_cases, "transformers": transformers_cases}  # the cases of each table


@cache
def cases_of(library: str) -> Mapping[str, Case]:
    return {case.name: case for case in LIBRARIES[library]()}


def heads_of(library: str) -> list[Record]:
    package = library.replace("_", "-")
    return [{"library": f"{package} {version(package)}", "family": case.family, "model": case.name} for case in cases_of(library).values()]


def rows(place: Place, *, library: str, family: str, model: str) -> list[Record]:
    """The row of a model, which is surveyed in a process of its own; one that ends without an answer has none in time."""
    table = library.partition(" ")[0].replace("-", "_")
    # The libraries are imported once, and the process goes with its pool.
    with multiprocessing.get_context("fork").Pool(1) as pool:
        try:
            return [pool.apply_async(survey, (table, model)).get(SECONDS)]
        except multiprocessing.TimeoutError:
            return [{"seconds": SECONDS, "note": f"CRASH: no answer within {SECONDS:.0f} s"}]


TABLES = {
    library: Table(
        {},
        rows,
        timed=False,
        cases=partial(heads_of, library),
        columns=COLUMNS,
        keep=lambda place, head: not place.quick or head["model"] in QUICK,
        device="cpu",
        threads=1,
    )
    for library in LIBRARIES
}

if __name__ == "__main__":
    run(__doc__, TABLES)
