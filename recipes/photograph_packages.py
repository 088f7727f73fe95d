"""The packages that photographs come out of: what they are, how they are fetched, their files, and their licences."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flysurgery.errors import FlysurgeryError

LICENCE_FILES = ("copyright", "LICENSE.txt")
"""Names of the files that tell under which terms a package is."""


class PackageError(FlysurgeryError):
    """A package cannot be had or read."""


@dataclass(frozen=True)
class Package:
    """One package. ``folders`` are the parts of paths, one of which a file must have to count; all count without any."""

    name: str
    ending: str = ".deb"
    folders: tuple[str, ...] = ()

    @property
    def is_wheel(self) -> bool:
        """Whether it is one of Python's, and not one of Debian's."""
        return self.ending == ".whl"

    def file_in(self, folder: Path) -> Path | None:
        """The package's file in a folder, the last one by name where there are several."""
        stem = self.name.replace("-", "_") if self.is_wheel else self.name
        joint = "-" if self.is_wheel else "_"
        return max(folder.glob(f"{stem}{joint}*{self.ending}"), default=None)


PACKAGES = (
    Package("mate-backgrounds"),
    Package("plasma-workspace-wallpapers"),
    Package("gnome-backgrounds"),
    Package("ukui-wallpapers"),
    Package("sway-backgrounds"),
    Package("opencv-doc"),
    Package("gcompris-qt-data"),
    Package("jigzo-data"),
    Package("scikit-image", ".whl", ("skimage/data/",)),
)


def fetch(package: Package, folder: Path) -> Path:
    """The package's file in ``folder``, where it is put if it is not there.

    Raises:
        PackageError: it cannot be fetched.
    """
    found = package.file_in(folder)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    command = ["apt-get", "download", package.name]
    if package.is_wheel:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", package.name]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except OSError as error:
        raise PackageError(f"{command[0]} cannot be run ({error.strerror}); put {package.name} into {folder} by hand") from error
    found = package.file_in(folder)
    if done.returncode or found is None:
        reason = next(iter(done.stderr.strip().splitlines()[-1:]), "no file came")
        raise PackageError(f"{package.name} cannot be fetched: {reason}")
    return found


def files_of(package: Package, file: Path) -> Iterator[tuple[str, bytes]]:
    """The path and content of each file of a package; links are left out. Nothing is unpacked to the disk.

    Raises:
        PackageError: the file is no such package, or dpkg-deb is missing.
    """
    try:
        yield from _of_wheel(package, file) if package.is_wheel else _of_deb(package, file)
    except (OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise PackageError(f"{file} cannot be read as {package.ending}: {error}") from error


def _counts(package: Package, path: str) -> bool:
    return not package.folders or any(folder in path for folder in package.folders) or Path(path).name in LICENCE_FILES


def _of_wheel(package: Package, file: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as wheel:
        for entry in wheel.infolist():
            if not entry.is_dir() and _counts(package, entry.filename):
                yield entry.filename, wheel.read(entry)


def _of_deb(package: Package, file: Path) -> Iterator[tuple[str, bytes]]:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(file)], stdout=subprocess.PIPE) as unpacking:
        assert unpacking.stdout is not None
        with tarfile.open(fileobj=unpacking.stdout, mode="r|") as archive:
            for entry in archive:
                path = entry.name.removeprefix("./").removeprefix("usr/share/")
                content = archive.extractfile(entry) if entry.isfile() and _counts(package, path) else None
                if content is not None:
                    yield path, content.read()


def licences_in(path: str, content: bytes) -> list[str]:
    """The licences that a copyright file or a wheel's licence file names, each once."""
    if Path(path).name not in LICENCE_FILES:
        return []
    text = content.decode("utf-8", "replace")
    named = re.findall(r"^License: *(\S.*?)\s*$", text, re.MULTILINE)
    return list(dict.fromkeys(named or re.findall(r"Creative Commons [A-Z][\w-]+ \d\.\d|GPL-\d\+?", text)))
