"""Prune linear layers by magnitude, or by their inputs with the kept weights fitted to them, and reconstruct a pruned model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flysurgery.calibration import Inputs, Samples, inputs_of
from flysurgery.fidelity import Reconstruction, Settings, reconstruct
from flysurgery.projection import metric_of
from flysurgery.walker import find_cuts, survey

Choose = Callable[[Tensor, int], Tensor]
"""Takes scores of a layer's weights and how many weights the butterfly has; gives True where a weight is kept."""

ROWS = 32
"""Rows of a weight that are fitted at once: their systems of 660 unknowns in float64 take 110 MB."""


def largest(scores: Tensor, kept: int) -> Tensor:
    """Keep so many weights of the layer, those of the largest scores."""
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask.view(-1)[scores.flatten().topk(kept).indices] = True
    return mask


def two_of_four(scores: Tensor, _kept: int) -> Tensor:
    """Keep two of each four weights in a row."""
    groups = scores.unflatten(1, (-1, 4))
    return torch.ones_like(groups, dtype=torch.bool).scatter_(2, groups.topk(2, dim=2, largest=False).indices, False).flatten(1)


@torch.no_grad()
def prune(model: nn.Module, linears: Mapping[str, int], choose: Choose) -> None:
    """Set weights to zero by their magnitude. ``linears`` has the names of the layers, and how many weights the butterfly has in each."""
    for name, kept in linears.items():
        weight = model.get_parameter(f"{name}.weight")
        weight.mul_(choose(weight.abs(), kept))


def prune_to_inputs(
    model: nn.Module, linears: Mapping[str, int], choose: Choose, samples: Samples, minutes: float | None = None, seed: int = 0
) -> Reconstruction | None:
    """Prune block by block on the inputs from the pruned blocks before, and with ``minutes`` reconstruct; dropped weights stay zero.

    The score is Wanda's, a weight's magnitude times the norm of its input (M. Sun et al., arXiv:2306.11695). The kept weights of each row
    and its bias are then those of least squared error of the output, by the form that calibrated projections use. A reconstruction is that
    of ``flysurgery.fidelity``, which trains all other parameters of the model too.
    """
    teacher, masks = copy.deepcopy(model).requires_grad_(False), dict[str, Tensor]()
    for _, names in groupby(linears, lambda name: name.split(".")[:2]):
        block = list(names)
        for name, inputs in inputs_of(model, dict.fromkeys(block, 1), samples).items():
            masks[name] = _fit(model.get_submodule(name), linears[name], choose, inputs)
    if minutes is None:
        return None
    cuts = find_cuts(survey(model, samples.inputs[:2]))
    for name, mask in masks.items():
        parametrize.register_parametrization(model.get_submodule(name), "weight", _Masked(mask))
    device = next(model.parameters()).device
    done = reconstruct(model, teacher, samples, cuts, Settings.on(device, minutes, seed))
    for name in masks:
        parametrize.remove_parametrizations(model.get_submodule(name), "weight")
    return done


class _Masked(nn.Module):
    """A parametrization that keeps the weights at which ``mask`` is True."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


@torch.no_grad()
def _fit(layer: nn.Module, kept: int, choose: Choose, inputs: Inputs) -> Tensor:
    """Prune one layer in place, and fit what is kept; gives the mask."""
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    mask = choose(weight.abs() * inputs.fit.second.diagonal().sqrt().to(weight), kept)
    gram = metric_of(inputs.fit, bias=True).gram
    wanted = weight.to(gram)
    counts, order = mask.sum(1), mask.int().argsort(stable=True, dim=1, descending=True)
    found = torch.zeros_like(wanted)
    for rows in counts.argsort().split(ROWS):
        columns, product = order[rows, : int(counts[rows].max())], wanted[rows] @ gram
        is_kept = mask[rows].gather(1, columns)
        # rows keep different numbers of weights; the identity stands in for those that a row has less
        system = gram[columns[:, :, None], columns[:, None, :]] * (is_kept[:, :, None] & is_kept[:, None, :])
        system.diagonal(dim1=1, dim2=2).add_((~is_kept).to(gram))
        values = torch.cholesky_solve((product.gather(1, columns) * is_kept)[:, :, None], torch.linalg.cholesky(system))[:, :, 0]
        found[rows] = torch.zeros_like(product).scatter_(1, columns, values * is_kept)
    bias.add_(((wanted - found) @ inputs.fit.mean.to(gram)).to(bias))
    weight.copy_(found)
    return mask
