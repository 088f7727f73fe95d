"""Pipes, devices, folders and endless files in the place of a checkpoint's files: refused at once, and never read."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flysurgery.checkpoint import is_converted, load, load_weights
from flysurgery.checkpoint.folder import FILES
from flysurgery.errors import CheckpointError
from tests.checkpoint.conftest import outputs, small_model

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")

SECONDS = 1.0


def pipe(file: Path) -> None:
    os.mkfifo(file)


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


def folder_of_that_name(file: Path) -> None:
    file.mkdir()


def unix_socket(file: Path) -> None:
    here = Path.cwd()
    os.chdir(file.parent)  # a socket's path may not be long
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(file.name)
    finally:
        os.chdir(here)


def endless(file: Path) -> None:
    with file.open("wb") as handle:
        handle.truncate(3 << 30)


def endless_header(file: Path) -> None:
    with file.open("wb") as handle:
        handle.write((90 << 20).to_bytes(8, "little") + b'{"a')
        handle.truncate(3 << 30)


CASES: list[tuple[Callable[[Path], None], str, str]] = [
    (pipe, "config.json", "is a pipe, expected a regular file"),
    (pipe, "model.safetensors", "is a pipe, expected a regular file"),
    (device, "config.json", "is a device, expected a regular file"),
    (device, "model.safetensors", "is a device, expected a regular file"),
    (folder_of_that_name, "config.json", "is a folder, expected a regular file"),
    (folder_of_that_name, "model.safetensors", "is a folder, expected a regular file"),
    (unix_socket, "config.json", "is a socket, expected a regular file"),
    (endless, "config.json", "has 3,221,225,472 bytes, and at most 4,194,304 are read"),
    (endless, "model.safetensors", "no safetensors file"),
    (endless_header, "model.safetensors", "has a header of 94,371,840 bytes, and at most 4,194,304 are read"),
]


@pytest.mark.parametrize(("make", "name", "fact"), CASES)
def test_special_file(make: Callable[[Path], None], name: str, fact: str, folder: Path) -> None:
    (folder / name).unlink()
    make(folder / name)
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert is_converted(folder), "the other file says so"
    assert time.perf_counter() - start < SECONDS
    assert fact in str(caught.value) and name in str(caught.value) and len(str(caught.value)) <= 400


@pytest.mark.parametrize("make", [pipe, device, folder_of_that_name, endless])
def test_files_that_loading_does_not_need(make: Callable[[Path], None], folder: Path) -> None:
    expected = outputs(load(folder))
    for name in set(FILES) - {"config.json", "model.safetensors"}:
        (folder / name).unlink()
        make(folder / name)
    assert torch.equal(outputs(load(folder)), expected)


@pytest.mark.parametrize("make", [pipe, device, folder_of_that_name, unix_socket, endless])
def test_is_converted_never_waits(make: Callable[[Path], None], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        make(tmp_path / name)
    start = time.perf_counter()
    assert not is_converted(tmp_path)
    assert time.perf_counter() - start < SECONDS
    assert not is_converted("no\0name")


def test_links_to_regular_files_are_followed(folder: Path, tmp_path: Path) -> None:
    """The hub's cache keeps its files so."""
    expected = outputs(load(folder))
    linked = tmp_path / "linked"
    linked.mkdir()
    for file in folder.iterdir():
        (linked / file.name).symlink_to(file)
    assert torch.equal(outputs(load(linked)), expected)


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_weights_of_a_dense_model_from_a_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is a pipe, expected a regular file"):
        load_weights(small_model(), tmp_path / name)


def test_a_file_that_may_not_be_read_is_named(folder: Path) -> None:
    loop = folder / "config.json"
    loop.unlink()
    loop.symlink_to(loop)
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: Too many levels of symbolic links"):
        load(folder)
    shutil.rmtree(folder)
