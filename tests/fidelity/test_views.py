"""Views: where they look, how they are normalized, and that they are drawn anew."""

from __future__ import annotations

import torch

from flysurgery.calibration import Pictures
from flysurgery.fidelity import views


def ramp(height: int, width: int) -> torch.Tensor:
    """Channel 0 counts rows, channel 1 columns."""
    rows, columns = torch.arange(height)[:, None].expand(height, width), torch.arange(width)[None].expand(height, width)
    return torch.stack([rows, columns, torch.full_like(rows, 7)]).to(torch.uint8)


def test_views_of_pictures_of_different_sizes_stay_within_each() -> None:
    images = [ramp(60, 90), ramp(100, 70), ramp(40, 40)]
    pictures = Pictures.of_images(images, (20, 20), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    torch.manual_seed(0)
    for number, image in enumerate(images):
        seen = views(pictures, torch.full((200,), number)) * 255
        assert seen.shape == (200, 3, 20, 20)
        assert torch.allclose(seen[:, 2], torch.tensor(7.0))
        assert float(seen[:, 0].min()) >= 0 and float(seen[:, 0].max()) <= image.shape[1] - 1
        assert float(seen[:, 1].min()) >= 0 and float(seen[:, 1].max()) <= image.shape[2] - 1
        assert float(seen[:, 1].max()) > 0.9 * image.shape[2] and float(seen[:, 1].min()) < 0.1 * image.shape[2]


def test_half_of_the_views_are_mirrored_and_none_is_upside_down() -> None:
    pictures = Pictures.of_images([ramp(64, 64)], (16, 16), (0.0,) * 3, (1.0,) * 3)
    torch.manual_seed(0)
    seen = views(pictures, torch.zeros(400, dtype=torch.long))
    mirrored = (seen[:, 1, 0, 0] > seen[:, 1, 0, -1]).float().mean()
    assert 0.4 < float(mirrored) < 0.6
    assert torch.all(seen[:, 0, -1, 0] > seen[:, 0, 0, 0])


def test_bytes_are_normalized_and_inputs_are_not() -> None:
    flat = torch.full((3, 30, 30), 51, dtype=torch.uint8)
    pictures = Pictures.of_images([flat], (8, 8), (0.1, 0.2, 0.3), (0.5, 0.25, 0.1))
    seen = views(pictures, torch.zeros(4, dtype=torch.long))
    assert torch.allclose(seen[0, :, 0, 0], torch.tensor([0.2, 0.0, -1.0]), atol=1e-6)
    inputs = torch.randn(2, 1, 1, 1).expand(2, 3, 8, 8).contiguous()
    assert torch.allclose(views(Pictures.of_inputs(inputs), torch.tensor([0, 1, 1])), inputs[[0, 1, 1]])


def test_mixed_views_lie_between_two_and_the_share_is_kept() -> None:
    inputs = torch.stack([torch.zeros(1, 32, 32), torch.ones(1, 32, 32)])
    torch.manual_seed(0)
    chosen = torch.arange(400) % 2
    seen = views(Pictures.of_inputs(inputs), chosen, mixed=0.5)
    assert float(seen.min()) >= -1e-6 and float(seen.max()) <= 1 + 1e-6
    spread = seen.amax((1, 2, 3)) - seen.amin((1, 2, 3))
    assert 0.4 < float((spread > 0.1).float().mean()) < 0.6


def test_samples_of_another_kind_are_given_as_they_are() -> None:
    inputs = torch.randn(5, 3, 2, 8, 8)
    assert torch.equal(views(Pictures.of_inputs(inputs), torch.tensor([4, 0])), inputs[[4, 0]])
