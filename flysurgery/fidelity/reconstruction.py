"""Fit all blocks of a converted model to the dense model's, and keep the state that is best on held-out samples."""

# pyright: reportPrivateImportUsage=false
import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.calibration import Samples, run, unchanged_state
from flysurgery.errors import DataError, SurgeryError
from flysurgery.fidelity.captured import WARM_UP, Captured, made_ahead
from flysurgery.fidelity.measure import Fidelity, first_tensor, measure_fidelity
from flysurgery.fidelity.optimizer import Muon, parameter_groups
from flysurgery.fidelity.processes import Processes, connected
from flysurgery.fidelity.settings import OUTPUT_WEIGHT, REACH, TAUGHT, Settings, affordable, affordable_looks, moments, rate_for
from flysurgery.fidelity.stream import Pull, Stream, relative_error
from flysurgery.fidelity.views import Source
from flysurgery.inference import fuse
from flysurgery.ops import compiling
from flysurgery.walker import Cut

Progress = Callable[[int, int, str], None]
"""Called after each step with the number done, the number of all, and a short text: a layer's name, or the error."""

RISING = 0.05  # share of the updates in which the rate grows
LOOKS = 8  # how often held-out samples judge a run at most
APART = 1_000_003  # the distance between the seeds of two processes, larger than that between seeds of users
SLACK = 0.1  # the share of the budget by which a run may be late; beyond it the schedule follows the clock


class Copied:
    """The parameters and buffers of ``model`` as they are now; where weights are shared out, this process's parts of them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._values = [each.clone() for each in _tensors(model)]

    @torch.no_grad()
    def take(self) -> None:
        for mine, theirs in zip(self._values, _tensors(self._model), strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def put_back(self) -> None:
        for mine, theirs in zip(self._values, _tensors(self._model), strict=True):
            theirs.copy_(mine)

    def save(self, file: Path) -> None:
        torch.save([each.cpu() for each in self._values], file)

    def load(self, file: Path) -> None:
        for mine, kept in zip(self._values, torch.load(file, weights_only=True), strict=True):
            mine.copy_(kept)


def _tensors(model: nn.Module) -> list[Tensor]:
    tensors: list[Any] = [*model.parameters(), *model.buffers()]
    return [(each.to_local() if hasattr(each, "to_local") else each).detach() for each in tensors]


class HalfCopy:
    """A copy of ``original`` in bfloat16 that does the work of an update, while the original's parameters take the step.

    It takes half the memory traffic of autocast, which casts weights at every use.
    """

    def __init__(self, original: nn.Module) -> None:
        self.model = copy.deepcopy(original).bfloat16()
        self._theirs, self._mine = learning(original), learning(self.model)

    def give_gradients(self) -> None:
        """Move the gradients to the original's parameters, in their dtype."""
        pairs = zip(self._theirs, self._mine, strict=True)
        used = [(theirs, mine, mine.grad) for theirs, mine in pairs if mine.grad is not None]
        gradients = [torch.empty_like(theirs) for theirs, _, _ in used]
        torch._foreach_copy_(gradients, [gradient for _, _, gradient in used])
        for (theirs, mine, _), gradient in zip(used, gradients, strict=True):
            theirs.grad, mine.grad = gradient, None

    @torch.no_grad()
    def take_values(self) -> None:
        """Take the values of the original's parameters that learn."""
        torch._foreach_copy_(self._mine, self._theirs)


def learning(model: nn.Module) -> list[Tensor]:
    """List the parameters that require gradients."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@torch.no_grad()
def precision(models: Sequence[nn.Module], x: Tensor) -> AbstractContextManager[object]:
    """Choose what to run models in bfloat16 under: nothing, or autocast where a forward mixes dtypes and fails without it."""
    try:
        for model in models:
            model(x)
    except RuntimeError:
        return torch.autocast(x.device.type, torch.bfloat16)
    return nullcontext()


@contextmanager
def updating(
    student: nn.Module, teacher: nn.Module, source: Source, cuts: Sequence[Cut], rate: float, processes: Processes, fuses_until: float
) -> Iterator[Callable[..., Tensor]]:
    """Give a function that makes one update of ``student`` towards ``teacher``; on CUDA an update is one graph that is replayed.

    There copies of both models in bfloat16 do the work, by fused modules where these are faster, and the student's own parameters, in
    float32, take the steps by the mean gradients of all ``processes``. ``rate`` is the highest one. After the time ``fuses_until`` no model
    is fused.
    """
    device, parameters = next(student.parameters()).device, learning(student)
    half = HalfCopy(student) if device.type == "cuda" else None
    mine, theirs = (student, teacher) if half is None else (half.model, HalfCopy(teacher).model)
    made = made_ahead(iter(lambda: (source.draw(),), ()), device)
    chosen_precision: AbstractContextManager[object] = nullcontext()
    current_rate, current_taught = torch.zeros((), device=device), torch.zeros((), device=device)
    optimizer = Muon([{**group, "lr": current_rate} for group in parameter_groups(student)])
    used = [cut for cut in cuts if cut.kind != "other"]
    wanted_stream = Stream(theirs, used)
    pull = Pull(mine, wanted_stream.values, used, REACH)
    pull.taught = current_taught
    captured = Captured(parameters, captures=half is not None)

    def drawn() -> Tensor:
        (x,) = next(made)
        return x if half is None else x.bfloat16()

    def once(x: Tensor) -> Tensor:  # shape: ()
        with chosen_precision:
            with torch.no_grad():
                wanted = first_tensor(theirs(x))
            with torch.enable_grad():
                given = first_tensor(mine(x))
        error, difference, scale = relative_error(given.detach(), wanted)
        given.backward((difference * (OUTPUT_WEIGHT * scale)).to(given.dtype))
        if half is not None:
            half.give_gradients()
        processes.average([each.grad for each in parameters if each.grad is not None])
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if half is not None:
            half.take_values()
        return error

    def update(share: float = 0.0, taught: float = 0.0) -> Tensor:  # shape: ()
        """Make one update at this share of the highest rate, with this share of the entries between blocks taken from the teacher.

        Gives the error of what the model returned.
        """
        current_rate.fill_(share * rate)
        current_taught.fill_(taught)
        return captured(once, drawn())

    with ExitStack() as opened:
        opened.callback(captured.forget)
        opened.enter_context(closing(made))
        if half is not None:
            x = drawn()
            chosen_precision = precision((mine, theirs), x)
            for model, training in ((mine, "captured"), (theirs, False)):
                if isinstance(chosen_precision, nullcontext) and perf_counter() < fuses_until:
                    fuse(model, x, training=training)
        opened.enter_context(wanted_stream)
        opened.enter_context(pull)
        for _ in range(1 if half is None else WARM_UP + 1):  # until all is there that an update keeps, and on CUDA an update is a graph
            update()
        yield update


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
    student: nn.Module, teacher: nn.Module, samples: Samples, cuts: Sequence[Cut], settings: Settings, *, progress: Progress | None = None
) -> Reconstruction:
    """Fit the parameters of ``student``, in place, so that every block gives the output of the dense model's block.

    All parameters that require gradients and lie behind the first cut of kind "start" are trained: factors, biases, norms, scales and dense
    layers. Held-out samples judge the model at most ``LOOKS`` times. The state with the lowest relative error is kept, of those whose
    cosines are not below the start's lowest one; it may be the start. After an error or an interruption the student is as it was. Takes
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
        held_out = list(samples.held_out(settings.batch))
        processes.share([parameter for parameter in student.parameters() if parameter.is_floating_point()])
        if on_cuda and held_out:
            _compile(student, held_out[0], settings.batch)

        def judged() -> Fidelity:
            return processes.agreed(measure_fidelity(student, teacher, held_out, cuts))

        before = after = judged()
        if not math.isfinite(before.relative_error):
            raise DataError(f"{samples.name}: the model's outputs are no finite numbers, so there is nothing to fit to")
        clock = perf_counter()  # a second look, which has nothing to set up, is timed
        judged()
        look = processes.agreed(perf_counter() - clock)
        start, best = Copied(student), Copied(student)
        done, kept = 0, 0
        history = [(0, before.relative_error)]
        try:
            source = Source(samples.to_view(), settings.batch, device)
            torch.manual_seed(settings.seed + APART * processes.rank)
            rate, until = rate_for(before.relative_error, settings.rate), started + settings.fusing_seconds
            with updating(student, teacher, source, cuts, rate, processes, until) as update:
                left = processes.agreed(60 * settings.minutes - (perf_counter() - started))
                count = affordable_looks(LOOKS, left, look)
                updates = affordable(update, left - count * look, processes.agreed)
                source.expect(updates * settings.batch * processes.count)
                looks = moments(updates, count)
                for done in range(1, updates + 1):
                    # a machine that becomes slower still ends in time
                    spent = processes.agreed((perf_counter() - started) / (60 * settings.minutes))
                    share = min(1.0, max(done / (updates + 1), spent - SLACK))
                    update(_share(share), TAUGHT * (1 - share))
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


def _compile(student: nn.Module, samples: Tensor, views: int) -> None:
    """Compile the kernels of measurements and updates, as a run of few seconds has no time to compile them one after the other."""
    x = samples[:1].to(next(student.parameters()).device, torch.bfloat16).expand(views, *samples.shape[1:])
    half = HalfCopy(student).model
    with compiling():  # in which a forward may fail, on arbitrary numbers or for lack of autocast: it compiles its kernels later
        with suppress(Exception), torch.no_grad():
            run(student, samples)
        with suppress(Exception):
            first_tensor(half(x)).sum().backward()
    del half
    torch.cuda.empty_cache()  # what is free decides where the pictures are


def _share(done: float) -> float:
    """Give the share of the highest rate when this share of the run is done: up in a line, then down in a cosine."""
    return done / RISING if done < RISING else 0.5 + 0.5 * math.cos(math.pi * (done - RISING) / (1 - RISING))
