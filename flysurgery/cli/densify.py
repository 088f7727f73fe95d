"""``flysurgery densify``: a converted folder back to a dense one that timm loads by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flysurgery.cli import options


def densify(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A converted folder.")],
    out: Annotated[Path, options.option(options.OUTPUT, "--out", "Output folder.", "DIR")],
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Multiply the factors out: a converted folder becomes a dense model folder."""
    from flysurgery import checkpoint, surgery
    from flysurgery.cli.source import base_of
    from flysurgery.cli.tables import print_json

    checkpoint.check_dense_folder(out, force=force)
    model = checkpoint.load(folder)
    described = base_of(model, folder)
    layers = surgery.densify(model)
    checkpoint.save_dense(model, out, *described, force=force)
    if as_json:
        print_json({"folder": str(out), "layers": layers})
        return
    typer.echo(f"{layers} layers made dense, saved in {out}")
