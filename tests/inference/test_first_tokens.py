"""Forwards that leave out tokens which nothing reads behind the last attention: where, with the same results, and when they do not."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from vit_pytorch import ViT

import flysurgery
from flysurgery.inference.find_groups import find_groups
from flysurgery.inference.first_tokens import last_reading
from flysurgery.inference.fused_block import FusedAttended
from tests.inference.models import SMALL, saved
from tests.support.tolerance import assert_equal

pytestmark = pytest.mark.usefixtures("called")
ALL, FIRST = [17, 17], [17, 1]


def model(name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **SMALL | options).eval()


def images(count: int) -> Tensor:
    return torch.randn((count, 3, 32, 32), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each attention passed on."""
    seen, attended = list[int](), FusedAttended.attended

    def noting(part: FusedAttended, *args: Any) -> tuple[Tensor, Tensor]:
        y, x = attended(part, *args)
        seen.append(y.shape[1])
        return y, x

    monkeypatch.setattr(FusedAttended, "attended", noting)
    return seen


class Reads(nn.Module):
    """The class token, by a function of the module and all tokens."""

    def __init__(self, read: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.read = model(num_classes=0), read
        self.kept: list[Tensor] = []
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.read(self, self.inner.forward_features(x))  # pyright: ignore[reportCallIssue]


def first(module: nn.Module, tokens: Tensor) -> Tensor:
    return tokens[:, 0]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (model, ("blocks.1", 1)),
        (lambda: model("deit_tiny_distilled_patch16_224"), ("blocks.1", 2)),
        (lambda: model(global_pool="avg"), None),
        (lambda: model(num_classes=0, global_pool=""), None),
        (lambda: ViT(image_size=32, patch_size=8, num_classes=5, dim=64, depth=2, heads=2, mlp_dim=128), ("transformer", 1)),
        (lambda: Reads(first), ("inner.blocks.1", 1)),
        (lambda: Reads(lambda module, tokens: tokens.mean(1) if module.training else tokens[:, 0]), None),
        (lambda: Reads(lambda module, tokens: tokens[:, 0] / tokens.shape[1]), None),
        (lambda: Reads(lambda module, tokens: module.kept.append(tokens) or tokens[:, 0]), None),  # pyright: ignore
    ],
)
def test_the_graph_shows_which_tokens_are_read(made: Any, expected: tuple[str, int] | None) -> None:
    findings = find_groups(made().eval(), images(2))
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = last_reading(findings, trains=True)
        assert (found and (found.block, found.count)) == expected


@pytest.mark.parametrize("training", [False, True])
def test_results_and_gradients_stay_the_same(tokens: list[int], training: bool) -> None:
    plain, results = model(init_values=0.5), list[Tensor]()
    fused = copy.deepcopy(plain)
    report = flysurgery.optimize(fused, images(2), training=training)
    assert report.tokens == 1 and "reads the first token alone" in str(report)
    again = copy.deepcopy(fused)
    for each in (plain, fused, again):
        with torch.set_grad_enabled(training):
            results.append(each(images(3)))
        if training:
            results[-1].square().sum().backward()
    assert tokens == FIRST * 2
    for each, result in ((fused, results[1]), (again, results[2])):
        torch.testing.assert_close(result, results[0])
        for own, theirs in zip(each.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, theirs.grad)
    assert report.restore() > 0 and "forward" not in vars(fused)


def hooked(name: str) -> Any:
    return lambda model, x: model.get_submodule(name).register_forward_hook(lambda *_: None) and model(x)


CALLS: dict[str, tuple[Callable[[Any, Tensor], Any], list[int]]] = {
    "the model itself": (lambda model, x: model(x), FIRST),
    "features": (lambda model, x: model.forward_features(x), ALL),
    "intermediate results": (lambda model, x: model.forward_intermediates(x), ALL),
    "another form than that of the trace": (lambda model, x: model(x=x), ALL),
    "a hook that sees the result": (hooked(""), FIRST),
    **{f"a hook of {name}": (hooked(name), ALL) for name in ("norm", "blocks", "blocks.1", "head")},
    "the mean": (lambda model, x: setattr(model, "global_pool", "avg") or model(x), ALL),
    "another head": (lambda model, x: vars(model).update(forward_head=lambda tokens: model.head(tokens.mean(1))) or model(x), ALL),
    "another block, which might read other tokens": (lambda model, x: model.blocks.append(nn.Identity()) and model(x), ALL),
    "another classifier": (lambda model, x: model.reset_classifier(3, "avg") or model(x), ALL),
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_whoever_could_see_that_tokens_are_missing_gets_all(tokens: list[int], name: str) -> None:
    plain, (call, expected) = model(), CALLS[name]
    fused = copy.deepcopy(plain)
    flysurgery.optimize(fused, images(2))
    tokens.clear()
    results = []
    for each in (fused, plain):
        torch.manual_seed(1)
        results.append(call(each, images(2)))
    assert tokens == expected
    torch.testing.assert_close(*results)


@torch.no_grad()
def test_calls_unlike_the_example_and_what_a_forward_writes(tokens: list[int]) -> None:
    fused: Any = Reads(first).eval()
    flysurgery.optimize(fused, images(2))
    before = fused.calls
    fused(images(3))
    assert tokens == FIRST and fused.calls == before + 1
    assert [*inspect.signature(fused.forward).parameters] == ["x"]
    wide: Any = model(dynamic_img_size=True)
    flysurgery.optimize(wide, images(2))
    tokens.clear()
    wide(torch.zeros(2, 3, 40, 40))
    assert tokens == [26, 26]
    exported = torch.export.export(wide, (images(2),), strict=False).module()
    torch.testing.assert_close(exported(images(2)), wide(images(2)))


def test_checkpoints_compute_all_tokens_again(tokens: list[int]) -> None:
    fused: Any = model()
    flysurgery.optimize(fused, images(2), training=True)
    fused.set_grad_checkpointing(True)
    fused(images(2)).sum().backward()
    fused.set_grad_checkpointing(False)
    for reentrant in (False, True):
        x = images(2).requires_grad_()
        checkpoint(lambda y: fused.head(fused.norm(fused.blocks(fused.patch_embed(y)))).sum(), x, use_reentrant=reentrant).backward()  # pyright: ignore[reportOptionalMemberAccess]
    checkpoint(fused, images(2), use_reentrant=False).sum().backward()  # pyright: ignore[reportOptionalMemberAccess]
    assert set(tokens) <= {16, 17}


@torch.no_grad()
def test_copies_pickles_and_compiled_code_follow(tokens: list[int]) -> None:
    fused = model()
    flysurgery.optimize(fused, images(2))
    expected = fused(images(2))
    for each in (copy.deepcopy(fused), saved(fused)):
        tokens.clear()
        assert_equal(each(images(2)), expected)
        assert tokens == FIRST
        assert flysurgery.restore(each) > 0
    tokens.clear()
    torch.testing.assert_close(torch.compile(fused, backend="eager")(images(2)), expected)
    assert tokens == ALL  # the compiler traces the model's own forward


def test_a_model_with_a_forward_of_its_own_keeps_it() -> None:
    fused = model()
    own = fused.forward
    vars(fused)["forward"] = lambda x: own(x)
    assert flysurgery.optimize(fused, images(2)).tokens is None
