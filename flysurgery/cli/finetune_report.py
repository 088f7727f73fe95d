"""The models that ``flysurgery finetune`` trains, where they go, and what it prints of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from flysurgery import checkpoint as storage
from flysurgery import surgery
from flysurgery.cli.source import ConvertedFolder, Source
from flysurgery.cli.tables import accuracy_rows, print_json
from flysurgery.errors import CheckpointError
from flysurgery.finetune import Outcome


def check_out(source: Source, out: Path, *, dense: bool, force: bool) -> None:
    """See that the trained model may be written to ``out``, which ``source`` is not."""
    check = storage.check_dense_folder if dense else storage.check_folder
    target = check(out, force=force)
    if isinstance(source, ConvertedFolder) and source.folder.resolve() == target:
        raise CheckpointError(f"{out} is the model that is trained; choose another folder with --out")


def network_of(source: Source, *, scratch: bool, pretrained: bool, seed: int) -> tuple[nn.Module, tuple[str, dict[str, Any]]]:
    """The model in float32 with its start, and the base that it was made from."""
    torch.manual_seed(seed)
    if isinstance(source, ConvertedFolder):
        network = storage.load(source.folder, dtype=torch.float32)
        plan = surgery.plan_of(network)
        if plan is None or plan.base is None:
            raise CheckpointError(f"{source.folder} does not say which dense model it was made from")
        described = plan.base, dict(plan.base_args)
        return (storage.build_random(plan, {}) if scratch else network), described
    skeleton = source.skeleton()
    described = skeleton.base, dict(skeleton.base_args)
    if scratch:
        return storage.build_base(*described), described
    return build(source, pretrained=pretrained, seed=seed), described


def build(source: Source, *, pretrained: bool, seed: int) -> nn.Module:
    """The model in float32, on the CPU."""
    source.check_weights(pretrained=pretrained)
    return source.build(pretrained=pretrained, seed=seed, device=torch.device("cpu")).float()


def print_outcome(outcome: Outcome, out: Path, folder: Path, *, as_json: bool, facts: dict[str, Any]) -> None:
    """Print what training gained, and where the results are."""
    if as_json:
        print_json({"folder": str(out), "log": str(folder / "log.csv")} | facts)
        return
    rows = []
    if outcome.before is not None and outcome.after is not None:
        rows += accuracy_rows(outcome.before, outcome.after)
    if outcome.fidelity_before is not None and outcome.fidelity_after is not None:
        rows += surgery.fidelity_rows(outcome.fidelity_after, outcome.fidelity_before)
    if rows:
        typer.echo(surgery.changes_table("fine-tuning", rows) + "\n")
    if not outcome.labelled:
        typer.echo(f"{facts['data']} is used without labels; the state of update {outcome.kept} is the closest to the teacher")
    typer.echo(f"{outcome.updates} updates, {outcome.images} images in {outcome.seconds:.0f} s ({outcome.images_per_second:.0f} a second)")
    typer.echo(f"saved in {out}, log in {folder / 'log.csv'}")
