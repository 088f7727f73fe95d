"""What a table looks like on a terminal of any width, and elsewhere."""

from __future__ import annotations

import json
import re

import pytest

from flysurgery.cli.tables import print_json, print_table

COLUMNS = ("layer", "n", "worst\nerror", "architecture")
ROWS = [("blocks.*.attn.qkv", "12", "0.612", "(1,96,96,4),\n(4,96,96,1)"), ("blocks.*.mlp.fc1", "2", "0.7", "(1,384,96,4),\n(4,96,96,1)")]

PLAIN = """\
layer               n  worst error  architecture
blocks.*.attn.qkv  12        0.612  (1,96,96,4), (4,96,96,1)
blocks.*.mlp.fc1    2          0.7  (1,384,96,4), (4,96,96,1)
"""

NARROW = """\
                     worst
layer              n error architecture
blocks.*.attn.qkv 12 0.612 (1,96,96,4),
                           (4,96,96,1)
blocks.*.mlp.fc1   2   0.7 (1,384,96,4),
                           (4,96,96,1)
"""

WIDE = """\
layer              n worst error architecture
blocks.*.attn.qkv 12       0.612 (1,96,96,4), (4,96,96,1)
blocks.*.mlp.fc1   2         0.7 (1,384,96,4), (4,96,96,1)
"""


def show(capsys: pytest.CaptureFixture[str]) -> str:
    print_table(COLUMNS, ROWS, right=("n", "worst\nerror"))
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    return "".join(line.rstrip() + "\n" for line in text.splitlines())


def test_elsewhere_than_on_a_terminal_a_row_is_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert show(capsys) == PLAIN


@pytest.mark.parametrize(("width", "expected"), [(45, NARROW), (120, WIDE)])
def test_a_terminal_breaks_where_it_is_told_and_only_if_it_must(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int, expected: str
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    assert show(capsys) == expected


def test_json_is_one_document_and_refuses_what_json_has_not(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"a": [1, None]})
    assert json.loads(capsys.readouterr().out) == {"a": [1, None]}
    with pytest.raises(ValueError, match="JSON"):
        print_json({"a": float("nan")})
