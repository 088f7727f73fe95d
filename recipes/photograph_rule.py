"""Which pictures of a package are photographs, or near enough, to fit a vision model to: how they are found, shrunk and compared."""

from __future__ import annotations

import io
import struct
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePosixPath

import numpy as np
from PIL import Image

ENDINGS = (".jpg", ".jpeg", ".png", ".webp")
CARVED_ENDINGS = (".rcc", ".pzl")
"""Files that hold pictures one after the other: Qt's resources, and jigzo's puzzles."""

SHORT_SIDE = 640
"""Pixels of the short side of a picture as it is kept; smaller ones keep their size."""

LEAST_SIDE, LEAST_CARVED_SIDE = 200, 150
LONGEST = 4.0
"""Long side over short side; a longer picture is a strip of several."""

LEAST_SPREAD = 12.0
"""Standard deviation of all values, out of 255; a picture with less is flat."""

TWO_COLOURS = 0.93
"""Share of a picture that its two commonest colours may have; with more it is a mask, a logo or a board."""

FLAT_SHARE, COLOUR_SHARE = 0.15, 0.05
"""Pictures of pages must have fewer equal neighbours and more different colours than these; diagrams do not."""

SAME = 6.0
"""Mean difference of two pictures of 16x16 pixels, out of 255, below which one is a near copy of the other."""

SAME_AS_JUDGED = 14.0
"""The same for what is fitted against what judges, where a doubt keeps it out."""

LEFT_OUT = (
    *(
        "*screenshot*",
        "*charmap*",
        "*-logo.*",
        "*/logo.*",
        "*Logo.*",
        "*/alphamat/*",
        "*/data/cards.png",
        "*/data/detect_blob.png",
        "*/data/digits.png",
    ),
    *("*/data/left[0-9]*", "*/data/right[0-9]*", "*/data/ellipses.jpg", "*/data/gradient.png", "*/data/pca_test1.jpg", "*/data/pic1.png"),
    *(
        "*/doc/HTML/*",
        "*/icons/*",
        "*_mask.*",
        "*polygonstanfordoutput*",
        "*/chessboard*",
        "*/symbolic-*",
        "*/clock_motion.*",
        "*/bitsextraction*",
        "*/data/horse.png",
    ),
    *("*/paintings-*", "*/louis-braille-*", "*/leftright-*", "*/chronos-*", "*/digital_electricity-*", "*/gravity-*", "*/hangman-*"),
)
"""Diagrams, lettering, masks, series of one scene, and pieces of puzzles. Patterns of paths."""

COPIES = (
    *("*/data/ela_original.jpg", "*/data/leuvenB.jpg", "*/html/0[123].jpg", "*/html/11.jpg", "*/html/originalVSdistorted.jpg"),
    *("*/html/reconstructed_fastVSbest.jpg", "*/html/superpixels_*", "*/html/aero_*", "*/motorcycle_right.png"),
)
"""Pictures that show what a judging one shows, in parts or beside something else, so that no comparison as a whole finds it."""

Array = np.ndarray


@dataclass(frozen=True)
class Picture:
    """A usable picture: its name, the package it is out of, the JPEG to keep, and what it is compared by."""

    name: str
    package: str
    jpeg: bytes
    key: Array


def pictures_in(package: str, path: str, content: bytes) -> Iterator[Picture]:
    """The usable pictures of one file of a package."""
    ending = PurePosixPath(path).suffix.lower()
    if ending in ENDINGS and not _is_left_out(path):
        image = _opened(content, SHORT_SIDE)
        if image is not None and image.mode not in ("P", "1") and min(image.size) >= 1:
            yield from _usable(package, path, image, LEAST_SIDE)
    elif ending in CARVED_ENDINGS:
        for offset, image in carved(content, only_first=ending == ".pzl"):
            name = f"{PurePosixPath(path).stem}-{offset}.jpg"
            if not _is_left_out(f"/{name}"):
                yield from _usable(package, name, image, LEAST_CARVED_SIDE)


def _is_left_out(path: str) -> bool:
    return any(fnmatchcase(f"/{path}", pattern) for pattern in (*LEFT_OUT, *COPIES))


def _usable(package: str, path: str, image: Image.Image, least: int) -> Iterator[Picture]:
    opaque = _opaque(image)
    if opaque is None or min(opaque.size) < least or max(opaque.size) > LONGEST * min(opaque.size):
        return
    scale = SHORT_SIDE / min(opaque.size)
    if scale < 1:
        opaque = opaque.resize((round(opaque.width * scale), round(opaque.height * scale)), Image.Resampling.LANCZOS)
    if not is_photograph(opaque, strict="/html/" in path):
        return
    stored = io.BytesIO()
    opaque.save(stored, "JPEG", quality=90)
    name = f"{package}__{path.replace('/', '__')}"
    yield Picture(f"{name.rpartition('.')[0]}.jpg", package, stored.getvalue(), key_of(opaque))


def _opened(content: bytes, short_side: int) -> Image.Image | None:
    """The picture, of a JPEG a smaller one that is large enough; None for what is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # wallpapers are large, and packages are no attack
            image = Image.open(io.BytesIO(content))
            scale = short_side / min(image.size)
            if scale < 1:
                image.draft("RGB", (int(image.width * scale), int(image.height * scale)))
            image.load()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    return image


def _opaque(image: Image.Image) -> Image.Image | None:
    """The picture on white; None where most of it lets the ground through."""
    if image.mode in ("RGBA", "LA", "P", "PA"):
        image = image.convert("RGBA")
        if float((np.asarray(image.getchannel("A")) > 128).mean()) < 0.3:
            return None
        ground = Image.new("RGBA", image.size, (255, 255, 255, 255))
        ground.alpha_composite(image)
        image = ground
    return image.convert("RGB")


def is_photograph(image: Image.Image, *, strict: bool = False) -> bool:
    """Whether a picture is neither flat nor of two colours; with ``strict`` it must have the many colours of a photograph."""
    if np.asarray(image, dtype=np.float32).std() < LEAST_SPREAD:
        return False
    small = np.asarray(image.resize((96, 96), Image.Resampling.BILINEAR)).astype(int)
    _, counts = np.unique((small // 8).reshape(-1, 3), axis=0, return_counts=True)
    if float(np.sort(counts)[-2:].sum()) > TWO_COLOURS * counts.sum():
        return False
    equal = float((np.abs(np.diff(small, axis=1)).max(-1) == 0).mean())
    return not strict or (equal < FLAT_SHARE and len(counts) > COLOUR_SHARE * counts.sum())


def key_of(image: Image.Image) -> Array:
    """What pictures are compared by: their 16x16 mean colours."""
    return np.asarray(image.convert("RGB").resize((16, 16), Image.Resampling.BOX), dtype=np.float32)


def carved(content: bytes, *, only_first: bool = False) -> Iterator[tuple[int, Image.Image]]:
    """Pictures within a file, each with its place: those that stand after their length in four bytes.

    With ``only_first`` it is the first JPEG, whose length need not be known, as in puzzles: their pieces come after the picture.
    """
    for magic, back in ((b"\xff\xd8\xff", 0), (b"\x89PNG\r\n\x1a\n", 0), (b"WEBP", 8)):
        place = content.find(magic)
        while place >= 0:
            start, place = place - back, content.find(magic, place + 4)
            if start < 4:
                continue
            size = len(content) - start if only_first else struct.unpack(">I", content[start - 4 : start])[0]
            if not 200 < size <= len(content) - start:
                continue
            image = _opened(content[start : start + size], SHORT_SIDE)
            if image is not None:
                yield start, image
                if only_first:
                    return
                place = content.find(magic, start + size)


def near(key: Array, others: Sequence[Picture], most: float) -> Picture | None:
    """The first of ``others`` that differs by less than ``most``."""
    if not others:
        return None
    gaps = np.abs(np.stack([other.key for other in others]) - key).mean((1, 2, 3))
    index = int(gaps.argmin())
    return others[index] if gaps[index] < most else None


def split(pictures: Sequence[Picture], judging: Sequence[str]) -> tuple[list[Picture], list[Picture]]:
    """Pictures to fit with, near copies left out, and those that judge, by name."""
    judges = [picture for picture in pictures if picture.name in judging]
    fit: list[Picture] = []
    for picture in pictures:
        if picture.name not in judging and near(picture.key, judges, SAME_AS_JUDGED) is None and near(picture.key, fit, SAME) is None:
            fit.append(picture)
    return fit, judges
