"""`generate` of a sharded model: all tensor ranks generate the same text, and draw the same tokens."""

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from par_groups import agree, check_alike

from ..modes.grid import Axes, Grid
from .sequence import CutSequence

_PLAIN = (str, int, float, bool, type(None))


class Generation:
    """Replacement for a model's `generate`.

    Every rank runs the loop over tokens itself, and each forward sums the partial results of the ranks. Ranks that draw
    different tokens, or stop at different tokens, would sum parts of different texts or deadlock.

    Args:
        model: Model.
        grid: Coordinates of this rank.
        axes: Axes of the tensor group.
        sequence: Switch that splits activations along the sequence; generation turns it off.
    """

    def __init__(self, model: nn.Module, grid: Grid, axes: Axes, sequence: CutSequence) -> None:
        self.model, self.grid, self.axes, self.sequence = model, grid, axes, sequence

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return the replacement for the copied model."""
        return type(self)(copy.deepcopy(self.model, memo), self.grid, self.axes, self.sequence)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the model's class, drawing from the random state of the first tensor rank.

        Raises:
            ValueError: Ranks passed different prompts or options. Every rank raises.
        """
        device = next((tensor.device for tensor in self.model.parameters()), torch.device("cpu"))
        configs = [getattr(self.model, "generation_config", None), kwargs.get("generation_config")]
        # Each process hashes texts by a seed of its own, and Transformers keeps such a hash of some configs.
        options = [{**vars(each), "_original_object_hash": None} if each is not None else None for each in configs]
        asked = _digest([args, kwargs, options])
        said = agree(None, (asked, _states(device)), self.grid.group(self.axes))
        check_alike(
            {rank: text for rank, (text, _) in said.items()},
            "prompts or options of generate()",
            remedy="pass every rank of a tensor group the same",
            show=False,
        )
        # The states have come with the digests, in one exchange. Every rank draws from those of the first.
        (_, states), *_ = said.values()
        with _drawing_from(states, device), self.sequence.whole():
            return type(self.model).generate(self.model, *args, **kwargs)  # type: ignore[attr-defined]


def _digest(value: Any) -> str:
    """Return a hash of a value that is equal on ranks with equal numbers, texts and tensors.

    Other objects count by class.
    """
    digest = hashlib.sha256()
    for each in _leaves(value):
        if isinstance(each, Tensor):
            digest.update(f"{each.dtype} {tuple(each.shape)}".encode())
            if not each.is_meta:
                digest.update(each.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(each).encode())
    return digest.hexdigest()


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key)
            yield from _leaves(value[key])
    elif isinstance(value, (list, tuple)):
        # Without lengths, [[1], [2]] and [[1, 2]] would be equal.
        yield len(value)
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, (Tensor, *_PLAIN)):
        yield value
    else:
        yield type(value).__qualname__


def _states(device: torch.device) -> tuple[bytes, ...]:
    """Return the states of torch's generators for the CPU and for a device."""
    return tuple(bytes(generator.get_state().tolist()) for generator in _generators(device))


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type not in ("cpu", "meta"):
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        generators.append(torch.get_device_module(device).default_generators[index])
    return generators


@contextmanager
def _drawing_from(states: tuple[bytes, ...], device: torch.device) -> Iterator[None]:
    """Set torch's generators to the states of another rank, inside the context.

    If this rank's states were the same before, they keep the advanced states afterwards, as on the other rank. So ranks
    with identical random numbers keep them identical. A rank with different states gets its own states back.
    """
    own = _states(device)
    if own == states:
        yield
        return
    _set_states(states, device)
    try:
        yield
    finally:
        _set_states(own, device)


def _set_states(states: tuple[bytes, ...], device: torch.device) -> None:
    for generator, state in zip(_generators(device), states, strict=True):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8).clone())
