"""`python -m par_checkpoint`."""

import sys

from ._cli import main

sys.exit(main())
