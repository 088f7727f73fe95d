"""Draws by matplotlib, which is an extra."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flysurgery.bench.rows import check_file
from flysurgery.errors import OptionError


def check_plot(path: Path | None) -> None:
    """Check before measuring that the picture can be drawn.

    Raises ``OptionError`` where matplotlib is missing, or knows no format of this name, or nothing can be written there.
    """
    if path is None:
        return
    known = pyplot().gcf().canvas.get_supported_filetypes()
    pyplot().close("all")
    if path.suffix.lstrip(".").lower() not in known:
        raise OptionError(f"--plot takes a file that ends in .{', .'.join(sorted(known))}, got {path}")
    check_file(path, "--plot")


def draw_tradeoff(curve: Sequence[tuple[float, float]], chosen: tuple[float, float], path: Path, *, unit: str) -> None:
    """Draw the predicted error over the share of the dense layers' weights or milliseconds, and the point that was chosen."""
    figure, axes = pyplot().subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot([100 * share for share, _ in curve], [error for _, error in curve], marker="o", markersize=3, label="least error")
    axes.plot([100 * chosen[0]], [chosen[1]], marker="D", linestyle="none", label=f"chosen: {chosen[0]:.1%}, {chosen[1]:.3f}")
    axes.set(xlabel=f"share of the dense layers' {unit}, percent", ylabel="predicted relative error", ylim=(0, None))
    axes.legend(fontsize=8)
    save(figure, path)


def pyplot() -> Any:
    """Give matplotlib's pyplot, drawing into files."""
    try:
        importlib.import_module("matplotlib").use("Agg")
    except ImportError as error:
        raise OptionError("--plot draws with matplotlib, which is not installed: pip install 'flysurgery[bench]'") from error
    return importlib.import_module("matplotlib.pyplot")


def save(figure: Any, path: Path) -> None:
    """Write a figure, and close it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100, bbox_inches="tight")
    pyplot().close(figure)
