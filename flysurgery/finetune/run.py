"""A training run from its first update, or the one it was taken up at, to its last."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flysurgery.errors import DataError, OptionError, TrainingError
from flysurgery.evaluation import Accuracy, Fractals, ImageData
from flysurgery.finetune.batches import Batches, Place
from flysurgery.finetune.data import TrainingData
from flysurgery.finetune.devices import accelerator_for
from flysurgery.finetune.log import Log, LogRow
from flysurgery.finetune.measure import measure, sharded
from flysurgery.finetune.outcome import Outcome
from flysurgery.finetune.settings import Settings
from flysurgery.finetune.state import Identity, States
from flysurgery.finetune.step import Stepper
from flysurgery.finetune.teacher import Teacher
from flysurgery.surgery import densify, plan_of

if TYPE_CHECKING:
    from accelerate import Accelerator

Progress = Callable[[int, int, str], None]
"""Called with the updates done, the number of all, and a few words on the loss and the accuracy."""


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

    Works on converted and dense models alike. With ``folder`` the run keeps a log there and its state after each epoch, or every
    ``save_every`` updates, and with ``resume`` it goes on from the last state: each random number follows from the seed, the update
    and the process, so the losses are those of a run that was never stopped. ``force`` throws away the state of another run.
    The accuracy on ``held_out`` is measured before the first update and after each epoch.

    Raises:
        TrainingError: accelerate is missing, the teacher does not match, the folder holds another run's state or none, or the loss
            or the gradient is no finite number any more; then the last state, from before that, is kept.
        DataError, OptionError: data that cannot be read or are too few, options that this machine cannot have.
    """
    accelerator = accelerator_for(settings, folder)
    place = Place(accelerator.device, accelerator.process_index, accelerator.num_processes)
    if settings.densify_after is not None and (plan_of(model) is None or sharded(accelerator)):
        why = "with weights shared out among processes" if sharded(accelerator) else "a dense model"
        raise OptionError(f"there is nothing to densify in {why}" if plan_of(model) is None else f"densify_after cannot be used {why}")
    states = None if folder is None else States(folder, Identity.of(model, data.name, settings, place.processes))
    begun, notes = (0, {}) if states is None or not resume else states.check_same()
    if states is not None and not resume:
        if force and accelerator.is_main_process:
            states.clear()
        accelerator.wait_for_everyone()
        states.check_new()
    judge = None if teacher is None else Teacher(teacher.to(accelerator.device), model, settings)
    batches = data.open(place)
    if folder is not None and accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    log = Log(folder, accelerator, begun, asdict(settings))
    run = _Run(accelerator, settings, data, batches, judge, _moved(held_out, accelerator.device), states, log, progress)
    try:
        return run.go(model, begun, notes)
    finally:
        if judge is not None:
            judge.close()
        log.close()


class _Run:
    def __init__(
        self,
        accelerator: Accelerator,
        settings: Settings,
        data: TrainingData,
        batches: Batches,
        teacher: Teacher | None,
        held_out: ImageData | None,
        states: States | None,
        log: Log,
        progress: Progress | None,
    ) -> None:
        self._accelerator, self._settings, self._data, self._batches = accelerator, settings, data, batches
        self._teacher, self._held_out, self._states, self._log = teacher, held_out, states, log
        self._progress = progress if accelerator.is_main_process else None
        self._per_epoch = len(batches) // settings.accumulation
        if not self._per_epoch:
            raise DataError(
                f"{data.name} has {len(batches)} batches an epoch, fewer than the {settings.accumulation} of one update; "
                "lower the accumulation or the batch size"
            )
        self._updates = settings.epochs * self._per_epoch
        self._densify_at = None if settings.densify_after is None else settings.densify_after * self._per_epoch
        self._images = settings.batch_size * settings.accumulation * accelerator.num_processes  # of one update
        self._saved: int | None = None
        self._speeds: list[float] = []
        self._loss = float("nan")

    def go(self, model: nn.Module, begun: int, notes: dict[str, Any]) -> Outcome:
        spare = copy.deepcopy(model).cpu() if sharded(self._accelerator) else None
        if self._densify_at is not None and begun > self._densify_at:
            densify(model)
        stepper = self._stepper(model)
        if begun and self._states is not None:
            self._states.load(self._accelerator, begun)
            self._saved = begun
        before = Accuracy(**notes["before"]) if notes.get("before") else None
        if not begun:
            before = self._measure(stepper)
            self._log.add(LogRow(0, 0.0, top1=None if before is None else before.top1, top5=None if before is None else before.top5))
        self._loss = notes.get("loss", self._loss)
        notes = {"before": None if before is None else asdict(before), "seconds": notes.get("seconds", 0.0)}
        after, started = before, perf_counter()
        total = torch.zeros(5, device=self._accelerator.device)
        since, clock, batch = begun, perf_counter(), iter(())
        for update in range(begun, self._updates):
            epoch, step = divmod(update, self._per_epoch)
            if step == 0 or update == begun:
                batch = self._batches.epoch(epoch, step * self._settings.accumulation)
            if update == self._densify_at:
                bare = stepper.close()
                densify(bare)
                stepper = self._stepper(bare)
            total += stepper.update(batch, update)
            done = update + 1
            ends_epoch = done % self._per_epoch == 0
            saves = self._saves(done, ends_epoch)
            if not (done % self._settings.log_every == 0 or ends_epoch or saves):
                continue
            losses = self._reduced(total, done - since, since, done)
            self._speeds.append(self._images * (done - since) / (perf_counter() - clock))
            if ends_epoch:
                after = self._measure(stepper)
            self._note(done, losses, stepper.learning_rate, after if ends_epoch else None)
            if saves and self._states is not None:
                seconds = notes["seconds"] + perf_counter() - started
                self._states.save(self._accelerator, done, notes | {"seconds": seconds, "loss": self._loss})
                self._saved = done
            total.zero_()
            since, clock = done, perf_counter()
        if begun == self._updates:
            after = self._measure(stepper)
        seconds = notes["seconds"] + perf_counter() - started
        return self._outcome(self._finished(stepper, spare), seconds, before, after)

    def _stepper(self, model: nn.Module) -> Stepper:
        updates, classes = self._updates, self._data.num_classes
        return Stepper(model, self._settings, self._accelerator, updates=updates, num_classes=classes, teacher=self._teacher)

    def _saves(self, done: int, ends_epoch: bool) -> bool:
        every = self._settings.save_every
        return self._states is not None and (done == self._updates or (ends_epoch if every is None else done % every == 0))

    def _reduced(self, total: torch.Tensor, count: int, since: int, done: int) -> list[float]:
        """Mean losses of all processes over ``count`` updates; the same in each, so that all stop together."""
        summed: Any = self._accelerator.reduce(total, "sum")
        *sums, bad = summed.tolist()
        if bad:
            kept = "no state was kept" if self._saved is None else f"the last good state, of update {self._saved}, is kept"
            raise TrainingError(
                f"the loss or its gradient was no finite number in updates {since + 1} to {done}, so training stopped; {kept}; "
                "try a lower learning rate"
            )
        return [each / count / self._accelerator.num_processes for each in sums]

    def _measure(self, stepper: Stepper) -> Accuracy | None:
        if self._held_out is None:
            return None
        return measure(stepper.model, self._held_out, self._accelerator, self._settings.batch_size)

    def _note(self, done: int, losses: list[float], rate: float, accuracy: Accuracy | None) -> None:
        top1, top5 = (None, None) if accuracy is None else (accuracy.top1, accuracy.top5)
        self._loss = losses[0]
        epoch = round(done / self._per_epoch, 4)
        distilled = self._teacher is not None
        of_logits, of_blocks = (losses[2], losses[3]) if distilled else (None, None)
        self._log.add(LogRow(done, epoch, losses[0], losses[1], of_logits, of_blocks, rate, round(self._speeds[-1], 1), top1, top5))
        if self._progress is not None:
            seen = "" if top1 is None else f", top-1 {top1:.2%}"
            self._progress(done, self._updates, f"loss {losses[0]:.3f}{seen}")

    def _finished(self, stepper: Stepper, spare: nn.Module | None) -> nn.Module:
        """The whole model, bare and in eval mode."""
        if spare is None:
            return stepper.close().eval()
        state = self._accelerator.get_state_dict(stepper.model)
        stepper.close()
        if self._accelerator.is_main_process:
            spare.load_state_dict(state)
        return spare.eval()

    def _outcome(self, model: nn.Module, seconds: float, before: Accuracy | None, after: Accuracy | None) -> Outcome:
        # The first stretch has the start of everything in it.
        speed = statistics.median(self._speeds[1:] or self._speeds or [0.0])
        images = self._images * self._updates
        main, processes = self._accelerator.is_main_process, self._accelerator.num_processes
        return Outcome(model, self._updates, images, seconds, speed, processes, self._loss, before, after, main)


def _moved(held_out: ImageData | None, device: torch.device) -> ImageData | None:
    """Pictures that are computed are computed where they are needed."""
    if held_out is not None and isinstance(held_out.dataset, Fractals):
        held_out.dataset.to(device)
    return held_out
