"""Generated pictures: the same for the same number, new for a new one, and with classes that can be told apart."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader

from flysurgery.checkpoint import build_base
from flysurgery.errors import DataError
from flysurgery.evaluation import Fractals, evaluate, load_data

GREY = {"mean": [0.5], "std": [0.5]}


def test_a_picture_follows_from_its_number_alone() -> None:
    data = Fractals("train", 5, (24, 32), **GREY)
    images, classes = data.batch([7, 100_000, 8])
    again, same = data.batch([8, 7])
    assert images.shape == (3, 1, 24, 32) and images.min() >= -1 and images.max() <= 1
    assert torch.equal(images[[2, 0]], again) and torch.equal(classes[[2, 0]], same)
    other = Fractals("train", 5, (24, 32), **GREY, seed=1).batch([7, 100_000, 8])[0]
    assert not any(torch.equal(one, two) for one in images for two in other)


def test_held_out_pictures_are_no_training_pictures_and_their_classes_take_turns() -> None:
    held_out, train = (Fractals(part, 4, (16, 16), **GREY, samples=40) for part in ("held-out", "train"))
    images, classes = next(iter(DataLoader(held_out, 40)))
    assert classes.tolist() == [number % 4 for number in range(40)]
    seen = {image.numpy().tobytes() for image in train.batch(range(400))[0]}
    assert len(seen) == 400 and not seen & {image.numpy().tobytes() for image in images}
    counts = train.batch(range(400))[1].bincount(minlength=4)
    assert counts.min() > 70, "random classes, each about 100 times"


def test_classes_can_be_told_apart_by_the_nearest_training_picture() -> None:
    """In grey of no certain brightness and on any background, so edges are compared. Guessing gives 0.25."""

    def edges(images: torch.Tensor) -> torch.Tensor:
        steps = (images[:, :, 1:, 1:] - images[:, :, :-1, 1:]).abs() + (images[:, :, 1:, 1:] - images[:, :, 1:, :-1]).abs()
        flat = torch.nn.functional.avg_pool2d(steps, 5, 2).flatten(1)
        return torch.nn.functional.normalize(flat, dim=1)

    known, classes = Fractals("train", 4, (32, 32), **GREY).batch(range(600))
    asked, expected = Fractals("held-out", 4, (32, 32), **GREY).batch(range(100))
    nearest = (edges(asked) @ edges(known).T).argmax(1)
    assert (classes[nearest] == expected).float().mean() > 0.7


def test_a_large_picture_is_a_small_one_enlarged() -> None:
    small, large = (Fractals("train", 5, size, **GREY).batch(range(4)) for size in ((100, 75), (200, 150)))
    assert large[0].shape == (4, 1, 200, 150) and torch.equal(small[1], large[1])
    again = torch.nn.functional.interpolate(small[0], (200, 150), mode="bilinear", align_corners=False)
    torch.testing.assert_close(large[0], again)


def test_load_data_makes_them_for_the_model() -> None:
    arguments = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 3}
    model = build_base("vit_tiny_patch16_224", arguments).eval()
    data = load_data("fractals", model)
    assert (data.samples, data.num_classes, data.workers) == (150, 3, 0)
    assert evaluate(model, data).samples == 150
    with pytest.raises(DataError, match="at least 2 classes"):
        load_data("fractals", build_base("vit_tiny_patch16_224", arguments | {"num_classes": 1}))
