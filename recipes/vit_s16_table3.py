"""Table 3 of Gonon et al. 2024 on this machine: parts of a ViT-S/16, butterfly beside dense, by the paper's protocol and by today's.

    python recipes/vit_s16_table3.py --out recipes/results/vit_s16_table3_h200.csv --plot recipes/results/vit_s16_table3_h200.png

Batch 128 at 224 pixels. Protocol ``paper``: separate q, k and v, attention written out, no compiler. Protocol ``today``: timm's
model, one qkv, ``scaled_dot_product_attention``, also through ``torch.compile``. Each ratio is to dense in the same run and
mode; the column ``paper`` is what the authors report on an A100 in float32. ``--batches 1,8,32,128,256`` and ``--model
vit_base_patch16_224`` go further, ``--training`` adds a training step (forward, backward, AdamW, bfloat16 autocast).
"""

from __future__ import annotations

import recipe
import vit_tables


def main() -> None:
    """Measure, print and write."""
    parser = vit_tables.arguments(__doc__, launches="graph,eager,compile,max-autotune", parts="linear N x N,FFN,attention,block,model")
    parser.add_argument("--training", action="store_true", help="time a training step of the whole model as well")
    options = parser.parse_args()
    vit_tables.run(options, training=options.training)


if __name__ == "__main__":
    recipe.main(main)
