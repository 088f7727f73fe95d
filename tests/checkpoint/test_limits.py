"""What building may take: counted before it is taken, and only what this thread builds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import timm
import torch
from torch import Tensor, nn

from flysurgery.checkpoint.meter import LimitError, Limits, metered
from flysurgery.checkpoint.shell import build_shell, build_skeleton
from flysurgery.surgery import plan
from tests.checkpoint.conftest import TIMM_MODELS, install_random, need_recorded_arguments

LIMITS = Limits(parameters=4, modules=4, operations=300, nbytes=1 << 20)
SWIN = "swin_tiny_patch4_window7_224"


def column(length: int, device: str) -> Tensor:
    return torch.arange(length, device=device)[:, None]


BUILDS: dict[str, Callable[[str], object]] = {
    "zeros": lambda device: torch.zeros(1 << 40, device=device),
    "arange": lambda device: torch.arange(1 << 50, device=device),
    "broadcast": lambda device: column(100_000, device) - column(100_000, device).T,
    "repeat": lambda device: column(2000, device).repeat(1, 2000),
    "many": lambda device: [torch.ones(10_000, device=device) for _ in range(100)],
    "unbind": lambda device: list(torch.ones(50_000, device=device)),
    "numbers": lambda device: torch.tensor([1.0] * 300_000, device=device),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("build", BUILDS)
def test_bytes_are_refused_before_they_are_taken(build: str, device: str) -> None:
    """Some of these are terabytes, which no machine gives."""
    with pytest.raises(LimitError, match="more than 1,048,576 bytes besides its parameters"), metered(LIMITS, parameters_on_meta=True):
        BUILDS[build](device)


@pytest.mark.parametrize(
    ("what", "build"),
    [
        ("parameter tensors", lambda: [nn.LayerNorm(1) for _ in range(3)]),
        ("modules", lambda: nn.Sequential(*[nn.Identity() for _ in range(5)])),
        ("operations", lambda: [torch.ones(1) for _ in range(301)]),
    ],
)
def test_counts(what: str, build: Callable[[], object]) -> None:
    with pytest.raises(LimitError, match=f"{what}, too much for the tensors that are stored"), metered(LIMITS, parameters_on_meta=True):
        build()
    build()


def test_parameters_on_meta_and_views_take_nothing_and_tied_ones_stay_tied() -> None:
    with metered(LIMITS, parameters_on_meta=True):
        layer, other = nn.Linear(4096, 4096), nn.Linear(8, 8, bias=False)
        other.weight = layer.weight
        table = torch.ones(100_000)
        for _ in range(50):
            table = table.view(100, 1000).T.T.flatten()
    assert layer.weight.is_meta and layer.weight.requires_grad and other.weight is layer.weight and not table.is_meta
    with pytest.raises(LimitError, match="bytes"), metered(LIMITS, parameters_on_meta=False):
        nn.Linear(4096, 4096)


def test_another_thread_builds_as_it_likes() -> None:
    made: list[nn.Module] = []
    with metered(LIMITS, parameters_on_meta=True):
        thread = threading.Thread(target=lambda: made.append(nn.Sequential(*[nn.Linear(600, 600) for _ in range(9)])))
        thread.start()
        thread.join()
    assert not any(parameter.is_meta for parameter in made[0].parameters())


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        ({"depths": [2, 4097]}, "depths is 4097, and models have at most 4096 layers"),
        ({"cfg": {"num_layers": 1 << 24}}, "num_layers is 16777216"),
        ({"window_size": [7, 14]}, "window_size is 14, and the tensors that are stored allow windows of at most 13"),
    ],
)
def test_arguments(arguments: dict[str, object], fact: str) -> None:
    with pytest.raises(LimitError, match=fact):
        LIMITS.check_arguments(arguments)
    LIMITS.check_arguments({"depth": 4096, "window_size": 13, "img_size": 1 << 24, "rope_temperature": 10_000, "pos_embed": "window"})


def test_limits_grow_with_what_is_stored() -> None:
    small, large = Limits.of_stored([(1,)], 1), Limits.of_stored([(1000, 1000), (3,)], 2)
    assert (small.parameters, large.parameters) == (502, 504) and large.nbytes - small.nbytes == 64 * 1_000_002


def test_a_base_that_cannot_wait_on_meta_is_bounded_too() -> None:
    """Swin reads its parameters, so all of it is built for real, dense layers as well, which a small folder does not store."""
    need_recorded_arguments()
    dense = timm.create_model(SWIN, **TIMM_MODELS[SWIN])
    made, nbytes = plan(dense), sum(parameter.nbytes for parameter in dense.parameters())
    state = install_random(dense).state_dict()
    enough = Limits.of_stored([tensor.shape for tensor in state.values()], len(state))
    assert not any(parameter.is_meta for parameter in build_shell(made, enough).parameters())
    with pytest.raises(LimitError, match="bytes"):
        build_shell(made, replace(enough, nbytes=nbytes // 2))
    with pytest.raises(LimitError, match="modules"):
        build_skeleton(made, replace(enough, modules=3))
