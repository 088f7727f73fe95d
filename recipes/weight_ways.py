"""The ways to convert that the table on real weights compares: families of architectures with steps of fitting, and rivals.

Rivals change the same linear layers by other means. Those that prune take the largest weights, or the most important by their inputs,
whose values are then fitted, and can be reconstructed.
"""

import copy
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from vits import INT8_ERROR

from flysurgery import surgery
from flysurgery.calibration import Inputs, Samples, inputs_of
from flysurgery.errors import FlysurgeryError, OptionError
from flysurgery.fidelity import Reconstruction, Settings, reconstruct
from flysurgery.patterns import named
from flysurgery.projection import metric_of
from flysurgery.surgery import Plan
from flysurgery.walker import find_cuts, survey

Choose = Callable[[Tensor, int], Tensor]
"""Takes scores of a layer's weights and how many weights the butterfly has; gives True where a weight is kept."""

ROWS = 32  # rows of a weight that are fitted at once: their systems of 660 unknowns in float64 take 110 MB


def largest(scores: Tensor, kept: int) -> Tensor:
    """Keep so many weights of the layer, those of the largest scores."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask.view(-1)[scores.flatten().topk(kept).indices] = True
    return mask


def two_of_four(scores: Tensor, _kept: int) -> Tensor:
    """Keep two of each four weights in a row."""
    groups = scores.unflatten(1, (-1, 4))
    return torch.ones_like(groups, dtype=torch.bool).scatter_(2, groups.topk(2, dim=2, largest=False).indices, False).flatten(1)


@torch.no_grad()
def prune(model: nn.Module, linears: Mapping[str, int], choose: Choose) -> None:
    """Set weights to zero by their magnitude. ``linears`` are the names of the layers, and how many weights the butterfly has in each."""
    for name, kept in linears.items():
        weight = model.get_parameter(f"{name}.weight")
        weight.mul_(choose(weight.abs(), kept))


def prune_to_inputs(
    model: nn.Module, linears: Mapping[str, int], choose: Choose, samples: Samples, minutes: float | None = None, seed: int = 0
) -> Reconstruction | None:
    """Prune block by block on the inputs from the pruned blocks before, and with ``minutes`` reconstruct; dropped weights stay zero.

    The score is Wanda's, a weight's magnitude times the norm of its input (M. Sun et al., arXiv:2306.11695). The kept weights of each row
    and its bias are then those of least squared error of the output, by the form that calibrated projections use. A reconstruction is that
    of ``flysurgery.fidelity``, which trains all other parameters of the model too.
    """
    teacher, masks = copy.deepcopy(model).requires_grad_(False), dict[str, Tensor]()
    for _, names in groupby(linears, lambda name: name.split(".")[:2]):
        block = list(names)
        for name, inputs in inputs_of(model, dict.fromkeys(block, 1), samples).items():
            masks[name] = _fit(model.get_submodule(name), linears[name], choose, inputs)
    if minutes is None:
        return None
    cuts = find_cuts(survey(model, samples.inputs[:2]))
    for name, mask in masks.items():
        parametrize.register_parametrization(model.get_submodule(name), "weight", _Masked(mask))
    device = next(model.parameters()).device
    done = reconstruct(model, teacher, samples, cuts, Settings.on(device, minutes, seed))
    for name in masks:
        parametrize.remove_parametrizations(model.get_submodule(name), "weight")
    return done


class _Masked(nn.Module):
    """A parametrization that keeps the weights at which ``mask`` is True."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = nn.Buffer(mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


@torch.no_grad()
def _fit(layer: nn.Module, kept: int, choose: Choose, inputs: Inputs) -> Tensor:
    """Prune one layer in place, and fit what is kept; gives the mask."""
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    mask = choose(weight.abs() * inputs.fit.second.diagonal().sqrt().to(weight), kept)
    gram = metric_of(inputs.fit, bias=True).gram
    wanted = weight.to(gram)
    counts, order = mask.sum(1), mask.int().argsort(stable=True, dim=1, descending=True)
    found = torch.zeros_like(wanted)
    for rows in counts.argsort().split(ROWS):
        columns, product = order[rows, : int(counts[rows].max())], wanted[rows] @ gram
        is_kept = mask[rows].gather(1, columns)
        # rows keep different numbers of weights; the identity stands in for those that a row has less
        system = gram[columns[:, :, None], columns[:, None, :]] * (is_kept[:, :, None] & is_kept[:, None, :])
        system.diagonal(dim1=1, dim2=2).add_((~is_kept).to(gram))
        values = torch.cholesky_solve((product.gather(1, columns) * is_kept)[:, :, None], torch.linalg.cholesky(system))[:, :, 0]
        found[rows] = torch.zeros_like(product).scatter_(1, columns, values * is_kept)
    bias.add_(((wanted - found) @ inputs.fit.mean.to(gram)).to(bias))
    weight.copy_(found)
    return mask


DENSE, COMPILED = "dense", "dense compiled"
MONARCH_4: Mapping[str, Any] = {"arch": "monarch", "nblocks": 4}
DENSE_V = {"qkv.v$": "dense"}
RANKS = (96, 64, 48, 32)

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gonon": {"arch": "gonon"},
    "monarch 4": MONARCH_4,
    "rank 96": {"arch": "lowrank", "rank": 96},
    "mixed": {**MONARCH_4, "per_layer": {"qkv|fc1": "lowrank:96"}},
    "monarch 4 with dense v": {**MONARCH_4, "per_layer": {**DENSE_V, "qkv.[qk]$": "monarch:8"}},
    "monarch 2": {"arch": "monarch", "nblocks": 2},
    "monarch 3 with dense middle": {"arch": "monarch", "nblocks": 3, "exclude": r"blocks\.[5-7]\."},
    "monarch 3 with dense v and middle": {
        "arch": "monarch",
        "nblocks": 3,
        "per_layer": {**DENSE_V, "qkv.[qk]$": "monarch:4", r"blocks\.[6-9]\.mlp": "dense"},
    },
    **{f"rank {rank}": {"arch": "lowrank", "rank": rank} for rank in RANKS},
}
"""Options of ``surgery.plan``. In ``mixed``, q, k, v and the first layer of feed-forward blocks get low rank instead. In
``monarch 3 with dense middle`` the blocks 5 to 7 of 12 stay dense, where dense blocks help patch tokens most. With a dense v, q and k get
more blocks, so that ``monarch 4`` keeps its size; ``with dense v and middle``, the feed-forward parts of blocks 6 to 9 stay dense too.
Rank 96 has the size of ``monarch 4``. The smaller ranks are there to find the one that takes its milliseconds.
"""

STEPS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "calibrated": {"sequential": True},
    "permuted": {"sequential": True, "permute": True},
    "reconstructed": {"sequential": True, "reconstruct": True},
    "permuted + reconstructed": {"sequential": True, "permute": True, "reconstruct": True},
}
"""Options of ``surgery.apply``; with any of them it calibrates. ``reconstruct`` takes the minutes that the run has."""

STEPS_OF: Mapping[str, Sequence[str]] = {
    **{f"rank {rank}": ("plain", "reconstructed") for rank in RANKS},
    "rank 96": ("plain", "calibrated", "reconstructed"),
    **dict.fromkeys(("unstructured", "2:4"), ("calibrated", "reconstructed")),
}
"""Families that do not take all steps, and rivals that take some beside magnitude alone. A low rank does the same in any order of its
inputs and outputs, so permuting them gains nothing. Of a smaller rank the first step tells the time, as the ways of a family differ in
weights alone.
"""

INT8 = "Int8DynamicActivationInt8WeightConfig"
"""torchao's configuration for int8 weights, a scale for each row, and activations rounded at each call, a scale for each token."""

QUICK = (DENSE, "monarch 4 plain", "monarch 4 reconstructed", "unstructured", "int8", "2:4")
TUNED = {
    "max_autotune": True,
    "coordinate_descent_tuning": True,
    "coordinate_descent_check_all_directions": True,
    "force_fuse_int_mm_with_mul": True,
}
"""What ``mode="max-autotune-no-cudagraphs"`` of ``torch.compile`` sets, and what torchao recommends beside it for int8 products."""


class Way(NamedTuple):
    """One way to convert: a family of architectures or a rival, and a step of fitting; a rival has steps if it prunes."""

    family: str
    step: str = ""

    @property
    def name(self) -> str:
        return f"{self.family} {self.step}".strip()

    @property
    def fitting(self) -> Mapping[str, Any]:  # where there is any, another seed gives another result
        return STEPS.get(self.step, {})

    def minutes(self, usual: float) -> float | None:
        """Those of its reconstruction; None where it has none."""
        return usual if self.fitting.get("reconstruct") else None


def quantize(model: nn.Module, linears: Collection[str], config: str = INT8) -> None:
    if importlib.util.find_spec("torchao") is None:
        raise FlysurgeryError("torchao is not installed: pip install torchao")
    quantization = importlib.import_module("torchao.quantization")
    # Its settings of the compiler would stay set for the whole process, and let float32 products use TF32; TUNED has the others.
    made = getattr(quantization, config)(set_inductor_config=False)
    quantization.quantize_(model, made, filter_fn=lambda _module, name: name in linears)


def store_sparse(model: nn.Module, linears: Collection[str]) -> None:
    """Bring pruned weights into the form that sparse tensor cores take: float16 or bfloat16, on CUDA."""
    for name in linears:
        layer: Any = model.get_submodule(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a prototype, it says
            weight: Any = nn.Parameter(torch.sparse.to_sparse_semi_structured(layer.weight.detach()), requires_grad=False)
        # Older releases of PyTorch give a transposed result otherwise, which attention has only a slow kernel for.
        weight.fuse_transpose_cusparselt = True
        layer.weight = weight


@dataclass(frozen=True)
class Rival:
    """One rival. ``convert`` changes the named linear layers of a dense model in place, in any precision and on any device.

    ``store`` then brings them into the form that kernels take, on CUDA. ``kept`` is the share of the layers' weights that are kept, None
    for as many as ``monarch 4`` has in each layer. ``choose`` chooses the weights that a rival keeps which can also be fitted.
    ``allowed`` is the relative rms error that its outputs may have beside the dense model's; with 0 they are held against the
    converted model in float64. Where ``tunes`` is false the compiler does not tune it, which does not end in three minutes.
    """

    convert: Callable[[nn.Module, Mapping[str, int]], None] = lambda model, linears: None
    store: Callable[[nn.Module, Collection[str]], None] = lambda model, linears: None
    kept: float | None = 1.0
    allowed: float = 0.0
    tunes: bool = True
    choose: Choose | None = None

    def params(self, model: nn.Module, linears: Mapping[str, int]) -> int:
        """The parameters of a converted model that are kept, of whatever size each is."""
        sizes = {name: model.get_parameter(f"{name}.weight").numel() for name in linears}
        kept = sum(linears[name] if self.kept is None else round(self.kept * size) for name, size in sizes.items())
        return sum(each.numel() for each in model.parameters()) - sum(sizes.values()) + kept

    def runs(self, model: nn.Module, linears: Collection[str]) -> dict[str, Any]:
        """The ways to run a converted model on CUDA, of which the fastest counts."""
        self.store(model, linears)
        torch.compiler.reset()
        runs: dict[str, Any] = {"not compiled": model, "torch.compile": torch.compile(model, dynamic=False)}
        if self.tunes:
            runs["torch.compile, tuned"] = torch.compile(model, dynamic=False, options=dict(TUNED))
        return runs


RIVALS: Mapping[str, Rival] = {
    COMPILED: Rival(),
    "unstructured": Rival(partial(prune, choose=largest), kept=None, tunes=False, choose=largest),
    "int8": Rival(quantize, allowed=INT8_ERROR),
    "2:4": Rival(partial(prune, choose=two_of_four), store_sparse, kept=0.5, tunes=False, choose=two_of_four),
}
"""Unstructured zeros run as a dense model with zeros, in the time of "dense compiled" without the tuning. ``factors.py rivals`` times
sparse products of these and of lower densities."""


def linears_of(backbone: nn.Module) -> dict[str, int]:
    """The names of the linear layers that every conversion of the table replaces, and how many weights ``monarch 4`` has in each."""
    return {layer.fqn: layer.weights_after for layer in surgery.plan(backbone, **MONARCH_4).replaced}


WAYS = (
    Way(DENSE),
    *(Way(family, step) for step in STEPS for family in FAMILIES if step in STEPS_OF.get(family, STEPS)),
    *(Way(family, step) for family in RIVALS for step in ("", *STEPS_OF.get(family, ()))),
)
"""Rivals come last: one that breaks the process breaks no other way."""


def ways_of(text: str | None, *, quick: bool = False) -> tuple[Way, ...]:
    """The dense model and the ways that a text lists by name, else by family or by step; without one all, or a few with ``quick``."""
    if text is None:
        return tuple(way for way in WAYS if not quick or way.name in QUICK)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not any(part in (way.name, way.family, way.step) for way in WAYS):
            names = ", ".join((DENSE, *FAMILIES, *RIVALS, *STEPS))
            raise OptionError(f"--ways knows no '{part}'; choose families or steps out of {names}, or both as in 'gonon plain'")
    names = {way.name for way in WAYS} & set(parts)
    return tuple(way for way in WAYS if way.family == DENSE or way.name in names or {way.family, way.step} & (set(parts) - names))


def low_rank(plan: Plan) -> Plan:
    """The plan with every architecture replaced by one of low rank, of the most that has no more weights."""

    def changed(part: Any, in_features: int) -> Any:
        if part.architecture is None:
            return part
        sizes = part.stop - part.start, in_features
        rank = max(1, part.architecture.num_parameters // sum(sizes))
        return replace(part, architecture=named("lowrank", *sizes, rank=rank))

    layers = (replace(layer, parts=tuple(changed(part, layer.in_features) for part in layer.parts)) for layer in plan.layers)
    return replace(plan, layers=tuple(layers))
