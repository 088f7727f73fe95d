"""What the header says of each tensor, its dtype and the hash of its data, is what is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flysurgery.checkpoint import load, save
from flysurgery.errors import CheckpointError
from flysurgery.surgery import Report
from tests.checkpoint.conftest import install_random, outputs, small_model
from tests.checkpoint.tamper import list_tensors, make_old, read_weights, rewrite, rewrite_listed

NORM = "blocks.0.norm1.weight"


def refused(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) <= 400
    return str(caught.value)


def cast(name: str, dtype: torch.dtype) -> Any:
    return lambda tensors, _: tensors.update({name: tensors[name].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_one_tensor_of_another_dtype(dtype: torch.dtype, folder: Path) -> None:
    rewrite(folder, cast(NORM, dtype))
    assert f"its header lists {NORM} as torch.float32, and it is {dtype}" in refused(folder)


def test_several_dtypes_are_loaded_where_the_header_lists_them(folder: Path) -> None:
    rewrite_listed(folder, cast(NORM, torch.float64))
    assert load(folder).blocks[0].norm1.weight.dtype == torch.float64


def test_old_folders_are_loaded(converted: tuple[nn.Module, Report], folder: Path) -> None:
    make_old(folder)
    assert torch.equal(outputs(load(folder)), outputs(converted[0]))
    rewrite(folder, lambda tensors, _: tensors.update({name: tensor.half() for name, tensor in tensors.items()}))
    assert {tensor.dtype for tensor in load(folder).state_dict().values()} == {torch.float16}


def flip_a_bit(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    tensors[NORM].view(torch.uint8)[5] ^= 1


def swap_two(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    other = "blocks.1.norm1.bias"
    tensors[NORM], tensors[other] = tensors[other], tensors[NORM]


@pytest.mark.parametrize("change", [flip_a_bit, swap_two])
def test_changed_data(change: Any, folder: Path) -> None:
    rewrite(folder, change)
    assert f"the data of {NORM}" in refused(folder) and "verify=False" in refused(folder)
    load(folder, verify=False)


def test_listed_tensors_are_bound_to_their_hash(folder: Path) -> None:
    def change(_: object, metadata: dict[str, str]) -> None:
        metadata["tensors"] = metadata["tensors"].replace('"F32"', '"F16"', 1)

    rewrite(folder, change)
    assert "tensors_sha256 does not match its tensors and aliases" in refused(folder)


@pytest.mark.parametrize("key", ["tensors", "tensors_sha256"])
def test_half_of_the_list(key: str, folder: Path) -> None:
    rewrite(folder, lambda _, metadata: metadata.pop(key))
    assert "one of tensors and tensors_sha256, and not the other" in refused(folder)


@pytest.mark.parametrize("listed", ["{", "[]", '{"a": 1}', '{"a": ["F32"]}', '{"a": ["F32", 3]}'])
def test_damaged_list(listed: str, folder: Path) -> None:
    import hashlib

    def change(_: object, metadata: dict[str, str]) -> None:
        metadata.update(tensors=listed, tensors_sha256=hashlib.sha256(listed.encode()).hexdigest())

    rewrite(folder, change)
    assert "its tensors" in refused(folder)


def test_a_name_too_few_and_one_too_many(folder: Path) -> None:
    def change(tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
        list_tensors({name: tensor for name, tensor in tensors.items() if name != NORM}, metadata)

    rewrite(folder, change)
    assert f"its header lists {NORM} as None" in refused(folder)
    rewrite(folder, lambda tensors, metadata: list_tensors({**tensors, "stranger": torch.zeros(1)}, metadata))
    assert "its header lists stranger as torch.float32, and it is None" in refused(folder)


def test_aliases_are_hashed(tmp_path: Path) -> None:
    """Without a hash the second name could be given to another tensor of the same shape."""
    model = install_random(small_model())
    model.blocks[1].norm1 = model.blocks[0].norm1
    save(model, tmp_path / "model")
    aliases = json.loads(read_weights(tmp_path / "model")[1]["aliases"])
    aliases["blocks.1.norm1.weight"] = "blocks.0.norm2.weight"
    rewrite(tmp_path / "model", lambda _, metadata: metadata.update(aliases=json.dumps(aliases)))
    assert "tensors_sha256 does not match its tensors and aliases" in refused(tmp_path / "model")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_hashes_of_every_dtype_and_of_empty_and_single_entries(dtype: str, tmp_path: Path) -> None:
    model = install_random(small_model())
    model.register_buffer("single", torch.tensor(3))
    with pytest.raises(CheckpointError, match="does not rebuild this model"):
        save(model, tmp_path / "model")
    del model.single
    save(model, tmp_path / "model", dtype=dtype)
    load(tmp_path / "model")
    listed = json.loads(read_weights(tmp_path / "model")[1]["tensors"])
    assert {entry[0] for entry in listed.values()} == {{"float16": "F16", "bfloat16": "BF16", "float64": "F64"}[dtype]}
