"""Where the hosts of a pipeline meet after a failure: at the store of the world, since nothing else is sure to work."""

import uuid
from datetime import timedelta

import torch.distributed as dist

from .._torch_private import default_store


class Meeting:
    """A place where the ranks of a group wait for one another, again and again. Made by all of them.

    Args:
        group: The ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, group=group, group_src=0)
        self._name, self._held = name[0], 0
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def meet(self, timeout: timedelta) -> None:
        """Waits until all ranks have come.

        Args:
            timeout: The longest wait.

        Raises:
            ConnectionError: Some do not come within the timeout; the meeting still waits for them when this rank comes
                again.
        """
        store = default_store()
        keys = [f"par_pipeline/{self._name}/{self._held}/{rank}" for rank in range(self._ranks)]
        store.set(keys[self._rank], "here")
        try:
            store.wait(keys, timeout)
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise ConnectionError(
                f"ranks {missing} of the pipeline did not come to reset() within {timeout.total_seconds():g} s; "
                "call it on all ranks"
            ) from error
        self._held += 1
