"""Models that are optimized for training: the same gradients, what stays, the way back, and what is done with such models."""

import copy
import functools
import json
from collections.abc import Callable
from functools import partial
from operator import methodcaller
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

import pytest
import timm
import torch
from timm.optim._optim_factory import create_optimizer_v2
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrize import register_parametrization
from torch.optim.swa_utils import AveragedModel

import flysurgery
from flysurgery import ops
from flysurgery.errors import InferenceError
from flysurgery.inference import clock
from tests.inference.models import SMALL, images, left, saved
from tests.support.composed import Composed
from tests.support.processes import two_processes

pytestmark = pytest.mark.usefixtures("faster")

INSIDE = [f"blocks.{n}.{part}" for n in (0, 1) for part in ("attn", "attn.qkv", "attn.proj", "mlp.fc2")]
ALL = {"patch_embed", "patch_embed.proj", *INSIDE, "norm"}


def learning(*, convert: bool = False, **options: Any) -> nn.Module:
    return copy.deepcopy(_learning(convert, tuple(options.items())))


@functools.cache
def _learning(convert: bool, options: tuple[tuple[str, Any], ...]) -> nn.Module:
    torch.manual_seed(0)
    arguments = SMALL | dict(options)
    model = timm.create_model("vit_tiny_patch16_224", **arguments)
    if convert:
        flysurgery.convert(model, "monarch", base="vit_tiny_patch16_224", base_args=arguments)
    return model.train()


def gradients(model: nn.Module, x: Tensor, autocast: bool = False) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x)
    y.double().square().sum().backward()
    return {"result": y.detach()} | {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Relative to each gradient's size; that of a bias of k, which is zero in truth, to that of the largest."""
    assert found.keys() == expected.keys()
    least = 1e-6 * max(float(each.norm()) for each in expected.values())
    return {name: float((found[name].double() - each).norm()) / max(float(each.norm()), least) for name, each in expected.items()}


@pytest.mark.parametrize(
    ("options", "fused", "left_out"),
    [
        ({}, ALL, {}),
        ({"convert": True, "init_values": 0.5}, ALL, {}),
        ({"reg_tokens": 4, "no_embed_class": True, "pre_norm": True}, ALL | {"norm_pre"}, {}),
        ({"class_token": False, "global_pool": "avg"}, ALL - {"norm"} | {"fc_norm"}, {}),
        ({"num_classes": 0}, ALL, {"norm": "result"}),
        ({"pos_drop_rate": 0.5}, ALL, {"patch_embed": "dropout"}),
        ({"drop_path_rate": 0.5}, ALL, dict.fromkeys(INSIDE[4:], "dropout")),
        *(({f"{kind}_drop_rate": 0.5}, ALL, dict.fromkeys(INSIDE, "dropout")) for kind in ("proj", "attn")),
    ],
)
def test_gradients_stay_and_so_do_results_of_the_model_and_what_drops_something(
    options: dict[str, Any], fused: set[str], left_out: dict[str, str]
) -> None:
    model = learning(**options).double()
    x = images(model, 3).double()

    def seeded() -> dict[str, Tensor]:
        torch.manual_seed(0)
        return gradients(model, x)

    before, names = seeded(), [*model.state_dict()]
    report = flysurgery.optimize(model, x, training=True)
    assert {row.fqn for row in report.fused} == fused - {*left_out} and left(report) == left_out
    assert max(distance(seeded(), before).values()) < 1e-12
    assert [*model.state_dict()] == names
    model.get_submodule("blocks.0").register_forward_hook(lambda *_: None)  # on a block itself, hooks may be there
    assert max(distance(seeded(), before).values()) < 1e-12
    assert report.restore() > 0
    assert max(distance(seeded(), before).values()) == 0


def test_under_autocast_errors_are_those_of_the_own_modules() -> None:
    model = learning()
    x = images(model, 8)
    truth = gradients(copy.deepcopy(model).double(), x.double())
    plain = distance(gradients(model, x, autocast=True), truth)
    with torch.autocast("cpu", torch.bfloat16):
        report = flysurgery.optimize(model, x, training=True)
    assert report.dtype == "bfloat16" and report.fused
    fused = distance(gradients(model, x, autocast=True), truth)
    ratios = {name: fused[name] / error for name, error in plain.items()}
    assert max(ratios.values()) < 4 and median(ratios.values()) < 1.5  # the stream between blocks is bfloat16, not float32


BLOCK = 3
FUSED = 2 * BLOCK + 1
"""The operations with fused gradients of both blocks, and of the last norm."""


class Case(NamedTuple):
    """A model that was optimized in float32 and is float64 now, one that was not, images, and the operations that have run fused."""

    model: nn.Module
    plain: nn.Module
    x: Tensor
    ran: list[str]

    def check(self, fused: int = FUSED, **options: Any) -> None:
        """Results and gradients are equal, and this many operations run fused."""
        self.ran.clear()
        found = gradients(self.model, self.x, **options)
        assert len(self.ran) == fused
        assert max(distance(found, gradients(self.plain, self.x, **options)).values()) < 1e-10


def noting(ran: list[str], own: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which notes the operations that it has run."""
    return lambda x, operation: ran.append(operation.form[0]) or own(x, operation)


@pytest.fixture
def case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Case:
    model, ran = learning(convert=getattr(request, "param", True), init_values=0.5), []
    for name in ("trained", "trained_with_x"):
        monkeypatch.setattr(ops, name, noting(ran, getattr(ops, name)))
    x, plain = images(model, 4), copy.deepcopy(model).double()
    flysurgery.optimize(model, x, training=True)
    ran.clear()
    return Case(model.double(), plain, x.double(), ran)


def test_hooks_on_a_norm_run_once(case: Case) -> None:
    seen = list[Tensor]()
    case.model.get_submodule("norm").register_forward_hook(lambda module, given, result: seen.append(result))
    case.check()
    with torch.no_grad():
        case.model(case.x)
    assert len(seen) == 2


def test_a_rate_that_is_set_later_counts() -> None:
    model = learning()
    x = images(model, 3)
    flysurgery.optimize(model, x, training=True)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    seen = []
    for _ in range(2):
        torch.manual_seed(3)
        seen.append(gradients(model, x)["result"])
    assert torch.equal(*seen) and not torch.equal(seen[0], gradients(model.eval(), x)["result"])


def test_measuring_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs in it, also with inputs that have no gradients, and on the model's own statistics and random numbers."""
    monkeypatch.setattr(clock, "medians_ms", lambda ways, inputs, **_: [way(*inputs) and n for n, way in enumerate(ways)][::-1])

    def step(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return self.model(self.norm(torch.where(mask, functional.dropout(x), 0.0)))

    norm = nn.BatchNorm2d(3)
    model = Composed(step, model=learning(), norm=norm, same=nn.Sequential(norm))  # one module under two names
    x = images(model.model)
    own, before = [*model.parameters(), *model.buffers()], [torch.get_rng_state(), *map(torch.clone, model.buffers())]
    assert flysurgery.optimize(model, (x, x > 0), training=True).fused
    assert all(one is other for one, other in zip((*model.parameters(), *model.buffers()), own, strict=True))
    assert all(map(torch.equal, (torch.get_rng_state(), *model.buffers()), before))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_other_values_are_refused_and_weights_may_be_on_meta() -> None:
    with pytest.raises(InferenceError, match="training must be False, True or 'captured', got 'eager'"):
        flysurgery.optimize(learning(), training="eager")  # pyright: ignore[reportArgumentType]
    report = flysurgery.optimize(learning().to("meta"), training=True)
    assert {row.group for row in report.fused} == {"patches", "qkv", "attention", "attn_out", "ffn", "norm"}


def moved(model: nn.Module) -> None:
    state = model.state_dict()
    model.to("meta")
    model(torch.empty(2, 3, 32, 32, dtype=torch.float64, device="meta")).sum().backward()
    model.to_empty(device="cpu").load_state_dict(state)


def frozen(model: nn.Module, learning: str | tuple[str, ...]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(learning))


def hooked(model: nn.Module) -> None:
    model.get_submodule("blocks.0.mlp.fc1").register_forward_hook(lambda module, given, result: result.tanh())


def shared(model: nn.Module) -> None:
    first, last = cast(Any, model.blocks)
    last.mlp.fc1.weight, last.norm1.weight, last.norm2.bias = first.mlp.fc1.weight, first.norm2.weight, first.mlp.fc2.bias
    first.attn.proj.bias = None


def parametrized(model: nn.Module) -> None:
    for name in ("blocks.0.mlp.fc1", "blocks.1.norm1"):
        register_parametrization(model.get_submodule(name), "weight", nn.Tanh())


def evaluated_with_rates(model: nn.Module) -> None:
    for module in model.eval().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5


def copied_with_a_forward(model: nn.Module) -> nn.Module:
    copied = copy.deepcopy(model)
    copied.get_submodule("blocks.1.mlp.act").forward = torch.tanh
    return copied


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: each + 0.1 for name, each in model.state_dict().items()}, assign=True)


CHANGES: dict[Any, int] = {
    saved: FUSED,
    moved: FUSED,
    partial(frozen, learning=("patch", "blocks.0.attn", "blocks.1.mlp.fc2.b", "blocks.1.norm1.w")): FUSED,
    assigned: FUSED,
    shared: FUSED,
    parametrized: FUSED - 1,
    hooked: FUSED - BLOCK,
    copied_with_a_forward: FUSED - BLOCK,
    evaluated_with_rates: FUSED,
    methodcaller("set_grad_checkpointing", True): FUSED + 2 * BLOCK,
    partial(torch.compile, backend="aot_eager"): 2 * BLOCK,  # a compiler traces all else
}


@pytest.mark.parametrize("case", [False], indirect=True)
@pytest.mark.parametrize(("change", "fused"), CHANGES.items())
def test_changed_both_ways_have_the_same_gradients(case: Case, change: Callable[[nn.Module], object], fused: int) -> None:
    for field in ("model", "plain"):
        changed = change(getattr(case, field))
        case = case._replace(**{field: changed}) if isinstance(changed, nn.Module) else case
    case.check(fused)


def test_steps_and_averages_are_the_same(case: Case) -> None:
    ends = []
    for model in (case.model, case.plain):
        averages = ModelEmaV3(model, decay=0.9), AveragedModel(model)
        optimizer = create_optimizer_v2(model, opt="sgd", lr=0.05, weight_decay=0.01, layer_decay=0.5)
        scaler = torch.amp.GradScaler("cpu", enabled=True)
        for _ in range(3):
            for part in case.x.split(2):
                scaler.scale(model(part).square().mean()).backward()
            scaler.unscale_(optimizer)
            assert clip_grad_norm_(model.parameters(), 0.05) > 0.05
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            averages[0].update(model)
            averages[1].update_parameters(model)
        ends.append((model, averages[0].module, averages[1].module))
    for model, plain in zip(*ends, strict=True):
        assert all((one - other).abs().max() < 1e-10 for one, other in zip(model.parameters(), plain.parameters(), strict=True))
        case._replace(model=model, plain=plain).check()


def test_functions_of_parameters(case: Case) -> None:
    """``functional_call`` runs fused modules with other parameters; in transforms the own modules run."""
    parameters = {name: (each.detach() + 0.1).requires_grad_() for name, each in case.plain.named_parameters()}

    def loss(model: nn.Module, parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (case.x,)).square().sum()

    expected = dict(zip(parameters, torch.autograd.grad(loss(case.plain, parameters), [*parameters.values()]), strict=True))
    found = dict(zip(parameters, torch.autograd.grad(loss(case.model, parameters), [*parameters.values()]), strict=True))
    assert len(case.ran) == FUSED and max(distance(found, expected).values()) < 1e-10
    transformed = torch.func.grad(partial(loss, case.model))({name: each.detach() for name, each in parameters.items()})
    assert len(case.ran) == FUSED and max(distance(transformed, expected).values()) < 1e-10


def test_two_backward_passes_gradients_of_images_and_float64_under_autocast(case: Case) -> None:
    case.check(autocast=True)
    found = []
    for model in (case.model, case.plain):
        x = case.x.clone().requires_grad_()
        y = model.requires_grad_(False)(x)
        found.append({"first": torch.autograd.grad(y.sum(), x, retain_graph=True)[0], "last": torch.autograd.grad(y.square().sum(), x)[0]})
    assert max(distance(*found).values()) < 1e-10


PROGRAM = """
import copy, json
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import flysurgery
from flysurgery import ops
from flysurgery.inference import clock
from tests.inference.test_training import distance, gradients, images, learning, noting
dist.init_process_group("gloo")
clock.medians_ms = lambda ways, inputs, **_: (2.0, 1.0)
rank, ran, seen = dist.get_rank(), [], {}
optimized, joined = learning(convert=True), learning(convert=True).double()
x = images(optimized, 4)
flysurgery.optimize(optimized, x, training=True)
x = x.double()
expected = gradients(joined, x)
ops.trained, ops.trained_with_x = noting(ran, ops.trained), noting(ran, ops.trained_with_x)
for kind in ("wrapped", "sharded"):
    model = copy.deepcopy(optimized).double()
    if kind == "wrapped":
        model = DistributedDataParallel(model)
    else:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    ran.clear()
    for _ in range(2):
        gradients(model, x.chunk(2)[rank])
    means = [getattr(each.grad, "full_tensor", lambda: each.grad)() for each in model.parameters()]
    found = dict(zip(expected, [expected["result"], *(2 * mean for mean in means)], strict=True))
    seen[kind] = [max(distance(found, expected).values()), len(ran)]
    flysurgery.restore(model)
    try:
        flysurgery.optimize(model, x, training=True)
    except flysurgery.errors.InferenceError as error:
        seen[kind].append(str(error))
dist.destroy_process_group()
if rank == 0:
    print(json.dumps(seen))
"""


def test_two_processes_have_the_gradients_of_one(tmp_path: Path) -> None:
    first, second = two_processes(tmp_path, PROGRAM)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    seen = json.loads(first.stdout)
    assert {kind: said for kind, (_, _, said) in seen.items()} == {
        "wrapped": "DistributedDataParallel cannot be traced; optimize the model in it, its module",
        "sharded": "the model's parameters are sharded already; optimize the model first, and shard it then",
    }
    for error, ran, _ in seen.values():
        assert error < 1e-10 and ran == 14  # two passes of seven operations
