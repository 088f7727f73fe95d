"""Fast transforms are recovered, and learned with their permutation, and their rivals are not; what is timed is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flysurgery.factors import bit_reversal
from flysurgery.patterns import square_dyadic
from flysurgery.projection import project
from tests.recipes.conftest import RunRecipe


@pytest.fixture
def transforms() -> Any:
    import transforms

    return transforms


def test_rounded_choices_are_permutations_and_others_mix_them(transforms: Any) -> None:
    row = torch.arange(16.0).view(1, 1, 16)
    only_a, only_c = (torch.tensor(choice).expand(1, 3, 3) for choice in ([1.0, 0, 0], [0.0, 0, 1]))
    assert torch.equal(transforms.permute(row, only_a)[0, 0].long(), bit_reversal(16))
    assert transforms.permute(row[..., :8], only_c[:, :1])[0, 0].tolist() == [0, 1, 2, 3, 7, 6, 5, 4]
    half = transforms.permute(row, only_a[:, :1] * torch.tensor([0.25, 0, 0]))
    assert torch.equal(half, 0.75 * row + 0.25 * torch.cat((row[..., ::2], row[..., 1::2]), -1))


def test_bit_reversal_is_learned_with_the_fourier_transform(transforms: Any) -> None:
    dft = torch.fft.fft(torch.eye(8, dtype=torch.complex128), norm="ortho")
    relaxed, errors, choices = transforms.learn(dft, 1, starts=8, steps=800, seed=0)
    best = int(errors.argmin())
    assert float(errors[best]) < 1e-4 < float(relaxed.min())
    assert choices[best, 0, :, 0].tolist() == [1, 1], "the even entries come first on both levels"
    order = transforms.permute(torch.arange(8.0).view(1, 1, 8), choices[best].float())[0, 0].long()
    assert project(dft[:, order], square_dyadic(8)).relative_error < 1e-10, "butterflies absorb the reversals of halves"
    assert project(dft, square_dyadic(8)).relative_error > 0.1


def test_butterflies_recover_every_transform_and_rivals_of_equal_size_do_not(run_recipe: RunRecipe) -> None:
    rows = run_recipe("transforms.py recovered", "--n", "64")
    errors = {(row["transform"], row["candidate"]): float(row["rmse"]) for row in rows}
    ours = {key for key in errors if key[1].startswith("butterfly")}
    assert {name for name, _ in ours} == {"dft", "dct", "dst", "hadamard", "hartley", "convolution"} and len(ours) == 9
    assert all(errors[key] < 1e-6 for key in ours) and all(errors[key] > 5e-3 for key in errors.keys() - ours)


def test_timed_transforms_are_right(run_recipe: RunRecipe) -> None:
    rows = run_recipe("transforms.py times", "--n", "2,64", "--rows", "3")
    assert [row["candidate"] for row in rows if row["n"] == "64"] == ["fft", "fft again", "dense", "radix 2", "radix 8"]
    assert all(row["status"].startswith(("ok", "noisy")) and float(row["median_ms"]) > 0 for row in rows)
