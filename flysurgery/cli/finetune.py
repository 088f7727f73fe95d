"""``flysurgery finetune``: train a converted model, or a dense one, and save it."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
import typer
from torch import nn

from flysurgery import checkpoint as storage
from flysurgery import surgery
from flysurgery.cli import options
from flysurgery.cli.source import ConvertedFolder, Source, find
from flysurgery.cli.tables import accuracy_rows, print_changes, print_json, progress
from flysurgery.errors import CheckpointError, OptionError

if TYPE_CHECKING:
    from flysurgery.finetune import Outcome


def _number(name: str, text: str, minimum: float | None = None) -> Any:
    return typer.Option(name, help=text, min=minimum)


DATA_HELP = (
    "The digits, the generated fractals, a folder of images a class (or its train), a timm data set such as torch/cifar10, or with "
    "--teacher any folder of images."
)
TEACHER_HELP = "Imitate this dense model's outputs and blocks: a folder or a timm name."
RATE_HELP = "Learning rate at its highest, then a cosine down to zero; muon's follows from the start, others' is 3e-4."
FACTOR_RATE_HELP = "Scale factors' rates by their fan-in, the default, or not; not with muon."
OPTIMIZER_HELP = "muon, the default with a teacher, or one of timm's, such as adamw."
OUTPUT_WEIGHT_HELP = "The teacher's share in the loss of the scores, by default 0.5; of a model without a head, the features' weight, 0.2."
BLOCKS_WEIGHT_HELP = "Weight of the blocks' errors; by default 1 if the teacher has the same."
PRECISION_HELP = "Mixed precision; by default accelerate's, else bf16 without labels on CUDA."
SAVE_EVERY_HELP = "Updates between two states; by default as many as between two looks."
MINUTES_HELP = "A budget in place of --epochs; without labels 10 is the default."

FIDELITY = {
    "output_cosine": "cosine of the output with the teacher's",
    "token_cosine": "cosine of the tokens with the teacher's",
    "relative_error": "relative error of the tokens",
    "agreement": "share with the teacher's top class",
}


def finetune(
    context: typer.Context,
    model: options.Model,
    data: Annotated[str, typer.Option("--data", help=DATA_HELP, metavar="digits|fractals|FOLDER|NAME")],
    out: Annotated[Path, typer.Option("--out", help="Output folder; the run's log and state go to OUT.training.", metavar="DIR")],
    teacher: Annotated[str | None, typer.Option("--teacher", help=TEACHER_HELP, metavar="MODEL")] = None,
    evaluate: Annotated[str | None, typer.Option("--evaluate", help="Held-out data, in place of --data's own.", metavar="DATA")] = None,
    data_root: Annotated[Path | None, typer.Option("--data-root", help="Where timm's data sets lie.", metavar="DIR")] = None,
    scratch: Annotated[bool, typer.Option("--scratch", help="Begin with random weights; of DIR only the plan is used.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last state in OUT.training.")] = False,
    epochs: Annotated[int | None, _number("--epochs", "Times that the data are gone through; by default 10.", 1)] = None,
    minutes: Annotated[float | None, _number("--minutes", MINUTES_HELP)] = None,
    batch_size: Annotated[int | None, _number("--batch-size", "Images of one forward of one process; by default 64.", 1)] = None,
    accumulation: Annotated[int, _number("--accumulation", "Forwards of one update.", 1)] = 1,
    learning_rate: Annotated[float | None, _number("--lr", RATE_HELP)] = None,
    factor_rate: Annotated[Literal["fan-in", "same"] | None, typer.Option("--factor-rate", help=FACTOR_RATE_HELP)] = None,
    optimizer: Annotated[str | None, typer.Option("--optimizer", help=OPTIMIZER_HELP, metavar="NAME")] = None,
    weight_decay: Annotated[float | None, _number("--weight-decay", "Of matrices and factors, by default 0.05; not with muon.")] = None,
    warm_up: Annotated[float | None, _number("--warm-up", "Share of updates in which the rate grows: 0.05 with muon, else 0.1.")] = None,
    clip: Annotated[float | None, _number("--clip", "Largest norm of the gradient: none with muon, else 1; 0 does not clip.")] = None,
    smoothing: Annotated[float, _number("--smoothing", "Label smoothing.")] = 0.1,
    mixup: Annotated[float, _number("--mixup", "timm's mixup alpha.")] = 0.0,
    cutmix: Annotated[float, _number("--cutmix", "timm's cutmix alpha.")] = 0.0,
    crop: Annotated[float | None, _number("--crop", "Least share of an image that a random crop keeps.")] = None,
    flip: Annotated[float | None, _number("--flip", "Probability of a mirrored image.")] = None,
    augment: Annotated[str | None, typer.Option("--augment", help="timm's policy, as rand-m9-mstd0.5-inc1.", metavar="NAME")] = None,
    erase: Annotated[float, _number("--erase", "Probability of random erasing.")] = 0.0,
    output_weight: Annotated[float | None, _number("--output-weight", OUTPUT_WEIGHT_HELP)] = None,
    blocks_weight: Annotated[float | None, _number("--blocks-weight", BLOCKS_WEIGHT_HELP)] = None,
    temperature: Annotated[float, _number("--temperature", "By which scores are divided before they are compared.")] = 2.0,
    densify_after: Annotated[int | None, _number("--densify-after", "Multiply the factors out after this epoch, then train dense.")] = None,
    images_per_epoch: Annotated[int | None, _number("--images-per-epoch", "Generated images of an epoch.")] = None,
    precision: Annotated[Literal["no", "fp16", "bf16"] | None, typer.Option("--precision", help=PRECISION_HELP)] = None,
    workers: Annotated[int | None, _number("--workers", "Processes that read images, for each that trains.", 0)] = None,
    save_every: Annotated[int | None, _number("--save-every", SAVE_EVERY_HELP)] = None,
    log_every: Annotated[int, _number("--log-every", "Updates between two rows of the log.", 1)] = 10,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Log to TensorBoard as well.")] = False,
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on the CPU even where there is a GPU.")] = False,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    checkpoint: options.Checkpoint = None,
    pretrained: options.Pretrained = True,
    force: options.Force = False,
    dtype: options.StorageDtype = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Train a converted model, with or without a teacher; one command for a CPU, a GPU, and accelerate launch -m flysurgery.cli."""
    from flysurgery.finetune import Settings, check_installed, held_out_data, judging_data, leave_processes, train, training_data

    settings = Settings(**{field.name: context.params[field.name] for field in fields(Settings)})  # each is an option of that name
    check_installed(settings)
    if teacher is None and (blocks_weight is not None or output_weight is not None):
        raise OptionError("--output-weight and --blocks-weight go with --teacher MODEL, and none was given")
    source = find(model, base=base, model_args=model_args, checkpoint=checkpoint)
    _check_out(source, out, dense=not isinstance(source, ConvertedFolder) or densify_after is not None, force=force)
    network, described = _network(source, scratch=scratch, pretrained=pretrained, seed=seed)
    plan, earlier = surgery.plan_of(network), {}
    if isinstance(source, ConvertedFolder) and plan is not None and not scratch:  # nothing is known of a model that begins anew
        earlier = storage.read_report(source.folder, plan)
    taught = teacher is not None
    images = training_data(data, network, settings, root=data_root, teacher=taught, aside=evaluate is None)
    find_held_out = held_out_data if evaluate is None else judging_data
    held_out = find_held_out(data if evaluate is None else evaluate, network, root=data_root, teacher=taught)
    judge = None if teacher is None else _build(find(teacher), pretrained=True, seed=0)
    storage.check_space(out, 4 * sum(parameter.numel() for parameter in network.parameters()))
    folder = out.with_name(f"{out.name}.training")
    try:
        with progress("training") as step:
            outcome = train(
                network, images, settings, teacher=judge, held_out=held_out, folder=folder, resume=resume, force=force, progress=step
            )
    finally:
        leave_processes()
    if not outcome.is_main:
        return
    facts = {"data": data, "teacher": teacher, "scratch": scratch, "settings": asdict(outcome.settings)} | outcome.to_json()
    trained = outcome.model.cpu()
    if surgery.plan_of(trained) is None:
        storage.save_dense(trained, out, *described, force=force)
    else:
        storage.save(trained, out, dtype=dtype, force=force, report=earlier | {"finetune": facts})
    _print(outcome, out, folder, as_json=as_json, facts=facts)


def _check_out(source: Source, out: Path, *, dense: bool, force: bool) -> None:
    check = storage.check_dense_folder if dense else storage.check_folder
    target = check(out, force=force)
    if isinstance(source, ConvertedFolder) and source.folder.resolve() == target:
        raise CheckpointError(f"{out} is the model that is trained; choose another folder with --out")


def _network(source: Source, *, scratch: bool, pretrained: bool, seed: int) -> tuple[nn.Module, tuple[str, dict[str, Any]]]:
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
    return _build(source, pretrained=pretrained, seed=seed), described


def _build(source: Source, *, pretrained: bool, seed: int) -> nn.Module:
    source.check_weights(pretrained=pretrained)
    return source.build(pretrained=pretrained, seed=seed, device=torch.device("cpu")).float()


def _print(outcome: Outcome, out: Path, folder: Path, *, as_json: bool, facts: dict[str, Any]) -> None:
    if as_json:
        print_json({"folder": str(out), "log": str(folder / "log.csv")} | facts)
        return
    rows = _fidelity_rows(outcome)
    if outcome.before is not None and outcome.after is not None:
        rows = accuracy_rows(outcome.before, outcome.after) + rows
    if rows:
        print_changes("fine-tuning", rows)
        typer.echo("")
    if not outcome.labelled:
        typer.echo(f"{facts['data']} is used without labels; the state of update {outcome.kept} is the closest to the teacher")
    typer.echo(f"{outcome.updates} updates, {outcome.images} images in {outcome.seconds:.0f} s ({outcome.images_per_second:.0f} a second)")
    typer.echo(f"saved in {out}, log in {folder / 'log.csv'}")


def _fidelity_rows(outcome: Outcome) -> list[tuple[str, ...]]:
    """How close the outputs are to the teacher's."""
    rows = []
    if outcome.fidelity_before is not None and outcome.fidelity_after is not None:
        for name, what in FIDELITY.items():
            before, after = getattr(outcome.fidelity_before, name), getattr(outcome.fidelity_after, name)
            if before is not None and after is not None:
                text = f"{what}, {outcome.fidelity_after.samples} samples"
                rows.append((text, f"{before:.3f}", f"{after:.3f}", f"{after - before:+.3f}"))
    return rows
