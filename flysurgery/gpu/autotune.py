"""Autotuning: time the candidates of the kernels that a computation meets, once, and remember the fastest."""

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.gpu.compile import SERIALIZED_WARNING
from flysurgery.gpu.device import device_obstacle, shared_limit_of
from flysurgery.gpu.factor_product import factor_configs, factor_product
from flysurgery.gpu.fused_linear import KINDS, FusedLinear
from flysurgery.gpu.modes import dtype_of
from flysurgery.gpu.tiling import Tiling, configs, tiling
from flysurgery.gpu.tuned_table import TunedCase, TunedEntry, cases_met, save_entries
from flysurgery.gpu.uncounted_writes import doubt

_MAX_CANDIDATES = 12
_REPLAYS = 9
_MAX_CALLS = 32


@dataclass(frozen=True)
class Tuning:
    """What autotuning found for one case: the fastest entry, the time of the default, and candidates that failed."""

    entry: TunedEntry
    default_us: float | None
    tried: int
    failures: tuple[str, ...]


def autotune(
    compute: Callable[[], object],
    *,
    progress: Callable[[int, int, str], None] | None = None,
) -> list[Tuning]:
    """Run ``compute`` once, and time every candidate of each kernel that it launches through the CUDA backend.

    ``autotune(lambda: model(x))``; a training step tunes the backward pass as well. The fastest configurations go into
    the user's table and are used from the next call on, for these numbers of rows, and for other numbers where nothing nearer was tuned.
    Takes about a second for each candidate the first time, mostly for compilation. Results do not change.

    Each candidate runs in a CUDA graph on rotating inputs that together exceed the L2 cache. One that does not compile or
    launch is left out; an error on the device itself, after which nothing else could run, is raised.

    Raises:
        BackendError: there is no CUDA device that the kernels run on, a graph is being captured, or no candidate runs.
    """
    obstacle = device_obstacle()
    if obstacle is not None:
        raise BackendError(f"nothing can be autotuned here: {obstacle}")
    if torch.cuda.is_current_stream_capturing() or torch.compiler.is_compiling():
        raise BackendError("nothing can be autotuned while a graph is captured or compiled; autotune before")
    with cases_met() as cases:
        compute()
    found = []
    for done, (case, device_index) in enumerate(cases.items()):
        if progress is not None:
            progress(done, len(cases), f"{case.kernel} {case.architecture} {case.mode}")
        with torch.cuda.device(device_index), torch.inference_mode():
            found.append(_tune(case, device_index))
    save_entries(tuning.entry for tuning in found)
    doubt()
    return found


def _tune(case: TunedCase, device_index: int) -> Tuning:
    times: dict[Any, float] = {}
    failures = []
    configs = _configs(case, device_index)[:_MAX_CANDIDATES]
    for config in configs:
        try:
            with warnings.catch_warnings():
                # Products that wait for each other are slower with other numbers of rows, even where they are not with these.
                warnings.filterwarnings("error", SERIALIZED_WARNING, RuntimeWarning)
                times[config] = _median_us(case, config, device_index)
        except (BackendError, RuntimeWarning, torch.OutOfMemoryError) as error:
            failures.append(f"{config}: {error}")
    if not times:
        raise BackendError(f"no configuration of {case.kernel} for {case.architecture} runs: {'; '.join(failures)}")
    fastest = min(times, key=times.__getitem__)
    return Tuning(TunedEntry(case, asdict(fastest), times[fastest]), times.get(configs[0]), len(configs), tuple(failures))


def _configs(case: TunedCase, device_index: int) -> Sequence[Any]:
    if case.kernel in KINDS:
        return configs(_tile(case), shared_limit_of(device_index))
    return factor_configs(case.architecture.patterns[0], case.mode, case.rows, shared_limit_of(device_index))


def _tile(case: TunedCase) -> Tiling:
    norm, gated = KINDS[case.kernel]
    tile = tiling(case.architecture, case.mode, case.linears, norm=norm, gated=gated)
    if isinstance(tile, str):
        raise BackendError(tile)
    return tile


def _bind(case: TunedCase, config: Any, random: Callable[..., Tensor], device_index: int) -> Callable[[Tensor], Tensor]:
    """One candidate with random weights, as a function of x."""
    linears = [[random(pattern.factor_shape) / pattern.c**0.5 for pattern in case.architecture] for _ in range(case.linears)]
    if case.kernel in KINDS:
        fused = FusedLinear(_tile(case), config, device_index)
        image = fused.pack([(left, right) for left, right in linears])
        activation = "silu" if fused.tile.gated else "none"
        return lambda x: fused.run(x, image, activation=activation, early=True)
    single = factor_product(case.architecture.patterns[0], case.mode, config, shared_limit_of(device_index))
    image = single.pack(linears[0][0])
    return lambda x: single.run(x, image)


def _median_us(case: TunedCase, config: Any, device_index: int) -> float:
    """Median time of a call, in microseconds, inputs and outputs cold where they are larger than the L2 cache."""
    random = partial(torch.randn, device=torch.device("cuda", device_index), dtype=dtype_of(case.mode))
    run = _bind(case, config, random, device_index)
    x = random((case.rows, case.architecture.in_features))
    y = run(x)
    bytes_moved = x.nbytes + y.nbytes
    calls = max(4, min(_MAX_CALLS, -(-2 * torch.cuda.get_device_properties(device_index).L2_cache_size // bytes_moved)))
    inputs = [x, *(x.clone() for _ in range(calls - 1))]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [run(each) for each in inputs]
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(outputs))
    return statistics.median(times)
