"""`Receiver`: a generator takes the weights that a trainer publishes, and serves complete versions only."""

import atexit
import logging
import threading
import uuid
from collections.abc import Iterator
from itertools import chain

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import increment_version

from par_groups import parse_size, written_

from .._errors import CheckpointError
from .._policies import check_timeout
from ..state.collect import Content, collect
from ..state.overlap import check_separate, regions_of
from ..state.state import State
from ..transfer.sessions import session_of
from .rendezvous import ABORT, Rendezvous, Transaction, TransactionAborted
from .version import Update, WeightCopy, check_exchange, model_of

_logger = logging.getLogger(__name__)

_IDLE = 0.02  # seconds between two looks for a newer version
_QUEUE = 3600.0  # seconds that a generator waits until the trainer has served those before it


class Staged:
    """A complete version in host memory, next to the one that is served.

    Attributes:
        version: Number of the version.
        received: Bytes of tensors that this rank has received for it.
    """

    def __init__(self, receiver: "Receiver", version: int, weights: WeightCopy, received: int) -> None:
        self.version, self.received = version, received
        self._receiver, self._weights = receiver, weights

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and the values of each tensor, under the names that the ranks exchange.

        A tensor has the shape of this rank's box. It is valid until `accept` or `apply`. Do not write to it: a later
        version may bring only the values that changed.
        """
        yield from self._weights.tensors.items()

    def apply(self) -> None:
        """Copy the values into the receiver's state, between two batches. From then on the version is served.

        Raises:
            CheckpointError: The version was applied before, or the model has other tensors now; nothing has changed.
            ValueError: Two tensors of the model share memory; nothing has changed.
        """
        self._receiver._check_staged(self)
        state = self._receiver._state
        content = collect(state)
        regions = (regions_of(entry.name, entry.sharding, entry.local) for entry in content.entries)
        check_separate(chain.from_iterable(regions))
        self._weights.copy_to_(content.entries)
        increment_version([entry.local for entry in content.entries])
        model = state.model
        if isinstance(model, nn.Module):
            written_([*model.parameters(), *model.buffers()])
        self.accept()

    def accept(self) -> None:
        """Mark the version as served by this rank without a copy, after another program has taken `tensors`."""
        self._receiver._accept(self)


class Receiver:
    """Weights of a generator, which it takes from a trainer. Make it on every rank of the generator.

    Generators come and go at any time. A thread of each rank fetches the newest version into host memory; the weights
    that are served change only in `Staged.apply`.

    Args:
        at: Rendezvous of the trainer and the generators.
        state: The model; other members are ignored. With a mapping of tensors, the mapping describes what is fetched.
        group: Ranks of the generator. Default: all ranks.
        budget: Memory for messages in each update, such as "256MB".
        timeout: Seconds to wait for a rank or a trainer that does not answer.

    Attributes:
        version: Number of the version that is served; None before the first one.

    Raises:
        ValueError, TypeError: An argument is not valid; on every rank.
        CheckpointError: No store answers; on every rank.
    """

    def __init__(
        self,
        at: Rendezvous,
        state: State,
        *,
        group: dist.ProcessGroup | None = None,
        budget: str | int = "256MB",
        timeout: float = 60.0,
    ) -> None:
        self.version: int | None = None
        self._at, self._timeout = at, timeout
        self._session = session_of(group)
        with self._session.calling("Receiver()", timeout) as session:

            def look() -> Content:
                check_timeout(timeout)
                check_exchange(at, state)
                self._state = model_of(state)
                self._budget = parse_size(budget, name="budget", least=1)
                self._store = at.open()
                return collect(self._state)

            content = session.ranks.agree(look)
            self._place = session.ranks.rank, session.ranks.size
            self._name: str = session.ranks.broadcast(uuid.uuid4().hex)
        # One copy of the weights in host memory is filled by the thread, and the served weights stay untouched.
        self._memory = WeightCopy.like(content, None)
        self._staged: Staged | None = None
        self._error: Exception | None = None
        self._is_free = threading.Event()  # whether the memory may be filled
        self._is_free.set()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._fetch_all, name="par-checkpoint-receive", daemon=True)
        self._thread.start()
        # A thread in the store's client would abort the process at the end of the interpreter.
        atexit.register(self.close)

    def poll(self) -> Staged | None:
        """Return a newer version if all ranks of the generator have it, else None. Collective over the generator.

        It never waits for the trainer. If the store is lost, the generator keeps what it serves, and `poll` returns
        None.

        Raises:
            CheckpointError: The trainer's weights do not fit, or a rank of the generator has failed; on every rank.
        """
        with self._session.calling("poll()", self._timeout) as session:

            def look() -> tuple[Staged | None, list[int]]:
                if self._error is not None:
                    raise self._error
                return self._staged, [int(self._staged is not None)]

            staged, (ready,) = session.ranks.tell(look, 1)
        # All ranks must apply the version at the same call. A rank that already has it waits for the slowest.
        return staged if ready == self._place[1] else None

    def close(self) -> None:
        """End the thread of this rank, after the update that it may be receiving."""
        atexit.unregister(self.close)
        self._closing.set()
        self._is_free.set()
        self._thread.join()

    def __enter__(self) -> "Receiver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_staged(self, staged: Staged) -> None:
        """Raise CheckpointError if a version was applied before, since its memory may hold a newer one by now."""
        if staged is not self._staged:
            raise CheckpointError(f"version {staged.version} was applied before; call poll() for a newer one")

    def _accept(self, staged: Staged) -> None:
        """Serve a version, and let the thread fetch the next one."""
        self._check_staged(staged)
        self.version, self._staged = staged.version, None
        self._is_free.set()

    def _fetch_all(self) -> None:
        """Fetch one version after the other."""
        fetch = 0
        try:
            while True:
                self._is_free.wait()
                if self._closing.is_set():
                    return
                begun = self._begin(fetch)
                if begun is None:
                    self._closing.wait(_IDLE)
                    continue
                fetch += 1
                fetched = self._fetch(*begun)
                if fetched is not None:
                    version, received = fetched
                    # The next update needs to bring changed values only.
                    self._memory.version = begun[0], version
                    # The memory must not change until the generator has applied the version or loaded its tensors.
                    self._is_free.clear()
                    self._staged = Staged(self, version, self._memory, received)
                    # `close` may have set the event just before it was cleared, and nobody would set it again.
                    if self._closing.is_set():
                        return
        except dist.DistError as error:
            # The store is lost, and the generator serves what it has.
            _logger.warning("no newer weights can arrive: the store at %s is lost (%s)", self._at.address, error)
        except Exception as error:
            self._error = error

    def _begin(self, fetch: int) -> tuple[int, int] | None:
        """Return the publisher and the number of the next update, or None if there is nothing new.

        Args:
            fetch: Number of the update among those of this generator.
        """
        key = f"generator/{self._name}/{fetch}"
        rank, size = self._place
        if rank:  # the first rank decides when all of them fetch
            if not self._store.check([key]):
                return None
            publisher, number = map(int, self._store.get(key).split())
            return publisher, number
        if not self._store.check(["newest"]):
            return None
        publisher, version = map(int, self._store.get("newest").split())
        # A publisher that has taken over may not have published yet; nobody sends the versions of the one before.
        if (publisher, version) == self._memory.version or publisher != self._store.add("publishers", 0):
            return None
        if self._store.check([f"{publisher}/closed"]):
            return None
        # The counter orders the requests of all generators, and the publisher serves them in this order.
        number = self._store.add(f"{publisher}/updates", 1)
        self._store.set(key, f"{publisher} {number}")
        transaction = Transaction(self._store, publisher, number)
        transaction.store.set("origin", key)
        transaction.announce("generator", size)
        return publisher, number

    def _fetch(self, publisher: int, number: int) -> tuple[int, int] | None:
        """Take part in an update, and return the version and the received bytes, or None if it was aborted."""
        transaction = Transaction(self._store, publisher, number)
        ranks, (rank, size) = int(self._store.get(f"{publisher}/ranks")), self._place

        def look() -> int | None:
            if self._closing.is_set():
                raise TransactionAborted("the generator is being closed")
            return transaction.read("version")

        try:
            version = transaction.wait_for(look, _QUEUE, "the trainer")
        except TransactionAborted as error:
            _logger.info("update %d: %s", number, error)
            transaction.decide(ABORT)
            transaction.leave(ranks + size)
            return None
        update = Update(
            at=self._at,
            rank=ranks + rank,
            size=ranks + size,
            budget=self._budget,
            timeout=self._timeout,
        )
        try:
            received = update.run_(transaction, target=self._memory)
        finally:
            transaction.leave(ranks + size)
        return None if received is None else (version, received)
