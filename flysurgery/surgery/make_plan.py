"""From the walker's targets to a plan."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flysurgery.errors import OptionError, PatternError, PlanError, Reason, SelectionError
from flysurgery.patterns import ARCHITECTURES, OF_BLOCKS, Architecture, named
from flysurgery.surgery.base import find_base
from flysurgery.surgery.plan import ExampleInput, LayerPlan, Part, Plan
from flysurgery.surgery.transaction import refuse_converted
from flysurgery.walker import Example, Target, example_input, positional, select, walk

DEFAULT_NBLOCKS = 4

DEFAULT_ROLES = ("ffn_in", "ffn_out", "qkv")
"""The roles to replace by default, as far as the model has them."""

MAX_VALUES = 4096
"""Most entries of an integer input that a plan keeps. Token ids and sizes decide what a forward does, unlike pixels."""


@dataclass(frozen=True)
class Rule:
    """How architectures are chosen: a family and its options, or the architectures themselves.

    The family's own options decide: ``nblocks`` for "monarch", "block" and "deformable", ``rank`` for "lowrank". A matrix with explicit
    ``architectures`` gets the first of its size.

    Raises:
        OptionError: an option out of its range, or two that contradict each other.
    """

    arch: str
    nblocks: int = DEFAULT_NBLOCKS
    rank: int | None = None
    architectures: tuple[Architecture, ...] = ()

    def __post_init__(self) -> None:
        if self.arch not in ARCHITECTURES:
            raise OptionError(f"arch must be one of {', '.join(ARCHITECTURES)}, got {self.arch!r}")
        for name, value in (("nblocks", self.nblocks), ("rank", self.rank)):
            if value is not None and (type(value) is not int or value < 1):
                raise OptionError(f"{name} must be a positive integer, got {value!r}")
        given = [name for name, is_given in (("nblocks", self.nblocks != DEFAULT_NBLOCKS), ("rank", self.rank is not None)) if is_given]
        if self.architectures and given:
            raise OptionError(f"patterns name the architecture, so {' and '.join(given)} cannot be given with them")
        for name in given:
            if self.arch not in {"nblocks": OF_BLOCKS, "rank": ("lowrank",)}[name]:
                raise OptionError(f"arch {self.arch!r} takes no {name}; nblocks is for {', '.join(OF_BLOCKS)}, rank for lowrank")

    @classmethod
    def parse(cls, choice: str) -> "Rule | None":
        """The rule of a text: None of "dense", else a family, with its ``nblocks`` or ``rank`` behind a colon."""
        family, colon, number = choice.partition(":")
        if choice == "dense":
            return None
        takes_number = family == "lowrank" or family in OF_BLOCKS
        if family not in ARCHITECTURES or (colon and not (takes_number and number.isdecimal())):
            raise OptionError(f"per_layer: expected dense, or a family such as gonon, monarch:8 or lowrank:64, got {choice!r}")
        if not number:
            return cls(family)
        return cls(family, rank=int(number)) if family == "lowrank" else cls(family, nblocks=int(number))

    def choose(self, out_features: int, in_features: int) -> Architecture | Reason:
        """The architecture for an ``out x in`` matrix, or why it stays dense."""
        size = f"{out_features}x{in_features}"
        fitting = [each for each in self.architectures if each.shape == (out_features, in_features)]
        if self.architectures and not fitting:
            sizes = ", ".join(f"{each} is {each.out_features}x{each.in_features}" for each in self.architectures)
            return Reason("no-pattern", f"the matrix is {size}; of the given patterns {sizes}")
        try:
            found = fitting[0] if fitting else named(self.arch, out_features, in_features, nblocks=self.nblocks, rank=self.rank)
        except PatternError as error:
            return Reason("no-pattern", str(error))
        if found.density >= 1:
            return Reason("no-gain", f"{found} has {found.num_parameters} weights, the dense {size} matrix {out_features * in_features}")
        return found


class Rules:
    """The rule of most layers, and those of layers and parts whose names match an expression; None keeps what it is for dense.

    Of several expressions that match the last counts. ``unmet`` are those that have matched nothing yet.
    """

    def __init__(self, usual: Rule, per_layer: Mapping[str, str]) -> None:
        if not isinstance(per_layer, Mapping) or not all(isinstance(text, str) for item in per_layer.items() for text in item):
            raise OptionError(f"per_layer maps regular expressions to choices, such as {{'qkv.v$': 'dense'}}; got {per_layer!r}")
        self._usual, self.unmet = usual, list(per_layer)
        try:
            self._others = [(re.compile(expression), Rule.parse(choice)) for expression, choice in per_layer.items()]
        except re.error as error:
            raise SelectionError(f"per_layer: {error.pattern!r} is no regular expression: {error}") from error

    def of(self, *names: str) -> Rule | None:
        """The rule of a layer or of a part of one, which has the names of both."""
        found: Rule | None = self._usual
        for expression, rule in self._others:
            if any(map(expression.search, names)):
                found = rule
                self.unmet = [each for each in self.unmet if each != expression.pattern]
        return found


def plan(
    model: nn.Module,
    arch: str = "monarch",
    *,
    roles: str | Sequence[str] | None = None,
    include: str | Sequence[str] | None = None,
    exclude: str | Sequence[str] | None = None,
    nblocks: int = DEFAULT_NBLOCKS,
    rank: int | None = None,
    patterns: str | Architecture | Sequence[str | Architecture] | None = None,
    per_layer: Mapping[str, str] | None = None,
    base: str | None = None,
    base_args: Mapping[str, Any] | None = None,
    example: Example | None = None,
    blocks: str | None = None,
    min_size: int | None = None,
    convs: bool = False,
    targets: Sequence[Target] | None = None,
) -> Plan:
    """Plan which linear layers of ``model`` are replaced and by what. The model stays as it is, and may be on the meta device.

    Layers are selected by role and by regular expressions over their names (``include``, ``exclude``). A fused projection is taken apart
    where the walk proves which rows are q, k and v, and then each part has its own architecture; else it is one matrix. A layer stays
    dense, with its reason, where it is not selected, an obstacle forbids it, or no architecture has its size or fewer weights than it.
    Takes seconds: the walk runs on shapes, not on numbers.

    Args:
        roles: "ffn" (both of its linears), "qkv", "attn_out", ...; each must occur. By default ffn and qkv, as far as they do.
        arch: family of architectures: "monarch" (with ``nblocks``), "gonon", "lowrank" (with ``rank``), "dyadic", "kaleidoscope", or
            "block" or "deformable" (with ``nblocks``). The kaleidoscope has no projection; see ``init`` of ``apply``.
        patterns: architectures instead of a family, such as "(1,192,48,2),(2,48,192,1)", or a list of them; each layer
            gets the first that has its size.
        per_layer: other choices for the selected layers, or parts of fused projections, that a regular expression finds: "dense", or
            a family with its number, as in ``{"qkv.v$": "dense", "qkv.[qk]$": "monarch:8", "blocks.5": "lowrank:64"}``. A part is
            named after its layer, as in "blocks.0.attn.qkv.v". Of several expressions that match, the last counts.
        base, base_args: how to build the dense model again when a checkpoint is loaded; timm models have this information.
        example: the arguments of one forward: a tensor, a tuple by position, or a mapping by name, as image processors of transformers
            give it. Models of timm and vit-pytorch need none, nor do those models of transformers that take images.
        blocks, min_size: only layers in the blocks of these numbers (``"0-5,8"``), or with both sides of at least this size.
        convs: replace 1x1 convolutions of the selected roles as well, as linears of the channels.
        targets: the result of ``walk(model, example)``, if it is known already; needs the example.

    Raises:
        SelectionError: a selector or an expression of ``per_layer`` matched nothing, or one of ``patterns`` has no selected layer's size.
        OptionError: an option out of its range, or two that contradict each other.
        PatternError: ``patterns`` that are none.
        PlanError: nothing would be replaced; the message says why.
        WalkError: the model's graph cannot be read.
        SurgeryError: the model is converted already, or wrapped by ``torch.compile``.
    """
    given = [patterns] if isinstance(patterns, str | Architecture) else patterns or ()
    if not isinstance(given, Iterable):
        raise OptionError(f"patterns are architectures, or texts such as '(1,192,48,2)(2,48,192,1)', got {patterns!r}")
    architectures = tuple(each if isinstance(each, Architecture) else Architecture.parse(each) for each in given)
    rules = Rules(Rule(arch, nblocks, rank, architectures), per_layer or {})
    refuse_converted(model)
    name, arguments = find_base(model, base, base_args)
    inputs = positional(model, example_input(model) if example is None else example)
    targets = walk(model, inputs) if targets is None else targets
    if roles is None:  # all of them where the model has none, so that the selection fails and lists the roles found
        roles = tuple(role for role in DEFAULT_ROLES if any(target.role == role for target in targets)) or DEFAULT_ROLES
    selected = select(targets, roles=roles, include=include, exclude=exclude, blocks=blocks, min_size=min_size)
    chosen = {target.fqn for target in selected}
    samples = count_samples(inputs)
    layers = tuple(_plan_layer(target, rules, samples, selected=target.fqn in chosen, convs=convs) for target in targets)
    if rules.unmet:
        raise SelectionError(f"per_layer: {rules.unmet[0]!r} matches no selected layer and no part of one")
    _check_patterns_match(architectures, selected)
    replaced = {layer.fqn for layer in layers if layer.is_replaced}
    if not replaced:
        reasons = Counter(layer.reason for layer in layers if layer.fqn in chosen and layer.reason is not None)
        why = "; ".join(f"{reason.code} ({count} layers): {reason.text}" for reason, count in reasons.most_common(4))
        raise PlanError(f"nothing would be replaced: {why}")
    switches = tuple(dict.fromkeys(switch for target in targets if target.fqn in replaced for switch in target.switches))
    return Plan(layers, switches, name, arguments, _describe(inputs))


def _plan_layer(target: Target, rules: Rules, samples: int, *, selected: bool, convs: bool) -> LayerPlan:
    is_conv = any(obstacle.code == "conv1x1" for obstacle in target.obstacles)
    obstacles = [obstacle for obstacle in target.obstacles if not (convs and obstacle.code == "conv1x1")]
    obstacles.sort(key=lambda obstacle: not obstacle.blocking)
    outcome: tuple[Part, ...] | Reason
    if obstacles and (obstacles[0].blocking or not selected):
        outcome = Reason(obstacles[0].code, obstacles[0].text)
    elif not selected:
        outcome = Reason("not-selected", "it is not among the selected roles and names")
    else:
        outcome = _parts(target, rules)
    is_kept = isinstance(outcome, Reason)
    return LayerPlan(
        **{name: getattr(target, name) for name in ("fqn", "role", "in_features", "out_features", "bias", "calls", "aliases")},
        rows=target.rows // samples,
        status="keep" if is_kept else "replace",
        reason=outcome if is_kept else None,
        parts=() if is_kept else outcome,
        conv=is_conv,
    )


def _parts(target: Target, rules: Rules) -> tuple[Part, ...] | Reason:
    slices = target.split or ()
    applied = [rules.of(f"{target.fqn}.{each.name}", target.fqn) for each in slices]
    choices = [_choice(rule, each.stop - each.start, target.in_features) for rule, each in zip(applied, slices, strict=True)]
    if any(isinstance(choice, Architecture) for choice in choices):
        return tuple(
            Part(each.name, each.start, each.stop, choice if isinstance(choice, Architecture) else None)
            for each, choice in zip(slices, choices, strict=True)
        )
    reasons = [choice for choice in choices if isinstance(choice, Reason)]
    rule_of_whole = rules.of(target.fqn)
    whole = _choice(rule_of_whole, target.out_features, target.in_features)
    if isinstance(whole, Reason):
        return reasons[0] if reasons else whole
    if all(rule is rule_of_whole for rule in applied):
        return (Part(None, 0, target.out_features, whole),)
    return reasons[0]  # what is said of parts goes before the whole


def _choice(rule: Rule | None, out_features: int, in_features: int) -> Architecture | Reason:
    return Reason("not-selected", "per_layer keeps it dense") if rule is None else rule.choose(out_features, in_features)


def _check_patterns_match(architectures: Sequence[Architecture], targets: Sequence[Target]) -> None:
    sizes = {(target.out_features, target.in_features) for target in targets}
    sizes |= {(each.stop - each.start, target.in_features) for target in targets for each in target.split or ()}
    for architecture in architectures:
        if architecture.shape not in sizes:
            raise SelectionError(
                f"the given patterns {architecture} describe a {architecture.out_features}x{architecture.in_features} matrix, "
                f"and the selected layers and their parts are {', '.join(f'{rows}x{columns}' for rows, columns in sorted(sizes))}"
            )


def count_samples(inputs: tuple[Any, ...]) -> int:
    """The number of samples in an example: rows of its first tensor, or tensors of its first list."""
    first = next((each for each in inputs if each is not None), None)
    if isinstance(first, list):
        return max(len(first), 1)
    return first.shape[0] if isinstance(first, Tensor) and first.dim() > 1 else 1


def _describe(inputs: tuple[Any, ...]) -> tuple[ExampleInput | tuple[ExampleInput, ...] | None, ...] | None:
    described: list[ExampleInput | tuple[ExampleInput, ...] | None] = []
    for argument in inputs:
        if isinstance(argument, list) and argument and all(isinstance(each, Tensor) for each in argument):
            described.append(tuple(map(_described, argument)))
        elif argument is None or isinstance(argument, Tensor):
            described.append(None if argument is None else _described(argument))
        else:
            return None
    return tuple(described)


def _described(tensor: Tensor) -> ExampleInput:
    small = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_meta) and tensor.numel() <= MAX_VALUES
    values = [int(value) for value in tensor.flatten().tolist()] if small else []
    return ExampleInput(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tuple(values) if min(values, default=0) >= 0 else ())
