"""The launchers of clusters, for real: two hosts on one machine, SLURM on them, Open MPI.

Needs root, and Debian's slurm-wlm, munge and openmpi-bin. `nox -s hosts` runs it; what is missing is skipped.
"""
