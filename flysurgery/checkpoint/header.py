"""What a checkpoint's safetensors file says of its tensors and of the plan in ``config.json``, in its header."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flysurgery.checkpoint.files import parse_json
from flysurgery.errors import CheckpointError
from flysurgery.surgery import Plan

SCHEMA = "1"
"""The number that checkpoints carry; other numbers are refused."""

SCHEMA_KEY = "flysurgery.schema"


@dataclass(frozen=True)
class Header:
    """The hash of the plan's canonical JSON, with its base, and of each tensor its dtype, by safetensors' name ("F32"), and SHA-256."""

    plan_sha256: str
    tensors: Mapping[str, tuple[str, str]]

    def to_metadata(self, version: str) -> dict[str, str]:
        """The header's entries, texts only; ``tensors_sha256`` is the hash of ``tensors``."""
        tensors = canonical(dict(self.tensors))
        return {
            "format": "pt",
            SCHEMA_KEY: SCHEMA,
            "version": version,
            "plan_sha256": self.plan_sha256,
            "tensors": tensors,
            "tensors_sha256": _sha256(tensors),
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], where: str) -> Header:
        """Read what ``to_metadata`` wrote. It may come from anywhere: all of it is checked (CheckpointError)."""
        if SCHEMA_KEY not in metadata:
            raise CheckpointError(f"{where} is no flysurgery checkpoint: its header has no {SCHEMA_KEY}; dense models are loaded with timm")
        if metadata[SCHEMA_KEY] != SCHEMA:
            raise CheckpointError(
                f"{where} has schema {metadata[SCHEMA_KEY]}, this version reads schema {SCHEMA}; "
                f"use flysurgery {metadata.get('version', 'of the version that wrote it')}"
            )
        lacking = [key for key in ("plan_sha256", "tensors", "tensors_sha256") if key not in metadata]
        if lacking:
            raise CheckpointError(f"{where} is damaged: its header has no {', '.join(lacking)}")
        if _sha256(metadata["tensors"]) != metadata["tensors_sha256"]:
            raise CheckpointError(f"{where} is damaged or was changed: tensors_sha256 does not match its tensors")
        try:
            tensors = parse_json(metadata["tensors"])
        except ValueError as error:
            raise CheckpointError(f"{where} is damaged: its tensors are no JSON") from error
        if not isinstance(tensors, dict) or not all(map(_is_dtype_and_hash, tensors.values())):
            raise CheckpointError(f"{where} is damaged: its tensors do not map names to dtypes and hashes")
        return cls(metadata["plan_sha256"], {name: (dtype, sha256) for name, (dtype, sha256) in tensors.items()})


def plan_sha256(plan: Plan) -> str:
    """The hash by which a header knows its plan."""
    return _sha256(canonical(plan.to_json()))


def canonical(value: Any) -> str:
    """JSON in one way only: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _is_dtype_and_hash(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
