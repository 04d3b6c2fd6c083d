"""`python -m par_train`, which torchrun and srun can start where the script is not on the path."""

import sys

from ._cli import main

if __name__ == "__main__":
    sys.exit(main())
