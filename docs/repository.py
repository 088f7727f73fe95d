"""Lets the pages of the site use files outside docs: a hook of MkDocs, named in mkdocs.yml.

Links in Markdown files are relative to their own place in the repository, so that a forge and an editor follow them too. For the site,
README.md becomes index.md, and files in docs lose that prefix. Every other file that a page links to is added to the site under its own
path. A link to a file that does not exist stays as it is, and `mkdocs build --strict` fails on it.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "kernels/README.md", "recipes/README.md")
"""Pages outside docs."""

LINK = re.compile(r"(?<=\]\()[^()\s#:]+|(?<=\]: )[^\s#:]+(?=\n|#)")
"""The path in ``[text](path#anchor)`` or in the definition ``[name]: path``; addresses with a scheme are none."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages outside docs, and the files that any page links to."""
    pages = [*PAGES, *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    linked = {_target(page, link) for page in pages for link in LINK.findall((ROOT / page).read_text(encoding="utf-8"))}
    for path in sorted({*PAGES, *linked}):
        if files.get_file_from_path(_uri(path)) is None and (ROOT / path).is_file():
            files.append(File.generated(config, _uri(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn each link to a file of the repository into the link between the places of both in the site."""
    source = Path(page.file.abs_src_path or "").relative_to(ROOT).as_posix()

    def moved(match: re.Match[str]) -> str:
        uri = _uri(_target(source, match[0]))
        return posixpath.relpath(uri, posixpath.dirname(page.file.src_uri) or ".") if files.get_file_from_path(uri) else match[0]

    return LINK.sub(moved, markdown)


def _target(page: str, link: str) -> str:
    """The path in the repository that a link on a page means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def _uri(path: str) -> str:
    """Where the site has a file of the repository."""
    return "index.md" if path == "README.md" else path.removeprefix("docs/")
