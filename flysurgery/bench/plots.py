"""Draws result rows by matplotlib, which is an extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from flysurgery.bench.rows import Record, check_file
from flysurgery.errors import OptionError

MOST_LETTERS = 60
"""Labels under bars stand side by side up to this many letters, and are turned beyond."""

LONGEST_LINE = 30
"""Labels longer than this are broken at a space."""

LETTER_INCHES = 0.06
"""Width of a letter in a legend."""

RATIO = "ratio_to_"
"""Begins the names of columns that hold a time over the time of something."""

Boxes = Mapping[str, Sequence[float]]
"""Values by the label under their box."""


def check_plot(path: Path | None) -> None:
    """Check before measuring that the picture can be drawn.

    Raises:
        OptionError: matplotlib is missing, or knows no format of this name, or nothing can be written there.
    """
    if path is None:
        return
    known = _pyplot().gcf().canvas.get_supported_filetypes()
    _pyplot().close("all")
    if path.suffix.lstrip(".").lower() not in known:
        raise OptionError(f"--plot takes a file that ends in .{', .'.join(sorted(known))}, got {path}")
    check_file(path, "--plot")


def draw_ratios(
    records: Sequence[Record], path: Path, *, group: Sequence[str], series: str = "candidate", ratio: str = RATIO + "dense", title: str = ""
) -> None:
    """Draw bars of the column ``ratio``, one group for each combination of the columns ``group``, one colour for each value of ``series``.

    A bar below the line at 1 is faster than what its time is divided by. Where a record has a ``paper_ratio``, a short line shows it.
    """
    plt = _pyplot()
    timed = [record for record in records if record.get(ratio)]
    groups = list(dict.fromkeys(tuple(str(record[name]) for name in group) for record in timed))
    names = list(dict.fromkeys(record[series] for record in timed))
    figure, axes = plt.subplots(figsize=(max(6.0, 0.35 * len(groups) * len(names) / 2 + 2), 4.5), layout="constrained")
    width = 0.8 / max(1, len(names))
    colours = plt.get_cmap("tab20" if len(names) > 10 else "tab10").colors
    for index, name in enumerate(names):
        places = [(groups.index(tuple(str(record[key]) for key in group)), record) for record in timed if record[series] == name]
        left = [place + (index - (len(names) - 1) / 2) * width for place, _ in places]
        axes.bar(left, [float(record[ratio]) for _, record in places], width, label=name, color=colours[index % len(colours)])
        paper = [(x, float(record["paper_ratio"])) for x, (_, record) in zip(left, places, strict=True) if record.get("paper_ratio")]
        axes.hlines([y for _, y in paper], [x - width / 2 for x, _ in paper], [x + width / 2 for x, _ in paper], "black")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_yscale("log")
    _plain_numbers(axes.yaxis)
    crowded = sum(max(map(len, each)) for each in groups) > MOST_LETTERS
    labels = ["\n".join(fill(text, LONGEST_LINE) for text in each) for each in groups]
    axes.set_xticks(range(len(groups)), labels, fontsize=7, rotation=90 if crowded else 0)
    axes.set_ylabel(f"time / time of {ratio.removeprefix(RATIO)}")
    axes.set_title(title, fontsize=9, wrap=True)
    if names:
        columns = int(figure.get_figwidth() / (LETTER_INCHES * max(map(len, names)) + 0.5))
        figure.legend(fontsize=7, ncols=max(1, min(columns, len(names))), loc="outside lower center")
    _save(figure, path)


def draw_boxes(panels: Mapping[str, tuple[str, str, Boxes]], path: Path, *, title: str = "") -> None:
    """Draw box plots side by side: ``panels`` maps a title to the axes' labels and the values under each box.

    The line is the median, the box the quartiles, the whiskers the 5th and 95th percentile, as in Gonon et al. 2024.
    """
    plt = _pyplot()
    columns = min(3, max(1, len(panels)))
    lines = -(-len(panels) // columns)
    figure, grid = plt.subplots(max(1, lines), columns, figsize=(5.2 * columns, 3.8 * max(1, lines)), layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    for axes, (name, (across, up, boxes)) in zip(grid.flat, panels.items(), strict=False):
        filled = {label: values for label, values in boxes.items() if values}
        axes.boxplot(list(filled.values()), whis=(5, 95), showfliers=False)
        axes.set_xticks(range(1, len(filled) + 1), list(filled), rotation=90, fontsize=7)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel(across, fontsize=8)
        axes.set_ylabel(up, fontsize=8)
        axes.axhline(1, color="grey", linewidth=0.8)
    figure.suptitle(title, fontsize=10)
    _save(figure, path)


def draw_lines(
    series: Mapping[str, Sequence[tuple[float, float]]], path: Path, *, across: str, up: str, title: str = "", level: float | None = 1
) -> None:
    """Draw one line for each series of points, both axes logarithmic, and a grey horizontal line at ``level``."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in series.items():
        ordered = sorted(points)
        axes.plot([x for x, _ in ordered], [y for _, y in ordered], marker="o", markersize=3, label=name)
    if level is not None:
        axes.axhline(level, color="grey", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel=across, ylabel=up, title=title)
    _plain_numbers(axes.yaxis)
    if series:
        axes.legend(fontsize=8)
    _save(figure, path)


def draw_tradeoff(curve: Sequence[tuple[float, float]], chosen: tuple[float, float], path: Path, *, unit: str) -> None:
    """Draw the predicted error over the share of the dense layers' weights or milliseconds, and the point that was chosen."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.plot([100 * share for share, _ in curve], [error for _, error in curve], marker="o", markersize=3, label="least error")
    axes.plot([100 * chosen[0]], [chosen[1]], marker="D", linestyle="none", label=f"chosen: {chosen[0]:.1%}, {chosen[1]:.3f}")
    axes.set(xlabel=f"share of the dense layers' {unit}, percent", ylabel="predicted relative error", ylim=(0, None))
    axes.legend(fontsize=8)
    _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise OptionError("--plot draws with matplotlib, which is not installed: pip install 'flysurgery[bench]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def _plain_numbers(axis: Any) -> None:
    """Write the numbers of a logarithmic axis as 0.3, 0.5, 1, not as powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    _pyplot().close(figure)
