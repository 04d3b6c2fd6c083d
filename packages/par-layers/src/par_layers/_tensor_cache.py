"""Tensors that are computed from hashable values, kept from one call to the next.

A plain dict or `functools.lru_cache` is not enough for tensors. A tensor that is made under a mode of torch belongs to
that mode, and is useless or wrong after it: a fake tensor has no elements, a tensor of inference mode cannot be saved
for backward, a tensor of a functorch transform ends with the transform. So a cache here holds only tensors that are
made outside of such modes. Inference mode is left for the time in which a tensor is made, because evaluations run in
it and are to find the same tensors.
"""

from collections.abc import Callable, Hashable, MutableMapping
from functools import lru_cache, update_wrapper
from typing import Generic, ParamSpec, TypeVar

import torch

from ._torch_private import current_transform, is_of_transform, number_of_dispatch_modes

P = ParamSpec("P")
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


class TensorCache(Generic[P, T]):
    """A function that returns tensors, with a cache of its latest results.

    Args:
        make: Function of hashable arguments that makes the tensors.
        maxsize: Maximum number of cached results.
    """

    def __init__(self, make: Callable[P, T], maxsize: int) -> None:
        def make_for_all(*args: P.args, **keywords: P.kwargs) -> T:
            with torch.inference_mode(mode=False):
                return make(*args, **keywords)

        self._make, self._cached = make, lru_cache(maxsize)(make_for_all)
        update_wrapper(self, make)

    def __call__(self, *args: P.args, **keywords: P.kwargs) -> T:
        """Return the kept result, or what the function makes now."""
        # torch.compile and modes get a result of their own, and neither read nor fill the cache.
        kept: Callable[P, T] = self._cached if makes_plain_tensors() else self._make
        return kept(*args, **keywords)

    def cache_clear(self) -> None:
        """Forget all results."""
        self._cached.cache_clear()


def tensor_cache(maxsize: int) -> Callable[[Callable[P, T]], TensorCache[P, T]]:
    """Return a decorator that keeps the tensors of a function; see `TensorCache`.

    Args:
        maxsize: Maximum number of cached results.
    """
    return lambda make: TensorCache(make, maxsize)


def kept_in(cache: MutableMapping[K, T], key: K, make: Callable[[], T]) -> T:
    """Return the entry of a cache, which is made if it is not there yet; made anew under a mode of torch.

    Args:
        cache: The cache.
        key: The entry.
        make: Makes the entry, which has tensors.
    """
    if not makes_plain_tensors():
        return make()
    if key not in cache:
        with torch.inference_mode(mode=False):
            cache[key] = make()
    return cache[key]


def makes_plain_tensors() -> bool:
    """Return whether a tensor that is made now can be used anywhere later, except that inference mode may be on."""
    if torch.compiler.is_compiling():
        return False
    if not number_of_dispatch_modes() and current_transform() is None:
        return True
    made = torch.empty(0, device="cpu")  # most dispatch modes only watch operations, and their tensors are plain
    return type(made) is torch.Tensor and not is_of_transform(made)
