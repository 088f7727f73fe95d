"""What the installed package says of itself."""

from __future__ import annotations

from importlib.metadata import entry_points, metadata, version
from importlib.resources import files

import flysurgery


def test_python_versions_and_typing_are_declared() -> None:
    found = metadata("flysurgery")
    classifiers = found.get_all("Classifier") or []
    assert found["Requires-Python"] == ">=3.10"
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (10, 11, 12, 13)} <= set(classifiers)
    assert files("flysurgery").joinpath("py.typed").is_file()


def test_licence_version_and_command_come_along() -> None:
    found = metadata("flysurgery")
    assert found["License-Expression"] == "Apache-2.0" and found["License-File"] == "LICENSE"
    assert version("flysurgery") == flysurgery.__version__
    (command,) = entry_points(group="console_scripts", name="flysurgery")
    assert command.value == "flysurgery_command:main"
