"""The optimizer on flat slices: how it comes to hold them, and what happens around its step."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ._chunk import Chunk, Slice


def rewire_(optimizer: Optimizer, chunks: Sequence[Chunk], stage: int) -> None:
    """Replaces the parameters in each param group by flat slices; group dicts and all their other entries stay.

    Args:
        optimizer: One that has not stepped.
        chunks: What holds its parameters.
        stage: At 0 a slice is a whole region of a chunk, at others what this rank's share holds of it.
    """
    by_group: dict[int, list[nn.Parameter]] = defaultdict(list)
    for chunk in chunks:
        chunk.slices = list(_slices(chunk, stage))
        for each in chunk.slices:
            by_group[each.group].append(each.tensor)
    for number, group in enumerate(optimizer.param_groups):
        group["params"] = by_group[number]
        group.pop("param_names", None)  # of what is packed; the tensors say it themselves


def _slices(chunk: Chunk, stage: int) -> Iterator[Slice]:
    origin = 0 if stage == 0 else chunk.layout.share(chunk.rank)[0]
    shapes = {slot: member.shape for slot, member in zip(chunk.layout.slots, chunk.members, strict=True)}
    for each in chunk.layout.regions if stage == 0 else chunk.layout.slices(chunk.rank):
        part = chunk.master[each.start - origin : each.stop - origin]
        if chunk.layout.whole:  # optimizers that are not element-wise look at the shape
            part = part.view(shapes[each.start, each.stop])
        yield Slice(tensor=nn.Parameter(part), group=each.group, start=each.start)


class Unmoved:
    """Keeps parameters without a gradient on any rank as they are: a zero gradient would let AdamW move them.

    The optimizer passes over a called module that was not used at all, so that its count of steps stays too.

    Args:
        optimizer: Which steps.
        chunks: What it holds.
        unused: By chunk: the members that had no gradient.
    """

    def __init__(self, optimizer: Optimizer, chunks: Sequence[Chunk], unused: Sequence[Sequence[int]]) -> None:
        self._optimizer = optimizer
        self._kept: list[tuple[torch.Tensor, int, int, dict[str, torch.Tensor]]] = []
        used = {chunk.items for chunk, members in zip(chunks, unused, strict=True) if len(members) < len(chunk.members)}
        for chunk, members in zip(chunks, unused, strict=True):
            for start, stop in (chunk.layout.slots[member] for member in members):
                for each in chunk.slices:
                    low, high = max(each.start, start) - each.start, min(each.stop, stop) - each.start
                    if low < high:
                        self._keep(each.tensor, low, high, pass_over=chunk.layout.whole or chunk.items not in used)

    def restore_(self) -> None:
        """After the step."""
        for tensor, low, high, copies in self._kept:
            tensor.detach().view(-1)[low:high] = copies[""]
            for slot, value in self._slots(tensor).items():
                value.view(-1)[low:high] = copies.get(slot, 0)

    def _keep(self, tensor: torch.Tensor, low: int, high: int, *, pass_over: bool) -> None:
        if pass_over:  # nothing else lies in the tensor, at every stage
            tensor.grad = None
        else:  # what lies beside it differs by stage, and so would the count of steps
            self._kept.append((tensor, low, high, self._copies(tensor, low, high)))

    def _copies(self, tensor: torch.Tensor, low: int, high: int) -> dict[str, torch.Tensor]:
        slots = {slot: value.view(-1)[low:high].clone() for slot, value in self._slots(tensor).items()}
        return {"": tensor.detach().view(-1)[low:high].clone(), **slots}

    def _slots(self, tensor: torch.Tensor) -> Mapping[str, torch.Tensor]:
        state: Mapping[str, Any] = self._optimizer.state.get(tensor, {})
        return {
            slot: value
            for slot, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == tensor.shape
        }


def works_flat(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer treats each element by itself: the same steps for two tensors and for both as one flat one.

    Args:
        optimizer: Whose class and settings to try; it is not touched.
        group: The settings.
    """
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(4, 6, generator=generator), torch.randn(3, 5, generator=generator))
    flat = torch.cat([first.flatten(), second.flatten()])
    apart, together = [nn.Parameter(first), nn.Parameter(second)], [nn.Parameter(flat)]
    tried = [(_twin(optimizer, group, each), each) for each in (apart, together)]
    for _ in range(3):
        gradients = [torch.randn(each.shape, generator=generator) for each in apart]
        apart[0].grad, apart[1].grad = gradients
        together[0].grad = torch.cat([each.flatten() for each in gradients])
        if not all(_stepped(twin) for twin, _ in tried):
            return False
    return torch.allclose(
        torch.cat([each.detach().flatten() for each in apart]), together[0].detach(), rtol=1e-4, atol=1e-6
    )


def _stepped(twin: Optimizer) -> bool:
    """Makes a step. One that wants matrices alone, or needs more than gradients, refuses."""
    try:
        twin.step()
    except (TypeError, ValueError, RuntimeError, LookupError):
        return False
    return True


def _twin(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of the same class and settings for other parameters, without a call of its constructor."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    for name, value in optimizer.__dict__.items():
        if name.startswith("_optimizer_") and isinstance(value, dict):
            twin.__dict__[name] = type(value)()  # hooks
    twin.state = defaultdict(dict)
    settings = {key: _on_cpu(value) for key, value in group.items() if key not in ("params", "param_names")}
    twin.param_groups = [{**settings, "params": parameters}]
    return twin


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
