"""`python -m par_testing.accelerator par_train run ...`: a module's command in a process that has a strict device.

The process is a world of one: `launch()` finds the strict backend, which takes tensors of the device.
"""

import runpy
import sys

from ..strict.backend import register
from ..strict.options import Strict
from ..strict.referee import Referee
from .device import enable
from .options import Accelerator
from .ranks import RankDevice

if __name__ == "__main__":
    enable(Accelerator())
    with Referee(1, Strict()) as referee:
        player = register(referee.folder, 0, Strict(), RankDevice())
        sys.argv = sys.argv[1:]
        try:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        finally:
            player.end("has ended")
