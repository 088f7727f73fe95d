"""The text forms that options accept."""

from __future__ import annotations

import pytest
import torch

from flysurgery.cli.options import device_of, model_arguments, names
from flysurgery.errors import OptionError


def test_model_arguments_mix_json_and_pairs_and_the_last_one_wins() -> None:
    texts = ['{"depth": 2, "act": "gelu"}', "depth=3", "img_size=[32, 32]", "qkv_bias=true", "act=silu=x"]
    assert model_arguments(texts) == {"depth": 3, "act": "silu=x", "img_size": [32, 32], "qkv_bias": True}
    assert model_arguments(None) == {}


@pytest.mark.parametrize("text", ["depth", "{depth: 2}", '{"depth": 2', "1x=2", "=3", "[1]"])
def test_model_arguments_refuse_and_quote_what_they_cannot_read(text: str) -> None:
    with pytest.raises(OptionError) as caught:
        model_arguments([text])
    assert text in str(caught.value)


def test_names_are_split_at_commas() -> None:
    assert names("ffn, qkv,", "--roles") == ("ffn", "qkv")
    with pytest.raises(OptionError, match="--roles"):
        names(" , ", "--roles")


def test_device_of() -> None:
    assert device_of("cpu") == torch.device("cpu")
    assert device_of(None).type in ("cpu", "cuda")
    for text in ("abacus", "cuda:99"):
        with pytest.raises(OptionError, match=f"'{text}'") as caught:
            device_of(text)
        assert "\n" not in str(caught.value)
