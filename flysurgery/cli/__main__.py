"""``python -m flysurgery.cli``, which ``accelerate launch -m flysurgery.cli`` runs in each process."""

import sys

from flysurgery.cli import main

sys.exit(main())
