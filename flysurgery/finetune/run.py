"""A training run, from its first update or from the update at which it is resumed."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import nn

from flysurgery.errors import OptionError, TrainingError
from flysurgery.evaluation import Accuracy, Fractals, ImageData
from flysurgery.fidelity import Fidelity
from flysurgery.finetune.data import Process, TrainingData, check_augmentation
from flysurgery.finetune.devices import accelerator_for, sharded
from flysurgery.finetune.loop import Loop, Progress
from flysurgery.finetune.measure import Judge
from flysurgery.finetune.settings import Settings
from flysurgery.finetune.state import Log, States
from flysurgery.finetune.step import optimizer_of
from flysurgery.finetune.teacher import Teacher, fused_dtype
from flysurgery.surgery import plan_of


@dataclass(frozen=True)
class Outcome:
    """The trained model, with numbers of the whole run, pauses between its parts left out.

    ``before`` and ``after`` are None without held-out data, or without classes; ``fidelity_before`` and ``fidelity_after`` without a
    teacher. ``kept`` is the update whose state the model has: the last, or without labels the one that was closest to the teacher on
    held-out images, 0 for the start. ``settings`` are complete, with the rate that was found. ``loss`` is the last one logged;
    ``images_per_second`` counts the training alone. On all processes but the main one ``is_main`` is false and the model must not be saved.
    """

    model: nn.Module
    updates: int
    images: int
    seconds: float
    images_per_second: float
    processes: int
    loss: float
    before: Accuracy | None
    after: Accuracy | None
    fidelity_before: Fidelity | None
    fidelity_after: Fidelity | None
    kept: int
    labelled: bool
    settings: Settings
    is_main: bool

    def to_json(self) -> dict[str, Any]:
        """Give the numbers as JSON values."""
        found = asdict(replace(self, model=nn.Module()))
        return {name: value for name, value in found.items() if name not in ("model", "settings", "is_main")}


def train(
    model: nn.Module,
    data: TrainingData,
    settings: Settings,
    *,
    teacher: nn.Module | None = None,
    held_out: ImageData | None = None,
    folder: Path | None = None,
    resume: bool = False,
    force: bool = False,
    progress: Progress | None = None,
) -> Outcome:
    """Train ``model`` in place, on the devices and processes that accelerate was set up with.

    Works for converted and dense models. With ``folder`` the run keeps a log there, and its state after each epoch or every
    ``save_every`` updates. With ``resume`` it continues from the last state. Each random number follows from the seed, the update
    and the process, so the losses are those of a run that was never stopped. ``force`` deletes the state of another run.

    If ``held_out`` has classes, the accuracy on it is measured before the first update and after each epoch. With a teacher, the
    closeness to its outputs is measured too. Without labels, or with a budget of minutes, this happens ten times, or less often if it
    would take more than a fifth of the budget. Without labels the model ends in the state that was closest to the teacher, which may be
    the start.

    Raises:
        TrainingError: accelerate is missing, the teacher does not match, the folder holds another run's state or none, or the loss
            or the gradient is no finite number any more; then the last state, from before that, is kept.
        DataError, OptionError: data that cannot be read or are too few, options that this machine cannot have.
    """
    started = perf_counter()
    if not data.labelled and teacher is None:
        raise TrainingError(
            f"{data.name} is used without labels, so there is nothing to learn from it but a teacher's outputs; give a teacher"
        )
    accelerator = accelerator_for(settings, folder, quick=not data.labelled)
    settings = settings.completed(teacher=teacher is not None, labelled=data.labelled, sharded=sharded(accelerator))
    optimizer_of(nn.Linear(2, 2), settings)  # an unknown one ends the run before anything is written
    check_augmentation(settings)
    here = Process(accelerator.device, accelerator.process_index, accelerator.num_processes)
    if settings.densify_after is not None and (plan_of(model) is None or sharded(accelerator)):
        why = "with weights shared out among processes" if sharded(accelerator) else "a dense model"
        raise OptionError(f"there is nothing to densify in {why}" if plan_of(model) is None else f"densify_after cannot be used {why}")
    states = None if folder is None else States(folder, model, data.name, settings, here.processes)
    begun, noted = (0, {}) if states is None or not resume else states.check_same()
    if states is not None and not resume:
        if force and accelerator.is_main_process:
            states.clear()
        accelerator.wait_for_everyone()
        states.check_new()
    fuses = accelerator.device.type == "cuda" and settings.pays_fusing(data.samples)
    dtype = fused_dtype(accelerator) if fuses else None
    judge = None if teacher is None else Teacher(teacher.to(accelerator.device), model, settings, dtype)
    log: Log | None = None
    try:
        batches = data.open(here)
        if held_out is not None and isinstance(held_out.dataset, Fractals):
            held_out.dataset.to(accelerator.device)  # pictures that are computed are computed where they are needed
        looks = Judge(held_out, judge, accelerator, batches.size)
        if folder is not None and accelerator.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
        accelerator.wait_for_everyone()
        log = Log(folder, accelerator, begun, asdict(settings))
        loop = Loop(accelerator, settings, data, batches, judge, looks, states, log, progress, started, fuses)
        whole = loop.go(model, begun, noted)
    finally:
        if judge is not None:
            judge.close()
        if log is not None:
            log.close()
    notes = loop.notes
    return Outcome(
        model=whole,
        updates=notes.updates,
        images=loop.images * notes.updates,
        seconds=notes.seconds,
        images_per_second=loop.speed,
        processes=accelerator.num_processes,
        loss=notes.loss,
        before=notes.before.accuracy,
        after=notes.last.accuracy,
        fidelity_before=notes.before.fidelity,
        fidelity_after=notes.last.fidelity,
        kept=notes.kept,
        labelled=data.labelled,
        settings=replace(settings, learning_rate=notes.learning_rate),
        is_main=accelerator.is_main_process,
    )
