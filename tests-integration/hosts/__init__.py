"""The launchers and file systems of clusters, for real: two hosts on one machine, SLURM on them, Open MPI, NFS.

Needs root, and Debian's slurm-wlm, munge, openmpi-bin, user-mode-linux, nfs-kernel-server and kmod. `nox -s hosts` runs
it; what is missing is skipped.
"""
