"""Tests marked ``gpu`` are skipped, with the reason, where there is no CUDA device.

    pytest -m gpu -n 12

runs them alone, in as many processes as there are cores. Most of their time goes into compiling kernels, which all processes keep in the
same folder, so the next run is shorter.
"""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch

hypothesis.settings.register_profile("no_deadline", deadline=None)  # timing never decides a test
hypothesis.settings.load_profile("no_deadline")


def pytest_configure() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the other cores have processes of their own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False here")
    for item in items:
        if item.get_closest_marker("gpu"):  # the keywords hold the names of folders as well
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def wide_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line for each row of a table, whatever the terminal."""
    monkeypatch.setenv("COLUMNS", "300")
