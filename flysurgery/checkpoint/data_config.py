"""What a ``pretrained_cfg`` may say of images and classes, as timm reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flysurgery.errors import CheckpointError
from flysurgery.patterns import MAX_FEATURES


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _are_texts(value: object) -> bool:
    return _is_text(value) or (isinstance(value, list | tuple) and all(map(_is_text, value)))


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_FEATURES


def _are_sizes(value: object) -> bool:
    return isinstance(value, list | tuple) and all(_is_count(each) and each > 0 for each in value)


def _are_three_sizes(value: object) -> bool:
    return _are_sizes(value) and isinstance(value, list | tuple) and len(value) == 3


def _is_share(value: object) -> bool:
    return type(value) in (int, float) and 0 < value <= MAX_FEATURES  # pyright: ignore[reportOperatorIssue]


def _are_numbers(value: object) -> bool:
    return isinstance(value, list | tuple) and all(type(each) in (int, float) and abs(each) <= MAX_FEATURES for each in value)


def _are_descriptions(value: object) -> bool:
    return _are_texts(value) or (isinstance(value, dict) and all(map(_is_text, value)) and all(map(_is_text, value.values())))


KINDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(("interpolation", "crop_mode", "tag", "license", "description", "origin_url", "paper_name"), (_is_text, "a text")),
    **dict.fromkeys(("paper_ids", "notes", "first_conv", "classifier", "label_names"), (_are_texts, "a text or a list of texts")),
    **dict.fromkeys(("input_size", "test_input_size", "min_input_size"), (_are_three_sizes, "a list of three sizes")),
    **dict.fromkeys(("pool_size", "test_pool_size"), (_are_sizes, "a list of sizes")),
    **dict.fromkeys(("crop_pct", "test_crop_pct"), (_is_share, "a positive number")),
    **dict.fromkeys(("mean", "std"), (_are_numbers, "a list of numbers")),
    **dict.fromkeys(("num_classes", "label_offset"), (_is_count, f"a whole number of at most {MAX_FEATURES}")),
    "fixed_input_size": (lambda value: isinstance(value, bool), "true or false"),
    "label_descriptions": (_are_descriptions, "a map of texts to texts"),
}
"""For each entry that is used, what it must be; other entries are not used."""


def check_data(data: Mapping[str, Any], where: str) -> None:
    """See that the entries which timm reads are what timm can use; None stands for no entry.

    Raises:
        CheckpointError: an entry of another kind; the message names it.
    """
    for name, (is_right, wanted) in KINDS.items():
        value = data.get(name)
        if value is not None and not is_right(value):
            raise CheckpointError(f"{where}.{name} must be {wanted}, got {value!r:.60}")
