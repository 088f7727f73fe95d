"""Numbered blocks, and the selectors that go by them and by size."""

from __future__ import annotations

import pytest

from flysurgery.errors import OptionError, SelectionError
from flysurgery.walker import Role, Target, block_names, select


def target(fqn: str, role: Role, out: int = 8, into: int = 4) -> Target:
    return Target(fqn=fqn, role=role, in_features=into, out_features=out, bias=True, calls=1, rows=10)


def block(prefix: str) -> list[Target]:
    return [target(f"{prefix}.a.x", "qkv", 12), target(f"{prefix}.a.y", "attn_out", 4), target(f"{prefix}.f.0.z", "ffn_in")]


# Two stages, a merging layer between them, and a numbered container within each block.
STAGES = [
    *block("layers.0.blocks.0"),
    *block("layers.0.blocks.1"),
    target("layers.1.down", "other", 8, 8),
    *block("layers.1.blocks.0"),
    target("head", "head", 1000),
]


def names(targets: list[Target], **selectors: object) -> list[str]:
    return [chosen.fqn for chosen in select(targets, **selectors)]  # pyright: ignore[reportArgumentType]


def test_blocks_of_stages_are_numbered_through() -> None:
    assert block_names(STAGES) == ("layers.0.blocks.0", "layers.0.blocks.1", "layers.1.blocks.0")


def test_attention_and_feed_forward_of_one_list_are_one_block() -> None:
    lists = [
        target(f"layers.{i}.{j}", role) for i in range(2) for j, role in (("0.q", "qkv"), ("1.net.1", "ffn_in"), ("1.net.4", "ffn_out"))
    ]
    assert block_names(lists) == ("layers.0", "layers.1")


def test_without_attention_the_feed_forward_blocks_count() -> None:
    mixer = [target(f"blocks.{i}.{part}.{fc}", "ffn_in") for i in range(2) for part in ("tokens", "channels") for fc in ("a", "b")]
    assert block_names(mixer) == ("blocks.0", "blocks.1")
    assert block_names([target("a", "ffn_in"), target("head.0", "head")]) == ()


def test_ranges_and_numbers() -> None:
    assert names(STAGES, blocks="1") == [t.fqn for t in block("layers.0.blocks.1")]
    assert names(STAGES, blocks="0, 2-9") == [t.fqn for prefix in ("layers.0.blocks.0", "layers.1.blocks.0") for t in block(prefix)]
    assert names(STAGES, roles="qkv", blocks="1-2") == ["layers.0.blocks.1.a.x", "layers.1.blocks.0.a.x"]


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "3-1", "0,,1"])
def test_what_is_no_list_of_blocks(text: str) -> None:
    with pytest.raises(OptionError, match="such as 0-5,8"):
        names(STAGES, blocks=text)


def test_a_block_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(SelectionError, match=r"no block 3-5; its blocks are 0 to 2, layers\.0\.blocks\.0 to layers\.1\.blocks\.0"):
        names(STAGES, blocks="0,3-5")
    with pytest.raises(SelectionError, match="no block 0; its blocks are none"):
        names([target("head", "head")], blocks="0")


def test_blocks_without_any_of_the_selected() -> None:
    with pytest.raises(SelectionError, match="blocks 1 hold none of the 1 linears selected, such as head"):
        names(STAGES, roles="head", blocks="1")


def test_size_is_that_of_the_smaller_side() -> None:
    assert names(STAGES, min_size=5) == ["layers.1.down"]
    assert names(STAGES, min_size=4) == [t.fqn for t in STAGES]
    with pytest.raises(SelectionError, match=r"both sides of at least 9; the largest is layers\.1\.down with 8x8"):
        names(STAGES, min_size=9)
