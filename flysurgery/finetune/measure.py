"""Measures a model during training, on held-out images: its accuracy, and how close it is to its teacher."""

from dataclasses import dataclass, replace
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, Subset

from flysurgery.errors import DataError
from flysurgery.evaluation import Accuracy, ImageData, evaluate
from flysurgery.evaluation.pictures import read_many
from flysurgery.fidelity import Fidelity, measure_fidelity
from flysurgery.finetune.state import sharded
from flysurgery.finetune.teacher import Teacher

if TYPE_CHECKING:
    from accelerate import Accelerator

MOST = {"cuda": 512, "cpu": 128}
"""How many held-out images are compared with the teacher, by the kind of device; they are spread evenly over all."""


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
    """Looks at a model on held-out images, where there are any; every process sees the same."""

    def __init__(self, data: ImageData | None, teacher: Teacher | None, accelerator: "Accelerator", batch_size: int) -> None:
        self._data, self._teacher, self._accelerator, self._batch_size = data, teacher, accelerator, batch_size
        self.images = [] if data is None or teacher is None else images_of(data, accelerator.device, batch_size)
        """What is compared with the teacher, in batches; empty where there is nothing to compare."""

    def look(self, model: nn.Module, bare: nn.Module, *, accuracy: bool = True) -> Look:
        """See how good a model is, prepared and bare."""
        return Look(self.accuracy(model) if accuracy else None, self.compared(bare, self.images) if self.images else None)

    def compared(self, bare: nn.Module, images: list[Tensor]) -> Fidelity:
        """Measure how close the outputs are to the teacher's."""
        assert self._teacher is not None
        return measure_fidelity(bare, self._teacher.model, images, self._teacher.cuts)

    def accuracy(self, model: nn.Module) -> Accuracy | None:
        """Measure the accuracy of a prepared model on all images; every process gets it. None without classes.

        Each process looks at its share. Where the weights themselves are shared out, every forward is one of all processes, so each
        looks at everything.
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
    most = MOST.get(device.type, MOST["cuda"])
    dataset: Any = data.dataset
    if isinstance(dataset, IterableDataset):
        found: list[Tensor | DataError] = [image for image, _ in islice(iter(dataset), most)]
    else:
        chosen = range(data.samples) if data.samples <= most else [index * data.samples // most for index in range(most)]
        found = list(read_many(lambda index: dataset[index][0], chosen))
    images = [each for each in found if isinstance(each, Tensor)]
    if not images:
        raise DataError(f"{data.name}: no held-out image can be read, the first for this reason: {next(iter(found), 'there are none')}")
    return list(torch.stack(images).split(batch_size))
