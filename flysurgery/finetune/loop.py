"""The updates of a run, with what is seen, noted and kept between them."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flysurgery.errors import DataError, TrainingError
from flysurgery.fidelity import Copied, affordable, moments, rate_for
from flysurgery.finetune.data import Batches, TrainingData
from flysurgery.finetune.devices import sharded
from flysurgery.finetune.measure import Judge, Look
from flysurgery.finetune.settings import Settings
from flysurgery.finetune.state import Log, States
from flysurgery.finetune.step import Stepper
from flysurgery.finetune.teacher import Teacher
from flysurgery.surgery import densify

if TYPE_CHECKING:
    from accelerate import Accelerator

Progress = Callable[[int, int, str], None]
"""Called with the updates done, the number of all, and a few words on the loss and on what was seen last."""

LOOKS = 10
"""How often a run without labels, or with a budget, is looked at."""

LOOKED = 0.2
"""The share of a budget that looks may take. Where they take longer there are fewer."""


@dataclass(frozen=True)
class Notes:
    """What a run knows of itself; a state holds it as JSON. ``seconds`` are those up to the state."""

    updates: int
    learning_rate: float
    kept: int = 0
    loss: float = math.nan
    seconds: float = 0.0
    looks: int = LOOKS
    before: Look = field(default_factory=Look)
    last: Look = field(default_factory=Look)

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> Notes:
        looks: dict[str, Any] = {name: Look.of_json(found[name]) for name in ("before", "last")}
        return cls(**found | looks)


@dataclass
class Loop:
    """One run; ``started`` is when its budget began. After ``go``, ``notes`` and ``speed`` say how it went.

    ``images`` counts those of one update; ``fuses`` lets fused modules train where they are faster.
    """

    accelerator: Accelerator
    settings: Settings
    data: TrainingData
    batches: Batches
    teacher: Teacher | None
    judge: Judge
    states: States | None
    log: Log
    progress: Progress | None
    started: float
    fuses: bool

    def __post_init__(self) -> None:
        accumulation = self.settings.accumulation
        self._per_epoch = self.batches.count // accumulation
        if not self._per_epoch:
            raise DataError(
                f"{self.data.name} has {self.batches.count} batches an epoch, fewer than the {accumulation} of one update; "
                "lower the accumulation or the batch size"
            )
        self.images = self.batches.size * accumulation * self.accelerator.num_processes
        self.notes = Notes((self.settings.epochs or 0) * self._per_epoch, self.settings.learning_rate or 0.0)
        self._best: Copied | None = None
        self._saved: int | None = None
        self._speeds: list[float] = []

    def go(self, model: nn.Module, begun: int, notes: dict[str, Any]) -> nn.Module:
        """Run from update ``begun`` on, whose state holds ``notes``; gives the whole model, bare and in eval mode."""
        spare = copy.deepcopy(model).cpu() if sharded(self.accelerator) else None
        densify_at = None if self.settings.densify_after is None else self.settings.densify_after * self._per_epoch
        if densify_at is not None and begun > densify_at:
            densify(model)
        stepper = self._stepper(model)
        if begun:
            self._take_up(stepper, begun, notes)
        else:
            self._begin(stepper)
        updates = self.notes.updates
        stepper.plan(updates, self.notes.learning_rate)
        looks = self._looks()
        begun_at = perf_counter() - self.notes.seconds
        total = torch.zeros(5, device=self.accelerator.device)
        since, clock, batch = begun, perf_counter(), iter(())
        for update in range(begun, updates):
            epoch, step = divmod(update, self._per_epoch)
            if step == 0 or update == begun:
                batch = self.batches.epoch(epoch, step * self.settings.accumulation)
            if update == densify_at:
                stepper = self._densified(stepper)
            total += stepper.update(batch, update)
            done = update + 1
            saves = self._saves(done, looks)
            if not (done % self.settings.log_every == 0 or done in looks or saves):
                continue
            losses = self._reduced(total, done - since, since, done)
            self._speeds.append(self.images * (done - since) / (perf_counter() - clock))
            look = self._look(stepper, done) if done in looks else None
            self._note(done, losses, stepper.learning_rate, look)
            if saves and self.states is not None:
                noted = asdict(replace(self.notes, seconds=perf_counter() - begun_at))
                self.states.save(self.accelerator, done, noted, self._best)
                self._saved = done
            total.zero_()
            since, clock = done, perf_counter()
        if self._best is not None:
            self._best.put_back()
        last = self.notes.last
        if begun == updates or not self.data.labelled:
            last = replace(last, accuracy=self.judge.accuracy(stepper.model))
        kept = updates if self._best is None else self.notes.kept
        self.notes = replace(self.notes, last=last, kept=kept, seconds=perf_counter() - begun_at)
        return self._finished(stepper, spare)

    def _stepper(self, model: nn.Module) -> Stepper:
        classes, labelled = self.data.num_classes, self.data.labelled
        return Stepper(
            model,
            self.settings,
            self.accelerator,
            num_classes=classes,
            teacher=self.teacher,
            labelled=labelled,
            fuses=self.fuses,
        )

    def _begin(self, stepper: Stepper) -> None:
        """Look at the start, and find from it how fast to learn and, with a budget, for how many updates."""
        before = self.judge.look(stepper.model, stepper.bare)
        self.notes = replace(self.notes, before=before, last=before)
        close = before.fidelity
        if close is not None and not math.isfinite(close.relative_error):
            raise DataError(f"{self.data.name}: the outputs are no finite numbers before the first update, so there is nothing to fit to")
        if self.settings.learning_rate is None:
            if close is None:
                images, _ = next(iter(self.batches.epoch(0, 0)))
                close = self.judge.compared(stepper.bare, [images])
            self.notes = replace(self.notes, learning_rate=rate_for(self._agreed(close.relative_error)))
        if self.settings.minutes is not None:
            clock = perf_counter()  # a second look, which has nothing to set up, is timed
            self.judge.look(stepper.model, stepper.bare, accuracy=self.data.labelled)
            each, budget = self._agreed(perf_counter() - clock), 60 * self.settings.minutes
            looks = max(1, min(LOOKS, int(LOOKED * budget / max(each, 1e-9))))
            rows = chain.from_iterable(self.batches.epoch(number, 0) for number in count())
            with stepper.rehearsal():
                stepper.update(rows, 0).tolist()  # the first one sets things up, and is not timed
                left = budget - (perf_counter() - self.started) - looks * each
                updates = affordable(lambda: stepper.update(rows, 0), left, self._agreed)
            self.notes = replace(self.notes, looks=looks, updates=updates)
        self._best = self._copied(stepper)
        self.log.add(0, {"epoch": 0.0} | before.columns())

    def _take_up(self, stepper: Stepper, begun: int, notes: dict[str, Any]) -> None:
        """Go on from a state, with what was found at the start; a rate that is given may have changed."""
        self.notes = Notes.of_json(notes)
        if self.settings.learning_rate is not None:
            self.notes = replace(self.notes, learning_rate=self.settings.learning_rate)
        self._best, self._saved = self._copied(stepper), begun
        if self.states is not None:
            self.states.load(self.accelerator, begun, self._best)

    def _copied(self, stepper: Stepper) -> Copied | None:
        """Make a copy to keep the best state in; None where labels, or nothing at all, say what is best."""
        return Copied(stepper.bare) if self.judge.images and not self.data.labelled else None

    def _agreed(self, number: float) -> float:
        """Give the mean over all processes, so that all do the same."""
        summed: Any = self.accelerator.reduce(torch.tensor(float(number), device=self.accelerator.device), "mean")
        return float(summed)

    def _densified(self, stepper: Stepper) -> Stepper:
        if self._best is not None:
            self._best.put_back()
        bare = stepper.close()
        densify(bare)
        stepper = self._stepper(bare)
        stepper.plan(self.notes.updates, self.notes.learning_rate)
        self._best = self._copied(stepper)
        return stepper

    def _looks(self) -> frozenset[int]:
        """Choose the updates after which the model is looked at: with labels the ends of epochs."""
        if self.settings.minutes is None and self.data.labelled:
            return frozenset(range(self._per_epoch, self.notes.updates + 1, self._per_epoch))
        return moments(self.notes.updates, self.notes.looks)

    def _look(self, stepper: Stepper, done: int) -> Look:
        """See how good the model is, and keep it where it is the best so far."""
        look = self.judge.look(stepper.model, stepper.bare, accuracy=self.data.labelled)
        new, best, start = look.fidelity, self.notes.last.fidelity, self.notes.before.fidelity
        if self._best is None or (new and best and start and new.is_better_than(best, start)):
            self.notes = replace(self.notes, last=look, kept=done)
            if self._best is not None:
                self._best.take()
        return look

    def _saves(self, done: int, looks: frozenset[int]) -> bool:
        every = self.settings.save_every
        return self.states is not None and (done == self.notes.updates or (done in looks if every is None else done % every == 0))

    def _reduced(self, total: Tensor, count: int, since: int, done: int) -> list[float]:
        """Give mean losses of all processes over ``count`` updates; the same in each, so that all stop together."""
        summed: Any = self.accelerator.reduce(total, "sum")
        *sums, bad = summed.tolist()
        if bad:
            kept = "no state was kept" if self._saved is None else f"the last good state, of update {self._saved}, is kept"
            raise TrainingError(
                f"the loss or its gradient was no finite number in updates {since + 1} to {done}, so training stopped; {kept}; "
                "try a lower learning rate"
            )
        return [each / count / self.accelerator.num_processes for each in sums]

    def _note(self, done: int, losses: list[float], rate: float, look: Look | None) -> None:
        self.notes = replace(self.notes, loss=losses[0])
        total, of_classes, of_output, of_blocks = losses
        row: dict[str, float | None] = {
            "epoch": round(done / self._per_epoch, 4),
            "loss": total,
            "class_loss": of_classes if self.data.labelled else None,
            "output_loss": None if self.teacher is None else of_output,
            "blocks_loss": None if self.teacher is None else of_blocks,
            "learning_rate": rate,
            "images_per_second": round(self._speeds[-1], 1),
        }
        self.log.add(done, row if look is None else row | look.columns())
        if self.progress is not None and self.accelerator.is_main_process:
            seen = str(self.notes.last if look is None else look)
            self.progress(done, self.notes.updates, f"loss {losses[0]:.3f}{f', {seen}' if seen else ''}")

    def _finished(self, stepper: Stepper, spare: nn.Module | None) -> nn.Module:
        if spare is None:
            return stepper.close().eval()
        state = self.accelerator.get_state_dict(stepper.model)
        stepper.close()
        if self.accelerator.is_main_process:
            spare.load_state_dict(state)
        return spare.eval()

    @property
    def speed(self) -> float:
        """Images a second of the training alone; the first stretch has the start of everything in it."""
        return statistics.median(self._speeds[1:] or self._speeds or [0.0])
