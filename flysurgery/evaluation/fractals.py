"""Pictures that are computed, in as many classes as wanted: attractors of random iterated function systems.

A class is the shape of an attractor; place, size, turn, colours, background and a random bending of its maps change with the picture.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from flysurgery.errors import DataError

MAPS = 4  # contractions of the plane in a system
BURN_IN, STEPS = 12, 32  # steps of each walker before its places are drawn, and those that are drawn
PIXELS_A_WALKER, WALKERS = 16, (128, 4096)  # a picture has one walker for so many pixels, but at least and at most so many
LONGEST = 128  # side of what is painted; a larger picture is painted at a half, a third, ... of its size and enlarged, to be fast
BENDING = 0.05  # standard deviation of the entries of a picture's maps from those of its class, which are below 1
TURN, GROWTH, SHIFT = math.radians(12), 0.15, 0.1
"""Largest turn of a picture's attractor, change of its size, and shift in half pictures.

With BENDING they set how hard the classes are: a ViT-S/16 has 99 % of the held-out pictures of 100 classes right after 1.3 million training
pictures. At a bending of 0.12, 25 degrees, 0.25 and 0.2 it had learnt next to nothing after 270 000.
"""

SPREAD = 2.2  # standard deviations of an attractor from the middle of the picture to its edge
SALTS = {"train": 1, "held-out": 2}  # what the numbers of the two parts' pictures are mixed with, so that they share none
DRAWS = 72  # random numbers of a picture


class Fractals(Dataset[Any]):
    """Pictures of shape (channels, height, width), normalized, float32 on ``device``, with their classes.

    A class is a system of four contractions, the same in both parts and for every ``seed``. A picture follows from its part, number and
    seed alone; other devices round otherwise, so that single points differ. Training pictures have random classes and no end: ``batch``
    takes any numbers, and ``len`` is that of the held-out part, whose classes take turns.

    Cost: (BURN_IN + STEPS) small products for each of at most 4096 walkers, and 1 kB of memory a walker.
    Raises DataError for fewer than two classes.

    Source: M. Barnsley, Fractals Everywhere, 1988, for the random walk; H. Kataoka et al., Pre-training without Natural Images,
    arXiv:2101.08515, for classes of such systems.
    """

    def __init__(
        self,
        part: Literal["train", "held-out"],
        classes: int,
        size: tuple[int, int],
        *,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device | str = "cpu",
        seed: int = 0,
        samples: int = 0,
    ) -> None:
        if classes < 2:
            raise DataError(f"fractals come in at least 2 classes, got {classes}")
        self.part, self.classes, self.size, self.samples = part, classes, size, samples
        self._salt = SALTS[part] + 16 * seed
        self._mean, self._std = (torch.tensor(values).view(1, -1, 1, 1) for values in (mean, std))
        self._channels = len(mean)
        self._maps, shares = _systems(classes)
        self._bounds = shares.cumsum(1)
        height, width = self._painted = tuple(-(-side // -(-max(size) // LONGEST)) for side in size)
        walkers = min(max(height * width // PIXELS_A_WALKER, WALKERS[0]), WALKERS[1])
        # One table for all pictures: which map a walker takes at each step follows from it and the class's shares.
        self._table = torch.rand(BURN_IN + STEPS, walkers, generator=torch.Generator().manual_seed(0))
        self.to(device)

    def to(self, device: torch.device | str) -> None:
        """Make pictures on ``device`` from now on."""
        self.device = torch.device(device)
        for name in ("_mean", "_std", "_maps", "_bounds", "_table"):
            setattr(self, name, getattr(self, name).to(self.device))

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[tuple[Tensor, int]]:
        """Several pictures at once, as PyTorch's loader asks for them."""
        images, classes = self.batch(numbers)
        return list(zip(images.unbind(), classes.tolist(), strict=True))

    @torch.no_grad()
    def batch(self, numbers: Iterable[int]) -> tuple[Tensor, Tensor]:
        """Make the pictures of these numbers, shape (batch, channels, height, width), and their classes; of a range without a wait."""
        if isinstance(numbers, range) and numbers:  # a copy from the host would wait for all that is queued on the device
            index = torch.arange(numbers.start, numbers.stop, numbers.step, dtype=torch.int64, device=self.device)
        else:
            index = torch.tensor(list(numbers), dtype=torch.int64, device=self.device)
        drawn = _uniform(index, self._salt)
        classes = index % self.classes if self.part == "held-out" else (drawn[:, -1] * self.classes).long()
        images = _paint(self._walk(classes, drawn), drawn, self._channels)
        if self._painted != self.size:
            images = interpolate(images, self.size, mode="bilinear", align_corners=False)
        return (images - self._mean) / self._std, classes

    def _walk(self, classes: Tensor, drawn: Tensor) -> Tensor:  # shape: (batch, MAPS, height, width)
        """Count how often the walkers of each picture came to each pixel, by the map that took them there."""
        batch, walkers = len(classes), self._table.shape[1]
        height, width = self._painted
        bends = drawn[:, : MAPS * 6].view(batch, MAPS, 6) + drawn[:, MAPS * 6 : MAPS * 12].view(batch, MAPS, 6) - 1
        maps = self._maps[classes] + BENDING * math.sqrt(6) * bends  # the sum of two uniform numbers has variance 1/6
        bounds, first = self._bounds[classes][..., None], MAPS * torch.arange(batch, device=self.device)[:, None]
        # All choices at once, shape (steps, batch, walkers): few large operations, since a GPU waits for the launch of small ones.
        chosen = first + sum((self._table[:, None] > bounds[:, k]).long() for k in range(MAPS - 1))
        # Of (x, y) -> (a x + b y + e, c x + d y + f) what x is multiplied by, what y is, and what is added, both outputs in one operation.
        entries = maps.view(batch * MAPS, 6).T
        ordered = torch.stack([entries[0:4:2], entries[1:4:2], entries[4:]])
        place, path = torch.zeros(2, batch, walkers, device=self.device), []
        for by_x, by_y, shift in zip(*(part.unbind(1) for part in ordered[:, :, chosen]), strict=True):
            x, y = place.unbind()
            # A bent map may have ceased to contract; what has run away is far outside the picture, and stays finite.
            place = torch.addcmul(torch.addcmul(shift, by_x, x), by_y, y).clamp_(-9, 9)
            path.append(place)
        x, y = torch.stack(path[BURN_IN:], dim=1)
        u, v = _in_frame(x, y, drawn[:, MAPS * 12 :])
        column, row = ((u + 1) * (width / 2)).floor().long(), ((v + 1) * (height / 2)).floor().long()
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        pixel = (chosen[BURN_IN:] * height + row.clamp(0, height - 1)) * width + column.clamp(0, width - 1)
        places = torch.zeros(batch * MAPS * height * width, device=self.device)
        # Whole numbers, so that the order of the sum does not matter.
        places.scatter_add_(0, pixel.flatten(), inside.flatten().float())
        return places.view(batch, MAPS, height, width)


def _systems(classes: int) -> tuple[Tensor, Tensor]:
    """Draw the maps (a, b, c, d, e, f): (x, y) -> (a x + b y + e, c x + d y + f) of each class, and how often each is taken."""
    maps, shares = torch.empty(classes, MAPS, 6), torch.empty(classes, MAPS)
    for number in range(classes):
        draw = torch.rand(MAPS, 7, generator=torch.Generator().manual_seed(number + 1), dtype=torch.float64)
        turn, tilt = (2 * math.pi * draw[:, k] for k in (0, 1))
        wide = 0.35 + 0.45 * draw[:, 2]
        narrow = wide * (0.25 + 0.75 * draw[:, 3]) * torch.where(draw[:, 4] < 0.5, -1.0, 1.0)
        cos, sin, tilt_cos, tilt_sin = turn.cos(), turn.sin(), tilt.cos(), tilt.sin()
        a, b = wide * cos * tilt_cos - narrow * sin * tilt_sin, -wide * cos * tilt_sin - narrow * sin * tilt_cos
        c, d = wide * sin * tilt_cos + narrow * cos * tilt_sin, -wide * sin * tilt_sin + narrow * cos * tilt_cos
        maps[number] = torch.stack([a, b, c, d, 2 * draw[:, 5] - 1, 2 * draw[:, 6] - 1], dim=1)
        area = (wide * narrow).abs() + 0.02
        shares[number] = area / area.sum()
    return maps, shares


def _in_frame(x: Tensor, y: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:  # shapes: (steps, batch, walkers)
    """Put places into a picture's frame: about the middle of its attractor, turned and shifted, scaled to half pictures."""
    x, y = x - x[0].mean(1, keepdim=True), y - y[0].mean(1, keepdim=True)
    extent = (x[0].square().mean(1, keepdim=True) + y[0].square().mean(1, keepdim=True)).sqrt() + 1e-3
    random = 2 * drawn[:, :4] - 1
    scale = math.sqrt(2) / SPREAD * (1 + GROWTH * random[:, 0:1]) / extent
    angle = TURN * random[:, 1:2]
    cos, sin = scale * angle.cos(), scale * angle.sin()
    return cos * x - sin * y + SHIFT * random[:, 2:3], sin * x + cos * y + SHIFT * random[:, 3:4]


def _paint(counts: Tensor, drawn: Tensor, channels: int) -> Tensor:  # shape: (batch, channels, height, width)
    """Give each map a colour and the whole a background with a slope and a wave, all by the picture's own numbers, in [0, 1]."""
    batch, _, height, width = counts.shape
    spare = drawn[:, MAPS * 12 + 4 : -1]
    colours, dark, bright, waves = spare[:, : channels * 2].view(batch, 2, channels), spare[:, 6:7], spare[:, 7:8], spare[:, 8:12]
    total = counts.sum(1, keepdim=True)
    # Two colours, between which the maps lie in turn.
    share = torch.linspace(0, 1, MAPS, device=counts.device)
    palette = colours[:, :1] + share.view(1, -1, 1) * (colours[:, 1:] - colours[:, :1])  # shape: (batch, MAPS, channels)
    colour = torch.einsum("bmhw,bmc->bchw", counts, palette) / total.clamp_min(1)
    opacity = (total.log1p() / total.amax((2, 3), keepdim=True).clamp_min(1).log1p()).sqrt()
    across = torch.linspace(-1, 1, width, device=counts.device).view(1, 1, 1, -1)
    along = torch.linspace(-1, 1, height, device=counts.device).view(1, 1, -1, 1)
    first, second, third, fourth = (waves[:, k].view(-1, 1, 1, 1) for k in range(4))
    slope = 0.2 * ((2 * first - 1) * across + (2 * second - 1) * along)
    wave = 0.1 * torch.sin(8 * ((2 * third - 1) * across + (2 * fourth - 1) * along) + 6 * first)
    ground = dark.view(-1, 1, 1, 1) + slope + wave
    # Never the background's own brightness, so that there is something to see.
    light = ((dark + 0.35 + 0.3 * bright) % 1).view(-1, 1, 1, 1) + 0.35 * (colour - 0.5)
    return (ground.clamp(0, 1) * (1 - opacity) + light * opacity).clamp(0, 1).expand(-1, channels, -1, -1)


def _uniform(index: Tensor, salt: int) -> Tensor:  # shape: (batch, DRAWS)
    """Draw numbers in [0, 1) that follow from the picture's number and the salt alone, the same on every device."""
    state = index[:, None] * DRAWS + torch.arange(DRAWS, device=index.device)
    state = _mixed(state + int(_mixed(torch.tensor(salt, dtype=torch.int64))))  # on the host: no copy
    return ((state >> 40) & 0xFFFFFF).float() / (1 << 24)


def _mixed(state: Tensor) -> Tensor:
    """Mix the 64 bits so that neighbours have nothing in common; int64 products wrap around.

    Source: G. Steele, D. Lea, C. Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014: the finalizer of SplitMix64.
    """
    state = state * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return state ^ ((state >> 31) & ((1 << 33) - 1))
