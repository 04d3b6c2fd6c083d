"""`par-train render`: writes the file for a cluster's scheduler from the config that `plan` and `run` read.

`place` divides the world into nodes and checks the config for it. `slurm`, `ray` and `kubernetes` each write the text
of one file. Its job resumes from the last checkpoint whenever it is started. No torch.
"""

from .render import render

__all__ = ["render"]
