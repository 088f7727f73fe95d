"""``python -m flysurgery.cli``, which ``accelerate launch -m flysurgery.cli`` runs in each process."""

from __future__ import annotations

import sys

from flysurgery.cli import main

sys.exit(main())
