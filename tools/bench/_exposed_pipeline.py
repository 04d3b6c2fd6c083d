"""Pipelined steps whose exposed communication is measured; each runs on strict ranks, a process for each stage."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from _decoder import Size, layers_of, weights_of
from _ranks import world
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from par_groups import ProcessGroups, Topology
from par_layers import LayerSet, PartialGradientReducer, layer_set
from par_pipeline import Lanes, Pipeline, Transport, interleaved, make_lanes, one_f_one_b, partition, zb_h1
from par_testing import Times, strict_time
from par_zero import DataParallelGroup, Overlap, shard

MICROBATCHES = 16
BUCKET = 25_000_000  # bytes that DDP reduces as one, its default; par-zero takes as many
CHUNKS = 2  # stages on a rank where they are interleaved
SCHEDULES: dict[str, Any] = {"1F1B": one_f_one_b, "interleaved": interleaved, "ZB-H1": zb_h1}
TORCHS: dict[str, Any] = {
    "1F1B": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "interleaved ZB": pipelining.ScheduleInterleavedZeroBubble,
}

Beside = Literal["nothing", "data", "tensor"]
"""What the ranks of a host do, where each stage has a host: they share data, or the layers."""


@dataclass(frozen=True)
class Place:
    """Where this rank is.

    Args:
        pipeline: The ranks with the other stages.
        data: The ranks with the same stage and other data; None: there are none.
        groups: The groups of tensor ranks; None: there are none.
    """

    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup | None = None
    groups: ProcessGroups | None = None


def pipelined(size: Size, name: str, stages: int, beside: Beside = "nothing") -> Times:
    """par-pipeline, whose stages lie on neighbouring ranks or hosts."""
    schedule = SCHEDULES[name](stages, MICROBATCHES)
    with place_of(stages, beside) as place:
        layers = layers_in(place)
        mine = nn.ModuleList(stages_of(size, layers, schedule.stages, schedule.stage_of(dist.get_rank(place.pipeline))))
        optimizers = [AdamW(stage.parameters(), fused=True) for stage in mine]
        if place.data is not None:
            ranks = dist.get_world_size(place.data)
            for stage, optimizer in zip(mine, optimizers, strict=True):
                group = DataParallelGroup(place.data, index_of=lambda rank: rank % ranks)
                shard(stage, optimizer, stage=1, group=group, overlap=Overlap(bucket=size.bucket(BUCKET)))
        pipeline = Pipeline(
            [*mine], schedule, place.pipeline, loss_fn=loss_of(size, layers), transport=Transport(lanes=strict_lanes)
        )
        ids, targets = size.batch(MICROBATCHES)
        return last_step(lambda: pipeline.step(ids, target=targets), optimizers, mine, place)


def torch_pipelined(size: Size, name: str, stages: int, beside: Beside = "nothing") -> Times:
    """torch.distributed.pipelining with the same stages, under DDP where they share data."""
    kind = TORCHS[name]
    parts = stages * CHUNKS if name == "interleaved" else stages
    with place_of(stages, beside) as place:
        rank, layers = dist.get_rank(place.pipeline), layers_in(place)
        numbers = range(rank, parts, stages)
        mine = nn.ModuleList(stages_of(size, layers, parts, numbers))
        optimizers = [AdamW(stage.parameters(), fused=True) for stage in mine]
        wrapped: list[nn.Module] = [*mine]
        if place.data is not None:
            megabytes = size.bucket(BUCKET) / 2**20
            wrapped = [
                DistributedDataParallel(stage, process_group=place.data, bucket_cap_mb=megabytes) for stage in mine
            ]
        made = [
            pipelining.PipelineStage(module, number, parts, torch.device("cpu"), group=place.pipeline)
            for number, module in zip(numbers, wrapped, strict=True)
        ]
        several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
        schedule = kind(made if several else made[0], MICROBATCHES, loss_fn=loss_of(size, layers))
        ids, targets = size.batch(MICROBATCHES)
        inputs, target = [ids] if 0 in numbers else [], targets if parts - 1 in numbers else None
        return last_step(lambda: schedule.step(*inputs, target=target), optimizers, mine, place)


@contextmanager
def place_of(stages: int, beside: Beside) -> Iterator[Place]:
    """Makes this rank's groups: one stage after the other, each on one rank or on as many neighbours as there are."""
    ranks = dist.get_world_size()
    if beside == "tensor":
        config = {"pipeline": stages, "tensor": {"size": ranks // stages, "mode": "1d"}}
        with ProcessGroups(Topology.from_config(config, ranks)) as groups:
            yield Place(groups["pipeline"], groups=groups)
    elif beside == "data":
        replicas = ranks // stages
        data = [dist.new_group([*range(first, first + replicas)]) for first in range(0, ranks, replicas)]
        yield Place(dist.new_group([*range(0, ranks, replicas)]), data[dist.get_rank() // replicas])
    else:
        yield Place(world())


def layers_in(place: Place) -> LayerSet:
    """The layers of one device, or of tensor ranks that cut sequences, too."""
    return layer_set(None) if place.groups is None else layer_set("1d", place.groups, sequence_parallel=True)


def stages_of(size: Size, layers: LayerSet, parts: int, numbers: range | tuple[int, ...]) -> list[nn.Sequential]:
    """This rank's parts of the decoder, in bf16."""
    whole = layers_of(size.decoder(layers))
    cut = partition(whole, parts, weights_of(size))
    return [nn.Sequential(*[whole[layer] for layer in cut[number]]).bfloat16() for number in numbers]


def loss_of(size: Size, layers: LayerSet) -> Callable[[Tensor, Tensor], Tensor]:
    """The mean over the tokens, in fp32."""
    if layers.mode is None:
        return lambda logits, targets: functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    return lambda logits, targets: layers.cross_entropy(logits, targets, classes=size.vocabulary)


def last_step(step: Callable[[], object], optimizers: Sequence[Optimizer], stages: nn.Module, place: Place) -> Times:
    """The last of some steps, which all ranks begin at the same time.

    What messages look like is known after the first one, and the order in which par-zero reduces after the second.
    """
    handler = None if place.groups is None else PartialGradientReducer(stages, place.groups)
    for _ in range(2 if place.data is None else 3):
        dist.barrier()
        strict_time()
        step()
        if handler is not None:
            handler.handle_gradient()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return strict_time()


def strict_lanes(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Lanes:
    """Headers go over gloo, and take no time; tensors over strict communicators, as over NCCL between GPUs."""
    ranks = dist.get_process_group_ranks(group)
    up, down = (dist.new_group(ranks, group_desc=name) for name in ("up", "down"))
    return make_lanes(group, device, timeout)._replace(up_second=up, down_second=down, are_apart=True)
