"""Walk, plan and convert one model of every timm architecture file, vit-pytorch's classes, and transformers' classes for vision tasks.

    python recipes/survey_models.py timm --jobs 2 --out build/survey.csv    # or vit_pytorch, or transformers

Each model is built with random weights: timm's at their default arguments, transformers' by their default configurations, with few layers
where that is possible. Every linear of attention or a feed-forward block that the walk finds is planned as Monarch of four blocks, and the
planned weights are set to products of random factors. The model then computes in float64 and in float32, is converted, and computes again:
``error_ratio`` is the error of the converted model over that of the dense one in the same arithmetic. ``kept`` counts the layers of these
roles that stay dense, by reason. Models of more than 400 million parameters are walked and planned only. A model runs in a process of its
own, and models that the file has already are skipped, so that an interrupted survey goes on where it stopped; those of another version or
commit are surveyed anew.

Rows: recipes/results/survey.csv

Needs two CPU cores and ten to twenty minutes for each library.
"""

from __future__ import annotations

import copy
import multiprocessing
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields, replace
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any

import recipe
import torch
from survey_cases import Case, timm_cases, transformers_cases, vit_pytorch_cases
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from flysurgery.checkpoint import build_base
from flysurgery.cli.bench_run import BenchRun
from flysurgery.errors import FlysurgeryError, ModelError, OptionError
from flysurgery.factors import factors_to_dense
from flysurgery.surgery import Plan, apply, plan
from flysurgery.surgery.check import check_plan
from flysurgery.walker import example_input, walk

QUICK_CASES = "^deit_tiny_|^vit:ViT$|^DeiTForImageClassification$"
PACKAGES = {"timm": "timm", "vit_pytorch": "vit-pytorch", "transformers": "transformers"}
CASES = {"timm": timm_cases, "vit_pytorch": vit_pytorch_cases, "transformers": transformers_cases}
STARTING = Lock()
"""One process starts at a time: one that inherited another's pipe would keep it open after the other crashed."""

LARGEST = 400_000_000
"""Most parameters of a model that is built and converted."""

ROLES = ("qkv", "attn_out", "ffn_in", "ffn_out")


@dataclass
class Row:
    """What became of one model. Counts of layers by role are the walk's; shared modules count once."""

    family: str
    model: str
    exported: bool = False
    linears: int = 0
    qkv: int = 0
    attn_out: int = 0
    ffn_in: int = 0
    ffn_out: int = 0
    head: int = 0
    other: int = 0
    obstacles: str = ""  # of all linear maps, as "code count; ..."
    replaced: int = 0
    kept: str = ""  # reasons of layers of the four roles that stay dense
    converted: bool = False  # the conversion and a forward after it ran
    called: int = 0  # replaced modules that the forward called
    error_ratio: float | None = None
    output_kept: bool | None = None
    seconds: float = 0.0
    note: str = ""
    library: str = ""  # with its version


def survey(case: Case, tolerance: float) -> Row:
    """All steps for one model; what fails is noted in the row."""
    row = Row(case.family, case.name)
    started = time.perf_counter()
    try:
        _survey(case, row, tolerance)
    except FlysurgeryError as error:
        row.note = f"{type(error).__name__}: {error}"
    row.seconds = round(time.perf_counter() - started, 1)
    return row


def _survey(case: Case, row: Row, tolerance: float) -> None:
    skeleton = _skeleton(case)
    example = example_input(skeleton) if case.example is None else case.example()
    targets = walk(skeleton, example)
    row.exported, row.linears = True, len(targets)
    for role, count in Counter(target.role for target in targets).items():
        setattr(row, role, count)
    row.obstacles = _counted(obstacle.code for target in targets for obstacle in target.obstacles)
    roles = [role for role in ROLES if any(target.role == role for target in targets)]
    if not roles:
        row.note = "no linear layer belongs to attention or a feed-forward block"
        return
    made = plan(skeleton, roles=roles, example=example, targets=targets)
    row.replaced = len(made.replaced)
    row.kept = _counted(layer.reason.code for layer in made.layers if layer.reason is not None and layer.role in roles)
    size = sum(parameter.numel() for parameter in skeleton.parameters())
    if size > LARGEST:
        row.note = f"walked and planned only: it has {size / 1e6:.0f} million parameters"
        return
    torch.manual_seed(0)
    model = _wrapped(case, build_base(case.base, case.arguments)).eval()
    del skeleton
    _make_exact(made, model)
    _compare(made, model, example, row, tolerance)


def _counted(codes: Iterable[str]) -> str:
    return "; ".join(f"{code} {count}" for code, count in sorted(Counter(codes).items()))


def _skeleton(case: Case) -> nn.Module:
    try:
        with torch.device("meta"):
            return _wrapped(case, build_base(case.base, case.arguments, device="meta"))
    except ModelError:  # a constructor that computes something from its weights
        return _wrapped(case, build_base(case.base, case.arguments))


def _wrapped(case: Case, model: nn.Module) -> nn.Module:
    return model if case.wrap is None else case.wrap(model)


@torch.no_grad()
def _make_exact(made: Plan, model: nn.Module) -> None:
    """Set each planned weight to a product of random factors, of the size that it had."""
    dense = check_plan(made, model)
    for layer in made.replaced:
        weight = dense[layer.fqn].weight.flatten(1)
        for part in layer.parts:
            if part.architecture is not None:
                rows = weight[part.start : part.stop]
                product = factors_to_dense([torch.randn(each.factor_shape, dtype=torch.float64) for each in part.architecture])
                rows.copy_(product * (_rms(rows.double()) / _rms(product)))


@torch.no_grad()
def _compare(made: Plan, model: nn.Module, example: Any, row: Row, tolerance: float) -> None:
    inputs = _random_inputs(example[:1] if isinstance(example, Tensor) else example)
    truth = _outputs(copy.deepcopy(model).double(), tuple(_converted(each, torch.float64) for each in inputs))
    dense = _outputs(model, inputs)
    apply(made, model, verify=False)  # what follows shows the same
    called: set[str] = set()
    for layer in made.replaced:
        model.get_submodule(layer.fqn).register_forward_hook(lambda *_, fqn=layer.fqn: called.add(fqn))
    result = _outputs(model, inputs)
    row.converted = True
    row.called = len(called)
    row.error_ratio = round(_rms(result - truth) / max(_rms(dense - truth), 1e-30), 3)
    row.output_kept = bool(row.error_ratio <= tolerance)


def _random_inputs(example: Any) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(1)
    arguments = example if isinstance(example, tuple) else (example,)
    return pytree.tree_map_only(
        Tensor,
        lambda t: torch.randn(t.shape, generator=generator) if t.is_floating_point() else torch.zeros(t.shape, dtype=t.dtype),
        arguments,
    )


def _converted(value: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, value)


def _outputs(model: nn.Module, inputs: tuple[Any, ...]) -> Tensor:
    torch.manual_seed(2)
    leaves = pytree.tree_leaves(model(*inputs))
    return torch.cat([leaf.double().flatten() for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()])


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _work(case: Case, tolerance: float, pipe: Connection) -> None:
    warnings.simplefilter("ignore")
    try:
        row = survey(case, tolerance)
    except Exception as error:
        row = Row(case.family, case.name, note=f"CRASH {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300])
    pipe.send(row)


def in_process(case: Case, timeout: float, tolerance: float) -> Row:
    """Survey a model in a process of its own; one that crashes or gives no answer has a row that says so."""
    fork = multiprocessing.get_context("fork")  # the libraries are imported once
    with STARTING:
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=_work, args=(case, tolerance, sender), daemon=True)
        process.start()
        sender.close()
    try:
        if receiver.poll(timeout):
            return receiver.recv()
        return Row(case.family, case.name, seconds=timeout, note=f"CRASH: no answer within {timeout:.0f} s")
    except EOFError:
        return Row(case.family, case.name, note="CRASH: the process ended without an answer")
    finally:
        process.kill()
        process.join()


def main() -> None:
    parser = recipe.parser_of(__doc__)
    parser.add_argument("library", choices=tuple(CASES))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--quick", action="store_true", help="one small model of the library alone, to see that it runs")
    parser.add_argument("--fresh", action="store_true", help="survey all again, and replace the rows in the file")
    parser.add_argument("--only", type=recipe.expression, help="regular expression over the models' names")
    parser.add_argument("--jobs", type=recipe.count, default=1)
    parser.add_argument("--timeout", type=recipe.duration, default=240.0, help="seconds a model")
    parser.add_argument("--tolerance", type=recipe.duration, default=16.0, help="largest error_ratio at which the output counts as kept")
    arguments = parser.parse_args()
    cases = CASES[arguments.library]()
    package = PACKAGES[arguments.library]
    library = f"{package} {version(package)}"
    only = arguments.only or re.compile(QUICK_CASES if arguments.quick else "")
    chosen = [case for case in cases if only.search(case.name)]
    if not chosen:
        raise OptionError(f"--only {only.pattern} matches no model of {arguments.library}")
    torch.set_num_threads(1)  # as in the processes to come
    columns = [field.name for field in fields(Row)]
    with BenchRun(torch.device("cpu"), columns, arguments.out, fresh=arguments.fresh) as kept, ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = [case for case in chosen if not kept.has({"model": case.name, "library": library})]
        jobs = [pool.submit(in_process, case, arguments.timeout, arguments.tolerance) for case in waiting]
        try:
            for done in as_completed(jobs):
                row = replace(done.result(), library=library)
                kept.add([vars(row)], row.model)
                print(f"{row.seconds:6.1f} s  {row.model}  {row.replaced} replaced, ratio {row.error_ratio}  {row.note}", flush=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # an interruption does not wait for the rest
            raise


if __name__ == "__main__":
    recipe.main(main)
