"""Measures how close a model's outputs are to those of the dense model: end to end, and block by block, without labels."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from flysurgery.calibration import main_output, run, unchanged_state
from flysurgery.errors import DataError
from flysurgery.fidelity.stream import Stream
from flysurgery.walker import Cut

ZERO = torch.zeros((), dtype=torch.float64, device="cpu")  # to which tensors of any device can be added
ENOUGH = 0.9  # a cosine below this means that the model needs a further fit


@dataclass(frozen=True)
class Fidelity:
    """Means over ``samples`` samples that nothing was fitted to; of the dense model itself cosines are 1 and errors 0.

    ``output_cosine`` is of pooled features, or of a classifier's scores. ``token_cosine`` is of the last tokens, without the class token
    and registers; None where there are none. ``relative_error`` is ``sqrt(sum|y' - y|² / sum|y|²)`` of the last tokens, or else of the
    output. ``agreement`` is the share of samples with the same top class; None where the output is not scores. ``blocks`` has the error
    after each block, ``sqrt(sum|x' - x|² / sum|x - mean x|²)``, with the mean over samples and tokens.
    """

    samples: int
    output_cosine: float
    token_cosine: float | None
    relative_error: float
    agreement: float | None
    blocks: tuple[tuple[str, float], ...]

    @property
    def lowest_cosine(self) -> float:
        """The lower of the output's and the tokens' cosine; NaN if one of them is NaN."""
        cosines = (self.output_cosine,) if self.token_cosine is None else (self.output_cosine, self.token_cosine)
        return math.nan if any(map(math.isnan, cosines)) else min(cosines)

    @property
    def is_enough(self) -> bool:
        return self.lowest_cosine >= ENOUGH

    def is_better_than(self, best: "Fidelity", start: "Fidelity") -> bool:
        """Say whether the relative error is below that of ``best``, and no cosine below the lowest one of ``start``."""
        return self.relative_error < best.relative_error and not self.lowest_cosine < start.lowest_cosine

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@torch.no_grad()
def measure_fidelity(student: nn.Module, teacher: nn.Module, batches: Iterable[Tensor], cuts: Sequence[Cut]) -> Fidelity:
    """Run both models over ``batches``, in eval mode, and compare their outputs. Both stay as they are.

    ``cuts`` are those of ``find_cuts``; without any, only the outputs are compared. Only sums are kept in memory, on the models' device,
    and read at the end.

    Raises:
        DataError: there are no samples, a model fails on a batch or gives no tensor, or the outputs differ in shape.
    """
    used = [cut for cut in cuts if cut.kind in ("block", "tokens")]
    prefix = int(getattr(student, "num_prefix_tokens", 0) or 0)
    places = [_Errors() for _ in used or ("the output",)]
    device = next(teacher.parameters()).device
    cosines = token_cosines = same = ZERO
    samples, token_rows, is_flat = 0, 0, False
    with unchanged_state(student), unchanged_state(teacher), Stream(student, used) as mine, Stream(teacher, used) as theirs:
        for batch in batches:
            batch = batch.to(device)
            wanted, given = (first_tensor(run(model, batch)).float() for model in (teacher, student))
            if wanted.shape != given.shape:
                raise DataError(f"the models give outputs of shapes {tuple(given.shape)} and {tuple(wanted.shape)}; they must be the same")
            samples += len(given)
            cosines = cosines + _cosine(given.flatten(1), wanted.flatten(1)).sum()
            is_flat = given.ndim == 2
            if is_flat:
                same = same + (given.argmax(1) == wanted.argmax(1)).sum()
            for number, errors in enumerate(places):
                if used:
                    given, wanted = mine.values[number].float(), theirs.values[number].float()
                errors.add(given, wanted)
            if used:
                given, wanted = (each[:, prefix:] if each.ndim == 3 else each for each in (given, wanted))
                token_cosines = token_cosines + _cosine(given, wanted).sum()
                token_rows += given[..., 0].numel()
    if not samples:
        raise DataError("the data to measure the fidelity with hold no samples")
    classes = getattr(teacher, "num_classes", None)
    return Fidelity(
        samples=samples,
        output_cosine=float(cosines) / samples,
        token_cosine=float(token_cosines) / token_rows if token_rows else None,
        relative_error=places[-1].to_size(),
        agreement=float(same) / samples if is_flat and (classes is None or classes > 0) else None,
        blocks=tuple((cut.fqn, errors.to_spread()) for cut, errors in zip(used, places, strict=False) if cut.kind == "block"),
    )


def first_tensor(output: object) -> Tensor:
    """Give the first tensor of numbers among what a model returned."""
    for leaf in pytree.tree_leaves(main_output(output)):
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf
    raise DataError(f"a comparison needs a model that gives a tensor, and this one gives {type(output).__name__}")


class _Errors:
    """Sums of the error at one place, and of the teacher's rows there; nothing else of a batch is kept."""

    def __init__(self) -> None:
        self._error = self._size = self._total = ZERO
        self._rows = 0

    def add(self, given: Tensor, wanted: Tensor) -> None:
        rows = wanted.flatten(0, -2)
        self._error = self._error + (given - wanted).square().sum()
        self._size = self._size + rows.square().sum(dtype=torch.float64)
        self._total = self._total + rows.sum(0, dtype=torch.float64)
        self._rows += len(rows)

    def to_size(self) -> float:
        """The error relative to the size of the rows."""
        error, size = float(self._error), float(self._size)
        return (error / size) ** 0.5 if size else 0.0

    def to_spread(self) -> float:
        """The error relative to how the rows differ from their mean, or to their size where all are equal."""
        error, size = float(self._error), float(self._size)
        spread = size - float(self._total.square().sum()) / max(1, self._rows)
        against = spread if spread > 1e-9 * size else size
        return (error / against) ** 0.5 if against else float(error > 0)


def _cosine(x: Tensor, y: Tensor) -> Tensor:
    """Give the cosine of the last dimension; 1 for two vectors that are both zero."""
    both_zero = (x == 0).all(-1) & (y == 0).all(-1)
    return torch.where(both_zero, 1.0, functional.cosine_similarity(x, y, dim=-1))
