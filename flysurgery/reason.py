"""Why something was left as it was."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why a layer stays dense, or a group of layers is not fused: a code for programs and a sentence for people."""

    code: str
    text: str
