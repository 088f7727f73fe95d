"""What one order of the residual stream's features would win, shared by all layers that read or write the stream.

    python recipes/stream_order.py --photographs photographs --weights weights --out recipes/results/stream_order_cpu.csv

The model and the photographs are those of ``real_weights.py``. The order is searched as ``--permute`` searches those of hidden units, for
the products of all replaced layers together; errors are relative output errors on the samples that it was searched on, before and after.

Rows: recipes/results/stream_order_cpu.csv.

Needs the photographs and weights of ``real_weights.py``, and three minutes of two CPU cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import recipe
from focus_model import load_focus
from photograph_crops import calibration_crops, photographs_in
from torch import nn

from flysurgery import surgery
from flysurgery.calibration import Samples, collect
from flysurgery.projection import metric_of
from flysurgery.projection.permutation import Features, Side, choose_orders


@dataclass(frozen=True)
class Row:
    """The mean of the squared relative errors of ``products``, in the model's own order and in the one that was found."""

    arch: str
    nblocks: int
    crops: int
    products: int
    squared_error_before: float
    squared_error_after: float


def searched(model: nn.Module, samples: Samples, nblocks: int) -> Row:
    """Search one order for all products of the replaced layers of a ViT with Monarch factors."""
    plan = surgery.plan(model, arch="monarch", nblocks=nblocks)
    moments = collect(model, {layer.fqn: layer.calls for layer in plan.replaced}, samples.fit())
    width = min(layer.in_features for layer in plan.replaced)
    sides = []
    for layer in plan.replaced:
        gram, weight = metric_of(moments[layer.fqn], bias=layer.bias).gram, model.get_parameter(f"{layer.fqn}.weight").detach()
        for part in layer.parts:
            if part.architecture is not None:
                reads = layer.in_features == width
                sides.append(Side(weight[part.start : part.stop].to(gram), part.architecture, gram, columns=reads))
    found = choose_orders([Features(width, tuple(side for side in sides if not side.is_indifferent))])
    return Row("monarch", nblocks, len(samples), len(found.before[0]), mean(found.before[0]), mean(found.after[0]))


def main() -> None:
    """Search, print and write."""
    parser = recipe.arguments(__doc__)
    parser.add_argument("--photographs", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--weights", type=Path, required=True, metavar="DIR")
    parser.add_argument("--nblocks", type=recipe.counts, default=(4,), help="blocks of Monarch's factors, 4 by default")
    parser.add_argument("--crops", type=recipe.count, help="64 by default, 16 with --quick")
    options = parser.parse_args()
    device, _ = recipe.device_and_modes(options)
    crops = options.crops or (16 if options.quick else 64)
    with recipe.start(options, device, Row) as run:
        model = load_focus(options.weights).backbone.eval().requires_grad_(False).to(device)
        samples = calibration_crops(photographs_in(options.photographs), crops, options.seed)
        jobs = [({"nblocks": nblocks, "crops": crops}, lambda n=nblocks: [searched(model, samples, n)]) for nblocks in options.nblocks]
        recipe.fill(run, recipe.missing(run, jobs))
    recipe.show(run, ("arch", "nblocks", "crops", "products", "squared_error_before", "squared_error_after"))


if __name__ == "__main__":
    recipe.main(main)
