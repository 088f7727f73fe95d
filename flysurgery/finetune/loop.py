"""The updates of a run, with what is seen, noted and kept between them."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from flysurgery.errors import DataError, TrainingError
from flysurgery.fidelity import Fidelity, moments, rate_for
from flysurgery.fidelity.copied import Copied
from flysurgery.finetune.batches import Batches
from flysurgery.finetune.budget import LOOKS, affordable, looks_for
from flysurgery.finetune.data import TrainingData
from flysurgery.finetune.log import Log, LogRow
from flysurgery.finetune.measure import Judge, Look, sharded
from flysurgery.finetune.outcome import Outcome
from flysurgery.finetune.settings import Settings
from flysurgery.finetune.state import States
from flysurgery.finetune.step import Stepper
from flysurgery.finetune.teacher import Teacher
from flysurgery.surgery import densify

if TYPE_CHECKING:
    from accelerate import Accelerator

Progress = Callable[[int, int, str], None]
"""Called with the updates done, the number of all, and a few words on the loss and on what was seen last."""


class Loop:
    """One run; ``started`` is when its budget began."""

    def __init__(
        self,
        accelerator: Accelerator,
        settings: Settings,
        data: TrainingData,
        batches: Batches,
        teacher: Teacher | None,
        judge: Judge,
        states: States | None,
        log: Log,
        progress: Progress | None,
        started: float,
    ) -> None:
        self._accelerator, self._settings, self._data, self._batches = accelerator, settings, data, batches
        self._teacher, self._judge, self._states, self._log = teacher, judge, states, log
        self._progress = progress if accelerator.is_main_process else None
        self._started = started
        self._per_epoch = len(batches) // settings.accumulation
        if not self._per_epoch:
            raise DataError(
                f"{data.name} has {len(batches)} batches an epoch, fewer than the {settings.accumulation} of one update; "
                "lower the accumulation or the batch size"
            )
        self._images = batches.size * settings.accumulation * accelerator.num_processes  # of one update
        self._densify_at = None if settings.densify_after is None else settings.densify_after * self._per_epoch
        self._look_count = LOOKS
        self._updates, self._rate = (settings.epochs or 0) * self._per_epoch, settings.learning_rate or 0.0
        self._before, self._last, self._kept, self._best = Look(), Look(), 0, None
        self._seconds, self._loss = 0.0, float("nan")
        self._saved: int | None = None
        self._speeds: list[float] = []

    def go(self, model: nn.Module, begun: int, notes: dict[str, Any]) -> Outcome:
        spare = copy.deepcopy(model).cpu() if sharded(self._accelerator) else None
        if self._densify_at is not None and begun > self._densify_at:
            densify(model)
        stepper = self._stepper(model)
        if begun:
            self._take_up(stepper, begun, notes)
        else:
            self._begin(stepper)
        stepper.plan(self._updates, self._rate)
        looks = self._looks()
        begun_at = perf_counter()
        total = torch.zeros(5, device=self._accelerator.device)
        since, clock, batch = begun, begun_at, iter(())
        for update in range(begun, self._updates):
            epoch, step = divmod(update, self._per_epoch)
            if step == 0 or update == begun:
                batch = self._batches.epoch(epoch, step * self._settings.accumulation)
            if update == self._densify_at:
                stepper = self._densified(stepper)
            total += stepper.update(batch, update)
            done = update + 1
            saves = self._saves(done, looks)
            if not (done % self._settings.log_every == 0 or done in looks or saves):
                continue
            losses = self._reduced(total, done - since, since, done)
            self._speeds.append(self._images * (done - since) / (perf_counter() - clock))
            look = self._look(stepper, done) if done in looks else None
            self._note(done, losses, stepper.learning_rate, look)
            if saves and self._states is not None:
                noted = self._notes(self._seconds + perf_counter() - begun_at)
                self._states.save(self._accelerator, done, noted, self._best)
                self._saved = done
            total.zero_()
            since, clock = done, perf_counter()
        if self._best is not None:
            self._best.put_back()
        if begun == self._updates or not self._data.labelled:
            self._last = replace(self._last, accuracy=self._judge.accuracy(stepper.model))
        seconds = self._seconds + perf_counter() - begun_at
        return self._outcome(self._finished(stepper, spare), seconds)

    def _stepper(self, model: nn.Module) -> Stepper:
        classes, labelled = self._data.num_classes, self._data.labelled
        return Stepper(model, self._settings, self._accelerator, num_classes=classes, teacher=self._teacher, labelled=labelled)

    def _begin(self, stepper: Stepper) -> None:
        """Look at the start, and find from it how fast to learn and, with a budget, for how many updates."""
        self._before = self._last = self._judge.look(stepper.model, stepper.bare)
        close = self._before.fidelity
        if close is not None and not math.isfinite(close.relative_error):
            raise DataError(f"{self._data.name}: the outputs are no finite numbers before the first update, so there is nothing to fit to")
        if self._settings.learning_rate is None:
            if close is None:
                images, _ = next(iter(self._batches.epoch(0, 0)))
                close = self._judge.compared(stepper.bare, [images])
            self._rate = rate_for(self._agreed(close.relative_error))
        if self._settings.minutes is not None:
            clock = perf_counter()  # of a second look, which starts nothing anew
            self._judge.look(stepper.model, stepper.bare, accuracy=self._data.labelled)
            each, budget = self._agreed(perf_counter() - clock), 60 * self._settings.minutes
            self._look_count = looks_for(budget, each)
            left = budget - (clock - self._started) - (self._look_count + 1) * each
            self._updates = affordable(stepper, self._batches, left, self._agreed)
        self._best = self._copied(stepper)
        self._log.add(self._before.row(LogRow(0, 0.0)))

    def _take_up(self, stepper: Stepper, begun: int, notes: dict[str, Any]) -> None:
        """Go on from a state, with what was found at the start."""
        self._updates, self._kept, self._loss, self._seconds = (notes[name] for name in ("updates", "kept", "loss", "seconds"))
        self._look_count = notes.get("looks", LOOKS)
        if self._settings.learning_rate is None:
            self._rate = notes["learning_rate"]
        self._before, self._last = Look.of_json(notes["before"]), Look.of_json(notes["last"])
        self._best, self._saved = self._copied(stepper), begun
        if self._states is not None:
            self._states.load(self._accelerator, begun, self._best)

    def _notes(self, seconds: float) -> dict[str, Any]:
        before, last = self._before.to_json(), self._last.to_json()
        noted = {"updates": self._updates, "looks": self._look_count, "learning_rate": self._rate, "kept": self._kept, "loss": self._loss}
        return noted | {"before": before, "last": last, "seconds": seconds}

    def _copied(self, stepper: Stepper) -> Copied | None:
        """A copy to keep the best state in; None where labels, or nothing at all, say what is best."""
        return Copied(stepper.bare) if self._judge.compares and not self._data.labelled else None

    def _agreed(self, number: float) -> float:
        """The mean over all processes, so that all do the same."""
        summed: Any = self._accelerator.reduce(torch.tensor(float(number), device=self._accelerator.device), "mean")
        return float(summed)

    def _densified(self, stepper: Stepper) -> Stepper:
        if self._best is not None:
            self._best.put_back()
        bare = stepper.close()
        densify(bare)
        stepper = self._stepper(bare)
        stepper.plan(self._updates, self._rate)
        self._best = self._copied(stepper)
        return stepper

    def _looks(self) -> frozenset[int]:
        """The updates after which the model is looked at: of epochs with labels their ends."""
        if self._settings.minutes is None and self._data.labelled:
            return frozenset(range(self._per_epoch, self._updates + 1, self._per_epoch))
        return moments(self._updates, self._look_count)

    def _look(self, stepper: Stepper, done: int) -> Look:
        """See how good the model is, and keep it where it is the best so far."""
        look = self._judge.look(stepper.model, stepper.bare, accuracy=self._data.labelled)
        if self._best is None or _is_closer(look.fidelity, self._last.fidelity):
            self._last, self._kept = look, done
            if self._best is not None:
                self._best.take()
        return look

    def _saves(self, done: int, looks: frozenset[int]) -> bool:
        every = self._settings.save_every
        return self._states is not None and (done == self._updates or (done in looks if every is None else done % every == 0))

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

    def _note(self, done: int, losses: list[float], rate: float, look: Look | None) -> None:
        self._loss = losses[0]
        of_classes = losses[1] if self._data.labelled else None
        of_output, of_blocks = (losses[2], losses[3]) if self._teacher is not None else (None, None)
        epoch, speed = round(done / self._per_epoch, 4), round(self._speeds[-1], 1)
        row = LogRow(done, epoch, losses[0], of_classes, of_output, of_blocks, rate, speed)
        self._log.add(row if look is None else look.row(row))
        if self._progress is not None:
            seen = str(self._last if look is None else look)
            self._progress(done, self._updates, f"loss {losses[0]:.3f}{f', {seen}' if seen else ''}")

    def _finished(self, stepper: Stepper, spare: nn.Module | None) -> nn.Module:
        """The whole model, bare and in eval mode."""
        if spare is None:
            return stepper.close().eval()
        state = self._accelerator.get_state_dict(stepper.model)
        stepper.close()
        if self._accelerator.is_main_process:
            spare.load_state_dict(state)
        return spare.eval()

    def _outcome(self, model: nn.Module, seconds: float) -> Outcome:
        # The first stretch has the start of everything in it.
        speed = statistics.median(self._speeds[1:] or self._speeds or [0.0])
        return Outcome(
            model=model,
            updates=self._updates,
            images=self._images * self._updates,
            seconds=seconds,
            images_per_second=speed,
            processes=self._accelerator.num_processes,
            loss=self._loss,
            before=self._before.accuracy,
            after=self._last.accuracy,
            fidelity_before=self._before.fidelity,
            fidelity_after=self._last.fidelity,
            kept=self._updates if self._best is None else self._kept,
            labelled=self._data.labelled,
            settings=replace(self._settings, learning_rate=self._rate),
            is_main=self._accelerator.is_main_process,
        )


def _is_closer(one: Fidelity | None, other: Fidelity | None) -> bool:
    return one is not None and other is not None and one.relative_error < other.relative_error
