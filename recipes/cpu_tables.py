"""Tables 3 and 6 on a CPU: linears, FFN, attention, block and a whole ViT-S/16 on two threads, butterfly beside dense.

    python recipes/cpu_tables.py --out recipes/results/cpu_tables.csv --plot recipes/results/cpu_tables.png

timm's model, batch 16 at 224 pixels, float32 and bfloat16, called as it is and through ``torch.compile`` (which needs a C++ compiler),
beside dense and beside dense with int8 weights and activations (dynamic quantization, float32 only). Let nothing else run
meanwhile: a row whose two dense runs differ says noisy.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import recipe

from flysurgery.bench import LayerRow, LayerSettings, Record, bench_layers, draw_ratios
from flysurgery.cli.bench_show import TIMES
from flysurgery.cli.options import model_arguments, names

CANDIDATES = ("dense", "layer", "bmm", "einsum", "int8 dynamic")
COLUMNS = ("protocol", "unit", "mode", "compiled", "candidate", "backend", *TIMES)


def main() -> None:
    """Measure, print, draw."""
    parser = recipe.arguments(__doc__, modes="fp32,bf16", seconds=3.0)
    recipe.add_model(parser)
    parser.add_argument("--archs", default="gonon,monarch", help="families of architectures")
    parser.add_argument("--batch", type=recipe.count, help="images a forward; 16 by default")
    parser.add_argument("--launches", default="eager,compile")
    parser.set_defaults(device="cpu", threads=2)
    options = parser.parse_args()
    device, modes = recipe.device_and_modes(options)
    protocol = recipe.protocol(options, 15)
    archs, protocols = names(options.archs, "--archs"), names(options.protocols, "--protocols")
    if options.quick:
        archs, modes, protocols = archs[:1], modes[:1], protocols[-1:]
    with recipe.start(options, device, LayerRow) as run:
        for arch in archs:
            settings = LayerSettings(
                model=options.model,
                model_args=model_arguments(options.model_args),
                arch=arch,
                protocols=protocols,
                modes=modes,
                launches=("eager",) if options.quick else names(options.launches, "--launches"),
                candidates=CANDIDATES,
                batch=options.batch or recipe.images(options, device, 16),
                rounds=protocol.rounds,
                seconds=protocol.seconds,
                seed=options.seed,
                quick=options.quick,
            )
            for group in bench_layers(settings, device, done=run.has):
                run.add(group, f"{arch} {group[0].unit} {group[0].mode}")
    recipe.show(run, ("arch", *COLUMNS))
    if options.plot is not None:
        draw(run.records, options.plot)


def draw(records: Sequence[Record], plot: Path) -> None:
    """Bars of the two ways to call each part, a picture for each protocol and mode."""
    for protocol, mode in dict.fromkeys((record["protocol"], record["mode"]) for record in records):
        own = [record for record in records if (record["protocol"], record["mode"]) == (protocol, mode)]
        title = f"{own[0]['device']}, {own[0]['threads']} threads, protocol {protocol}, {mode}"
        draw_ratios(own, recipe.of_mode(plot, f"{protocol}.{mode}"), group=("arch", "unit", "compiled"), title=title)


if __name__ == "__main__":
    recipe.main(main)
