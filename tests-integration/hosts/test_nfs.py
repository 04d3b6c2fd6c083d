"""NFS for real, where this machine's kernel has none: Linux as a process, which serves files and mounts them twice."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.hosts

TESTS = Path(__file__).parents[2] / "packages" / "par-checkpoint" / "tests" / "storage" / "test_mounts.py"
NEEDED = {"linux.uml": "user-mode-linux", "modprobe": "kmod", "exportfs": "nfs-kernel-server", "rpcbind": "rpcbind"}
NEEDED |= {"mount.nfs": "nfs-common"}
SECONDS = 900

# The first process of the guest, whose files are this machine's, to read. Release 4 of NFS grants nothing in its first
# seconds, unless it is told that no client of an earlier server is to come. To it both mounts are of one client: were
# there leases, it would promise one of them that nobody writes what the other one does.
INIT = """\
#!/bin/sh
export PATH={path} HOME=/root
mount -t proc proc /proc
for folder in /run /mnt /var/lib/nfs; do mount -t tmpfs -o size={size} tmpfs $folder; done
mkdir -p /mnt/lib /mnt/tmp /run/rpcbind /var/lib/nfs/sm /var/lib/nfs/v4recovery
touch /var/lib/nfs/etab /var/lib/nfs/rmtab
ln -s /usr/lib/uml/modules /mnt/lib/modules
ip link set lo up
hostname guest
for module in nfsd nfsv3 nfsv4; do modprobe -d /mnt $module; done
echo 0 > /proc/sys/fs/leases-enable
mount -t nfsd nfsd /proc/fs/nfsd
rpcbind -w
rpc.nfsd 4
echo Y > /proc/fs/nfsd/v4_end_grace
rpc.mountd
rpc.statd --no-notify
cd {folder}
{command}
echo "ended with $?"
halt -f
"""


def in_guest(folder, *command, size="1g", **variables):
    """Runs a command in a guest; whether it ended well, and all that was said there.

    Args:
        folder: Where the guest's first process lies.
        command: What it then runs.
        size: Of what it may write, as tmpfs is told.
        variables: Of its environment.
    """
    for program, package in NEEDED.items():
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing; install {package}")
    words = shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *command])
    init = folder / "init"
    init.write_text(INIT.format(path=os.environ["PATH"], size=size, folder=Path.cwd(), command=words))
    init.chmod(0o755)
    kernel = ["linux.uml", "mem=3G", "rootfstype=hostfs", "rootflags=/", "ro", f"init={init}", "con=null"]
    said = folder / "said"
    with said.open("w") as console:
        subprocess.run(
            [*kernel, "con0=null,fd:1", "quiet"],
            stdout=console,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            check=False,
            env={**os.environ, "TMPDIR": "/dev/shm"},  # of its memory, which is to be shared and executable
        )
    text = said.read_text()
    return "ended with 0" in text, text


def test_two_nfs_mounts_of_one_folder(tmp_path):
    """The tests of file systems that several machines mount, with those of NFS, releases 3 and 4.2, late ones too."""
    asked = os.environ.get("TEST_NFS", "nfs and not never_mix")
    pytest_of_it = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "-m", "", "-k", asked]
    well, said = in_guest(
        tmp_path,
        *pytest_of_it,
        "--durations=9",
        str(TESTS),
        TMPDIR="/mnt/tmp",
        PYTHONPATH=os.environ.get("PYTHONPATH", ""),
        PYTHONDONTWRITEBYTECODE="1",
        OMP_NUM_THREADS="1",
    )
    print(said)
    assert well, said
    assert "skipped" not in said, said
