"""Multiplication by the factors of a model: finds the kernels and the packed weights, and runs them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flysurgery.gpu.kernel import current_device
from flysurgery.gpu.product import Product, product_of
from flysurgery.gpu.table import chosen_by_table, meet, rows_bucket
from flysurgery.gpu.weight_cache import derived_for_launch
from flysurgery.patterns import Architecture, Pattern


def run_product(
    x: Tensor,  # shape: (*batch, in_features)
    factors: Sequence[Tensor],  # shapes: (a, b, c, d), left to right; of several linears one after the other
    biases: Sequence[Tensor],  # shapes: (out_features,), one a linear, or none
    linears: int,
    mode: str,
    *,
    transposed: bool = False,
) -> Tensor:  # shape: (*batch, linears * out_features)
    """``x @ W.T + bias`` for one linear, or for several of one architecture side by side; on the current stream.

    ``transposed`` multiplies by W in place of its transpose: ``x @ W``, one linear, no bias. Any strides of x, any
    number of rows. Factors and biases may be wider than x; they are rounded when they are packed.
    """
    factors, biases = tuple(factors), tuple(biases)
    device_index = x.device.index
    if device_index != current_device():
        with torch.cuda.device(device_index):
            return run_product(x, factors, biases, linears, mode, transposed=transposed)
    rows = x.numel() // x.shape[-1]
    product = product_for(factors, linears, mode, device_index, rows, transposed)
    meet(product, x)
    if rows == 0:
        return x.new_empty((*x.shape[:-1], linears * product.architecture.out_features))
    packed, early = derived_for_launch(
        (product, transposed), factors + biases, lambda: product.pack(factors, biases, transposed), inference=False
    )
    return product.run(x, packed, bool(biases), early)


def product_for(factors: tuple[Tensor, ...], linears: int, mode: str, device_index: int, rows: int, transposed: bool) -> Product:
    """The kernels for factors of these shapes; the same object as long as the autotuned choices stay the same."""
    shapes = tuple(factor.shape for factor in factors[: len(factors) // linears])
    return _chosen(shapes, mode, linears, device_index, rows_bucket(rows), transposed)


@chosen_by_table
def _chosen(shapes: tuple[torch.Size, ...], mode: str, linears: int, device_index: int, rows: int, transposed: bool) -> Product:
    architecture = Architecture(tuple(Pattern(*shape) for shape in shapes))
    return product_of(architecture.transpose if transposed else architecture, mode, linears, device_index, rows)
