"""An FSDP2 job that hangs, because one rank has no images: `torchrun --nproc-per-node 2 fsdp2.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from par_diagnosis import Watchdog

dist.init_process_group("gloo")
text, vision = (fully_shard(nn.Linear(64, 64)) for _ in range(2))

with Watchdog("dumps", timeout=3):
    for step in range(6):
        output = text(torch.randn(4, 64))
        if step != 3 or dist.get_rank() == 0:  # in step 3, the batch of rank 1 has no images
            output = output + vision(torch.randn(4, 64))
        output.sum().backward()
