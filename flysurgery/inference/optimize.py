"""Put fused modules into a model where they are proven right, have a kernel, and are faster; and say what was done."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flysurgery import ops
from flysurgery.errors import BackendError, InferenceError, Reason, WalkError
from flysurgery.inference import clock
from flysurgery.inference.find_groups import find_groups
from flysurgery.inference.first_tokens import FirstTokensForward
from flysurgery.inference.fused_modules import Step
from flysurgery.inference.replacement import Candidate, Replacement, Replacements, find_replacements
from flysurgery.inference.standin import Fused, is_optimized, put, restore, view
from flysurgery.ops import Attention, Way
from flysurgery.tables import grouped, text_table
from flysurgery.torch_state import autocast_dtype
from flysurgery.walker import Example, example_input

_HEADER = ("group", "n", "kind", "status", "own modules ms", "fused ms", "why not, or the launches")
_HINDRANCES = {
    "training": "is in training mode; call model.eval() first",
    "dropout": "drops values or paths in training",
    "hooked": "has hooks, which a fused module would not run",
}
MEASURED_IMAGES = 64
"""The number of images in the measurement on CUDA, if no example is given."""

Training = bool | Literal["captured"]
Times = tuple[float, float]
"""Milliseconds of one call, with the model's own modules and with the fused ones."""
Groups = list[list[str]]
"""Names and kinds of groups of layers, as JSON has them."""


@dataclass(frozen=True)
class OptimizeRow:
    """One group, by the name of its last linear or convolution, of the attention module, or of the patch embedding with a method behind.

    ``group`` is "qkv", "attention", "attn_out", "ffn", "norm" or "patches"; ``status`` "fused" or "left". The milliseconds are those
    of one call, None where nothing was measured. ``launches`` says what the launches of the fused group compute, as far as known.
    """

    fqn: str
    group: str
    status: str
    reason: Reason | None
    plain_ms: float | None
    fused_ms: float | None
    launches: tuple[str, ...] = ()


@dataclass(frozen=True)
class OptimizeReport:
    """All groups that were found. ``device`` and ``dtype`` are those of the measurement.

    ``whole_ms`` are the milliseconds of one forward, with the model's own modules and with the fused ones; None where it was not timed.
    ``tokens`` is how many tokens of a sample the model's forward computes behind its last attention; None where it computes all.
    """

    rows: tuple[OptimizeRow, ...]
    device: str
    dtype: str
    seconds: float
    model: nn.Module = field(repr=False, compare=False)
    whole_ms: tuple[float, float] | None = None
    tokens: int | None = None

    @property
    def fused(self) -> tuple[OptimizeRow, ...]:
        """The rows of the fused groups."""
        return tuple(row for row in self.rows if row.status == "fused")

    @property
    def chosen(self) -> list[tuple[str, str]]:
        """The names and kinds of the fused groups, which another ``optimize`` of such a model takes as ``only``."""
        return [(row.fqn, row.group) for row in self.fused]

    def restore(self) -> int:
        """Put the model's own modules back; gives the number of modules."""
        return restore(self.model)

    def to_json(self) -> dict[str, Any]:
        """The rows as JSON values, with the device and dtype of the measurement."""
        names = ("device", "dtype", "seconds", "whole_ms", "tokens")
        return {name: getattr(self, name) for name in names} | {"rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        head = f"fused {len(self.fused)} of {len(self.rows)} groups for {self.device} in {self.dtype}, in {self.seconds:.1f} s"
        if self.whole_ms is not None:
            head += f"; one forward took {self.whole_ms[0]:.3g} ms before and takes {self.whole_ms[1]:.3g} ms now"
        if self.tokens is not None:
            tokens = "the first token" if self.tokens == 1 else f"the first {self.tokens} tokens"
            head += f"; behind its last attention the model reads {tokens} alone, so it computes no others there"
        groups = grouped(self.rows, lambda row: row.fqn, lambda row: (row.group, row.status, row.reason, row.launches))
        lines = [_line(name, members) for name, members in groups]
        return "\n\n".join([head, text_table(_HEADER, lines, right=("n", "own modules ms", "fused ms"))] if lines else [head])


def _line(name: str, rows: Sequence[OptimizeRow]) -> tuple[str, ...]:
    first = rows[0]
    times = ["" if value is None else f"{value:.3g}" for value in (first.plain_ms, first.fused_ms)]
    why = " | ".join(first.launches) if first.reason is None else f"{first.reason.code}: {first.reason.text}"
    return (name, str(len(rows)), first.group, first.status, *times, why)


def optimize(
    model: nn.Module, example: Example | None = None, *, training: Training = False, only: Iterable[Sequence[str]] | None = None
) -> OptimizeReport:
    """Replace groups of layers by fused modules, in place, for inference on the device and in the dtype that the model has now.

    The groups are found by dataflow, in a trace of the forward pass: [LN -> q, k, v]; attention itself; [its output projection -> layer
    scale -> residual]; [LN -> FFN -> layer scale -> residual]; the patch embedding, with the method of timm's models that adds position
    and tokens; for training also other layer norms. Layers may be converted or dense. A feed-forward block may be gated (SwiGLU), by two
    layers or the halves of one, and may have a norm before its last layer. Residual sums are fused in modules that compute nothing else:
    a block, one half of it, or many in a row. If ``model`` itself is one, it gets a fused forward.

    A group is fused if a kernel takes it and is faster than the model's own modules in a short measurement, at the example's number of
    samples, on CUDA in graphs. The report has the result for each group, or why it is not fused. Then the whole model is timed with and
    without fusion. While it is slower with fusion, the kind of group that gained the least is left as it was.

    Many classifiers read the class token alone behind their last attention, or the first few tokens. There the model's forward, called as
    in the trace, computes no others in groups and norms. ``forward_features`` and modules that are called by themselves give all tokens,
    and so does the forward as long as hooks would see that some are missing.

    Outputs stay the same within rounding; names, state dict and calls stay the same. The model's own modules serve gradients,
    ``torch.func``'s transforms, autocast, training mode, hooks that are set later, modules that are replaced or get another forward later,
    and arguments other than those of the trace. Fused modules run under ``torch.no_grad`` or ``torch.inference_mode``. Code that
    ``torch.compile`` makes calls them from Python, so ``fullgraph=True`` raises. Weights may be changed, loaded, moved and retyped;
    ``flysurgery.ops.forget_derived`` lists the writes after which to call it.

    With ``training`` the fused modules run where gradients are enabled, in training mode as well, and calls without gradients go to the
    model's own modules. Each group is timed forward and backward, under the autocast around this call. A group keeps one or two
    activations, and the residual stream between blocks has autocast's dtype. Norms outside of groups are fused too, except those whose
    results leave the model. Blocks with dropout or dropped paths stay as they are, and so does all else without fused gradients.
    Gradients have the dtypes of their parameters. There are no second derivatives: ``create_graph=True`` raises. Optimize before the model
    is wrapped by ``DistributedDataParallel``, sharded by ``fully_shard``, or compiled. The whole model is timed as it is called from
    Python, which takes the host more time than the model's own modules do; with ``training="captured"`` as a CUDA graph of the whole step.

    ``restore`` puts the model back. Do that before its layers are resized or reconfigured (``set_input_size``, another ``num_heads``,
    ...), before ``torch.compile`` runs with replaced layers, or with other parameters by ``torch.func.functional_call``, and before
    ``nn.DataParallel``, which refuses: fused modules keep the attributes from which they were made, and their device.

    Args:
        model: in eval mode; modules in training mode or with hooks stay as they are.
        example: the input, a tuple of all positional inputs, or a mapping of inputs by name, with the number of samples to be fast for.
            None: models of timm, vit-pytorch and transformers that take images need none, and 64 images are measured on CUDA.
        training: whether to make training faster in place of inference, called from Python or captured.
        only: the groups to fuse, as an earlier report's ``chosen`` names them. Nothing is measured then.

    Raises:
        InferenceError: the model is optimized, compiled, sharded or wrapped already, has parameters of several devices, or lacks a group of
            ``only``.
        WalkError: no example is known for the model, or its forward pass cannot be traced.
    """
    started = perf_counter()
    _refuse(model)
    if training not in (False, True, "captured"):
        raise InferenceError(f"training must be False, True or 'captured', got {training!r}")
    device, dtype = _place_of(model)
    measured_as = (training and autocast_dtype(device.type)) or dtype
    found = find_groups(model, _example(model, device) if example is None else example)
    built = find_replacements(model, found, trains=bool(training))
    chosen = None if only is None else _chosen(only, built)
    images = {each.shape for each in found.seen.example if isinstance(each, Tensor) and each.dim() == 4}
    with clock.rehearsed(model) if training else nullcontext():
        _decide(built, measured_as, device, images, chosen)
        if chosen is None:
            fused, whole = _not_slower(model, built, found.seen.example, training, images)
        else:
            fused, whole = built.fused(), None
    put(model, fused)
    rows = [
        OptimizeRow(each.fqn, each.group, "left" if each.reason else "fused", each.reason, each.plain_ms, each.fused_ms, each.launches)
        for each in built.candidates
    ]
    rows += [OptimizeRow(fqn, group, "left", reason, None, None) for group, fqn, reason in built.without]
    order = {fqn: index for index, (fqn, _) in enumerate(found.seen.double.named_modules())}
    rows.sort(key=lambda row: order.get(row.fqn, len(order)))
    first = fused.methods.get(("", "forward"))
    tokens = first.tokens.count if isinstance(first, FirstTokensForward) else None
    seconds, measured_in = perf_counter() - started, str(measured_as).removeprefix("torch.")
    return OptimizeReport(tuple(rows), str(device), measured_in, seconds, model, whole, tokens)


def fuse(model: nn.Module, example: Any = None, only: Groups | None = None, **how: Any) -> Groups:
    """Put fused modules into a model that trains without them as well, by ``optimize``; gives the names and kinds of the groups.

    With ``only``, those of an earlier call, the same groups are fused, so that a resumed run computes what it would have computed. A model
    that is refused or not traced stays as it is, and so does one whose kernels do not compile or whose measurement needs more memory.
    """
    if only == []:
        return []
    try:
        return [[*each] for each in optimize(model, example, only=only, **how).chosen]
    except (BackendError, InferenceError, WalkError):
        return []
    except torch.cuda.OutOfMemoryError:  # measuring may need more than the updates do, whose batches may be smaller
        torch.cuda.empty_cache()
        return []


def _refuse(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise InferenceError(f"expected a torch.nn.Module to optimize, got {type(model).__name__}")
    if is_optimized(model):
        raise InferenceError("the model is optimized already; flysurgery.restore(model) takes that back")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InferenceError("DistributedDataParallel cannot be traced; optimize the model in it, its module")
    if any(hasattr(each, "device_mesh") for each in model.parameters()):
        raise InferenceError("the model's parameters are sharded already; optimize the model first, and shard it then")
    compiled = (name for name, module in model.named_modules() if "_orig_mod" in module._modules or module._compiled_call_impl is not None)
    name = next(compiled, None)
    if name is not None:
        what = f"its {name} is" if name else "the model is"
        raise InferenceError(f"{what} compiled already, so nothing in it can be replaced; optimize the model first, and compile it then")


def _example(model: nn.Module, device: torch.device) -> Tensor | tuple[Any, ...]:
    """An input that the model takes; on CUDA, where it is one tensor, with ``MEASURED_IMAGES`` samples."""
    example = example_input(model)
    return example.new_zeros((MEASURED_IMAGES, *example.shape[1:])) if isinstance(example, Tensor) and device.type == "cuda" else example


def _chosen(only: Iterable[Sequence[str]], built: Replacements) -> set[tuple[str, ...]]:
    """The names and kinds of ``only``, all of which are those of candidates."""
    if isinstance(only, str) or not isinstance(only, Iterable):
        raise InferenceError(f"'only' takes pairs of a name and a kind, as a report's 'chosen' has them, got {only!r}")
    wanted = {tuple(each) for each in only}
    missing = wanted - {(each.fqn, each.group) for each in built.candidates}
    if missing:
        raise InferenceError(
            f"the model has no group {min(missing)} to fuse; 'only' takes pairs of a name and a kind, as a report's 'chosen' has them"
        )
    return wanted


def _decide(
    built: Replacements, dtype: torch.dtype, device: torch.device, images: set[torch.Size], chosen: set[tuple[str, ...]] | None
) -> None:
    """Leave each candidate that must not be fused, that no kernel takes, or that is not ``chosen`` or, where it is measured, faster.

    Of equal groups one is measured. Kernels that this needs are compiled before, side by side.
    """
    equal: dict[object, list[Candidate]] = {}
    with torch.no_grad(), ops.compiling() if device.type == "cuda" else nullcontext():
        for replacement in built.replacements:
            for candidate in _able(replacement, dtype, device):
                if chosen is not None and (candidate.fqn, candidate.group) not in chosen:
                    candidate.leave(Reason("not-chosen", "it is not among the groups that were asked for"))
                equal.setdefault((candidate.group, candidate.step.likeness(), candidate.shapes), []).append(candidate)
        measured = [] if chosen is not None or device.type == "meta" else [*equal.values()]
        cases = [_Case.of(members[0], dtype, device, images) for members in measured]
        for case in cases if device.type == "cuda" else ():
            for way in case.ways:
                way(*case.inputs())
    for members, case in zip(measured, cases, strict=True):
        with torch.no_grad():
            plain_ms, fused_ms = clock.medians_ms(case.ways, case.inputs(), most_copies=case.most_copies)
        for each in members:
            each.plain_ms, each.fused_ms = plain_ms, fused_ms
            if fused_ms >= plain_ms:
                each.leave(Reason("slower", f"fused it takes {fused_ms:.3g} ms here, by its own modules {plain_ms:.3g} ms"))


def _able(replacement: Replacement, dtype: torch.dtype, device: torch.device) -> Iterator[Candidate]:
    """The candidates that a kernel takes and that nothing hinders; leaves the others."""
    hindrance = replacement.condition.obstacle()
    for candidate in replacement.candidates:
        if hindrance is not None:
            code, module = hindrance
            candidate.leave(Reason(code, f"its {type(module).__name__} {_HINDRANCES[code]}"))
            continue
        step = candidate.step
        _, ask, shapes = _training_calls(step, candidate.shapes) if step.trains else (None, step.way, candidate.shapes)
        # No data is needed: the answer follows from shapes, dtypes and the device.
        found = ask(*[torch.empty(shape, dtype=dtype, device=device) for shape in shapes])
        if isinstance(found, str):
            candidate.leave(Reason("no-gradients" if step.trains else "no-kernel", found))
            continue
        if isinstance(found, Way):
            candidate.launches = found.launches()
        yield candidate


class _Case(NamedTuple):
    """What is timed for equal groups: the ways, by their own modules and fused, and the inputs."""

    ways: tuple[clock.Way, clock.Way]
    inputs: Callable[[], list[Tensor]]
    most_copies: int

    @classmethod
    def of(cls, candidate: Candidate, dtype: torch.dtype, device: torch.device, images: set[torch.Size]) -> "_Case":
        step = candidate.step
        if not step.trains:
            return cls((step.plain, step.fused), partial(clock.random_inputs, candidate.shapes, dtype, device), clock.MOST_CALLS)
        own, fused, shapes = _training_calls(step, candidate.shapes)
        ways = clock.with_gradients(own, step, images), clock.with_gradients(fused, step, images)
        return cls(ways, partial(clock.random_inputs, shapes, dtype, device), clock.MOST_COPIES)


def _training_calls(step: Step, shapes: clock.Shapes) -> tuple[Callable[..., Any], Callable[..., Any], clock.Shapes]:
    """The step by its own modules, with fused gradients, and the shapes of the inputs of both.

    q, k and v of one shape come as parts of one tensor, as from one projection.
    """
    if not isinstance(step.given, Attention) or len({*shapes}) > 1:
        return step.plain, step.trained, shapes

    def of_parts(way: Callable[..., Any]) -> Callable[..., Any]:
        return lambda whole: way(*whole.permute(2, 0, 3, 1, 4).unbind(0))

    batch, heads, tokens, features = shapes[0]
    return of_parts(step.plain), of_parts(step.trained), ((batch, tokens, len(shapes), heads, features),)


def _not_slower(
    model: nn.Module, built: Replacements, example: tuple[Any, ...], training: Training, images: set[torch.Size]
) -> tuple[Fused, Times | None]:
    """What is put into ``model``, so that it is not slower than without, and both times.

    While the model is slower, the kind of group that gained the least is left as it was. The times are None where nothing was measured:
    if no group is fused, on the meta device, and if the example contains anything other than tensors.
    """
    while True:
        fused = built.fused()
        if not any(fused) or not all(isinstance(each, Tensor) and not each.is_meta for each in example):
            return fused, None
        ways, most = [model, view(model, *fused)], clock.MOST_COPIES
        if training:
            ways, most = [clock.with_gradients(each, model, images) for each in ways], clock.MOST_BACKWARD
        with torch.no_grad():
            plain_ms, fused_ms = clock.medians_ms(ways, example, most_copies=most, captured=training is not True)
        if fused_ms <= plain_ms:
            return fused, (plain_ms, fused_ms)
        kept = [each for each in built.candidates if each.reason is None]  # all of them are measured
        least = min(kept, key=lambda each: each.gain_ms)
        text = f"with it fused the whole model takes {fused_ms:.3g} ms here, without fused modules {plain_ms:.3g} ms"
        for each in kept:
            if (each.group, each.plain_ms, each.fused_ms) == (least.group, least.plain_ms, least.fused_ms):
                each.leave(Reason("slower-model", text))


def _place_of(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    devices = {parameter.device for parameter in parameters}
    if len(devices) != 1:
        where = ", ".join(sorted(map(str, devices))) or "none"
        raise InferenceError(f"a model with parameters on one device can be optimized, this one has them on: {where}")
    dtypes = [parameter.dtype for parameter in parameters]
    return devices.pop(), max(set(dtypes), key=dtypes.count)
