"""Views: where they look, how they are normalized, that they are drawn anew, and where their pictures lie."""

from __future__ import annotations

import torch

from flysurgery.calibration import Pictures, Samples
from flysurgery.fidelity import views
from flysurgery.fidelity.views import Source


def ramp(height: int, width: int) -> torch.Tensor:
    """Channel 0 counts rows, channel 1 columns."""
    rows, columns = torch.arange(height)[:, None].expand(height, width), torch.arange(width)[None].expand(height, width)
    return torch.stack([rows, columns, torch.full_like(rows, 7)]).to(torch.uint8)


def test_views_of_pictures_of_different_sizes_stay_within_each_and_half_of_them_are_mirrored() -> None:
    images = [ramp(60, 90), ramp(100, 70), ramp(40, 40)]
    pictures = Pictures.of_images(images, (20, 20), (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    torch.manual_seed(0)
    for number, image in enumerate(images):
        seen = views(pictures, torch.full((400,), number)) * 255
        assert seen.shape == (400, 3, 20, 20) and torch.allclose(seen[:, 2], torch.tensor(7.0))
        for channel, side in enumerate(image.shape[1:]):
            low, high = (float(each) for each in seen[:, channel].aminmax())
            assert 0 <= low < 0.1 * side and 0.9 * side < high <= side - 1
        assert 0.4 < float((seen[:, 1, 0, 0] > seen[:, 1, 0, -1]).float().mean()) < 0.6
        assert torch.all(seen[:, 0, -1, 0] > seen[:, 0, 0, 0]), "none is upside down"


def test_bytes_are_normalized_and_inputs_are_not() -> None:
    flat = torch.full((3, 30, 30), 51, dtype=torch.uint8)
    pictures = Pictures.of_images([flat], (8, 8), (0.1, 0.2, 0.3), (0.5, 0.25, 0.1))
    seen = views(pictures, torch.zeros(4, dtype=torch.long))
    assert torch.allclose(seen[0, :, 0, 0], torch.tensor([0.2, 0.0, -1.0]), atol=1e-6)
    inputs = torch.randn(2, 1, 1, 1).expand(2, 3, 8, 8).contiguous()
    assert torch.allclose(views(Pictures.of_inputs(inputs), torch.tensor([0, 1, 1])), inputs[[0, 1, 1]])
    other = torch.randn(5, 3, 2, 8, 8)  # no images, which are given as they are
    assert torch.equal(views(Pictures.of_inputs(other), torch.tensor([4, 0])), other[[4, 0]])


def test_mixed_views_lie_between_two_and_the_share_is_kept() -> None:
    inputs = torch.stack([torch.zeros(1, 32, 32), torch.ones(1, 32, 32)])
    torch.manual_seed(0)
    seen = views(Pictures.of_inputs(inputs), torch.arange(400) % 2, mixed=0.5)
    assert float(seen.min()) >= -1e-6 and float(seen.max()) <= 1 + 1e-6
    assert 0.4 < float((seen.amax((1, 2, 3)) - seen.amin((1, 2, 3)) > 0.1).float().mean()) < 0.6


def test_pictures_that_do_not_fit_come_batch_by_batch() -> None:
    inputs = torch.arange(9.0).view(9, 1, 1, 1).expand(9, 1, 2, 2)
    source = Source(Samples(inputs).to_view(), 4, torch.device("cpu"))
    source._stays, source._here = False, source._taken()
    place, seen = source._here.canvas.data_ptr(), set()
    for _ in range(20):
        source.advance()
        here, chosen = source.draw()
        assert here.canvas.data_ptr() == place and len(chosen) == 4
        seen |= set(here.canvas[chosen].flatten().tolist())
    assert seen == {float(number) for number in range(9) if number % 5 != 4}
