"""A process whose memory the operating system limits trains with its state on a disk, is killed, and goes on."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

pytest.importorskip("safetensors")

CHILD = textwrap.dedent("""
    import os, resource, signal, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    import par_checkpoint
    from par_groups import launch
    from par_zero import Offload, shard

    where, limited, folder, first, last = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
    dtype = getattr(torch, sys.argv[6])
    WIDTH, BLOCKS, ROOM = 1024, 16, 32 * 2**20  # 64 MiB of parameters, and as much again for each of Adam's slots
    torch.set_num_threads(1)

    def killed(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    with launch():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        offload = Offload(optimizer="disk", path=folder, piece="1MiB", ahead=3) if where == "disk" else None
        options = {"stage": 0, "bucket": 4 * WIDTH * WIDTH, "param_dtype": dtype, "offload": offload}
        shard(model, optimizer, group=dist.group.WORLD, **options)

        def step(number):
            rows = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = model(rows.to(dtype)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(loss.item().hex(), flush=True)

        if limited == "limited":  # gradients, the ring, threads and activations are to come, and state
            [line] = [line for line in open("/proc/self/status") if line.startswith("VmData")]
            gradients = 4 if dtype == torch.float32 else 6  # those of bf16, and as the optimizer takes them
            room = int(line.split()[1]) * 1024 + gradients * WIDTH * WIDTH * BLOCKS + ROOM
            resource.setrlimit(resource.RLIMIT_DATA, (room, room))
        if first:
            par_checkpoint.load(f"{folder}/saved", model=model, optimizer=optimizer, budget="8MiB", threads=1)
        for number in range(first, last):
            if where == "disk" and not first and number == last - 1:
                par_checkpoint.save(f"{folder}/saved", model=model, optimizer=optimizer, budget="8MiB", threads=1)
                optimizer.register_step_post_hook(killed)
            step(number)
""")


def run(where, limited, folder, first, last, dtype):
    command = [sys.executable, "-c", CHILD, where, limited, str(folder), str(first), str(last), dtype]
    # A heap that keeps what was given back would count against the limit.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=100)


@pytest.mark.storm  # four processes, each of which imports torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.skipif(sys.platform != "linux", reason="this limit leaves out memory that lies in files on Linux alone")
def test_state_of_four_times_the_room_trains_is_killed_and_goes_on(tmp_path, dtype):
    expected = run("memory", "free", tmp_path, 0, 4, dtype)
    assert expected.returncode == 0, expected.stderr
    refused = run("memory", "limited", tmp_path, 0, 4, dtype)
    assert refused.returncode == 1
    assert "can't allocate memory" in refused.stderr, refused.stderr
    first = run("disk", "limited", tmp_path, 0, 3, dtype)
    assert first.returncode == -signal.SIGKILL, first.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["saved"]  # and no scratch file
    second = run("disk", "limited", tmp_path, 2, 4, dtype)
    assert second.returncode == 0, second.stderr
    losses = expected.stdout.split()
    assert first.stdout.split() == losses[:2]
    assert second.stdout.split() == losses[2:]
