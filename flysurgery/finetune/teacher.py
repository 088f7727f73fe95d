"""A model whose scores and blocks are to be imitated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flysurgery.errors import TrainingError
from flysurgery.evaluation import preparation
from flysurgery.finetune.settings import Settings
from flysurgery.layers import ButterflyLinear, SplitLinear


class Outputs:
    """Keeps what the named modules of a model give in its last forward, until ``close``."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        self.last: dict[str, Tensor] = {}
        self._handles = [model.get_submodule(name).register_forward_hook(self._keep(name)) for name in names]

    def _keep(self, name: str) -> Any:
        def hook(module: nn.Module, inputs: object, output: Any) -> None:
            self.last[name] = output[0] if isinstance(output, tuple) else output

        return hook

    def close(self) -> None:
        """Stop listening and let the tensors go."""
        for handle in self._handles:
            handle.remove()
        self.last.clear()


class Teacher:
    """A model in eval mode, without gradients; ``blocks`` are those whose outputs student and teacher have in common."""

    def __init__(self, model: nn.Module, student: nn.Module, settings: Settings) -> None:
        """Check that the teacher goes with the student.

        Raises:
            TrainingError: other classes or images, or blocks are asked for and it has others; one sentence.
        """
        check_teacher(model, student)
        names, theirs = blocks_of(student), blocks_of(model)
        alike = names == theirs and bool(names)
        if settings.blocks_weight and not alike:
            raise TrainingError(
                f"the teacher has {len(theirs)} blocks and the model {len(names)}, not the same ones by their names; "
                "give --blocks-weight 0 to imitate its scores alone"
            )
        self.weight = float(alike) if settings.blocks_weight is None else settings.blocks_weight
        self.blocks = names if self.weight else ()
        self.model = model
        self._modes = {module: module.training for module in model.modules()}
        model.eval()
        self._outputs = Outputs(model, self.blocks)

    def __call__(self, images: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The scores and the blocks' outputs."""
        with torch.no_grad():
            scores = self.model(images)
        return scores, dict(self._outputs.last)

    def close(self) -> None:
        """Leave the teacher as it was."""
        self._outputs.close()
        for module, mode in self._modes.items():
            module.training = mode


def check_teacher(teacher: nn.Module, student: nn.Module) -> None:
    """See that the teacher tells the same classes apart in the same images.

    Raises:
        TrainingError: it does not; the message gives both numbers.
    """
    classes = tuple(getattr(model, "num_classes", None) for model in (teacher, student))
    if None not in classes and classes[0] != classes[1]:
        raise TrainingError(f"the teacher tells {classes[0]} classes apart and the model {classes[1]}; they must be the same")
    theirs, mine = preparation(teacher), preparation(student)
    sizes = [f"{each.channels}x{each.height}x{each.width}" for each in (theirs, mine)]
    if sizes[0] != sizes[1]:
        raise TrainingError(f"the teacher takes images of {sizes[0]} and the model of {sizes[1]}; they must be the same")
    if (theirs.mean, theirs.std) != (mine.mean, mine.std):
        raise TrainingError(
            "the teacher's images are normalized by another mean or standard deviation than the model's; they must be the same"
        )


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """The blocks that hold linear layers, converted or not: for each layer, the nearest numbered module around it that is called.

    Lists are never called, and a chain is no block but holds them.
    """
    modules = dict(model.named_modules())
    found: dict[str, None] = {}
    for fqn, module in modules.items():
        if not isinstance(module, nn.Linear | ButterflyLinear | SplitLinear):
            continue
        parts = fqn.split(".")
        for stop in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:stop])
            if parts[stop - 1].isdigit() and not isinstance(modules[name], nn.ModuleList | nn.Sequential | SplitLinear):
                found.setdefault(name)
                break
    return tuple(found)
