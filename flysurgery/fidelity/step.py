"""One update of a reconstruction: views, the teacher's forward, the student's, the backward pass, the optimizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flysurgery.calibration import Pictures
from flysurgery.fidelity.any_tokens import find_patch_dropout
from flysurgery.fidelity.copies import HalfCopy, learning, precision
from flysurgery.fidelity.measure import first_tensor
from flysurgery.fidelity.optimizer import Muon, parameter_groups
from flysurgery.fidelity.settings import OUTPUT_WEIGHT, REACH, Settings
from flysurgery.fidelity.stream import Pull, Stream, relative_error
from flysurgery.fidelity.views import Source, variety, views
from flysurgery.walker import Cut

LOOKED_AT = 4
"""Views by which it is found whether tokens may be left out."""


class Step(contextlib.AbstractContextManager["Step"]):
    """Makes updates of ``student`` towards ``teacher``; on CUDA the whole update is a graph that is replayed, in bfloat16.

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
        self._dropout = None
        if settings.thinned:
            self._dropout = find_patch_dropout(teacher, views(*self._source.draw(), self._varied)[:LOOKED_AT], used)
        self.modes = (False,) if self._dropout is None else (False, True)
        """Values of ``thinned`` that make a difference. Processes that work together need the same, as each update exchanges gradients."""
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}

    def __enter__(self) -> Step:
        self._theirs.__enter__()
        self._mine.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._mine.__exit__(None, None, None)
        self._theirs.__exit__(None, None, None)
        self._graphs.clear()

    def expect(self, views: int) -> None:
        """Set how much the views of a picture differ, by how many views of all pictures there will be."""
        self._varied.fill_(variety(views / len(self._pictures)))

    def update(self, share: float, taught: float = 0.0, *, thinned: bool = False) -> None:
        """Make one update at this share of the highest rate, with this share of the entries between blocks taken from the teacher.

        If it is ``thinned``, both models get a part of each image's tokens, where they take any set of tokens.
        """
        self._rate.fill_(share * self._highest)
        self._taught.fill_(taught)
        self._source.advance()
        thinned = thinned and True in self.modes
        if self._graphs:
            self._graphs[thinned].replay()
        else:
            self._once(thinned)

    def capture(self) -> None:
        """Capture an update of each mode as a CUDA graph, after three plain ones at a rate of zero; does nothing on other devices."""
        if self._device.type != "cuda":
            return
        self._rate.zero_()
        self._source.advance()
        self._precision = precision((self._student, self._teacher), self._views())
        side, pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()  # no graph needs what another one left
        graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        for thinned in self.modes:
            side.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(side):
                for _ in range(3):
                    self._once(thinned)
            torch.cuda.current_stream(self._device).wait_stream(side)
            graphs[thinned] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[thinned], pool=pool):
                self._once(thinned)
        self._graphs = graphs

    def settle(self) -> None:
        """Count a new version of every parameter, so that their packed copies are refreshed: a graph's replay counts none."""
        with torch.no_grad():
            for parameter in self._parameters:
                parameter.mul_(1.0)

    def _views(self) -> Tensor:
        pictures, chosen = self._source.draw()
        x = views(pictures, chosen, self._varied)
        return x if self._half is None else x.bfloat16()

    def _once(self, thinned: bool) -> None:
        x = self._views()
        if thinned and self._dropout is not None:
            self._dropout.draw(len(x))
            self._theirs.dropout = self._mine.dropout = self._dropout
        with self._precision:
            with torch.no_grad():
                wanted = first_tensor(self._teacher(x))
            with torch.enable_grad():
                given = first_tensor(self._student(x))
        self._theirs.dropout = self._mine.dropout = None  # where the models themselves run, they are judged with all tokens
        _, difference, scale = relative_error(given.detach(), wanted)
        given.backward((difference * (OUTPUT_WEIGHT * scale)).to(given.dtype))
        if self._half is not None:
            self._half.give_gradients()
        self._average([each.grad for each in self._parameters if each.grad is not None])
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._half is not None:
            self._half.take_values()
