"""Draws docs/butterfly.png: a dense matrix beside the two factors of a Monarch product, entries that may differ from zero in colour."""

from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot

from flysurgery.factors import factor_to_dense
from flysurgery.patterns import monarch

matplotlib.use("Agg")
architecture = monarch(24, 24, 4)
supports = [factor_to_dense(torch.ones(pattern.factor_shape)) for pattern in architecture]
titles = ["dense weight", *(f"K{number}, pattern {pattern}" for number, pattern in enumerate(architecture, 1))]
figure, axes = pyplot.subplots(1, 3, figsize=(9, 3.3), layout="constrained")
figure.get_layout_engine().set(wspace=0.12, h_pad=0.1)  # pyright: ignore
for panel, title, support in zip(axes, titles, [torch.ones(24, 24), *supports], strict=True):
    panel.imshow(support, cmap="Blues", vmin=0, vmax=1.4)
    panel.set(title=f"{title}\n{int(support.sum())} weights", xticks=[], yticks=[])
figure.text(0.325, 0.42, "≈", fontsize=22, ha="center")
figure.text(0.663, 0.42, "·", fontsize=26, ha="center")
figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)
