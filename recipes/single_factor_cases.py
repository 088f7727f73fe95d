"""What the recipes on single factors share: small patterns, inputs, the product by batched matrices, compiling ahead in parallel."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch import Tensor

from flysurgery.errors import BackendError
from flysurgery.ops.cuda.cubins import find_cubin
from flysurgery.ops.cuda.factor_grad import FactorGrad
from flysurgery.ops.cuda.single import SingleFactor
from flysurgery.patterns import Pattern

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "tf32": torch.float32, "fp32": torch.float32, "exact": torch.float32}
Job = tuple[str, tuple[tuple[str, int], ...], str, str]


def grid_patterns() -> Iterator[Pattern]:
    """Small, odd and large patterns."""
    for a, d, (b, c) in itertools.product((1, 2, 6), (1, 2, 3, 5), ((3, 5), (16, 16), (48, 192), (64, 64), (192, 48))):
        yield Pattern(a, b, c, d)
    yield from (Pattern(*p) for p in ((1, 64, 64, 4), (2, 48, 96, 6), (1, 33, 20, 7), (1, 64, 48, 8), (1, 40, 24, 12), (1, 64, 64, 16)))
    yield from (
        Pattern(*p) for p in ((1, 17, 19, 17), (1, 48, 48, 24), (2, 64, 64, 32), (1, 48, 64, 64), (1, 16, 32, 128), (1, 1024, 256, 2))
    )
    yield from (
        Pattern(*p) for p in ((1, 256, 1024, 4), (1, 384, 384, 1), (1, 1024, 1024, 3), (2, 256, 256, 16), (1, 20, 20, 20), (1, 9, 40, 11))
    )


def compile_job(job: Job) -> None:
    """Put one kernel into the cache folder."""
    source, defines, arch, name = job
    try:
        find_cubin(source, dict(defines), arch=arch, name=name)
    except BackendError as error:
        print(f"not compiled ahead: {source} {dict(defines)}: {error}", flush=True)


def compile_all(jobs: set[Job]) -> None:
    """Compile in parallel what is not cached yet."""
    start = time.time()
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_job, sorted(jobs), chunksize=4))
    print(f"compiled {len(jobs)} kernels in {time.time() - start:.0f} s", flush=True)


def single_jobs(single: SingleFactor, arch: str, misaligned: bool) -> set[Job]:
    """The kernels that one product needs."""
    vectors = {single.tile.x_vector} | ({single.tile.element_bytes} if misaligned else set())
    return {("single_factor.cu", tuple(single.tile.defines(v).items()), arch, "single_factor") for v in vectors}


def grad_jobs(product: FactorGrad, arch: str, misaligned: bool) -> set[Job]:
    """The kernels that one gradient needs."""
    tile = product.tile
    vectors = {(tile.x_vector, tile.dy_vector)} | ({(tile.element_bytes, tile.dy_vector)} if misaligned else set())
    portable = {("factor_grad.cu", tuple(tile.defines(*pair, bias=False).items()), arch, "factor_grad") for pair in vectors}
    tiles = [] if product.wgmma_tile is None else [product.wgmma_tile]
    wgmma = {("factor_grad_wgmma.cu", tuple(tile.defines(bias=False).items()), arch, "factor_grad") for tile in tiles}
    return portable | wgmma | {("factor_grad_sum.cu", (("PARTS", 1), ("VECTOR", vector)), arch, "factor_grad_sum") for vector in (1, 4)}


def random_x(rows: int, pattern: Pattern, dtype: torch.dtype, kind: str, generator: torch.Generator) -> Tensor:
    """Rows of one kind: normal, ranges of magnitudes, single huge elements, zeros first, integers."""
    shape = (rows, pattern.in_features)
    if kind == "integer":
        return torch.randint(-1, 2, shape, generator=generator, device="cuda").to(dtype)
    x = torch.randn(shape, generator=generator, device="cuda")
    if kind == "ranges":
        low, high = (-20, 13) if dtype == torch.float32 else (-4, 5)
        x *= 2.0 ** torch.randint(low, high, (rows, 1), generator=generator, device="cuda")
    if kind == "huge":
        x[torch.arange(rows), torch.randint(0, pattern.in_features, (rows,), generator=generator, device="cuda")] = 1e30
    if kind == "zeros first":
        x.view(rows, pattern.a, pattern.c, pattern.d)[:, :, : pattern.c // 2] = 0
        x *= 1e-12
    if kind == "tiny":
        x *= 1e-34
    return x.to(dtype)


def bmm(x: Tensor, blocks: Tensor, pattern: Pattern) -> Tensor:
    """Batched products with permuted copies, as Gonon et al. time them."""
    a, _, c, d = pattern.factor_shape
    columns = x.unflatten(-1, (a, c, d)).permute(1, 3, 0, 2).flatten(0, 1)
    return torch.bmm(columns, blocks.mT).unflatten(0, (a, d)).permute(2, 0, 3, 1).flatten(1)
