"""Two steps of a plain loop. Run it again, on any number of ranks: it continues where the last run stopped.

torchrun --nproc-per-node 2 plain_loop.py
torchrun --nproc-per-node 1 plain_loop.py
"""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from par_data import ShardedDataLoader

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
plain = DataLoader(TensorDataset(torch.arange(100)), batch_size=6, shuffle=True)  # 6 samples over all ranks
loader = ShardedDataLoader(plain, rank=rank, num_replicas=ranks, seed=0)
position = Path("position.json")
if position.exists():
    loader.load_state_dict(json.loads(position.read_text()))

for _, (samples,) in zip(range(2), loader, strict=False):
    shards = [None] * ranks
    dist.all_gather_object(shards, samples.tolist())  # your model would train on `samples` here
    if rank == 0:
        print(f"after {loader.samples} samples:", " + ".join(map(str, shards)))

if rank == 0:
    position.write_text(json.dumps(loader.state_dict()))
dist.destroy_process_group()
