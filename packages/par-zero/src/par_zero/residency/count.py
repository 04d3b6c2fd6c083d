"""The inspection of a rank's memory and disk. Each storage is counted once."""

from collections.abc import Container, Iterable, Iterator, Sequence

import torch
from torch import nn
from torch.optim import Optimizer

from par_groups import slots_of

from .._tiers import TIERS
from .._torch_private import without_torch_functions
from ..layout.chunk import Chunk
from ..layout.meter import BUFFERS, GRADIENTS, Meter
from ..offload.tier import DiskTier
from .table import KINDS, Residency


def count(
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    chunks: Sequence[Chunk],
    gradients: Iterable[tuple[str, torch.Tensor, str]],
    disk_tier: DiskTier | None,
    meter: Meter,
) -> Residency:
    """Return this rank's bytes now, and at the peak of the latest step. The call neither waits nor communicates.

    Args:
        module: Sharded module.
        optimizers: Optimizers of the module's parameters.
        chunks: All chunks of the module.
        gradients: Memory of gradients and of their reductions, as tuples of kind, tensor and tier.
        disk_tier: Data that is stepped piece by piece. None: there is none.
        meter: Meter that has counted allocated and freed memory during the step.
    """
    now = {tier: dict.fromkeys(KINDS, 0) for tier in TIERS}
    seen: set[int] = set()

    def add(kind: str, tensor: torch.Tensor, tier: str = "device") -> None:
        storage = tensor.untyped_storage()
        if not tensor.is_meta and storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            now[tier][kind] += storage.nbytes()

    on_disk: set[nn.Parameter] = set()
    if disk_tier is not None:
        on_disk = disk_tier.tensors_on_disk
        now["host"][BUFFERS] = disk_tier.buffer_bytes
        now["host"][GRADIENTS] = disk_tier.gradient_bytes
        now["disk"] |= disk_tier.stored_bytes
        # `stored_bytes` has counted these shards already.
        seen |= {chunk.own.untyped_storage().data_ptr() for chunk in chunks if disk_tier.shards.has(chunk)}
    for each in gradients:
        add(*each)
    for chunk in chunks:
        for each in chunk.memory():
            add(*each)
        # On a CPU, device and host are one memory, so `master` also has the slices that count as offloaded to the host.
        if chunk.master is not chunk.own:
            away = sum(
                part.tensor.nbytes for part in chunk.slices if part.tier == "host" and part.start not in chunk.elsewhere
            )
            now["device"]["copies"] -= away
            now["host"]["copies"] += away
        if chunk.slices or chunk.wholes:
            for each in _of_optimizer(chunk, optimizers[chunk.plan.owner], on_disk):
                add(*each)
    # A parameter whose all-gather is in flight would wait for it.
    with without_torch_functions():
        for tensor in (*module.parameters(), *module.buffers()):
            add("parameters", tensor)
    fullest = {tier: dict(held) for tier, held in now.items()}
    fullest["device"] |= meter.fullest
    return Residency(now=now, fullest=fullest)


def _of_optimizer(
    chunk: Chunk, optimizer: Optimizer, on_disk: Container[nn.Parameter]
) -> Iterator[tuple[str, torch.Tensor, str]]:
    """Yield the memory of an optimizer for a chunk, as tuples of kind, tensor and tier."""
    tiers = {part.tensor: part.tier for part in chunk.slices} | dict.fromkeys(chunk.wholes, "device")
    for part in chunk.slices:
        # The slice is on the host of an accelerator, or a write to the disk has failed and it is still in memory.
        if part.start in chunk.elsewhere and part.tensor not in on_disk:
            yield "copies", part.tensor, "host" if part.tier == "host" else "device"
    for tensor, tier in tiers.items():
        in_file = (slots_of(tensor) or {}) if tensor in on_disk else {}
        # The tuple is a snapshot: a thread may step the tensor, and so add items, in the meantime.
        for name, value in tuple(optimizer.state.get(tensor, {}).items()):
            if isinstance(value, torch.Tensor) and name not in in_file:
                yield "optimizer", value, "host" if tier == "host" and value.dim() else "device"
