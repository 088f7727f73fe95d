"""Pipes, devices, folders and endless files in the place of a checkpoint's files: refused at once, and never read."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from flysurgery.checkpoint import is_converted, load, load_weights
from flysurgery.checkpoint.folder import FILES
from flysurgery.errors import CheckpointError
from tests.checkpoint.conftest import outputs, refused, small_model

pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has no such files")

SECONDS = 1.0


def device(file: Path) -> None:
    file.symlink_to("/dev/zero")


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


def link_to_itself(file: Path) -> None:
    file.symlink_to(file)


@pytest.mark.parametrize(
    ("make", "name", "fact"),
    [
        (os.mkfifo, "config.json", "is a pipe, expected a regular file"),
        (os.mkfifo, "model.safetensors", "is a pipe, expected a regular file"),
        (device, "config.json", "is a device, expected a regular file"),
        (device, "model.safetensors", "is a device, expected a regular file"),
        (Path.mkdir, "config.json", "is a folder, expected a regular file"),
        (Path.mkdir, "model.safetensors", "is a folder, expected a regular file"),
        (unix_socket, "config.json", "is a socket, expected a regular file"),
        (endless, "config.json", "has 3,221,225,472 bytes, and at most 4,194,304 are read"),
        (endless, "model.safetensors", "no safetensors file"),
        (endless_header, "model.safetensors", "has a header of 94,371,840 bytes, and at most 4,194,304 are read"),
        (link_to_itself, "config.json", "config.json cannot be read: Too many levels of symbolic links"),
    ],
)
def test_special_file(make: Callable[[Path], object], name: str, fact: str, folder: Path) -> None:
    (folder / name).unlink()
    make(folder / name)
    start = time.perf_counter()
    message = refused(folder)
    assert is_converted(folder), "the other file says so"
    assert time.perf_counter() - start < SECONDS
    assert fact in message and name in message


@pytest.mark.parametrize("make", [os.mkfifo, device, Path.mkdir, unix_socket, endless])
def test_is_converted_never_waits(make: Callable[[Path], object], tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        make(tmp_path / name)
    start = time.perf_counter()
    assert not is_converted(tmp_path)
    assert time.perf_counter() - start < SECONDS
    assert not is_converted("no\0name")


def test_links_are_followed_and_files_that_loading_does_not_need_are_not_read(folder: Path, tmp_path: Path) -> None:
    """The hub's cache keeps its files as links."""
    expected = outputs(load(folder))
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in FILES:
        if name in ("config.json", "model.safetensors"):
            (linked / name).symlink_to(folder / name)
        else:
            os.mkfifo(linked / name)
    assert torch.equal(outputs(load(linked)), expected)


@pytest.mark.parametrize("name", ["weights.pth", "weights.safetensors"])
def test_weights_of_a_dense_model_from_a_pipe(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match="is a pipe, expected a regular file"):
        load_weights(small_model(), tmp_path / name)
