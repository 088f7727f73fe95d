"""What a model in training is held against: a teacher, whose outputs and blocks it imitates, and held-out images."""

import copy
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset

from flysurgery.calibration import main_output, run, unchanged_state
from flysurgery.errors import DataError, TrainingError
from flysurgery.evaluation import Accuracy, ImageData, check_comparable, common_cuts, evaluate, preparation
from flysurgery.evaluation.data import read_many
from flysurgery.fidelity import OUTPUT_WEIGHT, REACH, Fidelity, Pull, Stream, measure_fidelity, relative_error
from flysurgery.finetune.settings import Settings
from flysurgery.finetune.state import sharded
from flysurgery.inference import Groups, fuse
from flysurgery.surgery import classes_of
from flysurgery.walker import Cut

if TYPE_CHECKING:
    from accelerate import Accelerator

SCORES_WEIGHT = 0.5  # the weight of the teacher's scores, beside the classes' loss and the blocks' errors
EXACT = 1e-4  # up to this error, what comes before the first block counts as the teacher's own, and does not learn
FUSED = {"no": torch.float32, "bf16": torch.bfloat16}  # of a teacher's copy; in float16 the stream between the blocks may overflow
MOST = {"cuda": 512, "cpu": 128}  # held-out images that are compared with the teacher, spread evenly over all


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


@dataclass(frozen=True)
class Look:
    """What held-out images say of a model: its accuracy and its fidelity, None where they say nothing."""

    accuracy: Accuracy | None = None
    fidelity: Fidelity | None = None

    def columns(self) -> dict[str, float | None]:
        """Give what was seen for a row of the log."""
        seen = (self.accuracy, ("top1", "top5")), (self.fidelity, ("relative_error", "output_cosine", "token_cosine"))
        return {name: getattr(of, name, None) for of, names in seen for name in names}

    def __str__(self) -> str:
        words = [] if self.accuracy is None else [f"top-1 {self.accuracy.top1:.2%}"]
        if self.fidelity is not None:
            words += [f"error {self.fidelity.relative_error:.3f}", f"cosine {self.fidelity.output_cosine:.3f}"]
            words += [] if self.fidelity.token_cosine is None else [f"of tokens {self.fidelity.token_cosine:.3f}"]
        return ", ".join(words)

    @classmethod
    def of_json(cls, found: dict[str, Any]) -> "Look":
        right, close = found["accuracy"], found["fidelity"]
        blocks = () if close is None else tuple((name, error) for name, error in close["blocks"])
        return cls(None if right is None else Accuracy(**right), None if close is None else Fidelity(**close | {"blocks": blocks}))


class Judge:
    """Looks at a model on held-out images, where there are any; every process sees the same.

    ``images`` are compared with the teacher, in batches; empty where there is nothing to compare.
    """

    def __init__(self, data: ImageData | None, teacher: Teacher | None, accelerator: "Accelerator", batch_size: int) -> None:
        self._data, self._teacher, self._accelerator, self._batch_size = data, teacher, accelerator, batch_size
        self.images = [] if data is None or teacher is None else images_of(data, accelerator.device, batch_size)

    def look(self, model: nn.Module, bare: nn.Module, *, accuracy: bool = True) -> Look:
        """See how good a model is, prepared and bare."""
        return Look(self.accuracy(model) if accuracy else None, self.compared(bare, self.images) if self.images else None)

    def compared(self, bare: nn.Module, images: list[Tensor]) -> Fidelity:
        """Measure how close the outputs are to the teacher's."""
        assert self._teacher is not None
        return measure_fidelity(bare, self._teacher.model, images, self._teacher.cuts)

    def accuracy(self, model: nn.Module) -> Accuracy | None:
        """Measure the accuracy of a prepared model on all images; every process gets it. None without classes.

        Each process looks at its share, or at everything where weights are shared out, and every forward is one of all processes.
        """
        data, accelerator, size = self._data, self._accelerator, self._batch_size
        if data is None or not data.num_classes:
            return None
        started = perf_counter()
        if accelerator.num_processes == 1 or sharded(accelerator):
            return evaluate(model, data, batch_size=size)
        mine = range(accelerator.process_index, data.samples, accelerator.num_processes)
        found = Accuracy(0.0, 0.0, 0, 0.0)
        if mine:
            share = replace(data, dataset=Subset(data.dataset, list(mine)), samples=len(mine))
            found = evaluate(accelerator.unwrap_model(model), share, batch_size=size)
        counts = torch.tensor([found.top1 * found.samples, found.top5 * found.samples], device=accelerator.device)
        summed: Any = accelerator.reduce(counts, "sum")
        first, among = summed.tolist()
        return Accuracy(round(first) / data.samples, round(among) / data.samples, data.samples, perf_counter() - started)


def images_of(data: ImageData, device: torch.device, batch_size: int) -> list[Tensor]:
    """Read images of ``data`` into memory, in batches; those that cannot be read are left out."""
    count = min(data.samples, MOST.get(device.type, MOST["cuda"]))
    dataset: Any = data.dataset
    if isinstance(dataset, IterableDataset):
        found: list[Tensor | DataError] = [image for image, _ in islice(iter(dataset), count)]
    else:
        found = list(read_many(lambda index: dataset[index * data.samples // count][0], range(count)))
    images = [each for each in found if isinstance(each, Tensor)]
    if not images:
        raise DataError(f"{data.name}: no held-out image can be read, the first for this reason: {next(iter(found), 'there are none')}")
    return list(torch.stack(images).split(batch_size))
