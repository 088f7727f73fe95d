"""Converted models from the Hugging Face hub: a repository holds the files of a folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flysurgery.checkpoint.folder import FILES
from flysurgery.errors import CheckpointError, FlysurgeryError, first_line

HUB = "hf-hub:"
"""What names of repositories begin with, as for timm."""


def downloaded(name: str, cache_dir: str | Path | None = None) -> Path:
    """The local copy of the repository ``user/name``, or ``user/name@revision``, with or without ``hf-hub:``.

    Raises:
        CheckpointError: there is no such repository, or no connection and no copy.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.removeprefix(HUB).partition("@")
    with one_sentence_of_the_hub(f"{repository} cannot be had from the Hugging Face hub"):
        return Path(snapshot_download(repository, revision=revision or None, cache_dir=cache_dir, allow_patterns=list(FILES)))


@contextmanager
def one_sentence_of_the_hub(what: str) -> Iterator[None]:
    """Inside, what the hub's client raises becomes a ``CheckpointError`` that says ``what`` and why."""
    try:
        yield
    except FlysurgeryError:
        raise
    except Exception as error:  # those of the hub's client, of its network library and of the system have no common kind
        raise CheckpointError(f"{what}: {first_line(error)}") from error
