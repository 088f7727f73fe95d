"""Calibration data are taken as they come, checked against the model, and split into those that fit and those that judge."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from flysurgery.calibration import Samples, samples_of
from flysurgery.errors import DataError, OptionError

SHAPE = (3, 4, 4)


def images(count: int) -> Tensor:
    return torch.randn(count, *SHAPE, generator=torch.Generator().manual_seed(count))


def test_tensors_batches_data_sets_and_loaders_are_the_same_data() -> None:
    x, classes = images(20), torch.arange(20)
    dataset = TensorDataset(x, classes)
    for data in (x, Samples(x), list(x.split(6)), [(part, None) for part in x.split(6)], dataset, DataLoader(dataset, 7)):
        assert torch.equal(samples_of(data, count=15, shape=SHAPE).inputs, x[:15])
    assert len(samples_of(images(7), shape=SHAPE)) == 7 and len(samples_of(torch.zeros(600, 1))) == 512


def test_no_more_batches_are_read_than_needed() -> None:
    def loader() -> Iterator[Tensor]:
        yield from (images(4), images(4), images(4))
        raise AssertionError("ten samples are there already")

    assert len(samples_of(loader(), count=10)) == 10


@pytest.mark.parametrize(("count", "batches"), [(2, 1), (3, 2), (5, 4), (23, 10), (400, 10), (2000, 50)])
def test_every_sample_fits_or_judges_and_none_does_both(count: int, batches: int) -> None:
    """At least eight batches, where there are so many samples, and of at most 32."""
    samples = Samples(torch.arange(count, dtype=torch.float32)[:, None])
    fit, held_out = list(samples.fit()), torch.cat(list(samples.held_out()))
    assert sorted(torch.cat([*fit, held_out])[:, 0].tolist()) == list(range(count))
    assert len(held_out) == samples.held_out_count == max(1, count // 5)
    assert len(fit) == batches and max(map(len, fit)) <= 32


@pytest.mark.parametrize(
    ("data", "count", "words"),
    [
        (torch.zeros(5, 1, 4, 4), None, r"takes samples of shape \(3, 4, 4\), got \(1, 4, 4\) \(another number of channels\)"),
        (torch.zeros(5, 3, 4, 8), None, r"got \(3, 4, 8\) \(another width\)"),
        (torch.zeros(5, 48), None, r"got \(48,\); prepare them"),
        (images(5), 6, "6 were asked for and there are 5 samples"),
        (images(1), None, "at least 2 are needed and there are 1"),
        (images(5).to(torch.uint8), None, "expected floating-point inputs"),
        (torch.full((5, *SHAPE), torch.nan), None, "NaN or infinite"),
        ("digits", None, "expected calibration data as a tensor or as batches of tensors, got 'digits'"),
        ([{"image": 1}], None, "expected batches of tensors"),
        ([], None, "hold no samples"),
        ([images(2), torch.zeros(2, 1, 4, 4)], None, "must have one shape"),
        *((images(5), count, "at least 2 samples") for count in (1, 0, -3, 2.5)),
    ],
)
def test_other_data_and_counts_are_refused_in_a_sentence(data: object, count: int | None, words: str) -> None:
    with pytest.raises((DataError, OptionError), match=words):
        samples_of(data, count=count, shape=SHAPE)  # pyright: ignore[reportArgumentType]
