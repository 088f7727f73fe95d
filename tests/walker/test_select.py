"""Choosing targets by role, name, block and size."""

from typing import Any

import pytest

from flysurgery.errors import OptionError, SelectionError
from flysurgery.walker import ROLES, Role, Target, select


def target(fqn: str, role: Role, out: int = 8, into: int = 4) -> Target:
    return Target(fqn=fqn, role=role, in_features=into, out_features=out, bias=True, calls=1, rows=10)


def block(prefix: str) -> list[Target]:
    return [target(f"{prefix}.a.x", "qkv", 12), target(f"{prefix}.a.y", "attn_out", 4), target(f"{prefix}.f.0.z", "ffn_in")]


LAYERS: tuple[tuple[str, Role], ...] = (("attn.qkv", "qkv"), ("attn.proj", "attn_out"), ("mlp.fc1", "ffn_in"), ("mlp.fc2", "ffn_out"))
TARGETS = [*(target(f"blocks.{i}.{name}", role) for i in range(12) for name, role in LAYERS), target("head", "head")]
# Two stages, a merging layer between them, and a numbered container within each block.
STAGES = [*block("layers.0.blocks.0"), *block("layers.0.blocks.1"), target("layers.1.down", "other", 8, 8), *block("layers.1.blocks.0")]
STAGES += [target("head", "head", 1000)]


def names(targets: list[Target], **selectors: Any) -> list[str]:
    return [chosen.fqn for chosen in select(targets, **selectors)]


@pytest.mark.parametrize(
    ("selectors", "expected"),
    [
        ({}, [t.fqn for t in TARGETS]),
        ({"roles": ("qkv",)}, [f"blocks.{i}.attn.qkv" for i in range(12)]),
        ({"roles": ("ffn", "qkv")}, [t.fqn for t in TARGETS if t.role in ("ffn_in", "ffn_out", "qkv")]),
        ({"include": "fc1", "exclude": [r"blocks\.(\d)\."]}, ["blocks.10.mlp.fc1", "blocks.11.mlp.fc1"]),
        ({"include": [r"^head$", r"blocks\.3\.attn"]}, ["blocks.3.attn.qkv", "blocks.3.attn.proj", "head"]),
        ({"roles": "qkv", "exclude": "blocks.1"}, [f"blocks.{i}.attn.qkv" for i in range(12) if i not in (1, 10, 11)]),
    ],
)
def test_roles_and_patterns(selectors: dict[str, Any], expected: list[str]) -> None:
    assert names(TARGETS, **selectors) == expected


def test_ranges_of_blocks_and_the_size_of_the_smaller_side() -> None:
    assert names(STAGES, blocks="1") == [t.fqn for t in block("layers.0.blocks.1")]
    assert names(STAGES, blocks="0, 2-2") == [t.fqn for prefix in ("layers.0.blocks.0", "layers.1.blocks.0") for t in block(prefix)]
    assert names(STAGES, roles="qkv", blocks="1-2") == ["layers.0.blocks.1.a.x", "layers.1.blocks.0.a.x"]
    assert names(STAGES, min_size=5) == ["layers.1.down"]
    assert names(STAGES, min_size=4) == [t.fqn for t in STAGES]


KQV = r"blocks\.3\.attn\.kqv"
BLOCKS = r"no block 3-5; its blocks are 0 to 2, layers\.0\.blocks\.0 to layers\.1\.blocks\.0"


@pytest.mark.parametrize(
    ("targets", "selectors", "kind", "words"),
    [
        (TARGETS, {"roles": ("qkv", "mlp")}, OptionError, rf"'mlp'.*ffn, {', '.join(ROLES)}"),
        (TARGETS, {"roles": ("qkv", "other")}, SelectionError, r"'other'.*qkv \(12\).*head \(1\)"),
        *((TARGETS, {option: "fc("}, OptionError, r"'fc\(' is no regular expression") for option in ("include", "exclude")),
        *((TARGETS, {option: ["fc1", KQV]}, SelectionError, r"kqv.*nearest .*\.3\.attn\.qkv,") for option in ("include", "exclude")),
        (TARGETS, {"roles": "qkv", "include": "head"}, SelectionError, r"matches no linear of the chosen roles, only head \(head\)"),
        (TARGETS, {"roles": "head", "exclude": "he"}, SelectionError, "nothing is left"),
        *((STAGES, {"blocks": text}, OptionError, "such as 0-5,8") for text in ("", "x", "1-", "-1", "3-1", "0,,1", "0-²", "1" * 5000)),
        (STAGES, {"blocks": "1-999"}, SelectionError, "no block 1-999; its blocks are"),
        (STAGES, {"blocks": "0,3-5"}, SelectionError, BLOCKS),
        (TARGETS[-1:], {"blocks": "0"}, SelectionError, "no block 0; its blocks are none"),
        (STAGES, {"roles": "head", "blocks": "1"}, SelectionError, "blocks 1 hold none of the 1 linears selected, such as head"),
        (STAGES, {"min_size": 9}, SelectionError, r"both sides of at least 9; the largest is layers\.1\.down with 8x8"),
    ],
)
def test_what_selects_nothing_says_what_there_is(targets: list[Target], selectors: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        names(targets, **selectors)
