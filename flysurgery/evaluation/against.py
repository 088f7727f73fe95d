"""Measures how close one model is to another, on images without labels."""

from __future__ import annotations

import math
from pathlib import Path

from torch import nn

from flysurgery.calibration import Samples, samples_of, unchanged_state
from flysurgery.errors import DataError, OptionError, SurgeryError, WalkError
from flysurgery.evaluation.data import load_unseen, preparation
from flysurgery.fidelity import Fidelity, measure_fidelity
from flysurgery.inference import is_optimized
from flysurgery.surgery import classes_of, plan_of
from flysurgery.walker import Cut, find_cuts, survey


def compare(
    model: nn.Module, teacher: nn.Module, data: str | Path | Samples, samples: int | None = None, *, batch_size: int = 64
) -> Fidelity:
    """Measure the fidelity of ``model`` to ``teacher`` on ``samples`` images, by default 512 or as many as there are.

    ``data`` is what ``load_unseen`` takes, or gives. Nothing should have been fitted to it. Each model runs where it is, in its dtype and
    in eval mode, and stays as it is. Blocks are compared where one model is dense and both have the same modules, apart from what was
    converted. The last tokens are compared where they have the same name and shape in both.

    Raises:
        DataError: the models take other images or give outputs of other shapes, the data are not there or too few, or outputs are no
            finite numbers.
        SurgeryError: one of the models is optimized for inference, which leaves its blocks out.
        OptionError: ``samples`` below 2, or a batch size below 1.
    """
    if batch_size < 1:
        raise OptionError(f"batch_size must be at least 1, got {batch_size}")
    check_comparable(model, teacher)
    if isinstance(data, Samples):
        known = samples_of(data, count=samples, shape=preparation(teacher).shape)
    else:
        known = load_unseen(data, teacher, samples=samples)
    found = measure_fidelity(model, teacher, known.inputs.split(batch_size), _compared_cuts(model, teacher))
    numbers = (found.output_cosine, found.token_cosine or 0.0, found.relative_error, *(error for _, error in found.blocks))
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{known.name}: one of the two models gives outputs that are no finite numbers, so there is nothing to compare")
    return found


def check_comparable(model: nn.Module, teacher: nn.Module) -> None:
    """Check that two models take the same images, tell the same classes apart, and have their own blocks.

    Raises:
        DataError, SurgeryError: they do not; one sentence with both numbers.
    """
    for each in (model, teacher):
        if is_optimized(each):
            raise SurgeryError(
                "a model that is optimized for inference has no blocks to compare; put its own layers back first, with "
                "flysurgery.restore(model)"
            )
    mine, theirs = preparation(model), preparation(teacher)
    sizes = [f"{each.channels}x{each.height}x{each.width}" for each in (mine, theirs)]
    if sizes[0] != sizes[1]:
        raise DataError(f"the model takes images of {sizes[0]} and the one it is held against of {sizes[1]}; they must be the same")
    if (mine.mean, mine.std) != (theirs.mean, theirs.std):
        raise DataError("the two models normalize their images by another mean or standard deviation; they must be the same")
    classes = [classes_of(each) for each in (model, teacher)]
    widths = [getattr(each, "num_features", None) for each in (model, teacher)]
    if None not in classes and classes[0] != classes[1]:
        raise DataError(
            f"the model tells {classes[0]} classes apart and the one it is held against {classes[1]}; give both the same head, "
            "or none with num_classes=0"
        )
    if classes == [0, 0] and None not in widths and widths[0] != widths[1]:
        raise DataError(f"the model's features are {widths[0]} wide and the other model's {widths[1]}; they must be the same")


def common_cuts(model: nn.Module, other: nn.Module) -> list[tuple[Cut, Cut]]:
    """Pair cuts of ``model``, but those of kind "other", with the other model's in the same places.

    Where the two have not all cuts in the same places, these are the last tokens alone, or none. A model that cannot be traced, which
    can still run, has no cuts.
    """
    cuts, others = _cuts_by_place(model), _cuts_by_place(other)
    kinds = ("start", "block", "tokens") if cuts.keys() == others.keys() else ("tokens",)
    return [(cut, others[place]) for place, cut in cuts.items() if cut.kind in kinds and place in others]


def _cuts_by_place(model: nn.Module) -> dict[tuple[str, str], Cut]:
    """Find the model's cuts, each under its module's name and side."""
    try:
        with unchanged_state(model):
            return {(cut.fqn, cut.side): cut for cut in find_cuts(survey(model))}
    except WalkError:
        return {}


def _compared_cuts(model: nn.Module, teacher: nn.Module) -> tuple[Cut, ...]:
    """Find the cuts at which both are compared; none where they differ in shape.

    Their kinds are those of the dense model: the blocks of a converted one are not known, since its layers have no roles.
    """
    are_dense = [plan_of(each) is None for each in (model, teacher)]
    pairs = common_cuts(model, teacher) if are_dense == [True, False] else common_cuts(teacher, model)
    used = [pair for pair in pairs if any(are_dense) or pair[0].kind == "tokens"]
    return tuple(cut for cut, _ in used) if all(cut.shape[1:] == other.shape[1:] for cut, other in used) else ()
