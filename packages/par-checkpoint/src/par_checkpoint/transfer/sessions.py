"""State that the ranks of a group keep between calls, for all threads of a process that save or load.

Saves of one process alone may overlap: each has memory of its own, and what is kept is behind a lock. In a group of
several ranks, calls run one after the other, because ranks match their messages only by order.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch.distributed as dist

from .._errors import CheckpointError
from .background import BackgroundTask
from .ranks import Ranks
from .roll import Roll

if TYPE_CHECKING:
    from .chunks import Chunks

Value = TypeVar("Value")

_PLANS = 4  # a trainer saves one or two kinds of checkpoints


class Session:
    """State of a group between calls: communicators, plans, memory, and background saves that still run.

    Args:
        group: The ranks; None: this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.timeout = 0.0
        self.size = 1 if group is None else dist.get_world_size(group)
        self._group = (lambda: None) if group is None else weakref.ref(group)  # which must not keep itself alive
        self._roll = None if group is None or self.size == 1 else Roll.of(group)
        self._turn = threading.Lock()  # of the call under way, where there are several ranks
        self._caller: threading.Thread | None = None  # which has it
        self._lock = threading.Lock()  # of what follows, held for a moment
        self._ranks: Ranks | None = None
        self._background: Ranks | None = None
        self._beside: Ranks | None = None
        self._writes: list[BackgroundTask] = []  # in the order in which they began, as the next list
        self._copies: list[BackgroundTask] = []  # to further tiers
        self._memory: Chunks | None = None
        self._exchange: tuple[int, Any] | None = None  # with the limit of its messages
        self._plans: OrderedDict[Hashable, Any] = OrderedDict()

    @contextmanager
    def calling(self, call: str, timeout: float) -> Iterator["Session"]:
        """Begin a call of all ranks inside the context, after the calls of other threads.

        The first call makes the communicator.

        Args:
            call: The call in words, for errors of ranks that wait for others.
            timeout: Seconds that it waits for a rank that does not answer. Running saves keep their own timeout.

        Raises:
            CheckpointError: A call inside a call of the same thread.
        """
        # One process matches no messages, so calls of its threads may overlap.
        if self._roll is None:
            self.timeout = timeout
            self._ranks = self._ranks or Ranks(self._group(), timeout)
            yield self
            return
        # The lock is not reentrant: a call from a signal handler would wait for itself.
        if self._caller is threading.current_thread():
            raise CheckpointError(
                f"{call} was called while {self._roll.call} runs in this thread, as by a signal handler; set a flag in "
                "the handler, and save after the step"
            )
        with self._turn:
            self._caller, self.timeout = threading.current_thread(), timeout
            try:
                self._roll.come(call)
                self._ranks = self._ranks or Ranks(self._group(), timeout, roll=self._roll)
                self._ranks.set_timeout(timeout)
                yield self
            finally:
                self._caller = None

    @property
    def ranks(self) -> Ranks:
        """The communicator of saves and loads."""
        return cast("Ranks", self._ranks)  # made by `calling`

    @property
    def background(self) -> Ranks:
        """A second communicator, for what runs beside the trainer. Collective the first time.

        It waits as long as the call that asks for it; nothing else uses it then.
        """
        if self._background is None:
            self._background = Ranks(self._group(), self.timeout, roll=self._roll, in_background=True)
        self._background.set_timeout(self.timeout)
        return self._background

    @property
    def beside(self) -> Ranks:
        """A third communicator, for copies to further tiers, which no save waits for. Collective the first time.

        It waits as long as the call that first asked for it: an earlier copy may still be using it.
        """
        if self._beside is None:
            self._beside = Ranks(self._group(), self.timeout, roll=self._roll, in_background=True)
        return self._beside

    def begin(self, write: BackgroundTask) -> None:
        """Keep a write that goes on in the background, until the trainer has heard of its outcome.

        It must have started, because calls of other threads may wait for it from now on.
        """
        with self._lock:
            self._writes.append(write)

    def runs(self, task: BackgroundTask) -> bool:
        """Return whether a write was begun and is not settled. Ranks agree, even if it ends earlier on some of them."""
        with self._lock:
            return task in self._writes

    def copies(self, begin: Callable[[BackgroundTask | None], BackgroundTask]) -> None:
        """Begin the copies of a save to further tiers, after those of earlier saves.

        Args:
            begin: Begins them; takes the copies of the save before.
        """
        with self._lock:
            # All copies use one communicator, so each of them begins after the one before it.
            self._copies.append(begin(self._copies[-1] if self._copies else None))

    def settle(self, how: str) -> None:
        """Wait for the writes that still run, or raise because of them. Raise the errors of earlier ones.

        Ranks decide together whether writes still run, because they end at different moments. They also decide together
        whether to raise an error: some ranks may have waited for it before, and others may not. In a process without
        other ranks, each error is left to the thread that has called the save, if that thread still runs.

        Args:
            how: "wait" or "raise".
        """
        self._hear_of_copies()
        with self._lock:
            running = list(self._writes)
        if not running:
            return
        # A write may have ended on some ranks only, so the ranks decide together.
        if how == "raise" and self.ranks.total([sum(not write.done() for write in running)])[0]:
            raise CheckpointError(
                "an earlier save is still being written and pending is 'raise'; wait() for it, save less often, or "
                "pass pending='wait'"
            )
        for write in running:
            write.join()
        mine = [write for write in running if self._is_mine(write)]
        with self._lock:
            self._writes = [write for write in self._writes if write not in mine]
        for write in mine:
            error, heard = write.hear()
            # `Save.wait` may have reported the outcome on some ranks already. All ranks raise, unless it was on every
            # rank.
            if self.ranks.total([int(not heard)])[0]:
                self.ranks.raise_first(error)

    def _is_mine(self, task: BackgroundTask) -> bool:
        """Return whether this call raises the error of a task; all ranks of a group decide identically."""
        return self.size > 1 or task.reports_to(threading.current_thread())

    def _hear_of_copies(self) -> None:
        """Raise on all ranks an error of copies to further tiers, unless all ranks have heard of it.

        It does not wait for copies that are still being made. Ranks agree about which those are.
        """
        with self._lock:
            copies = [task for task in self._copies if self._is_mine(task)]
        if not copies:
            return
        # A task may end between two looks at it, and would then be counted twice or not at all.
        states = [(not task.done(), task.is_unheard()) for task in copies]
        running = [is_running for is_running, _ in states]
        failed = [is_unheard and not is_running for is_running, is_unheard in states]
        sums = self.ranks.total([*map(int, failed), *map(int, running)])
        unheard = [task for task, count in zip(copies, sums[: len(copies)], strict=True) if count]
        ended = [task for task, count in zip(copies, sums[len(copies) :], strict=True) if not count]
        first = unheard[:1]  # one error at a time: the next call raises the next one
        with self._lock:
            # All other tasks stay for the next call, so that every rank still has the same list.
            gone = first or ended
            self._copies = [task for task in self._copies if task not in gone]
        for task in first:
            error, _ = task.hear()
            self.ranks.raise_first(error)

    def take_memory(self) -> "Chunks | None":
        """Return the memory of the last copy, for one save only, until `keep_memory` returns it."""
        with self._lock:
            memory, self._memory = self._memory, None
        return memory

    def keep_memory(self, memory: "Chunks") -> None:
        """Keep memory that nobody uses any longer for the next save in the background."""
        with self._lock:
            self._memory = memory

    def exchange(self, limit: int, make: Callable[[], Value]) -> Value:
        """Return the message buffers of the last move, or make new ones if the limit of a message differs."""
        kept = self._exchange
        if kept is None or kept[0] != limit:
            kept = self._exchange = None  # freed before the new one comes
            kept = self._exchange = limit, make()
        return cast("Value", kept[1])

    def release(self) -> None:
        """Free the memory of the last copy, when it is written, and the message buffers of the last move."""
        with self._lock:
            running, self._exchange = list(self._writes), None
        for write in running:
            write.join()
        memory = self.take_memory()
        if memory is not None:
            memory.release()

    def planned(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the plan with a key; make it if it is missing, and drop the least recently used plan."""
        with self._lock:
            found = self._plans.get(key)
        # The plan is made without the lock, because making it is collective and may take seconds.
        plan = make() if found is None else found
        with self._lock:
            self._plans[key] = plan
            self._plans.move_to_end(key)
            while len(self._plans) > _PLANS:
                self._plans.popitem(last=False)
        return cast("Value", plan)


# The sessions of this process by group, and the one of a process without torch.distributed. They are kept here because
# ProcessGroup takes no attributes, and because all threads must find the same session: two of one group would mix up
# its messages. A session ends with its group. It holds at most four plans, and the memory of one background save and of
# the messages of one move, which `release_memory` frees.
_lock = threading.Lock()
_sessions: weakref.WeakKeyDictionary[dist.ProcessGroup, Session] = weakref.WeakKeyDictionary()
_alone: list[Session] = []  # at most one


def session_of(group: dist.ProcessGroup | None) -> Session:
    """Return the session of the ranks that take part, the same for all threads.

    It is kept by process group, weakly: with the group goes its session.

    Args:
        group: The ranks; None: the world, if torch.distributed runs, else this process alone.

    Raises:
        TypeError: Not a process group.
        ValueError: This rank is not in the group.
    """
    group = _checked_group(group)
    with _lock:
        session = _known(group)
        if session is None:
            session = Session(group)
            if group is None:
                _alone.append(session)
            else:
                _sessions[group] = session
    return session


def release_memory(group: dist.ProcessGroup | None = None) -> None:
    """Free the memory that this rank keeps for the next background save, such as pinned memory, and for `reshard`.

    It is as large as the data that the rank writes in a save, and up to 48 MB of messages. The call waits for a running
    save; the error of that save is still raised by its handle, or by the next save. Not collective. The next save with
    `async_`, or the next move, allocates the memory again.

    Args:
        group: Ranks that save. Default: all ranks, or only this process if torch.distributed is not initialized.

    Raises:
        TypeError: `group` is not a process group.
        ValueError: This rank is not in the group.
    """
    group = _checked_group(group)
    with _lock:
        session = _known(group)
    if session is not None:
        session.release()


def _known(group: dist.ProcessGroup | None) -> Session | None:
    """Return the session of a group from `_checked_group`, if it has one."""
    return next(iter(_alone), None) if group is None else _sessions.get(group)


def _checked_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Return the group, or the world in place of None if torch.distributed runs; raise the errors of `session_of`."""
    if cast("object", group) is dist.GroupMember.NON_GROUP_MEMBER:  # what new_group gives those outside
        raise ValueError(f"rank {dist.get_rank()} is not in the group; only its members save and load together")
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    elif group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group is {group!r}; give a torch.distributed.ProcessGroup, or None for the world")
    return group
