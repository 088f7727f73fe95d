"""What a checkpoint's safetensors file says of itself, in its header."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flysurgery.checkpoint.files import parse_json
from flysurgery.errors import CheckpointError, PlanError
from flysurgery.surgery import Plan

SCHEMA = "1"
"""The number that checkpoints carry; other numbers are refused. The first ones of this number have no entry ``tensors``."""

SCHEMA_KEY = "flysurgery.schema"


@dataclass(frozen=True)
class Header:
    """The plan, the tensors, and the names of those that are another tensor's second name (``alias -> stored name``).

    ``tensors`` maps each stored name to its dtype, by safetensors' name ("F32"), and the SHA-256 of its bytes. It is None in files of
    the first versions, which did not say.
    """

    plan: Plan
    aliases: Mapping[str, str] = field(default_factory=dict)
    tensors: Mapping[str, tuple[str, str]] | None = None

    def to_metadata(self, version: str) -> dict[str, str]:
        """The header's entries, texts only.

        Hashes are those of canonical JSON: ``base_sha256`` that of ``{"base", "base_args"}``, ``tensors_sha256`` that of
        the entries ``tensors`` and ``aliases``, one after the other.
        """
        plan = canonical(self.plan.to_json())
        metadata = {
            "format": "pt",
            SCHEMA_KEY: SCHEMA,
            "version": version,
            "base": self.plan.base or "",
            "base_sha256": _base_sha256(self.plan),
            "plan": plan,
            "plan_sha256": _sha256(plan),
        }
        if self.aliases:
            metadata["aliases"] = canonical(dict(self.aliases))
        if self.tensors is not None:
            metadata["tensors"] = canonical(dict(self.tensors))
            metadata["tensors_sha256"] = _sha256(metadata["tensors"] + metadata.get("aliases", ""))
        return metadata

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
        lacking = [key for key in ("base", "base_sha256", "plan", "plan_sha256") if key not in metadata]
        if lacking:
            raise CheckpointError(f"{where} is damaged: its header has no {', '.join(lacking)}")
        if _sha256(metadata["plan"]) != metadata["plan_sha256"]:
            raise CheckpointError(f"{where} is damaged or was changed: plan_sha256 does not match its plan")
        try:
            plan = Plan.from_json(parse_json(metadata["plan"]))
        except (PlanError, ValueError) as error:
            raise CheckpointError(f"{where} holds a plan that cannot be used: {error}") from error
        if plan.base != metadata["base"] or _base_sha256(plan) != metadata["base_sha256"]:
            raise CheckpointError(f"{where} is damaged or was changed: base or base_sha256 does not match the base of its plan")
        if ("tensors" in metadata) != ("tensors_sha256" in metadata):
            raise CheckpointError(f"{where} is damaged: its header has one of tensors and tensors_sha256, and not the other")
        if "tensors" in metadata and _sha256(metadata["tensors"] + metadata.get("aliases", "")) != metadata["tensors_sha256"]:
            raise CheckpointError(f"{where} is damaged or was changed: tensors_sha256 does not match its tensors and aliases")
        aliases = _read_map(metadata, "aliases", where, lambda entry: isinstance(entry, str), "names")
        if "tensors" not in metadata:
            return cls(plan, aliases)
        tensors = _read_map(metadata, "tensors", where, _is_dtype_and_hash, "dtypes and hashes")
        return cls(plan, aliases, {name: (dtype, sha256) for name, (dtype, sha256) in tensors.items()})


def canonical(value: Any) -> str:
    """JSON in one way only: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _read_map(metadata: Mapping[str, str], key: str, where: str, is_right: Callable[[Any], bool], wanted: str) -> dict[str, Any]:
    try:
        found = parse_json(metadata.get(key, "{}"))
    except ValueError as error:
        raise CheckpointError(f"{where} is damaged: its {key} are no JSON") from error
    if not isinstance(found, dict) or not all(map(is_right, found.values())):
        raise CheckpointError(f"{where} is damaged: its {key} do not map names to {wanted}")
    return found


def _is_dtype_and_hash(entry: object) -> bool:
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(part, str) for part in entry)


def _base_sha256(plan: Plan) -> str:
    return _sha256(canonical({"base": plan.base, "base_args": dict(plan.base_args)}))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
