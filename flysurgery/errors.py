"""Every error that flysurgery raises on purpose: a clear sentence and an exit code; and the reason why something stays as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class FlysurgeryError(Exception):
    """Base of all errors raised on purpose. The message says what was expected, what came, and what to do."""

    exit_code = 1


class PatternError(FlysurgeryError, ValueError):
    """Sizes that do not fit: a pattern, an architecture, or a tensor held against one."""


class BackendError(FlysurgeryError, RuntimeError):
    """No backend, or not the named one, can run a multiplication; the message gives each reason."""


class ProjectionError(FlysurgeryError, ValueError):
    """A matrix that cannot be projected: NaN or infinite entries, or an architecture without an algorithm."""


class WalkError(FlysurgeryError, RuntimeError):
    """A model whose graph cannot be exported, with the reason that the exporter gave."""


class SelectionError(FlysurgeryError, ValueError):
    """A selector that matched nothing; the message lists the nearest names."""

    exit_code = 2


class OptionError(FlysurgeryError, ValueError):
    """An option outside its range or one that contradicts another."""

    exit_code = 2


class PlanError(FlysurgeryError, ValueError):
    """A plan that contradicts itself, or the model that it is applied to. The model is unchanged."""


class SurgeryError(FlysurgeryError, RuntimeError):
    """Surgery that could not be completed. The model is unchanged."""


class InferenceError(FlysurgeryError, RuntimeError):
    """A model that cannot be optimized or captured, or a call that a captured model does not take. The model is unchanged."""


class ModelError(FlysurgeryError, ValueError):
    """A model that cannot be named, built or given its weights."""


class CheckpointError(FlysurgeryError, ValueError):
    """A folder or file that cannot be read or written as a checkpoint. Nothing half-written is left."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))  # which may quote a file


class DataError(FlysurgeryError, ValueError):
    """A data set that cannot be found or read, or that does not fit the model."""


class TrainingError(FlysurgeryError, RuntimeError):
    """Training that cannot begin or go on. What was saved before is left as it is."""


def check_seed(seed: object) -> None:
    """Raise ``OptionError`` unless the seed is one that torch and numpy both take."""
    if not isinstance(seed, int) or not 0 <= seed < 1 << 32:
        raise OptionError(f"seed must be a whole number from 0 to {(1 << 32) - 1}, got {shown(seed)}")


def shortened(text: str, most: int = 400) -> str:
    """The printable characters of a text, which may come from a file, on one line of at most ``most``; its end stays."""
    line = "".join(each for each in " ".join(text.split()) if each.isprintable())
    end = most // 4
    return line if len(line) <= most else f"{line[: most - end - 5]} ... {line[-end:]}"


def shown(value: object) -> str:
    """The value for a message."""
    return shortened(repr(value), 120)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the error's name where it has none, without a full stop: to end a sentence with."""
    return shortened((str(error).strip() or type(error).__name__).splitlines()[0], 200).rstrip(".")


@contextmanager
def raised_as(kind: type[FlysurgeryError], what: str) -> Iterator[None]:
    """Inside, an exception of any other kind, as libraries raise them, becomes one of ``kind`` that says ``what`` and why.

    That a GPU has no memory left stays what it is: callers try smaller batches then.
    """
    try:
        yield
    except kind:
        raise
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # PyTorch's, which this room does not import
            raise
        raise kind(f"{what}: {first_line(error)}") from error


@dataclass(frozen=True)
class Reason:
    """Why a layer stays dense, or a group of layers is not fused: a code for programs and a sentence for people."""

    code: str
    text: str
