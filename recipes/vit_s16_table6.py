"""Table 6 of Gonon et al. 2024 on this machine: the linear layers of a ViT-S/16 with and without bias, butterfly beside dense.

    python recipes/vit_s16_table6.py --out recipes/results/vit_s16_table6_h200.csv --plot recipes/results/vit_s16_table6_h200.png

25088 rows in protocol ``paper`` (128 images of 196 tokens), 25216 in ``today`` (197 tokens), where q, k and v are one matrix.
"""

from __future__ import annotations

import recipe
import vit_tables


def main() -> None:
    """Measure, print and write."""
    options = vit_tables.arguments(__doc__, launches="graph,eager", parts="linear*,qkv*").parse_args()
    vit_tables.run(options)


if __name__ == "__main__":
    recipe.main(main)
