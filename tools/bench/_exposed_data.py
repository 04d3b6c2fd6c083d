"""Training steps over data and tensor ranks whose exposed communication is measured; each runs on strict ranks."""

from functools import partial

import torch
import torch.distributed as dist
from _decoder import Size
from _ranks import world
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim import AdamW, Optimizer

from par_groups import ProcessGroups, Topology
from par_layers import PartialGradientReducer, layer_set
from par_layers.examples import GPT
from par_testing import Times, strict_time, virtual_streams
from par_zero import DataParallelGroup, MixedPrecision, Overlap, shard

BUCKET = 100_000_000  # bytes of parameters that par-zero reduces as one
STEPS = 4  # of which the last is read; orders are learned in the first two


def sharded(size: Size, stage: int) -> Times:
    """par-zero over all ranks: bf16 in use, fp32 in the optimizer."""
    model = size.decoder()
    optimizer = AdamW(model.parameters(), fused=True)
    bucket = size.bucket(BUCKET)
    shard(
        model,
        optimizer,
        stage=stage,
        group=world(),
        overlap=Overlap(bucket=bucket),
        precision=MixedPrecision(param_dtype=torch.bfloat16),
    )
    return last_step(size, model, optimizer)


def fully_sharded(size: Size, *, reshard: bool) -> Times:
    """FSDP2 over all ranks, by its own streams: bf16 in use, fp32 in the optimizer."""
    model = size.decoder()
    mesh, policy = init_device_mesh("cpu", (dist.get_world_size(),)), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    optimizer = AdamW(model.parameters(), fused=True)
    with virtual_streams():
        return last_step(size, model, optimizer)


def tensor_parallel(size: Size, ranks: int) -> Times:
    """par-layers' 1d mode with sequence parallelism, in bf16; what other ranks there are share data by stage 1."""
    topology = Topology.from_config({"tensor": {"size": ranks, "mode": "1d"}}, dist.get_world_size())
    with ProcessGroups(topology) as groups:
        model = size.decoder(layer_set("1d", groups, sequence_parallel=True)).to(torch.bfloat16)
        optimizer = AdamW(model.parameters(), fused=True)
        if topology.size("data") == 1:
            return last_step(size, model, optimizer, PartialGradientReducer(model, groups))
        group = DataParallelGroup(groups["data"], index_of=partial(topology.index, "data"))
        shard(model, optimizer, stage=1, group=group, overlap=Overlap(bucket=size.bucket(BUCKET)))
        return last_step(size, model, optimizer, PartialGradientReducer(optimizer, groups))


def last_step(size: Size, model: GPT, optimizer: Optimizer, handler: PartialGradientReducer | None = None) -> Times:
    """The last of some training steps, from the end of the one before to its own."""
    ids, targets = size.batch()
    for _ in range(STEPS):
        strict_time()
        logits = model(ids)
        model.layers.cross_entropy(logits, targets, classes=size.vocabulary).backward()
        if handler is not None:
            handler.handle_gradient()
        optimizer.step()
        optimizer.zero_grad()
    return strict_time()
