"""The optimizer on flat slices: how it comes to hold them, and what happens around its step."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from .layout.chunk import Chunk, Slice

Arrange = Callable[[torch.Tensor, torch.Tensor], Sequence[Sequence[torch.Tensor]]]


def rewire_(optimizer: Optimizer, chunks: Sequence[Chunk], stage: int) -> None:
    """Replaces the parameters in each param group by flat slices; group dicts and all their other entries stay.

    Args:
        optimizer: One that has not stepped; state that its constructor has made is cut like the parameters.
        chunks: What holds its parameters.
        stage: At 0 a slice is a whole region of a chunk, at others what this rank's share holds of it.
    """
    by_group: dict[int, list[nn.Parameter]] = defaultdict(list)
    made = dict(optimizer.state)
    optimizer.state.clear()
    for chunk in chunks:
        chunk.slices = list(_slices(chunk, stage))
        for each in chunk.slices:
            by_group[each.group].append(each.tensor)
            state = _cut(made, chunk, each)
            if state:
                optimizer.state[each.tensor] = state
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


def is_fresh(optimizer: Optimizer) -> bool:
    """Whether an optimizer has not stepped. Some make their state before, such as Adagrad, with a `step` of 0."""
    return all(
        isinstance(state, Mapping) and (not state or ("step" in state and float(state["step"]) == 0))
        for state in optimizer.state.values()
    )


def _cut(made: Mapping[Any, Mapping[str, Any]], chunk: Chunk, part: Slice) -> dict[str, Any]:
    """What an optimizer's constructor has made for parameters, cut like one slice of them."""
    state: dict[str, Any] = {}
    for member, (start, stop) in zip(chunk.members, chunk.layout.slots, strict=True):
        low, high = max(start, part.start), min(stop, part.stop)
        for slot, value in made.get(member.parameter, {}).items() if low < high else ():
            if not _is_like(member.shape, slot, value):
                state.setdefault(slot, value)
                continue
            if slot not in state:
                state[slot] = torch.zeros(part.tensor.shape, dtype=value.dtype, device=value.device)
            state[slot].view(-1)[low - part.start : high - part.start] = value.reshape(-1)[low - start : high - start]
    return state


def _is_like(shape: torch.Size, slot: str, value: object) -> bool:
    """Whether a slot has a number for each element of a parameter."""
    return slot != "step" and isinstance(value, torch.Tensor) and value.shape == shape


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
    apart = _probed(optimizer, group, lambda first, second: [[first, second]])
    together = _probed(optimizer, group, lambda first, second: [[torch.cat([first.flatten(), second.flatten()])]])
    return apart is not None and together is not None and torch.allclose(apart, together, rtol=1e-4, atol=1e-6)


def uses_all(optimizer: Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer steps two tensors in another way than each by itself.

    Args:
        optimizer: Whose class and settings to try; it is not touched.
        group: The settings.
    """
    found = []
    with torch.random.fork_rng(devices=[]):
        for arrange in (lambda first, second: [[first, second]], lambda first, second: [[first], [second]]):
            torch.default_generator.manual_seed(0)  # for those that draw numbers: the same ones
            found.append(_probed(optimizer, group, arrange))
    together, alone = found
    return together is not None and alone is not None and not torch.allclose(together, alone, rtol=1e-4, atol=1e-6)


def _probed(optimizer: Optimizer, group: Mapping[str, Any], arrange: Arrange) -> torch.Tensor | None:
    """All elements of two tensors after a few steps; None if no step can be made.

    Args:
        optimizer: Whose class and settings to try.
        group: The settings.
        arrange: From the two tensors to what each of some optimizers gets.
    """
    generator = torch.Generator().manual_seed(0)

    def drawn() -> Sequence[Sequence[torch.Tensor]]:
        return arrange(torch.randn(4, 6, generator=generator), torch.randn(3, 5, generator=generator))

    parameters = [[nn.Parameter(each) for each in some] for some in drawn()]
    twins = [_twin(optimizer, group, some) for some in parameters]
    for _ in range(3):
        for some, gradients in zip(parameters, drawn(), strict=True):
            for each, gradient in zip(some, gradients, strict=True):
                each.grad = gradient
        if not all(_stepped(twin) for twin in twins):
            return None
    return torch.cat([each.detach().flatten() for some in parameters for each in some])


def _stepped(twin: Optimizer) -> bool:
    """Makes a step. One that wants matrices alone, or needs more than gradients, refuses."""
    try:
        twin.step()
    except (TypeError, ValueError, RuntimeError, LookupError, AssertionError):
        return False
    return True


def _twin(optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]) -> Optimizer:
    """An optimizer of the same class and settings for other parameters, without a call of its constructor."""
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    for name, value in optimizer.__dict__.items():
        if name.startswith("_optimizer_") and isinstance(value, dict):
            twin.__dict__[name] = type(value)()  # hooks
        elif callable(getattr(type(optimizer), name, None)):
            del twin.__dict__[name]  # such as the `step` of an lr scheduler, which is bound to the optimizer itself
        elif isinstance(value, torch.Generator) and value.device.type == "cpu":
            twin.__dict__[name] = torch.Generator().set_state(value.get_state())
    made = {each: _as_made(optimizer, group, each) for each in parameters}
    twin.state = defaultdict(dict, {each: state for each, state in made.items() if state})
    settings = {key: _on_cpu(value) for key, value in group.items() if key not in ("params", "param_names")}
    if "lr" in settings and float(settings["lr"]) == 0:  # before a warm-up, in which nothing would move
        settings["lr"] = 1e-2
    if settings.get("capturable"):  # for GPUs alone, and another way to the same numbers
        settings |= {"capturable": False, "foreach": False}
    twin.param_groups = [{**settings, "params": parameters}]
    return twin


def _as_made(optimizer: Optimizer, group: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Any]:
    """State for a parameter, such as an optimizer's constructor has made for those of a group."""
    for each in group["params"]:
        if each.numel():
            return {
                slot: torch.full_like(parameter, value.flatten()[0].real.item())
                if _is_like(each.shape, slot, value)
                else _on_cpu(value)
                for slot, value in optimizer.state.get(each, {}).items()
            }
    return {}


def _on_cpu(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
