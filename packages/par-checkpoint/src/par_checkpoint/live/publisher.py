"""`Publisher`: the trainer offers its weights to generators, version by version."""

import atexit
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from par_groups import parse_size

from .._agreement import SameOptions
from .._errors import CheckpointError
from .._policies import check_timeout
from ..state.collect import collect
from ..state.quantised import is_float8
from ..state.state import State
from ..transfer.sessions import session_of
from .rendezvous import ABORT, Rendezvous, Transaction, TransactionAborted
from .version import MismatchError, Update, WeightCopy, check_exchange, model_of

_logger = logging.getLogger(__name__)

_IDLE = 0.02  # seconds between two looks for a generator


@dataclass(frozen=True, kw_only=True)
class Publication:
    """A version that generators can take.

    Args:
        version: Number of the version.
        bytes: Bytes of this rank's copy.
        seconds: Duration of `publish` on this rank.
    """

    version: int
    bytes: int
    seconds: float
    _publisher: "Publisher"

    def wait(self, generators: int = 1, timeout: float = 1800.0) -> None:
        """Wait until some generators have all of this version, or of a later one, in their memory. Not collective.

        Args:
            generators: Number of updates that have been committed.
            timeout: Maximum seconds.

        Raises:
            TypeError, ValueError: `generators` is not a number of generators.
            CheckpointError: The time is over, the store is lost, or the publisher is closed.
        """
        self._publisher._wait_for(self.version, generators, timeout)


class Publisher:
    """Weights of a trainer, which it publishes in complete versions. Make it on every rank of the trainer.

    Threads of each rank send the newest version to any generator that asks for it, while the trainer continues. A
    generator gets all of a version or nothing, and one that has died delays no other.

    Args:
        at: Rendezvous of the trainer and the generators. A later publisher takes over from an earlier one.
        state: The model; other members are ignored.
        dtype: Dtype of floating-point tensors in a version; None: each keeps its own.
        group: Ranks of the trainer. Default: all ranks.
        keep: Number of earlier versions kept in host memory, the latest that a generator has taken. A generator that
            has one of them receives changed values only; 0: all values are always sent.
        budget: Memory for messages in each update, such as "256MB".
        timeout: Seconds to wait for a rank or a generator that does not answer.

    Raises:
        ValueError, TypeError: An argument is not valid; on every rank.
        CheckpointError: No store answers; on every rank.
    """

    def __init__(
        self,
        at: Rendezvous,
        state: State,
        *,
        dtype: torch.dtype | None = torch.bfloat16,
        group: dist.ProcessGroup | None = None,
        keep: int = 1,
        budget: str | int = "256MB",
        timeout: float = 60.0,
    ) -> None:
        self._at, self._dtype, self._timeout = at, dtype, timeout
        self._session = session_of(group)
        with self._session.calling("Publisher()", timeout) as session:

            def look() -> tuple[SameOptions, list[int]]:
                check_timeout(timeout)
                check_exchange(at, state)
                self._state = model_of(state)
                # A cast to integers would publish zeros in place of most weights.
                if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                    raise ValueError(f"dtype={dtype!r}: weights need a floating-point dtype; pass bfloat16 or None")
                if dtype is not None and is_float8(dtype):
                    raise ValueError(f"dtype={dtype}: a cast to float8 needs scales; pass bfloat16 or None")
                if not isinstance(keep, int) or isinstance(keep, bool) or keep < 0:
                    raise ValueError(f"keep={keep!r}: not a number of versions; pass 0 or more")
                self._budget = parse_size(budget, name="budget", least=1)
                self._store = at.open()
                same = SameOptions({"name": at.name, "dtype": str(dtype), "keep": keep})
                return same, same.words()

            def register() -> int:
                number: int = self._store.add("publishers", 1)  # this publisher takes over from all before it
                self._store.set(f"{number}/ranks", str(session.ranks.size))
                return number

            same, sums = session.ranks.tell(look, 8)
            same.check(sums, session.ranks)
            self._place = session.ranks.rank, session.ranks.size
            self._number: int = session.ranks.on_first(register)
        self._newest: tuple[int, WeightCopy] | None = None
        self._kept: deque[WeightCopy] = deque(maxlen=keep)  # committed versions before the newest one
        # `Publication.wait` counts generators, and a generator may have skipped to a later version.
        self._commits: dict[int, int] = {}
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="par-checkpoint-publish", daemon=True)
        self._thread.start()
        # A thread in the store's client would abort the process at the end of the interpreter.
        atexit.register(self.close)

    def publish(self, version: int) -> Publication:
        """Copy the weights to host memory, and offer the copy to generators. Collective over the trainer's ranks.

        The trainer may change its weights when the call returns. An older version is not offered any longer.

        Args:
            version: Number of the version, larger than the last one.

        Raises:
            TypeError: `version` is not an integer; on every rank.
            ValueError: `version` is not larger than the last one, or differs between ranks; on every rank.
            CheckpointError: The publisher is closed, the store is lost, or another publisher has taken over; on every
                rank.
        """
        begin = time.perf_counter()
        with self._session.calling(f"publish({version})", self._timeout) as session:

            def check_version() -> None:
                if self._newest is not None and version <= self._newest[0]:
                    raise ValueError(f"version={version}: {self._newest[0]} is published; pass a larger number")

            def copy() -> tuple[tuple[WeightCopy, SameOptions], list[int]]:
                if self._error is not None:
                    raise CheckpointError(f"generators cannot be reached any longer: {self._error}") from self._error
                if self._closing.is_set():
                    raise CheckpointError(
                        "this publisher is closed, so nobody would receive the version; make a new one"
                    )
                # The store has the number as text, and generators read an integer there.
                if not isinstance(version, int) or isinstance(version, bool):
                    raise TypeError(f"version={version!r}: it must be an int; pass one, such as the number of the step")
                check_version()
                # The copy is made on every publish, because the trainer may replace its tensors between two versions.
                content = collect(self._state)
                found = WeightCopy.like(content, self._dtype)
                found.copy_from_(content.entries)
                found.version = self._number, version
                same = SameOptions({"version": version})
                return (found, same), same.words()

            def offer() -> None:
                # Only an answer shows that the store is alive: it may accept a value after its host has died.
                try:
                    with self._changed:
                        if self._newest != (version, held):
                            return  # another thread of a trainer with one process has published a later one
                        latest = self._store.add("publishers", 0)
                        self._store.set("newest", f"{self._number} {version}")
                        offered = self._store.get("newest").decode()
                except dist.DistError as error:
                    raise CheckpointError(f"the store at {self._at.address} is lost; start another one") from error
                if latest != self._number or offered != f"{self._number} {version}":
                    raise CheckpointError(
                        f"another publisher has taken over {self._at.name!r} at {self._at.address}; close this one"
                    )

            (held, same), sums = session.ranks.tell(copy, 8)
            # Ranks with other numbers are at other steps, and the first rank's number would name a mixture of both.
            same.check(sums, session.ranks)
            with self._changed:
                check_version()  # the calls of threads overlap if the trainer has one process
                # A version that no generator has taken can be no base of a later update.
                if self._newest is not None and self._newest[0] in self._commits:
                    self._kept.append(self._newest[1])
                self._newest = version, held
            # The version is offered only after every rank holds its copy, so no generator can ask for a missing part.
            session.ranks.on_first(offer)
        return Publication(version=version, bytes=held.bytes, seconds=time.perf_counter() - begin, _publisher=self)

    def close(self) -> None:
        """End the threads of this rank, after the updates that they send. Generators keep what they have.

        If a generator was killed while it connected or within a message, its update takes up to the timeout to end.

        Once a rank has closed its publisher, no rank begins another update.
        """
        atexit.unregister(self.close)
        try:
            self._store.set(f"{self._number}/closed", "")
        except dist.DistError as error:
            _logger.info("the store at %s is lost, so nobody waits for this rank: %s", self._at.address, error)
        self._closing.set()
        self._thread.join()
        with self._changed:
            self._changed.notify_all()

    def __enter__(self) -> "Publisher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait_for(self, version: int, generators: int, timeout: float) -> None:
        """Wait for committed updates of a version or of later ones."""
        if not isinstance(generators, int) or isinstance(generators, bool):
            raise TypeError(f"generators={generators!r}: not a number of generators; pass an int such as 1")
        if generators < 0:
            raise ValueError(f"generators={generators}: not a number of generators; pass 0 or more")
        check_timeout(timeout)

        def taken() -> int:
            # A later version also serves a caller that waits for this one.
            return sum(count for number, count in self._commits.items() if number >= version)

        def is_closed() -> bool:
            return self._closing.is_set() and not self._thread.is_alive()  # after the last update

        def is_over() -> bool:
            return taken() >= generators or self._error is not None or is_closed()

        with self._changed:
            self._changed.wait_for(is_over, timeout)
            found = taken() >= generators
        if self._error is not None:
            raise CheckpointError(f"generators cannot be reached any longer: {self._error}") from self._error
        if not found and is_closed():
            raise CheckpointError(
                f"this publisher was closed, and fewer than {generators} generators have taken version {version}; call "
                "close() after wait()"
            )
        if not found:
            raise CheckpointError(
                f"timeout={timeout:g}: fewer than {generators} generators have taken version {version}; look at their "
                "logs, or pass a larger timeout"
            )

    def _serve(self) -> None:
        """Send the newest version to each generator that asks, at the same time."""
        number, threads = 1, list[threading.Thread]()
        travelling: dict[int, WeightCopy] = {}  # versions of the updates in progress, by their numbers
        try:
            while not self._closing.is_set() and self._error is None:
                # Generators number their requests by a counter in the store, so the next request has the next number.
                transaction = Transaction(self._store, self._number, number)
                size = transaction.read("generator")
                if size is None:
                    self._closing.wait(_IDLE)
                    continue
                # An update waits for a generator's process that was killed until the timeout. Each update has a thread
                # and a communicator of its own, so that no other generator waits with it.
                threads = [thread for thread in threads if thread.is_alive()]
                threads.append(threading.Thread(target=self._update, args=(transaction, size, travelling), daemon=True))
                threads[-1].start()
                number += 1
        except Exception as error:
            self._fail(error)
        for thread in threads:
            thread.join()

    def _update(self, transaction: Transaction, generator: int, travelling: dict[int, WeightCopy]) -> None:
        """Send the newest version to one generator, and leave."""
        try:
            self._send(transaction, generator, travelling)
            transaction.leave(self._place[1] + generator)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Note that no further update is possible."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def _send(self, transaction: Transaction, generator: int, travelling: dict[int, WeightCopy]) -> None:
        """Take part in one update.

        Args:
            transaction: The attempt.
            generator: Number of the generator's processes.
            travelling: Versions of the updates in progress.
        """
        try:
            # The first rank chooses the version, because ranks publish a new one at slightly different moments.
            newest = self._newest
            if self._place[0] == 0 and newest is not None:
                transaction.announce("version", newest[0])
            version = transaction.wait_for(lambda: transaction.read("version"), self._timeout, "the first rank")

            def at_least() -> tuple[int, WeightCopy] | None:
                newest = self._newest
                return newest if newest is not None and newest[0] >= version else None

            newest = transaction.wait_for(at_least, self._timeout, f"version {version}")
            # This rank has dropped the version already, so the attempt cannot succeed.
            if newest[0] != version:
                raise TransactionAborted("a newer version has replaced it")
        except TransactionAborted as error:
            _logger.info("update %d: %s", transaction.number, error)
            transaction.decide(ABORT)
            return
        update = Update(
            at=self._at,
            rank=self._place[0],
            size=self._place[1] + generator,
            budget=self._budget,
            timeout=self._timeout,
        )
        is_committed = False
        with self._changed:
            # A generator has its version before the thread here knows of it, and may ask for the next one at once.
            bases = (*self._kept, *travelling.values())
            travelling[transaction.number] = newest[1]
        try:
            is_committed = update.run_(transaction, source=newest[1], bases=bases) is not None
        except MismatchError as error:
            _logger.warning("update %d: %s", transaction.number, error)
        finally:
            with self._changed:
                del travelling[transaction.number]
                if is_committed:
                    if version not in self._commits and self._newest != newest:  # replaced while it travelled
                        self._kept.append(newest[1])
                    self._commits[version] = self._commits.get(version, 0) + 1
                    self._changed.notify_all()
