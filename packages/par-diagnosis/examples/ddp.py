"""A DDP job in which one rank waits for its data: `torchrun --nproc-per-node 2 ddp.py`."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from par_diagnosis import Watchdog

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))

with Watchdog("dumps", timeout=3):
    for step in range(6):
        if step == 3 and dist.get_rank() == 1:
            time.sleep(20)  # stands for a slow data loader
        model(torch.randn(4, 8)).sum().backward()
