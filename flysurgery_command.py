"""What the command ``flysurgery`` starts. It is outside of the package, so that it runs before the package is imported."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Import the package and run its command line; an interruption while the import lasts ends the process at once and in silence."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from flysurgery.cli import main as run

    signal.signal(signal.SIGINT, handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
