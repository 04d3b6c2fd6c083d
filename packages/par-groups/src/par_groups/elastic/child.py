"""Becomes the command of a rank, so that the kernel kills it when its keeper ends.

`python -m par_groups.elastic.child PARENT COMMAND...` needs no torch. A keeper that was killed cannot end its ranks,
and a rank that is stopped cannot end itself, so the kernel has to.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel to kill this process with its parent, and become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed; run the ranks on Linux")
    if os.getppid() == parent:  # else the keeper has ended before the call above
        os.execvp(command[0], command)  # noqa: S606 - the command of the user


if __name__ == "__main__":
    main()
