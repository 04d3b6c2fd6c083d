"""Copies from, to and on the device."""

from torch import Tensor

from .costs import seconds_of_copy
from .options import NAME
from .state import state


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy a tensor; between pinned memory and the device the host waits only if it is asked to.

    Raises:
        RaceError: Another stream may be using one of the two.
        HostWaitError: The host would wait for the copy, which the test refuses.
    """
    native, costs = state.native, state.rules.costs
    outwards, inwards = source.device.type == NAME, target.device.type == NAME
    if outwards and inwards:
        call = native.open("copy")
        state.use(call, target, write=True).copy_(state.use(call, source, write=False))
        state.close(call, (source.nbytes + target.nbytes) / costs.memory, "compute")
        return target
    host = source if inwards else target
    pinned = native.is_pinned(host)
    call = native.open("copy to the device" if inwards else "copy to the host")
    there = state.use(call, target if inwards else source, write=inwards)
    here = state.use(call, host, write=outwards) if pinned else host.detach()
    (there if inwards else here).copy_(here if inwards else there)
    state.close(call, seconds_of_copy(costs, target.nbytes), "into" if inwards else "out")
    if pinned and non_blocking:
        native.take_flight(call, host, outwards)
        return target
    if non_blocking:  # CUDA copies pageable memory through a buffer of its own, and waits for that
        state.pageable[native.sites()] += 1
    state.wait(call, f"a {call.name} {'that blocks' if pinned else 'of pageable memory'}")
    return target


def copy_and_resize(source: Tensor, target: Tensor) -> Tensor:
    """Copy a tensor into one that takes its shape."""
    target.resize_(source.shape)
    return copy(source, target)
