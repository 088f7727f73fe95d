"""Times the multiplication of the linears of a transformer block, backend by backend."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from flysurgery.bench.ceilings import work_of
from flysurgery.bench.measuring import MEASURED, Case, Protocol, checked_rows, rows_of_case
from flysurgery.bench.rows import Job
from flysurgery.bench.timing import TIMED_MODES
from flysurgery.bench.variants import by_definition, dense_linear
from flysurgery.errors import PatternError
from flysurgery.layers import ButterflyLinear
from flysurgery.ops import BACKENDS, Problem, explain
from flysurgery.patterns import Architecture, named

BASELINE = "linear"  # the candidate that stands for the dense layer, an ``nn.Linear``
CHECKED_ROWS = 4096  # this many rows at either end are held against float64
LAYER = ("arch", "layer", "architecture", "out_features", "in_features", "density")
MULTIPLY_COLUMNS = (*LAYER, "rows", "mode", "device_type", "candidate", "backend", *MEASURED)
"""``candidate`` is ``linear`` (an nn.Linear), a backend with its weights prepared, or ``layer``: a ButterflyLinear as it stands in a
model, with the backend that it chose in ``backend``."""


def layer_sizes(width: int) -> dict[str, tuple[int, int]]:
    """Give the sizes (out, in) of the linears of a transformer block: q, k, v and output; the two of the FFN."""
    return {"square": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}


def multiply_jobs(arch: str, width: int, rows: int, mode: str, device: torch.device, protocol: Protocol) -> Iterator[Job]:
    """List the layers of a transformer block of the given width, each with every backend. Weights are random.

    ``rows`` counts tokens. The dense layer is the product of the same factors.

    Raises:
        OptionError: there is no architecture of that name.
        PatternError: it does not exist at this width for any of the layers.
    """
    missing: list[str] = []
    for layer, sizes in layer_sizes(width).items():
        try:
            architecture = named(arch, *sizes)
        except PatternError as error:
            missing.append(str(error))
            continue
        values = arch, layer, str(architecture), *sizes, architecture.density
        head = {**dict(zip(LAYER, values, strict=True)), "rows": rows, "mode": mode, "device_type": device.type}
        make = partial(multiply_case, architecture, rows, mode, device)
        key = head | {"candidate": BASELINE, "launch": protocol.on(device).launch}
        yield key, partial(rows_of_case, head, make, mode, protocol)
    if len(missing) == 3:
        raise PatternError(f"no layer of width {width} has an architecture '{arch}': {missing[0]}")


def multiply_case(architecture: Architecture, rows: int, mode: str, device: torch.device) -> Case:
    """Make every backend of one layer ready, beside the dense layer of the same product."""
    dtype = TIMED_MODES[mode]
    layer = ButterflyLinear(architecture, device=device, dtype=dtype).requires_grad_(False)
    x = torch.randn(rows, architecture.in_features, device=device, dtype=dtype)
    problem = Problem(architecture, rows, dtype, device.type, bias=True, allow_tf32=device.type == "cuda" and mode == "tf32")
    linear, plain = dense_linear(layer), by_definition(layer)
    runs: dict[str, Callable[[Tensor], Tensor] | str] = {BASELINE: linear, "layer": layer}
    for name, backend in BACKENDS.items():
        runs[name] = backend.can_run(problem) or backend.bind(tuple(layer.factors), layer.bias)
    checked = checked_rows(rows, CHECKED_ROWS)
    dense, own = work_of(linear, x), work_of(plain, x)
    truth = plain.double()(x[checked].double())
    works = {name: dense if name in (BASELINE, "dense") else own for name in runs}
    notes = {"backend": {"layer": explain(problem).choice} | {name: name for name in BACKENDS}}
    return Case(runs, x, truth, checked, works, BASELINE, notes=notes)
