"""What is said of images that cannot be read."""

from __future__ import annotations

import typer

from flysurgery.calibration import Samples
from flysurgery.cli.processes import is_first


def tell_skipped(found: Samples) -> Samples:
    """Say on stderr which images were left out, where there are any."""
    if found.skipped and is_first():
        named = ", ".join(found.skipped[:5]) + (", ..." if len(found.skipped) > 5 else "")
        typer.echo(f"flysurgery: {len(found.skipped)} images in {found.name} cannot be read and are left out: {named}", err=True)
    return found
