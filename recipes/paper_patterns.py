"""One factor by every implementation, on the patterns of Gonon et al. 2024, and the numbers of their tables and figures from rows.

The patterns follow the rule of their Appendix B.1.
"""

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import pandas as pd
import torch
from einops import rearrange
from recipe import Place, Run
from torch import Tensor

from flysurgery.bench import TIMED_MODES, Case, Record, in_mode, modes_of
from flysurgery.bench.ceilings import Work
from flysurgery.bench.measuring import NOISE, check, checked_rows
from flysurgery.bench.timing import sampler_by_clock
from flysurgery.errors import first_line
from flysurgery.factors import factor_to_dense, ks_einsum, to_blocks
from flysurgery.inference.clock import between_events
from flysurgery.ops import BACKENDS, Problem
from flysurgery.patterns import Architecture, Pattern

FIRST, LAST = "first", "last"
"""Batch-size-first: x of shape (rows, features), as models have it. Batch-size-last: (features, rows)."""

PRODUCT_ONLY = "bmm product only"  # the batched product of bmm on blocks that are ready, without the copies before and after it
CANDIDATES = ("dense", "bmm", "cuda", "einsum", "bsr", "sparse", PRODUCT_ONLY)
"""Where dense is left out, ratios are to bmm, which is timed twice."""

CHECKED_ROWS = 128

MOST_ENTRIES = {
    "dense": {"fp32": 1 << 25, "tf32": 1 << 25, "fp16": 1 << 30, "bf16": 1 << 30},
    "sparse": {"fp32": 1 << 18, "tf32": 1 << 18},
}
"""Larger matrices, by their entries or in CSR their nonzeros, would take most of a run of ``patterns``. ``large_rows`` measures them."""

LONG_MS = 1000.0  # calls of ``large_rows`` that take longer are timed once


def factor_case(
    place: Place, *, a: int, b: int, c: int, d: int, rows: int, mode: str, layout: str, candidates: tuple[str, ...], large: bool = False
) -> Case:
    """One factor in one layout, weights uniform with variance 1/(3c) and Gaussian x, the same in every call.

    Unless ``large`` are asked for they are left out.
    """
    pattern, checked = Pattern(a, b, c, d), checked_rows(rows, CHECKED_ROWS)
    generator = torch.Generator(device=place.device).manual_seed(place.protocol.seed)
    x = torch.randn(rows, pattern.in_features, generator=generator, device=place.device, dtype=TIMED_MODES[mode])
    factor = torch.empty(pattern.factor_shape, device=place.device).uniform_(-(c**-0.5), c**-0.5, generator=generator).to(x.dtype)
    truth = ks_einsum(x[checked].double(), factor.double())
    problem = Problem(Architecture((pattern,)), rows, x.dtype, place.device.type, allow_tf32=mode == "tf32")
    runs = {
        name: "left out: the table large has it"
        if is_large(name, pattern, mode) and not large
        else factor_run(name, factor, layout, problem)
        for name in candidates
    }
    arranged = x if layout == FIRST else x.T.contiguous()
    inputs, truths = dict.fromkeys(runs, arranged), dict.fromkeys(runs, truth)
    if PRODUCT_ONLY in runs:
        inputs[PRODUCT_ONLY] = blocks_of(arranged, pattern, layout).contiguous()
        truths[PRODUCT_ONLY] = truth.unflatten(1, (a, b, d))
    has_dense = not isinstance(runs.get("dense", ""), str) and not large
    entries = rows * (pattern.in_features + pattern.out_features) + pattern.nnz
    work = Work(x.element_size() * entries, rows * pattern.flops_per_row)
    return Case(runs, inputs, truths, checked, work, "dense" if has_dense else "bmm")


def is_large(name: str, pattern: Pattern, mode: str) -> bool:
    """Whether ``large_rows`` measures it, and ``factor_case`` leaves it out."""
    entries = pattern.nnz if name == "sparse" else pattern.in_features * pattern.out_features
    return entries > MOST_ENTRIES.get(name, {}).get(mode, math.inf)


def factor_run(name: str, factor: Tensor, layout: str, problem: Problem) -> Run | str:
    """An implementation with its weights prepared, or why it cannot run: x in ``layout`` to (rows, out_features), a view with LAST."""
    pattern = problem.architecture.patterns[0]
    if name == PRODUCT_ONLY:  # for an x that ``blocks_of`` made; it gives a view of shape (rows, a, b, d)
        blocks = to_blocks(factor).contiguous()
        if layout == FIRST:
            return lambda x: rearrange(torch.bmm(x, blocks.mT), "(a d) n b -> n a b d", d=pattern.d)
        return lambda x: rearrange(torch.bmm(blocks, x), "(a d) b n -> n a b d", d=pattern.d)
    if name == "cuda" and layout == LAST:
        return "no: our kernels take batch-size-first, as models have it"
    reason = BACKENDS[name].can_run(problem)
    if reason is not None:
        return reason
    return BACKENDS[name].bind((factor,), None) if layout == FIRST else _last(name, factor, pattern)


def blocks_of(x: Tensor, pattern: Pattern, layout: str) -> Tensor:
    """x as the batched product wants it: (a*d, rows, c), or (a*d, c, rows) with the batch last."""
    a, _, c, d = pattern.factor_shape
    return rearrange(x, "n (a c d) -> (a d) n c" if layout == FIRST else "(a c d) n -> (a d) c n", a=a, c=c, d=d)


def _last(name: str, factor: Tensor, pattern: Pattern) -> Run:
    """An implementation for x of shape (features, rows)."""
    if name == "einsum":
        return lambda x: torch.einsum("ipqj,iqjk->ipjk", factor, x.unflatten(0, (pattern.a, pattern.c, pattern.d))).flatten(0, 2).T
    if name == "bmm":
        blocks = to_blocks(factor).contiguous()
        return lambda x: rearrange(torch.bmm(blocks, blocks_of(x, pattern, LAST)), "(a d) b n -> (a b d) n", d=pattern.d).T
    prepare = factor_to_dense if name == "dense" else getattr(BACKENDS[name], "prepare")  # noqa: B009 - they work factor by factor
    stored = prepare(factor)
    if name in ("dense", "sparse"):
        return lambda x: (stored @ x).T
    return lambda x: rearrange(stored @ blocks_of(x, pattern, LAST).flatten(0, 1), "(a d b) n -> (a b d) n", b=pattern.b, d=pattern.d).T


ROWS = 25088  # 128 images of 196 tokens
REPEATS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
SIZES = (48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
BLOCKS = [(b, c) for b, c in itertools.product(SIZES, SIZES) if b == c or b == 4 * c or c == 4 * b]
FEWER_BLOCKS = [(b, c) for b, c in BLOCKS if {b, c} not in ({256, 64}, {512, 128}, {1024, 256})]
LIMIT = 2**31 - 1  # the most entries of x, y and the factor
GENERIC, LIBRARY = ["dense", "sparse"], ["bmm", "einsum", "bsr"]
SPECIAL, LAYOUTS = ["cuda", *LIBRARY], [FIRST, LAST]


def time_patterns() -> list[Record]:
    """The 627 patterns that the paper times: a = 1 with every d, and a > 1 with d in {4, 16, 64} and fewer blocks."""
    return _shuffled([*itertools.product((1,), BLOCKS, REPEATS), *itertools.product(REPEATS[1:], FEWER_BLOCKS, (4, 16, 64))])


def energy_patterns() -> list[Record]:
    return _shuffled(itertools.product((1, 4, 16, 32, 64), FEWER_BLOCKS, REPEATS[:12]))


def _shuffled(found: Iterable[tuple[int, tuple[int, int], int]]) -> list[Record]:
    """Shuffled, so that every beginning is a random subset, to which runs that go on add."""
    small = [(a, b, c, d) for a, (b, c), d in found if ROWS * a * d * max(b, c) <= LIMIT and a * b * c * d <= LIMIT]
    return [dict(zip("abcd", pattern, strict=True)) for pattern in random.Random(0).sample(small, len(small))]


def large_cases() -> list[Record]:
    """What the table ``patterns`` leaves out: a dense matrix of each size, then matrices in CSR, each kind from the smallest on."""
    found = time_patterns()
    of_size = {Pattern(**each).shape: each for each in reversed(found)}
    dense = sorted(of_size.values(), key=lambda each: math.prod(Pattern(**each).shape))
    sparse = sorted(found, key=lambda each: Pattern(**each).nnz)
    kinds = ("dense", dense), ("sparse", sparse)
    return [each | {"candidate": name} for name, cases in kinds for each in cases if is_large(name, Pattern(**each), "fp32")]


def large_rows(place: Place, *, a: int, b: int, c: int, d: int, candidate: str, rows: int) -> Iterator[Record]:
    """The rows of one rival in all modes and both layouts, by few calls.

    A dense product's time depends on the sizes alone, so all patterns whose matrix has the size have the time of this one. cuSPARSE's
    CSR products have no TF32, so mode tf32 has the time of fp32. Their rows say so.
    """
    pattern, found = Pattern(a, b, c, d), dict[tuple[str, str], Record]()
    others = (Pattern(**case) for case in time_patterns())
    alike = [each for each in others if candidate == "dense" and each.shape == pattern.shape and each != pattern]
    for mode, layout in itertools.product(modes_of("all", place.device), LAYOUTS):
        head = {"mode": mode, "layout": layout}
        if candidate == "sparse" and mode == "tf32":
            yield _taken_over(found["fp32", layout], "fp32, as CSR has no TF32") | head
        elif candidate == "sparse" or is_large(candidate, pattern, mode):
            found[mode, layout] = row = large_row(place, pattern, candidate, rows, mode, layout) | head
            yield row
            for a, b, c, d in (each.factor_shape for each in alike):
                yield _taken_over(row, f"{pattern}, a matrix of the same size") | {"a": a, "b": b, "c": c, "d": d}


def _taken_over(row: Record, whose: str) -> Record:
    return row | {"status": f"{row['status']}: the time of {whose}", "error": None} if row["median_ms"] else row


def large_row(place: Place, pattern: Pattern, name: str, rows: int, mode: str, layout: str) -> Record:
    """Check and time one rival by two calls, of which the shorter counts, or by one of more than ``LONG_MS``; bmm is the baseline."""
    a, b, c, d = pattern.factor_shape
    row: Record = {"launch": "eager", "error": None, "noise": None, "median_ms": None}
    with in_mode(mode), torch.no_grad():
        try:
            how = {"rows": rows, "mode": mode, "layout": layout, "candidates": ("bmm", name), "large": True}
            case = factor_case(place, a=a, b=b, c=c, d=d, **how)
            errors, statuses = check(case)
            row |= {"error": errors.get(name), "status": statuses[name]}
            if row["status"] != "ok":
                return row
            run: Any = case.runs[name]
            x = case.input(name)
            sample = between_events(partial(run, x), 1) if x.is_cuda else sampler_by_clock(run, x)
            samples = [sample()]
            samples += [sample()] if samples[0] < LONG_MS else []
        except RuntimeError as failure:
            return row | {"status": f"failed: {first_line(failure)}"}
    if len(samples) == 2:
        row["noise"] = noise = max(samples) / min(samples) - 1
        if noise > NOISE["cuda" if place.on_cuda else "cpu"]:
            row["status"] = f"noisy: two calls differ by {noise:.0%}"
    return row | {"median_ms": min(samples)}


STRUCTURED, BMM = "best of cuda, bmm, einsum, bsr < best of dense, sparse", "bmm < best of einsum, bsr, dense, sparse"
KERNEL, KERNEL_FIRST = "cuda < best of bmm, einsum, bsr, dense, sparse", "the same, batch-size-first alone"
CLAIMS = (
    (STRUCTURED, SPECIAL, GENERIC, LAYOUTS, {"fp32": "99.67 %, x6.57", "fp16": "86.95 %, x8.45"}),
    (BMM, ["bmm"], ["einsum", "bsr", *GENERIC], LAYOUTS, {"fp32": "92.66 %, x1.37", "fp16": "83.22 %, x1.83"}),
    (KERNEL, ["cuda"], [*LIBRARY, *GENERIC], LAYOUTS, {"fp32": "88.10 %, x1.39", "fp16": "36.69 %, x1.46"}),
    (KERNEL_FIRST, ["cuda"], [*LIBRARY, *GENERIC], [FIRST], {"fp32": "20.0 %, x1.28"}),
)
"""Tables 2 and 7, and 4 for the last: that the best of the first names is faster than the best of the second, in one layout or in the
better of both, and what the paper says. Its kernel takes the better of both layouts where ours has one. Its batch-size-last row of
Table 4 is 88.1 %, x1.39."""


COUNTS, QUARTILES = ("holds", "median factor", "patterns", "paper (A100)"), ("lower quartile", "median", "upper quartile", "patterns")


class Times:
    """Milliseconds of one mode: a row for each pattern (a, b, c, d), a column for each candidate and layout."""

    def __init__(self, records: Sequence[Record], mode: str, value: str = "median_ms") -> None:
        numbers = [*"abcd", value, "share_of_bound"]
        frame = pd.DataFrame(records, columns=[*numbers, "mode", "candidate", "layout"])
        self.rows = frame[frame["mode"] == mode].assign(**{name: pd.to_numeric(frame[name]) for name in numbers})
        self.table = self.rows.pivot_table(index=[*"abcd"], columns=["candidate", "layout"], values=value, aggfunc="last")

    def of(self, name: str, layout: str) -> Any:
        """The times of one candidate, not a number where it has none."""
        return self.table.get((name, layout), pd.Series(float("nan"), self.table.index))

    def best(self, names: Sequence[str], layouts: Sequence[str] = LAYOUTS) -> Any:
        """The shortest time among candidates and layouts."""
        return pd.concat([self.of(name, layout) for name in names for layout in layouts], axis=1).min(axis=1)


def figures(times: Times) -> dict[str, Any]:
    """The values behind the paper's figures (float32 / half precision) for each pattern, and how near times come to their bound."""
    generic, structured = times.best(GENERIC), times.best(SPECIAL)
    first = times.rows[times.rows["layout"] == FIRST]
    found = {
        "5, 9a, 14a: share of rewriting in bmm, batch-size-first": 1 - times.of(PRODUCT_ONLY, FIRST) / times.of("bmm", FIRST),
        "9b, 14b: the same, batch-size-last": 1 - times.of(PRODUCT_ONLY, LAST) / times.of("bmm", LAST),
        "6, 13: best of bmm, einsum, bsr / cuda, where structure pays": (times.best(LIBRARY) / times.best(["cuda"])).where(
            ~(generic <= structured)
        ),
        "10, 15: generic / structured": generic / structured,
        "11, 16: best of einsum, bsr / bmm": times.best(["einsum", "bsr"]) / times.best(["bmm"]),
        **{f"12, 17: {name}, first / last": times.of(name, FIRST) / times.of(name, LAST) for name in (*GENERIC, *SPECIAL)},
        **{f"bound over time of {name}, batch-size-first": first["share_of_bound"][first["candidate"] == name] for name in ("cuda", "bmm")},
    }
    return {name: kept for name, values in found.items() if len(kept := values.dropna())}


def print_claims(records: Sequence[Record]) -> None:
    """Print on how many patterns the paper's claims hold, by which median factor, and quartiles of what its figures show."""
    wins, quartiles = [], []
    for mode in dict.fromkeys(record["mode"] for record in records):
        times = Times(records, mode)
        for text, ours, theirs, layouts, paper in CLAIMS:
            factors = (times.best(theirs, layouts) / times.best(ours, layouts)).dropna()
            if factors.empty:
                continue
            won = factors[factors > 1]
            holds = f"{(factors > 1).mean():.1%}", f"x{won.median():.2f}", len(factors)
            wins.append(dict(zip(("mode", "claim", *COUNTS), (mode, text, *holds, paper.get(mode, "")), strict=True)))
        for name, values in figures(times).items():
            shares = (f"{each:.3g}" for each in values.quantile((0.25, 0.5, 0.75)))
            quartiles.append(dict(zip(("mode", "figure", *QUARTILES), (mode, name, *shares, len(values)), strict=True)))
    for found in (wins, quartiles):
        print(pd.DataFrame(found).to_string(index=False))


def print_energy(records: Sequence[Record]) -> None:
    """Print Figure 7: the energy of cuda over the least of bmm, einsum and bsr in either layout."""
    for mode in dict.fromkeys(record["mode"] for record in records):
        joules = Times(records, mode, "joules")
        ratios = (joules.best(["cuda"]) / joules.best(LIBRARY)).dropna()
        if len(ratios):
            share = float((ratios < 1).mean())
            print(f"{mode}: energy of cuda over the least of bmm, einsum, bsr: median {ratios.median():.2f}, below 1 on {share:.0%}")
            print(f"of {len(ratios)} patterns. Gonon et al. report a median of 0.85, and 72 %, on a V100")
