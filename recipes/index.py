"""Write the table in recipes/README.md from the docstrings of the recipes: what each does, what it needs, and where its rows are.

Run it without arguments after a docstring has changed: ``python recipes/index.py``.
"""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent

HEADER = "| recipe | what it does | needs | rows |\n|---|---|---|---|\n"

_NEEDS = re.compile(r"^Needs (.+?)\.(?=\s|$)", re.MULTILINE | re.DOTALL)
_ROWS = re.compile(r"recipes/results/([\w.]+\.(?:csv|txt))")


def programs() -> dict[str, str]:
    """The recipes and their docstrings. A recipe is a file whose docstring has the command that runs it and says what it needs."""
    texts = {path.name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in sorted(HERE.glob("*.py"))}
    return {name: text for name, text in texts.items() if f"recipes/{name}" in text and _NEEDS.search(text)}


def page() -> str:
    """What the page says before its table, and the table anew."""
    rows = []
    for name, text in programs().items():
        files = dict.fromkeys(file for file in _ROWS.findall(text) if (HERE / "results" / file).is_file())
        needs = next(iter(_NEEDS.findall(text)))
        cells = f"`{name}`", text.partition("\n")[0].rstrip("."), " ".join(needs.split()), ", ".join(f"[{f}](results/{f})" for f in files)
        rows.append("| " + " | ".join(cells).replace("``", "`") + " |\n")
    return (HERE / "README.md").read_text(encoding="utf-8").partition(HEADER)[0] + HEADER + "".join(rows)


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(), encoding="utf-8")
