"""A process whose memory the operating system limits trains a model of which nothing but three units fits there."""

import os
import subprocess
import sys
import textwrap

import pytest

CHILD = textwrap.dedent("""
    import os, resource, sys
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from torch import nn
    from par_groups import launch
    from par_zero import Offload, residency, shard

    where, limited, folder = sys.argv[1:]
    WIDTH, BLOCKS, MIB = 512, 64, 2**20  # 64 units of 1 MiB; with gradients and both slots of Adam 256 MiB
    ROOM = 22 * MIB  # for the units and sums that come and go, the ring, threads, and what a heap keeps
    torch.set_num_threads(1)

    def told(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

    def fill(part, prefix):
        for name, child in part.named_modules():
            if isinstance(child, nn.Linear):
                child.to_empty(device="cpu")
                generator = torch.Generator().manual_seed(int((prefix + name).strip(".") or 0))
                child.weight.data.normal_(std=WIDTH**-0.5, generator=generator)

    with launch():
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        (nn.Linear(8, 8)(torch.ones(1, 8))).sum().backward()  # what torch makes once
        if limited == "limited":
            resource.setrlimit(resource.RLIMIT_DATA, (told("VmData") + ROOM,) * 2)
        before = told("RssAnon")
        anonymous = []
        disk = {"optimizer": "disk", "parameters": "disk", "gradients": "disk"}
        offload = Offload(**disk, path=folder, piece="256KiB", ahead=3) if where == "disk" else None
        policies = {"overlap": {"bucket": 1}, "init": {"init_fn": fill}, "offload": offload}
        shard(model, optimizer, stage=3, group=dist.group.WORLD, **policies)

        def sample(*_):
            anonymous.append(told("RssAnon") - before)

        for block in model:
            block.register_forward_hook(sample)
            block.weight.register_post_accumulate_grad_hook(sample)
        optimizer.register_step_post_hook(sample)
        for number in range(4):
            for micro in range(2):
                rows = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2 * number + micro))
                loss = model(rows).square().mean()
                loss.backward()
                print(loss.item().hex(), flush=True)
            optimizer.step()
            optimizer.zero_grad()
        if limited == "limited":
            told_bytes = sum(residency(model).total(tier, fullest=True) for tier in ("device", "host"))
            assert told_bytes < 14 * MIB, residency(model)
            assert max(anonymous) < ROOM, max(anonymous)  # counted by the kernel in another way
""")


def run(where, limited, folder):
    command = [sys.executable, "-c", CHILD, where, limited, str(folder)]
    # A heap that keeps what was given back would count against the limit.
    own = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | own, check=False, timeout=240)


@pytest.mark.storm  # three processes, each of which imports torch
@pytest.mark.skipif(sys.platform != "linux", reason="this limit leaves out memory that lies in files on Linux alone")
def test_model_of_twelve_times_the_memory_limit_trains(tmp_path):
    expected = run("memory", "free", tmp_path)
    assert expected.returncode == 0, expected.stderr
    refused = run("memory", "limited", tmp_path)
    assert refused.returncode == 1
    assert "can't allocate memory" in refused.stderr, refused.stderr
    found = run("disk", "limited", tmp_path)
    assert found.returncode == 0, found.stderr
    assert found.stdout == expected.stdout
    assert len(found.stdout.split()) == 8
    assert not list(tmp_path.iterdir())
