"""A training run, from its first update or from the update at which it is resumed: what is seen, noted and kept between updates."""

import copy
import math
import os
import statistics
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from itertools import chain, count
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flysurgery.errors import DataError, OptionError, TrainingError
from flysurgery.evaluation import Accuracy, Fractals, ImageData
from flysurgery.fidelity import Copied, Fidelity, Progress, affordable, affordable_looks, moments, rate_for
from flysurgery.finetune.batches import Batches, check_augmentation
from flysurgery.finetune.data import TrainingData
from flysurgery.finetune.judge import FUSED, Judge, Look, Teacher
from flysurgery.finetune.settings import Settings, check_installed
from flysurgery.finetune.state import Log, States, sharded
from flysurgery.finetune.step import Stepper, optimizer_of
from flysurgery.inference import Groups
from flysurgery.surgery import densify, plan_of

if TYPE_CHECKING:
    from accelerate import Accelerator

LOOKS = 10  # how often a run without labels, or with a budget, is looked at


@dataclass(frozen=True)
class Outcome:
    """The trained model, with numbers of the whole run, pauses between its parts left out.

    ``before`` and ``after`` are None without held-out data, or without classes; ``fidelity_before`` and ``fidelity_after`` without a
    teacher. ``kept`` is the update whose state the model has: the last, or without labels the one that was closest to the teacher on
    held-out images, 0 for the start. ``settings`` are complete. ``loss`` is the last one logged; ``images_per_second`` counts the training
    alone. Where ``is_main`` is false, as on all processes but one, the model must not be saved.
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
    """Train ``model``, converted or dense, in place, on the devices and processes that accelerate was set up with.

    With ``folder`` the run keeps a log there, and its state after each epoch or every ``save_every`` updates. With ``resume`` it continues
    from the last state. Each random number follows from the seed, the update and the process, so the losses are those of a run that was
    never stopped. ``force`` deletes the state of another run. ``progress`` is called with the updates done, the number of all, and a few
    words on the loss and on what was seen last.

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
    if settings.densify_after is not None:
        if sharded(accelerator):
            raise OptionError("densify_after cannot be used with weights shared out among processes")
        if plan_of(model) is None:
            raise OptionError("there is nothing to densify in a dense model")
    states = None if folder is None else States(folder, model, data.name, settings, accelerator)
    begun, noted = (0, {}) if states is None else states.begin(resume=resume, force=force)
    fuses = accelerator.device.type == "cuda" and settings.pays_fusing(data.samples)
    with ExitStack() as opened:
        taught = None
        if teacher is not None:
            dtype = FUSED.get(accelerator.mixed_precision) if fuses else None
            only = noted.get("fused", {}).get("teacher")
            taught = opened.enter_context(Teacher(teacher.to(accelerator.device), model, settings, dtype, only=only))
        batches = data.open(accelerator)
        if held_out is not None and isinstance(held_out.dataset, Fractals):
            held_out.dataset.to(accelerator.device)  # pictures that are computed are computed where they are needed
        judge = Judge(held_out, taught, accelerator, batches.size)
        log = opened.enter_context(closing(Log(folder, accelerator, begun, asdict(settings))))
        loop = Loop(accelerator, settings, data, batches, taught, judge, states, log, progress, started, fuses)
        whole = loop.go(model, begun, noted)
    notes = loop.notes
    return Outcome(
        model=whole,
        updates=notes.updates,
        images=loop.images * notes.updates,
        seconds=notes.seconds,
        images_per_second=statistics.median(loop.speeds[1:] or loop.speeds or [0.0]),  # the first stretch has the start in it
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


def accelerator_for(settings: Settings, folder: Path | None, *, quick: bool = False) -> "Accelerator":
    """Make accelerate's own object for this process, as ``accelerate launch`` or ``accelerate config`` set it up.

    Where neither the settings nor accelerate choose a precision, ``quick`` takes bfloat16 on CUDA.
    """
    check_installed(settings)
    from accelerate import Accelerator, DistributedDataParallelKwargs

    precision = settings.precision
    chosen = precision is not None or "ACCELERATE_MIXED_PRECISION" in os.environ or settings.cpu
    if quick and not chosen and torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False):
        precision = "bf16"
    try:
        accelerator = Accelerator(
            cpu=settings.cpu,
            mixed_precision=precision,
            log_with="tensorboard" if settings.tensorboard and folder is not None else None,
            project_dir=folder,
            # gradients stay where they were reduced, so that no copy of them is needed
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
    except ValueError as error:
        raise OptionError(f"accelerate cannot run with these options: {str(error).splitlines()[0].rstrip('.')}") from error
    fsdp: Any = getattr(accelerator.state, "fsdp_plugin", None)
    if fsdp is not None:
        # each process has the weights already, and accelerate 1.15 cannot send those of no submodule, such as a class token
        fsdp.cpu_ram_efficient_loading = False
    return accelerator


def leave_processes() -> None:
    """End what connects this process with the others that train; after that it cannot train any more. Alone, it does nothing."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@dataclass
class Notes:
    """What a run knows of itself; a state holds it as JSON. ``seconds`` are those up to the state.

    ``fused`` names the fused groups of the "model" and the "teacher". Times chose them, which differ from run to run.
    """

    updates: int
    learning_rate: float
    kept: int = 0
    loss: float = math.nan
    seconds: float = 0.0
    looks: int = LOOKS
    before: Look = field(default_factory=Look)
    last: Look = field(default_factory=Look)
    fused: dict[str, Groups] = field(default_factory=dict)


@dataclass
class Loop:
    """The updates of one run, of ``images`` each; ``started`` is when its budget began. ``notes`` and ``speeds`` say how it went.

    ``fuses`` lets fused modules train where they are faster.
    """

    accelerator: "Accelerator"
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
        self.speeds: list[float] = []

    def go(self, model: nn.Module, begun: int, noted: dict[str, Any]) -> nn.Module:
        """Run from update ``begun`` on, whose state holds ``noted``; gives the whole model, bare and in eval mode."""
        spare = copy.deepcopy(model).cpu() if sharded(self.accelerator) else None
        densify_at = None if self.settings.densify_after is None else self.settings.densify_after * self._per_epoch
        if densify_at is not None and begun > densify_at:
            densify(model)
        self._set_up(model, noted.get("fused", {}).get("model"))
        if begun:
            self._take_up(begun, noted)
        else:
            self._begin()
        updates, every = self.notes.updates, self.settings.save_every
        if self.settings.minutes is None and self.data.labelled:
            looks = frozenset(range(self._per_epoch, updates + 1, self._per_epoch))
        else:
            looks = moments(updates, self.notes.looks)
        self._stepper.plan(updates, self.notes.learning_rate)
        begun_at = perf_counter() - self.notes.seconds
        total = torch.zeros(5, device=self.accelerator.device)
        since, clock, batch = begun, perf_counter(), iter(())
        for update in range(begun, updates):
            epoch, step = divmod(update, self._per_epoch)
            if step == 0 or update == begun:
                batch = self.batches.epoch(epoch, step * self.settings.accumulation)
            if update == densify_at:
                self._densify()
            total += self._stepper.update(batch, update)
            done = update + 1
            saves = self.states is not None and (done == updates or (done in looks if every is None else done % every == 0))
            if not (done % self.settings.log_every == 0 or done in looks or saves):
                continue
            losses = self._reduced(total, since, done)
            self.speeds.append(self.images * (done - since) / (perf_counter() - clock))
            self._note(done, losses, self._look(done) if done in looks else None)
            if saves and self.states is not None:
                self.notes.seconds = perf_counter() - begun_at
                self.states.save(done, asdict(self.notes), self._best)
            total.zero_()
            since, clock = done, perf_counter()
        if self._best is None:
            self.notes.kept = updates
        else:
            self._best.put_back()
        if begun == updates or not self.data.labelled:
            self.notes.last = replace(self.notes.last, accuracy=self.judge.accuracy(self._stepper.model))
        self.notes.seconds = perf_counter() - begun_at
        if spare is None:
            return self._stepper.close().eval()
        state = self.accelerator.get_state_dict(self._stepper.model)
        self._stepper.close()
        if self.accelerator.is_main_process:
            spare.load_state_dict(state)
        return spare.eval()

    def _set_up(self, model: nn.Module, only: Groups | None = None) -> None:
        """Prepare ``model`` to be trained, and a copy for its best state where something says which is best: a teacher, not labels."""
        self._stepper = Stepper(model, self.settings, self.accelerator, self.data, self.teacher, fuses=self.fuses, only=only)
        self.notes.fused = {"model": self._stepper.groups, "teacher": [] if self.teacher is None else self.teacher.groups}
        self._best = Copied(self._stepper.bare) if self.judge.images and not self.data.labelled else None

    def _begin(self) -> None:
        """Look at the start, and find from it how fast to learn and, with a budget, for how many updates."""
        notes, stepper = self.notes, self._stepper
        notes.before = notes.last = self.judge.look(stepper.model, stepper.bare)
        close = notes.before.fidelity
        if close is not None and not math.isfinite(close.relative_error):
            raise DataError(f"{self.data.name}: the outputs are no finite numbers before the first update, so there is nothing to fit to")
        if self.settings.learning_rate is None:
            if close is None:
                images, _ = next(iter(self.batches.epoch(0, 0)))
                close = self.judge.compared(stepper.bare, [images])
            notes.learning_rate = rate_for(self._agreed(close.relative_error))
        if self.settings.minutes is not None:
            clock = perf_counter()  # a second look, which has nothing to set up, is timed
            self.judge.look(stepper.model, stepper.bare, accuracy=self.data.labelled)
            each, budget = self._agreed(perf_counter() - clock), 60 * self.settings.minutes
            notes.looks = affordable_looks(LOOKS, budget, each)
            rows = chain.from_iterable(self.batches.epoch(number, 0) for number in count())
            with stepper.rehearsal():
                stepper.update(rows, 0).tolist()  # the first one sets things up, and is not timed
                left = budget - (perf_counter() - self.started) - notes.looks * each
                notes.updates = affordable(lambda: stepper.update(rows, 0), left, self._agreed)
        self.log.add(0, {"epoch": 0.0} | notes.before.columns())

    def _take_up(self, begun: int, noted: dict[str, Any]) -> None:
        """Go on from a state, with what was found at the start; a rate that is given may have changed."""
        looks: dict[str, Any] = {name: Look.of_json(noted[name]) for name in ("before", "last")}
        self.notes = Notes(**noted | looks)
        self.notes.learning_rate = self.settings.learning_rate or self.notes.learning_rate
        if self.states is not None:
            self.states.load(begun, self._best)

    def _agreed(self, number: float) -> float:
        """Give the mean over all processes, so that all do the same."""
        summed: Any = self.accelerator.reduce(torch.tensor(float(number), device=self.accelerator.device), "mean")
        return float(summed)

    def _densify(self) -> None:
        if self._best is not None:
            self._best.put_back()
        bare = self._stepper.close()
        densify(bare)
        self._set_up(bare)
        self._stepper.plan(self.notes.updates, self.notes.learning_rate)

    def _look(self, done: int) -> Look:
        """See how good the model is, and keep it where it is the best so far."""
        look = self.judge.look(self._stepper.model, self._stepper.bare, accuracy=self.data.labelled)
        new, best, start = look.fidelity, self.notes.last.fidelity, self.notes.before.fidelity
        if self._best is None or (new and best and start and new.is_better_than(best, start)):
            self.notes.last, self.notes.kept = look, done
            if self._best is not None:
                self._best.take()
        return look

    def _reduced(self, total: Tensor, since: int, done: int) -> list[float]:
        """Give mean losses of all processes over the updates ``since``; the same in each, so that all stop together."""
        summed: Any = self.accelerator.reduce(total, "sum")
        *sums, bad = summed.tolist()
        if bad:
            kept = "no state was kept" if self.states is None else self.states.kept
            raise TrainingError(
                f"the loss or its gradient was no finite number in updates {since + 1} to {done}, so training stopped; {kept}; "
                "try a lower learning rate"
            )
        return [each / (done - since) / self.accelerator.num_processes for each in sums]

    def _note(self, done: int, losses: list[float], look: Look | None) -> None:
        self.notes.loss, of_classes, of_output, of_blocks = losses
        row: dict[str, float | None] = {
            "epoch": round(done / self._per_epoch, 4),
            "loss": self.notes.loss,
            "class_loss": of_classes if self.data.labelled else None,
            "output_loss": None if self.teacher is None else of_output,
            "blocks_loss": None if self.teacher is None else of_blocks,
            "learning_rate": self._stepper.learning_rate,
            "images_per_second": round(self.speeds[-1], 1),
        }
        self.log.add(done, row if look is None else row | look.columns())
        if self.progress is not None and self.accelerator.is_main_process:
            seen = str(self.notes.last if look is None else look)
            self.progress(done, self.notes.updates, f"loss {self.notes.loss:.3f}{f', {seen}' if seen else ''}")
