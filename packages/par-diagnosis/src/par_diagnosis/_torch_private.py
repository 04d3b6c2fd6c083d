"""Private interfaces of torch that par-diagnosis uses: the first file to open for a new release of torch."""

from typing import Any

import torch.distributed as dist


def store_for_thread() -> Any:
    """Return a new connection to the store of the default process group.

    A thread needs its own connection because a blocked call on a shared connection would block the thread, too.
    `distributed_c10d._get_default_store` exists in torch 2.11 to 2.13. `Store.clone` is public, but torch has no public
    function that returns the store of a process group that other code has created.
    """
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]  # torch's stubs lack it
