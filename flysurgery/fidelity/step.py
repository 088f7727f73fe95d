"""One update of a reconstruction: views, the teacher's forward, the student's, the backward pass, the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flysurgery.calibration import Pictures
from flysurgery.fidelity.captured import WARM_UP, Captured
from flysurgery.fidelity.copies import HalfCopy, learning, precision
from flysurgery.fidelity.measure import first_tensor
from flysurgery.fidelity.optimizer import Muon, parameter_groups
from flysurgery.fidelity.settings import OUTPUT_WEIGHT, REACH, Settings
from flysurgery.fidelity.stream import Pull, Stream, relative_error
from flysurgery.fidelity.views import Source, variety, views
from flysurgery.walker import Cut


class Step(contextlib.AbstractContextManager["Step"]):
    """Makes updates of ``student`` towards ``teacher``; on CUDA the whole update is one graph that is replayed, in bfloat16.

    There copies of both models in bfloat16 do the work, and the student's own parameters, in float32, take the steps. Before each step
    ``average`` changes their gradients in place.
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        pictures: Pictures,
        cuts: Sequence[Cut],
        settings: Settings,
        rate: float,
        average: Callable[[Sequence[Tensor]], None],
    ) -> None:
        self._device = next(student.parameters()).device
        self._parameters = learning(student)
        self._half = HalfCopy(student) if self._device.type == "cuda" else None
        self._student = student if self._half is None else self._half.model
        self._teacher = teacher if self._half is None else HalfCopy(teacher).model
        self._precision: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self._pictures, self._source = pictures, Source(pictures, settings.batch, self._device)
        self._highest, self._average = rate, average
        self._rate, self._varied = torch.zeros((), device=self._device), torch.zeros((), device=self._device)
        self._optimizer = Muon([{**group, "lr": self._rate} for group in parameter_groups(student)])
        used = [cut for cut in cuts if cut.kind != "other"]
        self._theirs = Stream(self._teacher, used)
        self._mine = Pull(self._student, self._theirs.values, used, REACH)
        self._mine.taught = self._taught = torch.zeros((), device=self._device)
        self._captured = None if self._half is None else Captured(self._parameters)

    def __enter__(self) -> Step:
        self._theirs.__enter__()
        self._mine.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mine.__exit__(None, None, None)
        self._theirs.__exit__(None, None, None)
        if self._captured is not None:
            self._captured.forget()

    def expect(self, views: int) -> None:
        """Set how much the views of a picture differ, by how many views of all pictures there will be."""
        self._varied.fill_(variety(views / len(self._pictures)))

    def update(self, share: float, taught: float = 0.0) -> None:
        """Make one update at this share of the highest rate, with this share of the entries between blocks taken from the teacher."""
        self._rate.fill_(share * self._highest)
        self._taught.fill_(taught)
        self._source.advance()
        if self._captured is None:
            self._once()
        else:
            self._captured(self._once)

    def warm_up(self) -> None:
        """Make updates at a rate of zero, until all is there that an update keeps, and on CUDA an update is a graph."""
        if self._half is not None:
            self._source.advance()
            self._precision = precision((self._student, self._teacher), self._views())
        for _ in range(1 if self._half is None else WARM_UP + 1):
            self.update(0.0)

    def _views(self) -> Tensor:
        pictures, chosen = self._source.draw()
        x = views(pictures, chosen, self._varied)
        return x if self._half is None else x.bfloat16()

    def _once(self) -> Tensor:  # shape: ()
        """Make an update at the rate of now, and give the error of what the model returned."""
        x = self._views()
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
