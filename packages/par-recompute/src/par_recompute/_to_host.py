"""Options of `checkpoint_layers` for offloading activations to host memory."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from par_groups import parse_size


@dataclass(frozen=True, kw_only=True)
class ToHost:
    """Options for offloading saved activations to host memory and prefetching them before their backward.

    A policy still decides which activations are recomputed; these options apply to the saved ones. Tensors of an
    accelerator are copied into pinned host memory while the device computes. The device then holds at most `resident`
    bytes, the activations of the running layer, and those activations of `ahead` layers that are being copied. Tensors
    on the CPU, parameters and buffers stay in place. Keyword arguments of a layer that runs again completely also stay.

    Args:
        resident: Limit for the activations of all layers that stay on the device: bytes, or a text such as "2GB".
            Default: 0.
        ahead: Prefetch depth in layers: how many layers before its backward a layer's copy back begins, and how many
            layers run while its copy out is in flight. Default: 2.
        store: Function that stores a tensor and returns a handle for `load`; replaces the copies into host memory. Its
            argument is the content of one storage as a 1-D tensor; it is called once for all tensors in that storage.
        load: Function that returns the tensor of a handle from `store`.
        fetch: Function that begins to load the tensor of a handle from `store`. None: no prefetch.

    Raises:
        TypeError: `resident` is neither a number nor a text.
        ValueError: A number is negative, the text is not a size, or only one of `store` and `load` is set.
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
            raise ValueError(f"only {given} of store, load and fetch is set; set store and load together, or neither")

    @property
    def bytes(self) -> int:
        """Limit for the activations that stay on the device, in bytes."""
        return parse_size(self.resident, name="resident", example="2GB")
