"""`python -m zerokern` is the command `zerokern`."""

import sys

from .cli import main

sys.exit(main())
