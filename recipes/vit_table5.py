"""Table 5 of Gonon et al. 2024 on this machine: what part of a dense ViT's time the linear layers of its feed-forward networks take.

    python recipes/vit_table5.py --out recipes/results/vit_table5_h200.csv --plot recipes/results/vit_table5_h200.png

Batch 128 at 224 pixels. The linears of all feed-forward networks run one after the other, nothing between them, beside the whole model
in the same run; ``/ dense`` is their share of its time, ``paper`` what the authors report on an A100. More than this a faster
feed-forward linear cannot win.
"""

from __future__ import annotations

from functools import cache, partial

import recipe
import torch

from flysurgery.bench import ShareRow, bench_ffn_share, draw_ratios, measure_ceilings, share_head
from flysurgery.cli.bench_show import TIMES
from flysurgery.cli.options import model_arguments, names

PAPER = {
    ("vit_small_patch16_224", "fp16"): 0.31,
    ("vit_small_patch16_224", "fp32"): 0.46,
    ("vit_base_patch16_224", "fp16"): 0.42,
    ("vit_base_patch16_224", "fp32"): 0.54,
    ("vit_large_patch16_224", "fp16"): 0.46,
    ("vit_large_patch16_224", "fp32"): 0.58,
    ("vit_huge_patch14_224", "fp16"): 0.53,
    ("vit_huge_patch14_224", "fp32"): 0.61,
}
"""Shares in Table 5 of Gonon et al. 2024."""

COLUMNS = ("model", "batch", "mode", "launch", "candidate", "paper_ratio", *TIMES)


def main() -> None:
    """Measure, print, draw."""
    parser = recipe.arguments(__doc__, modes="fp16,fp32", seconds=0.5)
    every = ",".join(dict.fromkeys(model for model, _ in PAPER))
    parser.add_argument("--models", default=every, help="ViTs of timm; with --quick the first")
    parser.add_argument("--model-args", action="append", metavar="KEY=VALUE", help="arguments of their constructor; repeatable")
    parser.add_argument("--batch", type=recipe.count, help="images a forward; 128 by default")
    options = parser.parse_args()
    device, modes = recipe.device_and_modes(options)
    models, arguments = names(options.models, "--models"), model_arguments(options.model_args)
    batch = options.batch or recipe.images(options, device)
    if options.quick:
        models, modes = models[:1], modes if device.type == "cuda" else modes[-1:]
    ceilings = cache(partial(measure_ceilings, device=device, quick=options.quick))
    with recipe.start(options, device, ShareRow) as run:
        for model, mode in ((model, mode) for model in models for mode in modes):
            if run.has(share_head(model, arguments, batch, mode, device)):
                continue
            paper = None if arguments else PAPER.get((model, mode))
            protocol = recipe.protocol(options, 30)
            try:
                run.add(bench_ffn_share(model, arguments, batch, mode, device, ceilings(mode), protocol, paper=paper), f"{model} {mode}")
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                print(f"{model} in {mode} does not fit into this device's memory, and has no rows", flush=True)
    recipe.show(run, COLUMNS)
    if options.plot is not None and run.records:
        title = f"{run.records[0]['device']}: linears of feed-forward networks (short black lines: the paper's)"
        draw_ratios(run.records, options.plot, group=("model", "mode"), title=title)


if __name__ == "__main__":
    recipe.main(main)
