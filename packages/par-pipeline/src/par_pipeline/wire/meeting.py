"""Rendezvous of a pipeline's hosts after a failure. It uses the world's store, because only the store surely works."""

import json
import uuid
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from .._errors import Failure
from .._torch_private import default_store

_TO_ARRIVE = timedelta(seconds=1)  # for a word that a rank wrote before it ended its connections


class Meeting:
    """Repeatable rendezvous of the ranks of a group. The constructor is collective over the group.

    Args:
        group: Ranks of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, group=group, group_src=0)
        self._name, self._held = name[0], 0
        self._said = 0  # how often the ranks have said yes or no since they met
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)

    def meet(self, timeout: timedelta) -> None:
        """Wait until all ranks have joined.

        Args:
            timeout: Timeout for the other ranks.

        Raises:
            ConnectionError: Some ranks do not join within the timeout. This rank may call the method again, for the
                same rendezvous.
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

    def leave_word(self, failure: Failure) -> None:
        """Write why this rank ends its connections, for a rank that finds only that they have ended.

        A message on the connection itself may be lost: it is dropped with the connection if the peer posts its receive
        too late, and a peer that writes to the ended connection first never reads the message.
        """
        with suppress(RuntimeError, ValueError):  # the store or the world is gone: nobody is left to read it
            default_store().set(self._last_word, json.dumps(failure))

    def read_word(self) -> Failure | None:
        """Return a failure that a rank has written since the ranks last met; None if there is none, or no store."""
        try:
            store = default_store()
            # `get` and `check` would wait for a store that hangs as long as its own timeout, which may be hours.
            store.wait([self._last_word], _TO_ARRIVE)
            return Failure(*json.loads(store.get(self._last_word)))
        except (RuntimeError, ValueError):
            return None

    @property
    def _last_word(self) -> str:
        return f"par_pipeline/{self._name}/{self._held}/last word"

    def who_says_so(self, word: bool, timeout: timedelta | None) -> list[int]:
        """Send a yes or no to the other ranks, which must call this method the same number of times.

        Args:
            word: Answer of this rank.
            timeout: Timeout for the answers of the other ranks; None: no wait.

        Returns:
            The ranks that answer yes, ascending; empty without a wait, or without a store.
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
