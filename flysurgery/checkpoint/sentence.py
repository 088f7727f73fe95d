"""Messages that stay one sentence, whatever a file put into them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flysurgery.errors import CheckpointError

MAX_LENGTH = 400
"""Most characters of a message. Names, values and paths come from files and may have any length."""

END = 100
"""How many characters a message keeps of its end, where it says what to do."""


@contextmanager
def in_one_sentence() -> Iterator[None]:
    """Inside, a ``CheckpointError`` has one line of at most ``MAX_LENGTH`` characters; what is too long loses its middle."""
    try:
        yield
    except CheckpointError as error:
        text = " ".join(str(error).split())
        if len(text) > MAX_LENGTH:
            text = f"{text[: MAX_LENGTH - END - 5]} ... {text[-END:]}"
        if text == str(error):
            raise
        raise CheckpointError(text) from error
