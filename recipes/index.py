"""Write recipes/README.md from the docstrings of the recipes: what each does, what it needs, and where its rows are.

Run it without arguments after a docstring has changed: ``python recipes/index.py``.
"""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent

INTRODUCTION = """# Recipes

`python recipes/index.py` writes this page from the recipes' docstrings.

A recipe is one program for a task or for a family of tables, which are data over one engine, `recipe.py`. Its committed rows are in
`recipes/results`, where `python recipes/publish.py` puts them; the column `table` names the table of a row.
[Performance](../docs/performance.md), [fidelity](../docs/sight.md) and [accuracy](../docs/accuracy.md) show them, and
[the papers](../docs/papers.md) which command answers which table or figure. `python recipes/NAME.py --help` says how a recipe measures
and what its columns mean.

What they share:

- Each column that tells cases apart is an option: `--batch 1,8 --mode fp16 --arch monarch` names other values. `--only REGEX` takes the
  cases in whose columns it is found, `--candidates` some of the candidates, `--joules` measures energy, `--minutes` ends a run in time.
- `--quick` takes fewer cases and answers within two minutes, on a CPU too, where kernels have the status `needs CUDA`.
- `--out FILE` keeps the rows, each with a stamp. The same command goes on where it stopped; `--fresh` starts anew. Rows of the same
  device, versions and commit stay, whatever their options.
- Each candidate is compared with float64 before it is timed. A wrong one has a row that says so.
- Dense, or else the candidate that ratios refer to, is timed twice in the same shuffled run. If the two differ by more than 3 % (10 % on
  a CPU), all rows of that run say noisy.

| recipe | what it does | needs | rows |
|---|---|---|---|
"""

_NEEDS = re.compile(r"^Needs (.+?)\.(?=\s|$)", re.MULTILINE | re.DOTALL)
_ROWS = re.compile(r"recipes/results/([\w.]+\.(?:csv|txt))")


def programs() -> dict[str, str]:
    """The recipes and their docstrings. A recipe is a file whose docstring has the command that runs it and says what it needs."""
    texts = {path.name: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in sorted(HERE.glob("*.py"))}
    return {name: text for name, text in texts.items() if f"recipes/{name}" in text and _NEEDS.search(text)}


def page() -> str:
    rows = []
    for name, text in programs().items():
        files = dict.fromkeys(file for file in _ROWS.findall(text) if (HERE / "results" / file).is_file())
        needs = next(iter(_NEEDS.findall(text)))
        cells = f"`{name}`", text.partition("\n")[0].rstrip("."), " ".join(needs.split()), ", ".join(f"[{f}](results/{f})" for f in files)
        rows.append("| " + " | ".join(cells).replace("``", "`") + " |\n")
    return INTRODUCTION + "".join(rows)


if __name__ == "__main__":
    (HERE / "README.md").write_text(page(), encoding="utf-8")
