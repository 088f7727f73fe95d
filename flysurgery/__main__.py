"""``python -m flysurgery``, which ``accelerate launch -m flysurgery`` runs in each process."""

import sys

from flysurgery.cli import main

sys.exit(main())
