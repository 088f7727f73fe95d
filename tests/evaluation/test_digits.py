"""The digits are split and prepared in one way, in training and in evaluation."""

from __future__ import annotations

import builtins
import sys
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from flysurgery.errors import DataError
from flysurgery.evaluation import digits

MEAN, STD = (0.5,), (0.25,)


def test_parts_are_disjoint_and_complete() -> None:
    parts = [digits(part, (8, 8), mean=MEAN, std=STD) for part in ("train", "held-out")]
    assert [len(part) for part in parts] == [1198, 599]
    images = torch.cat([part.tensors[0] for part in parts])
    whole = torch.tensor(load_digits().images, dtype=torch.float32)[:, None]
    restored = ((images * 0.25 + 0.5) * 16).flatten(1)
    assert torch.equal(torch.unique(restored, dim=0), torch.unique(whole.flatten(1), dim=0))
    assert torch.equal(restored.sum(0), whole.flatten(1).sum(0))
    assert sorted(torch.cat([part.tensors[1] for part in parts]).tolist()) == sorted(load_digits().target.tolist())


def test_the_split_is_fixed() -> None:
    """The model card's accuracy is that of these very images."""
    first = digits("held-out", (8, 8), mean=MEAN, std=STD)
    torch.manual_seed(99)
    assert torch.equal(first.tensors[0], digits("held-out", (8, 8), mean=MEAN, std=STD).tensors[0])
    assert first.tensors[1][:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]


def test_size_channels_and_normalization() -> None:
    images = digits("held-out", (16, 24), mean=(0.0, 0.5, 1.0), std=(1.0, 0.5, 2.0)).tensors[0]
    assert images.shape == (599, 3, 16, 24)
    grey = images[:, 0]
    assert grey.min() >= 0 and grey.max() <= 1
    assert torch.equal(images[:, 1], (grey - 0.5) / 0.5) and torch.equal(images[:, 2], (grey - 1) / 2)
    small = digits("held-out", (8, 8), mean=(0.0,), std=(1.0,)).tensors[0]
    large = digits("held-out", (16, 16), mean=(0.0,), std=(1.0,)).tensors[0]
    assert torch.equal(large[:, :, 0, 0], small[:, :, 0, 0]), "a corner stays what it was"


def test_without_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    imports = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name.startswith("sklearn"):
            raise ImportError(name)
        return imports(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.delitem(sys.modules, "sklearn.datasets", raising=False)
    with pytest.raises(DataError, match=r"pip install 'flysurgery\[train\]'"):
        digits("train", (8, 8), mean=MEAN, std=STD)
