"""Activations in host memory: the options that `checkpoint_layers` takes beside a policy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from par_groups import parse_size


@dataclass(frozen=True, kw_only=True)
class ToHost:
    """What layers keep for backward waits in host memory, and begins to come back before it is asked for.

    What a policy drops is still made again; this is for the rest. Tensors of an accelerator go into pinned host memory,
    copied beside the computation: on the device there are at most `resident` bytes, what the running layer keeps, and
    what `ahead` layers keep, on their way out or back. Tensors of the CPU stay. So do parameters and buffers, and, of a
    layer that runs again as a whole, keyword arguments.

    Args:
        resident: What may stay on the device, of all layers together: bytes, or a text such as "2GB".
        ahead: How many layers before their backward activations begin to come back; and how many layers run on while
            theirs are copied out.
        store: Puts a tensor away and returns what `load` takes; with `load`, in place of the copies into host memory.
            It is called with the elements of a whole storage in one dimension, once for all tensors that lie in it.
        load: Brings a tensor back, from what `store` returned.
        fetch: Begins to bring back what `load` will be asked for, from what `store` returned. None: nothing is done
            ahead.

    Raises:
        TypeError: `resident` is neither a number nor a text.
        ValueError: A number is negative, the text says no size, or of `store` and `load` one alone is given.
    """

    resident: int | str = 0
    ahead: int = 2
    store: Callable[[Tensor], Any] | None = None
    load: Callable[[Any], Tensor] | None = None
    fetch: Callable[[Any], None] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.resident, bool) or not isinstance(self.resident, int | str):
            raise TypeError(f"resident is {self.resident!r}; give bytes, or a text such as '2GB'")
        parse_size(self.resident, name="resident", example="2GB")
        if self.ahead < 0:
            raise ValueError(f"ahead is {self.ahead} layers; give 0 or more")
        if (self.store is None) != (self.load is None) or (self.fetch is not None and self.store is None):
            given = [name for name in ("store", "load", "fetch") if getattr(self, name) is not None]
            raise ValueError(f"of store, load and fetch {given} alone is given; give store and load together, or none")

    @property
    def bytes(self) -> int:
        """What may stay on the device, in bytes."""
        return parse_size(self.resident, name="resident", example="2GB")
