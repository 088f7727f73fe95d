"""Converted models to the Hugging Face hub."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from flysurgery.checkpoint.hub import HUB, one_sentence_of_the_hub
from flysurgery.checkpoint.save import save


def push_to_hub(model: nn.Module, repository: str, *, private: bool = False, token: str | None = None, **options: Any) -> str:
    """Save a converted model into the repository ``user/name`` of the Hugging Face hub, which is made where there is none.

    ``flysurgery.load("hf-hub:user/name")`` opens it, and ``timm.create_model("hf-hub:user/name", pretrained=True)`` for models of timm.
    ``options`` are those of ``save``. ``token`` is the hub's, by default that of ``hf auth login``. Gives the address of the commit.

    Raises:
        CheckpointError: as ``save``, or the hub refuses.
    """
    from huggingface_hub import HfApi

    name = repository.removeprefix(HUB)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / name.rpartition("/")[2]
        save(model, folder, **options)
        with one_sentence_of_the_hub(f"the model cannot be pushed to {name}"):
            api = HfApi(token=token)
            made = api.create_repo(name, private=private, exist_ok=True)
            return str(api.upload_folder(repo_id=made.repo_id, folder_path=folder, commit_message="Add a model converted by flysurgery"))
