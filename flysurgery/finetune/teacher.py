"""A model whose outputs and blocks are to be imitated."""

import copy
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from flysurgery.calibration import main_output, run, unchanged_state
from flysurgery.errors import TrainingError
from flysurgery.evaluation import check_comparable, common_cuts, preparation
from flysurgery.fidelity import OUTPUT_WEIGHT, REACH, Pull, Stream, relative_error
from flysurgery.finetune.settings import Settings
from flysurgery.inference import Groups, fuse
from flysurgery.surgery import classes_of
from flysurgery.walker import Cut

if TYPE_CHECKING:
    from accelerate import Accelerator

SCORES_WEIGHT = 0.5  # the weight of the teacher's scores, beside the classes' loss and the blocks' errors
EXACT = 1e-4  # up to this error, what comes before the first block counts as the teacher's own, and does not learn


class Teacher(ExitStack):
    """A model in eval mode, without gradients; ``cuts`` are where student and teacher are compared, none where their blocks differ.

    Its images, classes, and blocks where these are asked for, must be the student's; else TrainingError, DataError or SurgeryError says so.
    With ``fused`` a copy in that dtype with fused modules runs in its place, without autocast; ``model`` itself judges. ``only`` names the
    groups to fuse, as ``groups`` of an earlier run has them; None measures.
    """

    def __init__(
        self, model: nn.Module, student: nn.Module, settings: Settings, fused: torch.dtype | None = None, *, only: Groups | None = None
    ) -> None:
        super().__init__()
        check_comparable(student, model)
        cuts = () if settings.blocks_weight == 0 else _cuts_around_blocks(model, student)
        if settings.blocks_weight and not cuts:
            raise TrainingError(
                "the teacher's blocks are not those of the model by their names; give --blocks-weight 0 to imitate its outputs"
            )
        self.has_scores = classes_of(student) != 0
        self.cuts = _compared(model, student, cuts)
        self.weight = 1.0 if settings.blocks_weight is None else settings.blocks_weight
        given = settings.output_weight
        self.output_weight = (SCORES_WEIGHT if self.has_scores else OUTPUT_WEIGHT) if given is None else given
        self.model = model
        self.enter_context(unchanged_state(model))
        self._fast = None if fused is None else copy.deepcopy(model).to(fused)
        self.groups = [] if self._fast is None else fuse(self._fast, only=only)
        if not self.groups:
            self._fast = None
        self._stream = self.enter_context(Stream(model if self._fast is None else self._fast, self.cuts))

    def __call__(self, images: Tensor) -> Tensor:
        """Run the teacher, and keep its tensors at the cuts for ``pull``."""
        with torch.no_grad():
            if self._fast is None:
                return as_tensor(self.model(images))
            with torch.autocast(images.device.type, enabled=False):
                return as_tensor(self._fast(images.to(next(self._fast.parameters()).dtype)))

    def pull(self, student: nn.Module) -> Pull | None:
        """Make what pulls the student's blocks towards those of the teacher's last call; None where they are not compared."""
        return Pull(student, self._stream.values, self.cuts, REACH) if self.cuts else None


def fused_dtype(accelerator: "Accelerator") -> torch.dtype | None:
    """The dtype of the teacher's fused copy, that of the run; None for float16, in which the stream between the blocks may overflow."""
    return {"no": torch.float32, "bf16": torch.bfloat16}.get(accelerator.mixed_precision)


def as_tensor(output: object) -> Tensor:
    """Give the scores or tokens that a model returned."""
    found = main_output(output)
    if not isinstance(found, Tensor):
        raise TrainingError(f"training needs a model that returns one tensor, and this one returns {type(output).__name__}")
    return found


def _cuts_around_blocks(teacher: nn.Module, student: nn.Module) -> tuple[Cut, ...]:
    """Find the cuts to compare at: the teacher's around its blocks, where the student has all of its cuts and no others."""
    pairs = common_cuts(teacher, student)
    if not any(cut.kind == "block" for cut, _ in pairs):
        return ()
    for cut, given in pairs:
        if given.shape[1:] != cut.shape[1:]:
            without = "; with --blocks-weight 0 its scores alone are imitated" if classes_of(student) else ""
            raise TrainingError(
                f"the {cut.side} of {cut.fqn} has the shape {_text(given.shape)} in the model and {_text(cut.shape)} in the teacher; "
                f"give a teacher of the same widths{without}"
            )
    return tuple(cut for cut, _ in pairs)


def _compared(teacher: nn.Module, student: nn.Module, cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    """Give the cuts. The one before the first block counts as a block where the student's tensor differs from the teacher's."""
    images = torch.randn(2, *preparation(student).shape, generator=torch.Generator().manual_seed(0))
    starts = [cut for cut in cuts if cut.kind == "start"]
    found = []
    for model in (teacher, student):
        with torch.no_grad(), unchanged_state(model), Stream(model, starts) as stream:
            output = as_tensor(run(model, images))
            found.append((output.shape, [each.float().cpu() for each in stream.values.values()]))
    (wanted, theirs), (given, mine) = found
    if wanted != given:
        raise TrainingError(f"the teacher returns {_text(wanted)} and the model {_text(given)}; give a teacher that returns the same")
    differs = any(float(relative_error(x, y)[0]) > EXACT for x, y in zip(mine, theirs, strict=True))
    return tuple(replace(cut, kind="block") if differs and cut.kind == "start" else cut for cut in cuts)


def _text(shape: tuple[int, ...]) -> str:
    return f"(batch, {', '.join(map(str, shape[1:]))})"
