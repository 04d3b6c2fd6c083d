"""What outlives one call: a group's communicator, its plans, and a save that still runs in the background.

It is kept by process group, weakly: with the group goes its session. A process alone has one.
"""

import weakref
from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING, Protocol, cast

import torch
import torch.distributed as dist

from ._errors import CheckpointError
from .transfer.ranks import Ranks

if TYPE_CHECKING:
    from .plan.prepare import Prepared

_PLANS = 4  # a trainer saves one or two kinds of checkpoints


class Pending(Protocol):
    """A save in the background."""

    def done(self) -> bool:
        """Whether it has ended."""

    def wait(self) -> None:
        """Waits for its end; raises what went wrong."""


class Session:
    """A group's communicator and caches."""

    def __init__(self, group: dist.ProcessGroup | None, timeout: float) -> None:
        self.timeout = timeout
        self.ranks = Ranks(group, timeout)
        self._background: Ranks | None = None
        self._group = (lambda: None) if group is None else weakref.ref(group)  # which must not keep itself alive
        self.pending: Pending | None = None
        self.memory: torch.Tensor | None = None  # of the last copy, used again for the next
        self._plans: OrderedDict[Hashable, Prepared] = OrderedDict()

    @property
    def background(self) -> Ranks:
        """A second communicator, for what runs beside the trainer. Collective the first time."""
        if self._background is None:
            self._background = Ranks(self._group(), self.timeout, private=True)
        return self._background

    def settle(self, how: str) -> None:
        """Deals with a save that still runs: waits for it, or raises. What went wrong in it is raised now.

        Whether it still runs is decided together, for ranks finish at different moments.
        """
        if self.pending is None:
            return
        if how == "raise" and not all(self.ranks.gather(self.pending.done())):
            raise CheckpointError(
                "an earlier save is still being written and pending is 'raise'; wait() for it, save less often, or "
                "pass pending='wait'"
            )
        pending, self.pending = self.pending, None
        pending.wait()

    def plan(self, key: Hashable) -> "Prepared | None":
        """A plan that was made before, if it was."""
        if key in self._plans:
            self._plans.move_to_end(key)
        return self._plans.get(key)

    def keep(self, key: Hashable, plan: "Prepared") -> None:
        """Keeps a plan; the one unused for longest goes."""
        self._plans[key] = plan
        if len(self._plans) > _PLANS:
            self._plans.popitem(last=False)


class _Sessions:
    """All sessions of this process."""

    def __init__(self) -> None:
        self._of_group: weakref.WeakKeyDictionary[dist.ProcessGroup, Session] = weakref.WeakKeyDictionary()
        self._alone: Session | None = None

    def of(self, group: dist.ProcessGroup | None, timeout: float) -> Session:
        """The session of a group, made at its first use or when the timeout changes."""
        session = self._alone if group is None else self._of_group.get(group)
        if session is None or session.timeout != timeout:
            if session is not None:
                session.settle("wait")
            session = Session(group, timeout)
            if group is None:
                self._alone = session
            else:
                self._of_group[group] = session
        return session


_SESSIONS = _Sessions()


def session_of(group: dist.ProcessGroup | None, timeout: float) -> Session:
    """The session of the ranks that take part. Collective over the group the first time.

    Args:
        group: None: the world, if torch.distributed runs, else this process alone.
        timeout: Seconds to wait for a rank that does not answer.

    Raises:
        TypeError: Not a process group.
        ValueError: This rank is not in it.
    """
    if group is None:
        return _SESSIONS.of(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None, timeout)
    if cast("object", group) is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives those outside
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only its members save and load together")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; give a torch.distributed.ProcessGroup, or None for the world")
    return _SESSIONS.of(group, timeout)
