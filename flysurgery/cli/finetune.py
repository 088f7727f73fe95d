"""``flysurgery finetune``: train a converted model, or a dense one, and save it."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flysurgery.cli import options
from flysurgery.cli.options import option
from flysurgery.errors import CheckpointError, OptionError
from flysurgery.tables import blocks_of_text, changes_table

if TYPE_CHECKING:
    from torch import nn

    from flysurgery.cli.source import Source

IMAGES, TEACHER, TRAINING, PROGRESS = "Images", "The dense model as a teacher", "Training", "Progress"
"""The groups of options in the help, beside those of all verbs."""

DATA_HELP = (
    "The digits, the generated fractals, a folder of images a class (or its train), a timm data set such as torch/cifar10, or with "
    "--teacher any folder of images."
)
TEACHER_HELP = (
    "Imitate this dense model's outputs and blocks: a folder or a timm name. "
    "Where MODEL is a folder, --model-args, --base and --checkpoint are this one's."
)
RATE_HELP = "Learning rate at its highest, then a cosine down to zero; muon's follows from the start, others' is 3e-4."
FACTOR_RATE_HELP = "Scale factors' rates by their fan-in, the default, or not; not with muon."
OPTIMIZER_HELP = "muon, the default with a teacher, or one of timm's, such as adamw."
OUTPUT_WEIGHT_HELP = "The teacher's share in the loss of the scores, by default 0.5; of a model without a head, the features' weight, 0.2."
BLOCKS_WEIGHT_HELP = "Weight of the blocks' errors; by default 1 if the teacher has the same."
PRECISION_HELP = "Mixed precision, no, fp16 or bf16; by default accelerate's, else bf16 without labels on CUDA."
SAVE_EVERY_HELP = "Updates between two states; by default as many as between two looks."
BATCH_HELP = "Images of one forward of one process; by default 64, of unlabelled ones on a CPU 8."
DECAY_HELP = "Of matrices and factors, by default 0.05; not with muon."
WARM_UP_HELP = "Share of updates in which the rate grows: 0.05 with muon, else 0.1."
CLIP_HELP = "Largest norm of the gradient: none with muon, else 1; 0 does not clip."
DENSIFY_HELP = "Multiply the factors out after this epoch, then train dense."
MINUTES_HELP = "A budget in place of --epochs; without labels 10 is the default."


def finetune(
    context: typer.Context,
    model: options.Model,
    data: Annotated[str, option(IMAGES, "--data", DATA_HELP, "DATA")],
    out: Annotated[Path, option(options.OUTPUT, "--out", "Output folder; the run's log and state go to OUT.training.", "DIR")],
    teacher: Annotated[str | None, option(TEACHER, "--teacher", TEACHER_HELP, "MODEL")] = None,
    evaluate: Annotated[str | None, option(IMAGES, "--evaluate", "Held-out data, in place of --data's own.", "DATA")] = None,
    data_root: Annotated[Path | None, option(IMAGES, "--data-root", "Where timm's data sets lie.", "DIR")] = None,
    scratch: Annotated[bool, option(TRAINING, "--scratch", "Begin with random weights; of DIR only the plan is used.")] = False,
    resume: Annotated[bool, option(PROGRESS, "--resume", "Go on from the last state in OUT.training.")] = False,
    epochs: Annotated[int | None, option(TRAINING, "--epochs", "Times that the data are gone through; by default 10.", "N", 1)] = None,
    minutes: Annotated[float | None, option(TRAINING, "--minutes", MINUTES_HELP, "N")] = None,
    batch_size: Annotated[int | None, option(TRAINING, "--batch-size", BATCH_HELP, "N", 1)] = None,
    accumulation: Annotated[int, option(TRAINING, "--accumulation", "Forwards of one update.", "N", 1)] = 1,
    learning_rate: Annotated[float | None, option(TRAINING, "--lr", RATE_HELP, "N")] = None,
    factor_rate: Annotated[Literal["fan-in", "same"] | None, option(TRAINING, "--factor-rate", FACTOR_RATE_HELP, "fan-in|same")] = None,
    optimizer: Annotated[str | None, option(TRAINING, "--optimizer", OPTIMIZER_HELP, "NAME")] = None,
    weight_decay: Annotated[float | None, option(TRAINING, "--weight-decay", DECAY_HELP, "N")] = None,
    warm_up: Annotated[float | None, option(TRAINING, "--warm-up", WARM_UP_HELP, "N")] = None,
    clip: Annotated[float | None, option(TRAINING, "--clip", CLIP_HELP, "N")] = None,
    smoothing: Annotated[float, option(TRAINING, "--smoothing", "Label smoothing.", "N")] = 0.1,
    mixup: Annotated[float, option(IMAGES, "--mixup", "timm's mixup alpha.", "N")] = 0.0,
    cutmix: Annotated[float, option(IMAGES, "--cutmix", "timm's cutmix alpha.", "N")] = 0.0,
    crop: Annotated[float | None, option(IMAGES, "--crop", "Least share of an image that a random crop keeps.", "N")] = None,
    flip: Annotated[float | None, option(IMAGES, "--flip", "Probability of a mirrored image.", "N")] = None,
    augment: Annotated[str | None, option(IMAGES, "--augment", "timm's policy, as rand-m9-mstd0.5-inc1.", "NAME")] = None,
    erase: Annotated[float, option(IMAGES, "--erase", "Probability of random erasing.", "N")] = 0.0,
    output_weight: Annotated[float | None, option(TEACHER, "--output-weight", OUTPUT_WEIGHT_HELP, "N")] = None,
    blocks_weight: Annotated[float | None, option(TEACHER, "--blocks-weight", BLOCKS_WEIGHT_HELP, "N")] = None,
    temperature: Annotated[float, option(TEACHER, "--temperature", "By which scores are divided before they are compared.", "N")] = 2.0,
    densify_after: Annotated[int | None, option(TRAINING, "--densify-after", DENSIFY_HELP, "N")] = None,
    images_per_epoch: Annotated[int | None, option(IMAGES, "--images-per-epoch", "Generated images of an epoch.", "N")] = None,
    precision: Annotated[Literal["no", "fp16", "bf16"] | None, option(options.MACHINE, "--precision", PRECISION_HELP, "DTYPE")] = None,
    workers: Annotated[int | None, option(IMAGES, "--workers", "Processes that read images, for each that trains.", "N", 0)] = None,
    save_every: Annotated[int | None, option(PROGRESS, "--save-every", SAVE_EVERY_HELP, "N")] = None,
    log_every: Annotated[int, option(PROGRESS, "--log-every", "Updates between two rows of the log.", "N", 1)] = 10,
    tensorboard: Annotated[bool, option(PROGRESS, "--tensorboard", "Log to TensorBoard as well.")] = False,
    cpu: Annotated[bool, option(options.MACHINE, "--cpu", "Train on the CPU even where there is a GPU.")] = False,
    model_args: options.ModelArgs = None,
    base: options.Base = None,
    checkpoint: options.Checkpoint = None,
    pretrained: options.Pretrained = True,
    force: options.Force = False,
    dtype: options.StorageDtype = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Train a converted model, with or without a teacher; one command for a CPU, a GPU, and accelerate launch -m flysurgery."""
    from flysurgery import checkpoint as storage
    from flysurgery import surgery
    from flysurgery.cli.source import ConvertedFolder, find_pair
    from flysurgery.cli.tables import accuracy_rows, progress, show
    from flysurgery.finetune import Settings, check_installed, held_out_data, judging_data, leave_processes, train, training_data

    settings = Settings(**{field.name: context.params[field.name] for field in fields(Settings)})  # each is an option of that name
    check_installed(settings)
    if teacher is None and (blocks_weight is not None or output_weight is not None):
        raise OptionError("--output-weight and --blocks-weight go with --teacher MODEL, and none was given")
    source, other = find_pair(model, teacher, base=base, model_args=model_args, checkpoint=checkpoint)
    ends_dense = not isinstance(source, ConvertedFolder) or densify_after is not None
    target = (storage.check_dense_folder if ends_dense else storage.check_folder)(out, force=force)
    if isinstance(source, ConvertedFolder) and source.folder.resolve() == target:
        raise CheckpointError(f"{out} is the model that is trained; choose another folder with --out")
    network, described = _start(source, scratch=scratch, pretrained=pretrained, seed=seed)
    plan, earlier = surgery.plan_of(network), {}
    if isinstance(source, ConvertedFolder) and plan is not None and not scratch:  # nothing is known of a model that begins anew
        earlier = storage.read_report(source.folder, plan)
    taught = teacher is not None
    images = training_data(data, network, settings, root=data_root, teacher=taught, aside=evaluate is None)
    find_held_out = held_out_data if evaluate is None else judging_data
    held_out = find_held_out(data if evaluate is None else evaluate, network, root=data_root, teacher=taught)
    judge = None if other is None else _built(other, pretrained=True, seed=0)
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
    rows = []
    if outcome.before is not None and outcome.after is not None:
        rows += accuracy_rows(outcome.before, outcome.after)
    if outcome.fidelity_before is not None and outcome.fidelity_after is not None:
        rows += surgery.fidelity_rows(outcome.fidelity_after, outcome.fidelity_before)
    speed = f"{outcome.images} images in {outcome.seconds:.0f} s ({outcome.images_per_second:.0f} a second)"
    lines = [f"{outcome.updates} updates, {speed}", f"saved in {out}, log in {folder / 'log.csv'}"]
    if not outcome.labelled:
        lines.insert(0, f"{data} is used without labels; the state of update {outcome.kept} is the closest to the teacher")
    text = blocks_of_text(changes_table("fine-tuning", rows), "\n".join(lines))
    show({"folder": str(out), "log": str(folder / "log.csv")} | facts, text, as_json=as_json)


def _start(source: Source, *, scratch: bool, pretrained: bool, seed: int) -> tuple[nn.Module, tuple[str, dict[str, Any]]]:
    """The model in float32 as its training begins, and the base that it was made from."""
    import torch

    from flysurgery import checkpoint, surgery
    from flysurgery.cli.source import ConvertedFolder, base_of

    torch.manual_seed(seed)
    if isinstance(source, ConvertedFolder):
        network = checkpoint.load(source.folder, dtype=torch.float32)
        described, plan = base_of(network, source.folder), surgery.plan_of(network)
        return (checkpoint.build_random(plan, {}) if scratch and plan is not None else network), described
    described = source.described()
    return checkpoint.build_base(*described) if scratch else _built(source, pretrained=pretrained, seed=seed), described


def _built(source: Source, *, pretrained: bool, seed: int) -> nn.Module:
    """The model in float32, on the CPU."""
    import torch

    source.check_weights(pretrained=pretrained)
    return source.build(pretrained=pretrained, seed=seed, device=torch.device("cpu")).float()
