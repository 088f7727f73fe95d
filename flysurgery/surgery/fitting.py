"""Fit one layer's parts to the inputs that it was seen to get, and judge them by others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flysurgery.factors import factors_to_dense
from flysurgery.layers import SplitLinear
from flysurgery.patterns import Architecture
from flysurgery.projection import Moments, OutputError, Projection, metric_of, output_error, project, project_calibrated
from flysurgery.surgery.calibration_report import RowCalibration


@dataclass(frozen=True)
class Inputs:
    """The moments of one layer's inputs: on samples to fit with, and on held-out ones."""

    fit: Moments
    held_out: Moments
    permuted: bool = False


class LayerFit:
    """The parts of one layer, one after the other; they share the inputs, and so the metric."""

    def __init__(self, inputs: Inputs, *, bias: bool) -> None:
        self._inputs = inputs
        self._metric = metric_of(inputs.fit, bias=bias)
        self._shifts: list[Tensor | None] = []
        self._notes: list[str] = []
        self._sweeps = 0
        none = OutputError(0.0, 0.0)
        self._error, self._plain, self._fitted = none, none, none

    def keep(self, weight: Tensor) -> None:
        """A part that stays dense: no error, nothing for its bias."""
        self._shifts.append(None)
        self._add(weight, weight, None, None)

    def project(self, weight: Tensor, architecture: Architecture) -> Projection:
        """Fit one part; its shift is kept for ``correct_biases``, its errors for ``row``."""
        found = project_calibrated(weight, architecture, self._metric)
        plain = found.projection if found.reason else project(weight, architecture)
        self._shifts.append(found.shift)
        self._sweeps = max(self._sweeps, len(found.errors) - 1)
        if found.reason is not None:
            self._notes.append(found.reason)
        self._add(weight, _product(found.projection), _product(plain), found.shift)
        return found.projection

    def correct_biases(self, new: nn.Module) -> None:
        """Add to the biases of the new module what its parts lose of the mean."""
        parts = list(new.children()) if isinstance(new, SplitLinear) else [new]
        for part, shift in zip(parts, self._shifts, strict=True):
            bias = part.bias
            if shift is not None and isinstance(bias, Tensor):
                with torch.no_grad():
                    bias.copy_(bias.cpu().to(torch.float64) + shift)

    def row(self) -> RowCalibration:
        """What is reported of the layer."""
        return RowCalibration(
            output_error=self._error.relative,
            plain_output_error=self._plain.relative,
            fit_error=self._fitted.relative,
            sweeps=max(self._sweeps, 0),
            shrinkage=self._metric.shrinkage,
            rows=self._inputs.fit.rows,
            permuted=self._inputs.permuted,
            note="; ".join(dict.fromkeys(self._notes)) or None,
        )

    def _add(self, weight: Tensor, product: Tensor, plain: Tensor | None, shift: Tensor | None) -> None:
        device = self._metric.gram.device
        matrix, product = weight.to(device, torch.float64), product.to(device, torch.float64)
        shift = None if shift is None else shift.to(device)
        error = output_error(matrix, product, shift, self._inputs.held_out)
        self._error += error
        self._plain += error if plain is None else output_error(matrix, plain.to(device), None, self._inputs.held_out)
        self._fitted += output_error(matrix, product, shift, self._inputs.fit)


def _product(projection: Projection) -> Tensor:
    return factors_to_dense([factor.detach().to("cpu", torch.float64) for factor in projection.factors])
