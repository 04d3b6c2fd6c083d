"""Where the hosts of a pipeline meet after a failure: at the store of the world, since nothing else is sure to work."""

import uuid
from contextlib import suppress
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
        self._said = 0  # how often the ranks have said yes or no since they met
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
        self._held, self._said = self._held + 1, 0

    def who_says_so(self, word: bool, timeout: timedelta | None) -> list[int]:
        """Leaves a yes or no for the other ranks, each of which calls this as often.

        Args:
            word: What this rank says.
            timeout: The longest wait for the others; None waits for nobody.

        Returns:
            The ranks that say yes, ascending; nobody without a wait, or without a store.
        """
        place = f"par_pipeline/{self._name}/{self._held}/word {self._said}"
        keys = [f"{place}/{rank}" for rank in range(self._ranks)]
        self._said += 1
        if self._ranks == 1:
            return [0] if word else []
        try:
            store = default_store()
            store.set(keys[self._rank], "yes" if word else "no")
            if timeout is None:
                return []
            with suppress(RuntimeError):  # some say nothing
                store.wait(keys, timeout)
            return [rank for rank, key in enumerate(keys) if store.check([key]) and store.get(key) == b"yes"]
        except RuntimeError:  # the store is gone with the rank that kept it: what led here is the error to raise
            return []
