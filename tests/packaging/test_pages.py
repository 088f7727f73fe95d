"""Links of the pages lead to files of the repository."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "kernels" / "README.md", ROOT / "recipes" / "README.md"])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    local = [link.partition("#")[0] for link in links if not re.match(r"[a-z]+:", link) and not link.startswith("#")]
    assert [link for link in local if not (page.parent / link).exists()] == []


def test_modules_that_pages_name_exist() -> None:
    for page in PAGES:
        names = re.findall(r"flysurgery/[\w/]+\.py", page.read_text(encoding="utf-8"))
        assert [name for name in names if not (ROOT / name).is_file()] == [], page.name
