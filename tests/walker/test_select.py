"""Choosing targets by role and name."""

from __future__ import annotations

import pytest

from flysurgery.errors import OptionError, SelectionError
from flysurgery.walker import ROLES, Role, Target, select
from flysurgery.walker.target import obstacle


def target(fqn: str, role: Role) -> Target:
    return Target(fqn=fqn, role=role, in_features=4, out_features=4, bias=True, calls=1, rows=10)


TARGETS = (
    *(
        target(f"blocks.{i}.{name}", role)
        for i in range(12)
        for name, role in (("attn.qkv", "qkv"), ("attn.proj", "attn_out"), ("mlp.fc1", "ffn_in"), ("mlp.fc2", "ffn_out"))
    ),
    target("head", "head"),
)


def names(**selectors: object) -> list[str]:
    return [chosen.fqn for chosen in select(TARGETS, **selectors)]  # pyright: ignore[reportArgumentType]


def test_no_condition_selects_everything() -> None:
    assert select(TARGETS) == TARGETS


def test_roles() -> None:
    assert names(roles=("qkv",)) == [f"blocks.{i}.attn.qkv" for i in range(12)]
    assert names(roles="head") == ["head"]
    assert names(roles=["ffn"]) == [f"blocks.{i}.mlp.fc{j}" for i in range(12) for j in (1, 2)]
    assert names(roles=("ffn", "qkv")) == [t.fqn for t in TARGETS if t.role in ("ffn_in", "ffn_out", "qkv")]


def test_patterns_are_searched_anywhere() -> None:
    assert names(include="fc1", exclude=[r"blocks\.(\d)\."]) == ["blocks.10.mlp.fc1", "blocks.11.mlp.fc1"]
    assert names(include=[r"^head$", r"blocks\.3\.attn"]) == ["blocks.3.attn.qkv", "blocks.3.attn.proj", "head"]
    assert names(roles="qkv", exclude="blocks.1") == [f"blocks.{i}.attn.qkv" for i in range(12) if i not in (1, 10, 11)]
    assert names(roles="qkv", exclude="head") == names(roles="qkv")


def test_blocked_targets_are_selected_too() -> None:
    blocked = Target("a", "qkv", 4, 4, True, 1, 10, obstacles=(obstacle("weight-read"),))
    assert blocked.blocked
    assert select([blocked], roles="qkv") == (blocked,)


def test_unknown_role() -> None:
    with pytest.raises(OptionError, match="'mlp'") as caught:
        names(roles=("qkv", "mlp"))
    assert all(role in str(caught.value) for role in ("ffn", *ROLES))


def test_a_role_that_the_model_lacks() -> None:
    with pytest.raises(SelectionError, match=r"'other'.*qkv \(12\).*head \(1\)"):
        names(roles=("qkv", "other"))


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_bad_regular_expression(option: str) -> None:
    with pytest.raises(OptionError, match=r"'fc\(' is no regular expression"):
        names(**{option: "fc("})


@pytest.mark.parametrize("option", ["include", "exclude"])
def test_a_pattern_that_matches_nothing_names_the_nearest(option: str) -> None:
    with pytest.raises(SelectionError) as caught:
        names(**{option: ["fc1", r"blocks\.3\.attn\.kqv"]})
    assert "kqv" in str(caught.value)
    assert "nearest names are blocks.3.attn.qkv," in str(caught.value)
    with pytest.raises(SelectionError, match=r"the nearest names are blocks\.\d+\.mlp\.fc"):
        names(**{option: r"mlp\.fc3$"})


def test_an_include_of_other_roles_says_so() -> None:
    with pytest.raises(SelectionError, match=r"'head' matches no linear of the chosen roles, only head \(head\)"):
        names(roles="qkv", include="head")


def test_nothing_left() -> None:
    with pytest.raises(SelectionError, match="nothing is left"):
        names(roles="head", exclude="he")


def test_exit_codes_are_those_of_usage() -> None:
    assert SelectionError.exit_code == OptionError.exit_code == 2
