"""`par-train render`: the file that a cluster's scheduler takes, written from the config that `plan` and `run` read.

`place` divides the world into nodes and checks the config for it; `slurm`, `ray` and `kubernetes` each turn that into
the text of one file, in which the run goes on from its last checkpoint however often it is started. No torch.
"""

from .render import render

__all__ = ["render"]
