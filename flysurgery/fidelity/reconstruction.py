"""Fit all blocks of a converted model to the dense model's, and keep the state that is best on held-out samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor, nn

from flysurgery.calibration import Samples, unchanged_state
from flysurgery.errors import DataError, SurgeryError
from flysurgery.fidelity.ahead import made_ahead
from flysurgery.fidelity.captured import WARM_UP, Captured
from flysurgery.fidelity.copies import Copied, HalfCopy, learning, precision
from flysurgery.fidelity.measure import Fidelity, first_tensor, measure_fidelity
from flysurgery.fidelity.optimizer import Muon, parameter_groups
from flysurgery.fidelity.processes import connected
from flysurgery.fidelity.settings import OUTPUT_WEIGHT, REACH, TAUGHT, Settings, affordable, moments, rate_for
from flysurgery.fidelity.stream import Pull, Stream, relative_error
from flysurgery.fidelity.views import Source
from flysurgery.inference import fuse
from flysurgery.walker import Cut


class Step(ExitStack):
    """Makes updates of ``student`` towards ``teacher``; on CUDA an update is one graph that is replayed, in bfloat16.

    There copies of both models in bfloat16 do the work, by fused modules where these are faster, and the student's own parameters, in
    float32, take the steps. Before each step ``average`` changes their gradients in place. ``rate`` is the highest one. After the time
    ``fuses_until`` no model is fused.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        source: Source,
        cuts: Sequence[Cut],
        rate: float,
        average: Callable[[Sequence[Tensor]], None],
        fuses_until: float,
    ) -> None:
        super().__init__()
        device = next(student.parameters()).device
        self._parameters = learning(student)
        self._half = HalfCopy(student) if device.type == "cuda" else None
        self._student = student if self._half is None else self._half.model
        self._teacher = teacher if self._half is None else HalfCopy(teacher).model
        self._views, self._fuses_until = made_ahead(iter(lambda: (source.draw(),), ()), device), fuses_until
        self._precision: AbstractContextManager[object] = nullcontext()
        self._highest, self._average = rate, average
        self._rate, self._taught = torch.zeros((), device=device), torch.zeros((), device=device)
        self._optimizer = Muon([{**group, "lr": self._rate} for group in parameter_groups(student)])
        used = [cut for cut in cuts if cut.kind != "other"]
        self._theirs = Stream(self._teacher, used)
        self._mine = Pull(self._student, self._theirs.values, used, REACH)
        self._mine.taught = self._taught
        self._captured = Captured(self._parameters, captures=self._half is not None)

    def __enter__(self) -> Step:
        self.callback(self._captured.forget)
        self.callback(self._views.close)
        if self._half is not None:
            x = self._drawn()
            self._precision = precision((self._student, self._teacher), x)
            for model, training in ((self._student, "captured"), (self._teacher, False)):
                if isinstance(self._precision, nullcontext) and perf_counter() < self._fuses_until:
                    fuse(model, x, training=training)
        self.enter_context(self._theirs)
        self.enter_context(self._mine)
        return self

    def _drawn(self) -> Tensor:
        """Draw the views of an update, in the dtype of the models that do the work."""
        (views,) = next(self._views)
        return views if self._half is None else views.bfloat16()

    def update(self, share: float = 0.0, taught: float = 0.0) -> Tensor:  # shape: ()
        """Make one update at this share of the highest rate, with this share of the entries between blocks taken from the teacher.

        Gives the error of what the model returned.
        """
        self._rate.fill_(share * self._highest)
        self._taught.fill_(taught)
        return self._captured(self._once, self._drawn())

    def warm_up(self) -> None:
        """Make updates at a rate of zero, until all is there that an update keeps, and on CUDA an update is a graph."""
        for _ in range(1 if self._half is None else WARM_UP + 1):
            self.update()

    def _once(self, x: Tensor) -> Tensor:  # shape: ()
        with self._precision:
            with torch.no_grad():
                wanted = first_tensor(self._teacher(x))
            with torch.enable_grad():
                given = first_tensor(self._student(x))
        error, difference, scale = relative_error(given.detach(), wanted)
        given.backward((difference * (OUTPUT_WEIGHT * scale)).to(given.dtype))
        if self._half is not None:
            self._half.give_gradients()
        self._average([each.grad for each in self._parameters if each.grad is not None])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._half is not None:
            self._half.take_values()
        return error


Progress = Callable[[int, int, str], None]
"""Called after each step with the number done, the number of all, and a short text: a layer's name, or the error."""

RISING = 0.05
"""Share of the updates in which the rate grows."""

LOOKS = 8
"""How often held-out samples judge a run."""

APART = 1_000_003
"""The distance between the seeds of two processes, larger than that between seeds of users."""

SLACK = 0.1
"""The share of the budget by which a run may be late; beyond it the schedule follows the clock."""


@dataclass(frozen=True)
class Reconstruction:
    """What a reconstruction did: the fidelity before and after, on held-out samples, and what it cost.

    ``kept`` is the update whose state was kept: 0 is the start. ``batch`` counts the views of an update, those of all processes.
    """

    before: Fidelity
    after: Fidelity
    updates: int
    kept: int
    batch: int
    seconds: float
    history: tuple[tuple[int, float], ...]


def reconstruct(
    student: nn.Module,
    teacher: nn.Module,
    samples: Samples,
    cuts: Sequence[Cut],
    settings: Settings,
    *,
    progress: Progress | None = None,
) -> Reconstruction:
    """Fit the parameters of ``student``, in place, so that every block gives the output of the dense model's block.

    All parameters that require gradients and lie behind the first cut of kind "start" are trained: factors, biases, norms, scales and dense
    layers. Held-out samples judge the model ``LOOKS`` times. The state with the lowest relative error is kept, of those whose cosines are
    not below the start's lowest one; it may be the start. After an error or an interruption the student is as it was. Takes
    ``settings.minutes``. Needs memory for four more copies of the parameters, on CUDA also for both models in bfloat16, one forward with
    its activations, and the pictures; these stay where they are if the device has no room. Runs on CUDA of a minute or more use fused
    modules where these are faster.

    Where ``torch.distributed`` is initialized, all processes call this with the same model, samples and settings, each on its own device.
    They begin with the parameters of the first process, follow its clock and its held-out samples, and end with the same parameters.
    Each process makes its own ``settings.batch`` views, and an update follows the mean of all gradients.

    Raises:
        DataError: outputs that are no finite numbers, or a model that gives no tensor.
        SurgeryError: the model has no cut at which its blocks can be compared, no parameter to train, or weights in half precision; or
            another process has ended.
    """
    started = perf_counter()
    if not any(cut.kind in ("block", "tokens") for cut in cuts):
        raise SurgeryError("the model has no place where one tensor carries everything on, so its blocks cannot be fitted one by one")
    trained = learning(student)
    if not trained:
        raise SurgeryError("every parameter of the model has requires_grad=False, so there is nothing to fit; let some of them learn")
    small = next((each.dtype for each in trained if each.dtype in (torch.float16, torch.bfloat16)), None)
    if small is not None:
        raise SurgeryError(
            f"the steps of a reconstruction are too small for weights in {small}; convert the model in float32, then cast it"
        )
    device = next(student.parameters()).device
    on_cuda = device.type == "cuda"
    with (
        connected(device) as processes,
        torch.random.fork_rng([device] if on_cuda else []),
        torch.cuda.device(device) if on_cuda else nullcontext(),
        unchanged_state(student),
        unchanged_state(teacher),
    ):
        held_out = list(samples.held_out())
        processes.share([parameter for parameter in student.parameters() if parameter.is_floating_point()])

        def judged() -> Fidelity:
            return processes.agreed(measure_fidelity(student, teacher, held_out, cuts))

        before = after = judged()
        if not math.isfinite(before.relative_error):
            raise DataError(f"{samples.name}: the model's outputs are no finite numbers, so there is nothing to fit to")
        start, best = Copied(student), Copied(student)
        done, kept = 0, 0
        history = [(0, before.relative_error)]
        try:
            source = Source(samples.to_view(), settings.batch, device)
            torch.manual_seed(settings.seed + APART * processes.rank)
            rate, until = rate_for(before.relative_error, settings.rate), started + settings.fusing_seconds
            with Step(student, teacher, source, cuts, rate, processes.average, until) as step:
                step.warm_up()
                left = 60 * settings.minutes - (perf_counter() - started)
                updates = affordable(step.update, left, processes.agreed)
                source.expect(updates * settings.batch * processes.count)
                looks = moments(updates, LOOKS)
                for done in range(1, updates + 1):
                    # a machine that becomes slower still ends in time
                    spent = processes.agreed((perf_counter() - started) / (60 * settings.minutes))
                    share = min(1.0, max(done / (updates + 1), spent - SLACK))
                    step.update(_share(share), TAUGHT * (1 - share))
                    ends = spent - SLACK >= 1
                    if done in looks or ends:
                        found = judged()
                        history.append((done, found.relative_error))
                        if found.is_better_than(after, before):
                            kept, after = done, found
                            best.take()
                        if ends or not math.isfinite(found.relative_error):
                            break
                    if progress is not None and (done in looks or done % 10 == 0):
                        progress(done, updates, f"reconstruction, error {after.relative_error:.3f}")
            best.put_back()
        except BaseException:
            start.put_back()
            raise
    return Reconstruction(before, after, done, kept, settings.batch * processes.count, perf_counter() - started, tuple(history))


def _share(done: float) -> float:
    """Give the share of the highest rate when this share of the run is done: up in a line, then down in a cosine."""
    return done / RISING if done < RISING else 0.5 + 0.5 * math.cos(math.pi * (done - RISING) / (1 - RISING))
