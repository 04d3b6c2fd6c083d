"""Pipelined steps whose exposed communication is measured; each runs on strict ranks, one for each stage."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from _decoder import Size, layers_of, weights_of
from _ranks import world
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.nn import functional
from torch.optim import AdamW

from par_pipeline import Lanes, Pipeline, make_lanes, one_f_one_b, partition, zb_h1
from par_testing import Times, strict_time

MICROBATCHES = 16
STEPS = 2  # of which the last is read; what messages look like is known after the first
SCHEDULES = {"1F1B": one_f_one_b, "ZB-H1": zb_h1}
TORCHS: dict[str, Any] = {
    "1F1B": pipelining.Schedule1F1B,
    "interleaved ZB": pipelining.ScheduleInterleavedZeroBubble,
}


def pipelined(size: Size, name: str) -> Times:
    """par-pipeline, whose stages lie on neighbouring ranks."""
    stage, schedule = stage_of(size), SCHEDULES[name](dist.get_world_size(), MICROBATCHES)
    optimizer = AdamW(stage.parameters(), fused=True)
    pipeline = Pipeline(stage, schedule, world(), loss_fn=loss_of, lanes=strict_lanes)
    ids, targets = size.batch(MICROBATCHES)

    def step() -> None:
        pipeline.step(ids, target=targets)
        optimizer.step()
        optimizer.zero_grad()

    return last_step(step)


def torch_pipelined(size: Size, name: str) -> Times:
    """torch.distributed.pipelining with the same stages."""
    place, stages, module = dist.get_rank(), dist.get_world_size(), stage_of(size)
    optimizer = AdamW(module.parameters(), fused=True)
    stage = pipelining.PipelineStage(module, place, stages, torch.device("cpu"), group=world())
    schedule = TORCHS[name]
    several = issubclass(schedule, pipelining.schedules.PipelineScheduleMulti)
    made = schedule([stage] if several else stage, MICROBATCHES, loss_fn=loss_of)
    ids, targets = size.batch(MICROBATCHES)

    def step() -> None:
        made.step(*([ids] if place == 0 else []), target=targets if place == stages - 1 else None)
        optimizer.step()
        optimizer.zero_grad()

    return last_step(step)


def last_step(step: Callable[[], None]) -> Times:
    """The last of some steps, which all ranks begin at the same time."""
    for _ in range(STEPS):
        dist.barrier()
        strict_time()
        step()
    return strict_time()


def stage_of(size: Size) -> nn.Sequential:
    """This rank's part of the decoder, in bf16."""
    layers = layers_of(size.decoder())
    part = partition(layers, dist.get_world_size(), weights_of(size))[dist.get_rank()]
    return nn.Sequential(*[layers[number] for number in part]).bfloat16()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean over the tokens, in fp32."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def strict_lanes(group: dist.ProcessGroup, device: torch.device, timeout: timedelta) -> Lanes:
    """Headers go over gloo, and take no time; tensors over strict communicators, as over NCCL between GPUs."""
    up, down = (dist.new_group(group_desc=name) for name in ("up", "down"))
    return make_lanes(group, device, timeout)._replace(up_second=up, down_second=down, are_apart=True)
